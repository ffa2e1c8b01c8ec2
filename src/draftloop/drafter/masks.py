"""Who sees whom in packed drafting, and the attention that obeys it.

Blocks: a dense mask on the CPU, FlexAttention on CUDA. Chains: a dense mask, FlexAttention where it would be too large.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from draftloop.core.flex import TILE, flex, tiled_mask
from draftloop.core.host import sent


def block_rule(
    anchor: Tensor,
    context: int,
    size: int,
    row: Tensor,
    q: Tensor,
    k: Tensor,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """Query slot q of row `row` may see context below its anchor, and its own block (causal: up to itself).

    With a window, context at a distance of `window` or more from the slot's own position is not seen.
    """
    block = q // size
    own = (k - context) // size == block
    if causal:
        own = own & (k - context <= q)
    before = k < anchor[row, block]
    if window is not None:
        before = before & (anchor[row, block] + q % size - k < window)
    return torch.where(k < context, before, own)


def block_mask(anchor: Tensor, context: int, size: int, causal: bool = False, window: int | None = None) -> Any:
    """The mask of N blocks of `size` slots over `context` feature positions.

    Args:
        anchor: int64 [b, N].
        causal: slots see no later slot of their block.
        window: how far back a slot sees the context; None = all of it.

    Returns:
        bool [b, 1, N * size, context + N * size], or a FlexAttention BlockMask on CUDA.
    """
    b, n = anchor.shape
    queries, keys = n * size, context + n * size
    if anchor.is_cuda:
        return tiled_block_mask(anchor, context, size, causal, window)
    row, q, k = torch.arange(b).view(b, 1, 1), torch.arange(queries).view(1, -1, 1), torch.arange(keys).view(1, 1, -1)
    return block_rule(anchor, context, size, row, q, k, causal, window).unsqueeze(1)


def tiled_block_mask(anchor: Tensor, context: int, size: int, causal: bool = False, window: int | None = None) -> Any:
    """As `block_mask`, always a BlockMask."""
    queries = anchor.shape[1] * size

    def see(row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return block_rule(anchor, context, size, row, q, k, causal, window)

    return tiled_mask(see, *block_tiles(anchor, context, size, causal, window), queries, context + queries)


def block_tiles(
    anchor: Tensor, context: int, size: int, causal: bool = False, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Which tiles of `block_rule` hold anything, and which of them everything: told by the anchors alone.

    Args:
        anchor: int64 [b, N], at most `context`.
        context, size, causal, window: as for `block_mask`.

    Returns:
        bool [b, query tiles, key tiles], twice. With a window the first may hold tiles that are empty.
    """
    queries, keys = anchor.shape[1] * size, context + anchor.shape[1] * size
    # what depends on no anchor, on the host: a tile's queries lie in blocks `first` to `last`, whose keys are their own
    start, left = torch.arange(0, queries, TILE), torch.arange(0, keys, TILE)
    end, right = (start + TILE).clamp(max=queries), (left + TILE).clamp(max=keys)
    first, last = start // size, (end - 1) // size
    behind = end if causal else (last + 1) * size
    own = (right > context + first[:, None] * size) & (left < context + behind[:, None])
    own, left = sent(own, anchor.device), sent(left, anchor.device)
    least, most = _extremes(anchor.repeat_interleave(size, 1, output_size=queries))
    some, full = left < most, left + TILE <= least
    if window is not None:  # a slot at offset o of its block sees from anchor + o - window + 1 on
        some = some & (left + TILE > least - window + 1)
        full = full & (left >= most + size - window)
    return own | some, full


def _extremes(anchor: Tensor) -> list[Tensor]:
    """Lowest and highest anchor of each tile, [b, tiles, 1], of those of queries [b, q]; 0 behind the last query."""
    slots = F.pad(anchor, (0, -anchor.shape[1] % TILE))  # so a last tile that is not whole is never full
    return [one.unsqueeze(-1) for one in slots.unflatten(1, (-1, TILE)).aminmax(dim=-1)]


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    """Attention of [b, heads, q, d] over [b, kv heads, k, d] under a dense or a block mask."""
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (one.to(computed_in(query)) for one in (query, key, value))
    if isinstance(mask, Tensor):
        # the mask's kernel on the CPU has no grouped form: repeat keys and values for the query heads that share them
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return _apart(query, key, value, mask)


