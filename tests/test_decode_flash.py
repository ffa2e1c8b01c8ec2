"""The attention kernel `flash` against plain attention, and the engine that decodes with it.

Without a GPU the kernel runs in Triton's interpreter (conftest.py asks for it; skipped where Triton is missing).
"""

from __future__ import annotations

import importlib.util
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftloop.core.errors import InputError
from draftloop.core.law import Sampling
from draftloop.decode import graph
from draftloop.decode.graph import GraphEngine
from draftloop.decode.loop import decode
from draftloop.decode.trace import Generation, Options
from draftloop.target import flash as room
from draftloop.target.flash import bounds, check_pieces, flash, why_not_flash
from draftloop.target.load import load_target
from tests.stand_ins import EOS, requests_of, with_eos
from tests.test_decode_graph import Counting, Watching, agree
from tests.tiny import tiny_drafter, tiny_model, tiny_target

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def seen_by(positions: Tensor, span: int, window: int | None) -> Tensor:
    """Bool [rows, 1, t, span]."""
    place = torch.arange(span, device=positions.device)
    seen = place <= positions.unsqueeze(-1)
    if window is not None:
        seen &= place > positions.unsqueeze(-1) - window
    return seen.unsqueeze(1)


def case(rows, t, shared, group, width, span, dtype=torch.float32, seed=0):
    made = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, t, shared * group, width, generator=made).transpose(1, 2)  # as a projection leaves it
    key, value = (torch.randn(rows, shared, span, width, generator=made) for _ in range(2))
    start = torch.randint(0, span - t + 1, (rows, 1), generator=made)
    positions = (start + torch.arange(t)).to(DEVICE)
    return *(one.to(DEVICE, dtype) for one in (query, key, value)), positions


def plainly(query, key, value, mask, scale) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = (one.double().repeat_interleave(group, 1) for one in (key, value))
    return F.scaled_dot_product_attention(query.double(), key, value, attn_mask=mask, scale=scale).transpose(1, 2)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 3),
    t=st.sampled_from([1, 3, 8]),
    shared=st.integers(1, 2),
    group=st.sampled_from([1, 3, 9]),
    width=st.sampled_from([12, 16, 20]),
    span=st.integers(8, 300),
    window=st.sampled_from([None, 1, 5, 150]),
    seed=st.integers(0, 9),
)
def test_it_attends_as_plain_attention_does(rows, t, shared, group, width, span, window, seed):
    """Fails if the last slot or the first of a window is missed, a row reads another's limit, or a tile ends too soon."""
    query, key, value, positions = case(rows, t, shared, group, width, span, seed=seed)
    mask = seen_by(positions, span, window)
    found = flash(query, key, value, bounds(mask), 0.3)
    assert found.shape == (rows, t, shared * group, width)
    assert found.is_contiguous()
    assert float((found - plainly(query, key, value, mask, 0.3)).abs().max()) < 1e-5


# the interpreter multiplies no bfloat16
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16] if GPU else [torch.float16])
def test_halves_are_multiplied_as_they_are_and_summed_in_float32(dtype):
    query, key, value, positions = case(2, 8, 3, 3, 64, 400, dtype)
    mask = seen_by(positions, 400, None)
    found = flash(query, key, value, bounds(mask), 0.125)
    assert found.dtype == dtype
    assert float((found - plainly(query, key, value, mask, 0.125)).abs().max()) < 2e-2


def test_what_lies_beyond_the_limit_is_never_read():
    """Not even to be weighed with nothing: what another text left there may be no number."""
    query, key, value, _ = case(2, 4, 2, 3, 16, 600)
    positions = (torch.tensor([[300], [500]]) + torch.arange(4)).to(DEVICE)
    mask = seen_by(positions, 600, 40)
    want = flash(query, key, value, bounds(mask), 0.3)
    for row, last in ((0, 304), (1, 504)):
        for held in (key, value):
            held[row, :, last:] = float("nan")
            held[row, :, :100] = float("nan")
    assert torch.equal(flash(query, key, value, bounds(mask), 0.3), want)


def test_queries_of_any_strides():
    query, key, value, positions = case(2, 8, 2, 3, 16, 40)
    limits = bounds(seen_by(positions, 40, None))
    want = flash(query, key, value, limits, 0.3)
    assert torch.equal(flash(query.contiguous(), key, value, limits, 0.3), want)
    assert torch.equal(flash(query.mT.contiguous().mT, key, value, limits, 0.3), want)
    assert torch.equal(flash(query, key, value.mT.contiguous().mT, limits, 0.3), want)


