"""E2E-TV (arXiv 2606.12370, eq. 13): value and gradient against plain loops and enumeration, limits, wrong versions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftloop.core.blocks import Blocks
from draftloop.core.law import Readout
from draftloop.objective import chain, terms
from draftloop.objective.rows import Kind, Overlap, overlap_rows, row_values
from draftloop.objective.terms import denominators, loss
from draftloop.recipe import ObjectivePart

pytestmark = pytest.mark.specopd


def blocks_of(valid: Tensor, log_q: Tensor | None = None, tokens: Tensor | None = None) -> Blocks:
    place = torch.arange(valid.shape[0])
    tokens = torch.zeros(valid.shape, dtype=torch.int64) if tokens is None else tokens
    return Blocks(torch.zeros_like(place), place, tokens, valid, valid.clone(), log_q)


def e2e(**options: Any) -> ObjectivePart:
    return ObjectivePart(kind="e2e_tv", **{"ce_weight": 0.0, **options})


def value(objective: ObjectivePart, blocks: Blocks, rows: Tensor | Overlap) -> Tensor:
    """The loss of given overlap rows [N, K]."""

    def values(kind: Kind, index: Tensor) -> Tensor | Overlap:
        assert kind == "overlap"
        if isinstance(rows, Overlap):
            return Overlap(*(grid.flatten()[index] for grid in rows))
        return rows.flatten()[index]

    asked = terms.terms(objective, blocks)
    return loss(asked, denominators([asked]), values)[0]


def by_loops(alpha: Tensor, valid: Tensor) -> Tensor:
    """The formula, one multiplication at a time; autograd through every factor."""
    parts = []
    for a, mask in zip(alpha, valid.tolist(), strict=True):
        n = mask.index(False) if False in mask else len(mask)
        reached, total = alpha.new_ones(()), alpha.new_zeros(())
        for k in range(n):
            reached = reached * a[k]
            total = total + reached
        parts += [1 - total / n] if n else []
    return torch.stack(parts).mean() if parts else 0 * alpha.sum()


# ---- value and gradient

chains = st.integers(1, 7).flatmap(
    lambda length: st.lists(
        st.lists(
            st.tuples(st.sampled_from([0.0, 1e-5, 0.2, 0.7, 0.95, 1.0]), st.sampled_from([True, True, True, False])),
            min_size=length,
            max_size=length,
        ),
        min_size=1,
        max_size=5,
    )
)


@settings(max_examples=30, deadline=None)
@given(given_=chains)
def test_value_and_gradient_equal_plain_loops(given_: list[list[tuple[float, bool]]]) -> None:
    alpha = torch.tensor([[a for a, _ in row] for row in given_], dtype=torch.float64, requires_grad=True)
    valid = torch.tensor([[mask for _, mask in row] for row in given_])
    found, wanted = value(e2e(), blocks_of(valid), alpha), by_loops(alpha, valid)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)  # weights are float32
    (gradient,), (right,) = torch.autograd.grad(found, alpha), torch.autograd.grad(wanted, alpha)
    torch.testing.assert_close(gradient, right, rtol=1e-6, atol=1e-7)
    assert not gradient[~valid].any()


def test_a_dead_position_takes_the_gradient_of_all_behind_it() -> None:
    alpha = torch.tensor([[0.9, 0.0, 0.8, 0.7]], dtype=torch.float64, requires_grad=True)
    found = value(e2e(), blocks_of(torch.ones(1, 4, dtype=torch.bool)), alpha)
    assert found.item() == pytest.approx(1 - 0.9 / 4)
    found.backward()
    assert alpha.grad is not None
    assert alpha.grad[0].tolist() == pytest.approx([-0.25, -0.531, 0.0, 0.0], abs=1e-9)


def test_gradcheck_with_zeros_and_masks() -> None:
    alpha = torch.rand(4, 5, dtype=torch.float64)
    alpha[0, 1] = alpha[1, 0] = alpha[1, 3] = 0.0
    valid = torch.tensor([5, 5, 3, 0]).unsqueeze(1) > torch.arange(5)
    assert torch.autograd.gradcheck(lambda a: value(e2e(), blocks_of(valid), a), (alpha.requires_grad_(),), atol=1e-6)


def test_equal_overlaps_weigh_as_a_geometric_series() -> None:
    """omega_i is proportional to a^(i-1) (1 - a^(n-i+1)) / (1 - a): DFlash's static decay, made adaptive."""
    a, n = 0.78, 7
    alpha = torch.full((1, n), a, dtype=torch.float64, requires_grad=True)
    value(e2e(), blocks_of(torch.ones(1, n, dtype=torch.bool)), alpha).backward()
    assert alpha.grad is not None
    wanted = [-(a**i) * (1 - a ** (n - i)) / (1 - a) / n for i in range(n)]
    assert alpha.grad[0].tolist() == pytest.approx(wanted, rel=1e-6)


