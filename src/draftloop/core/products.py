"""How far products of float32 may be rounded: more while a drafter trains in bfloat16, never in the target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_OUTSIDE: ContextVar[str | None] = ContextVar("outside", default=None)


@contextmanager
def training_products(precision: torch.dtype) -> Iterator[None]:
    """Let products of float32 round their factors to TF32 for a while, where the rest of training is bfloat16 anyway.

    Trained parts of readouts are float32, and as high as the vocabulary: without it their products bound a step on a
    GPU. Draws and losses see the same rounding, for both are made in here. In float32 nothing is rounded.
    """
    before = torch.get_float32_matmul_precision()
    outside = _OUTSIDE.set(before)
    try:
        if precision == torch.bfloat16:
            torch.set_float32_matmul_precision("high")
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        _OUTSIDE.reset(outside)


@contextmanager
def served_products() -> Iterator[None]:
    """Products as they are outside of `training_products`, for a while.

    So what a target computes in float32 (a recurrence, the scores of an indexer) is what it computes when it decodes.
    """
    within, outside = torch.get_float32_matmul_precision(), _OUTSIDE.get()
    if outside is None or outside == within:
        yield
        return
    torch.set_float32_matmul_precision(outside)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(within)
