"""Anchors, proposals, teacher rows against slow recomputation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftloop.core.blocks import Blocks
from draftloop.core.errors import InputError
from draftloop.data.trunk import Trunk
from draftloop.decode.trace import Step
from draftloop.supervise.anchors import choose
from draftloop.supervise.lesson import Lesson
from draftloop.supervise.propose import recorded_blocks, trunk_blocks, trunk_run
from draftloop.supervise.score import recorded_rows, scored_rows
from tests.lessons import (
    DRAFTED,
    DRAFTERS,
    KINDS,
    LENGTH,
    close,
    plain_hidden,
    rolled,
    same_law,
    scored,
    stage,
    trunk_of,
    two_turns,
    world,
)

CPU = torch.device("cpu")
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

masks = st.lists(st.booleans(), min_size=1, max_size=24).map(lambda rest: (False, *rest)).filter(any)


def step_at(anchor: int) -> Step:
    return Step(anchor, (0,) * DRAFTED, (0.0,) * DRAFTED, 0, 1)


# anchors -------------------------------------------------------------------------------------------------------------
@quick
@given(mask=masks, count=st.integers(1, 30), seed=st.integers(0, 9), visit=st.integers(0, 9))
def test_anchors_are_supervised_and_so_is_what_follows(mask, count, seed, visit):
    lesson = Lesson(trunk_of(mask))
    pool = [a for a in range(len(mask)) if mask[a] and a + 1 < len(mask) and mask[a + 1]]
    assert lesson.anchors() == pool
    if not pool:
        for policy in ("random", "all", "rollout"):
            with pytest.raises(InputError, match="too short") as caught:
                choose(policy, lesson, count, seed, visit)
            assert caught.value.where == "m"
        return
    assert choose("all", lesson, count, seed, visit) == pool
    drawn = choose("random", lesson, count, seed, visit)
    assert drawn == sorted(set(drawn))  # without replacement, in order
    assert len(drawn) == min(count, len(pool))
    assert set(drawn) <= set(pool)
    assert drawn == choose("random", Lesson(trunk_of(mask)), count, seed, visit)  # nothing but the key counts
    last_of_prompt = {a for a in range(len(mask) - 1) if not mask[a] and mask[a + 1]}
    assert not last_of_prompt & set(drawn)


def test_the_first_anchor_is_the_first_response_token():
    lesson = Lesson(trunk_of((False,) * 4 + (True,) * 6))
    assert lesson.anchors() == [4, 5, 6, 7, 8]
    two_turns = Lesson(trunk_of((False, True, True, True, False, False, True, True, False, True)))
    assert two_turns.anchors() == [1, 2, 6]


def test_random_anchors_are_redrawn_per_visit_and_fair():
    lesson = Lesson(trunk_of((False,) + (True,) * 11))
    pool = lesson.anchors()
    visits = [choose("random", lesson, 3, 5, visit) for visit in range(400)]
    assert len(set(map(tuple, visits))) > 60  # of 120
    counts = [sum(a in drawn for drawn in visits) for a in pool]
    expected, deviation = 400 * 3 / len(pool), (400 * 0.3 * 0.7) ** 0.5
    assert all(abs(n - expected) < 4.5 * deviation for n in counts), counts
    assert visits[0] != choose("random", lesson, 3, 6, 0) or visits[1] != choose("random", lesson, 3, 6, 1)
    others = [choose("random", Lesson(trunk_of(lesson.trunk.mask, id=f"m{i}")), 3, 5, 0) for i in range(8)]
    assert len(set(map(tuple, others))) > 1  # keyed by the prompt
    samples = [choose("random", Lesson(replace(lesson.trunk, sample=i)), 3, 5, 0) for i in range(8)]
    assert len(set(map(tuple, samples))) > 1  # and the sample


def test_rollout_anchors_are_the_recorded_ones():
    places = (3, 4, 7, 9, 12)
    lesson = Lesson(trunk_of((False,) * 3 + (True,) * 12), steps=tuple(map(step_at, places)))
    assert choose("rollout", lesson, 16, 0, 0) == list(places)
    drawn = [choose("rollout", lesson, 2, 0, visit) for visit in range(40)]
    assert all(len(d) == 2 and set(d) <= set(places) and d == sorted(d) for d in drawn)
    assert {a for d in drawn for a in d} == set(places)


@pytest.mark.parametrize("kind", KINDS)
def test_random_anchors_do_not_depend_on_the_batch(kind):
    here = world(kind)
    part = stage(method="sft", anchors_per_sequence=4)
    drafter = here.drafters["half"]
    together = scored(part, here.lessons(), drafter, here, visits=[3] * 5, need_teacher=False).blocks
    for row, lesson in enumerate(here.lessons()):
        alone = scored(part, [lesson], drafter, here, visits=[3], need_teacher=False).blocks
        mine = together.row == row
        for name in ("anchor", "tokens", "valid", "accepted"):
            assert torch.equal(getattr(together, name)[mine], getattr(alone, name)), name
        assert alone.anchor.tolist() == choose("random", lesson, 4, 0, 3)  # of this seed and visit


# proposals of the trunk ----------------------------------------------------------------------------------------------
@quick
@given(masks=st.lists(masks, min_size=1, max_size=3), drafted=st.integers(1, 6))
def test_trunk_blocks_are_the_next_tokens_while_supervised_without_a_gap(masks, drafted):
    lessons = [Lesson(trunk_of(mask, id=f"m{i}")) for i, mask in enumerate(masks)]
    cells = [(row, anchor) for row, lesson in enumerate(lessons) for anchor in lesson.anchors()]
    blocks = trunk_blocks(lessons, cells, drafted, CPU)
    assert blocks.row.tolist() == [row for row, _ in cells]
    assert blocks.anchor.tolist() == [anchor for _, anchor in cells]
    assert blocks.tokens.shape == blocks.valid.shape == (len(cells), drafted)
    for i, (row, anchor) in enumerate(cells):
        trunk = lessons[row].trunk
        for k in range(1, drafted + 1):
            behind = range(anchor + 1, anchor + k + 1)
            there = all(place < len(trunk) and trunk.mask[place] for place in behind)
            assert bool(blocks.valid[i, k - 1]) == there
            if there:
                assert int(blocks.tokens[i, k - 1]) == trunk.tokens[anchor + k]
    assert torch.equal(blocks.valid, blocks.accepted)
    assert not bool(blocks.first_rejected.any())


@pytest.mark.parametrize("kind", KINDS)
def test_teacher_rows_of_trunk_proposals_are_plain_rows(kind):
    here = world(kind)
    lessons = [*here.lessons(), two_turns(here)]
    found = scored(stage(method="off-policy-kl", anchors="all"), lessons, here.drafters["half"], here)
    assert found.teacher is not None
    valid = found.blocks.valid
    assert torch.equal(found.labels[valid], found.blocks.tokens[valid])
    assert bool((found.labels[~valid] == -1).all())  # no label is known there
    plain = [plain_hidden(here.target, lesson.trunk.tokens) for lesson in lessons]
    assert len(found.blocks.row) == sum(len(lesson.anchors()) for lesson in lessons)
    for i, k in found.blocks.valid.nonzero().tolist():
        row, anchor = int(found.blocks.row[i]), int(found.blocks.anchor[i])
        assert same_law(here.target, found.teacher[i, k], plain[row][anchor + k])


# what was recorded ---------------------------------------------------------------------------------------------------
def slowly(here, trunk: Trunk, step: Step) -> tuple[list[bool], list[bool], list[torch.Tensor]]:
    """Valid, accepted and teacher rows of one greedy verification, by plain forwards and by hand."""
    target, ends = here.target, set(here.target.eos_ids)
    prefix, rows, run = list(trunk.tokens[: step.anchor + 1]), [], 0
    for token in step.proposed:
        rows.append(plain_hidden(target, prefix)[-1])
        choice = int(target.readout.logits(rows[-1]).argmax())
        if run == len(rows) - 1 and choice == token:
            run += 1
        prefix.append(token)
    left = trunk.first + LENGTH - 1 - step.anchor  # tokens that the limit still allows
    committed = min(run + 1, left)
    for k, token in enumerate(step.proposed[:run]):
        if token in ends:
            committed = min(committed, k + 1)
    seen = committed if committed <= run else DRAFTED
    valid = [k < seen and not ends & set(step.proposed[:k]) for k in range(DRAFTED)]
    accepted = [ok and k < min(run, committed) for k, ok in enumerate(valid)]
    assert (step.accepted, step.committed) == (run, committed)
    return valid, accepted, rows


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_blocks_equal_a_slow_recomputation(kind):
    here = world(kind)
    eos = here.target.eos_ids
    runs, cut_by = set(), set()
    for name in DRAFTERS[1:]:
        lessons = rolled(kind, name)
        cells = [(row, step.anchor) for row, lesson in enumerate(lessons) for step in lesson.steps]
        blocks = recorded_blocks(lessons, cells, DRAFTED, eos, CPU)
        stored, anew = recorded_rows(lessons, blocks), scored_rows(here.target, lessons, blocks)
        for i, (row, anchor) in enumerate(cells):
            lesson = lessons[row]
            step = lesson.steps[lesson.step_at[anchor]]
            valid, accepted, rows = slowly(here, lesson.trunk, step)
            assert blocks.tokens[i].tolist() == list(step.proposed)
            assert blocks.valid[i].tolist() == valid
            assert blocks.accepted[i].tolist() == accepted
            for k in range(DRAFTED):
                if valid[k]:
                    assert same_law(here.target, stored[i, k], rows[k])
                    assert same_law(here.target, anew[i, k], rows[k])
                else:
                    assert not bool(anew[i, k].any())
            runs.add(step.accepted)
            if step.committed <= step.accepted:
                cut_by.add("end" if step.proposed[step.committed - 1] in eos else "length")
        assert [lesson.trunk.tokens for lesson in lessons] == [trunk.tokens for trunk in here.trunks]  # lossless
    assert runs == set(range(DRAFTED + 1))
    assert cut_by == {"end", "length"}


def test_nothing_behind_a_proposed_end_is_taught_and_a_cut_block_teaches_what_was_committed():
    trunk = trunk_of((False,) + (True,) * 9)
    eos, k = 7, DRAFTED
    cases = [  # proposed, accepted, committed -> valid, accepted
        ((5, 7, 6, 6), 0, 1, "1100", "0000"),  # a rejected end: itself, nothing behind it
        ((5, 5, 5, 7), 2, 3, "1111", "1100"),
        ((7, 7, 5, 5), 0, 1, "1000", "0000"),
        ((5, 7, 6, 6), 3, 2, "1100", "1100"),  # an accepted end: the drafts behind it were never committed
        ((7, 5, 5, 5), 4, 1, "1000", "1000"),
        ((5, 5, 5, 5), 4, 2, "1100", "1100"),  # cut by the length limit
        ((5, 5, 5, 5), 2, 2, "1100", "1100"),  # its correction was cut off
        ((5, 5, 5, 5), 4, 4, "1111", "1111"),  # its bonus was cut off
        ((5, 5, 5, 5), 4, 5, "1111", "1111"),
        ((5, 5, 5, 5), 1, 2, "1111", "1000"),
    ]
    for proposed, accepted, committed, valid, kept in cases:
        step = Step(1, proposed, (-0.5, -1.0, -1.5, -2.0), accepted, committed)
        blocks = recorded_blocks([Lesson(trunk, steps=(step,))], [(0, 1)], k, (eos,), CPU)
        assert "".join(str(int(x)) for x in blocks.valid[0]) == valid, (proposed, accepted, committed)
        assert "".join(str(int(x)) for x in blocks.accepted[0]) == kept, (proposed, accepted, committed)
        assert blocks.log_q is not None
        assert blocks.log_q[0].tolist() == [-0.5, -1.0, -1.5, -2.0]


@pytest.mark.parametrize("rule", ["match", "ratio"])
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_rollouts_keep_their_rows_too(kind, rule):
    here = world(kind)
    lessons = rolled(kind, temperature=1.0, rule=rule)
    cells = [(row, step.anchor) for row, lesson in enumerate(lessons) for step in lesson.steps]
    blocks = recorded_blocks(lessons, cells, DRAFTED, here.target.eos_ids, CPU)
    stored, anew = recorded_rows(lessons, blocks), scored_rows(here.target, lessons, blocks)
    assert same_law(here.target, stored[blocks.valid], anew[blocks.valid])
    for lesson in lessons:
        at = lesson.trunk.first
        for step in lesson.steps:  # accepted drafts are the trunk's next tokens
            assert step.anchor == at
            at += step.committed
            kept = min(step.accepted, step.committed)
            assert lesson.trunk.tokens[step.anchor + 1 : step.anchor + 1 + kept] == step.proposed[:kept]
        assert at == len(lesson.trunk) - 1


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_branches_score_as_plain_forwards_do(kind, data):
    """Any proposals on any trunks: one tree forward = a plain forward of every trunk prefix + own drafts."""
    here = world(kind)
    draw = data.draw
    lessons = []
    for i in range(draw(st.integers(1, 3))):
        size = draw(st.integers(2, 14))
        tokens = draw(st.lists(st.integers(0, 60), min_size=size, max_size=size))
        lessons.append(Lesson(trunk_of((False,) + (True,) * (size - 1), id=f"m{i}", tokens=tokens)))
    drafted = draw(st.integers(1, 5))
    rows, anchors, proposed, lengths = [], [], [], []
    for _ in range(draw(st.integers(1, 6))):
        row = draw(st.integers(0, len(lessons) - 1))
        trunk = lessons[row].trunk
        anchor = draw(st.integers(0, len(trunk) - 1))
        own = list(trunk.tokens[anchor + 1 :][: draw(st.integers(0, drafted))])  # so far along the trunk
        rest = drafted - len(own)
        rows.append(row)
        anchors.append(anchor)
        proposed.append(own + draw(st.lists(st.integers(0, 60), min_size=rest, max_size=rest)))
        lengths.append(draw(st.integers(1, drafted)))
    valid = torch.arange(drafted) < torch.tensor(lengths).unsqueeze(1)
    blocks = Blocks(torch.tensor(rows), torch.tensor(anchors), torch.tensor(proposed), valid, valid)
    found = scored_rows(here.target, lessons, blocks)
    run = trunk_run(lessons, blocks)
    for i, (row, anchor) in enumerate(zip(rows, anchors, strict=True)):
        tokens = lessons[row].trunk.tokens
        prefix = tokens[: anchor + 1]
        along = [d == t for d, t in zip(proposed[i][: lengths[i]], tokens[anchor + 1 :], strict=False)]
        assert int(run[i]) == next((k for k, same in enumerate(along) if not same), len(along))
        plain = plain_hidden(here.target, [*prefix, *proposed[i][: lengths[i] - 1]])[anchor:]
        assert same_law(here.target, found[i, : lengths[i]], plain)
        assert not bool(found[i, lengths[i] :].any())


@pytest.mark.parametrize("kind", KINDS)
def test_features_of_a_rollout_are_those_of_its_trunk(kind):
    here = world(kind)
    for lesson in rolled(kind):
        again = Lesson(lesson.trunk)
        here.store().fill([again])
        assert lesson.features is not None
        assert lesson.features.shape == again.features.shape == (len(lesson.trunk) - 1, 2 * here.target.hidden_size)
        assert close(lesson.features, again.features)
        assert close(lesson.hidden, again.hidden)
