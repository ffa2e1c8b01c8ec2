"""What tests of drafters share that hold packed forwards against each anchor alone: random texts, plans and the gap."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from draftloop.target.load import load_target
from tests.tiny import VOCAB, tiny_model, tiny_target

CLOSE, EXACT = 1e-5, 1e-10  # of the largest value, in float32 and in float64


@pytest.fixture(scope="module")
def owner():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def exact():
    """Random plans run in float64, where a wrong edge stands out from rounding by many orders."""
    return load_target(tiny_model("llama").double())


def gap(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, of the largest value."""
    assert got.shape == want.shape
    return float((got - want).detach().abs().max() / want.detach().abs().max())


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def texts(drafter, lengths, seed: int):
    """Features [b, S, F * H] of ragged texts (random behind their ends) and tokens [b, S + 1]."""
    width = len(drafter.spec.target_layers) * drafter.spec.hidden_size
    features = rand(len(lengths), max(lengths), width, seed=seed).to(drafter.fc.weight.dtype)
    tokens = torch.randint(0, VOCAB, (len(lengths), max(lengths) + 1), generator=torch.Generator().manual_seed(seed))
    return features, tokens


@st.composite
def anchors(draw, least: int = 0):
    """Text lengths and, for each row, the same number of anchors, each from `least` to the text's length."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    count = draw(st.integers(1, 5))
    return lengths, [draw(st.lists(st.integers(least, n), min_size=count, max_size=count)) for n in lengths]
