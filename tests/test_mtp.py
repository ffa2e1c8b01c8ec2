"""Multi-token prediction: transformers' own heads say the same; packed = cached; no leaks; decoding exact; training; files."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftloop.core.errors import InputError
from draftloop.decode.loop import decode, engine_of
from draftloop.decode.trace import Options
from draftloop.drafter.build import for_decoding
from draftloop.drafter.families import spec_for
from draftloop.drafter.masks import PackedChains
from draftloop.formats.load import load_drafter
from draftloop.recipe import DrafterPart
from tests.mtp_tiny import NATIVE, mtp_drafter, mtp_target, native_folder, native_target
from tests.packed import gap
from tests.stand_ins import WAYS, requests_of
from tests.tiny import VOCAB

pytestmark = pytest.mark.families
KINDS = ("llama", "qwen3", "phi", "qwen3_5", "deepseek_v3")
DENSE = ("llama", "qwen3_5")
CLOSE = 2e-5  # of the largest entry, in float32


@pytest.fixture(scope="module", params=KINDS)
def target(request):
    return mtp_target(request.param)


@pytest.fixture(scope="module")
def llama():
    return mtp_target("llama")


def texts(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(6, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def features_of(target, text: torch.Tensor) -> torch.Tensor:
    place = torch.arange(text.shape[1]).expand_as(text)
    return target.extend(target.new_cache(text.shape[1]), text, place, (target.num_layers,)).features


# ---------------------------------------------------------------- the tap behind the last layer


def test_the_tap_behind_the_last_layer_is_the_hidden_row(target):
    text = texts(2, 9)
    place = torch.arange(9).expand(2, -1)
    rows = target.extend(target.new_cache(9), text, place, (0, target.num_layers))
    plain = target.model.get_decoder()(input_ids=text, use_cache=False).last_hidden_state
    assert torch.equal(rows.features[..., target.hidden_size :], rows.hidden)
    assert gap(rows.hidden, plain) < CLOSE
    raw = target.extend(target.new_cache(9), text, place, (target.num_layers - 1,)).features
    assert gap(raw, plain) > 0.01  # the last layer's own output is not it


def test_where_few_rows_are_read_features_are_whole(llama):
    from draftloop.core.tree import pack_branches

    text, one = texts(1, 9)[0], torch.ones(1, dtype=torch.int64)
    packed = pack_branches([text], [0], 0 * one, 3 * one, texts(1, 2, 1), 2 * one, aligned=True)
    read = (torch.zeros(2, dtype=torch.int64), packed.slot[0])
    few = llama.score(packed.tree, (1, llama.num_layers), read)
    every = llama.score(packed.tree, (1, llama.num_layers))
    assert gap(few.features, every.features) < CLOSE
    assert gap(few.hidden, every.hidden[read]) < CLOSE


# ---------------------------------------------------------------- native heads against transformers' own


@torch.no_grad()
def by_transformers(target, text: torch.Tensor, anchor: int, forced: torch.Tensor) -> torch.Tensor:
    """[K, H]: the whole sequence through transformers' head anew for every slot, without a cache.

    Args:
        text: int64 [1, T].
        anchor: position.
        forced: int64 [1, K], the drafted tokens.
    """
    modeling = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(modeling, "MtpModel"):
        pytest.skip("this transformers has no heads")
    model = target.model
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    model._keys_to_ignore_on_load_unexpected = [r"^mtp.*", rf"model\.layers\.{target.num_layers}\..*"]
    head = modeling.MtpModel.from_pretrained(model)
    head.config._experts_implementation = "eager"
    hidden, tokens, rows = features_of(target, text)[:, :anchor], text[:, 1 : anchor + 1], []
    for k in range(forced.shape[1]):
        place = torch.arange(1, hidden.shape[1] + 1).unsqueeze(0)
        out = head.forward_layer(0, hidden, place, None, input_ids=tokens)[:, -1:]
        rows.append(out[0, 0])
        hidden, tokens = torch.cat([hidden, out], 1), torch.cat([tokens, forced[:, k : k + 1]], 1)
    return torch.stack(rows)


@pytest.mark.parametrize("kind", NATIVE)
def test_a_native_head_drafts_what_transformers_head_drafts(kind, tmp_path, monkeypatch):
    target = native_target(native_folder(kind, tmp_path / "target"))
    drafter = load_drafter("native", target, block_size=5)
    assert drafter.spec.drafted == 4
    text, forced = texts(1, 12), texts(1, 4, 1)

    def ours(anchor: int) -> torch.Tensor:
        return drafter.pack(features_of(target, text), torch.tensor([[anchor]]), text).forced(forced.unsqueeze(1))[0, 0]

    want = {anchor: by_transformers(target, text, anchor, forced) for anchor in (1, 9)}
    assert max(gap(ours(anchor), rows) for anchor, rows in want.items()) < CLOSE
    # what would be silently wrong, and is noticed
    monkeypatch.setattr(drafter, "spec", replace(drafter.spec, feeds="raw"))
    assert gap(ours(9)[:1], want[9][:1]) < CLOSE  # the first slot does not read what is handed on
    assert gap(ours(9), want[9]) > 1e-3
    monkeypatch.undo()
    halves = drafter.fc.weight.data.chunk(2, 1)
    monkeypatch.setattr(drafter.fc.weight, "data", torch.cat([halves[1], halves[0]], 1))
    assert gap(ours(9), want[9]) > 1e-2
    monkeypatch.undo()
    true, begin = PackedChains.attend, PackedChains.begin

    def earlier_hidden(chains, query, key, value, scale):
        chains._held = tuple(one[:, :, : chains._context] for one in chains._held)
        return true(chains, query, key, value, scale)

    def anchor_earlier(chains, context):
        begin(chains, context)
        chains._anchor = chains._anchor - 1

    for name, wrong in (
        ("attend", lambda chains, query, key, value, scale: true(chains, query, key, value, 2 * scale)),
        ("attend", earlier_hidden),
        ("begin", anchor_earlier),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(PackedChains, name, wrong)
            assert gap(ours(9), want[9]) > 1e-4


# ---------------------------------------------------------------- packed = sequential, no leaks


@torch.no_grad()
def alone(drafter, features, text, anchor: int, forced):
    """[K, H] by the decode path from one anchor, the context fed in two parts."""
    cache = drafter.new_cache(anchor + 8)
    half = anchor // 2
    for part in (slice(0, half), slice(half, anchor)):
        if part.stop > part.start:
            place = torch.arange(part.start, part.stop).unsqueeze(0)
            drafter.extend(cache, features[None, part], place, text[None, part])
    return drafter.draft(cache, torch.tensor([anchor]), text[anchor].view(1)).forced(forced.unsqueeze(0))[0]


def test_packed_is_sequential(target):
    drafter = mtp_drafter(target)
    text = texts(2, 14)
    features, anchor = features_of(target, text), torch.tensor([[3, 8, 1], [13, 7, 7]])
    forced = texts(6, drafter.spec.drafted, 3).view(2, 3, -1)
    with torch.no_grad():
        packed = drafter.pack(features, anchor, text).forced(forced)
    worst = 0.0
    for i, places in enumerate(anchor.tolist()):
        for j, a in enumerate(places):
            worst = max(worst, gap(packed[i, j], alone(drafter, features[i], text[i], a, forced[i, j])))
    assert worst < CLOSE
    assert gap(packed[0, 0], alone(drafter, features[0], text[0], 4, forced[0, 0])) > 1e-2


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_the_first_positions_embedding_can_be_left_out(kind):
    """As vLLM does it: the same as an embedding that is zero for the token at position 1, and for that one alone."""
    target = mtp_target(kind)
    drafter = mtp_drafter(target)
    text = texts(1, 10)
    text[0, 1] = VOCAB - 1
    text[0, 2:][text[0, 2:] == VOCAB - 1] = 7
    features, anchors = features_of(target, text), torch.tensor([[1, 2, 6]])
    forced = torch.full((1, 3, drafter.spec.drafted), 9)
    with torch.no_grad():
        plain = drafter.pack(features, anchors, text).forced(forced)
        embed = drafter._embedded
        drafter._embedded = lambda tokens: embed(tokens).masked_fill((tokens == VOCAB - 1).unsqueeze(-1), 0)
        want = drafter.pack(features, anchors, text).forced(forced)
        del drafter._embedded
        drafter.spec = replace(drafter.spec, blank_first=True)
        got = drafter.pack(features, anchors, text).forced(forced)
        cached = torch.stack([alone(drafter, features[0], text[0], a, forced[0, 0]) for a in (1, 2, 6)])
    assert gap(got, want) < CLOSE
    assert gap(cached, want[0]) < CLOSE
    assert gap(got, plain) > 1e-3


def test_what_a_slot_hands_the_next_can_be_before_the_norm(llama):
    """As vLLM does it for GLM: the same as a module without that norm whose rows are normed for the readout alone."""
    drafter = mtp_drafter(llama)
    text = texts(1, 10)
    features, anchors, forced = features_of(llama, text), torch.tensor([[4]]), torch.full((1, 1, 4), 9)
    with torch.no_grad():
        plain = drafter.pack(features, anchors, text).forced(forced)
        drafter.spec = replace(drafter.spec, feeds="raw")
        got = drafter.pack(features, anchors, text).forced(forced)
        norm, drafter.norm = drafter.norm, torch.nn.Identity()
        want = norm(drafter.pack(features, anchors, text).forced(forced))
    assert gap(got, want) < CLOSE
    assert gap(got[:, :, :1], plain[:, :, :1]) < CLOSE
    assert gap(got[:, :, 1:], plain[:, :, 1:]) > 1e-3


def test_a_head_is_computed_as_the_engine_that_serves_it():
    for kind, engine, way in (
        ("glm4_moe", "vllm", ("raw", True)), ("deepseek_v3", "vllm", ("normed", True)),
        ("qwen3_next", "vllm", ("normed", False)), ("glm4_moe", "sglang", ("normed", False)),
    ):  # fmt: skip
        spec = spec_for(DrafterPart(family="mtp", served_by=engine), mtp_target(kind))
        assert (spec.feeds, spec.blank_first) == way
    assert spec_for(DrafterPart(family="mtp"), mtp_target("glm4_moe")) == spec
    with pytest.raises(ValueError, match="served_by means nothing for family eagle3"):
        DrafterPart(family="eagle3", served_by="vllm")


def test_drawn_is_forced_with_what_was_drawn(target):
    drafter = mtp_drafter(target)
    text = texts(1, 10)

    def choose(rows, slots):
        tokens = drafter.readout.logits(rows.flatten(0, -2)).argmax(-1).view(rows.shape[:-1])
        return tokens, torch.zeros(tokens.shape)

    draft = drafter.pack(features_of(target, text), torch.tensor([[4, 7]]), text)
    tokens, _, rows = draft.drawn(choose)
    assert gap(rows, draft.forced(tokens)) < CLOSE


@torch.no_grad()
def test_no_leaks(target):
    """Features from the anchor on, later tokens, other chains: nothing of them is read."""
    drafter = mtp_drafter(target)
    text, forced = texts(1, 12), texts(2, drafter.spec.drafted, 5).unsqueeze(0)
    features, anchor = features_of(target, text), torch.tensor([[5, 8]])
    rows = drafter.pack(features, anchor, text).forced(forced)
    noise = torch.randn(features.shape, generator=torch.Generator().manual_seed(1))
    later = features.clone()
    later[:, 5:] = noise[:, 5:]
    changed = text.clone()
    changed[:, 6:] = texts(1, 6, 9)
    other = forced.clone()
    other[:, 1] = texts(1, drafter.spec.drafted, 11)
    other[:, 0, -1] = 7  # the last drafted token is not read
    got = drafter.pack(later, anchor, changed).forced(other)
    assert gap(got[0, 0], rows[0, 0]) < 1e-6
    assert gap(got[0, 1], rows[0, 1]) > 1e-2
    for at in range(5):  # but every feature and token before it counts
        nudged = features.clone()
        nudged[:, at] = noise[:, at]
        assert gap(drafter.pack(nudged, anchor, text).forced(forced)[0, 0], rows[0, 0]) > 1e-5


# ---------------------------------------------------------------- decoding


@pytest.mark.parametrize("way", ["greedy", "match"])
def test_decoding_is_lossless(target, way):
    asked = requests_of([2, 5, 9, 4], target.vocab_size, seed=2)
    options = Options(max_new_tokens=18, seed=4, **WAYS[way])
    drafter = for_decoding(mtp_drafter(target, block=4), target)
    plain = decode(target, None, asked, options)
    fast = decode(target, drafter, asked, options)
    assert [one.tokens for one in fast] == [one.tokens for one in plain]


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("way", ["greedy", "ratio"])
def test_the_engine_of_fixed_shapes_drafts_the_same(kind, way):
    target = mtp_target(kind)
    if target.why_not_fixed():
        pytest.skip("the target has no fixed shapes")
    drafter = for_decoding(mtp_drafter(target, block=4), target)
    asked = requests_of([2, 5, 9, 4, 3], target.vocab_size, seed=2)
    options = Options(max_new_tokens=12, seed=4, batch_size=3, record=True, **WAYS[way])
    eager = decode(target, drafter, asked, replace(options, engine="eager"))
    fixed = decode(target, drafter, asked, replace(options, engine="graph"))
    for one, other in zip(eager, fixed, strict=True):
        assert one.tokens == other.tokens
        assert [(s.anchor, s.proposed, s.accepted) for s in one.steps] == [
            (s.anchor, s.proposed, s.accepted) for s in other.steps
        ]
        assert gap(one.features, other.features) < 1e-4


def test_values_narrower_than_keys_have_a_cache_of_their_own():
    target = mtp_target("deepseek_v3")
    drafter = mtp_drafter(target)
    drafter.host.config.n_routed_experts, true = 0, drafter.host.config.n_routed_experts
    assert drafter.why_not_fixed() == ""
    drafter.host.config.n_routed_experts = true
    cache = drafter.new_fixed_cache(2, 16)
    assert (cache._keys[0].shape[-1], cache._values[0].shape[-1]) == (16, 12)
    text = texts(2, 9)
    features, place = features_of(target, text), torch.arange(9).expand(2, -1)
    eager = drafter.new_cache(16)
    for each in (eager, cache):
        drafter.extend(each, features, place, text)
    anchor, forced = torch.tensor([9, 6]), texts(2, 4, 3)
    rows = [drafter.draft(each, anchor, torch.tensor([7, 8])).forced(forced) for each in (eager, cache)]
    assert gap(rows[1], rows[0]) < CLOSE


def test_experts_keep_the_eager_engine():
    target = mtp_target("deepseek_v3")
    drafter = for_decoding(mtp_drafter(target), target)
    assert "experts" in drafter.why_not_fixed()
    with pytest.raises(InputError, match="experts"):
        decode(target, drafter, requests_of([3], target.vocab_size), Options(4, engine="graph"))
    assert engine_of(target, drafter, Options(4)) == "eager"
