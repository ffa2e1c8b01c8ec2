"""The draft that a batch is trained on: every anchor of every trunk in one packed pass, with its graph.

Anchors stand in a padded grid [b, M], for a drafter reads whole trunks; blocks are its N real cells.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from draftloop.drafter.draft import Draft


def packed_draft(
    drafter: Any, features: Tensor, anchor: Tensor, text: Tensor, cells: tuple[Tensor, Tensor], precision: torch.dtype
) -> Draft:
    """The draft of N blocks, in the compute type of training; bfloat16 runs under autocast, weights stay float32.

    Args:
        drafter: bound.
        features: [b, S, F * H], zero-padded.
        anchor: int64 [b, M], padded with 0.
        text: int64 [b, T], the trunks' tokens, zero-padded.
        cells: int64 [N] each: row and column of each block in the grid.
        precision: compute type.
    """
    with _computing(features.device, precision):
        draft: Draft = drafter.pack(features, anchor, text)
    return draft.at(cells) or _Cells(draft, anchor, cells, precision)


class _Cells(Draft):
    """The real cells of a draft that is stepped."""

    def __init__(self, grid: Draft, anchor: Tensor, cells: tuple[Tensor, Tensor], precision: torch.dtype) -> None:
        self._grid, self._cells, self._precision, self.drafted = grid, cells, precision, grid.drafted
        self._empty = torch.zeros_like(anchor)

    def step(self, slot: int, previous: Tensor | None) -> Tensor:
        """Rows [N, W] given int64 [N]."""
        spread = None if previous is None else self._empty.index_put(self._cells, previous)
        with _computing(self._empty.device, self._precision):
            return self._grid.step(slot, spread)[self._cells]

    def forced(self, tokens: Tensor) -> Tensor:
        """Rows [N, K, W] given int64 [N, K]; as fast as the grid knows how."""
        spread = self._empty.unsqueeze(-1).repeat(1, 1, self.drafted).index_put(self._cells, tokens)
        with _computing(self._empty.device, self._precision):
            return self._grid.forced(spread)[self._cells]


def _computing(device: torch.device, precision: torch.dtype) -> AbstractContextManager[Any]:
    return nullcontext() if precision == torch.float32 else torch.autocast(device.type, dtype=precision)
