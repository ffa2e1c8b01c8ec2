"""Objectives as written in the papers, in plain loops, against their terms; and the variants that must not pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftloop.core.blocks import Blocks
from draftloop.core.errors import DraftloopError
from draftloop.core.law import Readout
from draftloop.objective.rows import Kind, Overlap, row_values
from draftloop.objective.terms import Term, denominators, loss, needs_teacher, split, split_counts, terms
from draftloop.recipe import ObjectivePart


def made(runs: Sequence[tuple[int, int]], length: int) -> Blocks:
    """Blocks of `length` positions; each run is (accepted, valid)."""
    k = torch.arange(length)
    accepted, valid = (torch.tensor([run[i] for run in runs], dtype=torch.int64).view(-1, 1) for i in (0, 1))
    count = len(runs)
    return Blocks(
        row=torch.zeros(count, dtype=torch.int64),
        anchor=torch.arange(count),
        tokens=torch.zeros(count, length, dtype=torch.int64),
        valid=k < valid,
        accepted=k < torch.minimum(accepted, valid),
    )


class Table:
    """Row values that are given: one differentiable number for each kind and position; remembers what was asked."""

    def __init__(self, blocks: Blocks, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = blocks.valid.shape
        self.of = {
            kind: (torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1).requires_grad_()
            for kind in ("ce", "forward_kl", "reverse_kl", "overlap")
        }
        self.asked: dict[str, list[int]] = {}

    def __call__(self, kind: Kind, index: Tensor) -> Tensor:
        assert kind not in self.asked
        self.asked[kind] = index.tolist()
        return self.of[kind].flatten()[index]


def value(objective: ObjectivePart, blocks: Blocks, table: Table) -> Tensor:
    asked = terms(objective, blocks)
    return loss(asked, denominators([asked]), table)[0]


def opd(**options: Any) -> ObjectivePart:
    return ObjectivePart(kind="draft_opd", **options)


def brute_force(objective: ObjectivePart, blocks: Blocks, table: Table) -> float:
    """Draft-OPD in plain loops."""
    accepted: list[float] = []
    rejected: list[float] = []
    z = 0.0
    for n in range(blocks.valid.shape[0]):
        rejections = 0
        for k in range(1, int(blocks.valid[n].sum()) + 1):
            rejections += rejections > 0 or not bool(blocks.accepted[n, k - 1])
            if rejections == 0 or (rejections == 1 and objective.correction):
                accepted.append(table.of[objective.accepted][n, k - 1].item())
            wanted = rejections == 1 or (rejections > 1 and not objective.first_rejected_only)
            if wanted and objective.rejected != "none":
                rejected.append(objective.gamma ** (k - 1) * table.of[objective.rejected][n, k - 1].item())
                z += objective.gamma ** (k - 1)
    if objective.reduction == "pooled" or objective.rejected == "none":
        return (sum(accepted) + sum(rejected)) / (len(accepted) + z) if accepted or rejected else 0.0
    return ((sum(accepted) / len(accepted) if accepted else 0.0) + (sum(rejected) / z if rejected else 0.0)) / 2


runs_and_length = st.integers(1, 8).flatmap(
    lambda length: st.tuples(
        st.lists(st.tuples(st.integers(0, length), st.integers(0, length)), max_size=6), st.just(length)
    )
)


@settings(max_examples=150, deadline=None)
@given(
    shape=runs_and_length,
    gamma=st.sampled_from([0.3, 0.8, 1.0]),
    accepted=st.sampled_from(["forward_kl", "reverse_kl", "ce"]),
    rejected=st.sampled_from(["forward_kl", "reverse_kl", "none"]),
    reduction=st.sampled_from(["two_means", "pooled"]),
    correction=st.booleans(),
    first_rejected_only=st.booleans(),
)
def test_draft_opd_equals_plain_loops(shape: tuple[list[tuple[int, int]], int], **options: Any) -> None:
    blocks, objective = made(*shape), opd(**options)
    table = Table(blocks)
    found = value(objective, blocks, table)
    assert found.item() == pytest.approx(brute_force(objective, blocks, table), rel=1e-6, abs=1e-12)
    found.backward()
    for grad in (leaf.grad for leaf in table.of.values() if leaf.grad is not None):
        assert bool(grad.isfinite().all())
        assert not grad[~blocks.valid].any()


@settings(max_examples=60, deadline=None)
@given(
    shape=runs_and_length,
    kind=st.sampled_from(["ce", "forward_kl", "reverse_kl"]),
    decay=st.sampled_from([0.5, 4.0, 7.0, math.inf]),
)
def test_decayed_mean_equals_plain_loops(shape: tuple[list[tuple[int, int]], int], kind: str, decay: float) -> None:
    blocks = made(*shape)
    table = Table(blocks)
    top = bottom = 0.0
    for n, k in blocks.valid.nonzero().tolist():
        weight = math.exp(-k / decay)  # k is 0-based here
        top, bottom = top + weight * table.of[kind][n, k].item(), bottom + weight
    found = value(ObjectivePart(kind=kind, decay=decay), blocks, table)
    assert found.item() == pytest.approx(top / bottom if bottom else 0.0, rel=1e-6)


def test_position_decay_starts_at_one() -> None:
    (term,) = terms(ObjectivePart(kind="ce", decay=7.0), made([(3, 3)], 4))
    assert term.weight.dtype == torch.float32
    assert term.weight.tolist() == [pytest.approx([1.0, math.exp(-1 / 7), math.exp(-2 / 7), 0.0])]


def test_the_weights_of_the_notes() -> None:
    """K = 15: after 5 accepted the first rejection weighs .8^5, all rejections 1.46; after none they weigh 4.82."""
    accepted, rejected = terms(opd(), made([(5, 15)], 15))
    assert accepted.weight.tolist() == [[1.0] * 5 + [0.0] * 10]
    assert rejected.weight[0, :5].tolist() == [0.0] * 5
    assert rejected.weight[0, 5].item() == pytest.approx(0.32768)
    assert rejected.weight[0, 14].item() == pytest.approx(0.8**14)
    assert denominators([[accepted, rejected]]) == {"accepted": 5.0, "rejected": pytest.approx(1.46, abs=0.005)}
    assert denominators([terms(opd(), made([(0, 15)], 15))]) == {
        "accepted": 0.0,
        "rejected": pytest.approx(4.82, abs=0.005),
    }


def test_two_means_and_pooled_share_the_loss_as_in_the_notes() -> None:
    """Pooled as in the reference code (correction counted): rejected share 20 % at r = 5, 4.82 against 1 at r = 0."""
    for run, share in (((5, 15), 1.46 / 7.46), ((0, 15), 4.82 / 5.82)):
        blocks = made([run], 15)
        for reduction, wanted in (("pooled", share), ("two_means", 0.5)):
            table = Table(blocks)
            value(opd(reduction=reduction, correction=True), blocks, table).backward()
            assert table.of["reverse_kl"].grad is not None
            assert table.of["reverse_kl"].grad.sum().item() == pytest.approx(wanted, abs=0.002)
            assert table.of["forward_kl"].grad is not None
            assert table.of["forward_kl"].grad.sum().item() == pytest.approx(1 - wanted, abs=0.002)


def test_wrong_variants_of_draft_opd_give_other_numbers() -> None:
    """The mistakes that are easy to make, each against ours on the same rows; one micro-batch has no rejection."""
    blocks = made([(2, 5), (0, 4), (5, 5)], 5)
    table = Table(blocks)
    ours = value(opd(), blocks, table).item()
    forward, reverse = (table.of[kind].detach() for kind in ("forward_kl", "reverse_kl"))
    accepted, rejected = split(blocks)
    k = blocks.position.double().expand(3, 5)

    def mean(values: Tensor, weight: Tensor) -> float:
        return ((values * weight).sum() / weight.sum()).item()

    from_rejection = torch.where(rejected, 0.8 ** (rejected.cumsum(-1) - 1).double(), 0.0)
    by_block = []
    for n, run in enumerate([(2, 5), (0, 4), (5, 5)]):
        part = terms(opd(), made([run], 5))
        by_block.append(loss(part, denominators([part]), lambda kind, i, n=n: table.of[kind][n][i])[0].item())
    right = 0.8 ** (k - 1) * rejected
    assert ours == pytest.approx((mean(forward, accepted.double()) + mean(reverse, right)) / 2)
    wrong = {
        "gamma from the first rejection": (mean(forward, accepted.double()) + mean(reverse, from_rejection)) / 2,
        "gamma^k not normalised": (mean(forward, accepted.double()) + (reverse * right).sum().item() / 11) / 2,
        "pooled": ((forward * accepted).sum() + (reverse * right).sum()).item() / (accepted.sum() + right.sum()).item(),
        "sum of the means": mean(forward, accepted.double()) + mean(reverse, right),
        "kinds exchanged": (mean(reverse, accepted.double()) + mean(forward, right)) / 2,
        "mean of block losses": sum(by_block) / 3,
        "only the first rejection": (mean(forward, accepted.double()) + mean(reverse, right * blocks.first_rejected))
        / 2,
        "invalid positions": (mean(forward, accepted.double()) + mean(reverse, 0.8 ** (k - 1) * ~accepted)) / 2,
    }
    for name, number in wrong.items():
        assert abs(number - ours) > 1e-3, name


@pytest.mark.parametrize(
    ("runs", "dead"),
    [([(0, 4), (0, 3)], "forward_kl"), ([(4, 4), (2, 2)], "reverse_kl")],
    ids=["nothing accepted", "nothing rejected"],
)
def test_an_empty_set_contributes_nothing_and_the_other_keeps_its_half(runs: list[tuple[int, int]], dead: str) -> None:
    blocks = made(runs, 4)
    table = Table(blocks)
    found = value(opd(gamma=1.0), blocks, table)
    alive = "reverse_kl" if dead == "forward_kl" else "forward_kl"
    assert found.item() == pytest.approx(table.of[alive][blocks.valid].mean().item() / 2)
    found.backward()
    dead_grad, grad = table.of[dead].grad, table.of[alive].grad
    assert dead_grad is not None
    assert not dead_grad.any()
    assert grad is not None
    assert grad.sum().item() == pytest.approx(0.5)


@pytest.mark.parametrize(
    "objective",
    [opd(), opd(reduction="pooled"), opd(rejected="none"), ObjectivePart(kind="ce"), ObjectivePart(kind="reverse_kl")],
    ids=["two_means", "pooled", "corrected only", "ce", "reverse_kl"],
)
@pytest.mark.parametrize("runs", [[], [(0, 0), (0, 0)]], ids=["no blocks", "no valid position"])
def test_nothing_valid_is_zero_with_a_graph(objective: ObjectivePart, runs: list[tuple[int, int]]) -> None:
    blocks = made(runs, 4)
    student = torch.randn(len(runs) * 4, 3, requires_grad=True)
    head, teacher = Readout(torch.randn(5, 3)), torch.randn(len(runs) * 4, 3)
    labels = torch.zeros(len(runs) * 4, dtype=torch.int64)

    def values(kind: Kind, index: Tensor) -> Tensor:
        return row_values(kind, student[index], head, teacher=teacher[index], labels=labels[index])

    asked = terms(objective, blocks)
    found, numerators = loss(asked, denominators([asked]), values)
    assert found.item() == 0.0
    assert set(numerators.tolist()) == {0.0}
    found.backward()
    assert student.grad is not None
    assert not student.grad.any()


@settings(max_examples=40, deadline=None)
@given(
    shape=runs_and_length,
    cuts=st.lists(st.integers(0, 6), max_size=3),
    objective=st.sampled_from(
        [
            opd(),
            opd(reduction="pooled", correction=True),
            opd(rejected="none"),
            ObjectivePart(kind="forward_kl", decay=2.0),
        ]
    ),
)
def test_uneven_micro_batches_add_up_to_the_batch(
    shape: tuple[list[tuple[int, int]], int], cuts: list[int], objective: ObjectivePart
) -> None:
    runs, length = shape
    blocks = made(runs, length)
    table = Table(blocks)
    value(objective, blocks, table).backward()
    wanted = {kind: leaf.grad for kind, leaf in table.of.items()}

    edges = sorted({0, len(runs), *(min(cut, len(runs)) for cut in cuts)})
    pieces = list(pairwise(edges)) or [(0, 0)]
    parts = [terms(objective, made(runs[start:stop], length)) for start, stop in pieces]
    totals = denominators(parts)
    again, sums = Table(blocks), torch.zeros(len(parts[0]), dtype=torch.float64)
    for (start, stop), asked in zip(pieces, parts, strict=True):
        piece, numerators = loss(asked, totals, lambda kind, i, s=slice(start, stop): again.of[kind][s].flatten()[i])
        piece.backward()
        sums = sums + numerators
    for kind, leaf in again.of.items():
        assert (leaf.grad is None) == (wanted[kind] is None)
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, wanted[kind], rtol=1e-6, atol=1e-9)
    whole = terms(objective, blocks)
    assert sums.tolist() == pytest.approx(loss(whole, denominators([whole]), Table(blocks))[1].tolist())


def test_every_ablation_changes_the_value() -> None:
    blocks = made([(2, 7), (0, 7), (6, 7), (7, 7), (3, 5)], 7)
    table = Table(blocks)
    ablations = {
        "published": opd(),
        "all forward": opd(rejected="forward_kl"),
        "all reverse": opd(accepted="reverse_kl"),
        "ce on accepted": opd(accepted="ce"),
        "corrected rollout only": opd(rejected="none"),
        "corrected rollout and correction": opd(rejected="none", correction=True),
        "no decay": opd(gamma=1.0),
        "pooled": opd(reduction="pooled"),
        "correction": opd(correction=True),
        "first rejected only": opd(first_rejected_only=True),
    }
    found = {}
    for name, objective in ablations.items():
        table.asked = {}
        found[name] = round(value(objective, blocks, table).item(), 6)
    assert len(set(found.values())) == len(found), found


def test_rows_are_computed_only_for_the_kinds_that_weigh_them() -> None:
    blocks = made([(1, 3), (3, 3), (0, 0)], 3)
    for objective, wanted in (
        (opd(), {"forward_kl": [0, 3, 4, 5], "reverse_kl": [1, 2]}),
        (opd(correction=True), {"forward_kl": [0, 1, 3, 4, 5], "reverse_kl": [1, 2]}),
        (opd(first_rejected_only=True), {"forward_kl": [0, 3, 4, 5], "reverse_kl": [1]}),
        (opd(accepted="reverse_kl", correction=True), {"reverse_kl": [0, 1, 2, 3, 4, 5]}),  # once, for both terms
        (opd(rejected="none"), {"forward_kl": [0, 3, 4, 5]}),
        (ObjectivePart(kind="ce"), {"ce": [0, 1, 2, 3, 4, 5]}),
    ):
        table = Table(blocks)
        value(objective, blocks, table)
        assert table.asked == wanted


@pytest.mark.parametrize(
    ("objective", "wanted"),
    [
        (ObjectivePart(kind="ce"), False),
        (ObjectivePart(kind="forward_kl"), True),
        (ObjectivePart(kind="reverse_kl"), True),
        (opd(), True),
        (opd(rejected="none"), True),
        (opd(accepted="ce"), True),
        (opd(accepted="ce", rejected="none"), False),
    ],
)
def test_needs_teacher(objective: ObjectivePart, wanted: bool) -> None:
    assert needs_teacher(objective) is wanted
    kinds = {term.kind for term in terms(objective, made([(1, 2)], 2))}
    assert bool(kinds - {"ce"}) is wanted


def test_totals_that_do_not_cover_the_terms_are_refused() -> None:
    blocks = made([(1, 3)], 3)
    asked = terms(opd(), blocks)
    for totals in ({"accepted": 1.0}, {"accepted": 1.0, "rejected": 0.0}):
        with pytest.raises(DraftloopError, match="do not cover group 'rejected'"):
            loss(asked, totals, Table(blocks))


def test_what_follows_the_first_rejection_is_rejected_whatever_it_says() -> None:
    blocks = made([(1, 4)], 4)
    odd = Blocks(blocks.row, blocks.anchor, blocks.tokens, blocks.valid, torch.tensor([[True, False, True, False]]))
    accepted, rejected = split(odd)
    assert accepted.tolist() == [[True, False, False, False]]
    assert rejected.tolist() == [[False, True, True, True]]


def test_split_counts() -> None:
    counts = split_counts(made([(2, 5), (0, 4), (5, 5), (3, 3), (0, 0)], 5))
    assert counts.accepted.tolist() == [3, 3, 2, 1, 1]
    assert counts.first_rejected.tolist() == [1, 0, 1, 0, 0]
    assert counts.later_rejected.tolist() == [0, 1, 1, 2, 1]
    assert counts.unrejected_blocks.tolist() == [0, 0, 1, 0, 1]
    assert split_counts(made([], 3)).accepted.tolist() == [0, 0, 0]


class _Product(Term):
    """1 - product of the block's values: positions act on each other."""

    def numerator(self, values: Tensor, overlap: Overlap | None = None) -> Tensor:
        return (1 - torch.where(self.weight > 0, values, 1.0).prod(-1)).sum()