def test_blocks_count_alike_and_shorter_ones_have_their_own_n() -> None:
    valid = torch.tensor([2, 4, 0]).unsqueeze(1) > torch.arange(4)
    alpha = torch.full((3, 4), 0.5, dtype=torch.float64)
    assert value(e2e(), blocks_of(valid), alpha).item() == pytest.approx(
        ((1 - (0.5 + 0.25) / 2) + (1 - (0.5 + 0.25 + 0.125 + 0.0625) / 4)) / 2
    )
    assert denominators([terms.terms(e2e(), blocks_of(valid))]) == {"blocks": pytest.approx(2.0)}


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=6), cut=st.integers(0, 6), weighted=st.booleans())
def test_uneven_micro_batches_add_up(sizes: list[int], cut: int, weighted: bool) -> None:
    objective = e2e(estimator="accept_weighted" if weighted else "alpha_product")
    valid = torch.tensor(sizes).unsqueeze(1) > torch.arange(4)
    generator = torch.Generator().manual_seed(len(sizes))
    rows = torch.rand(3, len(sizes), 4, generator=generator, dtype=torch.float64)
    rows = Overlap(rows[0], -rows[1], -rows[2])
    whole = value(objective, blocks_of(valid), rows)
    parts = [slice(0, cut), slice(cut, None)]
    asked = [terms.terms(objective, blocks_of(valid[part])) for part in parts]
    totals = denominators(asked)
    added = sum(
        loss(want, totals, lambda _, i, part=part: Overlap(*(grid[part].flatten()[i] for grid in rows)))[0]
        for want, part in zip(asked, parts, strict=True)
    )
    torch.testing.assert_close(added, whole)


# ---- from hidden rows


def case(narrow: bool = False) -> tuple[Tensor, Readout, dict[str, Any], Blocks]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    full = Readout(normal(13, 4))
    student = normal(12, 4).requires_grad_()
    head = replace(full, weight=normal(6, 4), support=torch.tensor([9, 2, 12, 7, 4, 5]), vocab_size=13)
    tokens = torch.randint(0, 13, (3, 4), generator=generator)
    blocks = blocks_of(torch.tensor([4, 3, 1]).unsqueeze(1) > torch.arange(4), torch.zeros(3, 4), tokens)
    return student, head if narrow else full, {"teacher": normal(12, 4), "teacher_readout": full}, blocks


def from_rows(objective: ObjectivePart, chunk: int, narrow: bool = False) -> tuple[Tensor, Tensor]:
    student, head, inputs, blocks = case(narrow)

    def values(kind: Kind, index: Tensor) -> Tensor | Overlap:
        options = {"temperature": objective.temperature, "chunk": chunk, "teacher_readout": inputs["teacher_readout"]}
        tokens, rows = blocks.tokens.flatten()[index], student[index]
        if kind == "overlap":
            return overlap_rows(rows, head, teacher=inputs["teacher"][index], tokens=tokens, **options)
        return row_values(kind, rows, head, teacher=inputs["teacher"][index], labels=tokens, **options)

    asked = terms.terms(objective, blocks, None if not narrow else torch.isin(blocks.tokens, head.support))  # type: ignore[arg-type]
    found = loss(asked, denominators([asked]), values)[0]
    return found, torch.autograd.grad(found, student)[0]


def eager(objective: ObjectivePart, narrow: bool) -> tuple[Tensor, Tensor]:
    """All laws at once, over the whole vocabulary, not in log space; the chain by plain loops."""
    student, head, inputs, blocks = case(narrow)
    warm = objective.temperature or 1.0
    q = (head.logits(student) / warm).softmax(-1)
    y = inputs["teacher_readout"].logits(inputs["teacher"])
    p = (y / warm).softmax(-1)
    if objective.temperature == 0:
        p = torch.nn.functional.one_hot(y.argmax(-1), 13).double()
    found = by_loops(torch.minimum(p, q).sum(-1).view(3, 4), blocks.valid)
    if objective.ce_weight:
        own = q.gather(-1, blocks.tokens.view(-1, 1)).view(3, 4)
        there = blocks.valid & (own > 0)
        decay = torch.exp(-torch.arange(4.0, dtype=torch.float64) / objective.decay).expand(3, 4)[there]
        found = found + objective.ce_weight * -(decay * own[there].log()).sum() / decay.sum()
    return found, torch.autograd.grad(found, student)[0]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("narrow", [False, True], ids=["whole vocabulary", "reduced"])
