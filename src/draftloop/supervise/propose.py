"""Proposals: which K tokens each block is scored on, and what became of them.

`trunk` = the trunk's own next tokens; `sampled` = drawn from the current drafter (arXiv 2611.02846); `recorded` = what
the drafter really proposed while rolling out; `redraft` = the current drafter's argmax, verified anew. Builds `Blocks`;
the loss is not this room's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftloop.core.blocks import Blocks
from draftloop.core.draws import Purpose, uniforms
from draftloop.core.law import Law, Readout, Sampling
from draftloop.decode.rules import leading
from draftloop.drafter.draft import Draft
from draftloop.recipe import BranchPart
from draftloop.supervise.lesson import Lesson

Cells = list[tuple[int, int]]  # (row of the batch, anchor)


def trunk_blocks(lessons: list[Lesson], cells: Cells, drafted: int, device: torch.device) -> Blocks:
    """The trunk's own next tokens; a position is valid while supervised without a gap."""
    rows, anchors = _columns(cells, device)
    tokens, valid = _next_tokens(lessons, cells, drafted, device)
    return Blocks(rows, anchors, tokens, valid, valid.clone())


def recorded_blocks(
    lessons: list[Lesson], cells: Cells, drafted: int, eos: tuple[int, ...], device: torch.device
) -> Blocks:
    """What was really proposed, rejected tokens kept.

    A block whose accepted tokens were cut by end-of-sequence or length teaches only what was committed: what follows
    was never verified. What follows a proposed end-of-sequence is cut too (arXiv 2611.02846 cuts branches there).
    """
    rows, anchors = _columns(cells, device)
    tokens = torch.zeros(len(cells), drafted, dtype=torch.int64)
    log_q = torch.zeros(len(cells), drafted)
    seen = torch.zeros(len(cells), dtype=torch.int64)
    accepted = torch.zeros(len(cells), dtype=torch.int64)
    for i, (row, anchor) in enumerate(cells):
        lesson = lessons[row]
        step = lesson.steps[lesson.step_at[anchor]]
        tokens[i], log_q[i] = torch.tensor(step.proposed), torch.tensor(step.log_q)
        cut = step.committed <= step.accepted
        seen[i] = step.committed if cut else drafted
        accepted[i] = min(step.accepted, step.committed)
    place = torch.arange(drafted)
    valid = (place < seen.unsqueeze(1)) & before_end(tokens, eos)
    return Blocks(
        rows,
        anchors,
        tokens.to(device),
        valid.to(device),
        (valid & (place < accepted.unsqueeze(1))).to(device),
        log_q.to(device),
    )


def redraft_blocks(
    cells: Cells, draft: Draft, readout: Readout, eos: tuple[int, ...], room: Tensor
) -> tuple[Blocks, Tensor]:
    """The drafter's argmax at each anchor; `accepted` stays empty, for nothing is verified yet.

    Args:
        draft: of the N blocks.
        room: int64 [N], positions left in each trunk after the anchor; later ones are not valid.

    Returns:
        the blocks; [N, K, W] the rows that they were drawn from, with their graph.
    """

    def choose(hidden: Tensor, slots: slice) -> tuple[Tensor, Tensor]:
        law = draft.law(hidden, slots, readout, Sampling())
        tokens, scores = law.draw(hidden.new_empty(len(law.hidden)))
        return tokens.view(hidden.shape[:2]), scores.view(hidden.shape[:2])

    tokens, certain, drawn = draft.drawn(choose)
    rows, anchors = _columns(cells, tokens.device)
    valid = torch.arange(draft.drafted, device=tokens.device) < room.unsqueeze(1)
    return Blocks(rows, anchors, tokens, valid & before_end(tokens, eos), torch.zeros_like(valid), certain), drawn


def sampled_blocks(
    lessons: list[Lesson],
    cells: Cells,
    draft: Draft,
    readout: Readout,
    branch: BranchPart,
    *,
    eos: tuple[int, ...],
    limit: int,
    seed: int,
    visits: list[int],
) -> tuple[Blocks, Tensor]:
    """One branch an anchor, drawn from the drafter's own law; `accepted` stays empty, for nothing is verified yet.

    A branch may run past its trunk's end, for the target has a law there too; it is cut behind an end-of-sequence.
    `log_q` is of the law really drawn from: at the branch temperature, 0 where the argmax was taken.

    Args:
        draft: of the N blocks.
        branch: temperature and share of greedy branches.
        limit: longest text the target can score.
        seed: of the keyed draws.
        visits: how often each lesson was seen before; part of the key.

    Returns:
        the blocks; [N, K, W] the rows that they were drawn from, with their graph.
    """
    drafted, device = draft.drafted, readout.weight.device
    rows, anchors = _columns(cells, device)
    key = torch.tensor([lesson.key for lesson in lessons], device=device)[rows]
    visit = torch.tensor(visits, dtype=torch.int64, device=device)[rows]
    greedy = uniforms(seed, Purpose.BRANCH, key, visit, anchors) < branch.greedy_share
    place = torch.arange(1, drafted + 1, device=device)
    draws = uniforms(seed, Purpose.DRAFT, key[:, None], visit[:, None], anchors[:, None], anchors[:, None] + place)

    def choose(hidden: Tensor, slots: slice) -> tuple[Tensor, Tensor]:
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=device)
        scores = torch.zeros(hidden.shape[:2], device=device)
        for mine, temperature in ((greedy, 0.0), (~greedy, branch.temperature)):
            law = draft.law(hidden, slots, readout, Sampling(temperature), only=mine)
            some, certain = law.draw(draws[mine][:, slots].flatten())
            tokens[mine], scores[mine] = some.view(-1, hidden.shape[1]), certain.view(-1, hidden.shape[1])
        return tokens, scores

    tokens, log_q, drawn = draft.drawn(choose)
    valid = before_end(tokens, eos) & (anchors.unsqueeze(1) + place < limit)
    return Blocks(rows, anchors, tokens, valid, torch.zeros_like(valid), log_q), drawn


