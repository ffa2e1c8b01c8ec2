"""Hybrid targets (Gated DeltaNet): trees, caches and kept trunks give what a plain forward of each text gives.

The oracle is the unmodified model's own forward of trunk prefix + branch; in float64 its recurrence runs token by token,
for its own casts to float32.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftloop.core.errors import InputError
from draftloop.core.tree import pack_branches
from draftloop.supervise.lesson import Lesson
from draftloop.supervise.score import scored_rows
from draftloop.target import gated_deltanet, hybrid
from draftloop.target.load import load_target
from tests.hybrid_tiny import exact_reference, hybrid_model, hybrid_target
from tests.test_core_tree import plans
from tests.test_target import paces, worst_row
from tests.tiny import VOCAB, tiny_model
from tests.trees import awkward, batches, blocks_of, keep, lesson_of, packed_pair, text, worst

pytestmark = pytest.mark.hybrid

KINDS = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
EXACT = 1e-9  # of the largest logit, float64
CLOSE = 5e-5  # of the largest logit, float32
SPACINGS = [1, 3, 4, 7, 64]
quick = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


@cache
def exact(kind: str):
    return load_target(hybrid_model(kind).double())


def spaced(target, spacing: int):
    """The same target with its snapshots `spacing` tokens apart."""
    twin = copy.copy(target)
    twin.family = target.family.spaced(spacing)
    return twin


@pytest.fixture(params=["qwen3_next", "qwen3_5"])
def target(request):
    found = exact(request.param)
    with exact_reference(found.model):
        yield found


def scored_gap(target, lessons, cells, drafted, budget=4096) -> float:
    return worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, drafted), budget))


# ------------------------------------------------------------------------------------------------ what is scored


@pytest.mark.parametrize("way", ["recompute", "keep", "some kept"])
@quick
@given(batch=batches(), spacing=st.sampled_from(SPACINGS))
def test_packed_rows_equal_plain_forwards(target, way, batch, spacing):
    target = spaced(target, spacing)
    lessons, drafted, cells, budget = batch
    lessons = [Lesson(one.trunk) for one in lessons]
    if way != "recompute":
        keep(target, lessons, [way == "keep" or i % 2 for i in range(len(lessons))])
    assert scored_gap(target, lessons, cells, drafted, budget) < EXACT


@pytest.mark.parametrize("kept", [False, True], ids=["recompute", "keep"])
@pytest.mark.parametrize("spacing", [1, 4, 9, 64])
def test_the_awkward_places(target, spacing, kept):
    """Anchors 0, 1, spacing - 1, spacing, T - 2, T - 1 are among them; 19 and 8 tokens are no multiples."""
    target = spaced(target, spacing)
    lessons, cells = awkward()
    cells += [(0, a, text(6, 50 + a)) for a in {spacing - 1, spacing, spacing + 1} & set(range(19))]
    if kept:
        keep(target, lessons)
    assert scored_gap(target, lessons, cells, 6) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_in_float32_rounding_alone_is_left(kind):
    target = hybrid_target(kind)
    lessons, cells = awkward()
    assert scored_gap(target, lessons, cells, 6) < CLOSE
    keep(target, lessons)
    assert scored_gap(target, lessons, cells, 6) < CLOSE


def test_branches_run_a_few_at_a_time(target, monkeypatch):
    monkeypatch.setattr(hybrid, "_BRANCH_TOKENS", 150)
    assert scored_gap(target, *awkward(), 6) < EXACT


@pytest.mark.parametrize("kept", [False, True], ids=["recompute", "keep"])
def test_the_order_of_branches_does_not_matter(target, kept):
    lessons, cells = awkward()
    if kept:
        keep(target, lessons)
    order = torch.randperm(len(cells), generator=torch.Generator().manual_seed(0))
    straight = scored_rows(target, lessons, blocks_of(cells, 6))
    mixed = scored_rows(target, lessons, blocks_of([cells[i] for i in order], 6), 60)
    assert torch.allclose(mixed, straight[order], atol=1e-10)


@quick
@given(plan=plans(), together=st.booleans())
def test_lines_say_what_the_mask_says(plan, together):
    sizes, width, branches = plan
    row, fork, length = torch.tensor(branches, dtype=torch.int64).reshape(-1, 3).unbind(1)
    rows = [0] * len(sizes) if together else list(range(len(sizes)))
    packed = pack_branches(
        [torch.arange(n) for n in sizes], rows, row, fork, torch.zeros(len(branches), width, dtype=torch.int64), length
    )
    lines = packed.tree.lines()
    seen = packed.tree.dense_mask().squeeze(1)
    for i, slots in enumerate(lines.trunk_slot):
        for t, slot in enumerate(slots[slots >= 0].tolist()):
            assert set(seen[lines.trunk_row[i], slot].nonzero().flatten().tolist()) == set(slots[: t + 1].tolist())
    for i, slots in enumerate(lines.slot):
        prefix = lines.trunk_slot[lines.trunk[i]][: int(lines.fork[i]) + 1].tolist()
        for depth, slot in enumerate(slots[slots >= 0].tolist()):
            see = set(seen[lines.row[i], slot].nonzero().flatten().tolist())
            assert see == {*prefix, *slots[: depth + 1].tolist()}
    assert int((lines.slot >= 0).sum()) == int(length.sum())


@quick
@given(data=st.data())
def test_nothing_leaks_within_a_row(target, data):
    """A changed token changes the slots below it and no bit of any other, in a row of several trunks."""
    tree = packed_pair(target)[0].tree
    row, slot = data.draw(st.sampled_from([tuple(at) for at in (tree.trunk >= 0).nonzero().tolist()]))
    tokens = tree.tokens.clone()
    tokens[row, slot] = (tokens[row, slot] + 1) % VOCAB
    twin = spaced(target, data.draw(st.sampled_from(SPACINGS)))
    before = twin.score(tree).hidden
    after = twin.score(dataclasses.replace(tree, tokens=tokens)).hidden
    below = torch.zeros_like(tree.tokens, dtype=torch.bool)
    below[row] = tree.dense_mask()[row, 0, :, slot]
    changed = (before != after).any(-1)
    assert bool(torch.isfinite(before).all())
    assert not bool((changed & ~below).any())
    assert bool(changed[row, slot])


def test_nothing_leaks_from_what_a_kept_trunk_holds_behind_the_fork(target):
    packed, trunks, on, fork, _ = packed_pair(target, aligned=True)
    lessons = [lesson_of(one.tolist()) for one in trunks]
    keep(target, lessons)
    states = [one.state for one in lessons]
    for branch in (0, 1, 3):
        slots = packed.slot[branch][packed.slot[branch] >= 0]
        read = (packed.row[on[branch]].expand_as(slots), slots)
        before = target.resume(packed, states, read)
        spoilt = []
        for i, state in enumerate(states):
            end = int(fork[branch]) + 1 if i == int(on[branch]) else 0
            layers = []
            for layer, parts in enumerate(state.layers):
                parts = tuple(part.clone() for part in parts)
                if layer == 3:
                    for part in parts:
                        part[:, end:] += 1
                else:
                    raw, g, u, snapshots = parts
                    for part, first in ((raw, end + 3), (g, end), (u, end), (snapshots, end // 64 + 1 if end else 0)):
                        part[first:] += 1
                layers.append(parts)
            spoilt.append(dataclasses.replace(state, layers=tuple(layers)))
        assert torch.equal(target.resume(packed, spoilt, read), before)


# ------------------------------------------------------------------------------------------------ broken on purpose


def leaks(monkeypatch, how: str) -> None:
    """Spoil the scoring of branches in one way."""
    at, replay = gated_deltanet.GatedDeltaNet.state_at, gated_deltanet.replay

    def state_at(self, log, which, after):
        end = log.g.shape[1]
        if how == "one token past the fork":
            return at(self, log, which, (after + 1).clamp(max=end))
        if how == "the whole trunk":
            return at(self, log, which, torch.full_like(after, end))
        if how == "a convolution of its own":
            state, tail = at(self, log, which, after)
            return state, torch.zeros_like(tail)
        if how == "a convolution over the trunk's end":
            return at(self, log, which, after)[0], at(self, log, which, torch.full_like(after, end))[1]
        return at(self, log, which, after)

    def one_state(self, mixer, lines, log, given, out):
        """All branches of a trunk run on in one state, as they stand in the row."""
        trunks = [(lines.trunk == i).nonzero().flatten() for i in range(len(lines.trunk_row))]
        for of in (one for one in trunks if len(one)):
            slots = lines.slot[of].flatten()
            slots = slots[slots >= 0].unsqueeze(0)
            state, tail = mixer.state_at(log, lines.trunk[of[:1]], lines.fork[of[:1]] + 1)
            got, _ = mixer.go_on(given.at(lines.row[of[:1]], slots), state, tail, self.spacing)
            hybrid.lay(out, got, lines.row[of[:1]], slots)

    monkeypatch.setattr(gated_deltanet.GatedDeltaNet, "state_at", state_at)
    if how == "one state for all branches":
        monkeypatch.setattr(hybrid.HybridAttention, "_branches", one_state)
    if how == "no replay":
        monkeypatch.setattr(gated_deltanet, "replay", lambda state, *rest: state)
    if how == "replay of all of the piece":
        monkeypatch.setattr(
            gated_deltanet, "replay", lambda s, k, g, u, n: replay(s, k, g, u, torch.full_like(n, k.shape[1]))
        )


HOW = [
    "one token past the fork",
    "the whole trunk",
    "a convolution of its own",
    "a convolution over the trunk's end",
    "one state for all branches",
    "no replay",
    "replay of all of the piece",
]


@pytest.mark.parametrize("kept", [False, True], ids=["recompute", "keep"])
@pytest.mark.parametrize("how", HOW)
def test_a_leaking_state_is_noticed(monkeypatch, how, kept):
    target = hybrid_target("qwen3_next")
    lessons, cells = awkward()
    if kept:
        keep(target, lessons)
    leaks(monkeypatch, how)
    assert scored_gap(target, lessons, cells, 6) > 100 * CLOSE


@pytest.mark.parametrize("how", ["one token past the fork", "a convolution of its own", "no replay"])
def test_a_leaking_state_is_refused_by_the_probe(monkeypatch, how):
    leaks(monkeypatch, how)
    with pytest.raises(InputError, match="does not agree with its own plain forward"):
        hybrid_target("qwen3_5")


def test_a_mask_alone_does_not_score_a_recurrence(monkeypatch):
    monkeypatch.setattr(hybrid, "replaced", lambda *args: contextlib.nullcontext())
    with pytest.raises(InputError, match="does not agree"):
        hybrid_target("qwen3_5")


# ------------------------------------------------------------------------------------------------ the cache


@quick
@given(plan=paces(), seed=st.integers(0, 1000), spacing=st.sampled_from(SPACINGS))
def test_ragged_rows_with_rejections_equal_each_row_alone(target, plan, seed, spacing):
    assert worst_row(spaced(target, spacing), plan, seed) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_rows_in_float32(kind):
    plan = (3, [(4, [3, 0, 2]), (1, [0, 1, 1]), (9, [2, 2, 2])])
    assert worst_row(hybrid_target(kind), plan, 0) < CLOSE


@pytest.mark.parametrize("how", ["the state is not put back", "the convolution is not put back"])
def test_a_cache_that_crops_keys_only_is_noticed(monkeypatch, how):
    """What transformers' own `crop` leaves: the state still holds the rejected tokens."""
    at = gated_deltanet.GatedDeltaNet.state_at
    target = hybrid_target("qwen3_5")
    plan = (3, [(4, [3, 0, 2]), (1, [0, 1, 1])])
    assert worst_row(target, plan, 0) < CLOSE

    def state_at(self, log, which, after):
        all_fed = torch.full_like(after, log.g.shape[1])
        state = at(self, log, which, all_fed if "state" in how else after)[0]
        return state, at(self, log, which, all_fed if "convolution" in how else after)[1]

    monkeypatch.setattr(gated_deltanet.GatedDeltaNet, "state_at", state_at)
    assert worst_row(target, plan, 0) > 100 * CLOSE


