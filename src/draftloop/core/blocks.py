"""Blocks: which positions of which trunk a drafter is trained on, and what became of them under verification.

The common currency of supervision and objectives. Knows no model. Position k = 1..K is column k-1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """N blocks of K drafted positions over the trunks of one batch.

    Attributes:
        row: int64 [N], which trunk of the batch.
        anchor: int64 [N], position of the last committed token before the block; position k is anchor + k.
        tokens: int64 [N, K], the proposed tokens (`trunk` proposals: the trunk's own next tokens); 0 where not valid.
        valid: bool [N, K], positions that exist; the loss reads nothing else.
        accepted: bool [N, K], valid positions that verification accepted (`trunk` proposals: all valid ones).
        log_q: float32 [N, K] log-probability each token was drawn with, or None where nothing was drawn.
    """

    row: Tensor
    anchor: Tensor
    tokens: Tensor
    valid: Tensor
    accepted: Tensor
    log_q: Tensor | None = None

    @property
    def first_rejected(self) -> Tensor:
        """Bool [N, K]: the first valid position that was not accepted (the correction token's slot)."""
        rejected = self.valid & ~self.accepted
        return rejected & (rejected.cumsum(-1) == 1)

    @property
    def position(self) -> Tensor:
        """int64 [1, K]: k = 1..K, counted from the block's start."""
        return torch.arange(1, self.tokens.shape[1] + 1, device=self.tokens.device).unsqueeze(0)
