"""Teacher rows: the target's hidden row for every proposed position, on the drafter's own prefix.

Accepted positions and the first rejected one are read off the trunk; later ones need the branch, which hangs on the
trunk as a tree. Trunks and branches of many lessons share rows and forwards (arXiv 2605.29343; the tree of arXiv
2611.02846). A lesson that holds its trunk's state has only its branches fed; of any other the trunk is fed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftloop.core.blocks import Blocks
from draftloop.core.tree import pack_branches, share_rows
from draftloop.supervise.lesson import Lesson
from draftloop.supervise.propose import recorded_at, trunk_run


def trunk_rows(lessons: list[Lesson], blocks: Blocks) -> Tensor:
    """Teacher rows of `trunk` proposals, [N, K, H]: the trunk's own, no forward (rows that are not valid are zero)."""
    return _read([lesson.hidden for lesson in lessons], blocks, blocks.valid)


def _read(hidden: list[Tensor | None], blocks: Blocks, wanted: Tensor) -> Tensor:
    """[N, K, H]: the wanted positions' rows of each trunk's [T_i, H] (None: not wanted), 0 elsewhere."""
    sizes = [0 if rows is None else len(rows) for rows in hidden]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    start = torch.tensor(starts, dtype=torch.int64, device=wanted.device)[blocks.row]
    place = (start + blocks.anchor).unsqueeze(1) + blocks.position - 1
    held = torch.cat([rows for rows in hidden if rows is not None])
    return torch.where(wanted.unsqueeze(-1), held[torch.where(wanted, place, 0)], 0)


def recorded_rows(lessons: list[Lesson], blocks: Blocks) -> Tensor:
    """Teacher rows of `recorded` proposals, [N, K, H], from the verification that really ran."""
    kept = [one.verified for one in lessons]
    assert all(rows is not None for rows in kept), "the rollout kept no target rows: use teacher: recompute"
    rows = torch.cat(kept)  # type: ignore[arg-type]  # [steps of all, K + 1, H]
    at = recorded_at(lessons, blocks.row, blocks.anchor).unsqueeze(1) * rows.shape[1]
    return rows.flatten(0, 1)[at + blocks.position - 1]


def scored_rows(target: Any, lessons: list[Lesson], blocks: Blocks, tokens_at_once: int | None = None) -> Tensor:
    """Teacher rows of any proposals, from as few target forwards as the budget allows.

    Args:
        target: a `Target`.
        lessons: the batch; one with a state of the target's present version is resumed, any other recomputed.
        blocks: what to score, on the target's device.
        tokens_at_once: slots of one forward, trunks and padding included; a trunk whose branches exceed it is visited
            several times, and one longer than it goes alone. Default: 16384 on a GPU, where a small target's forward
            costs its launches and not its tokens, else 4096.

    Returns:
        [N, K, H]; rows that are not valid are zero.
    """
    tokens_at_once = tokens_at_once or (16384 if target.device.type == "cuda" else 4096)
    plan = _Plan.of(lessons, blocks)
    kept = {i for i, one in enumerate(lessons) if one.state is not None and one.state.version == target.version}
    out = torch.zeros(*blocks.tokens.shape, target.hidden_size, dtype=target.dtype, device=target.device)
    if kept:
        states = [one.state if i in kept else None for i, one in enumerate(lessons)]
        held = torch.tensor([state is not None for state in states], device=out.device)[blocks.row]
        there = plan.on_trunk & held.unsqueeze(1)
        out = _read([None if state is None else state.hidden for state in states], blocks, there)
    for resumed in (False, True):
        pieces = plan.pieces(kept if resumed else set(range(len(lessons))) - kept, resumed, tokens_at_once)
        for rows in share_rows([piece.slots for piece in pieces], tokens_at_once):
            _forward(target, lessons, blocks, plan, [[pieces[i] for i in row] for row in rows], resumed, out)
    return out


@dataclass(frozen=True)
class _Piece:
    """Some blocks of one lesson, and the part of its trunk that they need."""

    lesson: int
    reach: int  # trunk tokens
    blocks: list[int]
    slots: int  # taken in a row


