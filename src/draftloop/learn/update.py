"""One update of the drafter: scored blocks -> rows -> loss -> gradient -> optimiser.

The one trainer step of every method. Denominators are global over the micro-batches of a step, so accumulation gives
exactly the loss of one big batch. Knows neither where blocks come from nor how long a run lasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftloop.core.law import Readout
from draftloop.objective.rows import Kind, row_values
from draftloop.objective.terms import SplitCounts, denominators, loss, split_counts, terms
from draftloop.recipe import ObjectivePart
from draftloop.supervise.batch import Scored


@dataclass(frozen=True)
class Learnt:
    """What one update did.

    Attributes:
        loss: value of the objective over the whole step.
        terms: mean of each term over its own group.
        labels: supervised positions.
        splits: what verification had made of the positions, one entry a micro-batch.
    """

    loss: float
    terms: dict[str, float]
    labels: int
    splits: tuple[SplitCounts, ...]


def differentiate(
    objective: ObjectivePart, batches: Sequence[Scored], drafter: Any, readout: Readout, precision: torch.dtype
) -> Learnt:
    """Leave the gradient of one step in the drafter's parameters.

    Args:
        objective: what is minimised.
        batches: the micro-batches of this step.
        drafter: in float32.
        readout: the target's, which the teacher rows are read with.
        precision: compute type; bfloat16 runs the drafter under autocast.
    """
    asked = [terms(objective, batch.blocks) for batch in batches]
    totals = denominators(asked)
    value, numerators, labels = 0.0, dict.fromkeys((term.name for term in asked[0]), 0.0), 0
    for batch, wanted in zip(batches, asked, strict=True):
        with _autocast(drafter, precision):
            hidden = batch.drafted_rows(drafter).flatten(0, 1)
        part, sums = loss(wanted, totals, _Rows(objective, batch, hidden, drafter.readout, readout))
        part.backward()
        value += float(part.detach())
        labels += int(torch.stack([term.weight != 0 for term in wanted]).any(0).sum())
        for name, number in sums.items():
            numerators[name] += number
    means = {term.name: numerators[term.name] / (totals[term.group] or 1.0) for term in asked[0]}
    return Learnt(value, means, labels, tuple(split_counts(batch.blocks) for batch in batches))


@dataclass(frozen=True)
class _Rows:
    """Row values of one micro-batch, for `objective.terms.loss`."""

    objective: ObjectivePart
    batch: Scored
    hidden: Tensor
    student: Readout
    target: Readout

    def __call__(self, kind: Kind, index: Tensor) -> Tensor:
        teacher = self.batch.teacher
        return row_values(
            kind,
            self.hidden[index],
            self.student,
            teacher=teacher.flatten(0, 1)[index] if teacher is not None and kind != "ce" else None,
            teacher_readout=self.target,
            labels=self.batch.labels.flatten()[index] if kind == "ce" else None,
            temperature=self.objective.temperature,
            chunk=self.objective.chunk,
        )


def _autocast(drafter: Any, precision: torch.dtype) -> AbstractContextManager[Any]:
    if precision == torch.float32:
        return nullcontext()
    return torch.autocast(drafter.readout.weight.device.type, dtype=precision)
