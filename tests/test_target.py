"""The target: taps, cache and tree are, row by row, what a plain forward of the unmodified model gives. No leaks.

Random plans run in float64, where a wrong edge stands out from rounding by many orders; fixed ones in float32.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.core.errors import InputError
from draftloop.core.law import Sampling
from draftloop.core.tree import Tree, hang_branches
from draftloop.target.load import load_target
from draftloop.target.model import Target, check_taps
from tests.conftest import KINDS
from tests.tiny import VOCAB, tiny_model, tiny_target

CLOSE, EXACT = 2e-5, 1e-9  # of the largest logit, in float32 (chaotic toys) and in float64


@pytest.fixture(scope="module", params=KINDS)
def each(request) -> Target:
    return tiny_target(request.param)


@pytest.fixture(scope="module", params=KINDS)
def exact(request) -> Target:
    return load_target(tiny_model(request.param).double())


def text(length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def plain(target: Target, ids: torch.Tensor) -> torch.Tensor:
    """Logits [t, V] of one text, by the model's own forward."""
    return target.model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]


def gap(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return float((got - want).abs().max() / want.abs().max()) if want.numel() else 0.0


# ---------------------------------------------------------------- taps


@pytest.mark.parametrize("taps", [(0,), (0, 2), (1, 2, 3), (0, 1, 2, 3)], ids=str)
@torch.no_grad()
def test_taps_are_the_models_own_hidden_states_bit_for_bit(each, taps):
    tree, _ = hang_branches(
        [text(9, 1), text(5, 2)],
        torch.tensor([0, 1]),
        torch.tensor([3, 4]),
        torch.stack([text(3, 3), text(3, 4)]),
        torch.tensor([3, 2]),
    )
    rows = each.score(tree, taps)
    own = each._base(
        input_ids=tree.tokens,
        position_ids=tree.position,
        attention_mask=tree.dense_mask(),
        use_cache=False,
        output_hidden_states=True,
    )
    assert torch.equal(rows.hidden, own.last_hidden_state)
    parts = rows.features.unflatten(-1, (len(taps), each.hidden_size)).unbind(-2)
    norm = next(m for n, m in each._base.named_children() if n in ("norm", "final_layernorm"))
    for layer, part in zip(taps, parts, strict=True):
        if layer < each.num_layers - 1:
            assert torch.equal(part, own.hidden_states[layer + 1])
        else:  # raw: the model's own list holds the normed one here
            assert not torch.allclose(part, own.hidden_states[layer + 1])
            assert torch.equal(norm(part), own.last_hidden_state)


def test_without_taps_there_are_no_features_and_no_hook_stays(each):
    tree, _ = hang_branches(
        [text(4, 0)],
        *torch.zeros(2, 0, dtype=torch.int64),
        torch.zeros(0, 1, dtype=torch.int64),
        torch.zeros(0, dtype=torch.int64),
    )
    hooks = [len(layer._forward_hooks) for layer in each._layers]  # transformers may have left some of its own
    assert each.score(tree).features is None
    each.score(tree, (0, 1))
    with pytest.raises(IndexError):
        each.score(dataclasses.replace(tree, tokens=tree.tokens + 10**6), (0, 1))
    assert [len(layer._forward_hooks) for layer in each._layers] == hooks


@pytest.mark.parametrize("taps", [(2, 1), (1, 1), (0, 2, 2), (-1,), (5,), (0, 9)], ids=str)
def test_taps_that_do_not_ascend_or_exist_are_refused(each, taps):
    with pytest.raises(InputError, match="target layers"):
        check_taps(taps, 4)
    with pytest.raises(InputError, match="target layers"):
        each.extend(each.new_cache(4), torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[0, 1]]), taps)


# ---------------------------------------------------------------- cache


@st.composite
def paces(draw):
    """Rows of (prompt length, tokens kept by each of three steps), and the width of a step."""
    width = draw(st.integers(1, 4))
    row = st.tuples(st.integers(1, 9), st.lists(st.integers(0, width), min_size=3, max_size=3))
    return width, draw(st.lists(row, min_size=1, max_size=4))


