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

    def span(self, anchor: Tensor) -> int:
        """How many positions drafting from these anchors (int64 [rows]) has to read."""
        return int(anchor.max())

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


class FixedDraftCache(DraftCache):
    """A context cache whose tensors keep their size and place, whoever occupies a row.

    Args:
        shape: (rows, kv heads, capacity, d).
        layers: of the drafter.
        like: a tensor of the drafter's type and device.
    """

    def __init__(self, shape: tuple[int, int, int, int], layers: int, like: Tensor) -> None:
        super().__init__(layers, shape[2])
        self._row = torch.arange(shape[0], device=like.device).unsqueeze(1)
        for store in (self._keys, self._values):
            store[:] = [like.new_zeros(shape) for _ in range(layers)]

    def write(self, layer: int, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """As `DraftCache.write`; in place also where it is compiled."""
        for store, new in ((self._keys, key), (self._values, value)):
            store[layer][self._row, :, positions] = new.transpose(1, 2)  # type: ignore[index]

    def span(self, anchor: Tensor) -> int:
        """All positions: the mask tells which count, and the device is not asked."""
        return self.capacity

    def admit(self, rows: Tensor, prompts: DraftCache, width: int) -> None:
        """Let new texts into `rows` (int64 [m]): the first `width` positions of what `prompts` holds of its m texts."""
        for mine, theirs in ((self._keys, prompts._keys), (self._values, prompts._values)):
            for kept, new in zip(mine, theirs, strict=True):
                assert kept is not None
                assert new is not None
                kept[rows, :, :width] = new[:, :, :width].to(kept.dtype)
                kept[rows, :, width:] = 0  # of the last text: weighed with nothing, an infinity makes no number
