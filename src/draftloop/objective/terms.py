"""Which positions of a block count, for what and how much; and the loss that they add up to.

Knows blocks and the recipe's objective. Does NOT know laws, models or the loop: whoever calls gives it a function that
yields row values (`rows.py`), and the denominators of the whole optimiser step, so that accumulated micro-batches and
ranks add up to exactly the loss of one big batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from draftloop.core.blocks import Blocks
from draftloop.core.errors import DraftloopError
from draftloop.objective.chain import chain_value, reached_by_overlaps, reached_on_path, undrawn
from draftloop.objective.rows import Kind, Overlap, spread
from draftloop.recipe import ObjectivePart

Asked = Kind | Literal["confidence"]  # the last one's values are of the drafter's confidence head, not of its law
Values = Callable[[Asked, Tensor], Tensor | Overlap]


@dataclass(frozen=True)
class Term:
    """share * sum(weight * value of the position) / sum of the weights of its group.

    Attributes:
        name: for metrics.
        kind: which row value.
        weight: float32 [N, K]; 0 where nothing is asked, and there no row is computed.
        share: coefficient of this term in the loss.
        group: terms of one group share a denominator.
    """

    name: str
    kind: Asked
    weight: Tensor
    share: float
    group: str

    def numerator(self, values: Tensor, overlap: Overlap | None = None) -> Tensor:
        """Differentiable values [N, K] (0 where no row was computed) -> scalar, before share and denominator.

        A term whose positions act on each other (a product along the block) overrides this. `overlap` has what an
        `overlap` row tells beside its value, where the caller gave it; [N, K] each.
        """
        return (self.weight.to(values.dtype) * values).sum()


@dataclass(frozen=True)
class _Distance(Term):
    """TV = 1 - alpha, position by position."""

    def numerator(self, values: Tensor, overlap: Overlap | None = None) -> Tensor:
        return (self.weight.to(values.dtype) * (1 - values)).sum()


@dataclass(frozen=True)
class _Chain(Term):
    """sum_k weight_k (1 - prod_{j<=k} alpha_j), or with the sampled path's own reach in place of prod_{j<k}.

    Attributes:
        trunk: bool [N, K], where the tokens are the target's own and not the drafter's; None looks at no tokens.
    """

    trunk: Tensor | None

    def numerator(self, values: Tensor, overlap: Overlap | None = None) -> Tensor:
        there = self.weight != 0
        weight, alpha = self.weight.to(values.dtype), torch.where(there, values, 0.0)
        if self.trunk is None:
            reached = reached_by_overlaps(alpha.detach())
        elif overlap is None:
            raise DraftloopError("accept_weighted needs the tokens' log-probabilities", where="loss")
        else:
            drawn = torch.where(self.trunk, overlap.log_p, overlap.log_q)
            reached = reached_on_path(overlap.log_p, overlap.log_q, drawn, there)
        return weight.sum() - chain_value(alpha, weight, reached)


def terms(objective: ObjectivePart, blocks: Blocks, known: Tensor | None = None, confidence: float = 0.0) -> list[Term]:
    """List an objective's terms on these blocks; whatever the blocks, the list differs in the weights alone.

    - `ce`, `forward_kl`, `reverse_kl`: every valid position, weight exp(-(k-1)/decay), one mean (DFlash, 2602.06036).
    - `tv`, `nla`: the same with 1 - alpha and -log alpha (2602.23881), alpha = sum_v min(p, q).
    - `e2e_tv` (2606.12370, eq. 13): the mean over blocks of 1 - (1/n) sum_{k<=n} prod_{j<=k} alpha_j. n counts the
      positions of this block up to its first that is not valid; there the chain ends. (Eq. 13 has n = K, and leaves
      out shorter chains; on whole chains both are one.) p is detached and nothing else. `accept_weighted` puts the
      sampled path's prod_{j<k} min(1, p_j/q_j)(y_j), detached, in the place of prod_{j<k} alpha_j; for the trunk's own
      tokens (no `log_q`), which come from p, min(1, q_j/p_j)(y_j).
    - these three also have the `ce` of the known labels, with share `ce_weight`.
    - `draft_opd` (2605.29343): [mean over accepted of KL(p||q) + sum over rejected of gamma^(k-1) KL(q||p) / sum of
      gamma^(k-1)] / 2. k counts from the block's start, whatever was accepted. Every valid position from the first
      rejection on is rejected. An empty set contributes 0; the other keeps its 1/2.
      `rejected: none` leaves the mean over the accepted with share 1; `reduction: pooled` divides the sum of both by
      the sum of both denominators; `correction` counts the first rejected position among the accepted, besides what it
      is among the rejected; `first_rejected_only` leaves out what follows it.
    - all of them, with share `confidence`, the cross-entropy of the drafter's confidence against alpha (DSpark,
      2607.05147): every position up to the first that is not valid, weight exp(-(k-1)/decay), one mean. Comes last:
      alpha may be known by then.

    Args:
        objective: what is minimised.
        blocks: on what.
        known: bool [N, K], positions whose label is known and can be said by the drafter, the only ones that a `ce`
            counts; default: every valid one.
        confidence: share of the confidence head's term; 0 = none.
    """
    asked = _law_terms(objective, blocks, blocks.valid if known is None else blocks.valid & known)
    if confidence > 0:
        chain = blocks.valid & ((~blocks.valid).cumsum(-1) == 0)
        weight = _weight(chain, _static(objective, blocks))
        asked.append(Term("confidence", "confidence", weight, share=confidence, group="confidence"))
    return asked


def _static(objective: ObjectivePart, blocks: Blocks) -> Tensor:
    """float64 [1, K]: exp(-(k-1)/decay)."""
    return torch.exp(-(blocks.position.double() - 1) / objective.decay)


def _law_terms(objective: ObjectivePart, blocks: Blocks, labelled: Tensor) -> list[Term]:
    k = blocks.position.double()  # [1, K]
    static = _static(objective, blocks)
    if objective.kind == "tv" or objective.kind == "nla" or objective.kind == "e2e_tv":
        asked = [_overlap_term(objective, blocks, static)]
        if objective.ce_weight > 0:
            asked.append(Term("ce", "ce", _weight(labelled, static), share=objective.ce_weight, group="ce"))
        return asked
    if objective.kind != "draft_opd":
        there = labelled if objective.kind == "ce" else blocks.valid
        return [Term(objective.kind, objective.kind, _weight(there, static), share=1.0, group="all")]
    accepted, rejected = split(blocks)
    if objective.correction:
        accepted = accepted | blocks.first_rejected
    if objective.first_rejected_only:
        rejected = blocks.first_rejected
    plain = _weight(accepted & labelled if objective.accepted == "ce" else accepted, torch.ones_like(k))
    if objective.rejected == "none":
        return [Term("accepted", objective.accepted, plain, share=1.0, group="accepted")]
    decayed = _weight(rejected, objective.gamma ** (k - 1))
    if objective.reduction == "pooled":
        share, groups = 1.0, ("pooled", "pooled")
    else:
        share, groups = 0.5, ("accepted", "rejected")
    return [
        Term("accepted", objective.accepted, plain, share, groups[0]),
        Term("rejected", objective.rejected, decayed, share, groups[1]),
    ]


def _overlap_term(objective: ObjectivePart, blocks: Blocks, static: Tensor) -> Term:
    if objective.kind == "nla":
        return Term("nla", "nla", _weight(blocks.valid, static), share=1.0, group="all")
    if objective.kind == "tv":
        return _Distance("tv", "overlap", _weight(blocks.valid, static), share=1.0, group="all")
    chain = blocks.valid & ((~blocks.valid).cumsum(-1) == 0)
    weight = _weight(chain, 1 / chain.sum(-1, keepdim=True).double())  # sums to 1 in every block
    trunk = undrawn(blocks) if objective.estimator == "accept_weighted" else None
    return _Chain("e2e_tv", "overlap", weight, share=1.0, group="blocks", trunk=trunk)


def needs_teacher(objective: ObjectivePart, confidence: float = 0.0) -> bool:
    """Whether any term compares with the target's law, and so needs the target's hidden rows; as `terms`."""
    if confidence > 0:
        return True
    if objective.kind != "draft_opd":
        return objective.kind != "ce"
    return {objective.accepted, objective.rejected} - {"ce", "none"} != set()


def denominators(parts: Sequence[Sequence[Term]]) -> dict[str, float]:
    """Sum the weights of each group over all micro-batches of one optimiser step.

    With several ranks, add up the ranks' dictionaries (they have the same keys), and multiply the loss by the number of
    ranks where gradients are averaged over them.

    Args:
        parts: the terms of each micro-batch.
    """
    sums: dict[str, Tensor] = {}
    for term in (term for part in parts for term in part):
        sums[term.group] = sums.get(term.group, 0.0) + term.weight.sum(dtype=torch.float64)
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}


def loss(asked: Sequence[Term], totals: Mapping[str, float], values: Values) -> tuple[Tensor, Tensor]:
    """One micro-batch's share of the loss of its optimiser step.

    Args:
        asked: the terms of this micro-batch.
        totals: the denominators of the whole step (`denominators`).
        values: (kind, int64 [m] indices into the flattened [N * K] positions) -> differentiable [m]. Called once for
            each kind, with the positions that some term of that kind weighs, also when there are none: the loss then is
            0 but still has a graph. The label of a `ce` row is the token that verification committed at anchor + k.
            For `overlap` it may give an `Overlap` of the proposed tokens, which `accept_weighted` needs. Kinds are
            asked for in the order of the terms.

    Returns:
        The scalar loss, and each term's numerator, detached [terms]: summed over micro-batches and divided by the
        group's total it is the term's mean. Both on the device, which is asked for nothing but the positions.

    Raises:
        DraftloopError: `totals` does not cover these terms (our own misuse).
    """
    for term in asked:
        covered = totals.get(term.group, -1.0)
        if covered < 0 or (covered == 0 and bool(term.weight.any())):
            raise DraftloopError(f"the denominators do not cover group {term.group!r}", where="loss")
    grids = {kind: _grid(kind, asked, values) for kind in dict.fromkeys(term.kind for term in asked)}
    numerators = [term.numerator(*grids[term.kind]) for term in asked]
    total = torch.stack(
        [
            term.share * numerator / (totals[term.group] or 1.0)  # an empty set contributes 0
            for term, numerator in zip(asked, numerators, strict=True)
        ]
    ).sum()
    return total, torch.stack([numerator.detach() for numerator in numerators])


def split(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Divide the valid positions at the first rejection: accepted (before), rejected (from it on); bool [N, K] each."""
    gone = (blocks.valid & ~blocks.accepted).cumsum(-1) > 0
    return blocks.valid & ~gone, blocks.valid & gone


