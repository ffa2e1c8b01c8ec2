"""Indexed attention (QSA) and n-gram embeddings: key groups and look-backs follow the branch's own text.

The model selects the best 2 of up to 6 groups here, so that selection matters. The reference breaks ties as we do.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftloop.core.errors import InputError
from draftloop.core.tree import Tree
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options
from draftloop.supervise.lesson import Lesson
from draftloop.supervise.score import scored_rows
from draftloop.target.load import load_target
from draftloop.target.model import Target
from draftloop.target.qsa import Indexer
from tests.hybrid_tiny import exact_reference, hybrid_model, hybrid_target
from tests.stand_ins import Scripted, garbled, replies, requests_of, scripts_of, with_eos
from tests.test_hybrid_decoding import by_the_model
from tests.test_target import paces, worst_row
from tests.tiny import VOCAB
from tests.trees import awkward, batches, blocks_of, keep, loud, packed_pair, worst

pytestmark = pytest.mark.hybrid

EXACT = 1e-6  # of the largest logit, float64; norms and index scores stay float32
CLOSE = 5e-5  # float32
quick = settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
FULL, BARE = "qwen4_exp", "qwen4_exp without n-grams"


@cache
def exact(kind: str, ratio: int = 4):
    sizes = {"indexer_compress_ratio": ratio, "indexer_budget": 2 * ratio}
    return load_target(hybrid_model(kind, **sizes).double())


@pytest.fixture(params=[(FULL, 4), (FULL, 3), (BARE, 2)], ids=str)
def target(request):
    found = exact(*request.param)
    with exact_reference(found.model):
        yield found


def gap(target, lessons, cells, drafted=6, budget=4096) -> float:
    return worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, drafted), budget))


@pytest.mark.parametrize("way", ["recompute", "keep", "some kept"])
@quick
@given(batch=batches())
def test_packed_rows_equal_plain_forwards(target, way, batch):
    lessons, drafted, cells, budget = batch
    lessons = [Lesson(one.trunk) for one in lessons]
    if way != "recompute":
        keep(target, lessons, [way == "keep" or i % 2 for i in range(len(lessons))])
    assert gap(target, lessons, cells, drafted, budget) < EXACT


@pytest.mark.parametrize("kept", [False, True], ids=["recompute", "keep"])
def test_the_awkward_places(target, kept):
    """Forks at, before and behind the borders of groups; ends of text, which n-grams do not cross, inside branches."""
    lessons, cells = awkward()
    if kept:
        keep(target, lessons)
    assert gap(target, lessons, cells) < EXACT


@quick
@given(plan=paces(), seed=st.integers(0, 1000))
def test_ragged_rows_with_rejections_equal_each_row_alone(target, plan, seed):
    assert worst_row(target, plan, seed) < EXACT


@quick
@given(data=st.data())
def test_nothing_leaks_within_a_row(target, data):
    tree = packed_pair(target)[0].tree
    row, slot = data.draw(st.sampled_from([tuple(at) for at in (tree.trunk >= 0).nonzero().tolist()]))
    tokens = tree.tokens.clone()
    tokens[row, slot] = (tokens[row, slot] + 1) % VOCAB
    before, after = target.score(tree).hidden, target.score(dataclasses.replace(tree, tokens=tokens)).hidden
    below = torch.zeros_like(tree.tokens, dtype=torch.bool)
    below[row] = tree.dense_mask()[row, 0, :, slot]
    changed = (before != after).any(-1)
    assert bool(torch.isfinite(before).all())
    assert not bool((changed & ~below).any())
    assert bool(changed[row, slot])


def spoil(monkeypatch, how: str) -> None:
    private = Indexer._private

    def groups(self, lines, shared, trunk_raw, raw):
        if how == "the group over the fork is the trunk's":
            table, place = private(self, lines, shared, trunk_raw, raw), (lines.fork + 1) // self.ratio
            whole = place < trunk_raw.shape[1] // self.ratio
            branch = torch.arange(len(raw))[whole]
            table[branch, place[whole]] = shared[lines.trunk[whole], place[whole]]
            return table
        return private(self, lines, shared, trunk_raw, raw.roll(1, 0))  # the neighbour's

    if "group" in how:
        monkeypatch.setattr(Indexer, "_private", groups)
    else:  # what stands before it in the row, as a model that knows no tree would have it
        slots = torch.arange
        monkeypatch.setattr(
            Tree,
            "ancestors",
            lambda self, depth: (
                (slots(self.tokens.shape[1])[:, None] - slots(depth)).clamp(min=-1).expand(*self.tokens.shape, depth)
            ),
        )


HOW = ["the group over the fork is the trunk's", "groups of the neighbour's tokens", "n-grams of the row"]


@pytest.mark.parametrize("kept", [False, True], ids=["recompute", "keep"])
@pytest.mark.parametrize("how", HOW)
def test_a_leak_is_noticed(monkeypatch, how, kept):
    found = exact(FULL)
    lessons, cells = awkward()
    with exact_reference(found.model):
        if kept:
            keep(found, lessons)
        assert gap(found, lessons, cells) < EXACT
        spoil(monkeypatch, how)
        assert gap(found, lessons, cells) > 1e-3


def test_masks_stay_boolean_where_others_are_given_as_numbers(monkeypatch):
    """On CUDA. Before transformers 5.24 the model would add the selection to numbers as 0 and 1."""
    selecting, plain = exact(FULL), loud("full")
    with monkeypatch.context() as on_cuda:
        on_cuda.setattr(Target, "device", torch.device("cuda"))
        assert plain._adds_masks()
        assert not selecting._adds_masks()
    lessons, cells = awkward()
    monkeypatch.setattr(Target, "_adds_masks", lambda self: True)
    with pytest.raises(InputError, match="mask of numbers"):
        gap(selecting, lessons, cells)
    with pytest.raises(InputError, match="mask of numbers"):
        hybrid_target(FULL)


def test_groups_by_slot_are_refused_by_the_probe(monkeypatch):
    spoil(monkeypatch, "n-grams of the row")
    with pytest.raises(InputError, match="does not agree"):
        hybrid_target(FULL)


def test_ties_go_to_the_earlier_group():
    indexer = exact(FULL).family.indexers[0]
    query, keys = torch.zeros(1, 1, 4, 16), torch.zeros(1, 5, 16)
    for position, chosen in ((2, [0]), (3, [0, 1]), (7, [0, 1, 2]), (18, [0, 1, 4]), (19, [0, 1, 5])):
        got = indexer.choose(query, keys, torch.tensor([[position]]))
        assert got[0, 0].nonzero().flatten().tolist() == chosen


@pytest.mark.parametrize("kind", [FULL, BARE])
def test_decoding_is_lossless(kind):
    target = with_eos(hybrid_target(kind))
    requests = requests_of((1, 3, 9, 14), VOCAB)
    options = Options(max_new_tokens=10, batch_size=4)
    with exact_reference(target.model):
        want = [by_the_model(target, one, 10) for one in requests]
    assert replies(decode(target, None, requests, options)) == want
    scripts = scripts_of(target, requests, Options(max_new_tokens=18))
    drafter = Scripted(target, garbled(scripts, VOCAB), 4)
    assert replies(decode(target, drafter, requests, options)) == want


def test_features_are_the_mean_of_the_streams():
    found = hybrid_target(FULL)
    ids = torch.arange(7).unsqueeze(0)
    rows = found.extend(found.new_cache(7), ids, ids, (0, 2))
    own = found.model(input_ids=ids, output_hidden_states=True).hidden_states
    want = torch.cat([own[i + 1].unflatten(-1, (2, -1)).mean(-2) for i in (0, 2)], -1)
    assert torch.allclose(rows.features, want, atol=1e-4 * float(want.abs().max()))
