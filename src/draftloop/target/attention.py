"""Attention families: what a kind of attention needs so that texts and trees are scored exactly.

The one place where a new kind plugs in. A family says which masks a forward takes, which caches hold its past and what
beside masks its layers need; `family` chooses it by the structure of the model, and the probe in `load` then compares
it with the model's own plain forward. Knows no drafter and no loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from draftloop.core.tree import Packed, Tree
from draftloop.target.cache import RowCache, TrunkCache, TrunkState

# bool [b, 1, queries, keys], or one such mask for each kind of layer (None where a kind takes none)
Masks = Tensor | dict[str, Tensor | None]

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

    def tree_masks(self, tree: Tree, first: int = 0) -> Masks:
        """Masks of the slots from `first` on, over all slots of the tree."""
        ...

    def mixing(self, over: RowCache | TrunkCache | Tree) -> AbstractContextManager[None]:
        """What has to hold while a forward runs, beside masks: for layers that no mask can tell what to see.

        Args:
            over: what is fed: the cache, aimed, or the whole tree where there is none.
        """
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
        return self._by_kind(seen, positions, torch.arange(seen.shape[-1], device=seen.device))

    def tree_masks(self, tree: Tree, first: int = 0) -> Masks:
        """Counted in logical positions, for slots of a tree do not stand in the order of the text."""
        return self._by_kind(tree.dense_mask(first), tree.position[:, first:], tree.position.unsqueeze(1))

    def mixing(self, over: RowCache | TrunkCache | Tree) -> AbstractContextManager[None]:
        """Masks say it all."""
        return nullcontext()

    def _by_kind(self, seen: Tensor, query: Tensor, key: Tensor) -> Masks:
        """Masks from what is at or before each query, and the logical positions of queries [b, t] and of keys."""
        query = query.unsqueeze(-1)
        masks: dict[str, Tensor | None] = {FULL: seen}
        if SLIDING in self.kinds:
            masks[SLIDING] = seen & (query - key < self.config.sliding_window).unsqueeze(1)
        if CHUNKED in self.kinds:
            size = self.config.attention_chunk_size
            masks[CHUNKED] = seen & (query // size == key // size).unsqueeze(1)
        if len(self.kinds) > 1:
            return masks
        return masks[next(iter(self.kinds))]  # type: ignore[return-value]  # of one kind: a mask, no dictionary


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
