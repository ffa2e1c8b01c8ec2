"""Supervision of one forward: lessons in, scored blocks out (anchors -> proposals -> teacher rows).

A method is a combination of the cells named here; the objective is chosen above, in `learn`. Proposals may be a
mixture: every source proposes at the same anchors, and all of them share one drafter forward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftloop.core.blocks import Blocks
from draftloop.core.draws import Purpose, uniforms
from draftloop.core.host import sent
from draftloop.core.law import Sampling
from draftloop.drafter.draft import Draft
from draftloop.recipe import Source, StagePart
from draftloop.supervise.anchors import choose
from draftloop.supervise.drafting import packed_draft
from draftloop.supervise.hard import choose_hard
from draftloop.supervise.lesson import FeatureStore, Lesson
from draftloop.supervise.propose import (
    Cells,
    columns,
    committed_greedily,
    greedy_run,
    ratio_run,
    recorded_blocks,
    redraft_blocks,
    room_after,
    sampled_blocks,
    texts,
    trunk_blocks,
)
from draftloop.supervise.score import recorded_rows, scored_rows, trunk_rows


@dataclass(frozen=True)
class Scored:
    """One forward's supervision.

    Attributes:
        features: [b, S, F * H] trunk features, zero-padded.
        anchor: int64 [b, M] anchors a row, padded with 0.
        text: int64 [b, T] tokens of the trunks, zero-padded.
        blocks: the N real blocks, those of one source after those of another.
        column: int64 [N], where each block stands in its row of `anchor`.
        labels: int64 [N, K] the token that verification committed at each position, or the trunk's; -1 = not known.
        teacher: [N, K, H] the target's hidden rows, or None if the objective needs none.
        mixture: each source, its share of the loss and how many of the N blocks are its.
        draft: the drafter's, with its graph, where proposals were drawn from it.
        drawn: for each source the drafter's rows that its proposals were drawn from, with their graph; else None.
        coins: float64 [N, K] in (0, 1), what the ratio rule compares p/q with; None where no proposal was sampled.
        trunk_law: how the target drew the trunks, where all were drawn alike.
    """

    features: Tensor
    anchor: Tensor
    text: Tensor
    blocks: Blocks
    column: Tensor
    labels: Tensor
    teacher: Tensor | None
    mixture: tuple[tuple[Source, float, int], ...]
    draft: Draft | None = None
    drawn: tuple[Tensor | None, ...] = ()
    coins: Tensor | None = None
    trunk_law: Sampling | None = None

    def drafted_rows(self, drafter: Any, precision: torch.dtype = torch.float32) -> Tensor:
        """[N, K, W] the drafter's rows of all blocks: those that were sampled from, or from one packed pass."""
        first = self.mixture[0][2]
        cells = (self.blocks.row[:first], self.column[:first])  # every source proposes at the same
        draft = self.draft or packed_draft(drafter, self.features, self.anchor, self.text, cells, precision)
        tokens = self.blocks.tokens.split([size for _, _, size in self.mixture])
        drawn = self.drawn or (None,) * len(tokens)
        rows = [draft.forced(own) if mine is None else mine for own, mine in zip(tokens, drawn, strict=True)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def of(self, index: int) -> Blocks:
        """The blocks with all but those of one source made invalid."""
        sizes = [size for _, _, size in self.mixture]
        mine = torch.zeros(sum(sizes), 1, dtype=torch.bool, device=self.blocks.valid.device)
        mine[sum(sizes[:index]) : sum(sizes[: index + 1])] = True
        return replace(self.blocks, valid=self.blocks.valid & mine, accepted=self.blocks.accepted & mine)


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
    precision: torch.dtype = torch.float32,
    together: list[Lesson] | None = None,
) -> Scored:
    """Choose anchors and proposals for a batch of lessons and have them scored.

    Args:
        stage: the cells (anchors, proposals, branch, rollout.teacher).
        lessons: the batch; features are computed here where they are missing.
        visits: how often each lesson was seen before.
        need_teacher: whether the objective reads the target's law.
        precision: compute type of the drafter's forward.
        together: the lessons of all processes at this forward, which share its budget; default: `lessons`.

    Raises:
        InputError: a response too short for an anchor.
    """
    store.fill(lessons)
    device, drafted = target.device, drafter.spec.drafted
    count = _count(stage, together or lessons, drafted)
    chosen = []
    for lesson, visit in zip(lessons, visits, strict=True):
        if stage.anchors == "errors" or stage.anchors == "alpha":
            hard = choose_hard(stage.anchors, lesson, count, seed, visit, drafter=drafter, target=target)
            chosen.append(hard)
        else:
            chosen.append(choose(stage.anchors, lesson, count, seed, visit))
    grid = torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one in chosen], batch_first=True, padding_value=-1)
    cells = torch.stack([(grid >= 0).nonzero()[:, 0], grid[grid >= 0]], 1)
    anchor, text = sent(grid.clamp(min=0), device), sent(texts(lessons), device)
    column = sent((grid >= 0).nonzero()[:, 1], device)
    features = torch.nn.utils.rnn.pad_sequence([lesson.features for lesson in lessons], batch_first=True)  # type: ignore[misc]
    own = trunk_blocks(lessons, cells, drafted, device)
    draft = None
    if {"sampled", "redraft"} & set(stage.mixture):
        # one pass serves both sampling (detached) and the loss: what is drawn is drawn from the very law trained
        draft = packed_draft(drafter, features, anchor, text, (own.row, column), precision)
    at = _Place(stage, lessons, cells, visits, own, draft, target, drafter, seed, need_teacher)
    parts = [_PROPOSE[source](at) for source in stage.mixture]
    store.release(lessons)
    blocks = _joined([part.blocks for part in parts])
    labels = parts[0].labels if len(parts) == 1 else torch.cat([part.labels for part in parts])
    teacher = parts[0].teacher if need_teacher else None
    if need_teacher and len(parts) > 1:
        teacher = torch.cat([part.teacher for part in parts])  # type: ignore[misc]
    if not need_teacher:  # labels alone are read, and a block may reach beyond what is known of the text
        known = labels >= 0
        blocks = replace(blocks, valid=blocks.valid & known, accepted=blocks.accepted & known)
    mixture = tuple((source, share, len(cells)) for source, share in stage.mixture.items())
    laws = {lesson.trunk.drawn for lesson in lessons}
    return Scored(
        features, anchor, text, blocks, column.repeat(len(parts)), labels, teacher, mixture, draft,
        tuple(part.drawn for part in parts),
        at.coins().repeat(len(parts), 1) if "sampled" in stage.mixture else None,
        laws.pop() if len(laws) == 1 else None,
    )  # fmt: skip


