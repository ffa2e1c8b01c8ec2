"""The learning rate's course and the optimiser: against plain formulas, plain AdamW, and everything not finite."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from draftloop.core.errors import DraftloopError, InputError
from draftloop.recipe import OptimiserPart
from draftloop.train.optimiser import DrafterOptimiser, NotFinite
from draftloop.train.schedule import learning_rate_factor

# ------------------------------------------------------------------------------------------------------------ schedule


def course(steps: int, **part) -> list[float]:
    section = OptimiserPart(**part)
    return [learning_rate_factor(section, step, steps) for step in range(steps)]


def test_cosine_by_hand():
    factors = course(10, schedule="cosine", warmup=0.2, final=0.1)
    assert factors[:2] == pytest.approx([1 / 3, 2 / 3])
    assert factors[2] == 1.0
    assert factors[6] == pytest.approx(0.55)  # half way down: the mean of 1 and 0.1
    assert factors[9] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 7 / 8)) / 2)


def test_wsd_by_hand():
    factors = course(10, schedule="wsd", warmup=0.1, decay_share=0.4, final=0.2)
    assert factors == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4])


def test_constant_by_hand():
    assert course(5, schedule="constant", warmup=0.4, final=0.0) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_a_single_step_is_a_full_one(schedule):
    assert course(1, schedule=schedule, final=0.5) == [1.0]


def test_a_fall_longer_than_what_the_warm_up_leaves():
    factors = course(4, schedule="wsd", warmup=0.5, decay_share=1.0)
    assert factors == pytest.approx([1 / 3, 2 / 3, 1.0, 0.5])


@given(
    schedule=st.sampled_from(["cosine", "wsd", "constant"]),
    steps=st.integers(1, 60),
    warmup=st.floats(0, 1, exclude_max=True),
    decay_share=st.floats(0, 1),
    final=st.floats(0, 1),
)
def test_it_rises_then_never_rises_again_and_never_wastes_a_step(schedule, steps, warmup, decay_share, final):
    factors = course(steps, schedule=schedule, warmup=warmup, decay_share=decay_share, final=final)
    warm = round(warmup * steps)
    assert all(0 < factor <= 1 for factor in factors)
    assert all(a < b for a, b in pairwise(factors[:warm]))
    after = factors[warm:]
    assert not after or after[0] == 1.0
    assert all(a >= b - 1e-12 for a, b in pairwise(after))
    assert all(factor >= final - 1e-12 for factor in after)


@pytest.mark.parametrize("step", [-1, 3])
def test_a_step_outside_the_stage_is_refused(step):
    with pytest.raises(ValueError, match="outside"):
        learning_rate_factor(OptimiserPart(), step, 3)


# ----------------------------------------------------------------------------------------------------------- optimiser


class Toy(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(5, 4, generator=generator).to(dtype))
        self.bias = nn.Parameter(torch.randn(5, generator=generator).to(dtype))
        self.frozen = nn.Parameter(torch.randn(5, generator=generator).to(dtype), requires_grad=False)
        self.idle = nn.Parameter(torch.randn(3, generator=generator).to(dtype))

    def loss(self, step: int) -> torch.Tensor:
        x = torch.randn(7, 4, generator=torch.Generator().manual_seed(step)).to(self.weight.dtype)
        return ((x @ self.weight.T + self.bias + self.frozen).tanh() ** 2).mean()


PART = OptimiserPart(lr=0.05, weight_decay=0.3, clip=0.1)


def train(toy: Toy, optimiser: DrafterOptimiser, steps: range) -> list[float]:
    norms = []
    for step in steps:
        loss = toy.loss(step)
        loss.backward()
        norms.append(optimiser.step(loss, learning_rate_factor(PART, step, 20), step))
    return norms


def weights(toy: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in toy.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def test_equals_plain_adamw_with_clipping_and_no_decay_of_vectors():
    ours, plain = Toy(), Toy()
    optimiser = DrafterOptimiser(ours.named_parameters(), PART)
    reference = torch.optim.AdamW(
        [{"params": [plain.weight]}, {"params": [plain.bias, plain.idle], "weight_decay": 0.0}],
        lr=PART.lr,
        betas=(0.9, 0.95),
        weight_decay=0.3,
    )
    for step in range(6):
        loss = ours.loss(step)
        loss.backward()
        norm = optimiser.step(loss, 0.5, step)
        assert all(parameter.grad is None for parameter in ours.parameters())
        reference.zero_grad()
        plain.loss(step).backward()
        expected = nn.utils.clip_grad_norm_([plain.weight, plain.bias], 0.1)
        assert norm == pytest.approx(float(expected))
        assert norm > 0.1  # that is before clipping, which does bite
        for group in reference.param_groups:
            group["lr"] = 0.5 * PART.lr
        reference.step()
    assert same(weights(ours), weights(plain))
    assert torch.equal(ours.frozen, Toy().frozen)
    assert not torch.equal(ours.weight, Toy().weight)


def test_weight_decay_reaches_matrices_alone():
    toy = Toy()
    optimiser = DrafterOptimiser(toy.named_parameters(), OptimiserPart(lr=0.1, weight_decay=0.5))
    for parameter in (toy.weight, toy.bias):
        parameter.grad = torch.zeros_like(parameter)
    assert optimiser.step(0.0, 1.0, 0) == 0.0
    torch.testing.assert_close(toy.weight, Toy().weight * 0.95)
    assert torch.equal(toy.bias, Toy().bias)


def test_gradients_of_several_backwards_add_up():
    one, two = Toy(), Toy()
    first, second = (DrafterOptimiser(toy.named_parameters(), PART) for toy in (one, two))
    (one.loss(1) + one.loss(2)).backward()
    two.loss(1).backward()
    two.loss(2).backward()
    assert first.step(1.0, 1.0, 0) == pytest.approx(second.step(1.0, 1.0, 0))


def test_half_precision_has_masters_that_do_not_lose_small_updates():
    part = OptimiserPart(lr=1e-5, weight_decay=0.0)
    toy = Toy(torch.bfloat16)
    start = weights(toy)
    optimiser = DrafterOptimiser(toy.named_parameters(), part)
    for step in range(3):
        toy.loss(0).backward()
        optimiser.step(0.0, 1.0, step)
    masters = {name: value for name, value in optimiser.tensors().items() if name.startswith("master/")}
    assert masters.keys() == {"master/weight", "master/bias", "master/idle"}
    assert masters["master/weight"].dtype == torch.float32
    moved = (masters["master/weight"] - start["weight"].float()).abs()
    assert float(moved.max()) == pytest.approx(3e-5, rel=0.05)  # far below bfloat16's resolution of these weights
    assert torch.equal(toy.weight, masters["master/weight"].bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_equals_never_stopped_bit_for_bit(dtype):
    through = Toy(dtype)
    whole = DrafterOptimiser(through.named_parameters(), PART)
    norms = train(through, whole, range(9))

    stopped = Toy(dtype)
    optimiser = DrafterOptimiser(stopped.named_parameters(), PART)
    first = train(stopped, optimiser, range(4))
    kept_weights, kept = weights(stopped), copy.deepcopy(optimiser.tensors())
    train(stopped, optimiser, range(4, 6))  # what the kill undid

    again = Toy(dtype)
    again.load_state_dict(kept_weights, strict=False)
    resumed = DrafterOptimiser(again.named_parameters(), PART)
    resumed.load(kept)
    assert same(resumed.tensors(), kept)
    assert first + train(again, resumed, range(4, 9)) == norms
    assert same(weights(again), weights(through))
    assert same(resumed.tensors(), whole.tensors())
    assert same(kept, copy.deepcopy(kept))


def test_loading_copies_and_forgetting_the_moments_would_show():
    toy = Toy()
    optimiser = DrafterOptimiser(toy.named_parameters(), PART)
    train(toy, optimiser, range(3))
    kept = copy.deepcopy(optimiser.tensors())
    assert kept.keys() == {f"{key}/{name}" for key in ("step", "exp_avg", "exp_avg_sq") for name in ("weight", "bias")}
    given_ = copy.deepcopy(kept)
    optimiser.load(given_)
    train(toy, optimiser, range(3, 5))
    assert same(given_, kept)  # the optimiser works on copies
    forgetful = Toy()
    fresh = DrafterOptimiser(forgetful.named_parameters(), PART)
    fresh.load({})
    train(forgetful, fresh, range(3, 5))
    assert not same(fresh.tensors(), optimiser.tensors())


def _without_one(state):
    del state["exp_avg/weight"]


def _of_another_shape(state):
    state["exp_avg_sq/weight"] = torch.zeros(2, 2)


def _of_another_name(state):
    state["exp_avg/other"] = torch.zeros(2)


def _with_a_master_too_many(state):
    state["master/weight"] = torch.zeros(5, 4)


@pytest.mark.parametrize("spoil", [_without_one, _of_another_shape, _of_another_name, _with_a_master_too_many])
def test_the_state_of_another_drafter_is_refused_untouched(spoil):
    toy = Toy()
    optimiser = DrafterOptimiser(toy.named_parameters(), PART)
    train(toy, optimiser, range(2))
    before = copy.deepcopy(optimiser.tensors())
    state = copy.deepcopy(before)
    spoil(state)
    with pytest.raises(InputError, match="another drafter"):
        optimiser.load(state)
    assert same(optimiser.tensors(), before)


def test_half_precision_needs_its_masters_back():
    toy = Toy(torch.bfloat16)
    optimiser = DrafterOptimiser(toy.named_parameters(), PART)
    with pytest.raises(InputError, match="master"):
        optimiser.load({})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["loss", "gradient"])
def test_nothing_not_finite_reaches_the_weights(bad, which):
    toy = Toy()
    optimiser = DrafterOptimiser(toy.named_parameters(), PART)
    train(toy, optimiser, range(2))
    before, moments = weights(toy), copy.deepcopy(optimiser.tensors())
    loss = toy.loss(2)
    loss.backward()
    if which == "loss":
        loss = loss * bad
    else:
        toy.bias.grad[3] = bad
    with pytest.raises(NotFinite) as caught:
        optimiser.step(loss, 1.0, 37)
    message = str(caught.value)
    assert isinstance(caught.value, DraftloopError)
    assert caught.value.exit_code == 2
    assert message.startswith("step 37: ")
    assert "learning rate" in message
    assert ("the loss is" if which == "loss" else "first in 'bias'") in message
    assert same(weights(toy), before)
    assert same(optimiser.tensors(), moments)
    assert all(parameter.grad is None for parameter in toy.parameters())
    train(toy, optimiser, range(2, 3))  # and it can go on


def test_early_trouble_is_blamed_on_the_precision():
    toy = Toy()
    toy.loss(0).backward()
    with pytest.raises(NotFinite, match="precision: float32"):
        DrafterOptimiser(toy.named_parameters(), PART).step(math.nan, 1.0, 0)


def test_a_norm_that_overflows_is_caught_though_every_gradient_is_finite():
    toy = Toy()
    before = weights(toy)
    optimiser = DrafterOptimiser(toy.named_parameters(), PART)
    toy.weight.grad = torch.full_like(toy.weight, 3e38)
    with pytest.raises(NotFinite, match="gradient norm is inf"):
        optimiser.step(1.0, 1.0, 50)
    assert same(weights(toy), before)
