"""Decoding as a whole is lossless: the loop enumerated exactly, the sampler by statistics."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from draftloop.core.draws import Purpose
from draftloop.core.law import Law, Sampling
from draftloop.decode import loop, rules
from draftloop.decode import round as one_round
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options, Request
from tests.broken import argmax_drafts, fresh_correction, lenient, miscounted, resample_p, shifted, stale_weights
from tests.stand_ins import ToyDrafter, ToyTarget, p_value
from tests.tiny import tiny_drafter, tiny_target
from tests.toy import Toy, cells

TARGET, DRAFT, ACCEPT, RESIDUAL = Purpose.TARGET, Purpose.DRAFT, Purpose.ACCEPT, Purpose.RESIDUAL


@pytest.fixture
def whole(monkeypatch):
    """Few large chunks: thousands of rows at a time."""
    monkeypatch.setattr(rules._ratio, "__defaults__", (1 << 14,))
    monkeypatch.setattr(Law.draw, "__defaults__", (1 << 16,))


# the loop, enumerated ------------------------------------------------------------------------------------------------
# One request is one cell of a grid over every uniform that three tokens can need; (purpose, anchor, position) -> axis.
# Draws that exclude each other share an axis: a block's correction and its bonus, or what follows either.
Axes = list[tuple[int, list[tuple[Purpose, int, int]]]]
ONE_DRAFT: Axes = [
    (4, [(TARGET, 0, 1)]),
    (4, [(DRAFT, 1, 2)]),
    (2, [(ACCEPT, 1, 2)]),
    (12, [(RESIDUAL, 1, 2), (TARGET, 0, 3)]),
    (4, [(DRAFT, 2, 3)]),
    (2, [(ACCEPT, 2, 3)]),
    (12, [(RESIDUAL, 2, 3)]),
]
TWO_DRAFTS: Axes = [
    (4, [(TARGET, 0, 1)]),
    (2, [(DRAFT, 1, 2)]),
    (2, [(DRAFT, 1, 3)]),
    (2, [(ACCEPT, 1, 2)]),
    (2, [(ACCEPT, 1, 3)]),
    (4, [(RESIDUAL, 1, 2), (RESIDUAL, 1, 3)]),
    (2, [(DRAFT, 2, 3)]),
    (2, [(ACCEPT, 2, 3)]),
    (4, [(RESIDUAL, 2, 3)]),
]
PLAIN: Axes = [(4, [(TARGET, 0, place)]) for place in (1, 2, 3)]
ONE = Toy(vocab=3, drafted=1, p_weights=[(1, 1, 2), (0, 1, 3)], q_weights=[(2, 1, 1), (2, 2, 0)], seed=3)
TWO = Toy(vocab=3, drafted=2, p_weights=[(1, 1, 2), (2, 2, 0)], q_weights=[(1, 1, 0)], seed=1)
STEPPED = replace(TWO, own_prefix=True)


def enumerate_loop(monkeypatch, toy: Toy, axes: Axes, rule, *, eos=(), drafter=True, batch_size=1 << 16, limit=3):
    """Decode `limit` tokens for every cell; the uniforms are the cell's coordinates."""
    grid = cells(*[size for size, _ in axes])
    column = {key: axis for axis, (_, keys) in enumerate(axes) for key in keys}

    def table(seed, purpose, key, sample, anchor, position):
        sample, anchor, position = torch.broadcast_tensors(sample, anchor, position)
        out = torch.full(sample.shape, 0.5, dtype=torch.float64)
        for (wanted, at, place), axis in column.items():
            here = (anchor == at) & (position == place) if wanted == purpose else torch.zeros_like(anchor).bool()
            out[here] = grid[sample[here], axis]
        return out

    monkeypatch.setattr(one_round, "uniforms", table)
    requests = [Request((0,), sample=i) for i in range(len(grid))]
    options = Options(max_new_tokens=limit, sampling=Sampling(1.0), rule=rule, batch_size=batch_size)
    return decode(ToyTarget(toy, eos), ToyDrafter(toy) if drafter else None, requests, options)


def law_of(generations) -> dict[tuple[int, ...], Fraction]:
    counts = Counter(tuple(g.tokens) for g in generations)
    return {tokens: Fraction(n, len(generations)) for tokens, n in counts.items()}


