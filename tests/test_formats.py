"""Checkpoints in z-lab's form: we write what engines look for, and read what was written, and no more."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from draftloop.drafter.build import for_decoding
from draftloop.formats.load import load_drafter
from draftloop.formats.tensors import published_shapes
from draftloop.formats.zlab import save_drafter
from draftloop.target.load import load_target
from tests.checkpoints import SPEC, bits, edit, loose, refused, retensor, same_bits, specs, unpair
from tests.tiny import tiny_drafter, tiny_model, tiny_target

# What is written


def test_config_holds_every_key_that_loaders_look_for(saved):
    config = json.loads((saved / "config.json").read_text())
    ours = config.pop("draftloop")
    assert config == {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "dtype": "float32",
        "block_size": 5,
        "dflash_config": {"block_size": 5, "mask_token_id": 19, "target_layer_ids": [1, 4, 7]},
        "num_target_layers": 9,
        "num_hidden_layers": 2,
        "hidden_size": 6,
        "intermediate_size": 10,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 20,
        "max_position_embeddings": 333,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "layer_types": ["full_attention", "full_attention"],
        "max_window_layers": 2,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    assert ours.pop("version")
    assert ours.pop("weights_sha256") == hashlib.sha256((saved / "model.safetensors").read_bytes()).hexdigest()
    assert ours == {"schema": 1, "made_for": SPEC.made_for, "mask_token": 19, "target_layers": list(SPEC.target_layers)}


def test_tensor_names_and_shapes_are_the_published_ones(saved):
    layer = {
        "input_layernorm.weight": (6,),
        "self_attn.q_proj.weight": (32, 6),
        "self_attn.k_proj.weight": (16, 6),
        "self_attn.v_proj.weight": (16, 6),
        "self_attn.q_norm.weight": (8,),
        "self_attn.k_norm.weight": (8,),
        "self_attn.o_proj.weight": (6, 32),
        "post_attention_layernorm.weight": (6,),
        "mlp.gate_proj.weight": (10, 6),
        "mlp.up_proj.weight": (10, 6),
        "mlp.down_proj.weight": (6, 10),
    }
    expected = {"fc.weight": (6, 18), "hidden_norm.weight": (6,), "norm.weight": (6,)}
    expected |= {f"layers.{i}.{name}": shape for i in (0, 1) for name, shape in layer.items()}
    assert sorted(p.name for p in saved.iterdir()) == ["config.json", "model.safetensors"]
    with safe_open(saved / "model.safetensors", framework="pt") as handle:
        assert {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()} == expected  # noqa: SIM118
    assert published_shapes(SPEC) == expected


def test_transformers_reads_the_config_as_we_mean_it(saved):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(saved)
    assert type(config).__name__ == "Qwen3Config"
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert config.layer_types == ["full_attention"] * 2
    assert (config.head_dim, config.block_size, config.dflash_config["block_size"]) == (8, 5, 5)
    assert config.sliding_window is None


def test_default_is_bfloat16_and_extra_facts_are_kept(tmp_path):
    folder = save_drafter(loose(), tmp_path / "deep" / "er", extra={"step": 7})
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["draftloop"]["extra"] == {"step": 7}
    assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert load_drafter(folder).spec == SPEC


def test_same_drafter_same_bytes(tmp_path):
    a, b = (save_drafter(loose(), tmp_path / name) for name in "ab")
    c = save_drafter(loose(seed=1), tmp_path / "c")
    for name in ("config.json", "model.safetensors"):
        assert (a / name).read_bytes() == (b / name).read_bytes()
        assert (a / name).read_bytes() != (c / name).read_bytes()


def test_others_may_read_it(tmp_path):
    old = os.umask(0o022)
    try:
        folder = save_drafter(loose(), tmp_path / "d")
    finally:
        os.umask(old)
    assert [oct(p.stat().st_mode & 0o777) for p in (folder, folder / "config.json")] == ["0o755", "0o644"]


# Round trip


@settings(max_examples=40, deadline=None)
@given(spec=specs(), dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 99))
def test_round_trip_is_bit_equal(tmp_path_factory, spec, dtype, seed):
    drafter = loose(spec, seed)
    folder = save_drafter(drafter, tmp_path_factory.mktemp("trip") / "d", dtype=dtype)
    loaded = load_drafter(folder)
    assert loaded.spec == spec
    assert same_bits(loaded, drafter.to(dtype))
    assert all(p.requires_grad for p in loaded.parameters())
    again = save_drafter(loaded, folder.parent / "again", dtype=dtype)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_dtype_of_the_loaded_drafter(tmp_path):
    folder = save_drafter(loose(), tmp_path / "d")
    assert load_drafter(folder).fc.weight.dtype == torch.bfloat16
    wide = load_drafter(folder, dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    assert torch.equal(wide.fc.weight.bfloat16(), load_drafter(folder).fc.weight)


def test_mixed_types_are_widened_and_lose_nothing(saved):
    def narrow_norms(tensors):
        return {k: v.bfloat16() if v.dim() == 1 else v for k, v in tensors.items()}

    retensor(saved, narrow_norms)
    loaded = load_drafter(saved)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert torch.equal(loaded.fc.weight, loose().fc.weight)
    assert torch.equal(loaded.norm.weight, loose().norm.weight.bfloat16().float())


def test_the_loaded_drafter_outlives_its_folder(saved):
    loaded = load_drafter(saved)
    (saved / "model.safetensors").write_bytes(b"")  # in place: a mapped file would now be gone under our feet
    assert same_bits(loaded, loose())


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_loaded_drafter_drafts_what_the_saved_one_drafts(tmp_path, kind):
    target = load_target(tiny_model(kind).bfloat16())
    drafter = tiny_drafter(target, target_layers=(0, 1, 3))
    served = for_decoding(drafter, target)
    loaded = load_drafter(save_drafter(drafter, tmp_path / "d"), target)
    assert same_bits(loaded, served)
    assert loaded.readout is target.readout

    features = torch.randn(2, 11, 3 * target.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    anchor, tokens = torch.tensor([[3, 7, 11], [1, 5, 9]]), torch.tensor([[4, 9, 60], [8, 2, 33]])
    hidden = served(features, anchor, tokens)
    assert torch.equal(bits(loaded(features, anchor, tokens)), bits(hidden))
    assert not torch.equal(
        for_decoding(tiny_drafter(target, 1, target_layers=(0, 1, 3)), target)(features, anchor, tokens), hidden
    )

    begun = []
    for each in (served, loaded):
        cache = each.new_cache(16)
        each.extend(cache, features, torch.arange(11).expand(2, -1))
        begun.append(each.begin(cache, torch.tensor([11, 6]), torch.tensor([4, 9])))
    assert torch.equal(bits(begun[0]), bits(begun[1]))
    logits = target.readout.logits(begun[0].flatten(0, 1))
    assert torch.equal(loaded.readout.logits(begun[1].flatten(0, 1)), logits)


def test_spec_matters_to_what_is_drafted(tmp_path):
    """What config.json says of rotary base, epsilon and mask token really reaches the loaded drafter."""
    target = tiny_target("llama")
    folder = save_drafter(tiny_drafter(target), tmp_path / "d", dtype=torch.float32)
    features = torch.randn(1, 9, 2 * target.hidden_size, generator=torch.Generator().manual_seed(1))
    where, token = torch.tensor([[8]]), torch.tensor([[4]])
    before = load_drafter(folder, target)(features, where, token)
    for change in (
        {"rope_theta": 77.0, "rope_parameters": None},
        {"rms_norm_eps": 1.0},
        {"nested__mask_token_id": 6, "draftloop": None},
    ):
        kept = (folder / "config.json").read_text()
        edit(folder, **change)
        assert not torch.equal(load_drafter(folder, target)(features, where, token), before), change
        (folder / "config.json").write_text(kept)


# Published checkpoints


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"draftloop": None},
        {"nested__block_size": None},
        {"block_size": None},
        {"rope_parameters": None},
        {"rope_theta": None},
        {"rope_theta": 1000000},
        {"rope_theta": None, "rope_parameters": None, "rope_scaling": {"type": "default", "rope_theta": 1000000}},
        {"architectures": ["DFlashQwen3ForCausalLM"], "auto_map": None},
        {"layer_types": None, "max_window_layers": None},
        {"layer_types": None, "use_sliding_window": None, "sliding_window": 4096},
        {"num_target_layers": None, "nested__num_target_layers": 9},
        {"nested__mask_token_id": None, "mask_token_id": 19},
        {"nested__target_layer_ids": None, "target_layer_ids": [1, 4, 7]},
        {"is_causal": False, "nested__causal": False, "nested__sample_from_anchor": False, "nested__use_swa": False},
        {
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.57.1",
            "draft_vocab_size": 20,
        },
        {"eagle_aux_hidden_state_layer_ids": [2, 5, 8]},
        {"nested__mask_token": "<|MASK|>", "target_hidden_size": 6, "logit_scale": 1.0},
    ],
)
def test_every_published_spelling_is_read(saved, change):
    edit(saved, **change)
    loaded = load_drafter(saved)
    assert loaded.spec == replace(SPEC, made_for={} if "draftloop" in change else SPEC.made_for)
    assert same_bits(loaded, loose())


def test_names_may_have_a_prefix(saved):
    retensor(saved, lambda tensors: {f"model.{name}": tensor for name, tensor in tensors.items()})
    assert same_bits(load_drafter(saved), loose())


def test_weights_may_be_split_over_files(saved):
    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    unpair(saved)
    names = sorted(tensors)
    for i, part in enumerate((names[:9], names[9:])):
        save_file({n: tensors[n] for n in part}, saved / f"model-0000{i + 1}-of-00002.safetensors")
    assert same_bits(load_drafter(saved), loose())
    save_file({names[0]: tensors[names[0]]}, saved / "zzz.safetensors")
    refused(saved, names[0], "stored twice")


def test_a_missing_number_of_target_layers_is_the_targets(tmp_path):
    target = tiny_target("llama")
    folder = save_drafter(tiny_drafter(target), tmp_path / "d")
    edit(folder, num_target_layers=None)
    assert load_drafter(folder, target).spec.num_target_layers == target.num_layers
    refused(folder, "num_target_layers is missing")


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight", "model.embed_tokens.weight"])
def test_a_copy_of_the_targets_own_tensors(tmp_path, name):
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    folder = save_drafter(drafter, tmp_path / "d", dtype=torch.float32)
    own = target.readout.weight if "lm_head" in name else target.model.get_input_embeddings().weight

    retensor(folder, lambda tensors: {**tensors, name: own.detach().clone()})
    assert same_bits(load_drafter(folder, target), drafter)
    refused(folder, name.removeprefix("model."), "together with its target")

    other = own.detach().clone()
    other[-1, -1] += 1e-6
    retensor(folder, lambda tensors: {**tensors, name: other})
    refused(folder, name.removeprefix("model."), "not the target's own", target=target)
    retensor(folder, lambda tensors: {**tensors, name: own.detach()[:-1].clone()})
    refused(folder, "not the target's own", target=target)


# Another target


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layers": 5}, "number of target layers 4, this one has 5"),
        ({"vocab": 62}, "vocabulary 61, this one has 62"),
        ({"hidden_size": 64}, "hidden size 48, this one has 64"),
    ],
)
def test_a_target_of_another_shape_is_refused(tmp_path, changes, word):
    folder = save_drafter(tiny_drafter(tiny_target("llama")), tmp_path / "d")
    refused(folder, "made for a target", word, target=tiny_target("llama", **changes))


def test_a_changed_target_is_only_a_warning(tmp_path):
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    drafter.spec = replace(drafter.spec, made_for={"target": "mine", "target_fingerprint": target.fingerprint})
    folder = save_drafter(drafter, tmp_path / "d", dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_drafter(folder, target)
        load_drafter(folder)
    tuned = tiny_target("llama", seed=1)
    with pytest.warns(UserWarning, match="made for mine .*fewer tokens may be accepted") as caught:
        loaded = load_drafter(folder, tuned)
    assert target.fingerprint in str(caught[0].message)
    assert tuned.fingerprint in str(caught[0].message)
    assert caught[0].filename == __file__
    assert loaded.readout is tuned.readout
    assert same_bits(loaded, drafter)


def test_a_published_drafter_warns_of_nothing(tmp_path):
    target = tiny_target("llama")
    folder = save_drafter(tiny_drafter(target), tmp_path / "d")
    edit(folder, draftloop=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_drafter(folder, target)
