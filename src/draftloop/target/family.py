"""Which attention family a model is of, told by its structure, never by its name; an unknown kind is refused.

Knows the families, no drafter and no loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from draftloop.core.errors import InputError
from draftloop.target.attention import CHUNKED, FULL, SLIDING, AttentionFamily, SoftmaxAttention
from draftloop.target.hybrid import LINEAR, HybridAttention, mixers_of
from draftloop.target.indexed import INDEXED, IndexedAttention, indexers_of, ngrams_of

_MISSING = {
    LINEAR: "a recurrent state for every branch of layers that are not Gated DeltaNet",
    **dict.fromkeys(INDEXED, "key groups that do not mix branches, for indexers that are not QSA"),
    "mamba": "a recurrent state for every branch",
}


def family_of(base: nn.Module, config: Any, name: str) -> AttentionFamily:
    """The family of a model, by its structure.

    Raises:
        InputError: it has layers of a kind that would be scored wrongly.
    """
    told = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    kinds = frozenset(told or [FULL])
    if not told and isinstance(window, int) and _window_acts(base, config):
        kinds = frozenset([SLIDING])
    linear, indexed = ([i for i, one in enumerate(told or []) if one in kind] for kind in ({LINEAR}, INDEXED))
    mixers, indexers = mixers_of(base, linear) or (), indexers_of(base, indexed) or ()
    ours = ({LINEAR} if mixers else set()) | (INDEXED if indexers else set())
    unknown = sorted(kinds - {FULL, SLIDING, CHUNKED} - ours)
    if unknown:
        lacking = [_MISSING[kind] for kind in unknown if kind in _MISSING]
        raise InputError(
            f"the model has layers of kind {unknown}, which we cannot score yet"
            + (f": we lack {' and '.join(dict.fromkeys(lacking))}" if lacking else ""),
            where=name,
            fix="Use a target with full, sliding-window, chunked, Gated DeltaNet or QSA layers.",
        )
    for kind, size, layers in (
        (SLIDING, "sliding_window", "sliding-window"),
        (CHUNKED, "attention_chunk_size", "chunked"),
    ):
        given = getattr(config, size, None)
        if kind in kinds and not (isinstance(given, int) and given > 0):
            raise InputError(
                f"the model has {layers} layers, but its configuration names no `{size}`",
                where=name,
                fix="Complete its config.json.",
            )
    if getattr(config, "attn_temperature_tuning", False) and not all(getattr(config, "no_rope_layers", None) or [1]):
        raise InputError(
            "some layers scale queries by their slot (`attn_temperature_tuning`), and slots of a tree are no positions",
            where=name,
            fix="Use a target whose layers know positions by their position ids.",
        )
    ngrams = ngrams_of(base)
    if indexers or ngrams:
        plain = kinds - {LINEAR} - INDEXED or frozenset([FULL])
        return IndexedAttention(config, plain, mixers, indexers=indexers, ngrams=ngrams)
    if mixers:
        return HybridAttention(config, kinds - {LINEAR} or frozenset([FULL]), mixers)
    return SoftmaxAttention(config, kinds)


@torch.no_grad()
def _window_acts(base: nn.Module, config: Any) -> bool:
    """Whether the `sliding_window` of a model that names no kinds of layers is more than a word in its config."""
    ids = torch.arange(7, device=next(base.parameters()).device).unsqueeze(0)

    true, rows = config.sliding_window, []
    try:
        for config.sliding_window in (1, 1 << 20):
            rows.append(base(input_ids=ids, use_cache=False).last_hidden_state)
    except Exception:  # the model's own code; the probe will say what is wrong with it
        return True
    finally:
        config.sliding_window = true
    return not torch.equal(*rows)
