"""The packed layout of trunks and branches, and who may see whom.

One row holds one or several trunks and the branches that hang on them; a slot sees its ancestors and nothing else.
Positions are logical (the place in the text), not slots: two branches may hold different tokens for one position.
Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Tree:
    """N slots a row, every field int64 [b, N].

    Attributes:
        tokens: token of the slot (0 on padding).
        position: logical position (RoPE).
        trunk: which trunk of the row; -1 on padding, which sees only itself.
        branch: which branch of the row; -1 on trunk slots.
        fork: last trunk position the slot may see; a trunk slot's own position, a branch's fork point.
    """

    tokens: Tensor
    position: Tensor
    trunk: Tensor
    branch: Tensor
    fork: Tensor

    def dense_mask(self) -> Tensor:
        """Bool [b, 1, N, N], True where the query (third axis) may see the key (last axis)."""
        slots = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        rows = torch.arange(self.tokens.shape[0], device=self.tokens.device)
        see = self.mask_mod()
        return see(rows[:, None, None], rows.new_zeros(()), slots[None, :, None], slots[None, None, :]).unsqueeze(1)

    def mask_mod(self) -> MaskMod:
        """The same rule as a FlexAttention mask function of (row, head, query slot, key slot)."""

        def see(row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            same_trunk = (self.trunk[row, q] == self.trunk[row, k]) & (self.trunk[row, q] >= 0)
            on_trunk = (self.branch[row, k] < 0) & (self.position[row, k] <= self.fork[row, q])
            own = (self.branch[row, k] == self.branch[row, q]) & (self.branch[row, q] >= 0)
            earlier = self.position[row, k] <= self.position[row, q]
            return (same_trunk & earlier & (on_trunk | own)) | (q == k)

        return see


def hang_branches(
    trunks: list[Tensor], row: Tensor, fork: Tensor, tokens: Tensor, length: Tensor
) -> tuple[Tree, Tensor]:
    """Lay one trunk a row and its branches behind it.

    Args:
        trunks: b tensors int64 [T_i].
        row: int64 [M], the trunk each branch hangs on.
        fork: int64 [M], the last trunk position each branch sees; its first token stands at fork + 1.
        tokens: int64 [M, L].
        length: int64 [M], how many of the L tokens are real; 0 = no branch.

    Returns:
        the tree, and int64 [M, L]: the slot of each branch token (-1 where there is none). Trunk position t is slot t.
    """
    device = tokens.device
    batch = len(trunks)
    sizes = torch.tensor([t.numel() for t in trunks], device=device)
    row, fork, length = row.to(device), fork.to(device), length.to(device)
    # the offset of each branch within its row: lengths of the earlier branches of the same row
    order = torch.argsort(row, stable=True)
    running = length[order].cumsum(0) - length[order]
    per_row = torch.zeros(batch, dtype=torch.int64, device=device).index_add_(0, row, length)
    row_start = per_row.cumsum(0) - per_row
    offset = torch.empty_like(length)
    offset[order] = running - row_start[row[order]]
    width = int((sizes + per_row).max())

    tree = {name: torch.full((batch, width), fill, dtype=torch.int64, device=device) for name, fill in _EMPTY.items()}
    for i, trunk in enumerate(trunks):
        n = trunk.numel()
        tree["tokens"][i, :n] = trunk.to(device)
        tree["position"][i, :n] = tree["fork"][i, :n] = torch.arange(n, device=device)
        tree["trunk"][i, :n] = 0
    steps = torch.arange(tokens.shape[1], device=device).unsqueeze(0)
    real = steps < length.unsqueeze(1)
    slot = torch.where(real, (sizes[row] + offset).unsqueeze(1) + steps, -1)
    at = (row.unsqueeze(1).expand_as(slot)[real], slot[real])
    tree["tokens"][at] = tokens[real]
    tree["position"][at] = (fork.unsqueeze(1) + 1 + steps)[real]
    tree["trunk"][at] = 0
    tree["branch"][at] = torch.arange(row.numel(), device=device).unsqueeze(1).expand_as(slot)[real]
    tree["fork"][at] = fork.unsqueeze(1).expand_as(slot)[real]
    return Tree(**tree), slot


_EMPTY = {"tokens": 0, "position": 0, "trunk": -1, "branch": -1, "fork": -1}
