"""The packed layout of trunks and branches, and who may see whom.

One row holds one or several trunks and the branches that hang on them; a slot sees its ancestors and nothing else.
Positions are logical (the place in the text), not slots: two branches may hold different tokens for one position.
Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftloop.core.flex import MaskMod, block_mask
from draftloop.core.host import sent


def lowest_seen(position: Tensor, window: int | None = None, chunk: int | None = None) -> Tensor | None:
    """Where the sight of queries at logical positions int64 [...] begins; None = at the start of the text.

    Args:
        position: of the queries.
        window: what stands `window` or more positions before the query is hidden.
        chunk: what stands before the query's own chunk of `chunk` positions is hidden.
    """
    bounds = [] if window is None else [position - window + 1]
    bounds += [] if chunk is None else [position // chunk * chunk]
    return torch.stack(bounds).amax(0) if bounds else None


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

    def dense_mask(self, first: int = 0, window: int | None = None, chunk: int | None = None) -> Tensor:
        """Bool [b, 1, N - first, N]: `mask_mod`, written out."""
        rows, slots = (torch.arange(size, device=self.tokens.device) for size in self.tokens.shape)
        see = self.mask_mod(first, window, chunk)
        seen = see(rows[:, None, None], rows.new_zeros(()), slots[None, : len(slots) - first, None], slots)
        return seen.unsqueeze(1)

    def block_mask(self, first: int = 0, window: int | None = None, chunk: int | None = None) -> Any:
        """FlexAttention's BlockMask [b, 1, N - first, N] of the same rule."""
        batch, width = self.tokens.shape
        return block_mask(self.mask_mod(first, window, chunk), batch, width - first, width, self.tokens.device)

    def ancestors(self, depth: int) -> Tensor:
        """The chain above each slot, for mixers that reach a fixed number of tokens back (convolutions, n-grams).

        Args:
            depth: how many steps, the slot itself included.

        Returns:
            int64 [b, N, depth]: the slot itself, its parent, the parent's parent, ...; -1 above a root.
        """
        batch, width = self.tokens.shape
        row = torch.arange(batch, device=self.tokens.device).unsqueeze(1).expand_as(self.tokens)
        branches, trunks = int(self.branch.max()) + 2, int(self.trunk.max()) + 1
        # where each (line, position) stands; line 0 of a trunk is the trunk itself, line 1 + i its branch i
        places = int(self.position.max()) + 1
        line = (row * trunks + self.trunk.clamp(min=0)) * branches
        real = self.trunk >= 0
        at = torch.full((batch * trunks * branches * places,), -1, dtype=torch.int64, device=self.tokens.device)
        slot = torch.arange(width, device=self.tokens.device).expand_as(self.tokens)
        at[((line + self.branch + 1) * places + self.position)[real]] = slot[real]
        wanted = self.position.unsqueeze(-1) - torch.arange(depth, device=self.tokens.device)
        own = torch.where(wanted > self.fork.unsqueeze(-1), self.branch.unsqueeze(-1) + 1, 0)
        chain = at[((line.unsqueeze(-1) + own) * places + wanted).clamp(min=0)]
        chain = torch.where((wanted >= 0) & real.unsqueeze(-1), chain, -1)
        chain[..., 0] = slot
        return chain

    def lines(self) -> Lines:
        """The same tree as token sequences, for mixers that read tokens in their order (recurrences)."""
        batch, width = self.tokens.shape
        row = torch.arange(batch, device=self.tokens.device).unsqueeze(1).expand_as(self.tokens)
        slot = torch.arange(width, device=self.tokens.device).expand_as(self.tokens)
        wide = max(int(self.trunk.max()), int(self.branch.max()), 0) + 1
        on_trunk, on_branch = (self.trunk >= 0) & (self.branch < 0), self.branch >= 0

        def laid(chosen: Tensor, key: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            names, line = torch.unique(key[chosen], return_inverse=True)
            longest = int(place[chosen].max()) + 1 if names.numel() else 0
            table = torch.full((names.numel(), longest), -1, dtype=torch.int64, device=key.device)
            table[line, place[chosen]] = slot[chosen]
            return names, line, table

        trunk_key = row * wide + self.trunk
        trunks, _, trunk_slot = laid(on_trunk, trunk_key, self.position)
        branches, line, branch_slot = laid(on_branch, row * wide + self.branch, self.position - self.fork - 1)
        trunk, fork = branches.new_zeros(branches.shape), branches.new_zeros(branches.shape)
        trunk[line] = torch.searchsorted(trunks, trunk_key[on_branch])
        fork[line] = self.fork[on_branch]
        return Lines(trunks // wide, trunk_slot, branches // wide, branch_slot, trunk, fork)

    def mask_mod(self, first: int = 0, window: int | None = None, chunk: int | None = None) -> MaskMod:
        """The rule, as a function of (row, head, query, key): whether query slot `first` + query sees key slot key.

        Args:
            first: the slot of query 0.
            window, chunk: how far back it sees, see `lowest_seen`.
        """
        trunk, branch, fork, position = (
            field[:, first:].contiguous() for field in (self.trunk, self.branch, self.fork, self.position)
        )
        slot = torch.arange(self.tokens.shape[1], device=self.tokens.device)[first:]
        lowest = lowest_seen(position, window, chunk)

        def see(row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            same_trunk = (trunk[row, q] == self.trunk[row, k]) & (trunk[row, q] >= 0)
            on_trunk = (self.branch[row, k] < 0) & (self.position[row, k] <= fork[row, q])
            own = (self.branch[row, k] == branch[row, q]) & (branch[row, q] >= 0)
            earlier = self.position[row, k] <= position[row, q]
            if lowest is not None:
                earlier = earlier & (self.position[row, k] >= lowest[row, q])
            return (same_trunk & earlier & (on_trunk | own)) | (slot[q] == k)

        return see


@dataclass(frozen=True)
class Lines:
    """A tree as A trunks and M branches, each a sequence of slots (-1 behind its end).

    Attributes:
        trunk_row: int64 [A], the row of each trunk; trunks of one row stand in the order of their numbers.
        trunk_slot: int64 [A, T].
        row: int64 [M], the row of each branch.
        slot: int64 [M, L].
        trunk: int64 [M], which of the A trunks a branch hangs on.
        fork: int64 [M], the last trunk position that it sees.
    """

    trunk_row: Tensor
    trunk_slot: Tensor
    row: Tensor
    slot: Tensor
    trunk: Tensor
    fork: Tensor


@dataclass(frozen=True)
class Packed:
    """A tree and where its parts stand.

    Attributes:
        tree: the packed rows.
        row: int64 [trunks], the row of each trunk.
        start: int64 [trunks], the slot of each trunk's position 0.
        size: int64 [trunks], how many slots each trunk takes.
        slot: int64 [M, L], the slot of each branch token in its trunk's row (-1 where there is none).
        first: slot from which every row holds branches (and padding) only, if laid out so; else 0.
        longest: tokens of the longest text.
    """

    tree: Tree
    row: Tensor
    start: Tensor
    size: Tensor
    slot: Tensor
    first: int
    longest: int


def hang_branches(
    trunks: list[Tensor], row: Tensor, fork: Tensor, tokens: Tensor, length: Tensor
) -> tuple[Tree, Tensor]:
    """Lay one trunk a row and its branches behind it: `pack_branches` without sharing.

    Returns:
        the tree, and int64 [M, L]: the slot of each branch token (-1 where there is none). Trunk position t is slot t.
    """
    packed = pack_branches(trunks, list(range(len(trunks))), row, fork, tokens, length)
    return packed.tree, packed.slot


def pack_branches(
    trunks: list[Tensor],
    rows: list[int],
    trunk: Tensor,
    fork: Tensor,
    tokens: Tensor,
    length: Tensor,
    *,
    aligned: bool = False,
) -> Packed:
    """Lay trunks side by side in rows, and the branches of a row behind its trunks.

    Args:
        trunks: b tensors int64 [T_i].
        rows: b row numbers from 0; trunks with the same one share a row.
        trunk: int64 [M], the trunk each branch hangs on.
        fork: int64 [M], the last trunk position each branch sees; its first token stands at fork + 1.
        tokens: int64 [M, L].
        length: int64 [M], how many of the L tokens are real; 0 = no branch.
        aligned: let the branches begin at the same slot in every row, so that trunks and branches can be fed apart.

    Returns:
        the tree on the device of `tokens`; where its parts stand on that of `length`. All is laid out on the host,
        which asks the device for nothing if trunk, fork and length are there already.
    """
    device, told = tokens.device, length.device
    trunk, fork, length = trunk.cpu(), fork.cpu(), length.cpu()
    sizes = torch.tensor([t.numel() for t in trunks])
    row = torch.tensor(rows)
    batch = max(rows) + 1
    start, trunk_slots = _side_by_side(row, sizes, batch)
    offset, branch_slots = _side_by_side(row[trunk], length, batch)
    grain = _GRAIN if device.type == "cuda" else 1
    first = _whole(int(trunk_slots.max()), grain) if aligned else 0
    behind = torch.full_like(trunk_slots, first) if aligned else trunk_slots
    width = _whole(int((behind + branch_slots).max()), grain)

    table = torch.tensor(list(_EMPTY.values())).view(-1, 1).repeat(1, batch * width)
    fields = dict(zip(_EMPTY, table, strict=True))
    number = torch.tensor([rows[:i].count(place) for i, place in enumerate(rows)])  # of each trunk within its row
    text = torch.cat([t.cpu() for t in trunks])
    one = torch.repeat_interleave(torch.arange(len(trunks)), sizes, output_size=text.numel())
    place = torch.arange(text.numel()) - (sizes.cumsum(0) - sizes)[one]
    at = row[one] * width + start[one] + place
    fields["tokens"][at] = text
    fields["position"][at] = fields["fork"][at] = place
    fields["trunk"][at] = number[one]
    # of every branch token: its branch, how far it stands behind the fork, and its slot
    branch = torch.repeat_interleave(torch.arange(trunk.numel()), length)
    step = torch.arange(branch.numel()) - (length.cumsum(0) - length)[branch]
    column = (behind[row[trunk]] + offset)[branch] + step
    at = row[trunk][branch] * width + column
    fields["position"][at] = fork[branch] + 1 + step
    fields["trunk"][at] = number[trunk][branch]
    fields["branch"][at] = branch
    fields["fork"][at] = fork[branch]
    slot = torch.full(tokens.shape, -1, dtype=torch.int64)
    slot[branch, step] = column
    longest = int(table[1].max()) + 1

    tree = dict(zip(_EMPTY, sent(table, device).view(len(_EMPTY), batch, width), strict=True))
    if branch.numel():
        there, source = sent(torch.stack([at, branch * tokens.shape[1] + step]), device)
        tree["tokens"].view(-1).index_copy_(0, there, tokens.reshape(-1)[source])
    return Packed(Tree(**tree), sent(row, told), sent(start, told), sent(sizes, told), sent(slot, told), first, longest)


def share_rows(sizes: list[int], tokens_at_once: int) -> list[list[list[int]]]:
    """Which pieces share a row and which rows a forward: first fit, the longest first.

    A row is as wide as the longest piece of its forward, so no slot attends further than that piece needs; a piece
    longer than the budget goes alone.

    Args:
        sizes: slots that each piece takes.
        tokens_at_once: slots of one forward, padding included.

    Returns:
        forwards, each a list of rows, each a list of piece numbers.
    """
    left = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    forwards = []
    while left:
        width = sizes[left[0]]
        rows: list[list[int]] = []
        room: list[int] = []
        later = []
        for piece in left:
            fit = next((r for r, free in enumerate(room) if free >= sizes[piece]), None)
            if fit is None and rows and (len(rows) + 1) * width > tokens_at_once:
                later.append(piece)
                continue
            if fit is None:
                fit = len(rows)
                rows.append([])
                room.append(width)
            rows[fit].append(piece)
            room[fit] -= sizes[piece]
        forwards.append(rows)
        left = later
    return forwards


def _side_by_side(row: Tensor, length: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Where each piece begins among the pieces of its row (in their order), and how long each row comes out."""
    order = torch.argsort(row, stable=True)
    running = length[order].cumsum(0) - length[order]
    per_row = torch.zeros(batch, dtype=torch.int64, device=length.device).index_add_(0, row, length)
    row_start = per_row.cumsum(0) - per_row
    offset = torch.empty_like(length)
    offset[order] = running - row_start[row[order]]
    return offset, per_row


def _whole(size: int, grain: int) -> int:
    """The next multiple of the grain."""
    return -(-size // grain) * grain


_GRAIN = 16  # slots: masks of other widths are copied by CUDA's attention, in every layer
_EMPTY = {"tokens": 0, "position": 0, "trunk": -1, "branch": -1, "fork": -1}
