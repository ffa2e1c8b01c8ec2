"""DFlash 2 checkpoints: what is written, what is read back, published ones, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from draftloop.core.errors import InputError
from draftloop.drafter.dflash2 import DFlash2
from draftloop.formats.export import export
from draftloop.formats.load import load_drafter
from draftloop.formats.tensors import published_shapes
from draftloop.formats.zlab import save_drafter
from tests.checkpoints import SPEC, edit, refused, retensor, same_bits, unpair
from tests.dflash2_tiny import tiny_dflash2, widened
from tests.tiny import tiny_target

pytestmark = pytest.mark.families

SIZES = {"selector_rank": 7, "selector_top_k": 3, "conv_kernel_size": 2, "conv_group_size": 3}
SPEC2 = widened(SPEC, **SIZES)


def loud(spec=SPEC2) -> DFlash2:
    drafter = DFlash2(spec)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 3)
    return drafter


@pytest.fixture
def saved(tmp_path):
    return save_drafter(loud(), tmp_path / "drafter", dtype=torch.float32)


def test_what_config_json_says(saved):
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["DFlash2DraftModel"]
    assert config["is_causal"] is False
    assert "auto_map" not in config
    assert config["layer_types"] == ["full_attention", "full_attention"]
    assert config["block_size"] == 5
    assert config["dflash_config"] == {
        "block_size": 5, "mask_token_id": 19, "target_layer_ids": [1, 4, 7], **SIZES,
    }  # fmt: skip


def test_names_and_shapes_are_the_published_ones(saved):
    found = {name: tuple(tensor.shape) for name, tensor in load_file(saved / "model.safetensors").items()}
    assert found == published_shapes(SPEC2)
    for side in ("attention", "mlp"):
        assert found[f"layers.1.{side}_conv.base_kernel"] == (2, 2, 6)
        assert found[f"layers.1.{side}_conv.kernel_projection.weight"] == (8, 6)
    assert found["candidate_selector.predecessor_codebook"] == (20, 7)
    assert found["candidate_selector.successor_codebook"] == (20, 7)
    assert found["candidate_selector.hidden_projection.weight"] == (7, 6)
    assert len(published_shapes(replace(SPEC2, layers=5, block_size=8))) == 81  # as in Qwen3.8-27B-DFlash2


@pytest.mark.parametrize(
    "spec",
    [
        SPEC2,
        replace(SPEC2, sliding_window=2048, conv_kernel_size=3),
        replace(SPEC2, output_multiplier=0.25, final_logit_softcapping=20.0),
    ],
)
def test_it_loads_back_the_same(tmp_path, spec):
    drafter = loud(spec)
    made = load_drafter(save_drafter(drafter, tmp_path / "d", dtype=torch.float32))
    assert made.spec == spec
    assert same_bits(made, drafter)
    if spec.output_multiplier != 1.0:
        with pytest.raises(InputError, match="speculators form cannot say"):
            export(drafter, tmp_path / "s", engine="vllm", form="speculators", dtype=torch.float32)
        return
    exported = export(drafter, tmp_path / "s", engine="vllm", form="speculators", dtype=torch.float32)
    config = json.loads((exported.folder / "config.json").read_text())
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "dflash2"
    assert {key: config[key] for key in SIZES} == {key: getattr(spec, key) for key in SIZES}
    again = load_drafter(exported.folder)
    assert again.spec == spec
    assert same_bits(again, drafter)


def test_an_export_drafts_the_same_and_says_how_it_is_served(tmp_path):
    target = tiny_target()
    drafter = tiny_dflash2(target)
    made = export(drafter, tmp_path / "e", target_name="somebody/something", dtype=torch.float32)
    assert '"method":"dflash"' in made.commands["vllm"][-1]
    assert '"num_speculative_tokens":3' in made.commands["vllm"][-1]
    card = (made.folder / "README.md").read_text()
    assert "DFlash 2 drafter" in card
    assert "DFlash2DraftModel" in card
    assert "5 candidates a token, rank 6" in card
    draws = export(drafter, tmp_path / "draws", target_name="somebody/something", probabilistic=True)
    assert not any("argmax" in note for note in draws.notes), "SGLang's selector draws"
    again = load_drafter(made.folder, target)
    ids = torch.randint(6, target.vocab_size, (1, 12))
    place = torch.arange(12).unsqueeze(0)
    features = target.extend(target.new_cache(12), ids, place, (0, 2)).features
    tokens, anchor = torch.randint(6, target.vocab_size, (1, 2, 3)), torch.tensor([[4, 9]])
    one, other = (d.pack(features, anchor, ids).forced(tokens) for d in (drafter, again))
    assert torch.equal(one, other)
    assert torch.equal(drafter.readout.logits(one), again.readout.logits(other))


def test_the_published_form_is_read(saved):
    """Sliding layers that are not causal, sizes nested alone, no key of ours; as Qwen3.8-27B-DFlash2 is published."""
    edit(
        saved, layer_types=["sliding_attention"] * 2, sliding_window=2048, use_sliding_window=True, rope_theta=None,
        block_size=None, draftloop=None, max_window_layers=2, eos_token_id=3, pad_token_id=3,
    )  # fmt: skip
    made = load_drafter(saved)
    assert made.spec == replace(SPEC2, sliding_window=2048, made_for={})
    assert made.window == 2048


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 64, "is_causal": None}, ["not causal"]),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 64, "is_causal": True}, ["causal blocks"]),
        ({"layer_types": ["sliding_attention"] * 2, "is_causal": False}, ["sliding_window is missing"]),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}, ["shorter than the block"]),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64, "nested__swa_window_size": 32},
            ["said twice"],
        ),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}, ["one kind"]),
        ({"nested__selector_rank": None}, ["selector_rank", "missing"]),
        ({"nested__conv_group_size": 4}, ["groups of 4"]),
        ({"nested__conv_kernel_size": 2.0}, ["whole number"]),
        ({"nested__selector_rank": 8}, ["shape"]),
        ({"nested__input_embedding_scale": 2.0}, ["input_embedding_scale", "unknown"]),
        ({"nested__output_multiplier": "big"}, ["output_multiplier", "not a number"]),
        ({"nested__projector_type": "domino"}, ["Domino"]),
        ({"architectures": ["DFlashDraftModel"]}, ["DFlash 2"]),
        ({"architectures": ["DFlash2DraftModel", "Other"]}, ["not read yet"]),
    ],
)
def test_what_is_not_whole_is_refused(saved, changes, words):
    unpair(saved)
    edit(saved, **changes)
    refused(saved, *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("candidate_selector.successor_codebook"), ["successor_codebook", "missing"]),
        (
            lambda t: t.update({"candidate_selector.x": t.pop("candidate_selector.predecessor_codebook")}),
            ["predecessor_codebook", "missing"],
        ),
        (lambda t: t.update({"markov_head.markov_w1.weight": torch.zeros(2)}), ["no part of a DFlash 2 drafter"]),
    ],
)
def test_tensors_that_are_not_whole_are_refused(saved, change, words):
    def spoil(tensors):
        change(tensors)

    retensor(saved, spoil)
    refused(saved, *words)
