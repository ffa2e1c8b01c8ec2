"""What acceptance a stage's proposals are expected to have, reported as it trains, and the alarm when it is not seen.

Sums up `objective.honest` over steps and processes. A disagreement between what was sampled and what was expected means
that a stored law is not the one that tokens were drawn from: a bug, which nothing else would show.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from draftloop.core.law import Sampling
from draftloop.core.ranks import Ranks
from draftloop.learn.update import Learnt
from draftloop.objective.honest import Expectation, expectation
from draftloop.objective.rows import Overlap
from draftloop.recipe import Source, StagePart
from draftloop.supervise.batch import Scored
from draftloop.train.metrics import MetricsLog

EVERY = 20  # steps that a line of metrics sums up


class Expected:
    """The expectations of one stage since the last line of metrics, by source.

    Args:
        part: the stage.
        ranks: the processes that learn together.
    """

    def __init__(self, part: StagePart, ranks: Ranks) -> None:
        self.part, self.ranks = part, ranks
        self._sums: dict[Source, Expectation] = {}
        self._warned = False

    def add(self, batches: Sequence[Scored], learnt: Learnt) -> None:
        """Count the blocks of one step in."""
        for batch, overlap in zip(batches, learnt.overlaps, strict=False):  # no overlaps: nothing to expect
            for index, (source, _, _) in enumerate(batch.mixture):
                self._count(source, self._of(source, batch, index, overlap))

    def write(self, metrics: MetricsLog, step: int) -> None:
        """Add a line of metrics a source, and begin anew; every process must call it at the same steps."""
        if self.part.objective.kind not in ("tv", "e2e_tv"):
            return
        every = self.ranks.merge([_on_cpu(self._sums)])
        self._sums = {}
        for source in self.part.mixture:
            parts = [sums[source] for sums in every if source in sums]
            if not parts:
                continue
            total = sum(parts[1:], start=parts[0])
            metrics.write(
                "expected", stage=self.part.name, step=step, source=source, alarm=total.alarm, **total.to_metrics()
            )
            if total.alarm and not self._warned:
                self._warned = True
                warnings.warn(
                    f"stage {self.part.name}, step {step}: the accepted length that was sampled disagrees with the one"
                    " that the stored laws make us expect by more than 4 standard errors; the figures of this stage are"
                    " not to be trusted (see kind `expected` in metrics.jsonl)",
                    stacklevel=2,
                )

    def pending(self) -> list[dict[Source, Any]]:
        """What no line of metrics has summed up yet, as JSON values of every process; all must call it together."""
        return self.ranks.merge([{source: one.to_json() for source, one in self._sums.items()}])

    def resume(self, pending: Sequence[dict[Source, Any]], device: torch.device) -> None:
        """Take up what `pending` gave, each process its own; were there more of them, what is over is shared out."""
        for sums in pending[self.ranks.rank :: self.ranks.world]:
            for source, told in sums.items():
                self._count(source, Expectation.from_json(told, device))

    def _count(self, source: Source, found: Expectation) -> None:
        held = self._sums.get(source)
        self._sums[source] = found if held is None else held + found

    def _of(self, source: Source, batch: Scored, index: int, overlap: Overlap) -> Expectation:
        drawn = None
        if source == "sampled":
            drawn = Sampling(self.part.branch.temperature)
        elif source == "recorded" and self.part.rollout.rule == "ratio":
            drawn = Sampling(self.part.rollout.temperature)
        return expectation(
            overlap,
            batch.of(index),
            temperature=self.part.objective.temperature,
            drawn=drawn,
            trunk=batch.trunk_law,
            coins=batch.coins if source == "sampled" else None,
            accept_weighted=self.part.objective.estimator == "accept_weighted",
        )


def _on_cpu(sums: dict[Source, Expectation]) -> dict[Source, Expectation]:
    return {source: one.cpu() for source, one in sums.items()}
