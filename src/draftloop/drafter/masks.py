"""Who sees whom in packed drafting, and the attention that obeys it: a dense mask on the CPU, FlexAttention on CUDA."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftloop.core.flex import block_mask as flex_mask
from draftloop.core.flex import flex


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

        def see(row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return block_rule(anchor, context, size, row, q, k, causal, window)

        return flex_mask(see, b, queries, keys, anchor.device)
    row, q, k = torch.arange(b).view(b, 1, 1), torch.arange(queries).view(1, -1, 1), torch.arange(keys).view(1, 1, -1)
    return block_rule(anchor, context, size, row, q, k, causal, window).unsqueeze(1)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    """Attention of [b, heads, q, d] over [b, kv heads, k, d] under a dense or a block mask."""
    if torch.is_autocast_enabled(query.device.type):
        kind = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(kind), key.to(kind), value.to(kind)
    if isinstance(mask, Tensor):
        # the mask's kernel on the CPU has no grouped form: repeat keys and values for the query heads that share them
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return flex(query, key, value, mask)
