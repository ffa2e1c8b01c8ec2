"""Teacher rows: the target's hidden row for every proposed position, on the drafter's own prefix.

Accepted positions and the first rejected one are read off the trunk; later ones need the branch, which hangs on the
trunk as a tree and is scored in the same forward (arXiv 2605.29343; the tree of arXiv 2611.02846).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftloop.core.blocks import Blocks
from draftloop.core.tree import hang_branches
from draftloop.supervise.lesson import Lesson
from draftloop.supervise.propose import trunk_run


def trunk_rows(lessons: list[Lesson], blocks: Blocks) -> Tensor:
    """Teacher rows of `trunk` proposals, [N, K, H]: the trunk's own, no forward (rows that are not valid are zero)."""
    first = lessons[0].hidden
    assert first is not None
    out = first.new_zeros(*blocks.tokens.shape, first.shape[-1])
    place = blocks.anchor.unsqueeze(1) + blocks.position - 1
    for i, lesson in enumerate(lessons):
        mine = (blocks.row == i).unsqueeze(1) & blocks.valid
        assert lesson.hidden is not None
        out[mine] = lesson.hidden[place[mine]]
    return out


def recorded_rows(lessons: list[Lesson], blocks: Blocks) -> Tensor:
    """Teacher rows of `recorded` proposals, [N, K, H], from the verification that really ran."""
    rows = []
    for row, anchor in zip(blocks.row.tolist(), blocks.anchor.tolist(), strict=True):
        lesson = lessons[row]
        assert lesson.verified is not None, "the rollout kept no target rows: use teacher: recompute"
        rows.append(lesson.verified[lesson.step_at[anchor], :-1])
    return torch.stack(rows)


def scored_rows(target: Any, lessons: list[Lesson], blocks: Blocks) -> Tensor:
    """Teacher rows of any proposals, [N, K, H], from one target forward over trunks and branches."""
    drafted = blocks.tokens.shape[1]
    run = trunk_run(lessons, blocks)
    # d_1..d_run are trunk tokens; d_{run+1}..d_{K-1} hang at anchor + run; d_K is never an input
    last = blocks.valid.long().sum(1) - 1
    length = (last - run).clamp(min=0)
    index = (run.unsqueeze(1) + torch.arange(drafted, device=run.device)).clamp(max=drafted - 1)
    branch = blocks.tokens.gather(1, index)
    trunks = [torch.tensor(lesson.trunk.tokens) for lesson in lessons]
    tree, slot = hang_branches(trunks, blocks.row, blocks.anchor + run, branch, length)
    tree = type(tree)(**{name: value.to(target.device) for name, value in vars(tree).items()})
    hidden = target.score(tree).hidden
    k = blocks.position - 1  # drafted tokens before this position
    on_trunk = blocks.anchor.unsqueeze(1) + k
    on_branch = slot.gather(1, (k - 1 - run.unsqueeze(1)).clamp(min=0))
    where = torch.where(k <= run.unsqueeze(1), on_trunk, on_branch).clamp(min=0, max=hidden.shape[1] - 1)
    rows = hidden[blocks.row.unsqueeze(1), where.to(hidden.device)]
    return rows * blocks.valid.unsqueeze(-1).to(rows.dtype)
