"""What acceptance to expect, honestly: estimates of the accepted length that are unbiased, and checks of them.

Knows the rows that the loss computed (alpha, log p(y), log q(y)) and how the tokens were really drawn; computes nothing
over the vocabulary and never feeds the loss. The product of the overlaps along a sampled path, which e2e_tv maximises,
is no expectation of anything that is accepted, unless the overlaps are the same on every path; so both are told.

    E[accepted] = E_{y ~ s} sum_k alpha_k prod_{j<k} min(p_j, q_j)(y_j) / s_j(y_j),   for any s > 0 where min(p, q) > 0

With s = q the factors are min(1, p/q), with s = p (a trunk that the target sampled) they are min(1, q/p). A greedy or a
filtered draw has no such s: such blocks are refused and counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from draftloop.core.blocks import Blocks
from draftloop.core.law import Sampling
from draftloop.objective.chain import log_chance, reached_by_overlaps, reached_on_path, undrawn, worth
from draftloop.objective.rows import Overlap

ALARM = 4.0  # standard errors
_FEWEST = 30  # blocks, for a normal approximation to mean anything
_DEAD = 1e-3  # an overlap below it gives next to no gradient
_GREEDY_GAP = 1e-3  # of log q: stored as certain, and not so by the drafter's own law


@dataclass(frozen=True)
class Moments:
    """Count, sum and sum of squares of a number a block; float64 scalars."""

    count: Tensor
    total: Tensor
    squares: Tensor

    @classmethod
    def of(cls, values: Tensor, chosen: Tensor) -> Moments:
        """From values [N] and bool [N], which of them count."""
        kept = torch.where(chosen, values.double(), 0.0)
        return cls(chosen.sum().double(), kept.sum(), kept.square().sum())

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    def cpu(self) -> Moments:
        """The same, held on the CPU."""
        return Moments(self.count.cpu(), self.total.cpu(), self.squares.cpu())

    @property
    def mean(self) -> float | None:
        """None without blocks."""
        return float(self.total / self.count) if self.count > 0 else None

    @property
    def variance(self) -> float | None:
        """Of one block; None with fewer than two."""
        if self.count < 2:
            return None
        return max(0.0, float((self.squares - self.total**2 / self.count) / (self.count - 1)))

    @property
    def standard_error(self) -> float | None:
        """Of the mean."""
        return None if self.variance is None else math.sqrt(self.variance / float(self.count))


@dataclass(frozen=True)
class Expectation:
    """Sums over blocks; add those of several micro-batches, steps or ranks.

    Attributes:
        product: the sum of the products of overlaps, on every block (the biased surrogate).
        unbiased: the unbiased estimate, on blocks whose stored law permits one.
        refused: blocks whose stored law does not.
        sampled: the length that the ratio rule accepted with real coins, on unrefused blocks that the drafter drew at
            the temperature of the rows.
        difference: sampled - unbiased on the same blocks.
        coin_variance: sum over those blocks of a lower bound of what the variance of the difference must be.
        failed: 1 where the first token was rejected, on the same blocks.
        surprise: whether the first token was accepted - alpha_1, on the same blocks.
        first_variance: sum over those blocks of the variance of `surprise`, alpha_1 (1 - alpha_1).
        rows: [K] positions of any block.
        alpha: [K] their overlaps.
        pull: [K] the weights omega that e2e_tv puts on their overlaps (arXiv 2606.12370), of a block's mean.
        dead: rows with an overlap below 1e-3.
    """

    product: Moments
    unbiased: Moments
    refused: Tensor
    sampled: Moments
    difference: Moments
    coin_variance: Tensor
    failed: Tensor
    surprise: Moments
    first_variance: Tensor
    rows: Tensor
    alpha: Tensor
    pull: Tensor
    dead: Tensor

    def __add__(self, other: Expectation) -> Expectation:
        return Expectation(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def cpu(self) -> Expectation:
        """The same, held on the CPU, as processes exchange it."""
        return Expectation(*(getattr(self, f.name).cpu() for f in fields(self)))

    def to_json(self) -> dict[str, Any]:
        """Exactly these sums as JSON values; hexadecimal, for JSON has no infinities."""
        return {f.name: _hexadecimal(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_json(cls, told: dict[str, Any], device: torch.device) -> Expectation:
        """Undo `to_json`."""

        def read(value: Any) -> Any:
            if isinstance(value, dict):
                return Moments(**{name: read(part) for name, part in value.items()})
            numbers = [float.fromhex(one) for one in value] if isinstance(value, list) else float.fromhex(value)
            return torch.tensor(numbers, dtype=torch.float64, device=device)

        return cls(**{name: read(value) for name, value in told.items()})

    def agreement(self) -> float | None:
        """How many standard errors the sampled length lies above the unbiased estimate of it; see `agreement`."""
        return agreement(self.difference, float(self.coin_variance))

    def agreement_at_once(self) -> float | None:
        """The same for the first token alone, where no weight can make up for a wrong stored law."""
        return agreement(self.surprise, float(self.first_variance))

    @property
    def alarm(self) -> bool:
        """Whether what was sampled contradicts what was expected, so that one of them must be wrong."""
        return any(found is not None and abs(found) > ALARM for found in (self.agreement(), self.agreement_at_once()))

    def to_metrics(self) -> dict[str, float]:
        """Plain numbers, without those that nothing was measured for (`unbiased` where every block was refused)."""
        rows, alpha, pull = self.rows.tolist(), self.alpha.tolist(), self.pull.tolist()
        found = {
            "accepted/product": self.product.mean,
            "accepted/unbiased": self.unbiased.mean,
            "accepted/unbiased_se": self.unbiased.standard_error,
            "accepted/sampled": self.sampled.mean,
            "accepted/sampled_se": self.sampled.standard_error,
            "accepted/disagreement": self.agreement(),
            "fail_at_once/expected": 1 - alpha[0] / rows[0] if rows and rows[0] else None,
            "fail_at_once/sampled": float(self.failed / self.sampled.count) if self.sampled.count > 0 else None,
            "fail_at_once/disagreement": self.agreement_at_once(),
            "alpha/dead": float(self.dead) / sum(rows) if sum(rows) else None,
        }
        for k, count in enumerate(rows):
            if count:
                found[f"alpha/{k + 1}"], found[f"omega/{k + 1}"] = alpha[k] / count, pull[k] / count
        found["blocks"], found["blocks/refused"] = float(self.product.count), float(self.refused)
        return {name: value for name, value in found.items() if value is not None}


def _hexadecimal(value: Any) -> Any:
    """Of float64 numbers, [K] numbers, or `Moments`."""
    if isinstance(value, Moments):
        return {f.name: _hexadecimal(getattr(value, f.name)) for f in fields(value)}
    numbers = value.tolist()
    return [one.hex() for one in numbers] if isinstance(numbers, list) else numbers.hex()


def agreement(difference: Moments, coin_variance: float = 0.0) -> float | None:
    """Mean difference in standard errors over blocks; alarming beyond 4.

    Where acceptance, or rejection, is so rare that no block saw it, the differences vary less than they must;
    `coin_variance`, a lower bound that the expectations themselves give, then takes the place of their variance.

    Args:
        difference: of sampled - unbiased, block by block.
        coin_variance: the bound, summed over the blocks.

    Returns:
        None with fewer than 30 blocks.
    """
    mean, variance = difference.mean, difference.variance
    if mean is None or variance is None or difference.count < _FEWEST:
        return None
    spread = max(variance, coin_variance / float(difference.count))
    if spread == 0:
        return 0.0 if abs(mean) < 1e-6 else math.copysign(math.inf, mean)
    return mean / math.sqrt(spread / float(difference.count))


def covers(sampling: Sampling | None) -> bool:
    """Whether a draw can give every token that has any probability. None = not known."""
    return sampling is not None and not sampling.greedy and sampling.top_k == 0 and sampling.top_p == 1.0


@torch.no_grad()
def expectation(
    overlap: Overlap,
    blocks: Blocks,
    *,
    temperature: float,
    drawn: Sampling | None = None,
    trunk: Sampling | None = None,
    coins: Tensor | None = None,
    accept_weighted: bool = False,
) -> Expectation:
    """Expected and sampled acceptance of the blocks of one micro-batch.

    A chain ends at its first position that is not valid; blocks without any position are left out.

    Args:
        overlap: [N, K] each, the rows of the proposed tokens; anything at positions that are not valid.
        blocks: with the `log_q` of the law that each token was really drawn from (missing or NaN = the trunk's own).
        temperature: of p and q in `overlap`.
        drawn: how the tokens with a `log_q` were drawn from the drafter. Its temperature may be another one: the stored
            probability makes up for it in `unbiased`; coins then tell of another law, and are left out. Greedy blocks
            among sampled ones are found by their `log_q` of 0.
        trunk: how the target sampled the trunk. It must have been at `temperature`, for no probability is stored.
        coins: float64 [N, K] in (0, 1), what the ratio rule compares p/q with; keyed, and used for nothing else.
        accept_weighted: whether `pull` is that of the estimator `accept_weighted`.
    """
    valid = blocks.valid & ((~blocks.valid).cumsum(-1) == 0)
    own = undrawn(blocks)
    stored = overlap.log_p if blocks.log_q is None else torch.where(own, overlap.log_p, blocks.log_q)
    alpha = torch.where(valid, overlap.alpha.detach(), 0.0).double()
    there, from_trunk = valid[:, 0], own[:, 0]

    # a greedy target is a point mass, which its argmax covers
    fits = trunk is not None and trunk.temperature == temperature and (trunk.greedy or covers(trunk))
    certain = ((stored == 0) | ~valid).all(-1) & ((overlap.log_q < -_GREEDY_GAP) & valid).any(-1)
    permitted = torch.where(from_trunk, torch.full_like(there, fits), ~certain & covers(drawn))

    by_overlaps = reached_by_overlaps(alpha)
    reached = reached_on_path(overlap.log_p, overlap.log_q, stored, valid)
    unbiased = (reached * alpha).sum(-1)
    chance = torch.where(valid, log_chance(overlap.log_p, overlap.log_q, stored).exp(), 0.0)
    kept = there & permitted

    flipped = torch.zeros_like(kept)
    length = torch.zeros_like(unbiased)
    if coins is not None and drawn is not None and drawn.temperature == (temperature or 1.0):
        flipped = kept & ~from_trunk
        accepted = valid & (coins.log() < overlap.log_p.double() - stored.double())
        length = accepted.cumprod(-1).sum(-1).double()

    weight = torch.where(valid, 1 / valid.sum(-1, keepdim=True).double(), 0.0)
    pull = by_overlaps * worth(alpha, weight)
    if accept_weighted:
        bounded = torch.where(own, overlap.log_p, overlap.log_q)
        pull = reached_on_path(overlap.log_p, overlap.log_q, bounded, valid) * worth(alpha, weight)
    return Expectation(
        product=Moments.of((by_overlaps * alpha).sum(-1), there),
        unbiased=Moments.of(unbiased, kept),
        refused=(there & ~permitted).sum().double(),
        sampled=Moments.of(length, flipped),
        difference=Moments.of(length - unbiased, flipped),
        coin_variance=torch.where(flipped, _least_variance(alpha, reached, chance), 0.0).sum(),
        failed=(flipped & (length == 0)).sum().double(),
        surprise=Moments.of((length > 0).double() - alpha[:, 0], flipped),
        first_variance=torch.where(flipped, alpha[:, 0] * (1 - alpha[:, 0]), 0.0).clamp(min=0).sum(),
        rows=valid.sum(0).double(),
        alpha=alpha.sum(0),
        pull=torch.where(valid, pull, 0.0).sum(0),
        dead=(valid & (alpha < _DEAD)).sum().double(),
    )


def _least_variance(alpha: Tensor, reached: Tensor, chance: Tensor) -> Tensor:
    """[N], whose mean is at most the variance of (sampled length - unbiased estimate).

    With R_k = prod_{j<=k} a_j the chance that a path's tokens are accepted up to k, that variance is
    E[var(length | path)] + sum_k E[R_{k-1}^2 var(a_k)], and var(a_k) <= alpha_k (1 - alpha_k) exceeds it by no more
    than the first part; so half of both is a lower bound, also where no rare event was seen.
    """
    through = (reached * chance).clamp(max=1)
    order = torch.arange(1, alpha.shape[1] + 1, device=alpha.device)
    given_path = ((2 * order - 1) * through).sum(-1) - through.sum(-1).square()
    by_token = (reached.clamp(max=1).square() * alpha * (1 - alpha)).sum(-1)
    return (given_path.clamp(min=0) + by_token.clamp(min=0)) / 2
