"""The Triton kernels of `fused.py`: logits are formed tile by tile in registers, used, and forgotten.

Knows pointers and tiles; does NOT know readouts, objectives or torch. Imported only where Triton is. Rows are those of
positions (axis 0 of the grid), columns those of the readout (axis 1). Every program writes cells that are its own:
nothing is added atomically, so the same input gives the same numbers.

z are the drafter's logits and y the target's, after bias, rounding to the readout's own type (as a matrix product in
that type would give them), scale, soft cap and temperature; their laws are q and p.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _logits(
    hidden, weight, bias, rows, there, places, known, scale, cap, temperature,
    BIAS: tl.constexpr, CAP: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS, COLUMNS] logits of hidden rows `rows` at readout rows `places`."""
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    depth = tl.arange(0, DEEP)
    left = hidden + rows.to(tl.int64)[:, None] * WIDTH + depth[None, :]
    right = weight + places.to(tl.int64)[None, :] * WIDTH + depth[:, None]
    for start in range(0, WIDTH, DEEP):
        if WIDTH % DEEP == 0:
            a = tl.load(left, mask=there[:, None], other=0.0)
            b = tl.load(right, mask=known[None, :], other=0.0)
        else:
            inside = start + depth < WIDTH
            a = tl.load(left, mask=there[:, None] & inside[None, :], other=0.0)
            b = tl.load(right, mask=known[None, :] & inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        left += DEEP
        right += DEEP
    if BIAS:
        total += tl.load(bias + places, mask=known, other=0.0).to(tl.float32)[None, :]
    logits = total.to(weight.dtype.element_ty).to(tl.float32) * scale
    if CAP:
        logits = cap * (1 - 2 / (tl.exp(2 * logits / cap) + 1))  # tanh; exp may be 0 or inf
    return logits / temperature


@triton.jit(do_not_specialize=["count", "size"])
def law_kernel(
    hidden, weight, bias, support, tokens, largest, mass, best, at_token,
    count, size, scale, cap, temperature,
    BIAS: tl.constexpr, SUPPORT: tl.constexpr, TOKENS: tl.constexpr, CAP: tl.constexpr, WIDTH: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """One law over a share of the columns: largest logit, sum of exp(logit - largest), argmax, logit of a token.

    Writes cell [share, row] of each; the token's logit is -inf in a share that does not hold it.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < count
    share = tl.program_id(1)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    sums = tl.zeros((ROWS,), tl.float32)
    first = tl.zeros((ROWS,), tl.int32)
    found = tl.full((ROWS,), float("-inf"), tl.float32)
    if TOKENS:
        token = tl.load(tokens + rows, mask=there, other=-1).to(tl.int32)
    for tile in range(TILES):
        columns = (share * TILES + tile) * COLUMNS + tl.arange(0, COLUMNS)
        known = columns < size
        places = columns
        if SUPPORT:
            places = tl.load(support + columns, mask=known, other=0)
        z = _logits(hidden, weight, bias, rows, there, places, known, scale, cap, temperature,
                    BIAS, CAP, WIDTH, ROWS, COLUMNS, DEEP)  # fmt: skip
        z = tl.where(known[None, :], z, float("-inf"))
        here = tl.max(z, 1)
        place = tl.min(tl.where(z == here[:, None], columns[None, :], size), 1)
        first = tl.where(here > top, place, first)  # the first of equals stays
        above = tl.maximum(top, here)
        fixed = tl.where(above == float("-inf"), 0.0, above)  # a tile beyond the last column
        sums = sums * tl.exp(top - fixed) + tl.sum(tl.exp(z - fixed[:, None]), 1)
        top = above
        if TOKENS:
            found = tl.maximum(found, tl.max(tl.where(columns[None, :] == token[:, None], z, float("-inf")), 1))
    cell = share * count + rows
    tl.store(largest + cell, top, mask=there)
    tl.store(mass + cell, sums, mask=there)
    tl.store(best + cell, first, mask=there)
    if TOKENS:
        tl.store(at_token + cell, found, mask=there)


@triton.jit(do_not_specialize=["count", "start", "stop"])
def pair_kernel(
    hidden, weight, bias, scale, cap, log_sum,
    hidden_t, weight_t, bias_t, scale_t, cap_t, log_sum_t,
    support, chosen, first, second, sums, pull,
    count, wide, start, stop, temperature,
    KIND: tl.constexpr, VALUE: tl.constexpr, PULL: tl.constexpr, GREEDY: tl.constexpr, SUPPORT: tl.constexpr,
    BIAS: tl.constexpr, CAP: tl.constexpr, WIDTH: tl.constexpr,
    BIAS_T: tl.constexpr, CAP_T: tl.constexpr, WIDTH_T: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Both laws over a share of the columns start..stop: sums that make the value, or its derivative in the logits.

    VALUE writes `sums` cell [0, share, row], a share of the value of KIND forward_kl or reverse_kl. For overlap and nla
    the cells [0..2, share, row] are m = the largest log min(p, q), the sum of min(p, q) / e^m, and the part of it where
    q < p. PULL writes `pull` [row, column - start] = d value / d (weight . hidden), rows `wide` apart, from `first` and
    `second`: for reverse_kl the value; for overlap the sum of q where q < p; for nla log alpha and the share of alpha
    where q < p. `chosen`: the label of ce, a column; or the argmax of a greedy target, a token id.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < count
    share = tl.program_id(1)
    norm = tl.load(log_sum + rows, mask=there, other=0.0)
    if KIND == "ce" or GREEDY:
        mark = tl.load(chosen + rows, mask=there, other=-1).to(tl.int32)
    if KIND != "ce" and not GREEDY:
        norm_t = tl.load(log_sum_t + rows, mask=there, other=0.0)
    if PULL and (KIND == "reverse_kl" or KIND == "overlap" or KIND == "nla"):
        one = tl.load(first + rows, mask=there, other=0.0)
    if PULL and KIND == "nla":
        two = tl.load(second + rows, mask=there, other=0.0)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    below = tl.zeros((ROWS,), tl.float32)
    for tile in range(TILES):
        columns = start + (share * TILES + tile) * COLUMNS + tl.arange(0, COLUMNS)
        known = columns < stop
        z = _logits(hidden, weight, bias, rows, there, columns, known, scale, cap, temperature,
                    BIAS, CAP, WIDTH, ROWS, COLUMNS, DEEP)  # fmt: skip
        log_q = z - norm[:, None]
        q = tl.exp(log_q)
        if KIND != "ce":
            places = columns
            if SUPPORT:
                places = tl.load(support + columns, mask=known, other=0)
            if GREEDY:
                log_p = tl.where(places.to(tl.int32)[None, :] == mark[:, None], 0.0, float("-inf"))
            else:
                log_p = _logits(hidden_t, weight_t, bias_t, rows, there, places, known, scale_t, cap_t,
                                temperature, BIAS_T, CAP_T, WIDTH_T, ROWS, COLUMNS, DEEP) - norm_t[:, None]  # fmt: skip
        if KIND == "overlap" or KIND == "nla":
            low = tl.minimum(log_p, log_q)
            side = tl.where(log_q < log_p, 1.0, tl.where(log_q == log_p, 0.5, 0.0))  # of equals, min takes half
        if VALUE:
            if KIND == "forward_kl":
                total += tl.sum(tl.where(known[None, :], tl.exp(log_p) * (log_p - log_q), 0.0), 1)
            elif KIND == "reverse_kl":
                total += tl.sum(tl.where(known[None, :], q * (log_q - log_p), 0.0), 1)
            else:
                low_here = tl.where(known[None, :], low, float("-inf"))
                above = tl.maximum(top, tl.max(low_here, 1))
                fixed = tl.where(above == float("-inf"), 0.0, above)
                part = tl.exp(low_here - fixed[:, None])
                fade = tl.exp(top - fixed)
                total = total * fade + tl.sum(part, 1)
                below = below * fade + tl.sum(part * side, 1)
                top = above
        if PULL:
            if KIND == "ce":
                slope = q - tl.where(columns[None, :] == mark[:, None], 1.0, 0.0)
            elif KIND == "forward_kl":
                slope = q - tl.exp(log_p)
            elif KIND == "reverse_kl":
                slope = q * (log_q - log_p - one[:, None])
            elif KIND == "overlap":
                slope = q * (side - one[:, None])
            else:
                slope = q * two[:, None] - tl.where(side > 0, side * tl.exp(low - one[:, None]), 0.0)
            slope = slope * (scale / temperature)
            if CAP:
                bent = z * temperature / cap
                slope = slope * (1 - bent * bent)
            place = rows.to(tl.int64)[:, None] * wide + (columns - start)[None, :]
            tl.store(pull + place, slope.to(pull.dtype.element_ty), mask=there[:, None] & known[None, :])
    if VALUE:
        shares = tl.num_programs(1)
        cell = share * count + rows
        if KIND == "overlap" or KIND == "nla":
            tl.store(sums + cell, top, mask=there)
            tl.store(sums + shares * count + cell, total, mask=there)
            tl.store(sums + 2 * shares * count + cell, below, mask=there)
        else:
            tl.store(sums + cell, total, mask=there)
