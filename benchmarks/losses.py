"""E2E-TV from hidden rows to their gradient: ours, a chunk at a time, against plain autograd."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from measure import Row, watched

from draftloop.core.blocks import Blocks
from draftloop.objective.rows import row_values
from draftloop.objective.terms import denominators, loss, terms
from draftloop.recipe import ObjectivePart


def losses(target: Any, *, counts: tuple[int, ...], width: int, repeats: int) -> list[Row]:
    """Time and peak memory of loss and gradient of `counts` random blocks of `width` positions, turn by turn."""
    readout, device = target.readout, target.device
    objective = ObjectivePart(kind="e2e_tv", ce_weight=0.0)
    rows: list[Row] = []
    for count in counts:
        generator = torch.Generator().manual_seed(0)
        shape = (count * width, readout.weight.shape[1])
        student, teacher = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
        student.requires_grad_()
        place = torch.arange(count, device=device)
        valid = torch.ones(count, width, dtype=torch.bool, device=device)
        asked = terms(objective, Blocks(place * 0, place, valid.long(), valid, valid))
        totals = denominators([asked])

        def chunked(student=student, teacher=teacher, asked=asked, totals=totals) -> int:  # type: ignore[no-untyped-def]
            def values(kind, index):  # type: ignore[no-untyped-def]
                return row_values(kind, student[index], readout, teacher=teacher[index], chunk=objective.chunk)

            student.grad = None
            loss(asked, totals, values)[0].backward()
            return len(student)

        def eager(student=student, teacher=teacher, count=count) -> int:  # type: ignore[no-untyped-def]
            student.grad = None
            q, p = readout.logits(student).softmax(-1), readout.logits(teacher).softmax(-1)
            alpha = torch.minimum(p, q).sum(-1).view(count, width)
            (1 - alpha.cumprod(-1).mean()).backward()
            return len(student)

        seconds: dict[str, list[float]] = {"chunked": [], "eager": []}
        peaks: dict[str, int | None] = {}
        gradients = {}
        for turn in range(repeats + 1):
            for name, work in (("chunked", chunked), ("eager", eager)):
                took, peaks[name], _ = watched(work, device)
                seconds[name] += [took] if turn else []  # the first turn warms up
                assert student.grad is not None
                gradients[name] = student.grad
        base = statistics.median(seconds["chunked"])
        for name in seconds:
            middle = statistics.median(seconds[name])
            gap = (gradients[name] - gradients["chunked"]).norm() / gradients["chunked"].norm()
            rows.append({"part": "loss", "rows": count * width, "way": name, "ms": 1e3 * middle,
                         "to_chunked": middle / base, "peak_bytes": peaks[name], "gap": gap.item(),
                         "seconds": seconds[name]})  # fmt: skip
    return rows
