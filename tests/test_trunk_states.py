"""Trunk states: within the store's budget, of the present weights, and the rows stay the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftloop.supervise.lesson import FeatureStore, Lesson
from draftloop.supervise.score import scored_rows
from draftloop.target.cache import TrunkState
from draftloop.target.load import load_target
from tests.tiny import tiny_model
from tests.trees import (
    EXACT,
    awkward,
    batches,
    blocks_of,
    keep,
    lesson_of,
    loud,
    quick,
    text,
    worst,
)

pytestmark = pytest.mark.specopd

# ------------------------------------------------------------------------------------------------ trunk states


@pytest.mark.parametrize("family", ["full", "mixed"])
@quick
@given(part=st.floats(0, 1.3), batch=batches())
def test_a_store_keeps_states_within_its_budget_and_the_rows_stay_the_same(family, part, batch):
    target = loud(family)
    lessons, drafted, cells, budget = batch
    lessons = [Lesson(one.trunk) for one in lessons]
    blocks = blocks_of(cells, drafted)
    want = scored_rows(target, lessons, blocks)
    a_token = 8 * (4 * 2 * 2 * target.config.head_dim + 48)
    a_text = 8 * 48 * 2
    whole = sum(a_token * len(one.trunk) + a_text * (len(one.trunk) - 1) for one in lessons)
    store = FeatureStore(target, (0, 2), part * whole, keep_state=True)
    for _ in range(3):
        store.fill(lessons, 40)
        states = [one.state.nbytes for one in lessons if one.state is not None]
        assert sum(states) <= store.budget
        assert torch.allclose(scored_rows(target, lessons, blocks, budget), want, atol=1e-9)
        store.release(lessons)
        assert sum(one.nbytes for one in lessons) <= store.budget
    if part >= 1:
        assert all(one.state is not None for one in lessons)
        assert sum(one.nbytes for one in lessons) == whole
        assert store.left_out == 0
    if part == 0:
        assert not any(one.state for one in lessons)
        assert store.left_out == 3 * len(lessons)


def test_features_stay_before_states_do():
    target = loud("full")
    one, two = lesson_of(text(20, 1)), lesson_of(text(20, 2), "b")
    probe = FeatureStore(target, (0, 2), 1e9, keep_state=True)
    probe.fill([one])
    whole, rows = one.nbytes, one.features.nbytes + one.hidden.nbytes
    one.forget()
    store = FeatureStore(target, (0, 2), whole + rows, keep_state=True)
    for lesson in (one, two):
        store.fill([lesson])
        store.release([lesson])
    assert one.state is not None
    assert two.state is None
    assert two.features is not None


def test_states_of_other_weights_do_not_count():
    target = load_target(tiny_model("qwen3").double())
    lessons, cells = awkward()
    store = FeatureStore(target, (0, 2), 1e9, keep_state=True)
    store.fill(lessons)
    old = lessons[0].state
    assert isinstance(old, TrunkState)
    with torch.no_grad():
        target.model.model.layers[1].self_attn.v_proj.weight.mul_(1.5)
    target.touch()
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 6))) < EXACT
    store.fill(lessons)
    assert lessons[0].state.version == target.version != old.version
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 6))) < EXACT


def test_without_keep_state_nothing_changes():
    target = loud("full")
    one = lesson_of(text(20, 1))
    store = FeatureStore(target, (0, 2), 1e9)
    store.fill([one])
    assert one.state is None
    kept = Lesson(one.trunk)
    keep(target, [kept])
    assert torch.allclose(kept.features, one.features, atol=1e-10)
    assert torch.allclose(kept.hidden, one.hidden, atol=1e-10)
    assert kept.hidden.shape == one.hidden.shape
