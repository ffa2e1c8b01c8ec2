"""Which attention family a model is of, told by its structure, never by its name; an unknown kind is refused.

Knows the families, no drafter and no loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from draftloop.core.errors import InputError
from draftloop.target.attention import FULL, SLIDING, AttentionFamily, SoftmaxAttention
from draftloop.target.hybrid import LINEAR, HybridAttention, mixers_of

_MISSING = {
    LINEAR: "a recurrent state for every branch of layers that are not Gated DeltaNet",
    "chunked_attention": "masks that end at chunk borders",
    "indexed_attention": "key groups that do not mix branches",
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
    linear = [i for i, kind in enumerate(told or []) if kind == LINEAR]
    mixers = mixers_of(base, linear) if linear else ()
    unknown = sorted(kinds - {FULL, SLIDING} - ({LINEAR} if mixers else set()))
    if unknown:
        lacking = [_MISSING[kind] for kind in unknown if kind in _MISSING]
        raise InputError(
            f"the model has layers of kind {unknown}, which we cannot score yet"
            + (f": we lack {' and '.join(dict.fromkeys(lacking))}" if lacking else ""),
            where=name,
            fix="Use a target with full, sliding-window or Gated DeltaNet layers.",
        )
    if SLIDING in kinds and not (isinstance(window, int) and window > 0):
        raise InputError(
            "the model has sliding-window layers, but its configuration names no `sliding_window`",
            where=name,
            fix="Complete its config.json.",
        )
    if mixers:
        return HybridAttention(config, kinds - {LINEAR}, mixers)
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
