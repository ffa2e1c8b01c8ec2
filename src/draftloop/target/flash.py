"""Attention of a few queries over a cache of fixed size in one kernel, whose cost follows the text, not the cache.

Who sees what is an interval of slots for each query (`bounds`): everything before it, the last few, those of its chunk.
The kernel reads the intervals on the device and visits no slot outside of them, so the host need not know how long the
texts are, and a CUDA graph may hold it. An operator of its own to the compiler, which cannot look inside. Knows no
model; the kernel itself, `flash_kernel`, is imported only where it runs.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from draftloop.core.errors import InputError

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not_flash(device: torch.device, dtype: torch.dtype) -> str:
    """Why the kernel cannot attend there, as a clause; empty if it can."""
    if dtype not in TYPES:
        return f"the kernel flash has no form for {str(dtype).removeprefix('torch.')}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type != "cuda":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return "" if interpreted else f"the kernel flash needs a CUDA GPU and the target is on {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the kernel flash needs a GPU of compute capability 8.0 or newer"
    return ""


def bounds(mask: Tensor) -> Tensor:
    """Who sees what, as intervals.

    Args:
        mask: bool [rows, 1, t, span]; what a query sees lies in one piece.

    Returns:
        int32 [rows, 1, t, 2]: the first slot seen, and the one behind the last; (0, 0) where none is.
    """
    place = torch.arange(mask.shape[-1], dtype=torch.int32, device=mask.device)
    high = torch.where(mask, place + 1, 0).amax(-1)
    low = torch.where(mask, place, mask.shape[-1]).amin(-1)
    return torch.stack([torch.minimum(low, high), high], -1)


def check_pieces(mask: Tensor) -> None:
    """Ask the device whether all that a query sees lies in one piece.

    Raises:
        InputError: it does not, so `bounds` would show more.
    """
    low, high = bounds(mask).unbind(-1)
    if bool((high - low != mask.sum(-1)).any()):
        raise InputError(
            "a mask of the target has holes, which the kernel flash does not know", fix="Use the kernel matmul or sdpa."
        )


@torch.library.custom_op(
    "draftloop::flash",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor limits, float scale) -> Tensor",
)
def flash(query: Tensor, key: Tensor, value: Tensor, limits: Tensor, scale: float) -> Tensor:
    """Softmax over the slots that each query sees; scores and sums in float32 (FlashAttention-2, arXiv 2307.08691).

    Args:
        query: [rows, heads, t, d] in float32, bfloat16 or float16, of any strides.
        key: [rows, kv heads, capacity, d]; head h reads key head h // (heads // kv heads).
        value: [rows, kv heads, capacity, d_v].
        limits: int32 [rows, 1, t, 2], as `bounds` makes them; none beyond the capacity.
        scale: of the scores.

    Returns:
        [rows, t, heads, d_v] of the value's type, contiguous; 0 where a query sees nothing.
    """
    from draftloop.target.flash_kernel import flash_kernel

    rows, heads, t, width = query.shape
    shared, wide = key.shape[1], value.shape[3]
    query, key, value = (one if one.stride(3) == 1 else one.contiguous() for one in (query, key, value))
    limits = limits.contiguous()
    out = value.new_empty(rows, t, heads, wide)
    stacked = heads // shared * t
    deep, deep_v = (max(16, 1 << (size - 1).bit_length()) for size in (width, wide))
    tall = min(64, max(16, 1 << (stacked - 1).bit_length()))  # a product of tiles has at least 16 rows
    # a few programs wait for memory most of the time: slots are fetched in pieces as large as registers allow
    slots = max(32, min(128, 16384 // (max(deep, deep_v) * key.element_size())))
    with torch.cuda.device_of(query):
        flash_kernel[(rows, shared, -(-stacked // tall))](
            query, key, value, limits, out, scale,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            GROUP=heads // shared, T=t, WIDTH=width, WIDTH_V=wide, DEEP=deep, DEEP_V=deep_v,
            QUERIES=tall, SLOTS=slots, num_warps=4, num_stages=2,
        )  # fmt: skip
    return out


@flash.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, limits: Tensor, scale: float) -> Tensor:
    return value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