_apart = torch.compiler.disable(
    flex
)  # layers that are compiled leave it as it is: its masks are rules, closed over sizes


def chain_rule(anchor: Tensor, owner: Tensor, row: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Chain q of row `row` sees slots 1 to anchor - 1 of context (owner -1), and behind them what it owns."""
    return torch.where(owner[k] < 0, (k > 0) & (k < anchor[row, q]), owner[k] == q)


Pair = tuple[Tensor, Tensor]  # keys and values
_NUMBERS = 1 << 28  # of a mask that is held whole: half a GiB in bfloat16


class PackedChains:
    """Attention of N chains a row in one packed pass, slot after slot; what they see is one mask for all slots.

    Keys lie slot by slot behind the context, chain by chain in a slot: a later slot sees more of the same row.

    Args:
        anchor: int64 [b, N].
        slots: K, how many there will be.
    """

    def __init__(self, anchor: Tensor, slots: int) -> None:
        self._anchor, self._slots = anchor, slots
        self._mask: Tensor | None = None

    def begin(self, context: Pair) -> None:
        """Begin chains over keys and values [b, kv heads, C, d] by slot of the cache; slot 0 is never seen."""
        self._held, self._context = context, context[0].shape[2]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """The next slot.

        Args:
            query: [b, heads, N, d].
            key, value: [b, kv heads, N, d], seen by their own chain from now on.
            scale: of the scores; default 1 / sqrt(d).

        Returns:
            [b, heads, N, d].
        """
        kind = computed_in(query)
        keys, values = (
            torch.cat([held.to(kind), new.to(kind)], 2) for held, new in zip(self._held, (key, value), strict=True)
        )
        self._held = keys, values
        (b, kv, length), (heads, n, d) = keys.shape[:3], query.shape[1:]
        if query.is_cuda and b * heads // kv * n * (self._context + self._slots * n) > _NUMBERS:
            return flex(query.to(kind), keys, values, self._tiled(length), scale)
        if self._mask is None:
            self._mask = self._numbers(heads // kv, kind)
        grouped = query.to(kind).view(b, kv, heads // kv, n, d).flatten(2, 3)  # so no key is copied
        mask = self._mask[..., :length]
        with _steady(query.device):
            found = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
        return found.unflatten(2, (-1, n)).flatten(1, 2)

    def _owner(self) -> Tensor:
        """int64 [C + K * N]: which chain a key is of, -1 for context."""
        context = self._anchor.new_full((self._context,), -1)
        return torch.cat([context, torch.arange(self._anchor.shape[1], device=context.device).repeat(self._slots)])

    def _numbers(self, group: int, kind: torch.dtype) -> Tensor:
        """[b, 1, group * N, C + K * N] to add to scores; rows are multiples of 16, or CUDA would pad them anew."""
        (b, n), owner = self._anchor.shape, self._owner()
        row, q, k = (torch.arange(size, device=owner.device) for size in (b, n, len(owner)))
        seen = chain_rule(self._anchor, owner, row.view(-1, 1, 1), q.view(1, -1, 1), k)
        hidden = F.pad(~seen, (0, -len(owner) % 16)).repeat(1, group, 1).unsqueeze(1)
        return torch.zeros(hidden.shape, dtype=kind, device=owner.device).masked_fill_(hidden, torch.finfo(kind).min)

    def _tiled(self, length: int) -> Any:
        owner = self._owner()

        def see(row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return chain_rule(self._anchor, owner, row, q, k)

        n = self._anchor.shape[1]
        tiles = chain_tiles(self._anchor, self._context, (length - self._context) // n)
        return tiled_mask(see, *tiles, n, length)


def _steady(device: torch.device) -> AbstractContextManager[None]:
    """On CUDA only kernels that serve every length: cuDNN's are planned anew for each, and each slot's is another."""
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]) if device.type == "cuda" else nullcontext()


@dataclass
class CachedChains:
    """Attention of one slot of N chains a row over a cache, in the same shapes whichever slot it is.

    Attributes:
        context: keys and values [b, kv heads, C, d] by slot of the cache; slot 0 is never seen.
        own: keys and values [b, kv heads, N, J, d] of the chains' other slots.
        anchor: int64 [b, N].
        seen: bool [J + 1], which of the own ones count, the present one last.
        key, value: [b, kv heads, N, 1, d] of the present slot, once it has attended.
    """

    context: Pair
    own: Pair
    anchor: Tensor
    seen: Tensor
    key: Any = None
    value: Any = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """As `PackedChains.attend`."""
        self.key, self.value = key.unsqueeze(3), value.unsqueeze(3)
        pairs = zip(self.own, (self.key, self.value), strict=True)
        keys, values = (torch.cat([earlier, new.to(earlier.dtype)], 3) for earlier, new in pairs)
        return attend_chain(query, self.context, (keys, values), self.anchor, self.seen, scale)


def attend_chain(
    query: Tensor, context: Pair, own: Pair, anchor: Tensor, seen: Tensor, scale: float | None = None
) -> Tensor:
    """Attention of N chains a row over the context below their anchors and each over its own slots, in one softmax.

    Args:
        query: [b, heads, N, d].
        context: keys and values [b, kv heads, C, d]; slot 0 is never seen.
        own: keys and values [b, kv heads, N, J, d].
        anchor: int64 [b, N].
        seen: bool [J], which of the own ones count.
        scale: of the scores; default 1 / sqrt(d).

    Returns:
        [b, heads, N, d].
    """
    kind = computed_in(query)
    query = query.to(kind)
    if torch.is_autocast_enabled(query.device.type):
        context, own = ((pair[0].to(kind), pair[1].to(kind)) for pair in (context, own))
    b, heads, n, d = query.shape
    kv, length = context[0].shape[1:3]
    grouped = query.view(b, kv, heads // kv, n, d)  # the heads that share keys go into the length: none is copied
    far = (grouped.flatten(2, 3) @ context[0].to(query.dtype).transpose(-1, -2)).unflatten(2, (-1, n))
    near = torch.einsum("bhgnd,bhnjd->bhgnj", grouped, own[0])
    place = torch.arange(length, device=anchor.device)
    visible = (place > 0) & (place < anchor.unsqueeze(-1))
    mask = torch.cat([visible, seen.expand(b, n, -1)], -1)[:, None, None]
    scores = torch.cat([far, near], -1) * (d**-0.5 if scale is None else scale)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    weight = scores.masked_fill(~mask, float("-inf")).softmax(-1).to(query.dtype)
    far = (weight[..., :length].flatten(2, 3) @ context[1].to(query.dtype)).unflatten(2, (-1, n))
    near = torch.einsum("bhgnj,bhnjd->bhgnd", weight[..., length:], own[1])
    return (far + near).flatten(1, 2)


def computed_in(like: Tensor) -> torch.dtype:
    """The type that is computed in: autocast's, or the tensor's own."""
    device = like.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else like.dtype


def chain_tiles(anchor: Tensor, context: int, slots: int) -> tuple[Tensor, Tensor]:
    """As `block_tiles`, of `chain_rule`: keys lie slot by slot behind the context, chain by chain in a slot."""
    n = anchor.shape[1]
    start, left = torch.arange(0, n, TILE), torch.arange(0, context + n * slots, TILE)
    end, right = (start + TILE).clamp(max=n), left + TILE
    shift = context + n * torch.arange(slots).view(-1, 1, 1)
    own = ((right > shift + start[:, None]) & (left < shift + end[:, None])).any(0)
    own, left = sent(own, anchor.device), sent(left, anchor.device)
    least, most = _extremes(anchor)
    return own | (left.clamp(min=1) < most), (left > 0) & (left + TILE <= least)