@torch.no_grad()
def ratio_run(blocks: Blocks, teacher: Law, coins: Tensor) -> Tensor:
    """How many leading tokens of each block the ratio rule accepts: u < p(y) / q(y), q as stored with the draw.

    Args:
        blocks: with the `log_q` of the law that each token was really drawn from.
        teacher: the target's laws of the [N * K] rows.
        coins: float64 [N, K] in (0, 1).

    Returns:
        int64 [N].
    """
    assert blocks.log_q is not None
    tokens = blocks.tokens.flatten()
    log_p = [
        teacher.rows(part).log_probs().gather(-1, tokens[part].unsqueeze(-1)).squeeze(-1)
        for part in torch.arange(tokens.numel(), device=tokens.device).split(256)
    ]
    margin = torch.cat(log_p).double().view_as(coins) - blocks.log_q.double()
    return leading((coins.log() < margin) & blocks.valid)


def before_end(tokens: Tensor, eos: tuple[int, ...]) -> Tensor:
    """Bool [N, K]: no end-of-sequence among the earlier tokens of the block."""
    ends = torch.isin(tokens, torch.tensor(eos, dtype=torch.int64, device=tokens.device))
    return ends.long().cumsum(-1) - ends.long() == 0


@torch.no_grad()
def greedy_run(hidden: Tensor, tokens: Tensor, readout: Readout) -> Tensor:
    """How many leading tokens equal the argmax of their law, computing no logits behind the first that does not.

    Args:
        hidden: [N, K, H].
        tokens: int64 [N, K].

    Returns:
        int64 [N].
    """
    run = torch.zeros(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    alive = torch.arange(hidden.shape[0], device=hidden.device)
    for k in range(hidden.shape[1]):
        logits = [readout.logits(hidden[part, k]) for part in alive.split(512)]
        if not logits:
            break
        same = torch.cat([z.argmax(-1) for z in logits]) == tokens[alive, k]
        alive = alive[same]
        run[alive] += 1
    return run


@torch.no_grad()
def committed_greedily(blocks: Blocks, own: Blocks, teacher: Tensor, readout: Readout) -> tuple[Tensor, Tensor]:
    """What greedy verification commits at each position of a redraft, and behind that what the trunk holds.

    Args:
        blocks: redrafted and verified.
        own: the trunk's own blocks from the same anchors.
        teacher: [N, K, H].
        readout: the target's.

    Returns:
        int64 [N, K] labels; bool [N, K], whether a label is known: it was committed, or what was committed lies on the
        trunk, which then goes on from there.
    """
    labels = torch.where(blocks.accepted, blocks.tokens, own.tokens)
    first = blocks.first_rejected
    rows = teacher[first].split(512)
    labels[first] = torch.cat([readout.logits(part).argmax(-1) for part in rows])
    committed = blocks.accepted | first
    on_trunk = ((labels == own.tokens) | ~committed).all(-1, keepdim=True)
    return labels, committed | (own.valid & on_trunk)


def trunk_run(lessons: list[Lesson], blocks: Blocks) -> Tensor:
    """int64 [N]: how many leading valid tokens of each block are the trunk's own."""
    cells = list(zip(blocks.row.tolist(), blocks.anchor.tolist(), strict=True))
    own, there = _next_tokens(lessons, cells, blocks.tokens.shape[1], blocks.tokens.device, masked=False)
    return leading((own == blocks.tokens) & there & blocks.valid)


def _next_tokens(
    lessons: list[Lesson], cells: Cells, drafted: int, device: torch.device, masked: bool = True
) -> tuple[Tensor, Tensor]:
    """The trunk tokens behind each anchor and whether each is there (and, if `masked`, supervised without a gap)."""
    width = max(len(lesson.trunk) for lesson in lessons) + drafted  # one tensor a trunk, not one a block
    tokens = torch.zeros(len(lessons), width, dtype=torch.int64)
    flags = torch.zeros(len(lessons), width, dtype=torch.bool)
    for i, lesson in enumerate(lessons):
        size = len(lesson.trunk)
        tokens[i, :size] = torch.tensor(lesson.trunk.tokens)
        flags[i, :size] = torch.tensor(lesson.trunk.mask) if masked else True
    rows, anchors = _columns(cells, torch.device("cpu"))
    place = anchors.unsqueeze(1) + torch.arange(1, drafted + 1)
    there = flags[rows.unsqueeze(1), place].long().cumprod(-1).bool()
    found = tokens[rows.unsqueeze(1), place]
    return found.to(device), there.to(device)


def _columns(cells: Cells, device: torch.device) -> tuple[Tensor, Tensor]:
    table = torch.tensor(cells, dtype=torch.int64, device=device).view(-1, 2)
    return table[:, 0], table[:, 1]


def room_after(lessons: list[Lesson], cells: Cells, device: Any) -> Tensor:
    """int64 [N]: supervised positions behind each anchor, without a gap."""
    lengths = []
    for row, anchor in cells:
        mask = lessons[row].trunk.mask
        end = anchor + 1
        while end < len(mask) and mask[end]:
            end += 1
        lengths.append(end - anchor - 1)
    return torch.tensor(lengths, dtype=torch.int64, device=device)