@settings(max_examples=30, deadline=None)
@given(paces(), st.integers(0, 1000))
def test_ragged_rows_with_rejections_equal_each_row_alone(exact, plan, seed):
    assert worst_row(exact, plan, seed) < EXACT


@pytest.mark.parametrize("seed", range(3))
def test_ragged_rows_in_float32(each, seed):
    assert worst_row(each, (3, [(4, [3, 0, 2]), (1, [0, 1, 1]), (9, [2, 2, 2])]), seed) < CLOSE


def worst_row(each: Target, plan, seed: int) -> float:
    """Rows advance at their own pace, rejected tokens are overwritten; the gap of what counts to a plain forward."""
    width, rows = plan
    longest = max(p + sum(kept) for p, kept in rows) + width
    texts = [text(longest, seed + i) for i in range(len(rows))]
    want = [plain(each, t) for t in texts]
    cache = each.new_cache(longest)
    start = torch.tensor([p for p, _ in rows])

    # prefill; behind a row's end stands padding, which writes garbage that the next step overwrites
    reach = int(start.max())
    ids = torch.stack([torch.cat([t[:p], text(reach - int(p), 7)]) for t, p in zip(texts, start, strict=True)])
    logits = each.readout.logits(each.extend(cache, ids, torch.arange(reach).expand(len(rows), -1)).hidden)
    gaps = [gap(logits[i, :p], want[i][:p]) for i, p in enumerate(start)]

    for step in range(3):
        kept = [k[step] for _, k in rows]
        ids = torch.stack([t[s : s + width] for t, s in zip(texts, start, strict=True)])
        for i, k in enumerate(kept):
            ids[i, k:] = (ids[i, k:] + 1 + step) % VOCAB  # wrong drafts, to be overwritten
        logits = each.readout.logits(each.extend(cache, ids, start[:, None] + torch.arange(width)).hidden)
        gaps += [gap(logits[i, :k], want[i][start[i] : start[i] + k]) for i, k in enumerate(kept)]
        start = start + torch.tensor(kept)
    return max(gaps)


def test_a_cache_that_shows_stale_slots_would_be_noticed(each):
    """The mask must end at the query's own position: one slot too many reads what was rejected."""
    ids = text(8, 0)
    for slack, wrong in ((0, False), (1, True)):
        cache = each.new_cache(8)
        each.extend(cache, ((ids + 1) % VOCAB).unsqueeze(0), torch.arange(8).unsqueeze(0))
        aim = cache.aim
        cache.aim = lambda positions, aim=aim, slack=slack: aim(positions) | aim(positions + slack)[..., :8]
        got = []
        for t in range(7):
            got.append(each.extend(cache, ids[None, t : t + 1], torch.tensor([[t]])).hidden[:, 0])
        assert (gap(each.readout.logits(torch.cat(got)), plain(each, ids)[:7]) > 1e-3) is wrong


def test_select_keeps_and_reorders_rows(each):
    texts = torch.stack([text(10, i) for i in range(4)])
    cache = each.new_cache(12)
    cache.select(torch.tensor([0]))  # nothing fed yet: nothing to do
    each.extend(cache, texts[:, :6], torch.arange(6).expand(4, -1))
    stay = torch.tensor([3, 1])
    cache.select(stay)
    logits = each.readout.logits(each.extend(cache, texts[stay, 6:], torch.arange(6, 10).expand(2, -1)).hidden)
    for got, row in zip(logits, stay, strict=True):
        assert gap(got, plain(each, texts[row])[6:]) < CLOSE


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_features_do_not_depend_on_how_the_text_was_fed(each, chunk):
    ids, taps = text(11, 3).unsqueeze(0), (0, 2, 3)
    whole = each.extend(each.new_cache(11), ids, torch.arange(11).unsqueeze(0), taps).features
    cache, parts = each.new_cache(11), []
    for start in range(0, 11, chunk):
        place = torch.arange(start, min(11, start + chunk)).unsqueeze(0)
        parts.append(each.extend(cache, ids[:, place[0]], place, taps).features)
    assert gap(torch.cat(parts, 1), whole) < CLOSE