@pytest.mark.parametrize("ce_weight", [0.0, 0.1])
def test_chunked_equals_eager(temperature: float, narrow: bool, ce_weight: float) -> None:
    objective = e2e(temperature=temperature, ce_weight=ce_weight)
    wanted = eager(objective, narrow)
    for chunk in (1, 2, 3, 7, 100):
        found = from_rows(objective, chunk, narrow)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_a_sure_target_makes_it_the_weighted_cross_entropy_of_d_pace() -> None:
    """p one-hot: the gradient is that of CE weighted with the detached sums of prefix products (2605.18810)."""
    student, head, inputs, blocks = case()
    found = from_rows(e2e(temperature=0.0), 5)[1]
    labels = inputs["teacher_readout"].logits(inputs["teacher"]).argmax(-1)
    ce = row_values("ce", student, head, labels=labels).view(3, 4)
    weight = torch.zeros(3, 4, dtype=torch.float64)
    for i, n in enumerate(blocks.valid.sum(-1).tolist()):
        products = (-ce[i, :n]).detach().cumsum(0).exp()
        weight[i, :n] = products.flip(0).cumsum(0).flip(0) / n
    (wanted,) = torch.autograd.grad((weight * ce).sum() / 3, student)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


def test_logit_gradients_of_a_position_are_at_most_a_half() -> None:
    student = (torch.randn(40, 13, dtype=torch.float64) * 3).requires_grad_()
    head = Readout(torch.eye(13, dtype=torch.float64))
    found = row_values("overlap", student, head, teacher=torch.randn(40, 13, dtype=torch.float64) * 3)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    assert gradient.abs().sum(-1).max() <= 0.5 + 1e-9


# ---- enumeration: V = 4, W = 4, every path

V, W = 4, 4
PATHS = torch.tensor(list(product(range(V), repeat=W)))


