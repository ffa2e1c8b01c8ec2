"""The command lines that serve a target with an exported drafter, in vLLM and in SGLang.

Pure functions over facts: nothing is started or looked up here. Flags are those of vLLM 0.33 and SGLang 0.5.23.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from draftloop.core.errors import InputError
from draftloop.drafter.dspark import DSparkSpec
from draftloop.drafter.spec import DrafterSpec, has_learned_mask
from draftloop.formats.writers import writer_of

Engine = Literal["vllm", "sglang"]
Form = str  # of those that a family has: `writers.WRITERS`
ENGINES: tuple[Engine, ...] = ("vllm", "sglang")
TITLES: dict[Engine, str] = {"vllm": "vLLM", "sglang": "SGLang"}
OVERLAP_OBJECTIVES = frozenset({"overlap", "tv", "nla", "e2e_tv"})  # they train for drafts that are drawn from q


def plain_command(engine: Engine, target: str, extra: Sequence[str] = ()) -> list[str]:
    """The command that serves `target` alone, as a list of arguments, more of them at the end."""
    if engine == "sglang":
        return ["python", "-m", "sglang.launch_server", "--model-path", target, *extra]
    return ["vllm", "serve", target, *extra]


def serve_command(
    engine: Engine,
    target: str,
    folder: Path,
    spec: DrafterSpec,
    probabilistic: bool = False,
    extra: Sequence[str] = (),
) -> list[str]:
    """The command that serves `target` with the drafter in `folder`, as a list of arguments.

    Args:
        engine: who serves.
        target: folder or hub id of the target.
        folder: the exported drafter.
        spec: its spec; K tokens are drafted.
        probabilistic: above temperature 0 drafts are drawn from the drafter's law, not its argmax. That is what a
            drafter trained for overlap is good at. vLLM only: SGLang has no flag for it with DFlash, its
            `--speculative-use-rejection-sampling` being for EAGLE alone.
        extra: more arguments, at the end.

    Returns:
        program and arguments; `shlex.join` makes a shell line of them.
    """
    if engine == "sglang":
        method = writer_of(spec)[0].method.upper()
        drafting = ["--speculative-algorithm", method, "--speculative-draft-model-path", str(folder)]
        return plain_command(engine, target, [*drafting, *extra])
    config: dict[str, str | int] = {
        "method": writer_of(spec)[0].method,  # always said, for it is otherwise guessed from the path's name
        "model": str(folder),
        "num_speculative_tokens": spec.drafted,
    }
    if probabilistic:
        config["draft_sample_method"] = "probabilistic"
    return plain_command(engine, target, ["--speculative-config", json.dumps(config, separators=(",", ":")), *extra])


def check_served(engine: Engine, form: Form, spec: DrafterSpec) -> None:
    """Refuse what an engine cannot serve, naming the one that can.

    Raises:
        InputError: SGLang and the speculators form, or SGLang and a learned mask vector; a DSpark drafter with a
            learned mask vector or without a Markov head; vLLM and a Markov head that is not vanilla.
    """
    if isinstance(spec, DSparkSpec):
        _check_dspark(engine, spec)
    if engine != "sglang":
        return
    fix = "Export for vLLM alone (--for vllm)"
    if form == "speculators":
        other = next(name for name in writer_of(spec)[0].configs if name != form)
        raise InputError(
            "SGLang does not read the speculators form", where="--form", fix=f"{fix}, or with --form {other}."
        )
    if has_learned_mask(spec):
        raise InputError(
            f"the drafter has a learned mask vector, which SGLang writes over the target's own embedding of token"
            f" {spec.mask_token_id}: the target's answers would change",
            where="--for",
            fix=f"{fix}, which keeps the two apart.",
        )


def _check_dspark(engine: Engine, spec: DSparkSpec) -> None:
    """What the engines' DSpark lacks, as of the versions above."""
    if has_learned_mask(spec):
        raise InputError(
            f"the drafter has a learned mask vector, which {TITLES[engine]} does not read beside DSpark's heads",
            where="--for",
            fix="Train it with drafter.mask_token set to a token.",
        )
    if spec.markov == "none":
        raise InputError(
            f"the drafter has no Markov head, and {TITLES[engine]} serves DSpark with one only",
            where="--for",
            fix="Train it with drafter.markov: vanilla.",
        )
    if engine == "vllm" and spec.markov != "vanilla":
        raise InputError(
            f"vLLM computes a vanilla Markov head whatever config.json says, and this one is {spec.markov}",
            where="--for",
            fix="Export for SGLang alone (--for sglang), or train it with drafter.markov: vanilla.",
        )


def caveats(engine: Engine, spec: DrafterSpec, probabilistic: bool, form: Form = "") -> list[str]:
    """What somebody who serves should know, as sentences; often none."""
    said = []
    if engine == "sglang" and probabilistic:
        said.append(
            "SGLang drafts the argmax at every temperature, so what training for overlap gained is paid only by vLLM."
        )
    if engine == "vllm" and isinstance(spec, DSparkSpec) and spec.confidence:
        said.append(
            'With "enable_adaptive_verification": true in --speculative-config, vLLM goes by the confidence head and'
            " verifies fewer drafts."
        )
    if engine == "vllm" and form == "speculators" and isinstance(spec, DSparkSpec):
        said.append(
            "A vLLM that does not read sample_from_anchor in this form drafts shifted by one, and next to nothing is"
            " accepted; the form deepspec has no such trap."
        )
    if engine == "vllm" and has_learned_mask(spec):
        said.append(
            "Do not serve this folder with SGLang: it would write the mask vector over the target's embedding of token"
            f" {spec.mask_token_id}."
        )
    return said
