"""What no checkpoint in z-lab's form may say or hold: refused in one sentence, whatever it is."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from draftloop.core.errors import InputError
from draftloop.formats.load import load_drafter
from draftloop.formats.tensors import published_shapes
from draftloop.formats.zlab import save_drafter
from tests.checkpoints import SPEC, edit, loose, refused, retensor

# What is refused: the config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 1, "nested__block_size": 1}, ["block_size 1 drafts nothing", "config.json"]),
        ({"block_size": 10**6, "nested__block_size": 10**6}, ["a block of 1000000 is longer than", "4 to 16"]),
        ({"nested__block_size": 6}, ["block_size is 5 at top level and 6 in dflash_config"]),
        ({"block_size": None, "nested__block_size": None}, ["block_size is missing"]),
        ({"block_size": True, "nested__block_size": True}, ["block_size is true"]),
        ({"block_size": "5", "nested__block_size": None}, ['block_size is "5"']),
        ({"nested__mask_token_id": None}, ["mask_token_id is missing"]),
        ({"nested__mask_token_id": 20}, ["mask token 20 is outside the vocabulary of 20"]),
        ({"nested__mask_token_id": -1}, ["mask_token_id is -1"]),
        ({"mask_token_id": 3}, ["mask_token_id is 3 at top level and 19 in dflash_config"]),
        ({"nested__target_layer_ids": None}, ["target_layer_ids is missing"]),
        ({"nested__target_layer_ids": []}, ["target_layer_ids"]),
        ({"nested__target_layer_ids": [1, 4, 9]}, ["[1, 4, 9] do not all exist", "0 to 8"]),
        ({"nested__target_layer_ids": [-1, 4, 7]}, ["do not all exist"]),
        ({"nested__target_layer_ids": [1, 7, 4]}, ["[1, 7, 4] are not strictly ascending"]),
        ({"nested__target_layer_ids": [1, 4, 4]}, ["not strictly ascending"]),
        ({"nested__target_layer_ids": [1, 4, 7.0]}, ["no list of layer numbers"]),
        ({"nested__target_layer_ids": [True, 4, 7]}, ["no list of layer numbers"]),
        ({"num_target_layers": None}, ["num_target_layers is missing"]),
        ({"rope_theta": None, "rope_parameters": None}, ["rope_theta is missing"]),
        ({"rope_theta": 10000.0}, ["rotary base is said twice", "10000 and", "1e+06"]),
        ({"rope_theta": -1.0, "rope_parameters": None}, ["rope_theta is -1.0"]),
        ({"rope_theta": float("nan"), "rope_parameters": None}, ["rope_theta is NaN"]),
        ({"rope_theta": float("inf"), "rope_parameters": None}, ["rope_theta is Infinity"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling.rope_type", "plain rotary"]),
        ({"rope_parameters": {"rope_theta": 1e6, "mrope_section": [1, 1, 2]}}, ["rope_parameters.mrope_section"]),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"rope_parameters": [1]}, ["rope_parameters is no object"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types holds sliding_attention"]),
        ({"layer_types": ["full_attention"]}, ["each of the 2 layers"]),
        ({"layer_types": None, "use_sliding_window": True, "sliding_window": 64}, ["sliding-window"]),
        ({"nested__use_swa": True, "nested__swa_window_size": 64}, ["use_swa is true", "sliding-window"]),
        ({"is_causal": True}, ["is_causal is true", "causal blocks", "not read yet"]),
        ({"nested__causal": True}, ["dflash_config.causal is true"]),
        ({"nested__sample_from_anchor": True}, ["sample_from_anchor is true", "anchor slot", "not read yet"]),
        ({"sample_from_anchor": True}, ["sample_from_anchor is true"]),
        ({"nested__attention_sink_bias": True}, ["attention sinks"]),
        ({"nested__conv_kernel_size": 3, "nested__conv_group_size": 2}, ["DFlash 2"]),
        ({"nested__projector_type": "domino"}, ["Domino"]),
        ({"projector_type": "domino"}, ["Domino"]),
        ({"nested__final_logit_softcapping": 30.0}, ["caps"]),
        ({"nested__new_trick": 3}, ["dflash_config.new_trick is unknown"]),
        ({"logit_scale": 0.5}, ["logit_scale is 0.5"]),
        ({"attention_bias": True}, ["attention_bias is true", "biases"]),
        ({"hidden_act": "gelu"}, ['hidden_act is "gelu"']),
        ({"is_neox_style": False}, ["interleaved"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantised"]),
        ({"draft_vocab_size": 12}, ["draft_vocab_size is 12", "reduced vocabulary"]),
        ({"target_hidden_size": 12}, ["target_hidden_size is 12"]),
        ({"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama"}, ["EAGLE", "not read yet"]),
        ({"architectures": ["DFlash2DraftModel"]}, ["conv_kernel_size is missing", "DFlash 2"]),
        ({"architectures": ["Qwen3ForCausalLM"]}, ["Qwen3ForCausalLM", "not read yet"]),
        ({"architectures": None}, ["architectures is missing"]),
        ({"architectures": "DFlashDraftModel"}, ["architectures is DFlashDraftModel, and not a list of names"]),
        ({"architectures": [1, 2]}, ["architectures is [1, 2], and not a list of names"]),
        ({"speculators_model_type": "dflash"}, ["transformer_layer_config is missing"]),
        ({"architectures": ["DFlashSpeculator"], "speculators_config": {}}, ["speculators_model_type is missing"]),
        ({"architectures": ["Qwen3DSparkModel"]}, ["markov_rank is null"]),
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, ["EAGLE-3", "Qwen3", "not read yet"]),
        ({"is_causal": False, "nested__causal": True}, ["is_causal is false", "dflash_config.causal is true"]),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}, ["[1, 4, 7] are not one more", "[1, 4, 7]"]),
        ({"model_type": "llama"}, ["model_type is 'llama'"]),
        ({"dflash_config": None}, ["dflash_config is missing"]),
        ({"dflash_config": 3}, ["dflash_config is missing or no object"]),
        ({"num_key_value_heads": 3}, ["4 heads cannot share 3"]),
        ({"head_dim": 7}, ["head_dim 7 is odd"]),
        ({"hidden_size": 0}, ["hidden_size is 0"]),
        ({"hidden_size": 6.0}, ["hidden_size is 6.0"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps is 0"]),
        ({"rms_norm_eps": True}, ["rms_norm_eps is true"]),
        ({"num_hidden_layers": 10**15, "layer_types": None}, ["hold 2 layers, config.json promises 1000000000000000"]),
        ({"hidden_size": 10**15}, ["fc.weight", "[6, 18]"]),
        ({"nested__mask_token_id": 3}, ["draftloop.mask_token is 19", "engines read there is 3", "trained with"]),
        ({"nested__target_layer_ids": [1, 5, 7]}, ["draftloop.target_layers is [1, 4, 7]", "is [1, 5, 7]"]),
        ({"draftloop": {"schema": 2}}, ["schema 2", "Update draftloop"]),
        ({"draftloop": [1]}, ["draftloop"]),
        ({"draftloop": {"schema": 1, "made_for": 3}}, ["draftloop"]),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_read_rightly_is_refused(saved, change, words):
    edit(saved, **change)
    refused(saved, *words)


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "vocab_size", "rms_norm_eps", "max_position_embeddings", "num_target_layers",
    ],
)  # fmt: skip
def test_a_missing_key_is_named(saved, key):
    edit(saved, **{key: None})
    refused(saved, f"the key {key} is missing", "config.json")


@pytest.mark.parametrize("text", ["", "{", '{"a": 1', "\x00\x01", "[" * 100_000, "[1, 2]", "null", '"x"'])
def test_a_config_that_is_no_json_object_is_refused(saved, text):
    (saved / "config.json").write_text(text)
    refused(saved, "JSON", "config.json")


def test_a_config_in_another_encoding_is_refused(saved):
    (saved / "config.json").write_bytes(b"\xff\xfe{}")
    refused(saved, "not JSON")


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_value_of_any_key_escapes_as_another_error(tmp_path_factory, data):
    """Whatever stands at one place of config.json: a drafter or an InputError, never a traceback."""
    folder = save_drafter(loose(), tmp_path_factory.mktemp("fuzz") / "d")
    config = json.loads((folder / "config.json").read_text())
    place = data.draw(
        st.sampled_from([config, config["dflash_config"], config["rope_parameters"], config["draftloop"]])
    )
    leaf = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.just(10**400))
    value = st.one_of(leaf, st.lists(leaf, max_size=3), st.dictionaries(st.text(max_size=3), leaf, max_size=2))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(value)
    (folder / "config.json").write_text(json.dumps(config))
    try:
        load_drafter(folder)
    except InputError as error:
        assert "\n" not in str(error)  # noqa: PT017 - loading may also succeed


# What is refused: the weights


def test_no_folder(tmp_path):
    refused(tmp_path / "nowhere", "no such folder")


def test_a_file_is_no_folder(saved):
    refused(saved / "config.json", "no such folder")


def test_pickles_are_not_read(saved):
    (saved / "model.safetensors").unlink()
    (saved / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    refused(saved, "pickle", "pytorch_model.bin")


def test_a_pickle_by_another_name_is_not_read(saved):
    torch.save({}, saved / "model.safetensors")
    refused(saved, "pickle")


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, -1])
def test_truncated_weights_are_refused(saved, keep):
    whole = (saved / "model.safetensors").read_bytes()
    size = int(len(whole) * keep) if isinstance(keep, float) else keep if keep >= 0 else len(whole) + keep
    (saved / "model.safetensors").write_bytes(whole[:size])
    refused(saved, "model.safetensors")


@pytest.mark.parametrize("name", sorted(published_shapes(SPEC)))
def test_every_tensor_is_needed_and_checked(saved, name):
    whole = load_file(saved / "model.safetensors")
    whole = {k: v.clone() for k, v in whole.items()}
    shape = list(whole[name].shape)

    retensor(saved, lambda t: {k: v for k, v in t.items() if k != name})
    refused(saved, f"tensor {name} is missing")

    wide = [shape[0] + 1, *shape[1:]]
    save_file({**whole, name: torch.zeros(wide)}, saved / "model.safetensors")
    refused(saved, name, str(wide), str(shape), "promises")

    if len(shape) == 2 and shape[0] != shape[1]:  # same size, wrong way round
        save_file({**whole, name: whole[name].t().contiguous()}, saved / "model.safetensors")
        refused(saved, name, str(shape[::-1]), str(shape))

    for bad in (float("nan"), float("inf"), float("-inf")):
        hurt = whole[name].clone()
        hurt.view(-1)[-1] = bad
        save_file({**whole, name: hurt}, saved / "model.safetensors")
        refused(saved, name, "NaN or infinity")


def test_missing_tensors_are_counted(saved):
    def drop(tensors):
        del tensors["norm.weight"], tensors["fc.weight"]

    retensor(saved, drop)
    refused(saved, "tensor fc.weight is missing, and 1 more")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fc.bias", ["fc.bias", "no part of a DFlash drafter"]),
        ("layers.0.self_attn.q_proj.bias", ["q_proj.bias"]),
        ("layers.2.mlp.up_proj.weight", ["hold 3 layers, config.json promises 2"]),
        ("model.model.fc.weight", ["model.fc.weight"]),
        ("optimizer.fc.weight", ["optimizer.fc.weight"]),
        ("model.fc.weight", ["stored twice"]),
        ("d2t", ["d2t", "reduced vocabulary"]),
        ("t2d", ["t2d", "reduced vocabulary"]),
        ("mask_hidden", ["mask_hidden", "learned mask vector"]),
        ("mask_embedding", ["learned mask vector"]),
        ("midlayer.hidden_norm.weight", ["midlayer.hidden_norm.weight"]),
    ],
)
def test_unexpected_tensors_are_refused(saved, name, words):
    retensor(saved, lambda tensors: {**tensors, name: torch.ones(3)})
    refused(saved, *words)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(saved, dtype):
    retensor(saved, lambda tensors: {**tensors, "fc.weight": tensors["fc.weight"].clamp(-1, 1).to(dtype)})
    refused(saved, "fc.weight", "quantised")


def test_a_quantised_copy_of_the_readout_is_refused(saved):
    retensor(saved, lambda tensors: {**tensors, "lm_head.weight": torch.zeros(20, 6).to(torch.float8_e4m3fn)})
    refused(saved, "lm_head.weight", "quantised")


def test_a_layer_too_few_is_refused(saved):
    retensor(saved, lambda t: {k: v for k, v in t.items() if not k.startswith("layers.1.")})
    refused(saved, "hold 1 layers, config.json promises 2")


def test_another_number_of_taps_is_refused(saved):
    edit(saved, nested__target_layer_ids=[1, 4], draftloop=None)
    refused(saved, "fc.weight", "[6, 18]", "[6, 12]")
