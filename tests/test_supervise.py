"""Anchors, proposals, teacher rows, features and rollouts against slow recomputation."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftloop.core.blocks import Blocks
from draftloop.core.draws import key_of
from draftloop.core.errors import InputError
from draftloop.core.law import Sampling
from draftloop.core.weights import write_tensors
from draftloop.data.trunk import Trunk
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options, Request, Step
from draftloop.recipe import RolloutPart, StagePart
from draftloop.supervise.anchors import choose
from draftloop.supervise.batch import supervise
from draftloop.supervise.lesson import FeatureStore, Lesson
from draftloop.supervise.propose import greedy_run, recorded_blocks, trunk_blocks, trunk_run
from draftloop.supervise.rollout import load_rollout, roll_out, save_rollout
from draftloop.supervise.score import recorded_rows, scored_rows
from tests.lessons import DRAFTED, DRAFTERS, KINDS, LENGTH, close, plain_hidden, rolled, same_law, world

CPU = torch.device("cpu")
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

masks = st.lists(st.booleans(), min_size=1, max_size=24).map(lambda rest: (False, *rest)).filter(any)


def trunk_of(mask, *, id="m", tokens=None) -> Trunk:
    return Trunk(id, "s", 0, tuple(tokens or range(100, 100 + len(mask))), tuple(mask), True)


def step_at(anchor: int) -> Step:
    return Step(anchor, (0,) * DRAFTED, (0.0,) * DRAFTED, 0, 1)


def two_turns(here) -> Lesson:
    tokens = here.trunks[1].tokens
    mask = (False, False, *[True] * 6, False, False, *[True] * (len(tokens) - 10))
    return Lesson(Trunk("two", "s", 0, tokens, mask, True))


def stage(**cells) -> StagePart:
    return StagePart(name="s", **cells)


def scored(part, lessons, drafter, here, *, visits=None, seed=0, need_teacher=True):
    return supervise(
        part, lessons, visits or [0] * len(lessons), target=here.target, drafter=drafter, store=here.store(),
        seed=seed, need_teacher=need_teacher,
    )  # fmt: skip


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


# drafted anew --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_redraft_with_unchanged_weights_repeats_the_rollout(kind, name):
    here, drafter = world(kind), world(kind).drafters[name]
    cells = {"trunks": "rollout", "anchors": "rollout", "anchors_per_sequence": 99}
    lessons = rolled(kind, name)
    old = scored(stage(proposals="recorded", **cells), lessons, drafter, here)
    new = scored(stage(proposals="redraft", **cells), lessons, drafter, here)
    assert torch.equal(new.blocks.tokens, old.blocks.tokens)
    room = torch.tensor([len(lessons[r].trunk) - 1 - a for r, a in zip(*_cells(old.blocks), strict=True)])
    inside = torch.arange(DRAFTED) < room.unsqueeze(1)
    assert torch.equal(new.blocks.valid, old.blocks.valid & inside)  # a redraft teaches nothing behind the trunk's end
    assert torch.equal(new.blocks.accepted, old.blocks.accepted)
    assert same_law(here.target, new.teacher[new.blocks.valid], old.teacher[new.blocks.valid])
    assert torch.equal(new.labels[new.blocks.valid], old.labels[new.blocks.valid])


def _cells(blocks):
    return blocks.row.tolist(), blocks.anchor.tolist()


@pytest.mark.parametrize("trunks", ["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_redraft_from_any_anchor_is_verified_on_its_own_prefix(kind, trunks):
    here = world(kind)
    target, ends = here.target, set(here.target.eos_ids)
    lessons = [*here.lessons(), two_turns(here)] if trunks == "greedy" else rolled(kind, temperature=1.0)
    drafter = here.drafters["patchy"]
    found = scored(stage(proposals="redraft", anchors_per_sequence=7), lessons, drafter, here, seed=4)
    store = here.store()
    store.fill(lessons)
    seen = set()
    for i, (row, anchor) in enumerate(zip(*_cells(found.blocks), strict=True)):
        trunk = lessons[row].trunk
        token = torch.tensor([[trunk.tokens[anchor]]])
        alone = drafter(lessons[row].features[:anchor].unsqueeze(0), torch.tensor([[anchor]]), token)[0, 0]
        drafts = target.readout.logits(alone).argmax(-1).tolist()
        assert found.blocks.tokens[i].tolist() == drafts
        prefix, run, alive = list(trunk.tokens[: anchor + 1]), 0, True
        for k, draft in enumerate(drafts):
            gapless = all((*trunk.mask, False)[anchor + 1 : anchor + k + 2]) and anchor + k + 1 < len(trunk)
            there = gapless and not ends & set(drafts[:k])
            assert bool(found.blocks.valid[i, k]) == there
            row_p = plain_hidden(target, prefix)[-1]
            choice = int(target.readout.logits(row_p).argmax())
            alive = alive and choice == draft
            run += alive and there
            assert bool(found.blocks.accepted[i, k]) == (alive and there)
            if there:
                assert same_law(target, found.teacher[i, k], row_p)
                if alive or not any(found.blocks.valid[i, :k] & ~found.blocks.accepted[i, :k]):
                    assert int(found.labels[i, k]) == choice  # what greedy verification commits here
            prefix.append(draft)
        seen.add(run)
    if trunks == "greedy":
        assert {0, 1, DRAFTED} <= seen


def test_greedy_run_reads_no_row_behind_the_first_difference():
    here = world("llama")
    reads = []

    class Counting:
        def logits(self, hidden):
            reads.append(len(hidden))
            return here.target.readout.logits(hidden)

    hidden = plain_hidden(here.target, here.trunks[0].tokens)[: 3 * DRAFTED].view(3, DRAFTED, -1)
    own = here.target.readout.logits(hidden).argmax(-1)
    wrong = own.clone()
    wrong[0, 0] += 1
    wrong[1, 2] += 1
    assert greedy_run(hidden, wrong, Counting()).tolist() == [0, 2, DRAFTED]
    assert reads == [3, 2, 2, 1]
    assert greedy_run(hidden[:0], wrong[:0], Counting()).tolist() == []


# labels --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_what_reads_labels_alone_has_one_at_every_position(kind):
    """Cross-entropy on recorded or redrafted blocks: every position taught lies on the trunk."""
    here = world(kind)
    lessons = rolled(kind)
    cells = {"trunks": "rollout", "anchors": "rollout", "anchors_per_sequence": 99, "objective": {"kind": "ce"}}
    for proposals in ("recorded", "redraft"):
        part = stage(proposals=proposals, **cells)
        found = scored(part, lessons, here.drafters["patchy"], here, need_teacher=False)
        for i, k in found.blocks.valid.nonzero().tolist():
            trunk = lessons[int(found.blocks.row[i])].trunk
            place = int(found.blocks.anchor[i]) + k + 1
            assert place < len(trunk)
            assert int(found.labels[i, k]) == trunk.tokens[place]


@pytest.mark.parametrize("kind", KINDS)
def test_labels_of_a_redraft_make_one_text(kind):
    """On a sampled trunk the redraft may leave it: then nothing is taught behind what was committed."""
    here = world(kind)
    lessons = rolled(kind, temperature=1.0)
    part = stage(proposals="redraft", anchors="all", objective={"kind": "ce"})
    left = 0
    for name in ("patchy", "overfit"):
        found = scored(part, lessons, here.drafters[name], here, need_teacher=False)
        full = scored(part, lessons, here.drafters[name], here)
        for i, (row, anchor) in enumerate(zip(*_cells(found.blocks), strict=True)):
            trunk = lessons[row].trunk
            n = int(found.blocks.valid[i].sum())
            assert bool(found.blocks.valid[i, :n].all())
            assert n >= 1
            run = int(full.blocks.accepted[i].sum())
            request = Request(trunk.tokens[: anchor + 1])
            (greedy,) = decode(here.target, None, [request], Options(DRAFTED))
            own = trunk.tokens[anchor + 1 : anchor + 1 + n]
            labels = found.labels[i, :n].tolist()
            committed = min(run + 1, n)
            assert labels[:committed] == greedy.tokens[:committed]
            if n > committed:  # only where the trunk goes on from what was committed
                assert tuple(labels) == own
            left += tuple(labels) != own
            assert torch.equal(found.labels[i, :n], full.labels[i, :n])
    assert left > 20


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


class Counted:
    """A target that counts its forwards."""

    def __init__(self, target):
        self.inner, self.version, self.texts, self.widest = target, 0, 0, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def extend(self, cache, ids, positions, taps=()):
        self.texts += len(ids)
        self.widest = max(self.widest, ids.numel())
        return self.inner.extend(cache, ids, positions, taps)


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