@dataclass(frozen=True)
class _Place:
    """Where proposals are asked for: the cells of a batch, and what they are drawn and scored with."""

    stage: StagePart
    lessons: list[Lesson]
    cells: Cells
    visits: list[int]
    own: Blocks
    draft: Draft | None
    target: Any
    drafter: Any
    seed: int
    need_teacher: bool

    @property
    def labels(self) -> Tensor:
        """int64 [N, K] the trunk's own next tokens, -1 where it has none."""
        return torch.where(self.own.valid, self.own.tokens, -1)

    def coins(self) -> Tensor:
        """float64 [N, K] in (0, 1): the accept-or-reject coin of every proposed token (keyed, hashed on the host)."""
        row, anchor = columns(self.cells)
        key, visit = torch.tensor([one.key for one in self.lessons])[row], torch.tensor(self.visits)[row]
        place = anchor.unsqueeze(1) + torch.arange(1, self.drafter.spec.drafted + 1)
        found = uniforms(self.seed, Purpose.ACCEPT, key.unsqueeze(1), visit.unsqueeze(1), anchor.unsqueeze(1), place)
        return sent(found, self.target.device)


@dataclass(frozen=True)
class _Part:
    blocks: Blocks
    labels: Tensor
    teacher: Tensor | None
    drawn: Tensor | None = None


