"""The readout fused with the loss: the same tests for the eager chunks and for the Triton kernels.

Without a GPU the kernels run in Triton's interpreter (conftest.py asks for it; skipped where Triton is missing), with
tiles of 16 and slabs of 32 columns, so that toy sizes cross every border. `-m gpu` runs the compiled kernels.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftloop.core.errors import InputError
from draftloop.core.law import Readout
from draftloop.objective import fused, rows, terms
from draftloop.objective.rows import Kernel, Kind, Overlap, overlap_rows, row_values
from draftloop.objective.terms import denominators, loss
from draftloop.recipe import ObjectivePart
from tests.test_e2e_tv import blocks_of
from tests.test_objective_rows import KINDS, case, eager

GPU = torch.cuda.is_available()
WIDTH = 20  # two steps of the interpreter's dot, the second one ragged; one width, so that a GPU compiles less


@dataclass(frozen=True)
class Way:
    """Who computes, and where."""

    kernel: Kernel
    device: str

    def rows(self, kind: Kind, student: Tensor, head: Readout, **inputs: Any) -> Tensor:
        moved = {name: self.move(value) for name, value in inputs.items()}
        return row_values(kind, student.to(self.device), self.move(head), **moved, kernel=self.kernel).cpu()

    def overlaps(self, student: Tensor, head: Readout, **inputs: Any) -> Overlap:
        moved = {name: self.move(value) for name, value in inputs.items()}
        found = overlap_rows(student.to(self.device), self.move(head), **moved, kernel=self.kernel)
        return Overlap(*(part.cpu() for part in found))

    def move(self, thing: Any) -> Any:
        if isinstance(thing, Tensor):
            return thing.to(self.device)
        if isinstance(thing, Readout):
            parts = {name: self.move(getattr(thing, name)) for name in ("weight", "bias", "support")}
            return replace(thing, **parts)
        return thing


WAYS = [
    Way("eager", "cpu"),
    Way("triton", "cpu"),
    pytest.param(Way("eager", "cuda"), marks=pytest.mark.gpu),
    pytest.param(Way("triton", "cuda"), marks=pytest.mark.gpu),
]


@pytest.fixture(params=WAYS, ids=lambda way: f"{way.kernel}-{way.device}")
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    return prepared(request.param, monkeypatch)


def prepared(way: Way, monkeypatch: pytest.MonkeyPatch) -> Way:
    if way.device == "cuda" and not GPU:
        pytest.skip("needs a CUDA GPU")
    if way.kernel == "triton" and importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed, so its interpreter cannot run the kernels")
    if way.kernel == "triton" and way.device == "cpu":
        if GPU:
            pytest.skip("the compiled kernels are tested on this GPU, and one process cannot have both")
        monkeypatch.setattr(fused, "_SLAB", 17 * 32)
    torch.backends.cuda.matmul.allow_tf32 = False
    return way


def exactly(kind: Kind, student: Tensor, head: Readout, inputs: dict[str, Any], temperature: float) -> Any:
    """Values and gradient of their sum with UPSTREAM in float64, the whole vocabulary of all rows at once."""
    wide = replace(head, weight=head.weight.double(), bias=None if head.bias is None else head.bias.double())
    twin = student.detach().double().requires_grad_()
    values = eager(kind, wide.logits(twin), wide.logits(inputs["teacher"].double()), inputs["labels"], temperature)
    return values.detach(), torch.autograd.grad((values * upstream(len(twin)).double()).sum(), twin)[0]


def upstream(n: int) -> Tensor:
    """Of both signs, and 0 at every third row."""
    return torch.linspace(-1.0, 2.0, n) * (torch.arange(n) % 3 != 1)


def agree(found: Tensor, gradient: Tensor, wanted: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(found.detach().double(), wanted[0], rtol=3e-5, atol=3e-5)
    torch.testing.assert_close(gradient.double(), wanted[1], rtol=3e-4, atol=1e-4)


READOUTS = [{}, {"bias": True, "scale": 0.5, "soft_cap": 3.0}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("readout", READOUTS, ids=["plain", "bent"])
def test_values_and_gradients(way: Way, kind: Kind, readout: dict[str, Any]) -> None:
    student, head, inputs = case(17, WIDTH, 37, dtype=torch.float32, **readout)
    inputs = {name: torch.stack([rows, rows], 1)[:, 0] for name, rows in inputs.items()}  # strided
    found = way.rows(kind, student, head, **inputs, temperature=0.8)
    assert found.dtype == torch.float32
    (gradient,) = torch.autograd.grad((found * upstream(17)).sum(), student)
    agree(found, gradient, exactly(kind, student, head, inputs, 0.8))
    assert not gradient[1::3].any()
    with torch.no_grad():
        torch.testing.assert_close(way.rows(kind, student, head, **inputs, temperature=0.8), found.detach())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "vocabulary"), [(0, 13), (1, 1), (1, 17), (3, 2)])
def test_smallest_sizes(way: Way, kind: Kind, n: int, vocabulary: int) -> None:
    student, head, inputs = case(n, WIDTH, vocabulary, dtype=torch.float32)
    found = way.rows(kind, student, head, **inputs)
    assert found.shape == (n,)
    (gradient,) = torch.autograd.grad((found * upstream(n)).sum(), student)
    agree(found, gradient, exactly(kind, student, head, inputs, 1.0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_reduced_vocabulary_and_a_teacher_of_its_own(way: Way, kind: Kind) -> None:
    student, full, inputs = case(6, WIDTH, 41)
    wide, teacher = full.weight.flip(0).contiguous(), inputs["teacher"]
    support = torch.tensor([39, 2, 0, 17, 4, 40, 33])
    head = Readout(full.weight[:7].contiguous(), support=support, vocab_size=41)
    given: dict[str, Any] = {"labels": support[[0, 3, 5, 6, 6, 1]]}
    if kind != "ce":
        given |= {"teacher": teacher, "teacher_readout": Readout(wide)}
    exact = row_values(kind, student, head, **given, temperature=1.3)
    (wanted,) = torch.autograd.grad((exact * upstream(6)).sum(), student)

    single = student.detach().float().requires_grad_()
    head = replace(head, weight=head.weight.float())
    if kind != "ce":
        given |= {"teacher": teacher.float(), "teacher_readout": Readout(wide.float())}
    found = way.rows(kind, single, head, **given, temperature=1.3)
    (gradient,) = torch.autograd.grad((found * upstream(6)).sum(), single)
    agree(found, gradient, (exact.detach(), wanted))


@pytest.mark.parametrize("temperature", [0.0, 0.6])
@pytest.mark.parametrize("narrow", [False, True])
def test_overlaps_of_greedy_targets_and_their_tokens(way: Way, temperature: float, narrow: bool) -> None:
    student, full, inputs = case(9, WIDTH, 37, seed=3)
    head = replace(full, weight=full.weight[:5].clone(), support=torch.tensor([36, 2, 0, 7, 14]), vocab_size=37)
    head = head if narrow else full
    given = {"teacher": inputs["teacher"], "tokens": inputs["labels"].clone(), "teacher_readout": full}
    given["tokens"][:2] = torch.tensor([36, 7])
    if temperature == 0:
        given["tokens"][2:5] = full.logits(inputs["teacher"]).argmax(-1)[2:5]
    wanted = overlap_rows(student, head, **given, temperature=temperature)
    (pull,) = torch.autograd.grad((wanted.alpha * upstream(9)).sum(), student)

    single, light = student.detach().float().requires_grad_(), replace(head, weight=head.weight.float())
    given |= {"teacher": inputs["teacher"].float(), "teacher_readout": replace(full, weight=full.weight.float())}
    found = way.overlaps(single, light, **given, temperature=temperature)
    (gradient,) = torch.autograd.grad((found.alpha * upstream(9)).sum(), single)
    agree(found.alpha, gradient, (wanted.alpha.detach(), pull))
    torch.testing.assert_close(found.log_p.double(), wanted.log_p, rtol=3e-5, atol=3e-5)
    torch.testing.assert_close(found.log_q.double(), wanted.log_q, rtol=3e-5, atol=3e-5)
    assert not found.log_p.requires_grad
    assert not found.log_q.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_and_equal_laws(way: Way, kind: Kind) -> None:
    far, opposite = torch.zeros(3, WIDTH), torch.zeros(3, WIDTH)
    far[:2, :2] = torch.tensor([[3e4, -3e4], [-3e4, 3e4]])
    opposite[:, :2] = torch.tensor([-3e4, 3e4])
    far.requires_grad_()
    head, inputs = Readout(torch.eye(2, WIDTH)), {"teacher": opposite, "labels": torch.ones(3, dtype=torch.int64)}
    found = way.rows(kind, far, head, **inputs)
    (gradient,) = torch.autograd.grad(found.sum(), far)
    assert bool(gradient.isfinite().all())
    reference = row_values(kind, far, head, **inputs, kernel="eager")
    torch.testing.assert_close(found, reference)
    (wanted,) = torch.autograd.grad(reference.sum(), far)
    torch.testing.assert_close(gradient, wanted, rtol=5e-3, atol=1e-5)  # float32 knows log alpha = -6e4 to 4e-3

    if kind != "ce":  # every p = q: the minimum of two equals gives half its derivative to each
        student, head, _ = case(5, WIDTH, 40, dtype=torch.float32)
        found = way.rows(kind, student, head, teacher=student.detach())
        torch.testing.assert_close(found, torch.full((5,), float(kind == "overlap")), rtol=0, atol=1e-5)
        assert torch.autograd.grad(found.sum(), student)[0].abs().max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_readouts_of_half_precision(way: Way, kind: Kind) -> None:
    """The law is that of logits rounded to the readout's type, as they are sampled from."""
    dtype = torch.bfloat16 if way.device == "cuda" else torch.float16  # the interpreter multiplies no bfloat16
    student, head, inputs = case(17, WIDTH, 37, dtype=torch.float32)
    small = replace(head, weight=(head.weight * 0.2).to(dtype))
    half = student.detach().to(dtype).requires_grad_()
    found = way.rows(kind, half, small, **inputs)
    (gradient,) = torch.autograd.grad(found.sum(), half)
    assert found.dtype == torch.float32
    assert gradient.dtype == dtype
    wanted = row_values(kind, half, small, **inputs, kernel="eager")
    (pull,) = torch.autograd.grad(wanted.sum(), half)
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.01)
    assert (gradient.float() - pull.float()).norm() < 0.02 * pull.float().norm()


