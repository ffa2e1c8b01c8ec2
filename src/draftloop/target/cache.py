"""A key/value cache whose rows advance at their own pace.

Slot = logical position, in every row: feeding a position again overwrites it, so rejected drafts need no cropping; the
mask alone decides what is visible. The model above it is Hugging Face's, unmodified.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class _RowLayer(CacheLayerMixin):
    """Keys and values of one decoder layer, [rows, kv heads, capacity, head dim], written at `owner.slots`."""

    is_sliding = False

    def __init__(self, owner: RowCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, heads, _, width = key_states.shape
        self.keys = key_states.new_zeros(rows, heads, self.owner.capacity, width)
        self.values = value_states.new_zeros(rows, value_states.shape[1], self.owner.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new states at the owner's slots; return everything up to its span."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        at = self.owner.slots[:, None, :, None]
        self.keys.scatter_(2, at.expand_as(key_states), key_states)
        self.values.scatter_(2, at.expand_as(value_states), value_states)
        return self.keys[:, :, : self.owner.span], self.values[:, :, : self.owner.span]

    def get_seq_length(self, *args: Any) -> int:
        return self.owner.span

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        return self.owner.span, 0

    def get_max_length(self) -> int:
        return self.owner.capacity

    get_max_cache_shape = get_max_length  # its name before transformers 5.24


class RowCache(Cache):
    """The cache of a batch: `rows` texts of at most `capacity` tokens each.

    Attributes:
        slots: int64 [rows, t], where the running forward writes (set by `aim`).
        span: slots [0, span) are shown to attention.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.span = 0
        self.slots = torch.empty(0, 0, dtype=torch.int64)
        super().__init__(layers=[_RowLayer(self) for _ in range(layers)])

    def aim(self, positions: Tensor) -> Tensor:
        """Say which positions the next forward feeds.

        Args:
            positions: int64 [rows, t].

        Returns:
            bool [rows, 1, t, span]: slot j is visible to a query at position >= j.
        """
        self.slots = positions
        self.span = max(self.span, int(positions.max()) + 1)
        assert self.span <= self.capacity, "the cache is too small for these positions"
        seen = torch.arange(self.span, device=positions.device)
        return (seen <= positions.unsqueeze(-1)).unsqueeze(1)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows (int64 [m]), in this order."""
        for layer in self.layers:
            if not layer.is_initialized:
                continue
            layer.keys = layer.keys.index_select(0, rows)
            layer.values = layer.values.index_select(0, rows)