def target_law(toy: Toy, eos=(), limit=3) -> dict[tuple[int, ...], Fraction]:
    """The law of texts of `limit` tokens that end at the first end-of-sequence."""
    law: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)

    def go(text: tuple[int, ...], node: int, mass: Fraction) -> None:
        if len(text) == limit or (text and text[-1] in eos):
            law[text] += mass
            return
        for token, share in enumerate(toy.p_law(node)):
            if share:
                go((*text, token), toy.child(node, token), mass * share)

    go((), 0, Fraction(1))
    return dict(law)


@pytest.mark.parametrize("eos", [(), (2,)], ids=["no eos", "eos 2"])
@pytest.mark.parametrize(
    ("toy", "axes"), [(ONE, ONE_DRAFT), (TWO, TWO_DRAFTS), (STEPPED, TWO_DRAFTS)], ids=["K=1", "K=2", "own prefix"]
)
def test_the_loop_under_ratio_is_exactly_lossless(whole, monkeypatch, toy, axes, eos):
    generations = enumerate_loop(monkeypatch, toy, axes, "ratio", eos=eos)
    assert law_of(generations) == target_law(toy, eos)


@pytest.mark.parametrize("eos", [(), (2,)])
@pytest.mark.parametrize(("rule", "drafter"), [("match", True), ("match", False), ("ratio", False)])
@pytest.mark.parametrize("toy", [ONE, TWO, STEPPED], ids=["K=1", "K=2", "own prefix"])
def test_the_loop_under_match_and_without_a_drafter_is_exactly_lossless(monkeypatch, toy, rule, drafter, eos):
    generations = enumerate_loop(monkeypatch, toy, PLAIN, rule, eos=eos, drafter=drafter, batch_size=7)
    assert law_of(generations) == target_law(toy, eos)


def test_the_trace_holds_the_law_that_each_draft_was_drawn_from(whole, monkeypatch):
    generations = enumerate_loop(monkeypatch, TWO, TWO_DRAFTS, "ratio")
    for g in generations:
        for step in g.steps:
            node = 0
            for token in g.tokens[: step.anchor]:  # the text up to the anchor, which stands at position >= 1
                node = TWO.child(node, token)
            for k, (token, log_q) in enumerate(zip(step.proposed, step.log_q, strict=True)):
                assert math.isclose(math.exp(log_q), TWO.q_law(node, node, k)[token], rel_tol=1e-6)


def redraft_bias(generations) -> float:
    """How far the second block's first draft is from q, given what the first block had proposed there."""
    seen: dict[tuple, Counter] = defaultdict(Counter)
    for g in generations:
        if len(g.steps) == 2 and g.steps[0].accepted == 0:
            seen[(tuple(g.tokens[:2]), g.steps[0].proposed[1])][g.steps[1].proposed[0]] += 1
    worst = 0.0
    for (text, _), counts in seen.items():
        anchor = TWO.child(TWO.child(0, text[0]), text[1])
        for token, share in enumerate(TWO.q_law(anchor, anchor, 0)):
            worst = max(worst, abs(counts[token] / counts.total() - float(share)))
    assert len(seen) > 3
    return worst


def test_a_redraft_is_drawn_from_q_whatever_was_proposed_there_before(whole, monkeypatch):
    """Why the anchor is a key: without it the text is still lossless, but proposals that are trained on are not ~ q."""
    assert redraft_bias(enumerate_loop(monkeypatch, TWO, TWO_DRAFTS, "ratio")) < 1e-9
    honest = loop._Batch._uniform

    def anchorless(self, purpose, position, anchor=None):
        return honest(self, purpose, position)

    monkeypatch.setattr(loop._Batch, "_uniform", anchorless)
    axes = [(size, [(purpose, 0, place) for purpose, _, place in keys]) for size, keys in TWO_DRAFTS[:6]]
    generations = enumerate_loop(monkeypatch, TWO, axes, "ratio")
    assert law_of(generations) == target_law(TWO)
    assert redraft_bias(generations) > 0.3


@pytest.mark.parametrize(("thief", "owner"), [(None, None), (RESIDUAL, DRAFT), (RESIDUAL, ACCEPT), (ACCEPT, DRAFT)])
def test_purposes_that_share_uniforms_are_caught_in_the_loop(whole, monkeypatch, thief, owner):
    honest = loop._Batch._uniform

    def stealing(self, purpose, position, anchor=None):
        return honest(self, owner if purpose == thief else purpose, position, anchor)

    monkeypatch.setattr(loop._Batch, "_uniform", stealing)
    toy = Toy(vocab=4, drafted=1, p_weights=[(2, 0, 1, 1), (1, 1, 1, 1)], q_weights=[(2, 2, 0, 0)], seed=0)
    axes = [(4, ONE_DRAFT[0][1]), *[(4, keys) for _, keys in ONE_DRAFT[1:4]]]
    law, wanted = law_of(enumerate_loop(monkeypatch, toy, axes, "ratio", limit=2)), target_law(toy, limit=2)
    assert (law == wanted) == (thief is None)


