"""The model card of an export: what it is, for whom, how it was trained, how to serve it.

Knows Markdown and the facts it is handed.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from draftloop.core.version import VERSION
from draftloop.drafter.dflash2 import DFlash2Spec
from draftloop.drafter.dspark import DSparkSpec
from draftloop.drafter.eagle3 import Eagle3Spec
from draftloop.drafter.families import FAMILIES
from draftloop.drafter.spec import DFlashSpec, DrafterSpec
from draftloop.formats.history import History
from draftloop.formats.serving import TITLES, Engine, Form

_FORMS: dict[Form, str] = {
    "zlab": "z-lab's form",
    "deepspec": "DeepSpec's form (Qwen3DSparkModel)",
    "eagle3": "LlamaForCausalLMEagle3, as both engines load it",
    "speculators": "speculators' form",
    "mtp": "tensors named as in the target's own checkpoint",
}
_CLASSES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}  # by which engines know the form of z-lab


def model_card(
    spec: DrafterSpec,
    *,
    name: str,
    target: str,
    form: Form,
    dtype: str,
    parameters: int,
    commands: Mapping[Engine, Sequence[str]],
    notes: Sequence[str],
    history: History | None,
) -> str:
    """Write the README.md of an export.

    Args:
        spec: of the drafter.
        name: the heading.
        target: folder or hub id of the target.
        form: of the checkpoint.
        dtype: of the stored weights.
        parameters: how many.
        commands: the serve command by engine.
        notes: sentences that somebody who serves should read.
        history: how it was trained; None where that is not known.
    """
    lines = [
        *_front_matter(target, spec.family),
        f"# {name}",
        "",
        f"{_article(FAMILIES[spec.family].title)} drafter for `{target}`: a small model that drafts {spec.drafted}"
        " tokens at a time for speculative decoding. The target verifies every one of them, so what is answered is the"
        " target's answer. It is of no use without that target, and of little with another.",
        "",
        "| | |",
        "|---|---|",
        f"| Target | `{target}` ({spec.num_target_layers} layers, vocabulary {spec.vocab_size}) |",
        f"| Block | {spec.block_size} slots, the last token's included; {spec.drafted} tokens are drafted |",
        f"| Target layers read | {_read(spec)} |",
        *_mask(spec),
        *_heads(spec),
        *_selector(spec),
        *_vocabulary(spec),
        f"| Layers | {spec.layers} |",
        f"| Parameters | {parameters:,} ({dtype}), without {_borrowed(spec)}: the target's are used |",
        f"| Form | {_FORMS[form]}{f' ({_CLASSES[spec.family]})' if form == 'zlab' else ''} |",
        f"| Made by | draftloop {VERSION} |",
        "",
        "## Serve it",
        "",
    ]
    for engine, command in commands.items():
        lines += [f"{TITLES[engine]}:", "", "```bash", shlex.join(command), "```", ""]
    lines += [f"- {note}" for note in ("If this folder or the target moves, change the paths.", *notes)]
    lines += [""]
    lines += _training(history)
    lines += [
        "## Licence",
        "",
        "Not stated yet. The target's licence and those of the training prompts bear on it: fill this in before you"
        " publish.",
        "",
    ]
    return "\n".join(lines)


def _read(spec: DrafterSpec) -> str:
    if spec.target_layers == (spec.num_target_layers,):
        return "all: the hidden row after the final norm"
    return f"{', '.join(str(layer) for layer in spec.target_layers)} (0-based, the output of each)"


def _front_matter(target: str, family: str) -> list[str]:
    hub_id = target.count("/") == 1 and not target.startswith((".", "/", "~")) and not Path(target).exists()
    base = [f"base_model: {json.dumps(target)}"] if hub_id else []
    return ["---", *base, "library_name: draftloop", "tags:", "- speculative-decoding", f"- {family}", "---", ""]


def _training(history: History | None) -> list[str]:
    lines = ["## How it was trained", ""]
    if history is None:
        return [*lines, "Not known: it was exported without its run.", ""]
    lines += ["| Stage | Method | Objective | Steps | Supervised positions |", "|---|---|---|---|---|"]
    lines += [f"| {s.name} | {s.method} | {s.objective} | {s.steps} | {s.labels:,} |" for s in history.stages]
    lines += [
        "",
        f"Delivered: {history.delivered}. Trained on {history.hardware}, by:",
        "",
        "```bash",
        history.command,
        "```",
        "",
        f"tau, tokens committed per verification by the target, greedy, on held-out prompts: {history.tau:.2f}"
        f" ({_interval(history.interval, '95 % interval ')}).",
        "",
    ]
    if history.sets:
        lines += ["| Test set | tau | 95 % interval |", "|---|---|---|"]
        lines += [f"| {name} | {tau:.2f} | {_interval(interval)} |" for name, (tau, interval) in history.sets.items()]
        lines += [""]
    return lines


def _interval(found: tuple[float, float] | None, named: str = "") -> str:
    return "one response" if found is None else f"{named}{found[0]:.2f} to {found[1]:.2f}"


def _mask(spec: DrafterSpec) -> list[str]:
    if not isinstance(spec, DFlashSpec):
        return []
    learned = f"a learned vector (mask_embedding.pt; token {spec.mask_token_id} stands in for it)"
    return [f"| Drafted slots hold | {learned if spec.learned_mask else f'token {spec.mask_token_id}'} |"]


def _vocabulary(spec: DrafterSpec) -> list[str]:
    if not isinstance(spec, Eagle3Spec) or not spec.reduced:
        return []
    return [f"| Drafts | {spec.draft_vocab:,} of the target's {spec.vocab_size:,} tokens |"]


def _borrowed(spec: DrafterSpec) -> str:
    own = isinstance(spec, Eagle3Spec) and spec.draft_vocab is not None
    return "embedding" if own else "embedding and readout"


def _heads(spec: DrafterSpec) -> list[str]:
    if not isinstance(spec, DSparkSpec):
        return []
    markov = "none" if spec.markov == "none" else f"{spec.markov}, rank {spec.markov_rank}"
    return [f"| Markov head | {markov} |", f"| Confidence head | {'yes' if spec.confidence else 'no'} |"]


def _selector(spec: DrafterSpec) -> list[str]:
    if not isinstance(spec, DFlash2Spec):
        return []
    return [
        f"| Selector | {spec.selector_top_k} candidates a token, rank {spec.selector_rank} |",
        f"| Convolutions | {spec.conv_kernel_size} taps, groups of {spec.conv_group_size} channels |",
    ]


def _article(title: str) -> str:
    return f"{'An' if title[0] in 'AEIOU' else 'A'} {title}"