def test_a_row_does_not_depend_on_its_batch_and_repeats(way: Way) -> None:
    student, head, inputs = case(17, WIDTH, 37, dtype=torch.float32)
    whole, again = (way.rows("overlap", student, head, **inputs) for _ in range(2))
    assert torch.equal(whole, again)
    gradients = [torch.autograd.grad(found.sum(), student)[0] for found in (whole, again)]
    assert torch.equal(*gradients)
    few = way.rows("overlap", student[3:8], head, teacher=inputs["teacher"][3:8])
    torch.testing.assert_close(few, whole[3:8], rtol=1e-6, atol=1e-7)


OBJECTIVES = [
    ObjectivePart(kind="e2e_tv"),
    ObjectivePart(kind="e2e_tv", estimator="accept_weighted", temperature=0.7),
    ObjectivePart(kind="tv"),
    ObjectivePart(kind="draft_opd"),
    ObjectivePart(kind="draft_opd", reduction="pooled", accepted="ce"),
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda part: f"{part.kind}-{part.estimator}-{part.reduction}")
@pytest.mark.parametrize("nothing", [False, True])
def test_objectives_on_uneven_blocks(way: Way, objective: ObjectivePart, nothing: bool) -> None:
    """Coefficients that depend on other rows of the block, masked positions, and blocks without any."""
    count, width = 5, 4
    student, head, inputs = case(count * width, WIDTH, 37, dtype=torch.float32, seed=5)
    valid = torch.tensor([4, 2, 0, 3, 4]).unsqueeze(1) > torch.arange(width)
    blocks = blocks_of(valid & (not nothing))
    accepted = torch.arange(width) < torch.tensor([2, 2, 0, 0, 4]).unsqueeze(1)
    tokens = inputs["labels"].view(count, width)
    blocks = replace(blocks, accepted=accepted & blocks.valid, tokens=tokens)

    def of(compute: Way) -> tuple[Tensor, Tensor]:
        def values(kind: Kind, index: Tensor) -> Tensor | Overlap:
            chosen, options = student[index], {"temperature": objective.temperature}
            if kind == "overlap":
                given = {
                    "teacher": inputs["teacher"][index],
                    "teacher_readout": head,
                    "tokens": inputs["labels"][index],
                }
                return compute.overlaps(chosen, head, **given, **options)
            given = {"teacher": inputs["teacher"][index], "labels": inputs["labels"][index]}
            return compute.rows(kind, chosen, head, **given, **options)

        asked = terms.terms(objective, blocks)
        found, _ = loss(asked, denominators([asked]), values)
        return found, torch.autograd.grad(found, student)[0]

    found, gradient = of(way)
    wanted, pull = of(Way("eager", "cpu"))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, pull, rtol=1e-4, atol=1e-6)
    assert bool(gradient.any()) is not nothing


