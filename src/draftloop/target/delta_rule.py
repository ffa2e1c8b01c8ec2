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
    if not length:
        return Passed(tokens.v, tokens.v, state.unsqueeze(1))
    chunk = min(check_spacing(spacing), length)
    outs, us, snapshots = [], [], []
    size = max(spacing, _AT_ONCE // rows // spacing * spacing)  # whole spacings
    for start in range(0, length, size):
        out, u, states = _stretch(tokens.span(start, min(length, start + size)), state, chunk)
        outs.append(out)
        us.append(u)
        snapshots.append(states[:, : -1 : max(1, spacing // chunk)])
        state = states[:, -1]
    return Passed(torch.cat(outs, 1), torch.cat(us, 1), torch.cat(snapshots, 1))


def _stretch(tokens: Tokens, state: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and writings [n, t, H, Dv], and the states [n, count + 1, H, Dk, Dv] in front of and behind all chunks.

    All but the running state is computed for all chunks at once; what runs are three small kernels a chunk.
    """
    rows, length, heads = tokens.g.shape
    count = -(-length // chunk)

    def cut(part: Tensor) -> Tensor:  # [n, t, H, ...] -> [count, n * H, chunk, ...]
        part = pad(part, (0, 0) * (part.dim() - 2) + (0, count * chunk - length)).unflatten(1, (count, chunk))
        return part.movedim(3, 1).movedim(2, 0).flatten(1, 2).contiguous()

    def back(part: Tensor) -> Tensor:
        part = part.unflatten(1, (rows, heads)).permute(1, 0, 3, 2, 4).flatten(1, 2)
        return part[:, :length]

    q, k, v, g, beta = (cut(part) for part in (tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta))
    run = g.cumsum(-1)
    ahead = torch.ones(chunk, chunk, dtype=torch.bool, device=g.device).triu(1)
    decay = (run.unsqueeze(-1) - run.unsqueeze(-2)).masked_fill(ahead, float("-inf")).exp()
    keys, faded = k.transpose(-1, -2), run.exp().unsqueeze(-1)
    weighted = k * beta.unsqueeze(-1)
    system = (weighted @ keys) * decay  # unit lower triangular; its diagonal is not read
    right = torch.cat([v * beta.unsqueeze(-1), weighted * faded], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    own, carried = solved[..., : v.shape[-1]].contiguous(), solved[..., v.shape[-1] :].contiguous()
    leaving = (k * (run[..., -1:] - run).exp().unsqueeze(-1)).transpose(-1, -2)
    last = run[..., -1].exp()[..., None, None]

    u = torch.empty_like(own)
    states = state.new_empty(count + 1, rows * heads, *state.shape[2:])
    states[0] = state.flatten(0, 1)
    for i in range(count):
        torch.baddbmm(own[i], carried[i], states[i], alpha=-1, out=u[i])
        torch.baddbmm(states[i] * last[i], leaving[i], u[i], out=states[i + 1])
    out = (q * faded) @ states[:-1] + ((q @ keys) * decay) @ u
    return back(out), back(u), states.unflatten(1, (rows, heads)).transpose(0, 1)


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
