"""Keyed randomness: uniform, independent, the same whatever the batch, and for ever the same."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.core.draws import Purpose, bits, key_of, permutation, uniforms, uniforms_after

COUNT = 1 << 14
PLACES = torch.arange(COUNT)
WORD = (1 << 64) - 1


def too_far(counts: torch.Tensor, expected: torch.Tensor | float, tail: float = 1e-5) -> bool:
    """Whether counts are further from what is expected than chance allows (chi-square, Wilson-Hilferty)."""
    expected = torch.as_tensor(expected, dtype=torch.float64).expand(counts.shape)
    assert bool((expected > 5).all()), "cells too thin for chi-square"
    degrees = counts.numel() - 1
    statistic = float(((counts.double() - expected) ** 2 / expected).sum())
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2)) < tail


def kolmogorov(u: torch.Tensor) -> float:
    """The largest gap between the empirical distribution and the uniform one, times sqrt(n)."""
    n, ordered = u.numel(), u.sort().values
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return float(torch.maximum((ordered - steps[:-1]).abs().max(), (ordered - steps[1:]).abs().max())) * math.sqrt(n)


def grid(u: torch.Tensor, v: torch.Tensor, cells: int = 16) -> torch.Tensor:
    return torch.bincount((u * cells).long() * cells + (v * cells).long(), minlength=cells * cells)


def dependent(u: torch.Tensor, v: torch.Tensor) -> bool:
    return too_far(grid(u, v), u.numel() / 256)


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("where", ["first key", "last key", "seed-like", "huge"])
def test_uniform(purpose, where):
    keys = {
        "first key": (PLACES, 5, 6),
        "last key": (5, 6, PLACES),
        "seed-like": (PLACES * 0x9E3779B9,),
        "huge": (PLACES - (1 << 62), 1 << 62),
    }[where]
    u = uniforms(3, purpose, *keys)
    assert u.dtype == torch.float64
    assert u.min() > 0
    assert u.max() < 1
    assert kolmogorov(u) < 2.2  # one in ten thousand
    assert not too_far(torch.bincount((u * 256).long(), minlength=256), COUNT / 256)
    low = (bits(3, purpose, *keys) & 255).long()
    assert not too_far(torch.bincount(low, minlength=256), COUNT / 256), "low bits"


def test_the_tests_of_uniformity_can_fail():
    u = uniforms(3, Purpose.TARGET, PLACES)
    assert kolmogorov(u**1.08) > 2.2
    assert too_far(torch.bincount((u**1.15 * 256).long(), minlength=256), COUNT / 256)
    assert dependent(u, (u + 0.02 * u.roll(1)).clamp(max=0.999))


def test_independent_across_purposes_keys_and_seeds():
    base = uniforms(3, Purpose.TARGET, 1, 0, PLACES)
    for one, two in combinations(Purpose, 2):
        assert not dependent(uniforms(3, one, 1, 0, PLACES), uniforms(3, two, 1, 0, PLACES)), (one, two)
    others = {
        "next position": base.roll(1),
        "next seed": uniforms(4, Purpose.TARGET, 1, 0, PLACES),
        "next prompt": uniforms(3, Purpose.TARGET, 2, 0, PLACES),
        "next sample": uniforms(3, Purpose.TARGET, 1, 1, PLACES),
        "keys swapped": uniforms(3, Purpose.TARGET, 0, 1, PLACES),
        "one key more": uniforms(3, Purpose.TARGET, 1, 0, PLACES, 0),
        "position of another rank": uniforms(3, Purpose.TARGET, PLACES, 0, 1),
        "far bits of a key": uniforms(3, Purpose.TARGET, 1 + (1 << 60), 0, PLACES),
        "anchor and position traded": uniforms(3, Purpose.TARGET, 1, PLACES, PLACES.flip(0)),
    }
    for name, other in others.items():
        assert not dependent(base, other), name
        assert abs(float(torch.corrcoef(torch.stack([base, other]))[0, 1])) < 5 / math.sqrt(COUNT), name


def test_draws_can_be_begun_ahead():
    first, anchor, position = torch.arange(4), torch.arange(4) + 7, torch.arange(12).view(3, 4)
    begun = bits(5, Purpose.DRAFT, first, 2)
    assert torch.equal(uniforms_after(begun, anchor, position), uniforms(5, Purpose.DRAFT, first, 2, anchor, position))
    assert torch.equal(uniforms_after(begun, 0, position), uniforms(5, Purpose.DRAFT, first, 2, 0, position))


def test_no_two_keys_share_their_bits():
    a, b, c = torch.meshgrid(torch.arange(32), torch.arange(32), torch.arange(16), indexing="ij")
    drawn = torch.cat([bits(0, purpose, a, b, c).flatten() for purpose in Purpose])
    assert drawn.unique().numel() == drawn.numel()


INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 70), st.sampled_from(list(Purpose)), st.lists(INT64, max_size=5))
def test_bits_are_the_hash_that_we_say(seed, purpose, keys):
    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    state = mix((seed * golden + purpose) & WORD)
    for key in keys:
        state = mix((state * golden + mix((key + golden) & WORD)) & WORD)
    got = int(bits(seed, purpose, *keys))
    assert got & WORD == state
    assert float(uniforms(seed, purpose, *keys)) == ((state >> 12) + 0.5) / 2**52


@settings(max_examples=60, deadline=None)
@given(INT64, INT64, st.integers(0, 99))
def test_python_ints_and_tensors_agree_in_every_shape(one, two, seed):
    want = uniforms(seed, Purpose.DRAFT, one, two)
    assert want.shape == ()
    t = torch.tensor
    assert uniforms(seed, Purpose.DRAFT, t(one), t(two)) == want
    assert uniforms(seed, Purpose.DRAFT, t([one]), two).tolist() == [want]
    assert uniforms(seed, Purpose.DRAFT, one, t([[7, two]]))[0, 1] == want
    assert uniforms(seed, Purpose.DRAFT, t([[one], [0]]), t([0, two, 1])).shape == (2, 3)
    assert uniforms(seed, Purpose.DRAFT, t([[one], [0]]), t([0, two, 1]))[0, 1] == want


def test_a_row_does_not_depend_on_its_batch():
    prompts, anchors = torch.tensor([key_of(f"p{i}") for i in range(40)]), torch.arange(40)
    whole = uniforms(1, Purpose.ACCEPT, prompts[:, None], 0, anchors[:, None], torch.arange(7))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    for part in (order[:13], order[13:14], order[14:]):
        assert torch.equal(
            whole[part], uniforms(1, Purpose.ACCEPT, prompts[part, None], 0, anchors[part, None], torch.arange(7))
        )


def test_extremes_of_the_hash_stay_inside_the_open_interval(monkeypatch):
    for word in (0, -1, 1, (1 << 63) - 1, -(1 << 63)):
        monkeypatch.setattr("draftloop.core.draws.bits", lambda *_, word=word: torch.tensor(word))
        assert 0.0 < float(uniforms(0, Purpose.TARGET)) < 1.0, word


def test_no_global_stream_is_touched():
    before = torch.random.get_rng_state()
    uniforms(0, Purpose.TARGET, PLACES)
    permutation(0, Purpose.ORDER, 10)
    assert torch.equal(before, torch.random.get_rng_state())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 300), st.integers(0, 9), INT64)
def test_permutation_is_one(size, seed, key):
    order = permutation(seed, Purpose.ORDER, size, key)
    assert order.dtype == torch.int64
    assert sorted(order.tolist()) == list(range(size))
    assert torch.equal(order, torch.argsort(bits(seed, Purpose.ORDER, key, torch.arange(size)), stable=True))


def test_permutations_are_uniform_and_differ():
    seen = torch.zeros(6)
    for key in range(1200):
        a, b, c = permutation(0, Purpose.ORDER, 3, key).tolist()
        seen[{(0, 1, 2): 0, (0, 2, 1): 1, (1, 0, 2): 2, (1, 2, 0): 3, (2, 0, 1): 4, (2, 1, 0): 5}[a, b, c]] += 1
    assert not too_far(seen, 200)
    assert permutation(0, Purpose.ORDER, 50, 1).tolist() != permutation(0, Purpose.ORDER, 50, 2).tolist()
    assert permutation(0, Purpose.ORDER, 50, 1).tolist() != permutation(1, Purpose.ORDER, 50, 1).tolist()
    assert permutation(0, Purpose.ORDER, 50, 1).tolist() != permutation(0, Purpose.ANCHOR, 50, 1).tolist()


def test_key_of_takes_any_string():
    names = ["", "a", "b", "gsm8k/0", "é", "東京", "a" * 10000]
    keys = [key_of(name) for name in names]
    assert len(set(keys)) == len(names)
    assert all(0 <= key < 1 << 63 for key in keys)


def test_golden_values():
    """Runs that people made must stay repeatable: whoever changes these changes every result."""
    assert int(bits(0, Purpose.TARGET)) == 6238072747940578789
    assert int(bits(7, Purpose.TARGET, 1, 2, 3)) == 4380782715339232338
    assert bits(7, Purpose.DRAFT, torch.arange(3), -5).tolist() == [
        -6451051647423399332,
        944324592781020166,
        -5524647517051844986,
    ]
    assert int(bits(-1, Purpose.INIT, 2**63)) == 4693178975122752386
    assert uniforms(0, Purpose.ACCEPT, torch.arange(3)).tolist() == [
        0.941037781265038,
        0.9089636401646098,
        0.1951724069459616,
    ]
    assert permutation(3, Purpose.ORDER, 8, 1).tolist() == [4, 0, 3, 7, 1, 5, 6, 2]
    assert key_of("p/0") == 6065242287654369329
    assert key_of("é") == 1697006002183834981
    assert {p.name: p.value for p in Purpose} == {
        "TARGET": 1,
        "DRAFT": 2,
        "ACCEPT": 3,
        "RESIDUAL": 4,
        "ANCHOR": 5,
        "ORDER": 6,
        "INIT": 7,
        "BRANCH": 8,
    }
