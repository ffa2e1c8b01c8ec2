"""Drafters that read their own output: packed = cached = the definition; forced = drawn; no leaks; faults are noticed."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.core.flex import flex
from draftloop.core.law import Law, Sampling
from draftloop.drafter import chain, masks
from draftloop.drafter.chain import ChainCache, ChainDrafter
from draftloop.drafter.masks import PackedChains
from draftloop.target.load import load_target
from tests.chains import by_definition, chain_drafter
from tests.packed import CLOSE, EXACT, anchors, gap, rand, texts
from tests.packed import exact as exact
from tests.packed import owner as owner
from tests.tiny import VOCAB, tiny_model

pytestmark = pytest.mark.families


def drafts(shape, seed: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed + 99))


@torch.no_grad()
def alone(drafter, features, text, anchor: int, forced: torch.Tensor) -> torch.Tensor:
    """[K, H] by the decode path: one row, a cache of exactly what stands below the anchor, fed in two pieces."""
    cache = drafter.new_cache(anchor)
    split = max(1, anchor // 2)
    for part in (slice(0, split), slice(split, anchor)):
        place = torch.arange(anchor)[part].unsqueeze(0)
        if place.numel():
            drafter.extend(cache, features[None, part], place, text[None, part])
    return drafter.draft(cache, torch.tensor([anchor]), text[anchor].view(1)).forced(forced.unsqueeze(0))[0]


RAGGED = [9, 7], [[3, 8, 3, 1], [1, 7, 5, 7]]


def worst(drafter, plan=RAGGED, seed: int = 5) -> float:
    """The largest gap between all chains in one packed pass and each of them alone."""
    lengths, places = plan
    features, text = texts(drafter, lengths, seed)
    anchor = torch.tensor(places)
    told = drafts((*anchor.shape, drafter.spec.drafted), seed)
    packed = drafter.pack(features, anchor, text).forced(told)
    assert packed.shape == (*told.shape, drafter.spec.hidden_size)
    return max(
        gap(packed[i, j], alone(drafter, features[i], text[i], a, told[i, j]))
        for i, row in enumerate(places)
        for j, a in enumerate(row)
    )


SHAPES = st.fixed_dictionaries(
    {
        "block": st.integers(2, 8),
        "taps": st.sampled_from([(0,), (1, 3), (0, 1, 2)]),
        "kv_heads": st.sampled_from([1, 2, 4]),
        "head_dim": st.sampled_from([2, 12]),
        "vocab": st.sampled_from([None, 40, VOCAB]),
        "norm_before_residual": st.booleans(),
    }
)


@settings(max_examples=40, deadline=None)
@given(SHAPES, anchors(1), st.integers(0, 1000))
def test_packed_is_sequential(exact, shape, plan, seed):
    assert worst(chain_drafter(exact, seed, **shape), plan, seed) < EXACT


@pytest.mark.parametrize("seed", range(3))
def test_packed_is_sequential_in_float32(owner, seed):
    assert worst(chain_drafter(owner, seed, block=2 + 3 * seed, kv_heads=(1, 2, 4)[seed]), seed=seed) < CLOSE


@pytest.mark.parametrize(("anchor", "beside"), [(1, False), (2, True), (7, False)])
def test_it_is_eagle3_as_defined(owner, anchor, beside):
    drafter = chain_drafter(owner, 3, head_dim=8, norm_before_residual=beside)
    features, text = texts(drafter, [7], 4)
    told = drafts((drafter.spec.drafted,), 4)
    want = by_definition(drafter, owner, features[0], text[0], anchor, told)
    packed = drafter.pack(features, torch.tensor([[anchor]]), text).forced(told[None, None])[0, 0]
    assert gap(packed.double(), want) < CLOSE
    assert gap(alone(drafter, features[0], text[0], anchor, told).double(), want) < CLOSE


def test_what_is_drawn_is_what_forced_tokens_give(owner):
    """And a second reading begins anew."""
    drafter = chain_drafter(owner)
    features, text = texts(drafter, [9, 9], 1)
    draft = drafter.pack(features, torch.tensor([[2, 6, 9], [1, 4, 8]]), text)

    def choose(rows, slots):
        tokens, scores = Law(rows.flatten(0, -2), drafter.readout, Sampling()).draw(torch.empty(0))
        return tokens.view(rows.shape[:-1]), scores.view(rows.shape[:-1])

    tokens, scores, rows = draft.drawn(choose)
    assert tokens.shape == (2, 3, drafter.spec.drafted) == scores.shape
    assert bool(torch.isin(tokens, drafter.support).all())
    assert torch.equal(draft.forced(tokens), rows)
    other = tokens.clone()
    other[..., 0] = (other[..., 0] + 1) % VOCAB
    again = draft.forced(other)
    assert torch.equal(again[..., 0, :], rows[..., 0, :])
    assert bool((again[..., 1:, :] != rows[..., 1:, :]).any(-1).all())


def advance(drafter, cache, features, text, plan, rows, garbage, tell):
    """Feed a ragged batch as decoding does (whole blocks, of which a part is true) and compare every draft."""
    lookup = torch.arange(len(plan))[:, None]
    start = torch.tensor([p for p, _ in plan])
    reach = torch.arange(int(start.max()))
    real = (reach < start[:, None])[..., None]
    mixed = torch.where(real, features[:, : len(reach)], garbage[:, : len(reach)])
    ids = torch.where(real[..., 0], text[:, : len(reach)], 0)
    rows(cache, mixed, reach.expand(len(plan), -1), ids)
    gaps = []
    for step in range(4):
        told = drafts((len(plan), drafter.spec.drafted), step)
        got = drafter.draft(cache, start, text[lookup[:, 0], start]).forced(told)
        for i, a in enumerate(start.tolist()):
            gaps.append(gap(got[i], alone(drafter, features[i], text[i], a, told[i])))
        if step == 3:
            return max(gaps)
        kept = torch.tensor([k[step] for _, k in plan])
        place = start[:, None] + torch.arange(3)
        true = torch.arange(3) < kept[:, None]
        wrong = (text[lookup, place] + 7) % VOCAB
        tell(
            cache,
            torch.where((torch.arange(3) < kept[:, None])[..., None], features[lookup, place], garbage[lookup, place]),
            place,
            torch.where(true, text[lookup, place], wrong),
        )
        start = start + kept
    return max(gaps)


PLANS = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(1, 3), min_size=3, max_size=3)), min_size=1, max_size=3
)


@settings(max_examples=25, deadline=None)
@given(PLANS, st.booleans())
def test_a_ragged_batch_that_overwrites_rejected_positions_equals_clean_caches(exact, plan, fixed):
    drafter = chain_drafter(exact)
    longest = max(p + sum(kept) for p, kept in plan) + 4
    features, text = texts(drafter, [longest] * len(plan), 1)
    garbage = rand(*features.shape, seed=2).to(features.dtype)
    cache = drafter.new_fixed_cache(len(plan), longest) if fixed else drafter.new_cache(longest)
    assert advance(drafter, cache, features, text, plan, drafter.extend, garbage, drafter.extend) < EXACT


def test_rows_are_selected_and_refilled(owner):
    drafter = chain_drafter(owner)
    features, text = texts(drafter, [6, 6, 6], 0)
    told = drafts((2, drafter.spec.drafted), 0)
    cache = drafter.new_cache(9)
    cache.select(torch.tensor([0]))  # nothing in it yet: nothing to do
    place = torch.arange(6).expand(3, -1)
    drafter.extend(cache, features, place, text[:, :6])
    stay, anchor = torch.tensor([2, 0]), torch.tensor([5, 3])
    cache.select(stay)
    fixed = drafter.new_fixed_cache(3, 12)
    drafter.extend(fixed, 5 * rand(3, 6, features.shape[-1], seed=9), place, text.flip(0)[:, :6])
    fixed.admit(torch.tensor([1, 0]), cache, 6)
    for mine, rows in ((cache, slice(0, 2)), (fixed, torch.tensor([1, 0]))):
        starts, tokens = torch.ones(3 if mine is fixed else 2, dtype=torch.int64), text[[0] * 3, 0].clone()
        tokens = tokens[: len(starts)]
        starts[rows], tokens[rows] = anchor, text[stay, anchor]
        forced = torch.zeros(len(starts), drafter.spec.drafted, dtype=torch.int64)
        forced[rows] = told
        got = drafter.draft(mine, starts, tokens).forced(forced)[rows]
        for i, row in enumerate(stay.tolist()):
            assert gap(got[i], alone(drafter, features[row], text[row], int(anchor[i]), told[i])) < CLOSE


@settings(max_examples=25, deadline=None)
@given(anchors(1), st.integers(0, 100), st.data())
def test_nothing_leaks(owner, plan, seed, data):
    """Features at or above an anchor, tokens above it, other rows and chains change no bit; what is seen changes it."""
    drafter = chain_drafter(owner)
    lengths, places = plan
    features, text = texts(drafter, lengths, seed)
    anchor = torch.tensor(places)
    told = drafts((*anchor.shape, drafter.spec.drafted), seed)
    before = drafter.pack(features, anchor, text).forced(told)
    row = data.draw(st.integers(0, len(lengths) - 1))
    mine = (torch.arange(len(lengths)) == row)[:, None]
    t = data.draw(st.integers(0, max(lengths) - 1))
    louder = features.clone()
    louder[row, t] += rand(features.shape[-1], seed=seed + 1000)
    changed = (drafter.pack(louder, anchor, text).forced(told) != before).flatten(2).any(-1)
    assert torch.equal(changed, (anchor > t) & mine)
    other = text.clone()
    other[row, t] = (other[row, t] + 1) % VOCAB
    changed = (drafter.pack(features, anchor, other).forced(told) != before).flatten(2).any(-1)
    assert torch.equal(changed, (anchor >= t) & mine & (t > 0)), "token 0 has no feature before it"
    block, slot = data.draw(st.integers(0, anchor.shape[1] - 1)), data.draw(st.integers(0, drafter.spec.drafted - 1))
    told[row, block, slot] = (told[row, block, slot] + 1) % VOCAB
    changed = (drafter.pack(features, anchor, text).forced(told) != before).any(-1)
    only = torch.zeros_like(changed)
    only[row, block, slot + 1 :] = True
    assert torch.equal(changed, only), "a drafted token reaches the later slots of its own chain"


def test_padding_anchors_disturb_nobody(owner):
    drafter = chain_drafter(owner)
    features, text = texts(drafter, [6], 0)
    told = drafts((1, 4, drafter.spec.drafted), 0)
    want = drafter.pack(features, torch.tensor([[2, 5]]), text).forced(told[:, :2])
    padded = drafter.pack(features, torch.tensor([[2, 5, 0, 999]]), text).forced(told)
    assert bool(torch.isfinite(padded).all())
    assert gap(padded[:, :2], want) < CLOSE


# ---------------------------------------------------------------- wrong variants


@contextmanager
def spoilt(monkeypatch, way: str):
    """One fault in the packed pass."""
    attend, begin = PackedChains.attend, PackedChains.__init__
    packed, forced = chain.ChainDraft.__init__, chain.ChainDraft.forced

    def chains(self, anchor, slots):
        if way == "anchor's own input":
            anchor = anchor + 1
        if way == "the last input is hidden":
            anchor = anchor - 1
        if way == "anchors unsorted":
            anchor = anchor.sort(1).values
        begin(self, anchor, slots)

    def attending(self, query, key, value, scale=None):
        if way == "only the present slot":
            self._held = tuple(one[:, :, : self._context] for one in self._held)
        found = attend(self, query, key, value, scale)
        if way == "another chain's slots":
            far, n = -key.shape[2], key.shape[2]
            self._held = tuple(torch.cat([t[:, :, :far], t[:, :, -n:].roll(1, 2)], 2) for t in self._held)
        return found

    def drafting(self, *given):
        packed(self, *given)
        if way == "fixed rotary positions":
            self._turns = self._turns[:1] * len(self._turns)

    def told(self, tokens):
        if way == "the anchor's token again":
            tokens = self._tokens.unsqueeze(-1).expand_as(tokens)
        return forced(self, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(PackedChains, "__init__", chains)
        patch.setattr(PackedChains, "attend", attending)
        patch.setattr(chain.ChainDraft, "__init__", drafting)
        patch.setattr(chain.ChainDraft, "forced", told)
        yield


@pytest.mark.parametrize(
    "way",
    [
        "anchor's own input",
        "the last input is hidden",
        "only the present slot",
        "another chain's slots",
        "anchors unsorted",
        "the anchor's token again",
        "fixed rotary positions",
    ],
)
def test_a_fault_in_the_packed_pass_is_noticed(owner, monkeypatch, way):
    drafter = chain_drafter(owner)
    with spoilt(monkeypatch, "none"):
        assert worst(drafter) < CLOSE
    with spoilt(monkeypatch, way):
        assert worst(drafter) > 1e-3


@pytest.mark.parametrize("way", ["features one late", "a position too early", "no waiting feature", "normed state"])
def test_a_fault_in_cached_decoding_is_noticed(owner, monkeypatch, way):
    drafter = chain_drafter(owner)
    if way == "features one late":
        keep = ChainCache.keep
        monkeypatch.setattr(ChainCache, "keep", lambda self, taken, places: keep(self, taken.roll(1, 1), places))
    if way == "a position too early":
        write = ChainCache.write
        monkeypatch.setattr(
            ChainCache, "write", lambda self, n, key, value, at: write(self, n, key, value, (at - 1).clamp(min=0))
        )
    if way == "no waiting feature":
        monkeypatch.setattr(ChainCache, "kept", lambda self, at: torch.zeros(at.shape[0], at.shape[1], 48))
    if way == "normed state":  # the definition notices it, packed and cached being wrong alike
        monkeypatch.setattr(type(drafter), "give", lambda self, output: self.norm(output))
        monkeypatch.setattr(type(drafter), "read", lambda self, state: state)
        features, text = texts(drafter, [7], 4)
        told = drafts((drafter.spec.drafted,), 4)
        want = by_definition(drafter, owner, features[0], text[0], 6, told)
        assert gap(alone(drafter, features[0], text[0], 6, told).double(), want) > 1e-3
        return
    assert worst(drafter) > 1e-3


def test_gradients_reach_every_parameter_through_the_chain(owner):
    drafter = chain_drafter(owner, kv_heads=1)
    features, text = texts(drafter, [6, 4], 0)
    draft = drafter.pack(features, torch.tensor([[2, 5], [1, 4]]), text)
    rows = draft.forced(drafts((2, 2, drafter.spec.drafted), 0))
    drafter.readout.logits(rows[:, :, -1]).log_softmax(-1)[..., int(drafter.support[3])].mean().backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name
        assert parameter.grad.abs().max() > 1e-9, name
    assert all(p.grad is None for p in owner.model.parameters())


def test_bfloat16_computing_over_a_bfloat16_target(owner):
    half = load_target(tiny_model("llama").bfloat16())
    drafter = chain_drafter(owner).bind(half.embed, half.readout)
    features, text = texts(drafter, [8], 0)
    anchor, told = torch.tensor([[3, 6]]), drafts((1, 2, drafter.spec.drafted), 0)
    exact = drafter.pack(features.bfloat16(), anchor, text).forced(told)
    assert exact.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        rough = drafter.pack(features.bfloat16(), anchor, text).forced(told)
    assert gap(rough.float(), exact) < 0.1
    exact.square().mean().backward()
    assert isinstance(drafter, ChainDrafter)


def test_flex_attention_sees_what_the_dense_mask_shows():
    """Fails if a slot's own keys are looked for elsewhere in the row, or if one mask shows what the other hides."""
    anchor = torch.tensor([[3, 150, 140, 20, 1], [150, 1, 17, 50, 0]])
    chains = PackedChains(anchor, 3)
    chains.begin((rand(2, 2, 150, 8, seed=1), rand(2, 2, 150, 8, seed=2)))
    for slot in range(3):
        query, key, value = (rand(2, heads, 5, 8, seed=9 + slot + heads) for heads in (4, 2, 2))
        want = chains.attend(query, key, value)
        assert gap(flex(query, *chains._held, chains._tiled(150 + 5 * (slot + 1))), want) < CLOSE


@pytest.mark.parametrize("most", [masks._NUMBERS, 0], ids=["dense", "flex"])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_gives_what_a_cpu_gives(owner, most, monkeypatch):
    monkeypatch.setattr(masks, "_NUMBERS", most)
    drafter = chain_drafter(owner, head_dim=16, vocab=None)
    features, text = texts(drafter, [300, 300], 0)
    anchor, told = torch.tensor([[3, 150, 299, 20, 1], [300, 1, 17, 150, 150]]), drafts((2, 5, 4), 0)
    want = drafter.pack(features, anchor, text).forced(told)
    want.square().mean().backward()
    far = chain_drafter(load_target(tiny_model("llama").cuda()), head_dim=16, vocab=None)
    far.load_state_dict(drafter.state_dict())
    got = far.pack(features.cuda(), anchor.cuda(), text.cuda()).forced(told.cuda())
    assert gap(got.cpu(), want) < 1e-4
    got.square().mean().backward()
    assert gap(far.fc.weight.grad.cpu(), drafter.fc.weight.grad) < 1e-3
