"""Supervision of one forward: lessons in, scored blocks out (anchors -> proposals -> teacher rows).

A method is a combination of the cells named here; the objective is chosen above, in `learn`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftloop.core.blocks import Blocks
from draftloop.recipe import StagePart
from draftloop.supervise.anchors import choose
from draftloop.supervise.lesson import FeatureStore, Lesson
from draftloop.supervise.propose import (
    committed_greedily,
    greedy_run,
    recorded_blocks,
    redraft_blocks,
    room_after,
    trunk_blocks,
)
from draftloop.supervise.score import recorded_rows, scored_rows, trunk_rows


@dataclass(frozen=True)
class Scored:
    """One forward's supervision.

    Attributes:
        features: [b, S, F * H] trunk features, zero-padded.
        anchor: int64 [b, M] anchors a row, padded with 0.
        token: int64 [b, M] tokens at the anchors.
        blocks: the N real blocks.
        column: int64 [N], where each block stands in its row of `anchor`.
        labels: int64 [N, K] the token that verification committed at each position (where it is known), or the trunk's.
        teacher: [N, K, H] the target's hidden rows, or None if the objective needs none.
    """

    features: Tensor
    anchor: Tensor
    token: Tensor
    blocks: Blocks
    column: Tensor
    labels: Tensor
    teacher: Tensor | None

    def drafted_rows(self, drafter: Any) -> Tensor:
        """[N, K, H] the drafter's hidden rows of all blocks, in one packed forward."""
        hidden: Tensor = drafter(self.features, self.anchor, self.token)
        return hidden[self.blocks.row, self.column]


def supervise(
    stage: StagePart,
    lessons: list[Lesson],
    visits: list[int],
    *,
    target: Any,
    drafter: Any,
    store: FeatureStore,
    seed: int,
    need_teacher: bool,
) -> Scored:
    """Choose anchors and proposals for a batch of lessons and have them scored.

    Args:
        stage: the cells (anchors, proposals, rollout.teacher).
        lessons: the batch; features are computed here where they are missing.
        visits: how often each lesson was seen before.
        need_teacher: whether the objective reads the target's law.

    Raises:
        InputError: a response too short for an anchor.
    """
    store.fill(lessons)
    device, drafted = target.device, drafter.spec.drafted
    chosen = [
        choose(stage.anchors, lesson, stage.anchors_per_sequence, seed, visit)
        for lesson, visit in zip(lessons, visits, strict=True)
    ]
    cells = [(row, anchor) for row, anchors in enumerate(chosen) for anchor in anchors]
    column = torch.tensor([i for anchors in chosen for i in range(len(anchors))], device=device)
    anchor, token = _pad(lessons, chosen, device)
    features = torch.nn.utils.rnn.pad_sequence([lesson.features for lesson in lessons], batch_first=True)  # type: ignore[misc]
    own = trunk_blocks(lessons, cells, drafted, device)
    scored = Scored(features, anchor, token, own, column, own.tokens, None)
    known = own.valid

    if stage.proposals == "trunk":
        teacher = trunk_rows(lessons, scored.blocks) if need_teacher else None
    elif stage.proposals == "recorded":
        blocks = recorded_blocks(lessons, cells, drafted, target.eos_ids, device)
        labels = torch.where(blocks.accepted, blocks.tokens, own.tokens)
        scored = replace(scored, blocks=blocks, labels=labels)
        if not need_teacher:
            teacher = None
        elif stage.rollout.teacher == "store":
            teacher = recorded_rows(lessons, blocks)
        else:
            teacher = scored_rows(target, lessons, blocks)
    else:
        with torch.no_grad():
            hidden = scored.drafted_rows(drafter)
        room = room_after(lessons, cells, device)
        blocks = redraft_blocks(lessons, cells, hidden, drafter.readout, target.eos_ids, room)
        teacher = scored_rows(target, lessons, blocks)
        run = greedy_run(teacher, blocks.tokens, target.readout).unsqueeze(1)
        blocks = replace(blocks, accepted=blocks.valid & (blocks.position <= run))
        labels, known = committed_greedily(blocks, own, teacher, target.readout)
        scored = replace(scored, blocks=blocks, labels=labels)
    store.release(lessons)
    if need_teacher:
        return replace(scored, teacher=teacher)
    # labels alone are read, and a block may reach beyond what is known of the text
    blocks = scored.blocks
    return replace(scored, blocks=replace(blocks, valid=blocks.valid & known, accepted=blocks.accepted & known))


def _pad(lessons: list[Lesson], chosen: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, chosen))
    anchor = torch.zeros(len(chosen), width, dtype=torch.int64)
    token = torch.zeros_like(anchor)
    for row, anchors in enumerate(chosen):
        anchor[row, : len(anchors)] = torch.tensor(anchors)
        token[row, : len(anchors)] = torch.tensor([lessons[row].trunk.tokens[a] for a in anchors])
    return anchor.to(device), token.to(device)
