"""Decoding with a drafter is plain decoding token for token: greedy, and at any temperature under `match`."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.core.law import Sampling
from draftloop.decode import round as one_round
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options
from tests.broken import miscounted
from tests.stand_ins import Scripted, garbled, replies, requests_of, scripts_of, trained_drafter, unlikely, with_eos
from tests.tiny import tiny_drafter

LENGTHS = (1, 2, 3, 3, 5, 8, 8, 13, 20)
LONGEST = 12


@pytest.fixture(scope="module")
def texts(target):
    requests = requests_of(LENGTHS, target.vocab_size)
    return requests, scripts_of(target, requests, Options(max_new_tokens=LONGEST + 8))


@pytest.fixture(scope="module")
def learned(target, texts):
    return trained_drafter(target, [s for s in texts[1] if len(s) >= 25], block=5)


DRAFTERS = ["untrained", "learned", "oracle", "garbled oracle", "least likely", "always eos"]


def drafter_of(kind: str, target, texts, learned):
    scripts = texts[1]
    if kind == "untrained":
        return tiny_drafter(target)
    if kind == "learned":
        return learned
    if kind == "always eos":
        return Scripted(target, [[target.eos_ids[0]] * len(s) for s in scripts], 4)
    if kind == "least likely":
        return Scripted(target, unlikely(target, scripts), 4)
    return Scripted(target, scripts if kind == "oracle" else garbled(scripts, target.vocab_size), 4)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_output_is_that_of_plain_decoding(target, texts, learned, kind):
    """Every length limit, several batch sizes, prompts of different lengths in one batch."""
    requests, _ = texts
    for limit in range(1, LONGEST + 1):
        size = 1 + limit % 7 if limit != 10 else 16
        plain = decode(target, None, requests, Options(max_new_tokens=limit, batch_size=16))
        rule = "ratio" if limit % 2 else "match"
        options = Options(max_new_tokens=limit, batch_size=size, rule=rule)
        assert replies(decode(target, drafter_of(kind, target, texts, learned), requests, options)) == replies(plain)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_end_of_sequence_anywhere_in_a_block_ends_the_text_there(target, texts, learned, kind):
    requests, scripts = texts
    ended = set()
    for place in range(0, LONGEST - 1, 2):
        eos = scripts[place % len(scripts)][len(requests[place % len(scripts)].ids) + place]
        stopping = with_eos(target, eos, 4)
        plain = decode(stopping, None, requests, Options(max_new_tokens=LONGEST))
        drafter = drafter_of(kind, stopping, texts, learned)
        got = decode(stopping, drafter, requests, Options(max_new_tokens=LONGEST, batch_size=5))
        assert replies(got) == replies(plain)
        for g, script in zip(got, scripts, strict=True):
            whole_text = script[len(g.prompt) : len(g.prompt) + LONGEST]
            first = min((i for i, t in enumerate(whole_text) if t in (eos, 4)), default=LONGEST - 1)
            assert g.tokens == whole_text[: first + 1]
            assert g.finished == (whole_text[first] in (eos, 4))
            if g.finished and g.steps:
                ended.add(g.steps[-1].committed)
    assert len(ended) > (3 if kind == "oracle" else 0)  # at the start, in the middle and at the end of a block


def test_what_is_known_by_heart_is_accepted(target, texts, learned):
    """An oracle needs the fewest rounds there can be; a drafter that was taught a text proposes that text."""
    requests, scripts = texts
    options = Options(max_new_tokens=LONGEST, batch_size=4)
    for g in decode(with_eos(target), Scripted(target, scripts, 4), requests, options):
        assert [step.accepted for step in g.steps] == [4] * math.ceil((LONGEST - 1) / 5)
    for g in decode(with_eos(target), learned, [r for r in requests if len(r.ids) >= 5], options):
        taught = [step for step in g.steps if step.anchor + 4 < 25]
        assert taught
        assert all(step.accepted == 4 for step in taught)
    for g in decode(with_eos(target), Scripted(target, unlikely(target, scripts), 4), requests, options):
        assert all(step.accepted == 0 for step in g.steps)


def test_a_verifier_that_counts_one_too_many_fails_the_greedy_test(target, texts, monkeypatch):
    plain = decode(target, None, texts[0], Options(max_new_tokens=LONGEST))
    monkeypatch.setattr(one_round, "verify", miscounted(1))
    got = decode(target, tiny_drafter(target), texts[0], Options(max_new_tokens=LONGEST))
    assert replies(got) != replies(plain)


# `match` draws the target's tokens with the uniforms of plain decoding ------------------------------------------------
@given(
    seed=st.integers(0, 1 << 40),
    sampling=st.builds(
        Sampling, st.sampled_from([0.0, 0.4, 1.0, 1.7]), st.sampled_from([0, 3]), st.sampled_from([1.0, 0.8])
    ),
    lengths=st.lists(st.integers(1, 17), min_size=1, max_size=6),
    limit=st.integers(1, 14),
    block=st.integers(2, 6),
    share=st.sampled_from([None, 0.0, 0.3]),
    size=st.integers(1, 6),
    eos=st.sampled_from([(), (3,), tuple(range(40, 61))]),
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_match_equals_plain_decoding_at_any_temperature(
    target, seed, sampling, lengths, limit, block, share, size, eos
):
    stopping = with_eos(target, *eos)
    requests = requests_of(lengths, target.vocab_size, seed % 1000)
    common = {"sampling": sampling, "seed": seed}
    plain = decode(stopping, None, requests, Options(max_new_tokens=limit, **common))
    if share is None:
        drafter = tiny_drafter(target, block=block)
    else:
        scripts = scripts_of(target, requests, Options(max_new_tokens=limit, **common))
        drafter = Scripted(target, garbled(scripts, target.vocab_size, share), block - 1)
    got = decode(stopping, drafter, requests, Options(max_new_tokens=limit, batch_size=size, rule="match", **common))
    assert replies(got) == replies(plain)