def _trunk(at: _Place) -> _Part:
    return _Part(at.own, at.labels, trunk_rows(at.lessons, at.own) if at.need_teacher else None)


def _recorded(at: _Place) -> _Part:
    drafted = at.drafter.spec.drafted
    blocks = recorded_blocks(at.lessons, at.cells, drafted, at.target.eos_ids, at.target.device)
    teacher = None
    if at.need_teacher and at.stage.rollout.teacher == "store":
        teacher = recorded_rows(at.lessons, blocks)
    elif at.need_teacher:
        teacher = scored_rows(at.target, at.lessons, blocks)
    return _Part(blocks, torch.where(blocks.accepted, blocks.tokens, at.labels), teacher)


def _redraft(at: _Place) -> _Part:
    assert at.draft is not None
    room = room_after(at.lessons, at.cells, at.target.device)
    blocks, drawn = redraft_blocks(at.cells, at.draft, at.drafter.readout, at.target.eos_ids, room)
    teacher = scored_rows(at.target, at.lessons, blocks)
    run = greedy_run(teacher, blocks.tokens, at.target.readout).unsqueeze(1)
    blocks = replace(blocks, accepted=blocks.valid & (blocks.position <= run))
    labels, known = committed_greedily(blocks, at.own, teacher, at.target.readout)
    return _Part(blocks, torch.where(known, labels, -1), teacher, drawn)


def _sampled(at: _Place) -> _Part:
    assert at.draft is not None
    branch = at.stage.branch
    blocks, drawn = sampled_blocks(
        at.lessons, at.cells, at.draft, at.drafter.readout, branch,
        eos=at.target.eos_ids, limit=at.target.context_limit, seed=at.seed, visits=at.visits,
    )  # fmt: skip
    if not at.need_teacher:
        return _Part(blocks, at.labels, None, drawn)
    teacher = scored_rows(at.target, at.lessons, blocks)
    if at.stage.objective.kind == "draft_opd":  # the one objective that must know first what was accepted
        law = at.target.law(teacher.flatten(0, 1), Sampling(branch.temperature))
        run = ratio_run(blocks, law, at.coins()).unsqueeze(1)
        blocks = replace(blocks, accepted=blocks.valid & (blocks.position <= run))
        return _Part(blocks, torch.where(blocks.accepted, blocks.tokens, -1), teacher, drawn)
    return _Part(blocks, at.labels, teacher, drawn)


_PROPOSE = {"trunk": _trunk, "recorded": _recorded, "redraft": _redraft, "sampled": _sampled}


def _count(stage: StagePart, lessons: list[Lesson], drafted: int) -> int:
    """Anchors a sequence: as the recipe says, and no more than the budget of target tokens has room for."""
    budget = stage.branch.target_tokens
    if budget is None or not {"sampled", "redraft"} & set(stage.mixture):
        return stage.anchors_per_sequence
    left = budget - sum(len(lesson.trunk) for lesson in lessons)
    return max(1, min(stage.anchors_per_sequence, left // (len(lessons) * max(1, drafted - 1))))


def _joined(parts: list[Blocks]) -> Blocks:
    """The blocks of all sources, one after the other; `log_q` is NaN where nothing was drawn."""
    if len(parts) == 1:
        return parts[0]
    logs = [
        torch.full(p.tokens.shape, float("nan"), device=p.tokens.device) if p.log_q is None else p.log_q for p in parts
    ]

    def both(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    drawn = None if all(part.log_q is None for part in parts) else torch.cat(logs)
    return Blocks(both("row"), both("anchor"), both("tokens"), both("valid"), both("accepted"), drawn)
