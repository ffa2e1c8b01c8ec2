"""The gated delta rule in chunks is the recurrence token by token, and goes on from any token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.target.delta_rule import Tokens, check_spacing, pass_over, replay

pytestmark = pytest.mark.hybrid


def tokens_of(n: int, t: int, heads: int = 2, wide: int = 3, tall: int = 4, seed: int = 0) -> Tokens:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(n, t, heads, *shape, generator=draw, dtype=torch.float64)

    k = torch.nn.functional.normalize(normal(wide), dim=-1)
    return Tokens(normal(wide), k, normal(tall), -normal().abs(), normal().sigmoid())


def one_by_one(tokens: Tokens, state: torch.Tensor):
    """The definition: outputs, and the states after 0, 1, ..., t tokens."""
    out, states = [], [state]
    for i in range(tokens.g.shape[1]):
        decayed = states[-1] * tokens.g[:, i].exp()[..., None, None]
        read = (decayed * tokens.k[:, i].unsqueeze(-1)).sum(-2)
        wrote = tokens.beta[:, i].unsqueeze(-1) * (tokens.v[:, i] - read)
        states.append(decayed + tokens.k[:, i].unsqueeze(-1) * wrote.unsqueeze(-2))
        out.append((states[-1] * tokens.q[:, i].unsqueeze(-1)).sum(-2))
    return torch.stack(out, 1) if out else tokens.v, torch.stack(states, 1)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(0, 150), st.sampled_from([1, 2, 5, 16, 63, 64, 128]), st.integers(0, 99))
def test_chunks_equal_the_definition_and_replay_reaches_every_token(n, t, spacing, seed):
    tokens = tokens_of(n, t, seed=seed)
    state = torch.randn(n, 2, 3, 4, dtype=torch.float64)
    want, states = one_by_one(tokens, state)
    got = pass_over(tokens, state, spacing)
    assert torch.allclose(got.out, want, atol=1e-10)
    assert torch.allclose(got.snapshots, states[:, : max(1, t) : spacing], atol=1e-10)
    for after in {0, 1, spacing - 1, spacing, spacing + 1, t - 1, t} & set(range(t + 1)):
        number = min(after // spacing, got.snapshots.shape[1] - 1)
        span = slice(number * spacing, number * spacing + spacing)
        length = torch.full((n,), after - number * spacing)
        reached = replay(got.snapshots[:, number], tokens.k[:, span], tokens.g[:, span], got.u[:, span], length)
        assert torch.allclose(reached, states[:, after], atol=1e-10)


def test_long_texts_are_run_in_stretches(monkeypatch):
    tokens, state = tokens_of(2, 70), torch.zeros(2, 2, 3, 4, dtype=torch.float64)
    whole = pass_over(tokens, state, 8)
    monkeypatch.setattr("draftloop.target.delta_rule._AT_ONCE", 32)
    parts = pass_over(tokens, state, 8)
    for one, two in ((whole.out, parts.out), (whole.u, parts.u), (whole.snapshots, parts.snapshots)):
        assert torch.allclose(one, two, atol=1e-12)


def test_a_token_that_writes_and_forgets_nothing_changes_nothing():
    tokens, state = tokens_of(1, 9), torch.randn(1, 2, 3, 4, dtype=torch.float64)
    idle = Tokens(tokens.q, tokens.k, tokens.v, tokens.g * 0, tokens.beta * 0)
    got = pass_over(idle, state, 4)
    assert torch.equal(got.snapshots, state.unsqueeze(1).expand_as(got.snapshots))


def test_strong_decay_overflows_nothing():
    tokens = tokens_of(1, 64)
    fast = Tokens(tokens.q, tokens.k, tokens.v, tokens.g - 200, tokens.beta)
    state = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    got = pass_over(fast, state, 64)
    assert torch.allclose(got.out, one_by_one(fast, state)[0], atol=1e-10)
    assert bool(torch.isfinite(replay(state, tokens.k, fast.g, got.u, torch.tensor([40]))).all())


@pytest.mark.parametrize("spacing", [0, -1, 65, 100])
def test_a_spacing_that_no_chunk_divides_is_refused(spacing):
    with pytest.raises(ValueError, match="multiple of 64"):
        check_spacing(spacing)
