"""Attention families: what a kind of attention needs so that texts and trees are scored exactly.

The one place where a new kind plugs in. A family says which masks a forward takes and which caches hold its past; it is
chosen by the structure of the model, and the probe in `load` then compares it with the model's own plain forward. Knows
no drafter and no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from draftloop.core.errors import InputError
from draftloop.core.tree import Packed, Tree
from draftloop.target.cache import RowCache, TrunkCache, TrunkState

# bool [b, 1, queries, keys] or a BlockMask of that shape, or one such mask for each kind of layer
Masks = Any

FULL, SLIDING = "full_attention", "sliding_attention"


class AttentionFamily(Protocol):
    """What `Target` asks of a kind of attention."""

    def new_cache(self, layers: int, capacity: int) -> RowCache:
        """An empty cache for texts of at most `capacity` tokens."""
        ...

    def resume(self, states: list[TrunkState], packed: Packed) -> Cache:
        """A cache of finished trunks under which the branches of `packed` are fed."""
        ...

    def text_masks(self, seen: Tensor, positions: Tensor) -> Masks:
        """Masks of tokens fed through a `RowCache`.

        Args:
            seen: bool [b, 1, t, span], slot = logical position: what is at or before the query.
            positions: int64 [b, t] of the queries.
        """
        ...

    def tree_masks(self, tree: Tree, first: int = 0, flex: bool = False) -> Masks:
        """Masks of the slots from `first` on, over all slots of the tree; dense ones, or BlockMasks."""
        ...


@dataclass(frozen=True)
class SoftmaxAttention:
    """Softmax over all earlier tokens, or over the last `sliding_window` of them, or some layers so and some so.

    Attributes:
        config: the Hugging Face configuration; its `sliding_window` is read at each call.
        kinds: what layers there are, `full_attention` and `sliding_attention`.
    """

    config: Any
    kinds: frozenset[str]

    def new_cache(self, layers: int, capacity: int) -> RowCache:
        """Every position is kept: what lies outside a window is masked, not dropped."""
        return RowCache(layers, capacity)

    def resume(self, states: list[TrunkState], packed: Packed) -> TrunkCache:
        """Keys and values are all that branches need."""
        return TrunkCache(states, packed)

    def text_masks(self, seen: Tensor, positions: Tensor) -> Masks:
        """See `AttentionFamily.text_masks`."""

        def within(window: int | None) -> Tensor:
            if window is None:
                return seen
            slots = torch.arange(seen.shape[-1], device=seen.device)
            return seen & (positions.unsqueeze(-1) - slots < window).unsqueeze(1)

        return self._by_kind(within)

    def tree_masks(self, tree: Tree, first: int = 0, flex: bool = False) -> Masks:
        """Windows are counted in logical positions, for slots of a tree do not stand in the order of the text."""
        return self._by_kind(partial(tree.block_mask if flex else tree.dense_mask, first))

    def _by_kind(self, mask: Callable[[int | None], Any]) -> Masks:
        made = {kind: mask(self.config.sliding_window if kind == SLIDING else None) for kind in self.kinds}
        # models with layers of one kind take a mask, not a dictionary
        return made if len(made) > 1 else made.popitem()[1]


_MISSING = {
    "linear_attention": "a recurrent state for every branch",
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
    unknown = sorted(kinds - {FULL, SLIDING})
    if unknown:
        lacking = [_MISSING[kind] for kind in unknown if kind in _MISSING]
        raise InputError(
            f"the model has layers of kind {unknown}, which we cannot score yet"
            + (f": we lack {' and '.join(dict.fromkeys(lacking))}" if lacking else ""),
            where=name,
            fix="Use a target with full or sliding-window attention.",
        )
    if SLIDING in kinds and not (isinstance(window, int) and window > 0):
        raise InputError(
            "the model has sliding-window layers, but its configuration names no `sliding_window`",
            where=name,
            fix="Complete its config.json.",
        )
    return SoftmaxAttention(config, kinds)


@contextmanager
def narrowed(config: Any, window: int) -> Iterator[None]:
    """Let the model slide over `window` tokens for a while, so that a short text tells what its windows do."""
    true = getattr(config, "sliding_window", None)
    if not isinstance(true, int):
        yield
        return
    config.sliding_window = min(window, true)
    try:
        yield
    finally:
        config.sliding_window = true


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
