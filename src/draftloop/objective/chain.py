"""A block as a chain: position k is reached only where every earlier one was accepted.

Knows overlaps and probabilities of [N, K] positions; does NOT know laws, objectives or reductions.

With weights w_k, the value of a chain is sum_k w_k prod_{j<=k} alpha_j. Its derivative in alpha_i is how likely i is
reached, times what is still to come there: prefix x suffix, nothing is divided, so it is exact where an alpha is 0. All
of it is computed without a graph; `chain_value` puts the derivative on the overlaps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftloop.core.blocks import Blocks


def reached_by_overlaps(alpha: Tensor) -> Tensor:
    """[N, K] -> prod_{j<k} alpha_j [N, K]: how likely k is reached if the overlaps were the same on every path."""
    return torch.cat([torch.ones_like(alpha[:, :1]), alpha[:, :-1].cumprod(-1)], -1)


def reached_on_path(log_p: Tensor, log_q: Tensor, log_drawn: Tensor, valid: Tensor) -> Tensor:
    """prod_{j<k} min(p_j, q_j)(y_j) / s_j(y_j) of a path y drawn from s; float64 [N, K].

    Averaged over paths it is the probability that ratio verification reaches position k, if s > 0 wherever
    min(p, q) > 0. With s = q a factor is min(1, p/q), with s = p it is min(1, q/p).

    Args:
        log_p: [N, K] log-probability of each token by the target.
        log_q: [N, K] by the drafter.
        log_drawn: [N, K] by s, the law that it was really drawn from.
        valid: bool [N, K]; other positions have factor 1.
    """
    step = torch.where(valid, log_chance(log_p, log_q, log_drawn), 0.0)
    return torch.cat([torch.ones_like(step[:, :1]), step[:, :-1].cumsum(-1).exp()], -1)


def log_chance(log_p: Tensor, log_q: Tensor, log_drawn: Tensor) -> Tensor:
    """log(min(p, q) / s) of each token; with s = q, that it is accepted. float64, -inf where p q = 0."""
    both = torch.minimum(log_p, log_q).double()
    return torch.where(both == float("-inf"), both, both - log_drawn.double())


def undrawn(blocks: Blocks) -> Tensor:
    """Bool [N, K]: no `log_q`, so nothing was drawn from the drafter: the token is the trunk's own, the target's."""
    return torch.ones_like(blocks.valid) if blocks.log_q is None else blocks.log_q.isnan()


def worth(alpha: Tensor, weight: Tensor) -> Tensor:
    """What an acceptance at i is worth: V_i = w_i + alpha_{i+1} V_{i+1}; [N, K]."""
    ahead, columns = torch.zeros_like(weight[:, 0]), []
    for i in reversed(range(weight.shape[1])):
        following = alpha[:, i + 1] if i + 1 < weight.shape[1] else 0.0
        ahead = weight[:, i] + following * ahead
        columns.append(ahead)
    return torch.stack(columns[::-1], -1)


def chain_value(alpha: Tensor, weight: Tensor, reached: Tensor) -> Tensor:
    """sum_{n,k} w_k reached_k alpha_k, with d/d alpha_i = reached_i V_i; a scalar.

    Where `reached` is the product of the overlaps, this is the chain's value and its full gradient: no factor is left
    out. Where it belongs to a sampled path, the value is unbiased, and V_i takes that path's future for every future.

    Args:
        alpha: [N, K] overlaps, differentiable; 0 where a chain has ended.
        weight: [N, K].
        reached: [N, K], of any float type.
    """
    fixed = alpha.detach()
    reached = reached.to(alpha.dtype)
    pull = reached * worth(fixed, weight)
    return (weight * reached * fixed).sum() + (pull * (alpha - fixed)).sum()
