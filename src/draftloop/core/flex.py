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


def block_mask(see: MaskMod, rows: int, queries: int, keys: int, device: torch.device) -> Any:
    """The BlockMask [rows, 1, queries, keys] of a mask function of (row, head, query, key)."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(see, rows, None, queries, keys, device=str(device))


def flex(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float | None = None) -> Tensor:
    """Attention of [b, heads, q, d] over [b, kv heads, k, d] under a BlockMask."""
    grouped = query.shape[1] != key.shape[1]
    return _flex(query.is_cuda)(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)  # type: ignore[no-any-return]


@cache
def _flex(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    if not compiled:
        return flex_attention
    # each mask rule (drafter, tree, window) compiles anew, for one row and for several; beyond the limit of 8 it would
    # run in its eager form, which holds all scores at once
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_attention, dynamic=True)