def test_a_term_may_join_the_positions_of_a_block() -> None:
    blocks = made([(1, 3), (3, 3)], 3)
    table = Table(blocks)
    term = _Product("joined", "overlap", blocks.valid.float(), share=2.0, group="blocks")
    found, numerators = loss([term], {"blocks": 2.0}, table)
    alpha = table.of["overlap"]
    assert found.item() == pytest.approx(2 - alpha.prod(-1).sum().item())
    assert numerators.tolist() == [pytest.approx(found.item())]
    assert torch.autograd.gradcheck(
        lambda leaf: loss([term], {"blocks": 2.0}, lambda _, i: leaf.flatten()[i])[0], (alpha,)
    )


def test_terms_and_rows_together_equal_the_whole_vocabulary_by_hand() -> None:
    """Draft-OPD from hidden rows to the drafter's gradient, against eager autograd on all logits."""
    torch.manual_seed(0)
    blocks = made([(2, 4), (0, 3), (4, 4)], 4)
    student = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    teacher, head = torch.randn(3, 4, 5, dtype=torch.float64), Readout(torch.randn(17, 5, dtype=torch.float64))

    def values(kind: Kind, index: Tensor) -> Tensor:
        rows_of, chunk = (x.flatten(0, 1)[index] for x in (student, teacher)), 3
        return row_values(kind, next(rows_of), head, teacher=next(rows_of), temperature=1.5, chunk=chunk)

    asked = terms(opd(), blocks)
    found = loss(asked, denominators([asked]), values)[0]
    (gradient,) = torch.autograd.grad(found, student)

    log_q, log_p = ((head.logits(x) / 1.5).log_softmax(-1) for x in (student, teacher))
    forward, reverse = (log_p.exp() * (log_p - log_q)).sum(-1), (log_q.exp() * (log_q - log_p)).sum(-1)
    accepted, rejected = split(blocks)
    decay = 0.8 ** (blocks.position.double() - 1) * rejected
    wanted = (forward[accepted].mean() + (decay * reverse).sum() / decay.sum()) / 2
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, student)[0], rtol=1e-6, atol=1e-9)
