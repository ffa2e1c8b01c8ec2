"""One update of the drafter: scored blocks -> rows -> loss -> gradient -> optimiser.

The one trainer step of every method. Denominators are global over the micro-batches of a step and the processes that
learn together, so all of them give exactly the loss of one big batch. Knows neither where blocks come from nor how long
a run lasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftloop.core.blocks import Blocks
from draftloop.core.errors import InputError
from draftloop.core.law import Readout
from draftloop.core.ranks import Ranks, added
from draftloop.drafter.draft import has_confidence
from draftloop.objective.rows import Overlap, overlap_rows, row_values
from draftloop.objective.terms import Asked, SplitCounts, Term, denominators, loss, split_counts, terms
from draftloop.recipe import ObjectivePart
from draftloop.supervise.batch import Scored


@dataclass(frozen=True)
class Learnt:
    """What one update did.

    Attributes:
        loss: value of the objective over the whole step.
        terms: mean of each term over its own group.
        labels: supervised positions.
        splits: what verification had made of the positions, one entry a micro-batch (and process).
        overlaps: [N, K] overlap rows of the proposed tokens, detached, one entry a micro-batch of this process; none
            where the objective reads no overlaps.
    """

    loss: float
    terms: dict[str, float]
    labels: int
    splits: tuple[SplitCounts, ...]
    overlaps: tuple[Overlap, ...] = ()


def differentiate(
    objective: ObjectivePart,
    batches: Sequence[Scored],
    drafter: Any,
    readout: Readout,
    precision: torch.dtype,
    ranks: Ranks | None = None,
) -> Learnt:
    """Leave the gradient of one step in the drafter's parameters.

    Args:
        objective: what is minimised.
        batches: the micro-batches of this step; with several processes their shares, and maybe none here.
        drafter: in float32; one with a confidence head learns it too, as `confidence_weight` says.
        readout: the target's, which the teacher rows are read with.
        precision: compute type; bfloat16 runs the drafter under autocast.
        ranks: the processes that learn together; all get the whole gradient, and the account of the whole step.
    """
    ranks = ranks or Ranks()
    confidence = confidence_weight(objective, drafter)
    asked = [_terms(objective, batch, _sayable(batch.labels, drafter.readout), confidence) for batch in batches]
    totals = ranks.sum(denominators(asked))
    overlaps: list[Overlap] = []
    listed = asked[0] if asked else []  # nothing, where no lesson of this step fell to this process
    # of each micro-batch its loss, how many labels and the numerators: on the device until the end
    found: list[Tensor] = []
    for batch, wanted in zip(batches, asked, strict=True):
        hidden = batch.drafted_rows(drafter, precision).flatten(0, 1)
        rows = _Rows(objective, batch, hidden, drafter, readout, overlaps)
        part, sums = loss(wanted, totals, rows)
        part.backward()
        labels = torch.stack([term.weight != 0 for term in wanted]).any(0).sum()
        found.append(torch.cat([part.detach().double().view(1), labels.double().view(1), sums.double()]))
    ranks.sum_gradients(drafter.parameters())
    splits = tuple(split_counts(_judged(objective, batch)) for batch in batches)
    value, count, *numerators = map(sum, zip(*(row.tolist() for row in found), strict=True)) if found else (0.0, 0)
    means = {term.name: number / (totals[term.group] or 1.0) for term, number in zip(listed, numerators, strict=True)}
    return _whole(Learnt(value, means, int(count), splits, tuple(overlaps)), ranks)


def confidence_weight(objective: ObjectivePart, drafter: Any) -> float:
    """Share of the confidence head's term: what the objective says, else 1 where the drafter has such a head.

    Raises:
        InputError: a share for a head that is not there.
    """
    if objective.confidence_weight is None:
        return 1.0 if has_confidence(drafter) else 0.0
    if objective.confidence_weight > 0 and not has_confidence(drafter):
        raise InputError(
            f"confidence_weight is {objective.confidence_weight:g}, and the drafter has no confidence head",
            where="objective.confidence_weight",
            fix="Leave it out, or train a DSpark drafter with drafter.confidence: true.",
        )
    return objective.confidence_weight


def _terms(objective: ObjectivePart, batch: Scored, known: Tensor, confidence: float) -> list[Term]:
    """The terms of every source of the mixture, each with means of its own and its share of the loss."""
    if len(batch.mixture) == 1:
        return terms(objective, batch.blocks, known, confidence)
    return [
        replace(term, name=f"{source}_{term.name}", group=f"{source} {term.group}", share=share * term.share)
        for index, (source, share, _) in enumerate(batch.mixture)
        for term in terms(objective, batch.of(index), known, confidence)
    ]


def _judged(objective: ObjectivePart, batch: Scored) -> Blocks:
    """The blocks that verification decided: not the trunk beside others, nor branches whose coins were never thrown."""
    if len(batch.mixture) == 1 and batch.mixture[0][0] == "trunk":
        return batch.blocks
    blocks = batch.blocks
    for index, (source, _, _) in enumerate(batch.mixture):
        if source == "trunk" or (source == "sampled" and objective.kind != "draft_opd"):
            there = batch.of(index).valid
            blocks = replace(blocks, valid=blocks.valid & ~there, accepted=blocks.accepted & ~there)
    return blocks


def _whole(mine: Learnt, ranks: Ranks) -> Learnt:
    """The account of the step that every process took its part in."""
    if ranks.world == 1:
        return mine
    parts = ranks.merge([replace(mine, overlaps=())])
    return Learnt(
        sum(part.loss for part in parts),
        added([part.terms for part in parts]),
        sum(part.labels for part in parts),
        tuple(split for part in parts for split in part.splits),
        mine.overlaps,
    )


def _sayable(labels: Tensor, student: Readout) -> Tensor:
    """Bool [N, K]: labels that are known (not -1) and that the drafter can say at all."""
    known = labels >= 0
    return known if student.support is None else known & torch.isin(labels, student.support)


@dataclass(frozen=True)
class _Rows:
    """Row values of one micro-batch, for `objective.terms.loss`."""

    objective: ObjectivePart
    batch: Scored
    hidden: Tensor
    drafter: Any
    target: Readout
    overlaps: list[Overlap]  # to be filled, for whoever reports; the last is of this batch, if it has any

    @property
    def student(self) -> Readout:
        readout: Readout = self.drafter.readout
        return readout

    def __call__(self, kind: Asked, index: Tensor) -> Tensor | Overlap:
        if kind == "confidence":
            return self._confidence(index)
        teacher = self.batch.teacher
        if kind == "overlap" and teacher is not None:
            rows = overlap_rows(
                self.hidden[index],
                self.student,
                teacher=teacher.flatten(0, 1)[index],
                teacher_readout=self.target,
                tokens=self.batch.blocks.tokens.flatten()[index],
                temperature=self.objective.temperature,
                chunk=self.objective.chunk,
                kernel=self.objective.kernel,
            )
            self.overlaps.append(rows.detach().spread(index, self.batch.blocks.tokens.shape))
            return rows
        return row_values(
            kind,
            self.hidden[index],
            self.student,
            teacher=teacher.flatten(0, 1)[index] if teacher is not None and kind != "ce" else None,
            teacher_readout=self.target,
            labels=self.batch.labels.flatten()[index] if kind == "ce" else None,
            temperature=self.objective.temperature,
            chunk=self.objective.chunk,
            kernel=self.objective.kernel,
        )

    def _confidence(self, index: Tensor) -> Tensor:
        """[m] cross-entropy of the confidence against alpha, which is what it is to foretell and not to move."""
        blocks, tokens = self.batch.blocks, self.batch.blocks.tokens
        anchor = self.batch.text[blocks.row, blocks.anchor]
        rows = self.hidden.view(*tokens.shape, -1)
        logits = self.drafter.confidence(rows, anchor, tokens).flatten()[index]
        if self.objective.kind in ("tv", "e2e_tv"):  # asked for before: of the same rows, at least where they count
            alpha = self.overlaps[-1].alpha.flatten()[index]
        else:
            assert self.batch.teacher is not None
            with torch.no_grad():
                alpha = row_values(
                    "overlap",
                    self.hidden[index],
                    self.student,
                    teacher=self.batch.teacher.flatten(0, 1)[index],
                    teacher_readout=self.target,
                    temperature=self.objective.temperature,
                    chunk=self.objective.chunk,
                    kernel=self.objective.kernel,
                )
        return F.binary_cross_entropy_with_logits(logits, alpha.clamp(0, 1).to(logits.dtype), reduction="none")
