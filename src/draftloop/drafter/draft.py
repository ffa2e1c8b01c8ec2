"""A draft under way: the drafter's rows of slot after slot, each given the tokens drafted before it.

What every family has in common and decoding, supervision and evaluation ask for. A parallel drafter (DFlash) knows all
its rows at once, for they read no drafted token; any other is stepped, or told all tokens at once (`forced`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftloop.core.law import Law, Readout, Sampling

Choose = Callable[[Tensor, slice], tuple[Tensor, Tensor]]  # rows [..., m, W] of m slots -> tokens, log q [..., m]


class Draft(ABC):
    """K slots of each of many blocks, of any leading shape [...]; W is the width of the readout's rows.

    Attributes:
        drafted: K.
    """

    drafted: int

    @abstractmethod
    def step(self, slot: int, previous: Tensor | None) -> Tensor:
        """Rows [..., W] of slot 0..K-1; slots are asked for in order, and slot 0 begins anew.

        Args:
            slot: which.
            previous: int64 [...], the tokens of the slot before; None at slot 0, which follows the anchor.
        """

    def forced(self, tokens: Tensor) -> Tensor:
        """Rows [..., K, W] given drafted tokens int64 [..., K], of which the last is not read."""
        return torch.stack(
            [self.step(k, tokens[..., k - 1] if k else None) for k in range(self.drafted)], tokens.dim() - 1
        )

    def drawn(self, choose: Choose) -> tuple[Tensor, Tensor, Tensor]:
        """Draft every slot from its own law.

        Args:
            choose: draws tokens from detached rows.

        Returns:
            tokens int64 [..., K], their log-probabilities [..., K], rows [..., K, W] with their graph.
        """
        tokens: list[Tensor] = []
        scores, rows = [], []
        for k in range(self.drafted):
            rows.append(self.step(k, tokens[-1] if tokens else None))
            with torch.no_grad():
                token, score = choose(rows[-1].detach().unsqueeze(-2), slice(k, k + 1))
            tokens.append(token.squeeze(-1))
            scores.append(score.squeeze(-1))
        return torch.stack(tokens, -1), torch.stack(scores, -1), torch.stack(rows, -2)

    def law(self, rows: Tensor, slots: slice, readout: Readout, sampling: Sampling, only: Any = ...) -> Law:
        """The law of rows of some slots of n blocks, with what the draft knows of it already.

        Args:
            rows: [n, m, W].
            slots: which m.
            readout: of the rows.
            sampling: how tokens are drawn.
            only: an index of the n blocks, where it is to be theirs alone.

        Returns:
            laws of [n' * m] rows.
        """
        return Law(rows[only].flatten(0, 1), readout, sampling)

    def at(self, cells: tuple[Tensor, ...]) -> Draft | None:
        """The draft of these blocks alone (indices of the leading axes); None where it has to be asked as a whole."""
        return None


class ParallelDraft(Draft):
    """Rows that read no drafted token.

    Args:
        rows: [..., K, W].
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.drafted = rows, rows.shape[-2]

    def step(self, slot: int, previous: Tensor | None) -> Tensor:
        """The rows of a slot, whatever came before."""
        return self.rows[..., slot, :]

    def forced(self, tokens: Tensor) -> Tensor:
        """All rows, whatever the tokens."""
        return self.rows

    def drawn(self, choose: Choose) -> tuple[Tensor, Tensor, Tensor]:
        """All slots at once."""
        with torch.no_grad():
            tokens, scores = choose(self.rows.detach(), slice(0, self.drafted))
        return tokens, scores, self.rows

    def at(self, cells: tuple[Tensor, ...]) -> ParallelDraft:
        """The rows of these blocks."""
        return ParallelDraft(self.rows[cells])


def has_confidence(drafter: Any) -> bool:
    """Whether it tells how likely its drafts are to be accepted: `confidence(rows, anchor, tokens) -> logits`."""
    return bool(getattr(drafter.spec, "confidence", False))


class ParallelDrafter:
    """What a parallel drafter offers besides its two forwards, `begin` from a cache and the packed call."""

    def draft(self: Any, cache: Any, anchor: Tensor, tokens: Tensor) -> Draft:
        """Draft one block a row from cached context.

        Args:
            cache: holds the features of every position below the anchors.
            anchor: int64 [b].
            tokens: int64 [b], the token at each anchor.
        """
        return ParallelDraft(self.begin(cache, anchor, tokens))

    def pack(self: Any, features: Tensor, anchor: Tensor, text: Tensor) -> Draft:
        """Draft from many anchors of many texts at once.

        Args:
            features: [b, S, F * H] tapped target features; an anchor sees those below it.
            anchor: int64 [b, N], at most S; padding may hold any position.
            text: int64 [b, T], T > the last anchor: the tokens of the texts.

        Returns:
            a draft of [b, N] blocks.
        """
        return ParallelDraft(self(features, anchor, text.gather(1, anchor)))
