"""Overlap rows (how likely both laws find the proposed token; a greedy target) and the terms that read overlaps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftloop.core.errors import DraftloopError
from draftloop.core.law import Readout
from draftloop.objective import terms
from draftloop.objective.rows import Kind, Overlap, overlap_rows, row_values
from draftloop.objective.terms import denominators, loss, needs_teacher
from draftloop.recipe import ObjectivePart
from tests.test_e2e_tv import blocks_of, e2e, value
from tests.test_objective_rows import case

pytestmark = pytest.mark.specopd


def with_tokens(student: Tensor, head: Readout, inputs: dict[str, Any], tokens: Tensor, **options: Any) -> Any:
    given = {"teacher": inputs["teacher"], "teacher_readout": inputs.get("teacher_readout", head)}
    return overlap_rows(student, head, tokens=tokens, **given, **options)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(0, 9), temperature=st.sampled_from([0.0, 0.6, 1.0]), chunk=st.integers(1, 12), narrow=st.booleans()
)
def test_overlap_rows_tell_the_tokens_probabilities(n: int, temperature: float, chunk: int, narrow: bool) -> None:
    student, full, inputs = case(n, 4, 11, seed=n)
    head = replace(full, weight=full.weight[:5], support=torch.tensor([9, 2, 0, 7, 4]), vocab_size=11)
    head, inputs["teacher_readout"] = (head if narrow else full), full
    found = with_tokens(student, head, inputs, inputs["labels"], temperature=temperature, chunk=chunk)

    z, y = head.logits(student) / (temperature or 1.0), full.logits(inputs["teacher"])
    p = F.one_hot(y.argmax(-1), 11).double() if temperature == 0 else (y / temperature).softmax(-1)
    wanted = torch.minimum(p, z.softmax(-1)).sum(-1)
    torch.testing.assert_close(found.alpha, wanted)
    place = inputs["labels"].unsqueeze(-1)
    torch.testing.assert_close(found.log_p, p.log().gather(-1, place).squeeze(-1))
    torch.testing.assert_close(found.log_q, z.detach().log_softmax(-1).gather(-1, place).squeeze(-1))
    assert not found.log_p.requires_grad
    assert not found.log_q.requires_grad
    upstream = torch.linspace(-1.0, 2.0, n, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((found.alpha * upstream).sum(), student)
    torch.testing.assert_close(gradient, torch.autograd.grad((wanted * upstream).sum(), student)[0])


def test_a_greedy_target_makes_overlap_the_chance_of_its_argmax() -> None:
    student, head, inputs = case(6, 4, 11)
    best = head.logits(inputs["teacher"]).argmax(-1)
    found = row_values("overlap", student, head, teacher=inputs["teacher"], temperature=0.0)
    torch.testing.assert_close(found, head.logits(student).softmax(-1)[torch.arange(6), best])
    assert torch.autograd.gradcheck(
        lambda rows_: row_values("overlap", rows_, head, teacher=inputs["teacher"], temperature=0.0, chunk=4),
        (student,),
    )


def test_minus_log_alpha_of_a_sure_target_is_its_cross_entropy() -> None:
    """LK losses, 2602.23881: with a one-hot p, the gradient of -log alpha is that of cross-entropy."""
    student, head, inputs = case(6, 4, 11)
    sure = replace(head, scale=1e4)
    labels = head.logits(inputs["teacher"]).argmax(-1)
    nla = row_values("nla", student, head, teacher=inputs["teacher"], teacher_readout=sure)
    ce = row_values("ce", student, head, labels=labels)
    torch.testing.assert_close(nla, ce)
    torch.testing.assert_close(*(torch.autograd.grad(found.sum(), student)[0] for found in (nla, ce)))


# ---- terms


@pytest.mark.parametrize("kind", ["tv", "nla", "e2e_tv"])
def test_overlap_objectives_and_their_anchor_term(kind: str) -> None:
    valid = torch.tensor([3, 2]).unsqueeze(1) > torch.arange(3)
    objective = ObjectivePart(kind=kind, decay=2.0)
    assert needs_teacher(objective)
    known = torch.tensor([[True, False, False], [True, True, True]])
    main, anchor = terms.terms(objective, blocks_of(valid), known)
    decay = [math.exp(-k / 2) for k in range(3)]
    if kind != "e2e_tv":
        assert main.weight.flatten().tolist() == pytest.approx([*decay, *decay[:2], 0.0])
    assert (anchor.kind, anchor.share, anchor.group) == ("ce", 0.1, "ce")
    assert anchor.weight.flatten().tolist() == pytest.approx([1.0, 0.0, 0.0, *decay[:2], 0.0])
    assert len(terms.terms(objective.model_copy(update={"ce_weight": 0.0}), blocks_of(valid))) == 1


def test_tv_is_the_weighted_mean_of_one_minus_alpha() -> None:
    alpha = torch.rand(2, 3, dtype=torch.float64)
    valid = torch.tensor([[True, True, True], [True, True, False]])
    found = value(ObjectivePart(kind="tv", decay=math.inf, ce_weight=0.0), blocks_of(valid), alpha)
    assert found.item() == pytest.approx((1 - alpha)[valid].mean().item())


def test_temperatures_without_a_meaning_are_refused() -> None:
    for kind in ("ce", "forward_kl", "reverse_kl", "nla", "draft_opd"):
        with pytest.raises(ValueError, match="temperature 0 is for kind tv and e2e_tv"):
            ObjectivePart(kind=kind, temperature=0.0)
    with pytest.raises(ValueError, match="smaller ones overflow"):
        e2e(temperature=1e-9)


def test_accept_weighted_needs_the_tokens() -> None:
    alpha, valid = torch.rand(1, 3), torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(DraftloopError, match="needs the tokens' log-probabilities"):
        value(e2e(estimator="accept_weighted"), blocks_of(valid), alpha)


@pytest.mark.parametrize("objective", [e2e(), e2e(estimator="accept_weighted"), ObjectivePart(kind="tv")])
@pytest.mark.parametrize("count", [0, 2])
def test_nothing_valid_is_zero_with_a_graph(objective: ObjectivePart, count: int) -> None:
    blocks = blocks_of(torch.zeros(count, 4, dtype=torch.bool))
    student = torch.randn(count * 4, 3, requires_grad=True)
    head, teacher = Readout(torch.randn(5, 3)), torch.randn(count * 4, 3)

    def values(kind: Kind, index: Tensor) -> Tensor | Overlap:
        none = blocks.tokens.flatten()[index]
        if kind == "overlap":
            return overlap_rows(student[index], head, teacher=teacher[index], teacher_readout=head, tokens=none)
        return row_values(kind, student[index], head, labels=none)

    asked = terms.terms(objective, blocks)
    found, _ = loss(asked, denominators([asked]), values)
    found.backward()
    assert found.item() == 0.0
    assert student.grad is not None
    assert not student.grad.any()
