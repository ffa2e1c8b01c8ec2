"""DSpark checkpoints: DeepSpec's form and speculators', written, read back, read by the engines' own code, refused."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftloop.core.errors import InputError
from draftloop.drafter.build import new_drafter
from draftloop.drafter.dspark import DSpark
from draftloop.formats.export import export
from draftloop.formats.load import load_drafter
from draftloop.formats.tensors import published_shapes
from draftloop.formats.zlab import save_drafter
from tests import engine_sources as engines
from tests.checkpoints import edit, same_bits
from tests.dspark_tiny import HEADS, dspark_shape, tiny_dspark
from tests.engine_rules import landing, parameters
from tests.tiny import tiny_drafter, tiny_target

pytestmark = pytest.mark.families
FORMS = ("deepspec", "speculators")


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.mark.parametrize("confidence", [True, False])
@pytest.mark.parametrize("markov", HEADS)
def test_what_is_saved_is_read_back(tmp_path, target, markov, confidence):
    drafter = tiny_dspark(target, markov, confidence=confidence)
    folder = save_drafter(drafter, tmp_path / "d", dtype=torch.float32)
    stored = load_file(folder / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == published_shapes(drafter.spec)
    back = load_drafter(folder, target)
    assert isinstance(back, DSpark)
    assert back.spec == drafter.spec
    assert same_bits(back, drafter)
    assert load_drafter(folder).spec == drafter.spec  # without its target


@pytest.mark.parametrize("form", FORMS)
def test_an_export_in_either_form_is_read_back_and_drafts_the_same(tmp_path, target, form):
    drafter = tiny_dspark(target)
    made = export(drafter, tmp_path / "out", engine="vllm", form=form, target_name="x/y", dtype=torch.float32)
    back = load_drafter(made.folder, target)
    assert same_bits(back, drafter)
    assert replace(back.spec, made_for={}) == replace(drafter.spec, made_for={})
    config = json.loads((made.folder / "config.json").read_text())
    assert config["block_size"] == drafter.spec.drafted == json.loads((made.folder / "serve.json").read_text())["num_speculative_tokens"]  # fmt: skip
    card = (made.folder / "README.md").read_text()
    assert "4 slots, the last token's included; 4 tokens are drafted" in card
    assert "| Markov head | vanilla, rank 6 |" in card
    assert any("drafts shifted by one" in note for note in made.notes) == (form == "speculators")


def test_the_commands_name_the_method(tmp_path, target):
    made = export(tiny_dspark(target), tmp_path / "out", target_name="x/y")
    assert json.loads(made.commands["vllm"][-1]) == {
        "method": "dspark", "model": str(made.folder), "num_speculative_tokens": 4,
    }  # fmt: skip
    assert "--speculative-algorithm DSPARK --speculative-draft-model-path" in shlex.join(made.commands["sglang"])


def test_sglang_draws_its_drafts_so_training_for_overlap_pays(tmp_path, target):
    made = export(tiny_dspark(target), tmp_path / "out", target_name="x/y", probabilistic=True)
    assert not any("argmax" in note for note in made.notes)


def as_deepspec(folder, target, **changes):
    """A folder as DeepSpec writes it: its keys at top level alone, and copies of what is the target's."""
    config = json.loads((folder / "config.json").read_text())
    del config["dflash_config"], config["draftloop"]
    (folder / "config.json").write_text(json.dumps(config | changes))
    tensors = load_file(folder / "model.safetensors")
    tensors["embed_tokens.weight"] = target.model.get_input_embeddings().weight.detach().clone()
    tensors["lm_head.weight"] = target.readout.weight.detach().clone()
    return tensors


def test_a_published_checkpoint_with_the_targets_copies_is_read(tmp_path, target):
    drafter = tiny_dspark(target, "gated")
    folder = save_drafter(drafter, tmp_path / "d", dtype=torch.float32)
    tensors = as_deepspec(folder, target)
    flat = {name.replace("markov_head.markov_w1.weight", "markov_w1.weight"): one for name, one in tensors.items()}
    for stored in (tensors, flat):
        save_file(stored, folder / "model.safetensors")
        assert same_bits(load_drafter(folder, target), drafter)
    with pytest.raises(InputError, match="Load it together with its target"):
        load_drafter(folder)
    tensors["lm_head.weight"] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"lm_head\.weight is not the target's own"):
        load_drafter(folder, target)


