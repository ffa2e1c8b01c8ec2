"""Row values against brute force over the vocabulary, whole and reduced, and their gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftloop.core.errors import DraftloopError
from draftloop.core.law import Readout
from draftloop.objective import rows
from draftloop.objective.rows import Kind, row_values

KINDS: tuple[Kind, ...] = ("ce", "forward_kl", "reverse_kl", "overlap", "nla")


def brute_force(kind: Kind, z: Tensor, y: Tensor, labels: Tensor, temperature: float) -> list[float]:
    """One loop over the vocabulary a row, in Python floats, from logits [n, V]; -inf in z means q = 0."""
    out = []
    for z_row, y_row, label in zip(z.tolist(), y.tolist(), labels.tolist(), strict=True):
        q = [math.exp(value / temperature) for value in z_row]
        p = [math.exp(value / temperature) for value in y_row]
        q, p = [value / sum(q) for value in q], [value / sum(p) for value in p]
        pairs = list(zip(p, q, strict=True))
        out.append(
            {
                "ce": lambda q=q, label=label: -math.log(q[label]),
                "forward_kl": lambda pairs=pairs: sum(a * math.log(a / b) for a, b in pairs),
                "reverse_kl": lambda pairs=pairs: sum(b * math.log(b / a) for a, b in pairs if b > 0),
                "overlap": lambda pairs=pairs: sum(min(a, b) for a, b in pairs),
                "nla": lambda pairs=pairs: -math.log(sum(min(a, b) for a, b in pairs)),
            }[kind]()
        )
    return out


def eager(kind: Kind, z: Tensor, y: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """The same, vectorised and differentiable, the whole vocabulary of all rows at once, not in log space."""
    q, p = (z / temperature).softmax(-1), (y / temperature).softmax(-1)
    if kind == "ce":
        return -q[torch.arange(len(q)), labels].log()
    if kind == "forward_kl":
        return (p * (p / q).log()).sum(-1)
    if kind == "reverse_kl":
        return (q * (q / p).log()).sum(-1)
    alpha = torch.minimum(p, q).sum(-1)
    return -alpha.log() if kind == "nla" else alpha


def case(
    n: int, hidden: int, vocabulary: int, *, seed: int = 0, dtype: torch.dtype = torch.float64, **readout: Any
) -> tuple[Tensor, Readout, dict[str, Any]]:
    """Random rows: (student with grad, readout, the keyword inputs)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    if readout.pop("bias", False):
        readout["bias"] = normal(vocabulary)
    head = Readout(normal(vocabulary, hidden), **readout)
    labels = torch.randint(0, vocabulary, (n,), generator=generator)
    return normal(n, hidden).requires_grad_(), head, {"teacher": normal(n, hidden), "labels": labels}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(0, 9),
    hidden=st.integers(1, 6),
    vocabulary=st.integers(1, 24),
    temperature=st.floats(0.3, 4.0),
    scale=st.sampled_from([1.0, 0.25, 3.0]),
    soft_cap=st.sampled_from([None, 2.0, 30.0]),
    bias=st.booleans(),
    chunk=st.integers(1, 12),
    seed=st.integers(0, 10**6),
)
def test_values_and_gradients_equal_brute_force(
    kind: Kind, n: int, hidden: int, vocabulary: int, temperature: float, chunk: int, seed: int, **readout: Any
) -> None:
    student, head, inputs = case(n, hidden, vocabulary, seed=seed, **readout)
    found = row_values(kind, student, head, **inputs, temperature=temperature, chunk=chunk)
    assert found.dtype == torch.float64
    assert found.shape == (n,)
    y = head.logits(inputs["teacher"])
    expected = brute_force(kind, head.logits(student).detach(), y, inputs["labels"], temperature)
    torch.testing.assert_close(found.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-10)

    upstream = torch.linspace(-1.0, 2.0, n, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((found * upstream).sum(), student)
    reference = eager(kind, head.logits(student), y, inputs["labels"], temperature)
    (wanted,) = torch.autograd.grad((reference * upstream).sum(), student)
    torch.testing.assert_close(gradient, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_on_a_thousand_tokens(kind: Kind) -> None:
    student, head, inputs = case(37, 32, 1009, dtype=torch.float32, bias=True, soft_cap=20.0)
    found = row_values(kind, student, head, **inputs, temperature=0.7, chunk=10)
    assert found.dtype == torch.float32
    (gradient,) = torch.autograd.grad(found.sum(), student)

    exact = replace(head, weight=head.weight.double(), bias=head.bias.double())  # type: ignore[union-attr]
    twin = student.detach().double().requires_grad_()
    reference = eager(kind, exact.logits(twin), exact.logits(inputs["teacher"].double()), inputs["labels"], 0.7)
    (wanted,) = torch.autograd.grad(reference.sum(), twin)
    torch.testing.assert_close(found.double(), reference, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(gradient.double(), wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("readout", [{}, {"bias": True, "scale": 0.5, "soft_cap": 3.0}, {"support": True}])
def test_gradcheck(kind: Kind, readout: dict[str, Any]) -> None:
    student, head, inputs = case(5, 3, 7, **{k: v for k, v in readout.items() if k != "support"})
    if "support" in readout:
        inputs["teacher_readout"] = head
        head = Readout(head.weight[:4], support=torch.tensor([5, 0, 6, 3]), vocab_size=7)
        inputs["labels"] = torch.tensor([0, 3, 5, 6, 6])

    def of(rows_: Tensor) -> Tensor:
        return row_values(kind, rows_, head, **inputs, temperature=0.8, chunk=2)

    assert torch.autograd.gradcheck(of, (student,))


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_change_nothing(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    student, head, inputs = case(11, 4, 13)
    whole = row_values(kind, student, head, **inputs)
    (gradient,) = torch.autograd.grad(whole.square().sum(), student)

    def compare(chunk: int) -> None:
        found = row_values(kind, student, head, **inputs, chunk=chunk)
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(
            torch.autograd.grad(found.square().sum(), student)[0], gradient, rtol=1e-11, atol=1e-13
        )

    for chunk in (1, 2, 3, 10, 11, 12, 1000):
        compare(chunk)
    monkeypatch.setattr(rows, "_CPU_ROWS", 3)
    compare(1000)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_still_have_a_graph(kind: Kind) -> None:
    student, head, inputs = case(0, 4, 13, dtype=torch.float32)
    found = row_values(kind, student, head, **inputs)
    assert found.shape == (0,)
    assert found.dtype == torch.float32
    found.sum().backward()
    assert student.grad is not None
    assert student.grad.shape == (0, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_vocabulary(kind: Kind) -> None:
    student, head, inputs = case(3, 4, 1)
    found = row_values(kind, student, head, **inputs)
    assert found.tolist() == [1.0 if kind == "overlap" else 0.0] * 3
    assert torch.autograd.grad(found.sum(), student)[0].abs().max() == 0


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "overlap", "nla"])
def test_equal_laws_are_an_optimum(kind: Kind) -> None:
    student, head, inputs = case(6, 5, 40)
    found = row_values(kind, student, head, teacher=student.detach())
    torch.testing.assert_close(found, torch.full((6,), float(kind == "overlap"), dtype=torch.float64))
    assert torch.autograd.grad(found.sum(), student)[0].abs().max() < 1e-12
    other = row_values(kind, student, head, teacher=inputs["teacher"])
    assert bool((other < 1).all()) if kind == "overlap" else bool((other > 0).all())


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_logits_stay_finite(kind: Kind) -> None:
    student = torch.tensor([[3e4, -3e4], [-3e4, 3e4], [0.0, 0.0]], requires_grad=True)
    head = Readout(torch.eye(2))
    found = row_values(
        kind, student, head, teacher=torch.tensor([[-3e4, 3e4]] * 3), labels=torch.ones(3, dtype=torch.int64)
    )
    (gradient,) = torch.autograd.grad(found.sum(), student)
    assert bool(found.isfinite().all())
    assert bool(gradient.isfinite().all())
    wanted = {"overlap": [0.0, 1.0], "nla": [6e4 - math.log(2), 0.0]}.get(kind, [6e4, 0.0])
    assert found[:2].tolist() == pytest.approx(wanted)


def test_values_are_by_definition_and_not_each_other() -> None:
    """Hand-computed: p = (1/2, 1/2), q = (3/4, 1/4)."""
    student, teacher = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log()
    head = Readout(torch.eye(2))
    forward = row_values("forward_kl", student, head, teacher=teacher).item()
    reverse = row_values("reverse_kl", student, head, teacher=teacher).item()
    assert forward == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2), abs=1e-6)
    assert reverse == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), abs=1e-6)
    assert row_values("overlap", student, head, teacher=teacher).item() == pytest.approx(0.75, abs=1e-6)
    assert row_values("ce", student, head, labels=torch.tensor([1])).item() == pytest.approx(math.log(4), abs=1e-6)


