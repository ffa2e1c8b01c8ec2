"""The walk over fixed trunks against real decoding; and the measured comparison's arithmetic."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftloop.core.errors import InputError
from draftloop.data.trunk import Trunk
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options, Request
from draftloop.evaluate import speed
from draftloop.evaluate.speed import compare
from draftloop.evaluate.tau import acceptance
from draftloop.evaluate.walk import anchors_of, drafted_rows, responses_of, walk
from draftloop.supervise.lesson import Lesson
from draftloop.supervise.propose import greedy_run
from tests.lessons import BLOCK, DRAFTED, DRAFTERS, KINDS, LENGTH, greedy_trunks, world


def really(here, name, trunks, length=LENGTH, **options):
    """What real decoding does, as responses."""
    requests = [Request(trunk.prompt) for trunk in trunks]
    made = decode(here.target, here.drafters[name], requests, Options(length, **options))
    assert [one.tokens for one in made] == [list(trunk.tokens[trunk.first :]) for trunk in trunks]
    return responses_of(made, [(f"{trunk.id}#{trunk.sample}", trunk.set) for trunk in trunks], DRAFTED)


@contextmanager
def ends(target, *ids):
    before, target.eos_ids = target.eos_ids, ids
    try:
        yield
    finally:
        target.eos_ids = before


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_walk_takes_the_steps_of_real_decoding(kind, name):
    here = world(kind)
    walked = walk(here.drafters[name], here.lessons(), here.store())
    assert walked == really(here, name, here.trunks)
    for trunk, response in zip(here.trunks, walked, strict=True):
        assert sum(response.committed) == len(trunk) - trunk.first - 1  # all but the prefill token
        assert (response.id, response.set, response.drafted) == (f"{trunk.id}#0", trunk.set, DRAFTED)
    if name == "patchy":
        assert {a for response in walked for a in response.accepted} == set(range(DRAFTED + 1))
        cut = [c == a for response in walked for c, a in zip(response.committed, response.accepted, strict=True)]
        assert any(cut)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_the_end_and_the_length(kind, data):
    here = world(kind)
    with ends(here.target):
        free = greedy_trunks(here.target, [trunk.prompt for trunk in here.trunks[:3]])
    said = sorted({token for trunk in free for token in trunk.tokens[trunk.first :]})
    name, length = data.draw(st.sampled_from(DRAFTERS)), data.draw(st.integers(1, LENGTH))
    with ends(here.target, *data.draw(st.sets(st.sampled_from(said), max_size=2))):
        trunks = greedy_trunks(here.target, [trunk.prompt for trunk in here.trunks[:3]], length)
        walked = walk(here.drafters[name], [Lesson(trunk) for trunk in trunks], here.store(), slots=BLOCK * 4)
        assert walked == really(here, name, trunks, length)


@pytest.mark.parametrize("most", range(1, DRAFTED + 1))
def test_a_round_may_verify_its_first_drafts_only(most):
    here = world("llama")
    drafter = here.drafters["patchy"]
    walked = walk(drafter, here.lessons(), here.store(), at_most=most)
    whole = walk(drafter, here.lessons(), here.store())
    if most == DRAFTED:
        assert [(one.committed, one.accepted) for one in walked] == [(one.committed, one.accepted) for one in whole]
    else:
        assert acceptance(walked).tau_pooled < acceptance(whole).tau_pooled
    lessons, store = here.lessons(), here.store()
    store.fill(lessons)
    for lesson, response in zip(lessons, walked, strict=True):
        anchors = anchors_of(lesson.trunk, here.target.device)
        runs = greedy_run(*drafted_rows(drafter, lesson, anchors), drafter.readout).tolist()
        place, left = 0, len(runs)
        for committed, accepted in zip(response.committed, response.accepted, strict=True):
            assert accepted == min(runs[place], most, left)
            assert committed == min(accepted + 1, left)
            place, left = place + committed, left - committed
        assert left == 0
        assert set(response.lengths) == {most}


def test_neither_slots_nor_budget_nor_order_matter():
    here = world("llama")
    wanted = walk(here.drafters["patchy"], here.lessons(), here.store())
    for slots in (1, BLOCK, 3 * BLOCK + 1):
        assert walk(here.drafters["patchy"], here.lessons(), here.store(budget=0), slots=slots) == wanted
    assert walk(here.drafters["patchy"], here.lessons()[::-1], here.store())[::-1] == wanted
    lessons, store = here.lessons(), here.store(budget=0)
    walk(here.drafters["patchy"], lessons, store)
    assert all(lesson.features is None for lesson in lessons)


def test_a_walk_moves_no_weight_and_leaves_no_graph():
    here = world("llama")
    drafter = here.drafters["half"]
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    lessons = here.lessons()
    walk(drafter, lessons, here.store())
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())
    assert all(not lesson.features.requires_grad for lesson in lessons)


def test_one_token_is_no_step():
    here = world("llama")
    trunk = here.trunks[0]
    short = replace(trunk, tokens=trunk.tokens[: trunk.first + 1], mask=trunk.mask[: trunk.first + 1], finished=False)
    (response,) = walk(here.drafters["half"], [Lesson(short)], here.store())
    assert (response.committed, response.accepted) == ((), ())


def test_several_responses_in_one_trunk_are_refused():
    here = world("llama")
    mask = (False, True, True, False, True, True)
    trunk = Trunk("talk", "s", 0, (7, 8, 9, 10, 11, 12), mask, True)
    with pytest.raises(InputError, match="several responses") as caught:
        walk(here.drafters["half"], [*here.lessons(), Lesson(trunk)], here.store())
    assert caught.value.where == "talk"
    assert "regenerate" in caught.value.fix


# speed ---------------------------------------------------------------------------------------------------------------
@pytest.fixture
def clock(monkeypatch):
    """A clock by which everything timed takes one second."""
    ticks = itertools.count()
    monkeypatch.setattr(speed.time, "perf_counter", lambda: float(next(ticks)))


def asked(here):
    return [(f"{trunk.id}#0", trunk.set, Request(trunk.prompt)) for trunk in here.trunks]


@pytest.mark.parametrize("kind", KINDS)
def test_compare_at_batch_one(kind, clock):
    here, told = world(kind), []
    drafters = [(name, here.drafters[name]) for name in ("untrained", "patchy")]
    plain, arms = compare(
        here.target, drafters, asked(here), Options(LENGTH, batch_size=1), advance=lambda *at: told.append(at)
    )
    tokens = sum(len(trunk) - trunk.first - 1 for trunk in here.trunks)
    assert told == [(n, 15) for n in range(1, 16)]
    assert (plain.name, plain.seconds, plain.tokens, plain.rounds) == ("plain", 5.0, tokens, tokens)
    assert [g.tokens for g in plain.generations] == [list(t.tokens[t.first :]) for t in here.trunks]
    assert plain.ms_per_round == pytest.approx(5000 / tokens)
    assert plain.tokens_per_s == pytest.approx(tokens / 5)
    for arm, (name, drafter) in zip(arms, drafters, strict=True):
        walked = walk(drafter, here.lessons(), here.store())
        steps = sum(len(response.committed) for response in walked)
        assert arm.name == name
        assert arm.acceptance == acceptance(walked)
        assert arm.tokens_per_s == pytest.approx(tokens / 5)
        assert arm.ms_per_round == pytest.approx(5000 / steps)
        assert arm.round_cost == pytest.approx(tokens / steps)
        assert arm.speedup == pytest.approx(arm.acceptance.tau_pooled / arm.round_cost)  # by batches of one
        assert arm.rows == [
            {"kind": "decode", "arm": name, "id": r.id, "set": r.set, "committed": r.committed, "accepted": r.accepted,
             "drafted": DRAFTED}
            for r in walked
        ]  # fmt: skip
        json = arm.to_json()
        assert json["speedup"] == arm.speedup
        assert json["break_even_tau"] == json["round_cost"] == arm.round_cost
        assert set(json["sets"]) == {"a", "b"}


def test_compare_in_batches(clock):
    here = world("qwen3")
    plain, (arm,) = compare(
        here.target, [("patchy", here.drafters["patchy"])], asked(here), Options(LENGTH, batch_size=2)
    )
    lengths = [len(trunk) - trunk.first - 1 for trunk in here.trunks]
    batches = [lengths[:2], lengths[2:4], lengths[4:]]
    assert (plain.seconds, plain.tokens, plain.rounds) == (3.0, sum(lengths), sum(map(max, batches)))
    walked = walk(here.drafters["patchy"], here.lessons(), here.store())
    steps = [len(response.committed) for response in walked]
    rounds = max(steps[:2]) + max(steps[2:4]) + steps[4]
    assert arm.ms_per_round == pytest.approx(3000 / rounds)
    assert arm.round_cost == pytest.approx(arm.ms_per_round / plain.ms_per_round)
    assert arm.speedup == pytest.approx(arm.tokens_per_s / plain.tokens_per_s)
    assert [row["id"] for row in arm.rows] == [name for name, _, _ in asked(here)]


def test_a_response_that_ends_in_prefill_counts_neither_token_nor_round(clock):
    here = world("llama")
    first = here.trunks[0].tokens[here.trunks[0].first]
    with ends(here.target, first):
        trunks = greedy_trunks(here.target, [trunk.prompt for trunk in here.trunks], 6)
        plain, (arm,) = compare(here.target, [("half", here.drafters["half"])], asked(here), Options(6, batch_size=1))
        tokens = sum(len(trunk) - trunk.first - 1 for trunk in trunks)
        assert len(trunks[0]) - trunks[0].first == 1
        assert plain.tokens == plain.rounds == tokens
        assert arm.speedup == pytest.approx(arm.acceptance.tau_pooled / arm.round_cost)
        with pytest.raises(InputError, match="verify step"):
            compare(here.target, [("half", here.drafters["half"])], asked(here)[:1], Options(6, batch_size=1))


def test_arms_may_have_any_name(clock):
    here = world("llama")
    drafters = [("plain", here.drafters["untrained"]), ("plain", here.drafters["overfit"])]
    plain, arms = compare(here.target, drafters, asked(here), Options(LENGTH, batch_size=5))
    assert plain.seconds == 1.0
    for arm, (_, drafter) in zip(arms, drafters, strict=True):
        assert arm.acceptance == acceptance(walk(drafter, here.lessons(), here.store()))


def test_real_time_is_positive():
    here = world("llama")
    plain, (arm,) = compare(here.target, [("half", here.drafters["half"])], asked(here)[:2], Options(5))
    assert plain.seconds > 0
    assert min(arm.tokens_per_s, arm.ms_per_round, arm.round_cost, arm.speedup) > 0
