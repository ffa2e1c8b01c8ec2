"""What is asked about rows: which value, of which laws; checked once, answered by `rows.py` or by `fused.py`.

Knows laws (hidden rows + readout); does NOT know how a value is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from draftloop.core.errors import DraftloopError
from draftloop.core.law import Readout

Kind = Literal["ce", "forward_kl", "reverse_kl", "overlap", "nla"]


@dataclass(frozen=True)
class Question:
    """Values of n rows; see `rows.row_values` for the meaning of each kind.

    Attributes:
        kind: which value.
        readout: of the drafter's rows.
        teacher: [n, H_t] the target's hidden rows; None for `ce`.
        teacher_readout: of the target's rows, over the whole vocabulary.
        labels: int64 [n]. For `ce` rows of `readout`; beside an overlap target ids.
        temperature: of p and q; 0 = p is the point mass on its argmax, and q stays at 1.
        beside: [2, n], to be filled with log p and log q of the labels; or None.
    """

    kind: Kind
    readout: Readout
    teacher: Tensor | None
    teacher_readout: Readout
    labels: Tensor | None
    temperature: float
    beside: Tensor | None = None

    @property
    def exact(self) -> torch.dtype:
        """Type of the values: float32, or float64 where the drafter's readout is."""
        return torch.float64 if self.readout.weight.dtype == torch.float64 else torch.float32

    @property
    def heads(self) -> list[Readout]:
        """The readouts that are read."""
        return [self.readout] if self.kind == "ce" else [self.readout, self.teacher_readout]


def ask(
    kind: Kind,
    student: Tensor,
    readout: Readout,
    teacher: Tensor | None,
    teacher_readout: Readout | None,
    labels: Tensor | None,
    temperature: float,
) -> Question:
    """A checked question about `student` [n, H]; labels of `ce` become rows of a reduced vocabulary.

    Raises:
        DraftloopError: our own misuse (a missing input, rows that do not match, a label outside the support,
            temperature 0 with another kind than `overlap` and `ce`).
    """
    teacher_readout = teacher_readout or readout
    if temperature == 0 and kind not in ("ce", "overlap"):
        raise DraftloopError(f"{kind} has no temperature 0", where="row_values")
    given = labels if kind == "ce" else teacher
    if given is None:
        raise DraftloopError(f"{kind} needs {'labels' if kind == 'ce' else 'teacher rows'}", where="row_values")
    if given.shape[0] != student.shape[0]:
        raise DraftloopError(
            f"{student.shape[0]} drafter rows but {given.shape[0]} to compare with", where="row_values"
        )
    if kind != "ce" and (teacher_readout.support is not None or teacher_readout.candidates):
        raise DraftloopError("the target's law must cover the whole vocabulary", where="row_values")
    if kind == "ce" and labels is not None and readout.support is not None:
        labels = _labels_in_support(labels, readout)
    return Question(kind, readout, teacher, teacher_readout, labels, temperature)


def places(tokens: Tensor, readout: Readout) -> Tensor:
    """Target ids -> rows of the reduced vocabulary, -1 outside; int64 [n]."""
    assert readout.support is not None
    assert readout.vocab_size is not None
    place = torch.full((readout.vocab_size,), -1, dtype=torch.int64, device=tokens.device)
    place[readout.support] = torch.arange(readout.support.shape[0], device=tokens.device)
    return place[tokens]


def _labels_in_support(labels: Tensor, readout: Readout) -> Tensor:
    labels = places(labels, readout)
    if bool((labels < 0).any()):
        raise DraftloopError(
            "a label is outside the drafter's reduced vocabulary", where="ce", fix="Give such rows weight 0."
        )
    return labels