@dataclass(frozen=True)
class _Plan:
    """How each block hangs on its trunk.

    d_1..d_run are trunk tokens; d_{run+1}..d_{K-1} hang at anchor + run; d_K is never an input.

    Attributes:
        run: int64 [N], leading tokens that are the trunk's own.
        fork: int64 [N], the last trunk position a block's branch sees.
        branch: int64 [N, K], branch tokens.
        length: int64 [N], how many of them are fed.
        on_trunk: bool [N, K], valid rows that are read at a trunk slot.
        on_branch: bool [N, K], valid rows that are read at a branch slot.
    """

    run: Tensor
    fork: Tensor
    branch: Tensor
    length: Tensor
    on_trunk: Tensor
    on_branch: Tensor
    row: list[int]

    @staticmethod
    def of(lessons: list[Lesson], blocks: Blocks) -> _Plan:
        run = trunk_run(lessons, blocks)
        drafted = blocks.tokens.shape[1]
        length = (blocks.valid.long().sum(1) - 1 - run).clamp(min=0)
        index = (run.unsqueeze(1) + torch.arange(drafted, device=run.device)).clamp(max=drafted - 1)
        trunk_slot = blocks.position - 1 <= run.unsqueeze(1)
        return _Plan(
            run,
            blocks.anchor + run,
            blocks.tokens.gather(1, index),
            length,
            blocks.valid & trunk_slot,
            blocks.valid & ~trunk_slot,
            blocks.row.tolist(),
        )

    def pieces(self, wanted: set[int], resumed: bool, tokens_at_once: int) -> list[_Piece]:
        """The blocks of the wanted lessons in pieces that fit the budget; resumed trunks need only their branches."""
        fork, length = self.fork.tolist(), self.length.tolist()
        read = (self.on_branch if resumed else self.on_branch | self.on_trunk).any(1).tolist()
        of: dict[int, list[int]] = {}
        for number, row in enumerate(self.row):
            if read[number] and row in wanted:
                of.setdefault(row, []).append(number)
        found = []
        for row, numbers in of.items():
            reach = max(fork[n] for n in numbers) + 1
            part: list[int] = []
            for n in numbers:
                if part and reach + sum(length[m] for m in part) + length[n] > tokens_at_once:
                    found.append((row, part))
                    part = []
                part.append(n)
            found.append((row, part))
        return [self._piece(row, part, fork, length) for row, part in found]

    def _piece(self, row: int, numbers: list[int], fork: list[int], length: list[int]) -> _Piece:
        reach = max(fork[n] for n in numbers) + 1
        return _Piece(row, reach, numbers, reach + sum(length[n] for n in numbers))


def _forward(
    target: Any,
    lessons: list[Lesson],
    blocks: Blocks,
    plan: _Plan,
    rows: list[list[_Piece]],
    resumed: bool,
    out: Tensor,
) -> None:
    """Score these pieces in one forward, into `out`."""
    pieces = [piece for row in rows for piece in row]
    device = plan.run.device
    number = torch.tensor([n for piece in pieces for n in piece.blocks], device=device)
    trunk = torch.tensor([i for i, piece in enumerate(pieces) for _ in piece.blocks], device=device)
    packed = pack_branches(
        [torch.tensor(lessons[piece.lesson].trunk.tokens[: piece.reach]) for piece in pieces],
        [i for i, row in enumerate(rows) for _ in row],
        trunk,
        plan.fork[number],
        plan.branch[number],
        plan.length[number],
        aligned=resumed,
    )
    before = blocks.position - 1
    on_trunk = (packed.start[trunk] + blocks.anchor[number]).unsqueeze(1) + before
    on_branch = packed.slot.gather(1, (before - 1 - plan.run[number].unsqueeze(1)).clamp(min=0))
    wanted = plan.on_branch[number] if resumed else blocks.valid[number]
    slot = torch.where(plan.on_branch[number], on_branch, on_trunk)
    read = (packed.row[trunk].unsqueeze(1).expand_as(slot)[wanted], slot[wanted])
    if resumed:
        hidden = target.resume(packed, [lessons[piece.lesson].state for piece in pieces], read)
    else:
        hidden = target.score(packed.tree, read=read).hidden
    block, column = wanted.nonzero(as_tuple=True)
    out[number[block], column] = hidden
