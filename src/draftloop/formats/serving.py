"""The command lines that serve a target with an exported drafter, in vLLM and in SGLang.

Pure functions over facts: nothing is started or looked up here. Flags are those of vLLM 0.33 and SGLang 0.5.23.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from draftloop.core.errors import InputError
from draftloop.drafter.ngram import NgramSpec
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
    spec: DrafterSpec | NgramSpec,
    probabilistic: bool = False,
    extra: Sequence[str] = (),
) -> list[str]:
    """The command that serves `target` with the drafter in `folder`, as a list of arguments.

    Args:
        engine: who serves.
        target: folder or hub id of the target.
        folder: the exported drafter; not read for a lookup.
        spec: its spec; K = block size - 1 tokens are drafted.
        probabilistic: above temperature 0 drafts are drawn from the drafter's law, not its argmax. That is what a
            drafter trained for overlap is good at. vLLM only: SGLang has no flag for it with DFlash, its
            `--speculative-use-rejection-sampling` being for EAGLE alone.
        extra: more arguments, at the end.

    Returns:
        program and arguments; `shlex.join` makes a shell line of them.
    """
    if engine == "sglang":
        drafting = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(folder)]
        return plain_command(engine, target, [*drafting, *extra])
    config: dict[str, str | int]
    if isinstance(spec, NgramSpec):  # every length is said: vLLM's own default is 5, for both
        config = {"method": "ngram", "num_speculative_tokens": spec.drafted}
        config |= {"prompt_lookup_min": spec.shortest, "prompt_lookup_max": spec.longest}
    else:
        config = {
            "method": writer_of(spec)[0].method,  # always said, for it is otherwise guessed from the path's name
            "model": str(folder),
            "num_speculative_tokens": spec.drafted,
        }
    if probabilistic:
        config["draft_sample_method"] = "probabilistic"
    return plain_command(engine, target, ["--speculative-config", json.dumps(config, separators=(",", ":")), *extra])


def check_served(engine: Engine, form: Form, spec: DrafterSpec | NgramSpec) -> None:
    """Refuse what an engine cannot serve, naming the one that can.

    Raises:
        InputError: SGLang and the speculators form, a learned mask vector, or n-gram lookup.
    """
    if engine != "sglang":
        return
    if isinstance(spec, NgramSpec):
        raise InputError(
            "SGLang's NGRAM is another drafter: it drafts trees from a store that all requests share",
            where="--engine",
            fix="Serve with vLLM, or start SGLang yourself with --speculative-algorithm NGRAM.",
        )
    fix = "Export for vLLM alone (--for vllm)"
    if form == "speculators":
        raise InputError(
            "SGLang does not read the speculators form", where="--form", fix=f"{fix}, or in z-lab's form (--form zlab)."
        )
    if has_learned_mask(spec):
        raise InputError(
            f"the drafter has a learned mask vector, which SGLang writes over the target's own embedding of token"
            f" {spec.mask_token_id}: the target's answers would change",
            where="--for",
            fix=f"{fix}, which keeps the two apart.",
        )


def caveats(engine: Engine, spec: DrafterSpec | NgramSpec, probabilistic: bool) -> list[str]:
    """What somebody who serves should know, as sentences; often none."""
    said = []
    if engine == "sglang" and probabilistic:
        said.append(
            "SGLang drafts the argmax at every temperature, so what training for overlap gained is paid only by vLLM."
        )
    if engine == "vllm" and has_learned_mask(spec):
        said.append(
            "Do not serve this folder with SGLang: it would write the mask vector over the target's embedding of token"
            f" {spec.mask_token_id}."
        )
    return said
