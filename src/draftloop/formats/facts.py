"""What a checkpoint's config.json says besides the shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Facts:
    """What a config.json says besides the shape.

    Attributes:
        dtype: of the stored weights.
        weights: SHA-256 of the weight file, which ties the two files together.
        mask: likewise of the learned mask vector's file; None without one.
        extra: the caller's own facts, kept under `draftloop.extra`.
        target: folder or hub id of the target, for forms that name it.
        target_architectures: of the target's own config.json; may be empty.
    """

    dtype: torch.dtype
    weights: str
    mask: str | None = None
    extra: dict[str, Any] | None = None
    target: str = ""
    target_architectures: Sequence[str] = ()

    @property
    def kind(self) -> str:
        """The type's name, `bfloat16`."""
        return str(self.dtype).removeprefix("torch.")
