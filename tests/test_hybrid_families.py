"""Attention and feed-forward kinds that masks by logical position serve: sliding, chunked, sinks, experts."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from draftloop.core.errors import InputError
from draftloop.supervise.score import scored_rows
from draftloop.target.attention import CHUNKED, SLIDING, SoftmaxAttention
from draftloop.target.load import _read_model, load_target
from tests.test_target import worst_row
from tests.tiny import EOS, VOCAB
from tests.trees import awkward, blocks_of, keep, worst

pytestmark = pytest.mark.hybrid

EXACT = 1e-6  # of the largest logit, float64; rotary tables and norms stay float32
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "qwen3 moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "mixtral": ("Mixtral", EXPERTS),
    "gemma3, sliding and full": ("Gemma3", {"layer_types": MIXED, "sliding_window": 5}),
    "gpt-oss, sliding with sinks": ("GptOss", {"layer_types": MIXED, "sliding_window": 5, **EXPERTS}),
    "chunked and full": (
        "Llama4", {"attention_chunk_size": 5, "layer_types": ["chunked_attention", "full_attention"] * 2,
                   "no_rope_layers": [1, 0, 1, 0], "attn_temperature_tuning": False, "intermediate_size_mlp": 64,
                   "use_qk_norm": False, "moe_layers": [1, 3], **EXPERTS},
    ),
}  # fmt: skip


def family_model(family: str, **more):
    import transformers

    name, changes = FAMILIES[family]
    shared = dict(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=256, eos_token_id=EOS, bos_token_id=1,
        pad_token_id=0, attn_implementation="eager" if name == "GptOss" else "sdpa",
    )  # fmt: skip
    config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config(**{**shared, **changes, **more})).eval()
    model.config._experts_implementation = "eager"  # the grouped kernel has no float64
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
    return model


@cache
def loud(family: str):
    return load_target(family_model(family).double())


@pytest.fixture(params=FAMILIES)
def target(request):
    return loud(request.param)


@pytest.mark.parametrize("kept", [False, True], ids=["recompute", "keep"])
def test_branches_equal_plain_forwards(target, kept):
    lessons, cells = awkward()
    if kept:
        keep(target, lessons)
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 6))) < EXACT


def test_ragged_rows_with_rejections_equal_each_row_alone(target):
    assert worst_row(target, (3, [(4, [3, 0, 2]), (1, [0, 1, 1]), (9, [2, 2, 2])]), 0) < EXACT


@pytest.mark.parametrize(
    ("family", "kind", "key"),
    [("chunked and full", CHUNKED, "attention_chunk_size"), ("gpt-oss, sliding with sinks", SLIDING, "sliding_window")],
)
@pytest.mark.parametrize("how", ["by slot", "one wider", "not at all"])
def test_a_wrong_border_is_noticed(monkeypatch, family, kind, key, how):
    target = loud(family)
    right = SoftmaxAttention.tree_masks

    def spoilt(self, tree, first=0, flex=False):
        masks = right(self, tree, first)
        size = getattr(self.config, key) + (how == "one wider")
        slots = torch.arange(tree.tokens.shape[1]).expand_as(tree.tokens)
        place = tree.position if how == "one wider" else slots
        query, key_place = place[:, first:].unsqueeze(-1), place.unsqueeze(1)
        inside = query // size == key_place // size if kind == CHUNKED else query - key_place < size
        own = torch.eye(tree.tokens.shape[1], dtype=torch.bool)[first:]
        seen = tree.dense_mask(first)
        return {**masks, kind: seen if how == "not at all" else seen & (inside | own).unsqueeze(1)}

    monkeypatch.setattr(SoftmaxAttention, "tree_masks", spoilt)
    lessons, cells = awkward()
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 6))) > 1e-4


def test_a_boolean_mask_under_eager_attention_would_be_noticed(monkeypatch):
    monkeypatch.setattr("draftloop.target.model._added", lambda masks, dtype: masks)
    with pytest.raises(InputError, match="does not agree|cannot run"):
        load_target(family_model("gpt-oss, sliding with sinks"))


def test_a_folder_of_a_class_without_sdpa_is_read(tmp_path):
    family_model("gpt-oss, sliding with sinks").save_pretrained(tmp_path)
    model = _read_model(str(tmp_path), "it", torch.float32, torch.device("cpu"), None, False)
    assert model.config._attn_implementation == "eager"
    assert load_target(model).num_layers == 4


def test_queries_scaled_by_slot_are_refused():
    with pytest.raises(InputError, match="attn_temperature_tuning"):
        load_target(family_model("chunked and full", attn_temperature_tuning=True))


def test_chunked_layers_need_their_size():
    model = family_model("chunked and full")
    model.config.attention_chunk_size = None
    with pytest.raises(InputError, match="names no `attention_chunk_size`"):
        load_target(model)
