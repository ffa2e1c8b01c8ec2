"""Proposals: which K tokens each block is scored on, and what became of them.

`trunk` = the trunk's own next tokens; `recorded` = what the drafter really proposed while rolling out; `redraft` = the
current drafter's argmax, verified anew. Builds `Blocks`; the loss is not this room's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftloop.core.blocks import Blocks
from draftloop.core.law import Readout
from draftloop.decode.rules import leading
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


@torch.no_grad()
def redraft_blocks(
    lessons: list[Lesson], cells: Cells, hidden: Tensor, readout: Readout, eos: tuple[int, ...], room: Tensor
) -> Blocks:
    """The drafter's argmax at each anchor; `accepted` stays empty, for nothing is verified yet.

    Args:
        hidden: [N, K, H] the drafter's rows.
        room: int64 [N], positions left in each trunk after the anchor; later ones are not valid.
    """
    n, drafted, _ = hidden.shape
    flat = hidden.flatten(0, 1)
    tokens = torch.cat([readout.logits(part).argmax(-1) for part in flat.split(512)]).view(n, drafted)
    rows, anchors = _columns(cells, hidden.device)
    valid = torch.arange(drafted, device=hidden.device) < room.unsqueeze(1)
    return Blocks(rows, anchors, tokens, valid & before_end(tokens, eos), torch.zeros_like(valid))


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
    tokens = torch.zeros(len(cells), drafted, dtype=torch.int64)
    valid = torch.zeros(len(cells), drafted, dtype=torch.bool)
    for i, (row, anchor) in enumerate(cells):
        trunk = lessons[row].trunk
        line = trunk.tokens[anchor + 1 : anchor + 1 + drafted]
        tokens[i, : len(line)] = torch.tensor(line, dtype=torch.int64)
        flags = trunk.mask[anchor + 1 : anchor + 1 + drafted] if masked else (True,) * len(line)
        valid[i, : len(line)] = torch.tensor(flags, dtype=torch.bool)
    return tokens.to(device), valid.to(device).long().cumprod(-1).bool()


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
