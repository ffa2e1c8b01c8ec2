"""Features of trunks: computed once, kept within a budget, made anew under new weights."""

from __future__ import annotations

import pytest
import torch

from draftloop.supervise.lesson import FeatureStore, Lesson
from tests.lessons import (
    KINDS,
    Counted,
    close,
    plain_hidden,
    rolled,
    same_law,
    world,
)


# features ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_filling_in_mixed_lengths_equals_one_by_one(kind):
    here = world(kind)
    for at_once in (1, 40, 4096):
        together = here.lessons()
        here.store().fill(together, tokens_at_once=at_once)
        for lesson in together:
            alone = Lesson(lesson.trunk)
            here.store().fill([alone])
            assert close(lesson.features, alone.features)
            assert close(lesson.hidden, alone.hidden)
            assert same_law(here.target, lesson.hidden, plain_hidden(here.target, lesson.trunk.tokens)[:-1])


def test_the_store_keeps_its_budget():
    here = world("llama")
    lessons = here.lessons()
    size = [(len(t) - 1) * here.target.hidden_size * 3 * 4 for t in here.trunks]  # two taps and the hidden row
    target = Counted(here.target)
    store = FeatureStore(target, (0, 2), sum(size[:2]) + 5)
    for lesson in lessons:
        store.fill([lesson])
        assert lesson.nbytes == size[lessons.index(lesson)]
        store.release([lesson])
    kept = [lesson for lesson in lessons if lesson.features is not None]
    assert kept == lessons[:2]
    assert all(lesson.hidden is None for lesson in lessons[2:])
    assert sum(lesson.nbytes for lesson in lessons) <= store.budget
    assert target.texts == 5
    first = [lesson.features.clone() for lesson in kept]
    store.fill(lessons)
    assert target.texts == 8  # the three that were let go
    assert all(torch.equal(a, lesson.features) for a, lesson in zip(first, kept, strict=True))
    store.release(lessons)
    store.release(lessons)  # again: nothing is counted twice
    assert [lesson.features is not None for lesson in lessons] == [True, True, False, False, False]
    nothing = FeatureStore(Counted(here.target), (0, 2), 0)
    nothing.fill(lessons[2:])
    nothing.release(lessons[2:])
    assert all(lesson.features is None for lesson in lessons[2:])


def test_the_store_batches_within_its_limit():
    here = world("llama")
    target = Counted(here.target)
    store = FeatureStore(target, (0, 2), 1e9)
    store.fill(here.lessons(), tokens_at_once=50)
    assert target.texts == 5
    assert target.widest <= 50


def test_new_weights_of_the_target_make_features_anew():
    here = world("llama")
    target = Counted(here.target)
    store = FeatureStore(target, (0, 2), 1e9)
    lessons = here.lessons()
    store.fill(lessons)
    store.release(lessons[:4])
    store.fill(lessons)
    assert target.texts == 5
    target.version += 1
    store.fill(lessons)
    assert target.texts == 10  # the one that was in use when they changed, too
    store.release(lessons)
    store.fill(lessons)
    assert target.texts == 10
    assert all(lesson.features is not None for lesson in lessons)


def test_a_rollout_keeps_its_rows_whatever_the_budget():
    here = world("llama")
    lessons = rolled("llama")
    store = here.store(budget=0)
    store.fill(lessons)
    store.release(lessons)
    assert all(lesson.features is not None and lesson.verified is not None for lesson in lessons)
