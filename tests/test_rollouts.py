"""Rollouts: decoding with a record, read back from disk bit for bit."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, settings

from draftloop.core.draws import key_of
from draftloop.core.errors import InputError
from draftloop.core.law import Sampling
from draftloop.core.weights import write_tensors
from draftloop.decode.loop import Decoder, decode
from draftloop.decode.trace import Options, Request, Step
from draftloop.recipe import RolloutPart
from draftloop.supervise.lesson import Lesson
from draftloop.supervise.rollout import load_rollout, options_of, requests_of, roll_out, save_rollout
from tests.lessons import (
    rolled,
    world,
)

CPU = torch.device("cpu")
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# rollouts on disk ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("teacher", ["store", "recompute"])
def test_a_rollout_is_read_back_bit_for_bit(tmp_path, teacher):
    here = world("qwen3")
    part = RolloutPart(temperature=0.7, rule="ratio", teacher=teacher)
    lessons = roll_out(here.target, here.drafters["half"], here.trunks, part, max_new_tokens=9, seed=1, visit=2)
    assert all((lesson.verified is None) == (teacher == "recompute") for lesson in lessons)
    assert all(lesson.trunk.sample == 2 for lesson in lessons)
    save_rollout(tmp_path / "r.safetensors", lessons)
    again = load_rollout(tmp_path / "r.safetensors", CPU)
    assert len(again) == len(lessons)
    for a, b in zip(lessons, again, strict=True):
        assert a.trunk == b.trunk
        assert a.steps == b.steps
        for name in ("features", "hidden", "verified"):
            mine, theirs = getattr(a, name), getattr(b, name)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert mine.dtype == theirs.dtype
                assert torch.equal(mine, theirs)


def test_a_rollout_in_bfloat16_is_read_back_too(tmp_path):
    lessons = [replace(lesson, features=lesson.features.bfloat16()) for lesson in rolled("llama")]
    save_rollout(tmp_path / "r.safetensors", lessons)
    again = load_rollout(tmp_path / "r.safetensors", CPU)
    assert all(torch.equal(a.features, b.features) for a, b in zip(lessons, again, strict=True))
    assert again[0].features.dtype == torch.bfloat16


def test_a_broken_rollout_file_is_the_users_to_mend(tmp_path):
    file = tmp_path / "r.safetensors"
    with pytest.raises(InputError):
        load_rollout(file, CPU)
    save_rollout(file, rolled("llama"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-7])
    with pytest.raises(InputError, match="bytes"):
        load_rollout(file, CPU)
    for metadata in (None, {"lessons": "[]"}, {"schema": "0", "lessons": "[]"}, {"schema": "1"}):
        write_tensors(file, {"x": torch.zeros(2)}, metadata)
        with pytest.raises(InputError, match="rollout"):
            load_rollout(file, CPU)


def test_a_rollout_of_many_steps_is_no_long_header(tmp_path):
    """The format refuses headers above 100 MB: nothing that grows with the tokens may stand in one."""
    (lesson, *_) = rolled("llama")
    tokens = (1, *range(2, 5000))
    mask = (False, *[True] * (len(tokens) - 1))
    steps = tuple(Step(a, (1, 2, 3, 4), (-0.1, -0.2, -1 / 3, -1e-9), 1, 2) for a in range(1, 4999, 2))
    long = Lesson(replace(lesson.trunk, tokens=tokens, mask=mask), steps=steps)
    save_rollout(tmp_path / "r.safetensors", [long, long])
    (header,) = struct.unpack("<Q", (tmp_path / "r.safetensors").read_bytes()[:8])
    assert header < 2000
    again = load_rollout(tmp_path / "r.safetensors", CPU)
    assert [(one.trunk, one.steps) for one in again] == [(long.trunk, steps)] * 2


def test_rolling_out_leaves_out_what_has_no_verification():
    here = world("llama")
    part = RolloutPart()
    with pytest.raises(InputError, match="long enough"):
        roll_out(here.target, here.drafters["half"], here.trunks, part, max_new_tokens=1, seed=0, visit=0)
    first = here.trunks[0].tokens[here.trunks[0].first]
    ends, here.target.eos_ids = here.target.eos_ids, (first,)
    try:
        lessons = roll_out(here.target, here.drafters["half"], here.trunks, part, max_new_tokens=6, seed=0, visit=0)
    finally:
        here.target.eos_ids = ends
    assert "p0" not in [lesson.trunk.id for lesson in lessons]  # it ended in its first token
    assert all(lesson.steps and lesson.anchors() for lesson in lessons)


@pytest.mark.parametrize("rule", ["match", "ratio"])
def test_a_rollout_is_decoding_with_those_options(rule):
    here, drafter = world("qwen3"), world("qwen3").drafters["half"]
    part = RolloutPart(temperature=0.8, rule=rule, batch_size=2)
    lessons = roll_out(here.target, drafter, here.trunks, part, max_new_tokens=8, seed=5, visit=3)
    for trunk, lesson in zip(here.trunks, lessons, strict=True):
        request = Request(trunk.prompt, key_of(f"{trunk.id}#0"), 3)
        (made,) = decode(here.target, drafter, [request], Options(8, Sampling(0.8), rule, seed=5))
        assert lesson.trunk == replace(trunk, tokens=lesson.trunk.tokens, mask=lesson.trunk.mask, sample=3,
                                       finished=made.finished, drawn=Sampling(0.8))  # fmt: skip
        assert lesson.trunk.tokens == (*trunk.prompt, *made.tokens)
        assert [replace(s, log_q=()) for s in lesson.steps] == [replace(s, log_q=()) for s in made.steps]
    drawn = [score for lesson in lessons for step in lesson.steps for score in step.log_q]
    assert all(score == 0 for score in drawn) == (rule == "match")  # an argmax, or drawn from q


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_a_decoder_that_is_kept_rolls_out_what_a_new_one_does(engine):
    here, drafter = world("qwen3"), world("qwen3").drafters["half"]
    part = RolloutPart(temperature=0.8, batch_size=2)
    ends, here.target.engine = getattr(here.target, "engine", "auto"), engine
    try:
        kept = Decoder(here.target, drafter, options_of(part, 8, 5), requests_of(here.trunks, 0))
        for visit in (0, 1):
            how = {"max_new_tokens": 8, "seed": 5, "visit": visit}
            want = roll_out(here.target, drafter, here.trunks, part, **how)
            made = roll_out(here.target, drafter, here.trunks, part, **how, decoder=kept)
            assert [(a.trunk, a.steps) for a in made] == [(a.trunk, a.steps) for a in want]
            for a, b in zip(made, want, strict=True):
                assert torch.equal(a.features, b.features)
                assert torch.equal(a.verified, b.verified)
    finally:
        here.target.engine = ends


def test_visits_and_answers_of_a_prompt_are_drawn_apart():
    here = world("llama")
    part = RolloutPart(temperature=1.0)
    asked = [here.trunks[0], replace(here.trunks[0], sample=1)]

    def answers(visit, trunks):
        made = roll_out(here.target, here.drafters["half"], trunks, part, max_new_tokens=12, seed=0, visit=visit)
        return [lesson.trunk.tokens for lesson in made]

    assert answers(0, asked[:1]) == answers(0, asked)[:1]
    assert answers(0, asked[:1]) != answers(1, asked[:1])
    a, b = answers(0, asked)
    assert a != b  # two training answers of one prompt are two rollouts, not one rollout twice
