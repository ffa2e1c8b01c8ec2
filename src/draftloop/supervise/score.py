"""Teacher rows: the target's hidden row for every proposed position, on the drafter's own prefix.

Accepted positions and the first rejected one are read off the trunk; later ones need the branch, which hangs on the
trunk as a tree. Trunks and branches of many lessons share rows and forwards (arXiv 2605.29343; the tree of arXiv
2611.02846). A lesson that holds its trunk's state has only its branches fed; of any other the trunk is fed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from draftloop.core.blocks import Blocks
from draftloop.core.host import sent
from draftloop.core.tree import pack_branches, share_rows
from draftloop.supervise.lesson import Lesson, slots_at_once
from draftloop.supervise.propose import recorded_at, trunk_run


def trunk_rows(lessons: list[Lesson], blocks: Blocks) -> Tensor:
    """Teacher rows of `trunk` proposals, [N, K, H]: the trunk's own, no forward (rows that are not valid are zero)."""
    return _read([lesson.hidden for lesson in lessons], blocks, blocks.valid)


def _read(hidden: list[Tensor | None], blocks: Blocks, wanted: Tensor) -> Tensor:
    """[N, K, H]: the wanted positions' rows of each trunk's [T_i, H] (None: not wanted), 0 elsewhere."""
    sizes = [0 if rows is None else len(rows) for rows in hidden]
    start = sent([0, *accumulate(sizes[:-1])], wanted.device)[blocks.row]
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
            several times, and one longer than it goes alone. Default: `slots_at_once`.

    Returns:
        [N, K, H]; rows that are not valid are zero.
    """
    tokens_at_once = tokens_at_once or slots_at_once(target)
    plan = _Plan.of(lessons, blocks)
    kept = {i for i, one in enumerate(lessons) if one.state is not None and one.state.version == target.version}
    out = torch.zeros(*blocks.tokens.shape, target.hidden_size, dtype=target.dtype, device=target.device)
    if kept:
        states = [one.state if i in kept else None for i, one in enumerate(lessons)]
        held = torch.tensor([state is not None for state in states])[plan.row]
        there = sent(plan.on_trunk & held.unsqueeze(1), out.device)
        out = _read([None if state is None else state.hidden for state in states], blocks, there)
    for resumed in (False, True):
        pieces = plan.pieces(kept if resumed else set(range(len(lessons))) - kept, resumed, tokens_at_once)
        for rows in share_rows([piece.slots for piece in pieces], tokens_at_once):
            _forward(target, lessons, plan, [[pieces[i] for i in row] for row in rows], resumed, out)
    return out


@dataclass(frozen=True)
class _Piece:
    """Some blocks of one lesson, and the part of its trunk that they need."""

    lesson: int
    reach: int  # trunk tokens
    blocks: Tensor  # int64 [n], which
    slots: int  # taken in a row


@dataclass(frozen=True)
class _Plan:
    """How each block hangs on its trunk; on the host but for `tokens`, after one question to the device.

    d_1..d_run are trunk tokens; d_{run+1}..d_{K-1} hang at anchor + run; d_K is never an input.

    Attributes:
        tokens: int64 [N, K], branch tokens, on the device of the blocks.
        row: int64 [N], the lesson of each block.
        anchor: int64 [N].
        run: int64 [N], leading tokens that are the trunk's own.
        fork: int64 [N], the last trunk position a block's branch sees.
        length: int64 [N], how many branch tokens are fed.
        on_trunk: bool [N, K], valid rows that are read at a trunk slot.
        on_branch: bool [N, K], valid rows that are read at a branch slot.
    """

    tokens: Tensor
    row: Tensor
    anchor: Tensor
    run: Tensor
    fork: Tensor
    length: Tensor
    on_trunk: Tensor
    on_branch: Tensor

    @staticmethod
    def of(lessons: list[Lesson], blocks: Blocks) -> _Plan:
        run, drafted = trunk_run(lessons, blocks), blocks.tokens.shape[1]
        index = (run.unsqueeze(1) + torch.arange(drafted, device=run.device)).clamp(max=drafted - 1)
        tokens = blocks.tokens.gather(1, index)
        told = torch.cat([torch.stack([blocks.row, blocks.anchor, run], 1), blocks.valid], 1).int().cpu().long()
        (row, anchor, run), valid = told[:, :3].contiguous().unbind(1), told[:, 3:].bool()
        length = (valid.long().sum(1) - 1 - run).clamp(min=0)
        trunk_slot = torch.arange(drafted) <= run.unsqueeze(1)
        return _Plan(tokens, row, anchor, run, anchor + run, length, valid & trunk_slot, valid & ~trunk_slot)

    def pieces(self, wanted: set[int], resumed: bool, tokens_at_once: int) -> list[_Piece]:
        """The blocks of the wanted lessons in pieces that fit the budget; resumed trunks need only their branches."""
        read = (self.on_branch if resumed else self.on_branch | self.on_trunk).any(1)
        numbers = read.nonzero().squeeze(1)
        numbers = numbers[torch.argsort(self.row[numbers], stable=True)]
        rows, counts = torch.unique_consecutive(self.row[numbers], return_counts=True)
        fork, length = self.fork[numbers].tolist(), self.length[numbers].tolist()  # a device waits for this: no tensors
        found, begin = [], 0
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            end = begin + count
            for size in _parts(max(fork[begin:end]) + 1, length[begin:end], tokens_at_once) if row in wanted else ():
                part = slice(begin, begin + size)
                reach = max(fork[part]) + 1
                found.append(_Piece(row, reach, numbers[part], reach + sum(length[part])))
                begin += size
            begin = end
        return found


def _parts(reach: int, lengths: list[int], tokens_at_once: int) -> list[int]:
    """How many blocks of one lesson go together, one after the other, each time with a trunk of `reach` tokens."""
    sizes, used = [0], reach
    for more in lengths:
        if sizes[-1] and used + more > tokens_at_once:
            sizes.append(0)
            used = reach
        sizes[-1] += 1
        used += more
    return sizes


def _forward(
    target: Any, lessons: list[Lesson], plan: _Plan, rows: list[list[_Piece]], resumed: bool, out: Tensor
) -> None:
    """Score these pieces in one forward, into `out`."""
    pieces = [piece for row in rows for piece in row]
    number = torch.cat([piece.blocks for piece in pieces])
    trunk = torch.repeat_interleave(torch.tensor([len(piece.blocks) for piece in pieces]))
    packed = pack_branches(
        [lessons[piece.lesson].text[: piece.reach] for piece in pieces],
        [i for i, row in enumerate(rows) for _ in row],
        trunk,
        plan.fork[number],
        plan.tokens[sent(number, out.device)],
        plan.length[number],
        aligned=resumed,
    )
    before = torch.arange(plan.tokens.shape[1]).unsqueeze(0)
    on_trunk = (packed.start[trunk] + plan.anchor[number]).unsqueeze(1) + before
    on_branch = packed.slot.gather(1, (before - 1 - plan.run[number].unsqueeze(1)).clamp(min=0))
    wanted = plan.on_branch[number]
    slot = torch.where(wanted, on_branch, on_trunk)
    if not resumed:
        wanted = wanted | plan.on_trunk[number]
    block, column = wanted.nonzero(as_tuple=True)
    at, *read = sent(
        torch.stack([number[block] * before.shape[1] + column, packed.row[trunk][block], slot[block, column]]),
        out.device,
    )
    if resumed:
        hidden = target.resume(packed, [lessons[piece.lesson].state for piece in pieces], tuple(read))
    else:
        hidden = target.score(packed.tree, read=tuple(read), longest=packed.longest).hidden
    out.flatten(0, 1).index_copy_(0, at, hidden)
