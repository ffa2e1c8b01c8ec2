"""Checkpoints in z-lab's form: we write what engines look for, and read what was written, and no more."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from draftloop.core.errors import EnvironmentFault, InputError
from draftloop.drafter.build import for_decoding
from draftloop.drafter.dflash import DFlash
from draftloop.drafter.spec import DrafterSpec
from draftloop.formats import zlab
from draftloop.formats.load import load_drafter
from draftloop.formats.tensors import published_shapes
from draftloop.formats.zlab import save_drafter
from draftloop.target.load import load_target
from tests.tiny import tiny_drafter, tiny_model, tiny_target

SPEC = DrafterSpec(
    hidden_size=6, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=10, vocab_size=20, num_target_layers=9,
    target_layers=(1, 4, 7), block_size=5, mask_token_id=19, rope_theta=1e6, norm_eps=1e-5, max_positions=333,
    made_for={"target": "somebody/something", "target_fingerprint": "0123456789abcdef"},
)  # fmt: skip


def loose(spec: DrafterSpec = SPEC, seed: int = 0) -> DFlash:
    """An unbound drafter with loud weights, among them the floats that careless code loses."""
    drafter = DFlash(spec)
    generator = torch.Generator().manual_seed(seed)
    odd = torch.tensor([-0.0, 1e-40, -3.1e38, 1.1754944e-38, 1 + 2**-23])
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 3)
            flat = weight.view(-1)
            flat[: min(5, flat.numel())] = odd[: min(5, flat.numel())]
    return drafter


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def same_bits(a: DFlash, b: DFlash) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    if {n: (t.dtype, t.shape) for n, t in mine.items()} != {n: (t.dtype, t.shape) for n, t in theirs.items()}:
        return False
    return all(torch.equal(bits(mine[n]), bits(theirs[n])) for n in mine)


@pytest.fixture
def saved(tmp_path) -> Path:
    return save_drafter(loose(), tmp_path / "drafter", dtype=torch.float32)


def edit(folder: Path, **changes) -> None:
    """Change keys of config.json; `None` removes one, `nested__x` reaches into dflash_config."""
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        place = config["dflash_config"] if key.startswith("nested__") else config
        key = key.removeprefix("nested__")
        if value is None:
            place.pop(key, None)
        else:
            place[key] = value
    (folder / "config.json").write_text(json.dumps(config))


def retensor(folder: Path, change) -> None:
    """Rewrite model.safetensors by `change(tensors)`, which edits in place or returns another dictionary."""
    tensors = {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()}
    save_file(change(tensors) or tensors, folder / "model.safetensors")
    unpair(folder)


def unpair(folder: Path) -> None:
    """Let config.json accept other weights than those that it was saved with."""
    ours = json.loads((folder / "config.json").read_text())["draftloop"]
    ours.pop("weights_sha256", None)
    edit(folder, draftloop=ours)


def refused(folder, *words: str, target=None) -> InputError:
    """Loading fails as the user's input (status 2), in one sentence that holds these words and a second that helps."""
    with pytest.raises(InputError) as caught:
        load_drafter(folder, target)
    text = str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in text
    assert caught.value.fix, text
    assert str(folder) in text
    for word in words:
        assert word in text, text
    return caught.value


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
    assert ours == {"schema": 1, "made_for": SPEC.made_for, "mask_token": 19}


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


@st.composite
def specs(draw) -> DrafterSpec:
    vocab = draw(st.integers(2, 40))
    depth = draw(st.integers(1, 40))
    kv_heads = draw(st.integers(1, 3))
    return DrafterSpec(
        hidden_size=draw(st.integers(1, 9)),
        layers=draw(st.integers(1, 12)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 3)),
        intermediate_size=draw(st.integers(1, 9)),
        vocab_size=vocab,
        num_target_layers=depth,
        target_layers=tuple(sorted(draw(st.sets(st.integers(0, depth - 1), min_size=1, max_size=5)))),
        block_size=draw(st.integers(2, 33)),
        mask_token_id=draw(st.integers(0, vocab - 1)),
        rope_theta=draw(st.floats(1e-3, 1e12)),
        norm_eps=draw(st.floats(1e-12, 1.0)),
        max_positions=draw(st.integers(1, 1 << 20)),
        made_for=draw(st.dictionaries(st.text(), st.one_of(st.text(), st.integers(), st.none()), max_size=3)),
    )


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
    for change in ({"rope_theta": 77.0, "rope_parameters": None}, {"rms_norm_eps": 1.0}, {"nested__mask_token_id": 6}):
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


# What is refused: the config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 1, "nested__block_size": 1}, ["block_size 1 drafts nothing", "config.json"]),
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
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, ["EAGLE-3", "not read yet"]),
        ({"architectures": ["DFlash2DraftModel"]}, ["DFlash2DraftModel", "not read yet"]),
        ({"architectures": ["Qwen3ForCausalLM"]}, ["Qwen3ForCausalLM", "not read yet"]),
        ({"architectures": None}, ["architectures is missing"]),
        ({"architectures": "DFlashDraftModel"}, ["architectures"]),
        ({"speculators_model_type": "dflash"}, ["transformer_layer_config is missing"]),
        ({"architectures": ["DFlashSpeculator"], "speculators_config": {}}, ["speculators_model_type is missing"]),
        ({"architectures": ["Qwen3DSparkModel"]}, ["DSpark", "Markov", "not read yet"]),
        ({"speculators_model_type": "eagle3"}, ["EAGLE-3", "not read yet"]),
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
    edit(saved, nested__target_layer_ids=[1, 4])
    refused(saved, "fc.weight", "[6, 18]", "[6, 12]")


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


