"""Laws: what is drawn, how often, and with what log-probability, against definitions that are slow and plain."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from draftloop.core.draws import Purpose, uniforms
from draftloop.core.errors import InputError
from draftloop.core.law import Law, Readout, Sampling, inverse_cdf
from tests.test_core_draws import too_far

INF = float("inf")
LEAST, MOST = 2.0**-53, 1 - 2.0**-53  # the ends of what `uniforms` gives


def slow_probabilities(logits: list[float], sampling: Sampling, property_test: bool = False) -> list[float]:
    """Temperature, top-k (ties kept), top-p (lower ids first), renormalised: by hand, in Python floats."""
    n = len(logits)
    order = sorted(range(n), key=lambda v: (-logits[v], v))
    if sampling.greedy:
        return [float(v == order[0]) for v in range(n)]
    weights = [math.exp((z - max(logits)) / sampling.temperature) for z in logits]
    if 0 < sampling.top_k < n:
        line = logits[order[sampling.top_k - 1]]
        weights = [w if z >= line else 0.0 for w, z in zip(weights, logits, strict=True)]
    mass, stay, total = 0.0, set(), math.fsum(weights)
    for v in order:
        if property_test:
            assume(abs(mass - sampling.top_p) > 1e-5 or mass == 0.0)  # rounding may decide there
        if mass < sampling.top_p:
            stay.add(v)
        mass += weights[v] / total
    weights = [w if v in stay else 0.0 for v, w in enumerate(weights)]
    return [w / math.fsum(weights) for w in weights]


LOGIT = st.integers(-12, 12).map(lambda i: i / 4) | st.just(-INF)
LOGITS = st.lists(LOGIT, min_size=1, max_size=12).filter(lambda row: max(row) > -INF)
SAMPLING = st.builds(
    Sampling, st.sampled_from([0.0, 0.3, 1.0, 2.5]), st.integers(0, 14), st.sampled_from([0.05, 0.31, 0.62, 0.93, 1.0])
)


@settings(max_examples=300, deadline=None)
@given(LOGITS, SAMPLING)
def test_filters_follow_the_slow_definition(logits, sampling):
    want = slow_probabilities(logits, sampling, property_test=True)
    got = sampling.log_probs(torch.tensor([logits])).exp()[0]
    assert [w > 0 for w in want] == (got > 0).tolist()
    assert torch.allclose(got, torch.tensor(want), atol=1e-6)


def test_filters_treat_rows_apart():
    logits = torch.randn(9, 20, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(0.8, 6, 0.7)
    whole = sampling.log_probs(logits)
    for i in range(9):
        assert torch.equal(whole[i : i + 1], sampling.log_probs(logits[i : i + 1]))


def test_ties():
    row = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert Sampling().log_probs(row).exp().tolist() == [[0, 1, 0, 0, 0]], "greedy takes the first"
    assert (Sampling(1.0, top_k=2).log_probs(row) > -INF).tolist() == [[False, True, True, True, False]]
    assert (Sampling(1.0, top_p=0.3).log_probs(row) > -INF).tolist() == [[False, True, True, False, False]]
    even = torch.zeros(1, 4)
    assert (Sampling(1.0, top_p=0.5).log_probs(even) > -INF).sum() == 2, "a line that is just reached is reached"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.0, 1e-300, 1e-9, 0.125, 0.25, 1.0, 3.0]), min_size=1, max_size=10).filter(any),
    st.lists(
        st.sampled_from([LEAST, MOST, 0.5, 0.25, 1 / 3]) | st.floats(LEAST, MOST, exclude_min=True),
        min_size=1,
        max_size=5,
    ),
)
def test_inverse_cdf_is_the_first_token_that_exceeds_the_level(masses, levels):
    log_probs = torch.tensor([masses], dtype=torch.float64).log().expand(len(levels), -1)
    got = inverse_cdf(log_probs, torch.tensor(levels, dtype=torch.float64))
    masses = log_probs[0].exp().tolist()  # what is left after the logarithm's rounding
    most = max(v for v, mass in enumerate(masses) if mass)
    for token, u in zip(got.tolist(), levels, strict=True):
        running = list(itertools.accumulate(masses))
        # a level on a border may fall to either side: sums are taken in another order
        lowest, highest = (
            next(v for v, sum_ in enumerate(running) if masses[v] and (sum_ > u * running[-1] * slack or v == most))
            for slack in (1 - 1e-12, 1 + 1e-12)
        )
        assert lowest <= token <= highest
        assert masses[token] > 0


def test_inverse_cdf_at_the_edges():
    quarter = torch.tensor([[0.25, 0.25, 0.5]]).double().log().expand(5, -1)
    u = torch.tensor([LEAST, 0.25 - 1e-12, 0.25 + 1e-12, 0.5 + 1e-12, MOST], dtype=torch.float64)
    assert inverse_cdf(quarter, u).tolist() == [0, 0, 1, 2, 2]
    holes = torch.tensor([[-INF, -1e4, 0.0, -INF, -3.0, -1e4, -INF]]).expand(3, -1)
    assert inverse_cdf(holes, torch.tensor([LEAST, 0.5, MOST], dtype=torch.float64)).tolist() == [2, 2, 4]
    assert inverse_cdf(torch.tensor([[-INF, 0.0]]), torch.tensor([1.0]).double()).tolist() == [1], "u = 1 cannot escape"
    assert inverse_cdf(torch.tensor([[0.0, -INF]]), torch.tensor([1.0]).double()).tolist() == [0]


@pytest.mark.parametrize("size", [256, 257, 1000])
def test_inverse_cdf_finds_the_group_and_then_the_token(size):
    """Fails if the sums below the group are not taken off, if a last, shorter group is left out, or a hole is hit."""
    generator = torch.Generator().manual_seed(size)
    masses = torch.rand(64, size, generator=generator, dtype=torch.float64)
    masses[torch.rand(64, size, generator=generator) < 0.5] = 0.0
    masses[:32, :256] = 0.0 if size > 600 else masses[:32, :256]  # a whole group without mass
    masses[:, -1] = 1.0
    masses[:8, 300:] = 0.0 if size > 600 else masses[:8, 300:]  # nothing behind the second group's first tokens
    u = torch.rand(64, generator=generator, dtype=torch.float64)
    u[::4] = 1.0  # cannot escape
    cumulative = masses.cumsum(-1)
    want = ((cumulative > u.unsqueeze(-1) * cumulative[:, -1:]) & (masses > 0)).int().argmax(-1)
    last = size - 1 - (masses > 0).flip(-1).int().argmax(-1)
    want = torch.where(u == 1.0, last, want)
    got = inverse_cdf(masses.log(), u)
    assert got.tolist() == want.tolist()
    alone = [int(inverse_cdf(masses[i : i + 1].log().float(), u[i : i + 1])) for i in range(64)]
    assert inverse_cdf(masses.log().float(), u).tolist() == alone


@pytest.mark.parametrize("size", [1, 255, 256, 257, 700])
@pytest.mark.parametrize("nothing", [math.nan, -INF])
def test_inverse_cdf_of_no_probability_is_still_a_token(size, nothing):
    """A drafter may give no number at all. Fails if a last group that is not whole is taken for whole."""
    got = inverse_cdf(torch.full((2, size), nothing), torch.tensor([LEAST, MOST]).double())
    assert got.tolist() == [size - 1] * 2


def test_inverse_cdf_over_a_large_float32_vocabulary():
    """Rounding must not leave the mass of a long vocabulary short of 1, nor pick what was filtered."""
    logits = torch.randn(64, 50_000, generator=torch.Generator().manual_seed(1)) * 2
    log_probs = Sampling(1.0, top_p=0.9).log_probs(logits)
    for u in (LEAST, 0.3, MOST):
        token = inverse_cdf(log_probs, torch.full((64,), u, dtype=torch.float64))
        assert bool((log_probs.gather(1, token[:, None]) > -INF).all())
    last = log_probs.shape[1] - 1 - (log_probs > -INF).flip(1).int().argmax(1)
    assert torch.equal(token, last), "the largest uniform takes the last token that has mass"


ROWS = 20_000
FILTERS = [
    Sampling(1.0),
    Sampling(0.5),
    Sampling(2.0),
    Sampling(1.0, top_k=4),
    Sampling(0.7, top_p=0.8),
    Sampling(1.3, top_k=7, top_p=0.75),
]


def one_law(sampling: Sampling, rows: int = ROWS) -> Law:
    draw = torch.Generator().manual_seed(5)
    readout = Readout(torch.randn(11, 6, generator=draw) * 0.5, torch.randn(11, generator=draw) * 0.3)
    return Law((torch.randn(1, 6, generator=draw) * 0.5).expand(rows, -1), readout, sampling)


def keyed(rows: int = ROWS) -> torch.Tensor:
    return uniforms(11, Purpose.TARGET, 3, 0, 7, torch.arange(rows))


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_draws_follow_the_law_and_report_its_log_probability(sampling):
    law = one_law(sampling)
    tokens, scores = law.draw(keyed())
    assert tokens.dtype == torch.int64
    assert scores.dtype == torch.float32
    logits = law.readout.logits(law.hidden[:1])[0].tolist()
    want = torch.tensor(slow_probabilities(logits, sampling)).double()
    counts = torch.bincount(tokens, minlength=11)
    assert bool((counts[want == 0] == 0).all())
    assert not too_far(counts[want > 0], want[want > 0] * ROWS)
    assert torch.allclose(scores.double().exp(), want[tokens], atol=1e-6)
    for other in FILTERS:  # a law that was not drawn from is noticed
        if other != sampling:
            lie = torch.tensor(slow_probabilities(logits, other)).double()
            same = lie > 0
            assert bool((counts[~same] > 0).any()) or too_far(counts[same], lie[same] * ROWS), other


def test_chunks_and_batches_change_nothing():
    law, u = one_law(Sampling(0.9, top_p=0.95), 300), keyed(300)
    law = dataclasses.replace(law, hidden=torch.randn(300, 6, generator=torch.Generator().manual_seed(2)))
    tokens, scores = law.draw(u)
    for chunk in (1, 7, 299, 300, 1000):
        again, others = law.draw(u, chunk=chunk)
        assert torch.equal(tokens, again), chunk
        assert torch.allclose(scores, others, atol=1e-6)
    some = torch.tensor([5, 200, 17])
    assert torch.equal(law.rows(some).draw(u[some])[0], tokens[some])
    assert torch.equal(law.rows(slice(4, 9)).draw(u[4:9])[0], tokens[4:9])
    assert torch.equal(law.rows(scores < -1).hidden, law.hidden[scores < -1])
    assert torch.allclose(law.log_probs().gather(1, tokens[:, None])[:, 0], scores, atol=1e-6)


def test_greedy_draws_the_first_largest_with_log_probability_zero():
    law = dataclasses.replace(one_law(Sampling(), 5), readout=Readout(torch.tensor([[1.0], [2.0], [2.0]])))
    law = dataclasses.replace(law, hidden=torch.tensor([[1.0], [-1.0], [0.0]]))
    tokens, scores = law.draw(torch.empty(0))
    assert tokens.tolist() == [1, 0, 0]
    assert scores.tolist() == [0, 0, 0]
    assert inverse_cdf(law.log_probs(), torch.tensor([LEAST, 0.5, MOST]).double()).tolist() == tokens.tolist()


def test_no_rows():
    for sampling in (Sampling(), Sampling(1.0)):
        tokens, scores = one_law(sampling, 0).draw(torch.empty(0, dtype=torch.float64))
        assert tokens.shape == scores.shape == (0,)
        assert (tokens.dtype, scores.dtype) == (torch.int64, torch.float32)


def test_readout_by_its_formula():
    draw = torch.Generator().manual_seed(3)
    weight, bias, h = (torch.randn(*s, generator=draw) for s in ((7, 5), (7,), (4, 5)))
    plain = h @ weight.T
    assert torch.allclose(Readout(weight).logits(h), plain, atol=1e-6)
    assert torch.allclose(Readout(weight, bias).logits(h), plain + bias, atol=1e-6)
    assert torch.allclose(Readout(weight, bias, scale=0.25).logits(h), (plain + bias) / 4, atol=1e-6)
    capped = Readout(weight, bias, scale=2.0, soft_cap=3.0).logits(h)
    assert torch.allclose(capped, 3 * torch.tanh(2 * (plain + bias) / 3), atol=1e-5)
    ids = torch.tensor([8, 0, 3, 5, 2, 9, 6])
    full = Readout(weight, support=ids, vocab_size=11).logits(h)
    assert full.shape == (4, 11)
    assert torch.allclose(full[:, ids], plain, atol=1e-6)
    assert bool((full[:, [1, 4, 7, 10]] == -INF).all())


def test_readout_types():
    weight, h = torch.randn(7, 5), torch.randn(3, 4, 5)
    assert Readout(weight.bfloat16()).logits(h[0]).dtype == torch.float32
    assert Readout(weight.double()).logits(h[0].double()).dtype == torch.float64
    strided = h[:, 1:].transpose(0, 1)[0]
    assert torch.equal(Readout(weight).logits(strided), Readout(weight).logits(strided.clone()))
    leaf = h[0].clone().requires_grad_()
    Readout(weight, soft_cap=5.0, support=torch.arange(7), vocab_size=8).logits(leaf)[:, :7].sum().backward()
    assert leaf.grad is not None
    assert bool(leaf.grad.abs().sum() > 0)


def test_a_reduced_vocabulary_draws_only_its_own_tokens():
    support = torch.tensor([9, 2, 7])
    readout = Readout(torch.randn(3, 5), support=support, vocab_size=12)
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_k=6), Sampling(1.0, top_p=0.999)):
        tokens, scores = Law(torch.randn(400, 5), readout, sampling).draw(keyed(400))
        assert set(tokens.tolist()) <= {2, 7, 9}
        assert bool(torch.isfinite(scores).all())


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": INF},
        {"temperature": 1e-40},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": math.nan},
    ],
    ids=str,
)
def test_sampling_out_of_range_is_refused(values):
    with pytest.raises(InputError, match=next(iter(values))):
        Sampling(**values)


def test_the_coldest_temperature_still_computes():
    logits = torch.tensor([[30.0, -80.0, 29.0, 30.0]])
    got = Sampling(1e-6, top_p=0.99).log_probs(logits).exp()
    assert torch.allclose(got, torch.tensor([[0.5, 0.0, 0.0, 0.5]]))
