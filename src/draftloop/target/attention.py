"""Attention families: what a kind of attention needs so that texts and trees are scored exactly.

The one place where a new kind plugs in. A family says which masks a forward takes, which caches hold its past and what
beside masks its layers need; `family` chooses it by the structure of the model, and the probe in `load` then compares
it with the model's own plain forward. Knows no drafter and no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from draftloop.core.tree import Packed, Tree, lowest_seen
from draftloop.target.cache import RowCache, TrunkCache, TrunkState

# bool [b, 1, queries, keys] or a BlockMask of that shape, or one such for each kind of layer (None: it takes none)
Masks = Any

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


class AttentionFamily(Protocol):
    """What `Target` asks of a kind of attention."""

    def new_cache(self, layers: int, capacity: int) -> RowCache:
        """An empty cache for texts of at most `capacity` tokens."""
        ...

    def resume(self, states: list[TrunkState], packed: Packed) -> TrunkCache:
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

    def mixing(self, over: RowCache | TrunkCache | Tree) -> AbstractContextManager[None]:
        """What has to hold while a forward runs, beside masks: for layers that no mask can tell what to see.

        Args:
            over: what is fed: the cache, aimed, or the whole tree where there is none.
        """
        ...

    def takes_numbers(self) -> bool:
        """Whether its layers may be given masks as numbers to add to scores, in the place of boolean ones."""
        ...

    def why_not_flex(self) -> str:
        """Why FlexAttention cannot read its trees, as a clause; empty if it may (its rows are compared then)."""
        ...

    def why_not_fixed(self) -> str:
        """Why it cannot decode with fixed shapes, as a clause; empty if it can."""
        ...

    def kept_as(self) -> Hashable:
        """What the layout of its `TrunkState`s depends on, beside the model."""
        ...


@dataclass(frozen=True)
class SoftmaxAttention:
    """Softmax over all earlier tokens, over the last `sliding_window`, or over those of the same chunk; layer by layer.

    Attributes:
        config: the Hugging Face configuration; `sliding_window` and `attention_chunk_size` are read at each call.
        kinds: what layers there are: `full_attention`, `sliding_attention`, `chunked_attention`.
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

        def within(window: int | None = None, chunk: int | None = None) -> Tensor:
            lowest = lowest_seen(positions, window, chunk)
            if lowest is None:
                return seen
            return seen & (torch.arange(seen.shape[-1], device=seen.device) >= lowest.unsqueeze(-1)).unsqueeze(1)

        return self._masks(within)

    def tree_masks(self, tree: Tree, first: int = 0, flex: bool = False) -> Masks:
        """Counted in logical positions, for slots of a tree do not stand in the order of the text."""
        return self._masks(partial(tree.block_mask if flex else tree.dense_mask, first))

    def mixing(self, over: RowCache | TrunkCache | Tree) -> AbstractContextManager[None]:
        """Masks say it all."""
        return nullcontext()

    def takes_numbers(self) -> bool:
        """Softmax adds them itself."""
        return True

    def why_not_flex(self) -> str:
        """See `AttentionFamily.why_not_flex`: nothing; what a model does beside its mask is compared, not told."""
        return ""

    def why_not_fixed(self) -> str:
        """See `AttentionFamily.why_not_fixed`."""
        return ""

    def kept_as(self) -> Hashable:
        """Keys and values are laid out in one way."""
        return None

    def _masks(self, made_by: Callable[..., Any]) -> Masks:
        masks = self._by_kind(made_by)
        # models with layers of one kind take a mask, not a dictionary
        return masks if len(masks) > 1 else masks.popitem()[1]

    def _by_kind(self, made_by: Callable[..., Any]) -> dict[str, Any]:
        """The mask of each kind of layer, made by a function of how far back it sees (`window`, `chunk`)."""
        reach: dict[str, dict[str, int]] = {
            FULL: {},
            SLIDING: {"window": getattr(self.config, "sliding_window", 0)},
            CHUNKED: {"chunk": getattr(self.config, "attention_chunk_size", 0)},
        }
        return {kind: made_by(**reach[kind]) for kind in self.kinds}


@contextmanager
def narrowed(config: Any, window: int) -> Iterator[None]:
    """Let the model's windows and chunks hold `window` tokens for a while, so that a short text tells what they do."""
    told = {name: getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")}
    true = {name: size for name, size in told.items() if isinstance(size, int)}
    for name, size in true.items():
        setattr(config, name, min(window, size))
    try:
        yield
    finally:
        for name, size in true.items():
            setattr(config, name, size)
