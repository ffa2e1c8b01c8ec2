"""Speculative decoding on hybrid targets is lossless: states are put back to where verification cut the block."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.core.errors import InputError
from draftloop.core.law import Sampling
from draftloop.decode.loop import decode, engine_of
from draftloop.decode.trace import Options
from draftloop.target import gated_deltanet
from draftloop.target.load import load_target
from tests.hybrid_tiny import hybrid_target
from tests.stand_ins import Scripted, garbled, replies, requests_of, scripts_of, unlikely, with_eos
from tests.test_hybrid_families import family_model
from tests.tiny import tiny_drafter, tiny_target

pytestmark = pytest.mark.hybrid

LENGTHS = (1, 2, 3, 8, 13)
LONGEST = 12
DRAFTERS = ["untrained", "oracle", "garbled oracle", "least likely", "always eos"]


@cache
def built(kind: str):
    return hybrid_target(kind)


@pytest.fixture(params=["qwen3_next", "qwen3_5"])
def target(request):
    return built(request.param)


@torch.no_grad()
def by_the_model(target, request, limit: int, eos=()) -> tuple[list[int], bool]:
    """Greedy text of the model's own forward over the whole text, again for every token."""
    ids, new = list(request.ids), []
    while len(new) < limit:
        new.append(
            int(target.model(torch.tensor([ids + new], device=target.device), use_cache=False).logits[0, -1].argmax())
        )
        if new[-1] in eos:
            return new, True
    return new, False


def drafter_of(kind: str, target, scripts):
    if kind == "untrained":
        return tiny_drafter(target, block=5)
    if kind == "always eos":
        return Scripted(target, [[target.eos_ids[0]] * len(s) for s in scripts], 4)
    if kind == "least likely":
        return Scripted(target, unlikely(target, scripts), 4)
    return Scripted(target, scripts if kind == "oracle" else garbled(scripts, target.vocab_size), 4)


def test_plain_decoding_is_the_models_own_greedy_text(target):
    requests = requests_of(LENGTHS, target.vocab_size)
    bare = with_eos(target)
    got = decode(bare, None, requests, Options(max_new_tokens=LONGEST, batch_size=3))
    assert replies(got) == [by_the_model(target, one, LONGEST) for one in requests]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_output_is_that_of_plain_decoding(target, kind):
    requests = requests_of(LENGTHS, target.vocab_size)
    scripts = scripts_of(target, requests, Options(max_new_tokens=LONGEST + 8))
    for limit, rule in ((3, "ratio"), (LONGEST, "match")):
        plain = decode(target, None, requests, Options(max_new_tokens=limit))
        options = Options(max_new_tokens=limit, batch_size=limit, rule=rule)
        assert replies(decode(target, drafter_of(kind, target, scripts), requests, options)) == replies(plain)


def test_end_of_sequence_anywhere_in_a_block_ends_the_text_there(target):
    requests = requests_of(LENGTHS, target.vocab_size)
    scripts = scripts_of(target, requests, Options(max_new_tokens=LONGEST + 8))
    for place in (1, 5, 8):
        eos = scripts[place % len(scripts)][len(requests[place % len(scripts)].ids) + place]
        stopping = with_eos(target, eos)
        want = [by_the_model(target, one, LONGEST, (eos,)) for one in requests]
        got = decode(stopping, Scripted(stopping, scripts, 4), requests, Options(max_new_tokens=LONGEST, batch_size=5))
        assert replies(got) == want


def test_what_is_known_by_heart_is_accepted(target):
    requests = requests_of(LENGTHS, target.vocab_size)
    scripts = scripts_of(target, requests, Options(max_new_tokens=LONGEST + 8))
    options = Options(max_new_tokens=11, batch_size=4)
    for g in decode(with_eos(target), Scripted(target, scripts, 4), requests, options):
        assert [step.accepted for step in g.steps] == [4, 4]