# ---------------------------------------------------------------- trunks and branches in one forward


@st.composite
def plans(draw):
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    branch = st.integers(0, len(sizes) - 1).flatmap(
        lambda row: st.tuples(st.just(row), st.integers(0, sizes[row] - 1), st.integers(0, 4))
    )
    return sizes, draw(st.lists(branch, min_size=1, max_size=6))


def lay(plan, seed):
    sizes, branches = plan
    trunks = [text(n, seed + i) for i, n in enumerate(sizes)]
    row, fork, length = torch.tensor(branches).unbind(1)
    tokens = text(4 * len(branches), seed + 50).view(-1, 4)
    return *hang_branches(trunks, row, fork, tokens, length), trunks, tokens


def worst(target: Target, plan, tree: Tree, slot, trunks, tokens) -> float:
    """The largest gap between the one forward and a plain forward of every trunk and every trunk prefix + branch."""
    logits = target.readout.logits(target.score(tree).hidden)
    gaps = [gap(logits[i, : t.numel()], plain(target, t)) for i, t in enumerate(trunks)]
    for number, (row, fork, length) in enumerate(plan[1]):
        if length:
            alone = plain(target, torch.cat([trunks[row][: fork + 1], tokens[number, :length]]))
            gaps.append(gap(logits[row, slot[number, :length]], alone[fork + 1 :]))
    return max(gaps)


@settings(max_examples=40, deadline=None)
@given(plans(), st.integers(0, 1000))
def test_one_forward_of_the_tree_equals_a_forward_of_each_branch(exact, plan, seed):
    assert worst(exact, plan, *lay(plan, seed)) < EXACT


@pytest.mark.parametrize("seed", range(3))
def test_one_forward_in_float32(each, seed):
    plan = [10, 3, 12], [(0, 4, 4), (2, 0, 3), (2, 11, 2), (0, 9, 4), (1, 1, 0), (0, 4, 1)]
    assert worst(each, plan, *lay(plan, seed)) < CLOSE


def test_several_trunks_share_a_row(each):
    tree, *_ = lay(([9, 5], [(0, 4, 4), (1, 2, 3), (0, 8, 1)]), 0)
    number = torch.where(tree.trunk < 0, -1, torch.arange(2)[:, None])
    packed = dataclasses.replace(tree, trunk=number)
    packed = Tree(*(getattr(packed, f.name).reshape(1, -1) for f in dataclasses.fields(tree)))
    apart, together = each.score(tree, (1,)), each.score(packed, (1,))
    real = tree.trunk.flatten() >= 0
    for one, two in ((apart.hidden, together.hidden), (apart.features, together.features)):
        assert gap(two[0, real], one.flatten(0, 1)[real]) < CLOSE


class Spoilt(Tree):
    """A tree whose mask is wrong in one way."""

    def dense_mask(self, first=0, window=None, chunk=None):
        right = super().dense_mask(first, window, chunk).squeeze(1)
        q, k = self.branch[:, :, None], self.branch[:, None]
        branch_to_trunk = (q >= 0) & (k < 0) & (self.trunk[:, None] >= 0)
        earlier = self.position[:, None] <= self.position[:, :, None]
        beyond = self.position[:, None] == self.fork[:, :, None] + 1
        masks = {
            "whole trunk": right | (branch_to_trunk & earlier),
            "one past the fork": right | (branch_to_trunk & beyond),
            "not the fork": right & ~(branch_to_trunk & (self.position[:, None] == self.fork[:, :, None])),
            "sibling": right | ((q >= 0) & (k >= 0) & (k != q) & earlier),
            "both ways in a branch": right | ((q >= 0) & (k == q)),
            "not its own branch": right & ~((q >= 0) & (k == q)) | torch.eye(q.shape[1], dtype=torch.bool),
            "trunk sees branches": right | ((q < 0) & (k >= 0) & earlier),
            "trunk sees ahead": right | ((q < 0) & (k < 0) & (self.trunk[:, None] >= 0)),
        }
        return masks[self.way].unsqueeze(1)