def laws(seed: int, ahead: bool) -> Tensor:
    """[4^4 paths, W, V] of conditional laws; `ahead` = they do not depend on the path (a parallel drafter)."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.empty(len(PATHS), W, V, dtype=torch.float64)
    for k in range(W):
        table = (1.3 * torch.randn(V**k, V, generator=generator, dtype=torch.float64)).softmax(-1)
        out[:, k] = table[0] if ahead else table.repeat_interleave(V ** (W - k), 0)
    return out


def enumerated(ahead: bool) -> tuple[Overlap, dict[str, Tensor], float]:
    """Overlap rows of every path, the probability of every path under q and p, and the exact expected length."""
    p, q = laws(0, ahead=False), laws(1, ahead)
    place = PATHS.unsqueeze(-1)
    log_p, log_q = (law.log().gather(-1, place).squeeze(-1) for law in (p, q))
    exact = 0.0
    for k in range(1, W + 1):  # a prefix of k tokens stands for V^(W-k) paths
        exact += torch.minimum(log_p, log_q)[:, :k].sum(-1).exp().sum().item() / V ** (W - k)
    chances = {"q": log_q.sum(-1).exp(), "p": log_p.sum(-1).exp()}
    return Overlap(torch.minimum(p, q).sum(-1), log_p, log_q), chances, exact


def expected(objective: ObjectivePart, path: str, ahead: bool) -> float:
    """The length whose share of the block the loss tells, on average over all paths."""
    rows, chances, _ = enumerated(ahead)
    blocks = blocks_of(torch.ones(len(PATHS), W, dtype=torch.bool), rows.log_q.float() if path == "q" else None)
    (term,) = terms.terms(objective, blocks)
    weighed = replace(term, weight=term.weight * chances[path].unsqueeze(-1))
    return (1 - weighed.numerator(rows.alpha, rows).item()) * W


@pytest.mark.parametrize("ahead", [True, False], ids=["parallel", "autoregressive"])
@pytest.mark.parametrize("path", ["q", "p"])
def test_accept_weighted_has_the_exact_value_and_the_product_has_not(path: str, ahead: bool) -> None:
    exact = enumerated(ahead)[2]
    assert expected(e2e(estimator="accept_weighted"), path, ahead) == pytest.approx(exact, abs=1e-6)
    assert abs(expected(e2e(), path, ahead) - exact) > 1e-3


def test_paths_of_accepted_tokens_make_the_product_unbiased() -> None:
    """Drawn from min(p, q) / alpha, the law of what is accepted, the product of the overlaps is the right weight."""
    rows, _, exact = enumerated(ahead=True)
    chance = (torch.minimum(rows.log_p, rows.log_q) - rows.alpha.log()).sum(-1).exp()
    assert chance.sum().item() == pytest.approx(1)
    product_ = chain.reached_by_overlaps(rows.alpha) * rows.alpha
    assert (chance * product_.sum(-1)).sum().item() == pytest.approx(exact)


def test_accept_weighted_pulls_where_the_path_really_arrives() -> None:
    """omega_i = reach_i V_i / n, reach_i of the tokens, V_i of the overlaps; no gradient through the reach."""
    alpha = torch.tensor([[0.5, 0.6, 0.8]], dtype=torch.float64, requires_grad=True)
    log_p, log_q = torch.tensor([[[0.2, 0.4, 0.3]], [[0.8, 0.3, 0.5]]], dtype=torch.float64).log()
    valid = torch.ones(1, 3, dtype=torch.bool)
    for stored, reach in ((log_q.float(), [1.0, 0.25, 0.25]), (None, [1.0, 1.0, 0.75])):
        found = value(e2e(estimator="accept_weighted"), blocks_of(valid, stored), Overlap(alpha, log_p, log_q))
        assert found.item() == pytest.approx(1 - sum(r * a for r, a in zip(reach, [0.5, 0.6, 0.8], strict=True)) / 3)
        (gradient,) = torch.autograd.grad(found, alpha)
        wanted = [-r * v / 3 for r, v in zip(reach, [1 + 0.6 * (1 + 0.8), 1 + 0.8, 1.0], strict=True)]
        assert gradient[0].tolist() == pytest.approx(wanted, rel=1e-6)


def test_a_mixture_takes_each_block_by_its_own_law() -> None:
    rows, _, _ = enumerated(ahead=False)
    few = Overlap(*(grid[:6] for grid in rows))
    valid, objective = torch.ones(6, W, dtype=torch.bool), e2e(estimator="accept_weighted")
    stored = few.log_q.float()
    stored[3:] = float("nan")
    mixed = value(objective, blocks_of(valid, stored), few)
    halves = [
        value(objective, blocks_of(valid[:3], log_q), Overlap(*(grid[part] for grid in few)))
        for part, log_q in ((slice(3), stored[:3]), (slice(3, 6), None))
    ]
    torch.testing.assert_close(mixed, sum(halves) / 2)


# ---- wrong versions must fail


def mutants() -> dict[str, tuple[str, Callable[..., Any]]]:
    """Name -> (what of `terms` is replaced, by what): the mistakes that are easy to make."""
    value_, reach = chain.chain_value, chain.reached_on_path

    def inclusive(alpha: Tensor) -> Tensor:
        return alpha.cumprod(-1)

    def detached(alpha: Tensor, weight: Tensor, reached: Tensor) -> Tensor:
        """Every factor but the last taken for a constant."""
        return (weight * reached * alpha).sum()

    def no_reach(alpha: Tensor, weight: Tensor, reached: Tensor) -> Tensor:
        return value_(alpha, weight, torch.ones_like(reached))

    def swapped(log_p: Tensor, log_q: Tensor, drawn: Tensor, valid: Tensor) -> Tensor:
        return reach(log_p, log_q, log_p + log_q - drawn, valid)

    def late(log_p: Tensor, log_q: Tensor, drawn: Tensor, valid: Tensor) -> Tensor:
        return reach(log_p.roll(1, -1), log_q.roll(1, -1), drawn.roll(1, -1), valid)

    def unbounded(log_p: Tensor, log_q: Tensor, drawn: Tensor, valid: Tensor) -> Tensor:
        return reach(log_p, log_p, drawn, valid)

    return {
        "prefix off by one": ("reached_by_overlaps", inclusive),
        "detached factors": ("chain_value", detached),
        "positions on their own": ("chain_value", no_reach),
        "p and q swapped": ("reached_on_path", swapped),
        "reach off by one": ("reached_on_path", late),
        "p/q instead of min(1, p/q)": ("reached_on_path", unbounded),
    }


@pytest.mark.parametrize("name", mutants())
def test_wrong_versions_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terms, *mutants()[name])
    check: Callable[[], Any] = test_a_dead_position_takes_the_gradient_of_all_behind_it
    if name != "p and q swapped" and "reach off" not in name and "p/q" not in name:
        with pytest.raises(AssertionError):
            check()
        return
    for path in ("q", "p"):
        with pytest.raises(AssertionError):
            test_accept_weighted_has_the_exact_value_and_the_product_has_not(path, ahead=False)