@given(
    seed=st.integers(0, 1 << 40),
    sampling=st.builds(
        Sampling, st.sampled_from([0.0, 1.0, 1.7]), st.sampled_from([0, 3]), st.sampled_from([1.0, 0.8])
    ),
    lengths=st.lists(st.integers(1, 17), min_size=1, max_size=5),
    limit=st.integers(1, 12),
    share=st.sampled_from([0.0, 0.3, 0.7]),
    size=st.integers(1, 5),
)
@settings(max_examples=5, deadline=None, derandomize=True)
def test_match_equals_plain_decoding_at_any_temperature(seed, sampling, lengths, limit, share, size):
    target = with_eos(built("qwen3_next"), 3)
    requests = requests_of(lengths, target.vocab_size, seed % 1000)
    common = {"sampling": sampling, "seed": seed}
    plain = decode(target, None, requests, Options(max_new_tokens=limit, **common))
    scripts = scripts_of(target, requests, Options(max_new_tokens=limit, **common))
    drafter = Scripted(target, garbled(scripts, target.vocab_size, share), 3)
    got = decode(target, drafter, requests, Options(max_new_tokens=limit, batch_size=size, rule="match", **common))
    assert replies(got) == replies(plain)


def test_what_is_recorded_is_what_the_model_says(target):
    """Features and hidden rows of a rollout lie on the committed text, whatever was rejected on the way."""
    requests = requests_of((3, 6, 9), target.vocab_size)
    drafter = tiny_drafter(target)
    for g in decode(target, drafter, requests, Options(max_new_tokens=10, batch_size=3, record=True)):
        ids = torch.tensor([[*g.prompt, *g.tokens][:-1]])
        want = target.model(ids, use_cache=False).logits[0]
        got = target.readout.logits(g.hidden)
        assert float((got - want).abs().max() / want.abs().max()) < 5e-5


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen4_exp"])
def test_fixed_shapes_are_refused_and_auto_stays_eager(monkeypatch, kind):
    """Where a softmax target would get a graph, states that must be put back decode eagerly, or say why not."""
    target = built(kind)
    requests = requests_of(LENGTHS, target.vocab_size)
    for engine in ("graph", "fused"):
        with pytest.raises(InputError, match=r"keep a state that is put back.*Decode with engine eager"):
            decode(target, None, requests, Options(max_new_tokens=3, engine=engine))
    with pytest.raises(AssertionError, match="keep a state"):  # nor by another door
        target.new_fixed_cache(1, 8)
    softmax = tiny_target()
    monkeypatch.setattr(type(target), "device", property(lambda self: torch.device("cuda")))
    assert engine_of(target, None, Options()) == "eager"
    assert engine_of(softmax, None, Options()) == "graph"


def test_classes_that_only_attend_eagerly_are_refused_too():
    target = load_target(family_model("gpt-oss, sliding with sinks"))
    with pytest.raises(InputError, match=r"attends by code of its own.*Decode with engine eager"):
        decode(target, None, requests_of((3,), target.vocab_size), Options(max_new_tokens=3, engine="graph"))


def test_chunks_decode_with_fixed_shapes_as_eagerly():
    target = with_eos(load_target(family_model("chunked and full")), 3)
    requests = requests_of(LENGTHS, target.vocab_size)
    options = Options(max_new_tokens=LONGEST, batch_size=3)
    eager = decode(target, tiny_drafter(target), requests, options)
    fixed = decode(target, tiny_drafter(target), requests, replace(options, engine="graph"))
    assert replies(fixed) == replies(eager)


def test_a_state_that_is_not_put_back_changes_the_text(target, monkeypatch):
    """What cropping keys and values alone would do."""
    requests = requests_of(LENGTHS, target.vocab_size)
    plain = decode(target, None, requests, Options(max_new_tokens=LONGEST))
    at = gated_deltanet.GatedDeltaNet.state_at
    monkeypatch.setattr(
        gated_deltanet.GatedDeltaNet,
        "state_at",
        lambda self, log, which, after: at(self, log, which, torch.full_like(after, log.g.shape[1])),
    )
    got = decode(target, tiny_drafter(target), requests, Options(max_new_tokens=LONGEST, batch_size=5))
    assert replies(got) != replies(plain)
