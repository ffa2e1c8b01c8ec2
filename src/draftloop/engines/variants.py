"""Counterfactuals: a drafter with exactly one fact of its checkpoint changed.

Each is a mistake that an export, a loader or an engine can make in silence, because every shape still fits. What they
do to acceptance is `diagnose`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftloop.core.errors import InputError
from draftloop.core.law import Readout
from draftloop.core.weights import read_tensors
from draftloop.drafter.build import for_decoding
from draftloop.drafter.dflash import DFlash, Turn
from draftloop.drafter.mtp import Feeds, MTPSpec
from draftloop.drafter.spec import DFlashSpec, check_fits, choose_mask_token
from draftloop.formats import zlab_config
from draftloop.formats.load import load_drafter

_CONFIG = "config.json"
_SHARED = ("lm_head.weight", "embed_tokens.weight")


@dataclass(frozen=True)
class Variant:
    """One counterfactual.

    Attributes:
        name: a few words that say what was changed.
        fix: what to do if it is the cause.
        make: builds the changed drafter.
        of_engine: no checkpoint can say so; only an engine can do so.
    """

    name: str
    fix: str
    make: Callable[[], Any]
    of_engine: bool = False


@dataclass(frozen=True)
class Read:
    """A checkpoint taken at its word, as an engine would take it.

    Attributes:
        drafter: bound; drafts with its own head, causally, ... where the checkpoint says so.
        head: the checkpoint's own readout weight [V, H], or None.
        causal: what the checkpoint says.
    """

    drafter: Any
    head: Tensor | None
    causal: bool


class FirstKeyNorm(DFlash):
    """Norms the context's keys of every layer by layer 0's weights, as engines do whose fused kernel takes one row."""

    def _context_kv(self, layer: nn.Module, context: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        attention: Any = layer.self_attn
        first: Any = self.layers[0].self_attn
        own, attention.k_norm = attention.k_norm, first.k_norm
        try:
            return super()._context_kv(layer, context, turn)
        finally:
            attention.k_norm = own


def read_as_is(folder: Path, target: Any) -> Read:
    """Read a checkpoint without the refusals of `load_drafter`: the question is what its facts do.

    Args:
        folder: DFlash in z-lab's or speculators' form; refused by `load_drafter` for a causal flag or a head of its
            own, it is read all the same.
        target: a `Target`.

    Raises:
        InputError: it cannot be read at all.
    """
    config = zlab_config.read_config(folder / _CONFIG)
    nested = config.get("dflash_config")
    causal = config.get("is_causal")
    if causal is None and isinstance(nested, dict):
        causal = nested.get("causal")
    tensors = {
        name.removeprefix("model."): tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in read_tensors(file).items()
    }
    shared = {name: tensors.pop(name) for name in _SHARED if name in tensors}
    if not causal and not shared:
        drafter = load_drafter(folder, target)
        return Read(for_decoding(drafter, target), None, False)
    cleaned = {key: value for key, value in config.items() if key != "is_causal"}
    if isinstance(nested, dict):
        cleaned["dflash_config"] = {key: value for key, value in nested.items() if key != "causal"}
    spec = zlab_config.spec_of(cleaned, folder / _CONFIG, num_target_layers=target.num_layers)
    check_fits(spec, target, str(folder))
    plain = DFlash(spec)
    try:
        plain.load_state_dict(tensors)
    except RuntimeError as error:
        first = str(error).splitlines()[-1].strip()
        raise InputError(f"its tensors are not those of a DFlash drafter ({first})", where=str(folder)) from error
    drafter = for_decoding(plain.bind(target.embed, target.readout), target)
    drafter.causal = bool(causal)
    head = shared.get("lm_head.weight")
    if head is not None:
        head = head.to(target.device, target.dtype)
        drafter.bind(target.embed, Readout(head))
    return Read(drafter, head, bool(causal))


def variants(read: Read, target: Any) -> Iterator[Variant]:
    """Every counterfactual that makes sense for a checkpoint.

    Args:
        read: the checkpoint.
        target: a `Target`.
    """
    if isinstance(read.drafter.spec, MTPSpec):
        yield from _ways(read.drafter, target)
        return
    spec: DFlashSpec = read.drafter.spec
    for by in (-1, 1):
        layers = tuple(layer + by for layer in spec.target_layers)
        if layers[0] >= 0 and layers[-1] < target.num_layers:
            yield Variant(
                f"target layers {by:+d}",
                f"Write target_layer_ids {list(layers)}: the output of that layer, counted from 0.",
                _with(read, target, target_layers=layers),
            )
    rope = getattr(target.config, "rope_parameters", None) or {}
    own = float(rope.get("rope_theta") or getattr(target.config, "rope_theta", None) or 10000.0)
    for theta in sorted({own, 1e4, 1e6} - {spec.rope_theta}):
        whose = ", the target's" if theta == own else ""
        yield Variant(
            f"rope_theta {theta:g}{whose}", f"Write rope_theta {theta:g}.", _with(read, target, rope_theta=theta)
        )
    if not spec.learned_mask:
        for token in _masks(spec, target):
            yield Variant(
                f"mask token {token}", f"Write mask_token_id {token}.", _with(read, target, mask_token_id=token)
            )
    word = "causal" if not read.causal else "bidirectional"
    yield Variant(
        f"{word} blocks",
        f"Write is_causal {str(not read.causal).lower()}.",
        _with(read, target, causal=not read.causal),
    )
    if read.head is not None:
        yield Variant("the target's head", "Leave lm_head.weight out of the file.", _with(read, target, head=None))
    length = len(target.tokenizer) if target.tokenizer is not None else target.vocab_size
    if length < target.vocab_size:
        yield Variant(
            f"no drafts beyond token {length - 1}",
            f"The readout's rows from {length} on are padding: mask them.",
            _with(read, target, head=_unpadded(target.readout, length)),
        )
    norms = [layer.self_attn.k_norm.weight for layer in read.drafter.layers]
    if any(not torch.equal(norms[0], other) for other in norms[1:]):
        yield Variant(
            "layer 0's key norm in every layer's context",
            "The engine's kernel takes one row of the stacked key norms (vLLM on CPU): serve on another device or"
            " version.",
            _with(read, target, first_norm=True),
            of_engine=True,
        )


def _ways(drafter: Any, target: Any) -> Iterator[Variant]:
    """The other ways in which engines compute a multi-token-prediction head: facts of theirs, not of its checkpoint."""
    spec: MTPSpec = drafter.spec
    rows = "before" if spec.feeds == "normed" else "after"
    first = "with" if spec.blank_first else "without"
    other: Feeds = "raw" if spec.feeds == "normed" else "normed"
    handed, left = f"rows handed on {rows} the head's norm", f"the first position {first} its embedding"
    for name, feeds, blank in (
        (handed, other, spec.blank_first),
        (left, spec.feeds, not spec.blank_first),
        (f"{handed} and {left}", other, not spec.blank_first),
    ):

        def make(feeds: Feeds = feeds, blank: bool = blank) -> Any:
            twin = for_decoding(drafter, target)
            twin.spec = replace(spec, feeds=feeds, blank_first=blank)
            return twin

        yield Variant(name, "Train it with drafter.served_by: vllm.", make, of_engine=True)


def _masks(spec: DFlashSpec, target: Any) -> list[int]:
    """Tokens that may have been meant: those that we would choose, usual suspects, neighbours."""
    tokenizer = target.tokenizer
    meant: list[int | None] = [spec.mask_token_id - 1, spec.mask_token_id + 1, 0]
    if tokenizer is not None:
        chosen = choose_mask_token(
            tokenizer, None, target.vocab_size, set(target.eos_ids), lambda ids: target.embed(ids.to(target.device))
        )
        meant += [chosen, tokenizer.pad_token_id, tokenizer.unk_token_id, getattr(tokenizer, "mask_token_id", None)]
    fine = (token for token in meant if token is not None and 0 <= token < target.vocab_size)
    return sorted(set(fine) - {spec.mask_token_id})


_AS_IS = object()


def _with(
    read: Read, target: Any, *, causal: bool | None = None, head: Any = _AS_IS, first_norm: bool = False, **changes: Any
) -> Callable[[], Any]:
    """A builder of the checkpoint's drafter with one thing changed."""

    def make() -> Any:
        spec = replace(read.drafter.spec, **changes)
        with torch.device("meta"):
            twin = (FirstKeyNorm if first_norm else DFlash)(spec)
        twin.load_state_dict(read.drafter.state_dict(), assign=True)
        twin.causal = read.causal if causal is None else causal
        readout = read.drafter.readout if head is _AS_IS else target.readout
        if isinstance(head, Readout):
            readout = head
        return twin.eval().requires_grad_(False).bind(target.embed, readout)

    return make


def _unpadded(readout: Readout, length: int) -> Readout:
    """The readout without the rows behind the tokenizer's last token."""
    bias = None if readout.bias is None else readout.bias[:length]
    support = torch.arange(length, device=readout.weight.device)
    return replace(
        readout, weight=readout.weight[:length], bias=bias, support=support, vocab_size=readout.weight.shape[0]
    )
