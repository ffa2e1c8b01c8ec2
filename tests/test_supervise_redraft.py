"""What the current drafter drafts anew, and the labels of it, against slow recomputation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

from draftloop.decode.loop import decode
from draftloop.decode.trace import Options, Request
from draftloop.supervise.propose import greedy_run
from tests.lessons import (
    DRAFTED,
    DRAFTERS,
    KINDS,
    plain_hidden,
    rolled,
    same_law,
    scored,
    stage,
    two_turns,
    world,
)

CPU = torch.device("cpu")
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


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
