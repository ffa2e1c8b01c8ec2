"""The Triton kernel of `flash.py`: one program a row and key head walks over the slots that its queries see.

Knows pointers and tiles; does NOT know caches, masks or torch. Imported only where Triton is.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def flash_kernel(
    query, key, value, limits, out, scale,
    query_row, query_head, query_slot, key_row, key_head, key_slot, value_row, value_head, value_slot,
    GROUP: tl.constexpr, T: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    DEEP: tl.constexpr, DEEP_V: tl.constexpr, QUERIES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """GROUP heads of T queries that share a key head, stacked; a softmax that is corrected as larger scores come."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    stacked = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    there = stacked < GROUP * T
    mine = head * GROUP + stacked // T
    place = stacked % T
    depth = tl.arange(0, DEEP)
    depth_v = tl.arange(0, DEEP_V)

    limit = limits + (row * T + place) * 2
    low = tl.load(limit, mask=there, other=2147483647)
    high = tl.load(limit + 1, mask=there, other=0)
    begin = tl.min(low, 0) // SLOTS * SLOTS
    end = tl.max(high, 0)

    from_query = query + row * query_row + mine[:, None] * query_head + place[:, None] * query_slot + depth[None, :]
    q = tl.load(from_query, mask=there[:, None] & (depth < WIDTH)[None, :], other=0.0)
    from_key = key + row * key_row + head * key_head
    from_value = value + row * value_row + head * value_head

    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    sums = tl.zeros((QUERIES,), tl.float32)
    total = tl.zeros((QUERIES, DEEP_V), tl.float32)
    for start in range(begin, end, SLOTS):
        slots = start + tl.arange(0, SLOTS)
        held = slots < end
        k = tl.load(from_key + slots[None, :] * key_slot + depth[:, None],
                    mask=held[None, :] & (depth < WIDTH)[:, None], other=0.0)  # fmt: skip
        v = tl.load(from_value + slots[:, None] * value_slot + depth_v[None, :],
                    mask=held[:, None] & (depth_v < WIDTH_V)[None, :], other=0.0)  # fmt: skip
        seen = (slots[None, :] >= low[:, None]) & (slots[None, :] < high[:, None])
        scores = tl.where(seen, tl.dot(q, k, input_precision="ieee") * scale, float("-inf"))
        above = tl.maximum(top, tl.max(scores, 1))
        fixed = tl.where(above == float("-inf"), 0.0, above)  # a query that has seen nothing so far
        fade = tl.exp(top - fixed)
        share = tl.exp(scores - fixed[:, None])
        sums = sums * fade + tl.sum(share, 1)
        total = tl.dot(share.to(v.dtype), v, total * fade[:, None], input_precision="ieee")
        top = above
    total = total / tl.where(sums > 0, sums, 1.0)[:, None]
    to = out + ((row * T + place) * (tl.num_programs(1) * GROUP) + mine)[:, None] * WIDTH_V + depth_v[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=there[:, None] & (depth_v < WIDTH_V)[None, :])
