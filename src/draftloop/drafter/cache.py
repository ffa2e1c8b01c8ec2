"""The drafter's context: keys and values of target features, slot = position, each row at its own pace."""

from __future__ import annotations

import torch
from torch import Tensor


class DraftCache:
    """Context keys and values of every drafter layer, [rows, kv heads, capacity, d] each."""

    def __init__(self, layers: int, capacity: int) -> None:
        self.capacity = capacity
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers

    def write(self, layer: int, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """Put keys and values [rows, kv heads, t, d] at int64 [rows, t]."""
        at = positions[:, None, :, None]
        for store, new in ((self._keys, key), (self._values, value)):
            if store[layer] is None:
                store[layer] = new.new_zeros(new.shape[0], new.shape[1], self.capacity, new.shape[3])
            store[layer].scatter_(2, at.expand_as(new), new)  # type: ignore[union-attr]

    def read(self, layer: int, span: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions [0, span)."""
        key, value = self._keys[layer], self._values[layer]
        assert key is not None, "extend the cache before drafting"
        assert value is not None
        return key[:, :, :span], value[:, :, :span]

    def select(self, rows: Tensor) -> None:
        """Keep only these rows (int64 [m]), in this order."""
        for store in (self._keys, self._values):
            store[:] = [None if t is None else torch.index_select(t, 0, rows) for t in store]