def test_the_bare_backbone_of_deepspec_is_read_too(tmp_path, target):
    """`dflash_block7` of DeepSpec: the same class with the heads absent, which drafts from its anchor slot."""
    drafter = tiny_dspark(target, "none", confidence=False)
    folder = save_drafter(drafter, tmp_path / "d", dtype=torch.float32)
    save_file(as_deepspec(folder, target), folder / "model.safetensors")
    back = load_drafter(folder, target)
    assert (back.spec.markov, back.spec.confidence, back.spec.drafted) == ("none", False, 4)


BAD = [
    ({"markov_rank": None}, "markov_rank is null"),
    ({"markov_rank": 7}, r"shape \[61, 6\], config.json promises \[61, 7\]"),
    ({"markov_head_type": "wild"}, "not vanilla, gated or rnn"),
    ({"markov_head_type": "gated"}, "gate_proj.* is missing"),
    ({"enable_confidence_head": "yes"}, "not true or false"),
    ({"enable_confidence_head": False}, "confidence_head.proj.bias .*is no part of a DSpark drafter"),
    ({"confidence_head_with_markov": False}, "is not read yet beside a Markov head"),
    ({"sample_from_anchor": False}, "its anchor slot predicts nothing"),
    ({"dspark_bonus_anchor": True}, "its anchor slot predicts nothing"),
    ({"nested__markov_rank": 5}, "markov_rank is 6 at top level and 5 in dflash_config"),
    ({"nested__block_size": 5}, "block_size is 4 at top level and 5 in dflash_config"),
    ({"is_causal": True}, "causal blocks"),
]


@pytest.mark.parametrize(("change", "said"), BAD, ids=lambda v: v if isinstance(v, str) else next(iter(v)))
def test_what_is_not_whole_is_refused_in_one_sentence(tmp_path, target, change, said):
    folder = save_drafter(tiny_dspark(target), tmp_path / "d", dtype=torch.float32)
    edit(folder, **change)
    with pytest.raises(InputError, match=said) as caught:
        load_drafter(folder, target)
    assert "\n" not in caught.value.what


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("sample_from_anchor", None, "sample_from_anchor is missing"),
        ("sample_from_anchor", False, "its anchor slot predicts nothing"),
        ("markov_rank", 5, r"shape \[61, 6\], config.json promises \[61, 5\]"),
        ("speculators_config", {"algorithm": "dflash"}, "its algorithm is not dspark"),
        ("speculators_config", {"proposal_methods": [{"speculative_tokens": 5}]}, "a block_size of 4 drafts 4"),
    ],
)
def test_the_speculators_form_is_read_with_suspicion(tmp_path, target, key, value, said):
    folder = export(tiny_dspark(target), tmp_path / "d", engine="vllm", form="speculators", target_name="x/y").folder
    edit(folder, **{key: value})
    with pytest.raises(InputError, match=said):
        load_drafter(folder, target)


