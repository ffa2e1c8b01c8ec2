"""The gated delta rule in chunks, with the states that let it go on from any token.

A head holds a state S [Dk, Dv]. A token (k, v, g, beta) changes it to S <- e^g S + k u^T, u = beta (v - (e^g S)^T k),
and its query then reads S^T q (arXiv 2412.06464). Inside a chunk all u follow from the state in front of it by one
triangular system. We keep the u: a later state is then a plain sum of outer products over any stretch,
S_t = e^{G_t} S_0 + sum_i e^{G_t - G_i} k_i u_i^T with G the running sum of g, so that replay solves nothing.
A token with beta = 0 and g = 0 changes nothing: the filling behind the end of a text. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

LONGEST_CHUNK = 64  # the triangular system grows with its square
_AT_ONCE = 1 << 14  # tokens whose chunk matrices exist at a time


@dataclass(frozen=True)
class Tokens:
    """What n texts of t tokens say to the rule, in the type that it computes in; H value heads.

    Attributes:
        q: [n, t, H, Dk] normalised and scaled.
        k: [n, t, H, Dk] normalised.
        v: [n, t, H, Dv].
        g: [n, t, H] log decay, at most 0.
        beta: [n, t, H] in [0, 1].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def span(self, start: int, stop: int) -> Tokens:
        """The tokens in [start, stop)."""
        return Tokens(*(part[:, start:stop] for part in (self.q, self.k, self.v, self.g, self.beta)))


@dataclass(frozen=True)
class Passed:
    """What a pass over texts leaves.

    Attributes:
        out: [n, t, H, Dv] what the queries read.
        u: [n, t, H, Dv] what each token wrote.
        snapshots: [n, m, H, Dk, Dv] states in front of tokens 0, C, 2C, ...; m = max(1, ceil(t / C)).
    """

    out: Tensor
    u: Tensor
    snapshots: Tensor


def check_spacing(spacing: int) -> int:
    """The chunk in which snapshots `spacing` tokens apart are computed.

    Raises:
        ValueError: not positive, or neither within one chunk nor a multiple of it.
    """
    if spacing < 1 or (spacing > LONGEST_CHUNK and spacing % LONGEST_CHUNK):
        raise ValueError(f"a spacing is 1 to {LONGEST_CHUNK} or a multiple of {LONGEST_CHUNK}, not {spacing}")
    return min(spacing, LONGEST_CHUNK)


def pass_over(tokens: Tokens, state: Tensor, spacing: int) -> Passed:
    """Run the rule over texts.

    Args:
        tokens: n texts of t tokens.
        state: [n, H, Dk, Dv] in front of them.
        spacing: C, tokens between two snapshots.
    """
    rows, length = tokens.g.shape[:2]
    chunk = min(check_spacing(spacing), max(1, length))
    outs, us, snapshots = [], [], []
    size = max(spacing, _AT_ONCE // max(1, rows) // spacing * spacing)  # whole spacings
    for start in range(0, length, size):
        part = _Chunks(tokens.span(start, min(length, start + size)), chunk)
        for number in range(part.count):
            if number * chunk % spacing == 0:
                snapshots.append(state)
            out, u, state = part.step(number, state)
            outs.append(out)
            us.append(u)
    if not outs:
        return Passed(tokens.v, tokens.v, state.unsqueeze(1))
    out, u = (torch.cat(parts, 2)[:, :, :length].transpose(1, 2) for parts in (outs, us))
    return Passed(out, u, torch.stack(snapshots, 1))


class _Chunks:
    """A stretch of texts cut into chunks; all that does not depend on the running state is computed at once."""

    def __init__(self, tokens: Tokens, chunk: int) -> None:
        length = tokens.g.shape[1]
        self.count = -(-length // chunk)
        missing = self.count * chunk - length

        def cut(part: Tensor) -> Tensor:  # [n, t, H, ...] -> [n, H, count, chunk, ...]
            part = pad(part, (0, 0) * (part.dim() - 2) + (0, missing)).unflatten(1, (self.count, chunk))
            return part.movedim(3, 1)

        self.k, q, v, g, beta = (cut(part) for part in (tokens.k, tokens.q, tokens.v, tokens.g, tokens.beta))
        run = g.cumsum(-1)
        apart = run.unsqueeze(-1) - run.unsqueeze(-2)
        ahead = torch.ones(chunk, chunk, dtype=torch.bool, device=g.device).triu(1)
        decay = apart.masked_fill(ahead, float("-inf")).exp()
        keys = self.k.transpose(-1, -2)
        weighted = self.k * beta.unsqueeze(-1)
        system = (weighted @ keys) * decay  # unit lower triangular; its diagonal is not read
        right = torch.cat([v * beta.unsqueeze(-1), weighted * run.exp().unsqueeze(-1)], -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        self.own, self.carried = solved.split([v.shape[-1], q.shape[-1]], -1)
        self.within = (q @ keys) * decay
        self.reading = q * run.exp().unsqueeze(-1)
        self.leaving = (self.k * (run[..., -1:] - run).exp().unsqueeze(-1)).transpose(-1, -2)
        self.last = run[..., -1].exp()[..., None, None]

    def step(self, number: int, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs and writings of one chunk, [n, H, chunk, Dv], and the state behind it."""
        u = self.own[:, :, number] - self.carried[:, :, number] @ state
        out = self.reading[:, :, number] @ state + self.within[:, :, number] @ u
        return out, u, state * self.last[:, :, number] + self.leaving[:, :, number] @ u


def replay(state: Tensor, k: Tensor, g: Tensor, u: Tensor, length: Tensor) -> Tensor:
    """The states after the first `length` of the tokens that follow `state`.

    Args:
        state: [b, H, Dk, Dv].
        k: [b, R, H, Dk].
        g: [b, R, H].
        u: [b, R, H, Dv].
        length: int64 [b], 0 to R.

    Returns:
        [b, H, Dk, Dv].
    """
    real = torch.arange(k.shape[1], device=k.device) < length.unsqueeze(1)
    run = torch.where(real.unsqueeze(-1), g, 0).cumsum(1)
    left = run[:, -1:] if k.shape[1] else run.new_zeros(run.shape[0], 1, run.shape[2])
    weight = torch.where(real.unsqueeze(-1), (left - run).exp(), 0).unsqueeze(-1)
    wrote = torch.einsum("brhk,brhv->bhkv", k * weight, torch.where(real[:, :, None, None], u, 0))
    return state * left.squeeze(1).exp()[..., None, None] + wrote