def test_the_teacher_may_have_its_own_readout_and_width() -> None:
    student, head, inputs = case(4, 3, 9)
    wide = Readout(torch.randn(9, 5, dtype=torch.float64), scale=2.0)
    teacher = torch.randn(4, 5, dtype=torch.float64)
    found = row_values("forward_kl", student, head, teacher=teacher, teacher_readout=wide)
    torch.testing.assert_close(
        found, eager("forward_kl", head.logits(student), wide.logits(teacher), inputs["labels"], 1.0)
    )


# ---- reduced vocabulary


def reduced() -> tuple[Tensor, Readout, dict[str, Any]]:
    student, full, inputs = case(6, 4, 11)
    head = Readout(torch.randn(5, 4, dtype=torch.float64), support=torch.tensor([9, 2, 0, 7, 4]), vocab_size=11)
    return (
        student,
        head,
        {"teacher": inputs["teacher"], "teacher_readout": full, "labels": torch.tensor([9, 2, 0, 7, 4, 9])},
    )


@pytest.mark.parametrize("kind", ["ce", "reverse_kl", "overlap", "nla"])
def test_reduced_vocabulary_is_exact(kind: Kind) -> None:
    student, head, inputs = reduced()
    z, y = head.logits(student).detach(), inputs["teacher_readout"].logits(inputs["teacher"])  # z holds -inf
    expected = torch.tensor(brute_force(kind, z, y, inputs["labels"], 1.3), dtype=torch.float64)
    found = row_values(kind, student, head, **inputs, temperature=1.3, chunk=4)
    torch.testing.assert_close(found.detach(), expected)
    assert bool(torch.autograd.grad(found.sum(), student)[0].isfinite().all())


def test_forward_kl_on_a_reduced_vocabulary_takes_p_given_the_support() -> None:
    student, head, inputs = reduced()
    assert head.support is not None
    z, y = head.logits(student).detach(), inputs["teacher_readout"].logits(inputs["teacher"])
    within = brute_force("forward_kl", z[:, head.support], y[:, head.support], inputs["labels"], 1.3)
    found = row_values("forward_kl", student, head, **inputs, temperature=1.3, chunk=4)
    torch.testing.assert_close(found.detach(), torch.tensor(within, dtype=torch.float64))
    assert bool((found >= 0).all())


def test_a_label_outside_the_reduced_vocabulary_is_refused() -> None:
    student, head, inputs = reduced()
    with pytest.raises(DraftloopError, match="outside the drafter's reduced vocabulary"):
        row_values("ce", student, head, labels=inputs["labels"] + 1)