# What is on disk, when


def test_nan_is_not_saved(tmp_path):
    drafter = loose()
    with torch.no_grad():
        drafter.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.up_proj\.weight .*NaN") as caught:
        save_drafter(drafter, tmp_path / "d")
    assert caught.value.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_what_overflows_the_stored_type_is_not_saved(tmp_path):
    drafter = loose()
    with torch.no_grad():
        drafter.norm.weight[0] = 3.4e38  # finite in float32, infinite in bfloat16
    with pytest.raises(InputError, match=r"norm\.weight"):
        save_drafter(drafter, tmp_path / "d")
    assert load_drafter(save_drafter(drafter, tmp_path / "d", dtype=torch.float32)).norm.weight[0] > 3.3e38


@pytest.mark.parametrize("step", ["write_tensors", "write_json"])
def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch, step):
    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(zlab, step, fail)
    with pytest.raises(KeyboardInterrupt):
        save_drafter(loose(), tmp_path / "d")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", ["write_tensors", "write_json"])
def test_a_failed_overwrite_leaves_the_old_drafter(saved, monkeypatch, step):
    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(zlab, step, fail)
    with pytest.raises(KeyboardInterrupt):
        save_drafter(loose(seed=1), saved, dtype=torch.float32)
    assert sorted(p.name for p in saved.iterdir()) == ["config.json", "model.safetensors"]
    assert same_bits(load_drafter(saved), loose())


def test_an_overwrite_replaces_the_drafter_and_spares_the_rest(saved):
    (saved / "README.md").write_text("mine")
    other = loose(replace(SPEC, block_size=9), seed=1)
    assert save_drafter(other, saved, dtype=torch.float32) == saved
    assert sorted(p.name for p in saved.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    loaded = load_drafter(saved)
    assert loaded.spec.block_size == 9
    assert same_bits(loaded, other)


def test_an_overwrite_killed_between_the_two_files_is_noticed(saved, monkeypatch):
    """Same shapes, another mask token: without the weights' hash, the mixture would load and draft nonsense."""
    done, sources = [], []

    def replace_once(source, target, real=os.replace):
        if Path(source).parent != saved and done:  # the second move out of the temporary folder
            raise KeyboardInterrupt
        if Path(target).parent == saved:
            done.append(target)
            sources.append(Path(source))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace_once)
    with pytest.raises(KeyboardInterrupt):
        save_drafter(loose(replace(SPEC, mask_token_id=3), seed=1), saved, dtype=torch.float32)
    monkeypatch.undo()
    assert done == [saved / "model.safetensors"]
    assert sources[0].parent.parent == saved  # within the folder: its parent may be another file system
    refused(saved, "two different saves")
    save_drafter(loose(seed=2), saved, dtype=torch.float32)  # and the next save mends it
    assert same_bits(load_drafter(saved), loose(seed=2))


def test_a_new_folder_appears_whole(tmp_path, monkeypatch):
    seen = []

    def rename(source, target, real=os.rename):
        seen.append((sorted(p.name for p in Path(source).iterdir()), Path(target).exists()))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    save_drafter(loose(), tmp_path / "d")
    assert seen == [(["config.json", "model.safetensors"], False)]
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_an_empty_folder_may_be_filled(tmp_path):
    assert same_bits(load_drafter(save_drafter(loose(), tmp_path, dtype=torch.float32)), loose())


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.json", '{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}', "another model"),
        ("config.json", "{", "another model"),
        ("model.safetensors", "x", "without a config.json"),
        ("pytorch_model.bin", "x", "pytorch_model.bin"),
        ("model-00001-of-00002.safetensors", "x", "model-00001-of-00002.safetensors"),
        ("mask_embedding.pt", "x", "mask_embedding.pt"),
    ],
)
def test_another_model_is_never_overwritten(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=words):
        save_drafter(loose(), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == text


def test_a_file_is_never_overwritten(tmp_path):
    (tmp_path / "d").write_text("x")
    with pytest.raises(InputError, match="a file, not a folder"):
        save_drafter(loose(), tmp_path / "d")
    with pytest.raises(EnvironmentFault, match="cannot write") as caught:
        save_drafter(loose(), tmp_path / "d" / "e")
    assert caught.value.exit_code == 3
    assert (tmp_path / "d").read_text() == "x"


def test_a_write_error_is_the_environments_fault(tmp_path):
    """A real error of the operating system in the midst of the weights (a file-size limit of 2 kB)."""
    drafter = loose()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(EnvironmentFault, match="cannot write") as caught:
            save_drafter(drafter, tmp_path / "d")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (caught.value.exit_code, caught.value.where) == (3, str(tmp_path / "d"))
    assert caught.value.fix
    assert not list(tmp_path.iterdir())


def test_a_full_disk_says_so(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(zlab, "write_tensors", full)
    with pytest.raises(EnvironmentFault, match="the disk is full") as caught:
        save_drafter(loose(), tmp_path / "d")
    assert caught.value.where == str(tmp_path / "d")
    assert not list(tmp_path.iterdir())


def test_weights_of_another_save_are_refused(saved, tmp_path):
    other = save_drafter(loose(seed=1), tmp_path / "other", dtype=torch.float32)
    os.replace(other / "model.safetensors", saved / "model.safetensors")
    refused(saved, "two different saves", "weights_sha256")
    unpair(saved)
    assert same_bits(load_drafter(saved), loose(seed=1))