@dataclass(frozen=True)
class SplitCounts:
    """What verification made of the positions; int64 [K] each, on the CPU, entry k-1 for position k.

    Attributes:
        accepted: positions before the first rejection.
        first_rejected: first rejections.
        later_rejected: positions that follow one.
        unrejected_blocks: blocks without any rejection whose last valid position is k.
    """

    accepted: Tensor
    first_rejected: Tensor
    later_rejected: Tensor
    unrejected_blocks: Tensor


def split_counts(blocks: Blocks) -> SplitCounts:
    """Count, per position k, what verification made of the blocks (for the report)."""
    accepted, rejected = split(blocks)
    first = blocks.first_rejected
    # 0 where nothing is valid, which is no position
    last = (blocks.position * blocks.valid).amax(-1, keepdim=True) == blocks.position
    whole = last & ~rejected.any(-1, keepdim=True)
    return SplitCounts(*torch.stack([accepted, first, rejected & ~first, whole]).sum(1).cpu())


def _weight(mask: Tensor, by_position: Tensor) -> Tensor:
    """float32 [N, K]: `by_position` [1, K] where `mask`, else 0."""
    return torch.where(mask, by_position, 0.0).float()


def _grid(kind: Asked, asked: Sequence[Term], values: Values) -> tuple[Tensor, Overlap | None]:
    """[N, K] values of one kind, 0 where no term of it has weight; and the overlap rows that they came from."""
    weighed = torch.stack([term.weight != 0 for term in asked if term.kind == kind]).any(0)
    index = weighed.flatten().nonzero().squeeze(-1)
    found = values(kind, index)
    if isinstance(found, Tensor):
        return spread(found, index, weighed.shape), None
    overlap = found.spread(index, weighed.shape)
    return overlap.alpha, overlap