def test_a_missing_head_and_a_dflash_are_told_apart(tmp_path, target):
    folder = save_drafter(tiny_dspark(target), tmp_path / "d", dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    del tensors["markov_head.markov_w2.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"tensor markov_head\.markov_w2\.weight is missing"):
        load_drafter(folder, target)
    plain = save_drafter(tiny_drafter(target), tmp_path / "e", dtype=torch.float32)
    edit(plain, architectures=["Qwen3DSparkModel"])
    with pytest.raises(InputError, match="markov_rank is null"):
        load_drafter(plain, target)
    edit(folder, architectures=["DFlashDraftModel"])
    with pytest.raises(InputError, match="is no part of a DFlash drafter"):
        load_drafter(folder, target)


@pytest.mark.parametrize(
    ("markov", "engine", "said"),
    [
        ("gated", "vllm", "vLLM computes a vanilla Markov head"),
        ("rnn", "both", "vLLM computes a vanilla Markov head"),
        ("none", "sglang", "has no Markov head"),
        ("none", "vllm", "has no Markov head"),
    ],
)
def test_what_an_engine_would_compute_otherwise_is_not_exported(tmp_path, target, markov, engine, said):
    with pytest.raises(InputError, match=said):
        export(tiny_dspark(target, markov), tmp_path / "out", engine=engine, target_name="x/y")


def test_a_learned_mask_is_kept_and_not_exported(tmp_path, target):
    spec = replace(dspark_shape(target), learned_mask=True)
    drafter = new_drafter(spec, target)
    assert drafter.mask_embedding.abs().max() > 0
    folder = save_drafter(drafter, tmp_path / "d", dtype=torch.float32)
    assert same_bits(load_drafter(folder, target), drafter)
    with pytest.raises(InputError, match="does not read beside DSpark's heads"):
        export(drafter, tmp_path / "out", engine="vllm", target_name="x/y")


# the engines' own code ------------------------------------------------------------------------------------------------
def at_hand(variable: str) -> bool:
    return bool(engines.os.environ.get(variable))


@pytest.mark.skipif(not at_hand("DRAFTLOOP_VLLM"), reason="DRAFTLOOP_VLLM names no vLLM (site-packages or wheel)")
@pytest.mark.parametrize("form", FORMS)
def test_vllm_reads_it_as_it_was_meant(tmp_path, target, form):
    drafter = tiny_dspark(target)
    made = export(drafter, tmp_path / "out", engine="vllm", form=form, target_name="x/y", dtype=torch.float32)
    config = json.loads((made.folder / "config.json").read_text())
    if form == "speculators":
        proposal = engines.vllm_proposal(config)
        assert (proposal["method"], proposal["num_speculative_tokens"]) == ("dspark", 4)
        layers = json.loads(json.dumps(config["transformer_layer_config"]))
        engines.vllm_algorithms()["dspark"](config_dict=config, pre_trained_config=layers)
        config = layers
    assert engines.vllm_taps(config) == tuple(layer + 1 for layer in drafter.spec.target_layers)
    assert engines.vllm_taps(config) == tuple(layer + 1 for layer in config["target_layer_ids"])
    assert config["mask_token_id"] == drafter.spec.mask_token_id
    assert (config["block_size"], config["markov_rank"], config["markov_head_type"]) == (4, 6, "vanilla")
    assert not config.get("dspark_bonus_anchor")
    assert "sample_from_anchor" not in config.get("dflash_config", {})  # refused there
    registry = engines.source("DRAFTLOOP_VLLM", "vllm/model_executor/models/registry.py")
    assert all(f'"{name}"' in registry for name in config["architectures"])
    assert '"dspark"' in engines.source("DRAFTLOOP_VLLM", "vllm/config/speculative.py")
    text = engines.source("DRAFTLOOP_VLLM", "vllm/model_executor/models/qwen3_dspark.py")
    bare = {landing(name) for name in load_file(made.folder / "model.safetensors")}
    heads = {(name, "") for name in published_shapes(drafter.spec) if "head" in name}
    assert bare == parameters(drafter.spec.layers) | heads
    for part in ("markov_head", "markov_w1", "markov_w2"):
        assert part in text


@pytest.mark.skipif(not at_hand("DRAFTLOOP_SGLANG"), reason="DRAFTLOOP_SGLANG names no SGLang (site-packages or wheel)")
@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
def test_sglang_reads_it_as_it_was_meant(tmp_path, target, markov):
    drafter = tiny_dspark(target, markov)
    made = export(drafter, tmp_path / "out", engine="sglang", target_name="x/y", dtype=torch.float32)
    parsed = engines.sglang_config(json.loads((made.folder / "config.json").read_text()))
    assert parsed.resolve_block_size(default=None) == drafter.spec.drafted
    assert parsed.mask_token_id == drafter.spec.mask_token_id
    assert parsed.target_layer_ids == list(drafter.spec.target_layers)
