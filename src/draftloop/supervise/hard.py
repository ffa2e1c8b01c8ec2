"""Anchors where the current drafter is weak: chosen among random ones, by a drafter forward without gradient.

`errors`: where its greedy block leaves the trunk soonest (Draft-OPD, arXiv 2605.29343, learns at error positions).
`alpha`: drawn without replacement with weight 1 - alpha_1, alpha_1 = sum_v min(p, q) of the first drafted token.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from draftloop.core.draws import Purpose, permutation, uniforms
from draftloop.objective.rows import row_values
from draftloop.supervise.anchors import choose
from draftloop.supervise.lesson import Lesson
from draftloop.supervise.propose import greedy_run, trunk_blocks

HardPolicy = Literal["errors", "alpha"]
POOL = 4  # candidates for each anchor that is wanted


@torch.no_grad()
def choose_hard(
    policy: HardPolicy, lesson: Lesson, count: int, seed: int, visit: int, *, drafter: Any, target: Any
) -> list[int]:
    """Anchors of one lesson, ascending: the `count` hardest of `POOL * count` random ones.

    Args:
        policy: `errors` or `alpha`.
        lesson: with features and hidden rows.
        count: how many, at most.
        seed: of the keyed draws.
        visit: how often this lesson was seen before; part of the key.
        drafter: bound to `target`.
        target: whose law alpha compares with.

    Raises:
        InputError: no valid anchor, because the response is too short.
    """
    pool = choose("random", lesson, POOL * count, seed, visit)
    if len(pool) <= count:
        return pool
    assert lesson.features is not None
    assert lesson.hidden is not None
    anchor = torch.tensor(pool, device=target.device)
    text = torch.tensor([lesson.trunk.tokens], device=target.device)
    own = trunk_blocks([lesson], [(0, a) for a in pool], drafter.spec.drafted, target.device)
    draft = drafter.pack(lesson.features.unsqueeze(0), anchor.unsqueeze(0), text)
    hidden = draft.forced(own.tokens.unsqueeze(0))[0]
    if policy == "errors":
        run = greedy_run(hidden, torch.where(own.valid, own.tokens, -1), drafter.readout)
        # equal runs in a keyed order: else the first ones of the text would always win
        shuffle = permutation(seed, Purpose.ANCHOR, len(pool), lesson.key, visit, 1).to(run.device)
        order = shuffle[torch.argsort(run[shuffle], stable=True)]
    else:
        alpha = row_values(
            "overlap",
            hidden[:, 0],
            drafter.readout,
            teacher=lesson.hidden[anchor],
            teacher_readout=target.readout,
        )
        order = _weighted(1 - alpha, uniforms(seed, Purpose.ANCHOR, lesson.key, visit, 2, anchor))
    return sorted(pool[i] for i in order[:count].tolist())


def _weighted(weight: Tensor, uniform: Tensor) -> Tensor:
    """Order of a draw without replacement with these weights (exponential races, Efraimidis and Spirakis 2006)."""
    return torch.argsort(-uniform.log() / weight.double().clamp(min=1e-6), stable=True)
