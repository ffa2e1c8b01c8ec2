"""What we export, read by the rules of those who load it: every name lands, every layer is the one that was trained."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftloop.formats.export import export
from draftloop.formats.load import load_drafter
from draftloop.formats.tensors import published_shapes
from draftloop.target.load import load_target
from tests import engine_sources as engines
from tests.checkpoints import SPEC, loose, same_bits
from tests.engine_rules import PLACES, complaints, landing, parameters, said
from tests.test_drafter_learned_mask import learned
from tests.tiny import tiny_model, tiny_target

FORMS = ("zlab", "speculators")
READERS = sorted(PLACES)


@pytest.fixture(params=FORMS)
def exported(request, tmp_path) -> tuple[str, Path]:
    made = export(loose(), tmp_path / "out", engine="vllm", form=request.param, dtype=torch.float32)
    return request.param, made.folder


def at_hand(variable: str) -> bool:
    return bool(engines.os.environ.get(variable))


# The rules, as facts


@pytest.mark.parametrize(("reader", "form"), READERS)
def test_an_export_loads_as_it_was_meant(tmp_path, reader, form):
    made = export(loose(), tmp_path / "out", engine="vllm", form=form, dtype=torch.float32)
    assert complaints(made.folder, reader, form, SPEC) == []
    stored = load_file(made.folder / "model.safetensors")
    assert {landing(name) for name in stored} == parameters(SPEC.layers)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == published_shapes(SPEC)


def shift(config, by):
    for place in (config, config.get("dflash_config", {})):
        for key in ("target_layer_ids", "aux_hidden_state_layer_ids"):
            if key in place:
                place[key] = [i + by for i in place[key]]


def wrong_block(config):
    if "dflash_config" in config:
        config["dflash_config"]["block_size"] += 1
    else:
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] += 1


def other_mask(config):
    (config.get("dflash_config") or config)["mask_token_id"] -= 1


def causal(config):
    if "dflash_config" in config:
        config["is_causal"] = True
    else:
        config["sliding_window_non_causal"] = False


WRONG: list[tuple[str, Callable]] = [
    ("taps", lambda config, tensors: shift(config, 1)),
    ("taps", lambda config, tensors: shift(config, -1)),
    ("drafted", lambda config, tensors: wrong_block(config)),
    ("mask", lambda config, tensors: other_mask(config)),
    ("causal", lambda config, tensors: causal(config)),
    ("copy of the target's", lambda config, tensors: tensors.update({"lm_head.weight": torch.zeros(20, 6)})),
    ("copy of the target's", lambda config, tensors: tensors.update({"embed_tokens.weight": torch.zeros(20, 6)})),
    ("unknown", lambda config, tensors: tensors.update({"mask_embedding": torch.zeros(6)})),
    ("stays empty", lambda config, tensors: tensors.pop("layers.1.self_attn.k_proj.weight")),
    ("begins with model.", lambda config, tensors: tensors.update({"model.fc.weight": tensors.pop("fc.weight")})),
    ("filled twice", lambda config, tensors: tensors.update({"model.fc.weight": tensors["fc.weight"].clone()})),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_export_fails(tmp_path, form, case):
    """Off by one, two block sizes, a stray readout: some reader's rules notice each of them."""
    folder = export(loose(), tmp_path / "out", engine="vllm", form=form, dtype=torch.float32).folder
    word, spoil = WRONG[case]
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    spoil(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    found = [text for reader, its in READERS if its == form for text in complaints(folder, reader, form, SPEC)]
    assert any(word in text for text in found), found


def test_the_constants_of_a_toy_target_arrive_where_they_were_trained(tmp_path):
    """Layer k of the toy gives the constant k. Each reader must feed `fc` the constants that we trained it on."""
    model = tiny_model("llama", layers=9)
    for k, layer in enumerate(model.model.layers):
        layer.register_forward_hook(
            lambda module, args, out, k=k: torch.full_like(out[0] if isinstance(out, tuple) else out, k)
        )
    target = load_target(model)
    spec = replace(SPEC, vocab_size=target.vocab_size, num_target_layers=9)
    rows = target.extend(target.new_cache(3), torch.tensor([[5, 6, 7]]), torch.arange(3)[None], spec.target_layers)
    ours = rows.features.unflatten(-1, (len(spec.target_layers), -1))
    assert ours.amin((0, 1, 3)).tolist() == ours.amax((0, 1, 3)).tolist() == [1, 4, 7]

    outputs = [-1.0, *range(9)]  # hidden states: the embedding, then each layer's output
    for form in FORMS:
        folder = export(loose(spec), tmp_path / form, engine="vllm", form=form, target_name="x/y").folder
        config = json.loads((folder / "config.json").read_text())
        for reader in (reader for reader, its in READERS if its == form):
            assert [outputs[i] for i in said(config, reader, form, "taps")] == [1, 4, 7], (reader, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_read_back_is_bit_equal(tmp_path, form, dtype):
    made = export(loose(), tmp_path / "a", engine="vllm", form=form, dtype=dtype)
    loaded = load_drafter(made.folder)
    assert loaded.spec == SPEC
    assert same_bits(loaded, loose().to(dtype))
    again = export(loaded, tmp_path / "b", engine="vllm", form=form, dtype=dtype)
    assert (again.folder / "model.safetensors").read_bytes() == (made.folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("form", FORMS)
def test_a_learned_mask_read_back_is_bit_equal(tmp_path, form):
    drafter = learned(tiny_target("llama"))
    made = export(drafter, tmp_path / "a", engine="vllm", form=form, target_name="x/y", dtype=torch.float32)
    assert set(made.files) == {"config.json", "model.safetensors", "mask_embedding.pt", "README.md", "serve.json"}
    state = torch.load(made.folder / "mask_embedding.pt", weights_only=True)
    assert set(state) == {"embedding", "mask_token_id"}
    assert (state["mask_token_id"], state["embedding"].shape) == (drafter.spec.mask_token_id, (48,))
    loaded = load_drafter(made.folder)
    assert loaded.spec == drafter.spec
    assert same_bits(loaded, drafter)


# The loaders themselves, where an engine is at hand


@pytest.mark.skipif(not at_hand("DRAFTLOOP_VLLM"), reason="DRAFTLOOP_VLLM names no vLLM (site-packages or wheel)")
def test_vllm_reads_both_forms_as_they_were_meant(exported):
    form, folder = exported
    config = json.loads((folder / "config.json").read_text())
    if form == "speculators":
        proposal = engines.vllm_proposal(config)
        assert (proposal["method"], proposal["num_speculative_tokens"]) == ("dflash", SPEC.drafted)
        layers = json.loads(json.dumps(config["transformer_layer_config"]))
        engines.vllm_algorithms()["dflash"](config_dict=config, pre_trained_config=layers)
        config = layers
    assert config["architectures"] == ["DFlashDraftModel"]
    assert engines.vllm_taps(config) == (2, 5, 8)
    assert config["dflash_config"]["mask_token_id"] == SPEC.mask_token_id
    assert config.get("draft_vocab_size") in (None, SPEC.vocab_size)
    assert engines.vllm_causal(config) == [False, False]

    stored = load_file(folder / "model.safetensors")
    got = engines.vllm_loaded(folder, stored, SPEC.mask_token_id)
    assert set(got.pop("dropped")) >= {"embed_tokens", "mask_embedding", "draft_id_to_target_id"}
    assert {landing(name) for name in got} == parameters(SPEC.layers)
    assert all(name.startswith("model.") for name in got)


@pytest.mark.skipif(not at_hand("DRAFTLOOP_VLLM"), reason="DRAFTLOOP_VLLM names no vLLM (site-packages or wheel)")
def test_vllm_takes_the_learned_mask(tmp_path):
    drafter = learned(tiny_target("llama"))
    folder = export(drafter, tmp_path / "a", engine="vllm", target_name="x/y", dtype=torch.float32).folder
    got = engines.vllm_loaded(folder, load_file(folder / "model.safetensors"), drafter.spec.mask_token_id)
    assert torch.equal(got["model.mask_embedding"], drafter.mask_embedding.detach())
    assert "mask_embedding" not in got["dropped"]
    with pytest.raises(ValueError, match="mask_token_id does not match"):
        engines.vllm_loaded(folder, {}, drafter.spec.mask_token_id + 1)


@pytest.mark.skipif(not at_hand("DRAFTLOOP_VLLM"), reason="DRAFTLOOP_VLLM names no vLLM (site-packages or wheel)")
def test_vllm_knows_what_the_command_says(exported):
    form, _ = exported
    made = export(loose(), exported[1], engine="vllm", form=form, probabilistic=True)
    text = engines.source("DRAFTLOOP_VLLM", "vllm/config/speculative.py")
    said_keys = json.loads(made.commands["vllm"][-1])
    assert set(said_keys) == {"method", "model", "num_speculative_tokens", "draft_sample_method"}
    for key in said_keys:
        assert f"\n    {key}:" in text, key
    assert '"dflash"' in text
    assert '"probabilistic"' in text


@pytest.mark.skipif(not at_hand("DRAFTLOOP_SGLANG"), reason="DRAFTLOOP_SGLANG names no SGLang (site-packages or wheel)")
def test_sglang_reads_the_zlab_form_as_it_was_meant(tmp_path):
    folder = export(loose(), tmp_path / "a", dtype=torch.float32).folder
    parsed = engines.sglang_config(json.loads((folder / "config.json").read_text()))
    assert (parsed.block_size, parsed.mask_token_id, parsed.target_layer_ids) == (5, 19, [1, 4, 7])
    assert (parsed.num_hidden_layers, parsed.num_target_layers) == (2, 9)
    assert parsed.projector_type is None
    assert parsed.resolve_target_layer_ids(target_num_layers=9) == [1, 4, 7]

    stored = load_file(folder / "model.safetensors")
    got = engines.sglang_loaded(stored, {name for name, _ in parameters(SPEC.layers)})
    shards = {0: "gate_proj", 1: "up_proj", "q": "q_proj", "k": "k_proj", "v": "v_proj", "": ""}
    assert {(name, shards[shard]) for name, shard, _ in got} == parameters(SPEC.layers)
    assert len(got) == len(stored)


@pytest.mark.skipif(not at_hand("DRAFTLOOP_SGLANG"), reason="DRAFTLOOP_SGLANG names no SGLang (site-packages or wheel)")
def test_sglang_cannot_read_the_speculators_form_and_knows_the_flags(tmp_path):
    folder = export(loose(), tmp_path / "a", engine="vllm", form="speculators").folder
    parsed = engines.sglang_config(json.loads((folder / "config.json").read_text()))
    assert parsed.target_layer_ids is None, "so it would take its default layers"
    command = export(loose(), tmp_path / "b", engine="sglang").commands["sglang"]
    fields = engines.source("DRAFTLOOP_SGLANG", "sglang/srt/arg_groups/fields/spec.py")
    for flag in (word for word in command if word.startswith("--speculative")):
        assert f"\n    {flag.removeprefix('--').replace('-', '_')}:" in fields, shlex.join(command)
