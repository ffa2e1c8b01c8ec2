"""The proposal tree: packed scoring of branches is what a plain forward of each text by itself gives, however packed.

The oracle is the unmodified model's own forward of trunk prefix + branch, without cache, mask or tree of ours. Loud
random models in float64 show a wrong edge many orders above rounding; quiet ones in float32 hold the tight limits.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.core.tree import pack_branches, share_rows
from draftloop.supervise.lesson import Lesson
from draftloop.supervise.score import scored_rows
from draftloop.target.load import load_target
from tests.test_core_tree import plans
from tests.tiny import EOS, VOCAB, tiny_model
from tests.trees import (
    EXACT,
    FAMILIES,
    WINDOW,
    awkward,
    batches,
    blocks_of,
    keep,
    keep_layers,
    lesson_of,
    loud,
    packed_pair,
    quick,
    text,
    worst,
)

pytestmark = pytest.mark.specopd


@pytest.fixture(params=FAMILIES)
def target(request):
    return loud(request.param)


# ------------------------------------------------------------------------------------------------ what is scored


@pytest.mark.parametrize("way", ["recompute", "keep", "some kept"])
@quick
@given(batch=batches())
def test_packed_rows_equal_plain_forwards(target, way, batch):
    lessons, drafted, cells, budget = batch
    lessons = [Lesson(one.trunk) for one in lessons]
    if way != "recompute":
        keep(target, lessons, [way == "keep" or i % 2 for i in range(len(lessons))])
    found = scored_rows(target, lessons, blocks_of(cells, drafted), budget)
    assert worst(target, lessons, cells, found) < EXACT


@pytest.mark.parametrize("kept", [False, True], ids=["recompute", "keep"])
def test_the_awkward_places(target, kept):
    lessons, cells = awkward()
    if kept:
        keep(target, lessons)
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 6))) < EXACT


LIMITS = {torch.float32: 10 * 2.1e-7 / 0.6, torch.float64: 10 * 1.7e-16 / 0.6}  # of the largest logit


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_alone_is_left(family, dtype):
    kind, changes = FAMILIES[family]
    torch.manual_seed(0)
    model = tiny_model(kind, **changes)
    for weight in model.parameters():
        weight.data.mul_(0.2 if weight.dim() > 1 else 1)
    target = load_target(model.to(dtype))
    lessons, cells = awkward()
    blocks = blocks_of(cells, 6)
    again = scored_rows(target, lessons, blocks)
    assert worst(target, lessons, cells, again) < LIMITS[dtype]
    keep(target, lessons)
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks)) < LIMITS[dtype]


@pytest.mark.parametrize("kept", [False, True], ids=["recompute", "keep"])
def test_the_order_of_branches_does_not_matter(target, kept):
    lessons, cells = awkward()
    if kept:
        keep(target, lessons)
    order = torch.randperm(len(cells), generator=torch.Generator().manual_seed(0))
    straight = scored_rows(target, lessons, blocks_of(cells, 6))
    mixed = scored_rows(target, lessons, blocks_of([cells[i] for i in order], 6), 60)
    assert torch.allclose(mixed, straight[order], atol=1e-10)


def test_a_batch_without_branches_feeds_no_branch_and_with_states_nothing(target, monkeypatch):
    lessons, _ = awkward()
    own = lessons[0].trunk.tokens
    cells = [(0, 3, list(own[4:8])), (0, 7, [1]), (1, 2, [])]
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 4))) < EXACT
    keep(target, lessons)
    monkeypatch.setattr(target, "_forward", None)
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 4))) < EXACT


# ------------------------------------------------------------------------------------------------ how it is packed


@quick
@given(data=st.data())
def test_nothing_leaks_within_a_row(target, data):
    """A changed token changes the slots below it and no bit of any other, in a row of several trunks."""
    packed, *_ = packed_pair(target)
    tree = packed.tree
    row = data.draw(st.integers(0, 1))
    slot = data.draw(st.integers(0, tree.tokens.shape[1] - 1))
    tokens = tree.tokens.clone()
    tokens[row, slot] = (tokens[row, slot] + 1) % VOCAB
    before = target.score(tree).hidden
    after = target.score(dataclasses.replace(tree, tokens=tokens)).hidden
    below = torch.zeros_like(tree.tokens, dtype=torch.bool)
    below[row] = tree.dense_mask()[row, 0, :, slot]
    changed = (before != after).any(-1)
    assert bool(torch.isfinite(before).all())
    assert not bool((changed & ~below).any())
    assert bool(changed[row, slot])


@quick
@given(data=st.data())
def test_nothing_leaks_from_kept_trunks(target, data):
    """Nor does a change of what was kept: other trunks, and the own one behind the fork."""
    packed, trunks, on, fork, _ = packed_pair(target, aligned=True)
    lessons = [lesson_of(one.tolist()) for one in trunks]
    keep(target, lessons)
    states = [one.state for one in lessons]
    branch = data.draw(st.integers(0, 5))
    slots = packed.slot[branch][packed.slot[branch] >= 0]
    read = (packed.row[on[branch]].expand_as(slots), slots)
    before = target.resume(packed, states, read)
    own = int(on[branch])
    place = data.draw(st.sampled_from([(i, t) for i, one in enumerate(trunks) for t in range(len(one))]))
    layers = [(k.clone(), v.clone()) for k, v in states[place[0]].layers]
    for part in layers[data.draw(st.integers(0, 3))]:
        part[:, place[1]] += 1
    states[place[0]] = dataclasses.replace(states[place[0]], layers=tuple(layers))
    changed = bool((target.resume(packed, states, read) != before).any())
    if place[0] != own or place[1] > int(fork[branch]):
        assert not changed
    elif place[1] > int(fork[branch]) - WINDOW + 2:
        assert changed, "what a branch does see must matter"


@quick
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), budget=st.integers(1, 150))
def test_rows_are_shared_within_the_budget(sizes, budget):
    forwards = share_rows(sizes, budget)
    assert sorted(piece for rows in forwards for row in rows for piece in row) == list(range(len(sizes)))
    for rows in forwards:
        wide = max(sum(sizes[piece] for piece in row) for row in rows)
        assert wide == max(sizes[piece] for row in rows for piece in row), "no row is wider than its longest piece"
        assert len(rows) * wide <= budget or len(rows) == 1
    assert share_rows([], budget) == []


def test_short_trunks_share_rows_and_forwards(monkeypatch):
    target = loud("full")
    lessons = [lesson_of(text(n, n), str(n)) for n in (60, 9, 12, 7, 20, 11, 8, 15, 10, 6)]
    cells = [(i, a, text(4, 9 * i + a)) for i, one in enumerate(lessons) for a in range(0, len(one.trunk), 6)]
    trees = []
    score = target.score
    monkeypatch.setattr(target, "score", lambda tree, **more: (trees.append(tree), score(tree, **more))[1])
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 4))) < EXACT
    (tree,) = trees
    assert len(tree.tokens) < len(lessons) / 2
    assert float((tree.trunk < 0).float().mean()) < 0.25, "little padding"
    trees.clear()
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 4), 50)) < EXACT
    assert all(tree.tokens.numel() <= 63 for tree in trees), "the longest trunk with one branch"


@pytest.mark.parametrize("kept", [False, True], ids=["recompute", "keep"])
def test_the_final_norm_sees_only_what_is_read(kept):
    target = loud("mixed")
    lessons, cells = awkward()
    if kept:
        keep(target, lessons)
    seen = []
    handle = target.model.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[:2]))
    found = scored_rows(target, lessons, blocks_of(cells, 6))
    handle.remove()
    rows = int(found.any(-1).sum())
    assert len(seen) == 1
    assert seen[0][0] == 1
    assert seen[0][1] == rows if not kept else 0 < seen[0][1] < rows - len(cells)


def test_models_that_look_at_the_shape_behind_their_layers_are_read_too():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=4, n_positions=64, eos_token_id=EOS,
                        bos_token_id=1, attn_implementation="sdpa")  # fmt: skip
    target = load_target(GPT2LMHeadModel(config).double().eval())
    assert not target._reads_early
    lessons, cells = awkward()
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 6))) < EXACT
    for one in lessons:
        keep_layers(target, one)
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 6))) < EXACT


@settings(max_examples=60, deadline=None)
@given(plans(), st.booleans())
def test_the_chain_of_ancestors_is_the_mask(plan, together):
    sizes, width, branches = plan
    trunks = [torch.arange(n) for n in sizes]
    row, fork, length = torch.tensor(branches, dtype=torch.int64).reshape(-1, 3).unbind(1)
    tokens = torch.zeros(len(branches), width, dtype=torch.int64)
    rows = [0] * len(sizes) if together else list(range(len(sizes)))
    tree = pack_branches(trunks, rows, row, fork, tokens, length).tree
    chain = tree.ancestors(16)
    for b, slot in ((b, slot) for b in range(len(chain)) for slot in range(chain.shape[1])):
        line = [one for one in chain[b, slot].tolist() if one >= 0]
        assert line[0] == slot
        assert set(line) == set(tree.dense_mask()[b, 0, slot].nonzero().flatten().tolist())
        where = tree.position[b, line].tolist()
        assert where == list(range(where[0], where[0] - len(where), -1))


@pytest.mark.smollm2
def test_on_the_embedded_target():
    target = load_target("smollm2", dtype="float32")
    lessons = [lesson_of([i * 37 % 4000 + 20 for i in range(n)], str(n)) for n in (40, 22)]
    cells = [(i, a, [(a * 91 + j * 57) % 3000 for j in range(7)]) for i, one in enumerate(lessons)
             for a in (0, 12, len(one.trunk) - 1)]  # fmt: skip
    blocks = blocks_of(cells, 7)
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks)) < 1e-4
    keep(target, lessons)
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks)) < 1e-4
