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
from draftloop.drafter.eagle3 import Eagle3Spec
from draftloop.drafter.mtp import MTPSpec, computed_by
from draftloop.drafter.ngram import NgramSpec
from draftloop.drafter.spec import DrafterSpec, has_learned_mask
from draftloop.formats.mtp_names import SCHEMES, depth_key
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
        spec: its spec; K tokens are drafted.
        probabilistic: above temperature 0 drafts are drawn from the drafter's law, not its argmax. That is what a
            drafter trained for overlap is good at. SGLang has a flag for it with EAGLE-3 alone.
        extra: more arguments, at the end.

    Returns:
        program and arguments; `shlex.join` makes a shell line of them.
    """
    if engine == "sglang":
        where = ["--speculative-draft-model-path", str(folder)]
        if isinstance(spec, Eagle3Spec | MTPSpec):
            chain = ["--speculative-num-steps", str(spec.drafted), "--speculative-eagle-topk", "1"]
            chain += ["--speculative-num-draft-tokens", str(spec.drafted + 1)]  # the anchor's counted
            chain += ["--speculative-use-rejection-sampling"] if probabilistic else []
            how = ["EAGLE3", *where] if isinstance(spec, Eagle3Spec) else ["NEXTN"]
            return plain_command(engine, target, ["--speculative-algorithm", *how, *chain, *extra])
        assert not isinstance(spec, NgramSpec)  # `check_served` refuses it
        method = writer_of(spec)[0].method.upper()
        return plain_command(engine, target, ["--speculative-algorithm", method, *where, *extra])
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
    if isinstance(spec, MTPSpec):
        del config["model"]  # the head stands in the target's own folder: see `caveats`
    if probabilistic:
        config["draft_sample_method"] = "probabilistic"
    return plain_command(engine, target, ["--speculative-config", json.dumps(config, separators=(",", ":")), *extra])


def check_served(engine: Engine, form: Form, spec: DrafterSpec | NgramSpec) -> None:
    """Refuse what an engine cannot serve, naming the one that can.

    Raises:
        InputError: SGLang and the speculators form, a learned mask vector, or n-gram lookup; a DSpark drafter with a
            learned mask vector or without a Markov head; vLLM and a Markov head that is not vanilla; a class of target
            that no engine reads a multi-token-prediction head of.
    """
    if isinstance(spec, DSparkSpec):
        _check_dspark(engine, spec)
    if isinstance(spec, MTPSpec) and spec.kind not in SCHEMES:
        raise InputError(
            f"no engine reads a multi-token-prediction head beside a {spec.kind}",
            where="--for",
            fix=f"Engines read heads of {', '.join(SCHEMES)}; for this target train eagle3 or dflash.",
        )
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
        other = next(name for name in writer_of(spec)[0].configs if name != form)
        raise InputError(
            "SGLang does not read the speculators form", where="--form", fix=f"{fix}, or with --form {other}."
        )
    if isinstance(spec, Eagle3Spec) and (spec.norm_before_residual or len(spec.target_layers) != 3):
        raise InputError(
            "SGLang reads EAGLE-3 drafters of three target layers and raw states only",
            where="--for",
            fix=f"{fix}, or train one of that kind.",
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


def caveats(engine: Engine, spec: DrafterSpec | NgramSpec, probabilistic: bool, form: Form = "") -> list[str]:
    """What somebody who serves should know, as sentences; often none."""
    said = _beside_target(engine, spec) if isinstance(spec, MTPSpec) else []
    if engine == "sglang" and probabilistic and not isinstance(spec, NgramSpec) and spec.family == "dflash":
        said.append(  # 0.5.23's dflash_worker_v2.py; DSpark's drafts and DFlash 2's selector are drawn there
            "SGLang drafts DFlash's argmax at every temperature, so what training for overlap gained is paid only by"
            " vLLM."
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


def _beside_target(engine: Engine, spec: MTPSpec) -> list[str]:
    """How a head gets to where the engine looks for it."""
    said = [
        f"{TITLES[engine]} reads the head out of the target's folder: copy model.safetensors there as mtp.safetensors,"
        " and where that folder has a model.safetensors.index.json, let its weight_map name these tensors with"
        f" that file. The target's config.json needs {depth_key(spec.kind)}: 1. Shards that hold an earlier head of"
        " these names must be rewritten without it: engines read whole files."
    ]
    theirs = computed_by(spec, engine)
    unlike = []
    if theirs.blank_first != spec.blank_first:
        unlike.append(f"{'leaves out' if theirs.blank_first else 'uses'} the embedding at the first position of a text")
    if theirs.feeds != spec.feeds:
        unlike.append(f"hands on rows {'before' if theirs.feeds == 'raw' else 'after'} the head's norm")
    if unlike:
        said.append(
            f"{TITLES[engine]} {' and '.join(unlike)}, other than the head was trained for, and may accept fewer"
            f" drafts: train it with drafter.served_by: {engine}."
        )
    return said