def test_a_row_cannot_go_back_further_than_the_last_feed():
    target = hybrid_target("qwen3_5")
    cache = target.new_cache(16)
    place = torch.arange(16).unsqueeze(0)
    target.extend(cache, place[:, :6], place[:, :6])
    target.extend(cache, place[:, 6:9], place[:, 6:9])
    with pytest.raises(AssertionError, match="no further"):
        target.extend(cache, place[:, 5:7], place[:, 5:7])


@pytest.mark.parametrize("spacing", [1, 3, 64])
def test_what_no_row_goes_back_to_is_forgotten(target, spacing):
    target, lengths = spaced(target, spacing), torch.tensor([9, 7, 12])
    texts = torch.tensor([text(16, i) for i in range(3)])
    seen = {}
    for least in (0, 7):
        cache = target.new_cache(16)
        cache.least = least
        target.extend(cache, texts[:, :12], torch.arange(12).expand(3, -1))
        held = {log.g.shape[1] for log in cache.logs.values()}
        assert held == {12 - (least - 1) // spacing * spacing if least else 12}
        place = lengths.unsqueeze(1) + torch.arange(3)
        seen[least] = target.extend(cache, texts.gather(1, place), place).hidden
    assert torch.equal(seen[0], seen[7])


# ------------------------------------------------------------------------------------------------ the rest


def test_the_models_own_forward_is_left_as_it_was():
    model = hybrid_model("qwen3_5")
    target = load_target(model)
    assert not any("forward" in vars(one) for one in model.modules() if hasattr(one, "A_log"))
    with pytest.raises(IndexError):
        target.score(dataclasses.replace(tree := packed_pair(target)[0].tree, tokens=tree.tokens + 10**6))
    assert not any("forward" in vars(one) for one in model.modules() if hasattr(one, "A_log"))


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen4_exp"])
@pytest.mark.parametrize("size", [1, 9, 64])
def test_a_state_weighs_what_the_budget_counts(kind, size):
    target = hybrid_target(kind)
    ids = torch.tensor([text(70, 1)])
    cache = target.new_cache(70)
    rows = target.extend(cache, ids, torch.arange(70).unsqueeze(0))
    state = cache.state(0, rows.hidden[0, :size], target.version)
    assert cache.state_bytes(size) == state.nbytes - state.hidden.nbytes


def test_linear_layers_of_another_make_are_refused():
    model = tiny_model("llama")
    model.config.layer_types = ["full_attention", "linear_attention"] * 2
    with pytest.raises(InputError, match="layers that are not Gated DeltaNet"):
        load_target(model)
