"""The drafter: packed = cached = the definition written out slot by slot; no leaks; wrong variants are noticed."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.drafter import dflash
from draftloop.drafter.build import for_decoding, new_drafter
from draftloop.drafter.dflash import DFlash
from draftloop.drafter.masks import block_mask
from draftloop.target.load import load_target
from tests.packed import CLOSE, EXACT, anchors, gap, rand, texts
from tests.packed import exact as exact
from tests.packed import owner as owner
from tests.tiny import VOCAB, tiny_drafter, tiny_model, tiny_spec


def make(owner, seed: int = 0, **changes) -> DFlash:
    """A drafter whose every part matters: loud matrices, norms that are not ones."""
    drafter = new_drafter(dataclasses.replace(tiny_spec(owner), **changes), owner, seed)
    with torch.no_grad():
        for i, (name, weight) in enumerate(drafter.named_parameters()):
            if weight.dim() > 1:
                weight.mul_(24 if "o_proj" in name or "down_proj" in name else 8)
            else:
                weight.copy_(1 + 0.3 * rand(weight.numel(), seed=seed + i))
    return drafter.double() if owner.dtype == torch.float64 else drafter


SHAPES = st.fixed_dictionaries(
    {
        "block_size": st.integers(2, 8),
        "layers": st.integers(1, 3),
        "target_layers": st.sampled_from([(0,), (1, 3), (0, 1, 2)]),
        "heads": st.just(4),
        "kv_heads": st.sampled_from([1, 2, 4]),
        "head_dim": st.sampled_from([2, 8, 12]),
        "rope_theta": st.sampled_from([1e2, 1e4]),
    }
)


@torch.no_grad()
def alone(drafter: DFlash, features: torch.Tensor, anchor: int, token: torch.Tensor) -> torch.Tensor:
    """[K, H] by the decode path: a cache of exactly the features below the anchor, one row."""
    cache = drafter.new_cache(max(anchor, 1))
    if anchor:
        drafter.extend(cache, features[None, :anchor], torch.arange(anchor).unsqueeze(0))
    else:  # nothing is seen; the cache only has to exist
        drafter.extend(cache, features[None, :1], torch.zeros(1, 1, dtype=torch.int64))
    return drafter.begin(cache, torch.tensor([anchor]), token.view(1))[0]


# ---------------------------------------------------------------- packed = sequential


@settings(max_examples=60, deadline=None)
@given(SHAPES, anchors(), st.integers(0, 1000))
def test_packed_is_sequential(exact, shape, plan, seed):
    assert worst(make(exact, seed, **shape), plan, seed) < EXACT


@pytest.mark.parametrize("seed", range(4))
def test_packed_is_sequential_in_float32(owner, seed):
    shape = {"block_size": 2 + 2 * seed, "layers": 1 + seed % 3, "kv_heads": (1, 2, 4, 4)[seed]}
    assert worst(make(owner, seed, **shape), seed=seed) < CLOSE


RAGGED = [9, 7], [[3, 8, 3, 0], [1, 7, 5, 7]]


def worst(drafter: DFlash, plan=RAGGED, seed: int = 5) -> float:
    """The largest gap between all anchors in one forward and each of them alone."""
    lengths, places = plan
    features, tokens = texts(drafter, lengths, seed)
    anchor = torch.tensor(places)
    packed = drafter(features, anchor, tokens.gather(1, anchor))
    assert packed.shape == (len(lengths), anchor.shape[1], drafter.spec.drafted, drafter.spec.hidden_size)
    logits = drafter.readout.logits(packed)
    return max(
        gap(logits[i, j], drafter.readout.logits(alone(drafter, features[i], a, tokens[i, a])))
        for i, row in enumerate(places)
        for j, a in enumerate(row)
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(0, 3), min_size=3, max_size=3)), min_size=1, max_size=3)
)
def test_a_ragged_batch_that_overwrites_rejected_positions_equals_clean_caches(exact, plan):
    """Rows advance by what was accepted; features of rejected positions are written first and overwritten later."""
    drafter = make(exact)
    longest = max(p + sum(kept) for p, kept in plan) + 3
    features, tokens = texts(drafter, [longest] * len(plan), 1)
    garbage = rand(*features.shape, seed=2).to(features.dtype)
    rows, cache = torch.arange(len(plan))[:, None], drafter.new_cache(longest)
    start = torch.tensor([p for p, _ in plan])
    reach = torch.arange(int(start.max()))
    mixed = torch.where((reach < start[:, None])[..., None], features[:, : len(reach)], garbage[:, : len(reach)])
    drafter.extend(cache, mixed, reach.expand(len(plan), -1))
    for step in range(4):
        got = drafter.begin(cache, start, tokens[rows[:, 0], start])
        for i, a in enumerate(start.tolist()):
            want = alone(drafter, features[i], a, tokens[i, a])
            assert gap(drafter.readout.logits(got[i]), drafter.readout.logits(want)) < EXACT
        if step == 3:
            break
        kept = torch.tensor([k[step] for _, k in plan])
        place = start[:, None] + torch.arange(3)  # the whole verified block is fed; only `kept` of it is true
        true = (torch.arange(3) < kept[:, None])[..., None]
        drafter.extend(cache, torch.where(true, features[rows, place], garbage[rows, place]), place)
        start = start + kept


def test_select_keeps_and_reorders_rows(owner):
    drafter = make(owner)
    features, tokens = texts(drafter, [6, 6, 6], 0)
    cache = drafter.new_cache(9)
    cache.select(torch.tensor([0]))  # nothing in it yet: nothing to do
    drafter.extend(cache, features, torch.arange(6).expand(3, -1))
    stay = torch.tensor([2, 0])
    cache.select(stay)
    anchor = torch.tensor([5, 3])
    got = drafter.begin(cache, anchor, tokens[stay, anchor])
    for i, row in enumerate(stay.tolist()):
        want = alone(drafter, features[row], int(anchor[i]), tokens[row, anchor[i]])
        assert gap(got[i], want) < CLOSE


# ---------------------------------------------------------------- the definition, slot by slot


def by_definition(drafter: DFlash, owner, features: torch.Tensor, anchor: int, token: int) -> torch.Tensor:
    """One block of DFlash written out from the paper in float64: a query slot and a head at a time."""
    spec = drafter.spec
    w = {name: value.detach().double() for name, value in drafter.state_dict().items()}

    def norm(x, weight):
        return weight * x / (x.square().mean() + spec.norm_eps).sqrt()

    def turn(x, position):
        """Pairs (i, i + d/2) as complex numbers, turned by position * theta^(-2i/d)."""
        half = spec.head_dim // 2
        z = torch.complex(x[:half], x[half:])
        z = z * torch.polar(
            torch.ones(half).double(), position * spec.rope_theta ** (-torch.arange(half).double() / half)
        )
        return torch.cat([z.real, z.imag])

    context = [norm(w["fc.weight"] @ f.double(), w["hidden_norm.weight"]) for f in features[:anchor]]
    embedding = owner.model.get_input_embeddings().weight.double()
    block = [embedding[token]] + [embedding[spec.mask_token_id]] * spec.drafted
    for n in range(spec.layers):
        at = lambda name, n=n: w[f"layers.{n}.{name}.weight"]  # noqa: E731
        x = [norm(h, at("input_layernorm")) for h in block]
        sources = [(c, t) for t, c in enumerate(context)] + [(h, anchor + k) for k, h in enumerate(x)]
        out = []
        for k, h in enumerate(x):
            heads = []
            for head in range(spec.heads):
                kv = head // (spec.heads // spec.kv_heads)
                rows, own = (slice(i * spec.head_dim, (i + 1) * spec.head_dim) for i in (kv, head))
                query = turn(norm(at("self_attn.q_proj")[own] @ h, at("self_attn.q_norm")), anchor + k)
                keys = [turn(norm(at("self_attn.k_proj")[rows] @ s, at("self_attn.k_norm")), t) for s, t in sources]
                weights = (torch.stack(keys) @ query / math.sqrt(spec.head_dim)).softmax(0)
                heads.append(weights @ torch.stack([at("self_attn.v_proj")[rows] @ s for s, _ in sources]))
            out.append(at("self_attn.o_proj") @ torch.cat(heads))
        block = [h + o for h, o in zip(block, out, strict=True)]
        y = [norm(h, at("post_attention_layernorm")) for h in block]
        block = [
            h + at("mlp.down_proj") @ (F.silu(at("mlp.gate_proj") @ z) * (at("mlp.up_proj") @ z))
            for h, z in zip(block, y, strict=True)
        ]
    return torch.stack([norm(h, w["norm.weight"]) for h in block[1:]])


@pytest.mark.parametrize(("anchor", "kv_heads"), [(0, 2), (1, 4), (6, 1), (7, 2)])
def test_it_is_dflash_as_defined(owner, anchor, kv_heads):
    drafter = make(owner, 3, kv_heads=kv_heads, head_dim=8, block_size=3)
    features, tokens = texts(drafter, [7], 4)
    want = by_definition(drafter, owner, features[0], anchor, int(tokens[0, anchor]))
    packed = drafter(features, torch.tensor([[anchor]]), tokens[:, anchor : anchor + 1])[0, 0]
    assert gap(packed.double(), want) < CLOSE
    assert gap(alone(drafter, features[0], anchor, tokens[0, anchor]).double(), want) < CLOSE


# ---------------------------------------------------------------- wrong variants and leaks


def variant(way: str):
    """`block_mask` with one fault."""

    def mask(anchor, context, size, causal=False, window=None):
        right = block_mask(anchor, context, size, causal, window)
        queries, keys = right.shape[2:]
        q, k = torch.arange(queries).view(-1, 1), torch.arange(keys).view(1, -1)
        at = anchor.repeat_interleave(size, 1)[:, None, :, None]
        inside, own = k < context, (k - context) // size == q // size
        return {
            "anchor's own feature": right | (inside & (k == at)),
            "the last feature is hidden": right & ~(inside & (k == at - 1)),
            "all features": right | inside,
            "causal block": right & (inside | (k - context <= q)),
            "other blocks": right | ~inside,
            "the next block": right | (~inside & ((k - context) // size == q // size + 1)),
            "no block": right & (inside | (k - context == q)),
            "rows swapped": right.flip(0),
            "anchors unsorted": block_mask(anchor.sort(1).values, context, size),
            "right": right | (own & ~inside),
        }[way]

    return mask


@pytest.mark.parametrize(
    "way",
    [
        "anchor's own feature",
        "the last feature is hidden",
        "all features",
        "causal block",
        "other blocks",
        "the next block",
        "no block",
        "rows swapped",
        "anchors unsorted",
    ],
)
def test_a_wrong_mask_is_noticed(owner, monkeypatch, way):
    drafter = make(owner)
    assert worst(drafter) < CLOSE
    monkeypatch.setattr(dflash, "block_mask", variant("right"))
    assert worst(drafter) < CLOSE
    monkeypatch.setattr(dflash, "block_mask", variant(way))
    assert worst(drafter) > 1e-3


@pytest.mark.parametrize("shift", [-1, 1])
def test_positions_off_by_one_are_noticed(owner, monkeypatch, shift):
    drafter = make(owner)
    monkeypatch.setattr(dflash, "block_mask", lambda anchor, *rest: block_mask(anchor - shift, *rest))
    inner = DFlash.forward
    monkeypatch.setattr(DFlash, "forward", lambda self, f, anchor, t: inner(self, f, anchor + shift, t))
    assert worst(drafter) > 1e-3


@settings(max_examples=40, deadline=None)
@given(anchors(), st.integers(0, 100), st.data())
def test_nothing_leaks(owner, plan, seed, data):
    """Features at or above an anchor, other rows and other blocks change no bit of it; what it sees changes it."""
    drafter = make(owner)
    lengths, places = plan
    features, tokens = texts(drafter, lengths, seed)
    anchor = torch.tensor(places)
    given = tokens.gather(1, anchor)
    before = drafter(features, anchor, given)
    row = data.draw(st.integers(0, len(lengths) - 1))
    t = data.draw(st.integers(0, max(lengths) - 1))
    louder = features.clone()
    louder[row, t] += rand(features.shape[-1], seed=seed + 1000)
    changed = (drafter(louder, anchor, given) != before).flatten(2).any(-1)
    sees = (anchor > t) & (torch.arange(len(lengths)) == row)[:, None]
    assert torch.equal(changed, sees)
    block = data.draw(st.integers(0, anchor.shape[1] - 1))
    other = given.clone()
    other[row, block] = (other[row, block] + 1) % VOCAB
    changed = (drafter(features, anchor, other) != before).flatten(3).any(-1)
    only = torch.zeros_like(changed)
    only[row, block] = True
    assert torch.equal(changed, only), "the anchor's token reaches every slot of its block, and no other block"


def test_padding_anchors_disturb_nobody(owner):
    drafter = make(owner)
    features, tokens = texts(drafter, [6], 0)
    want = drafter(features, torch.tensor([[2, 5]]), tokens[:, [2, 5]])
    padded = drafter(features, torch.tensor([[2, 5, 0, 999]]), tokens[:, [2, 5, 0, 0]])
    assert bool(torch.isfinite(padded).all())
    assert gap(padded[:, :2], want) < CLOSE


# ---------------------------------------------------------------- training and decoding copies


@pytest.mark.parametrize("layers", [1, 3])
def test_gradients_reach_every_parameter(owner, layers):
    drafter = make(owner, layers=layers, kv_heads=1)
    features, tokens = texts(drafter, [6, 4], 0)
    anchor = torch.tensor([[2, 5], [1, 4]])
    logits = drafter.readout.logits(drafter(features, anchor, tokens.gather(1, anchor)))
    logits.log_softmax(-1)[..., 7].mean().backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name
        assert parameter.grad.abs().max() > 1e-7, name
    assert all(p.grad is None for p in owner.model.parameters())


def test_a_float32_drafter_over_a_bfloat16_target(owner):
    """With autocast (training in bfloat16) and without (training in float32)."""
    half = load_target(tiny_model("llama").bfloat16())
    drafter = make(owner).bind(half.embed, half.readout)
    features, tokens = texts(drafter, [8], 0)
    anchor = torch.tensor([[3, 6]])
    exact = drafter(features.bfloat16(), anchor, tokens[:, [3, 6]])
    assert exact.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        rough = drafter(features.bfloat16(), anchor, tokens[:, [3, 6]])
    assert gap(rough.float(), exact) < 0.1
    exact.square().mean().backward()
    assert drafter.fc.weight.grad is not None


def test_the_decoding_copy(owner):
    half = load_target(tiny_model("llama").bfloat16())
    drafter = make(half).train()
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    half.__deepcopy__ = lambda memo: pytest.fail("the target is copied along")
    twin = for_decoding(drafter, half)
    assert twin.readout is half.readout
    assert twin.readout.weight.data_ptr() == half.model.lm_head.weight.data_ptr()
    assert not twin.training
    assert drafter.training
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in twin.parameters())
    assert all(p.dtype == torch.float32 and p.requires_grad for p in drafter.parameters())
    for name, value in twin.state_dict().items():
        assert torch.equal(value, before[name].bfloat16())
        value.zero_()
    assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())
    features, tokens = texts(drafter, [5], 0)
    twin = for_decoding(drafter, half)
    cache = twin.new_cache(5)
    twin.extend(cache, features.bfloat16(), torch.arange(5).unsqueeze(0))
    got = twin.begin(cache, torch.tensor([4]), tokens[:, 4])
    assert got.dtype == torch.bfloat16
    assert gap(got[0].float(), alone(drafter, features[0], 4, tokens[0, 4])) < 0.1
    assert torch.equal(tiny_drafter(owner).fc.weight, for_decoding(tiny_drafter(owner), owner).fc.weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_flex_attention_gives_what_the_dense_mask_gives(owner):
    drafter = make(owner, head_dim=16)
    features, tokens = texts(drafter, [300, 300], 0)
    anchor = torch.tensor([[3, 150, 299, 20, 0], [300, 1, 17, 150, 150]])
    want = drafter(features, anchor, tokens.gather(1, anchor))
    want.square().mean().backward()
    far = new_drafter(drafter.spec, load_target(tiny_model("llama").cuda()))
    far.load_state_dict(drafter.state_dict())
    got = far(features.cuda(), anchor.cuda(), tokens.gather(1, anchor).cuda())
    assert gap(got.cpu(), want) < 1e-4
    got.square().mean().backward()
    assert gap(far.fc.weight.grad.cpu(), drafter.fc.weight.grad) < 1e-3