# ---- what would be wrong, and memory


def without_the_mean(work: Any, *given: Any) -> Any:
    """Spoilt: d softmax without its second half."""
    value, first, second = VALUE(work, *given)
    return value, torch.zeros_like(first), None if second is None else torch.zeros_like(second)


def unsettled(work: Any, side: Any, tokens: Any, within: bool = False) -> Any:
    """Spoilt: a log-sum-exp that forgets the tail of the vocabulary."""
    law = LAW(work, side, tokens, within)
    return law._replace(log_sum=law.log_sum - 0.01)


VALUE, LAW = fused._Work.value, fused._Work.law


@pytest.mark.parametrize(
    ("kind", "name", "spoilt"),
    [(kind, "law", unsettled) for kind in KINDS]
    + [(kind, "value", without_the_mean) for kind in ("reverse_kl", "overlap", "nla")],
)
def test_a_spoilt_kernel_is_noticed(kind: Kind, name: str, spoilt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    way = prepared(Way("triton", "cuda" if GPU else "cpu"), monkeypatch)
    student, head, inputs = case(17, WIDTH, 37, dtype=torch.float32)
    monkeypatch.setattr(fused._Work, name, spoilt)
    found = way.rows(kind, student, head, **inputs, temperature=0.8)
    (gradient,) = torch.autograd.grad((found * upstream(17)).sum(), student)
    with pytest.raises(AssertionError):
        agree(found, gradient, exactly(kind, student, head, inputs, 0.8))


class _Widest(TorchDispatchMode):
    """The largest tensor made, the readout's views left out."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.storage, self.most = weight.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() != self.storage:
                self.most = max(self.most, tensor.untyped_storage().nbytes() // 4)
        return out


@pytest.mark.parametrize("kind", ["forward_kl", "overlap"])
def test_no_logits_in_memory(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    n, vocabulary = 17, 150
    student, head, inputs = case(n, 3, vocabulary, dtype=torch.float32)
    sizes = {}
    for way in (Way("eager", "cpu"), Way("triton", "cpu")):
        prepared(way, monkeypatch)
        with _Widest(head.weight) as widest:
            row_values(kind, student, head, **inputs, kernel=way.kernel).sum().backward()
        sizes[way.kernel] = widest.most
    assert sizes["eager"] >= n * vocabulary
    assert sizes["triton"] <= 2 * n * 32  # a slab, or partial sums of it


# ---- the choice


def test_the_choice_is_visible_and_never_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    student, head, inputs = case(3, 4, 13, dtype=torch.float32)
    with pytest.raises(InputError, match="need a CUDA GPU"):
        row_values("ce", student, head, **inputs, kernel="triton")
    cpu = torch.device("cpu")
    assert fused.why_eager("eager", [head], cpu) == "objective.kernel says so"
    assert "CUDA GPU" in str(fused.why_eager("auto", [head], cpu))

    def forbidden(*_: Any) -> None:
        raise AssertionError("the kernels were used")

    monkeypatch.setattr(rows, "fused", forbidden)
    row_values("ce", student, head, **inputs)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    row_values("ce", student, head, **inputs)  # nor does the interpreter make them the faster way


def test_what_has_no_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    cpu, head = torch.device("cpu"), Readout(torch.randn(8, 4))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="triton is not installed"):
        fused.why_eager("triton", [head], cpu)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert fused.why_eager("triton", [head], cpu) is None
    with pytest.raises(InputError, match="float64 has no kernel"):
        fused.why_eager("triton", [head, Readout(torch.randn(8, 4).double())], cpu)
    with pytest.raises(InputError, match="one piece"):
        fused.why_eager("triton", [Readout(torch.randn(4, 8).t())], cpu)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_sizes_on_a_gpu(kind: Kind, dtype: torch.dtype) -> None:
    """300 rows x 49,155 tokens x 576: no power of two, and not a multiple of a tile."""
    generator = torch.Generator("cuda").manual_seed(0)
    student, teacher = (torch.randn(300, 576, device="cuda", generator=generator) for _ in range(2))
    teacher = student + 0.7 * teacher  # as a trained drafter's: some overlap
    head = Readout((torch.randn(49155, 576, device="cuda", generator=generator) * 0.08).to(dtype))
    labels = torch.randint(0, 49155, (300,), device="cuda", generator=generator)
    student = student.to(dtype).requires_grad_()
    given = {"teacher": teacher.to(dtype), "labels": labels}
    found = row_values(kind, student, head, **given, kernel="triton")
    (gradient,) = torch.autograd.grad(found.sum(), student)
    if dtype == torch.float32:
        head, twin = replace(head, weight=head.weight.double()), student.detach().double().requires_grad_()
        given["teacher"] = given["teacher"].double()
    else:  # the law is that of rounded logits, and q < p flips where two of them are nearly equal
        twin = student.detach().requires_grad_()
    reference = row_values(kind, twin, head, **given, kernel="eager")
    (wanted,) = torch.autograd.grad(reference.sum(), twin)
    near, far = (1e-4, 1e-2) if dtype == torch.float32 else (5e-3, 2e-2)
    torch.testing.assert_close(found.double(), reference.double(), rtol=near, atol=near)
    limit = far if kind in ("overlap", "nla") or dtype == torch.bfloat16 else near
    assert (gradient.double() - wanted.double()).norm() < limit * wanted.double().norm()
