"""FlexAttention, compiled on CUDA; on the CPU its slow eager form, which computes the same without a backward pass.

Mask functions capture tensors, never Python numbers: captured numbers become symbols of the compiled kernel, which it
refuses. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
TILE = 128  # queries and keys that FlexAttention takes or skips together


def block_mask(see: MaskMod, rows: int, queries: int, keys: int, device: torch.device) -> Any:
    """The BlockMask [rows, 1, queries, keys] of a mask function of (row, head, query, key)."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(see, rows, None, queries, keys, device=str(device), BLOCK_SIZE=TILE)


def tiled_mask(see: MaskMod, some: Tensor, full: Tensor, queries: int, keys: int) -> Any:
    """The same where it is known beforehand which tiles of `TILE` queries and keys hold what.

    `block_mask` asks the function about every query and key and counts.

    Args:
        some: bool [rows, query tiles, key tiles], false only where the function is false throughout.
        full: the same, true only where it is true throughout; tiles that reach beyond the end are not full.
    """
    from torch.nn.attention.flex_attention import BlockMask

    kinds = torch.stack([some & ~full, full]).unsqueeze(2).int()  # FlexAttention applies the function in the first kind
    (partly, whole), (partly_back, whole_back) = _listed(kinds), _listed(kinds.transpose(-2, -1))
    return BlockMask(
        seq_lengths=(queries, keys),
        kv_num_blocks=partly[0],
        kv_indices=partly[1],
        full_kv_num_blocks=whole[0],
        full_kv_indices=whole[1],
        q_num_blocks=partly_back[0],
        q_indices=partly_back[1],
        full_q_num_blocks=whole_back[0],
        full_q_indices=whole_back[1],
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=see,
    )


def _listed(kinds: Tensor) -> list[tuple[Tensor, Tensor]]:
    """int32 [kinds, ..., m] of 0 and 1 -> of each kind how many ones, int32 [...], and [..., m] where, ones first."""
    order = kinds.argsort(dim=-1, descending=True, stable=True).int()
    return list(zip(kinds.sum(-1, dtype=torch.int32).contiguous(), order.contiguous(), strict=True))


def flex(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float | None = None) -> Tensor:
    """Attention of [b, heads, q, d] over [b, kv heads, k, d] under a BlockMask."""
    grouped = query.shape[1] != key.shape[1]
    return _flex(query.is_cuda)(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)  # type: ignore[no-any-return]


@cache
def _flex(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    if not compiled:
        return flex_attention
    many_compilations()  # beyond the limit it would run in its eager form, which holds all scores at once
    return torch.compile(flex_attention, dynamic=True)


def many_compilations() -> None:
    """Let a function compile more than 8 times: for each mask rule, for one row and for several, with a gradient..."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