# the real sampler, by statistics -------------------------------------------------------------------------------------
SAMPLES, PROMPT = 6000, (1, 4, 2, 6)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def small(request):
    """A target over seven tokens without end-of-sequence, and a drafter that knows nothing."""
    target = tiny_target(request.param, vocab=7, layers=2, sharp=1.5, eos_token_id=None)
    return target, tiny_drafter(target, target_layers=(0, 1))


@torch.no_grad()
def exact_law(target, sampling: Sampling) -> torch.Tensor:
    """[V^3], by plain forwards of the unmodified model."""
    v = target.vocab_size
    law = torch.ones(1, dtype=torch.float64)
    for length in range(3):
        texts = [[*PROMPT, *tail] for tail in itertools.product(range(v), repeat=length)]
        logits = target.model(torch.tensor(texts)).logits[:, -1].double()
        law = (law.unsqueeze(1) * sampling.log_probs(logits).exp()).flatten()
    return law


def sampled(target, drafter, samples: int = SAMPLES, **options) -> list:
    requests = [Request(PROMPT, key=5, sample=i) for i in range(samples)]
    return decode(
        target, drafter, requests, Options(**{"max_new_tokens": 3, "batch_size": 3000, "seed": 11, **options})
    )


FILTERS = Sampling(0.9, top_k=5, top_p=0.9)


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": Sampling(1.0), "rule": "ratio"},
        {"sampling": Sampling(1.0), "rule": "match"},
        {"sampling": FILTERS, "rule": "ratio"},
        {"sampling": FILTERS, "rule": "ratio", "draft_sampling": Sampling(0.5, top_k=3)},
        {"sampling": FILTERS, "rule": "match"},
    ],
    ids=["ratio", "match", "filtered ratio", "filtered q", "filtered match"],
)
def test_samples_have_the_targets_joint_law(small, whole, options):
    target, drafter = small
    generations = sampled(target, drafter, **options)
    assert p_value(generations, exact_law(target, options["sampling"])) > 1e-3
    steps = [step for g in generations for step in g.steps]
    assert 0.05 < sum(step.accepted > 0 for step in steps) / len(steps) < 0.95  # both verdicts were at work


@pytest.mark.slow
def test_many_samples_have_the_targets_joint_law(small, whole):
    for seed in range(3):
        generations = sampled(*small, 60000, sampling=Sampling(1.0), rule="ratio", seed=seed)
        assert p_value(generations, exact_law(small[0], Sampling(1.0))) > 1e-3


def test_plain_samples_have_the_targets_joint_law(small, whole):
    for sampling, rule in ((Sampling(1.0), "match"), (FILTERS, "ratio")):
        assert p_value(sampled(small[0], None, sampling=sampling, rule=rule), exact_law(small[0], sampling)) > 1e-3


@pytest.mark.parametrize("small", ["llama"], indirect=True)
@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("ratio", resample_p),
        ("ratio", lenient),
        ("ratio", shifted(1)),
        ("ratio", miscounted(1)),
        ("match", fresh_correction),
        ("match", shifted(-1)),
    ],
    ids=["resampling p", "lenient", "shifted", "miscounted", "correction drawn anew", "match shifted"],
)
def test_a_broken_verifier_fails_the_statistics(small, whole, monkeypatch, rule, broken):
    target, drafter = small
    monkeypatch.setattr(one_round, "verify", broken)
    generations = sampled(target, drafter, SAMPLES // 2, sampling=Sampling(1.0), rule=rule)
    assert p_value(generations, exact_law(target, Sampling(1.0))) < 1e-8


@pytest.mark.parametrize("small", ["llama"], indirect=True)
@pytest.mark.parametrize("spoil", [argmax_drafts, stale_weights], ids=lambda f: f.__name__)
def test_a_proposal_that_lies_about_q_fails_the_statistics(small, whole, monkeypatch, spoil):
    target, drafter = small
    honest = loop._Batch._propose
    monkeypatch.setattr(loop._Batch, "_propose", lambda self: spoil(honest(self)))
    generations = sampled(target, drafter, SAMPLES // 2, sampling=Sampling(1.0), rule="ratio")
    assert p_value(generations, exact_law(target, Sampling(1.0))) < 1e-8
