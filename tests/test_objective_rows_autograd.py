"""Row values under autograd: types, autocast, who gets a gradient, and what is kept in memory."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftloop.core.errors import DraftloopError
from draftloop.core.law import Readout
from draftloop.objective import rows as rows_module
from draftloop.objective.rows import Kind, row_values
from tests.test_objective_rows import KINDS, case


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_student_and_readout(kind: Kind) -> None:
    student, head, inputs = case(20, 64, 300, dtype=torch.float32)
    small = replace(head, weight=(head.weight * 0.2).bfloat16())
    exact = replace(head, weight=small.weight.float())
    half = student.detach().bfloat16().requires_grad_()
    found = row_values(kind, half, small, **inputs)
    assert found.dtype == torch.float32
    (gradient,) = torch.autograd.grad(found.sum(), half)
    assert gradient.dtype == torch.bfloat16
    twin = half.detach().float().requires_grad_()
    wanted = row_values(kind, twin, exact, **inputs)
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
    (wanted_gradient,) = torch.autograd.grad(wanted.sum(), twin)
    assert (gradient.float() - wanted_gradient).norm() < 0.03 * wanted_gradient.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_does_not_change_the_law(kind: Kind) -> None:
    student, head, inputs = case(5, 8, 30, dtype=torch.float32)
    outside = row_values(kind, student, head, **inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = row_values(kind, student, head, **inputs)
    assert torch.equal(inside, outside)


def test_strided_rows_are_taken_as_they_are() -> None:
    student, head, inputs = case(10, 4, 13)
    strided = student.detach().t().contiguous().t().requires_grad_()
    assert not strided.is_contiguous()
    found, wanted = (row_values("overlap", rows_, head, **inputs, chunk=3) for rows_ in (strided, student))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), strided)[0], torch.autograd.grad(wanted.sum(), student)[0]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_without_grad_no_jacobian_and_the_same_values(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    student, head, inputs = case(5, 4, 13)
    wanted = row_values(kind, student, head, **inputs)

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("the Jacobian was computed")

    monkeypatch.setattr(torch.autograd, "grad", forbidden)
    with torch.no_grad():
        found = row_values(kind, student, head, **inputs)
    assert torch.equal(found, wanted)
    detached = row_values(kind, student.detach(), head, **inputs)
    assert not detached.requires_grad
    assert torch.equal(detached, wanted)


def test_no_gradient_reaches_the_teacher() -> None:
    student, head, inputs = case(5, 4, 13)
    inputs["teacher"].requires_grad_()
    row_values("reverse_kl", student, head, **inputs).sum().backward()
    assert student.grad is not None
    assert inputs["teacher"].grad is None
    assert not row_values("reverse_kl", student.detach(), head, **inputs).requires_grad


def test_misuse_is_named() -> None:
    student, head, inputs = case(5, 4, 13)
    with pytest.raises(DraftloopError, match="ce needs labels"):
        row_values("ce", student, head, teacher=inputs["teacher"])
    with pytest.raises(DraftloopError, match="overlap needs teacher rows"):
        row_values("overlap", student, head, labels=inputs["labels"])
    with pytest.raises(DraftloopError, match="5 drafter rows but 4"):
        row_values("forward_kl", student, head, teacher=inputs["teacher"][:4])
    with pytest.raises(DraftloopError, match="nla has no temperature 0"):
        row_values("nla", student, head, teacher=inputs["teacher"], temperature=0.0)
    narrow = Readout(head.weight[:3], support=torch.arange(3), vocab_size=13)
    with pytest.raises(DraftloopError, match="whole vocabulary"):
        row_values("forward_kl", student, narrow, teacher=inputs["teacher"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_readout_gets_its_gradient_and_gives_the_same_values(kind: Kind) -> None:
    student, head, inputs = case(11, 4, 13, bias=True)
    inputs["teacher_readout"] = Readout(head.weight.detach().clone(), head.bias)
    wide = torch.cat([student.detach(), torch.randn(11, 3, dtype=student.dtype)], -1).requires_grad_()
    trained = replace(head, bias=head.bias.clone().requires_grad_(), added=torch.randn(13, 3, dtype=student.dtype))
    trained.weight.requires_grad_()
    trained.added.requires_grad_()
    assert len(trained.parameters) == 3
    inputs = {
        name: given
        for name, given in inputs.items()
        if name in (("labels",) if kind == "ce" else ("teacher", "teacher_readout"))
    }
    weight = torch.linspace(0.5, 2, 11, dtype=student.dtype)  # rows count unlike each other
    values = row_values(kind, wide, trained, chunk=4, **inputs)
    found = torch.autograd.grad((values * weight).sum(), (wide, *trained.parameters))
    z = trained.logits(wide)
    whole = Readout(torch.eye(13, dtype=student.dtype))  # the logits as rows: another way to the same derivative
    expected = row_values(kind, z, whole, **inputs)
    assert torch.allclose(values, expected)
    for mine, theirs in zip(
        found, torch.autograd.grad((expected * weight).sum(), (wide, *trained.parameters)), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-9)
        assert float(theirs.abs().max()) > 1e-4
    with torch.no_grad():
        assert torch.allclose(row_values(kind, wide, trained, **inputs), expected)


# ---- memory


class _Widest(TorchDispatchMode):
    """The most rows that any tensor as wide as the vocabulary had."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.most = vocabulary, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, Tensor) and tensor.shape[-1:] == (self.vocabulary,):
                self.most = max(self.most, tensor.numel() // self.vocabulary)
        return out


class _Saved:
    """What autograd holds for one saved tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_vocabulary_width_is_kept_or_grows(kind: Kind) -> None:
    vocabulary, chunk = 101, 4
    student, head, inputs = case(30, 3, vocabulary)  # 3 < chunk: the transposed weight does not count
    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Saved:
        held = _Saved(tensor)
        saved.add(held)
        return held

    with _Widest(vocabulary) as widest, torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        found = row_values(kind, student, head, **inputs, chunk=chunk)
        alive = [tuple(held.tensor.shape) for held in saved]
        found.sum().backward()
    assert widest.most == chunk
    assert alive == [(30, 3)]  # the Jacobian rows, and nothing else


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_that_memory_holds_give_the_same_numbers_bit_for_bit(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if more is held than `_KEPT` says, if a chunk beyond the memory is held, or if none is."""
    vocabulary, chunk = 101, 4
    student, head, inputs = case(11, 3, vocabulary)
    frozen = head.weight.detach().clone()
    trained = replace(head, weight=frozen.clone().requires_grad_(), soft_cap=5.0)
    inputs |= {"teacher_readout": Readout(frozen)} if kind != "ce" else {}

    def learnt(rows: int) -> tuple[list[Tensor], int]:
        """Value and gradients, and how many wide tensors autograd holds of chunks kept whole."""
        held: weakref.WeakSet[_Saved] = weakref.WeakSet()

        def pack(tensor: Tensor) -> _Saved:
            one = _Saved(tensor)
            if tensor.shape == (chunk, vocabulary):
                held.add(one)
            return one

        monkeypatch.setattr(rows_module, "_spare", lambda device: rows * rows_module._KEPT * vocabulary * 8)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
            values = row_values(kind, student, trained, **inputs, chunk=chunk)
            size = sum({one.tensor.data_ptr(): one.tensor.numel() for one in held}.values())
            found = torch.autograd.grad((values * torch.linspace(0.5, 2, 11)).sum(), (student, trained.weight))
        return [values.detach(), *found], size

    want, none = learnt(3)
    found, some = learnt(9)
    assert none == 0
    assert 8 * vocabulary <= some <= 8 * vocabulary * rows_module._KEPT
    assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True))
