"""Masks of the proposal tree: a leak is noticed, and windows count positions, in trees as in texts."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from draftloop.core import tree
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options, Request
from draftloop.drafter.build import for_decoding
from draftloop.supervise.score import scored_rows
from draftloop.target import attention
from draftloop.target.load import load_target
from tests.tiny import EOS, VOCAB, tiny_drafter, tiny_model
from tests.trees import (
    EXACT,
    FAMILIES,
    MIXED,
    WINDOW,
    WINDOWED,
    awkward,
    blocks_of,
    keep,
    keep_layers,
    lesson_of,
    loud,
    plain,
    text,
    worst,
)

pytestmark = pytest.mark.specopd

# ------------------------------------------------------------------------------------------------ wrong masks


@dataclasses.dataclass(frozen=True)
class Leaky(attention.SoftmaxAttention):
    """The right family with one thing wrong."""

    way: str

    def tree_masks(self, tree, first=0, flex=False):
        return spoilt(self.way, super().tree_masks(tree), tree, first)


def spoilt(way: str, right, tree, first: int):
    masks = right if isinstance(right, dict) else {"": right}
    q = {name: getattr(tree, name)[:, None, :, None] for name in ("trunk", "branch", "position", "fork")}
    k = {name: getattr(tree, name)[:, None, None, :] for name in ("trunk", "branch", "position", "fork")}
    slots = torch.arange(tree.tokens.shape[1])
    earlier = k["position"] <= q["position"]
    same = (q["trunk"] == k["trunk"]) & (q["trunk"] >= 0)
    out = {}
    for name, mask in masks.items():
        if way == "sibling":
            mask = mask | (same & (q["branch"] >= 0) & (k["branch"] >= 0) & earlier)
        elif way == "later trunk":
            mask = mask | (same & (q["branch"] >= 0) & (k["branch"] < 0) & (k["position"] == q["fork"] + 1))
        elif way == "other trunk":
            mask = mask | ((q["trunk"] >= 0) & (k["trunk"] >= 0) & (k["branch"] < 0) & earlier)
        elif way == "window by slot" and name != "full_attention":
            mask = tree.dense_mask() & (slots[:, None] - slots < WINDOW)
        elif way == "window one wider" and name != "full_attention":
            mask = tree.dense_mask(window=WINDOW + 1)
        elif way == "no window" and name != "full_attention":
            mask = tree.dense_mask()
        out[name] = mask[:, :, first:]
    return out if isinstance(right, dict) else out[""]


WAYS = [(way, family) for way in ("sibling", "later trunk", "other trunk") for family in FAMILIES] + [
    (way, family) for way in ("window by slot", "window one wider", "no window") for family in WINDOWED
]


@pytest.mark.parametrize("kept", [False, True], ids=["recompute", "keep"])
@pytest.mark.parametrize(("way", "family"), WAYS)
def test_a_leaking_mask_is_noticed(monkeypatch, way, family, kept):
    target = loud(family)
    # the two short trunks share a row as wide as the long one
    lessons = [lesson_of(text(24, 1)), lesson_of(text(9, 2), "b"), lesson_of(text(8, 3), "c")]
    cells = [(i, a, text(4, 7 * i + a)) for i in range(3) for a in (2, 6)]
    cells.append((0, 6, text(4, 77)))
    if kept:
        keep(target, lessons)
    right = scored_rows(target, lessons, blocks_of(cells, 4))
    assert worst(target, lessons, cells, right) < EXACT
    monkeypatch.setattr(target, "family", Leaky(target.family.config, target.family.kinds, way))
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 4))) > 1e-4


# ------------------------------------------------------------------------------------------------ windows elsewhere


@pytest.mark.parametrize("family", WINDOWED)
def test_texts_longer_than_the_window_decode_as_the_model_itself_does(family):
    target = loud(family)
    assert target.context_limit == 256
    prompt = text(9, 4)
    want = list(prompt)
    for _ in range(14):
        want.append(int(plain(target, want)[-1].argmax()))
        if want[-1] in target.eos_ids:
            break
    for drafter in (None, for_decoding(tiny_drafter(target).double(), target)):
        asked = [Request(tuple(prompt), 0), Request(tuple(text(4, 8)), 1)]
        made = decode(target, drafter, asked, Options(14, batch_size=2))
        assert list(made[0].tokens) == want[9:]


@pytest.mark.parametrize("family", WINDOWED)
def test_the_configuration_is_as_it_was(family):
    assert loud(family).config.sliding_window == WINDOW


def test_layers_with_rotations_of_their_own():
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=64, eos_token_id=EOS, pad_token_id=0,
        sliding_window=4, layer_types=["sliding_attention", "full_attention"] * 2, attn_implementation="sdpa",
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.3)
    target = load_target(model.double())
    lessons, cells = awkward()
    blocks = blocks_of(cells, 6)
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks)) < 1e-5  # it rotates in float32
    for one in lessons:
        keep_layers(target, one)
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks)) < 1e-5


def test_a_window_that_a_model_counts_otherwise_is_refused(monkeypatch):
    """If our rule were off by one, loading would say so, however long the real window is."""
    right = tree.lowest_seen
    monkeypatch.setattr(tree, "lowest_seen", lambda place, window, chunk: right(place, window and window + 1, chunk))
    for kind, changes in (("mistral", {"sliding_window": 100}), ("qwen3", {**MIXED, "sliding_window": 100})):
        with pytest.raises(Exception, match="tree mask or readout does not agree"):
            load_target(tiny_model(kind, **changes))