WAYS = [
    "whole trunk",
    "one past the fork",
    "not the fork",
    "sibling",
    "both ways in a branch",
    "not its own branch",
    "trunk sees branches",
    "trunk sees ahead",
]
FIXED = ([9], [(0, 4, 4), (0, 2, 3), (0, 4, 4)])


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_mask_is_noticed(each, way):
    tree, *rest = lay(FIXED, 0)
    assert worst(each, FIXED, tree, *rest) < CLOSE
    bad = Spoilt(*(getattr(tree, f.name) for f in dataclasses.fields(tree)))
    object.__setattr__(bad, "way", way)
    assert worst(each, FIXED, bad, *rest) > 1e-3


def test_positions_off_by_one_are_noticed(each):
    tree, *rest = lay(FIXED, 0)
    shifted = torch.where(tree.branch >= 0, tree.position + 1, tree.position)
    assert worst(each, FIXED, dataclasses.replace(tree, position=shifted), *rest) > 1e-4


@settings(max_examples=30, deadline=None)
@given(plans(), st.integers(0, 1000), st.data())
def test_nothing_leaks(each, plan, seed, data):
    """A changed token changes the slots that see it, and no bit of any other slot's hidden row or features."""
    tree, *_ = lay(plan, seed)
    b, n = tree.tokens.shape
    row, slot = data.draw(st.tuples(st.integers(0, b - 1), st.integers(0, n - 1)))
    tokens = tree.tokens.clone()
    tokens[row, slot] = (tokens[row, slot] + 1) % VOCAB
    before = each.score(tree, (0, 2))
    after = each.score(dataclasses.replace(tree, tokens=tokens), (0, 2))
    sees = torch.zeros(b, n, dtype=torch.bool)
    sees[row] = tree.dense_mask()[row, 0, :, slot]
    for old, new in ((before.hidden, after.hidden), (before.features, after.features)):
        changed = (old != new).any(-1)
        assert not bool((changed & ~sees).any())
        assert bool(changed[row, slot])
        assert bool((changed | ~sees).float().mean() == 1)


# ---------------------------------------------------------------- the rest of a target


def test_facts(each):
    model = each.model
    assert (each.num_layers, each.hidden_size, each.vocab_size) == (4, 48, VOCAB)
    assert (each.device.type, each.dtype, each.context_limit) == ("cpu", torch.float32, 256)
    assert each.eos_ids == (3,)
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    ids = text(5, 0)
    assert torch.equal(each.embed(ids), model.get_input_embeddings().weight[ids])
    law = each.law(torch.randn(3, 48), Sampling(1.0))
    assert law.readout is each.readout
    assert law.log_probs().shape == (3, VOCAB)


def test_texts_beyond_the_limit_are_refused(each):
    each.check_length(256)
    with pytest.raises(InputError, match="257 tokens is longer than the target's 256"):
        each.new_cache(257)


def test_fingerprint_names_weights_and_version():
    names = [tiny_target("llama", seed=seed).fingerprint for seed in (0, 0, 1)]
    assert names[0] == names[1] != names[2]
    target = tiny_target("llama")
    assert target.version == 0
    assert target.fingerprint == names[0]
    target.touch()
    assert target.version == 1
    assert target.fingerprint != names[0]
    scaled = tiny_target("llama", rms_norm_eps=1e-3)
    assert scaled.fingerprint != names[0], "the configuration counts too"
    assert all(a != b for a, b in pairwise(sorted(tiny_target(k).fingerprint for k in ("llama", "mistral", "qwen2"))))