@pytest.mark.parametrize("wrong", [(0, -1), (0, 1), (1, 0), (-1, 0)])
def test_a_limit_that_is_off_by_one_is_caught(wrong):
    """What the comparison above would miss, it does not miss these."""
    query, key, value, positions = case(2, 3, 2, 3, 16, 200, seed=3)
    positions = positions.clamp(20, 190)
    mask = seen_by(positions, 200, 15)
    found = flash(query, key, value, bounds(mask) + torch.tensor(wrong, dtype=torch.int32, device=DEVICE), 0.3)
    assert float((found - plainly(query, key, value, mask, 0.3)).abs().max()) > 1e-3


def test_bounds_of_masks_and_masks_without():
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]]).bool().view(1, 1, 4, 4)
    assert bounds(mask).view(4, 2).tolist() == [[0, 2], [1, 3], [0, 0], [3, 4]]
    check_pieces(mask)
    with pytest.raises(InputError, match=r"holes.*matmul"):
        check_pieces(torch.tensor([True, False, True]).view(1, 1, 1, 3))


def test_the_operator_keeps_its_contract():
    query, key, value, positions = case(2, 3, 2, 2, 16, 20)
    torch.library.opcheck(flash, (query, key, value, bounds(seen_by(positions, 20, None)), 0.25))


# in the engine --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "changes", "compiles"),
    [
        ("mistral", {"sliding_window": 5}, True),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, False),
    ],
)
def test_the_engine_decodes_what_the_eager_loop_decodes(kind, changes, compiles):
    """Fails if a row walks over too few slots, a window is lost, or layers of two kinds share their limits."""
    target = with_eos(load_target(tiny_model(kind, layers=2, **changes).to(DEVICE)), *EOS)
    asked = requests_of([1, 9, 30], target.vocab_size, seed=6)
    options = Options(max_new_tokens=4, sampling=Sampling(1.0), rule="ratio", batch_size=2)
    compiler = partial(torch.compile, dynamic=False, backend=Counting()) if compiles else None
    for drafter in (None, tiny_drafter(target, block=8, target_layers=(0, 1))):
        engine = GraphEngine(target, drafter, options, rows=2, longest=40, kernel="flash", compiler=compiler)
        made = [Generation(request.ids) for request in asked]
        list(engine.decode(asked, made))
        agree(decode(target, drafter, asked, options), made)


def test_a_mask_with_a_hole_far_from_the_beginning_is_refused(monkeypatch):
    """A window that also shows the first token: one piece until the window has left it. Fails if only the start is asked."""
    target = tiny_target("mistral", sliding_window=20)
    monkeypatch.setattr(type(target.family), "text_masks", lambda self, seen, positions: with_first(seen, positions))

    def with_first(seen: Tensor, positions: Tensor) -> Tensor:
        return seen & (seen_by(positions, seen.shape[-1], 20) | (torch.arange(seen.shape[-1], device=seen.device) < 1))

    with pytest.raises(InputError, match=r"holes.*matmul"):
        GraphEngine(target, None, Options(8), rows=1, longest=60, kernel="flash")
    GraphEngine(target, None, Options(8), rows=1, longest=19, kernel="flash")


@pytest.mark.skipif(GPU, reason="a graph is captured there, which is proof enough")
def test_a_round_asks_the_device_for_nothing():
    target = with_eos(tiny_target(layers=1), *EOS)
    # what the interpreter reads is not the round's doing
    engine = GraphEngine(target, None, Options(8), rows=2, longest=20, kernel="flash")
    engine.rows.at.zero_()
    positions = torch.zeros(2, 1, dtype=torch.int64)
    with Watching() as watching:
        engine.rows.cache.fit(engine.rows.cache.aim(positions))
    assert watching.seen == []


def test_float64_is_refused_and_the_reasons_are_clauses(monkeypatch):
    double = load_target(tiny_model().double())
    with pytest.raises(InputError, match=r"flash has no form for float64.*matmul"):
        GraphEngine(double, None, Options(8), rows=1, longest=20, kernel="flash")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "needs a CUDA GPU" in why_not_flash(torch.device("cpu"), torch.float32)
    monkeypatch.setattr(room.importlib.util, "find_spec", lambda name: None)
    assert "not installed" in why_not_flash(torch.device("cpu"), torch.float32)


def test_which_kernel_if_nobody_says(monkeypatch):
    """Flash where layers are compiled, but not for few long texts, nor where it cannot run."""

    class There:
        device, dtype = torch.device("cuda"), torch.bfloat16

    monkeypatch.setattr(graph, "why_not_flash", lambda device, dtype: "")
    assert graph._kernel(There, 1, 500, True) == "flash"
    assert graph._kernel(There, 1, 5000, True) == "matmul"
    assert graph._kernel(There, 64, 5000, True) == "flash"
    assert graph._kernel(There, 1, 500, False) == "sdpa"
    assert graph._kernel(There, 1024, 500, False) == "matmul"
    monkeypatch.setattr(graph, "why_not_flash", lambda device, dtype: "the package triton is not installed")
    assert graph._kernel(There, 1, 500, True) == "matmul"
