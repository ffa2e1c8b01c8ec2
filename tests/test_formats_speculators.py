"""The speculators form: written as its readers expect, read with suspicion."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.core.errors import InputError
from draftloop.formats.export import export
from draftloop.formats.load import load_drafter
from tests.checkpoints import SPEC, loose, refused, same_bits, specs
from tests.tiny import tiny_drafter, tiny_target


@pytest.fixture
def saved(tmp_path) -> Path:
    return export(loose(), tmp_path / "d", engine="vllm", form="speculators", dtype=torch.float32).folder


def edit(folder: Path, **changes) -> None:
    """Change keys of config.json: `a__b` reaches into a; None removes."""
    config = json.loads((folder / "config.json").read_text())
    for path, value in changes.items():
        place, (*parents, key) = config, path.split("__")
        for parent in parents:
            place = place[int(parent)] if isinstance(place, list) else place[parent]
        if value is None:
            place.pop(key, None)
        else:
            place[key] = value
    (folder / "config.json").write_text(json.dumps(config))


LAYERS = "transformer_layer_config__"
FIRST = "speculators_config__proposal_methods__0__"


def test_config_holds_every_key_that_loaders_look_for(tmp_path):
    made = export(loose(), tmp_path / "d", engine="vllm", form="speculators", target_name="Qwen/Q", target_architectures=["Qwen3ForCausalLM"])  # fmt: skip
    config = json.loads((made.folder / "config.json").read_text())
    layers = config.pop("transformer_layer_config")
    ours = config.pop("draftloop")
    assert config == {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "dtype": "bfloat16",
        "aux_hidden_state_layer_ids": [2, 5, 8],
        "mask_token_id": 19,
        "block_size": 5,
        "draft_vocab_size": 20,
        "target_hidden_size": 6,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": "Qwen/Q", "architectures": ["Qwen3ForCausalLM"]},
        },
    }
    assert (layers["model_type"], layers["rope_theta"], layers["layer_types"]) == ("qwen3", 1e6, ["full_attention"] * 2)
    assert (ours["num_target_layers"], ours["made_for"]) == (9, SPEC.made_for)


@settings(max_examples=15, deadline=None)
@given(spec=specs(), seed=st.integers(0, 99))
def test_round_trip_is_bit_equal(tmp_path_factory, spec, seed):
    folder = tmp_path_factory.mktemp("trip") / "d"
    export(loose(spec, seed), folder, engine="vllm", form="speculators", target_name="x/y", dtype=torch.float32)
    loaded = load_drafter(folder)
    assert loaded.spec == spec
    assert same_bits(loaded, loose(spec, seed))


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window_non_causal": None},
        {"sliding_window_non_causal": False},  # of sliding layers, and there are none
        {"sample_from_anchor": None, "target_hidden_size": None},
        {FIRST + "speculative_tokens": 3},
        {LAYERS + "rope_theta": None},
        {LAYERS + "rope_parameters": None},
        {LAYERS + "layer_types": None, LAYERS + "block_size": 5, LAYERS + "mask_token_id": 19},
        {"speculators_config": None},
        {LAYERS + "model_type": None},
    ],
)
def test_published_spellings_are_read(saved, change):
    edit(saved, **change)
    loaded = load_drafter(saved)
    assert loaded.spec == SPEC
    assert same_bits(loaded, loose())


def test_what_is_left_out_is_the_default_of_its_layers(saved):
    """The speculators package writes only what differs from its defaults."""
    edit(saved, **{LAYERS + "rope_theta": None, LAYERS + "rope_parameters": None})
    edit(saved, **{LAYERS + "rms_norm_eps": None, LAYERS + "max_position_embeddings": None})
    spec = load_drafter(saved).spec
    assert spec == replace(SPEC, rope_theta=10000.0, norm_eps=1e-6, max_positions=32768)


def test_a_published_one_tells_its_verifier_and_not_its_depth(tmp_path):
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    folder = export(drafter, tmp_path / "d", engine="vllm", form="speculators", target_name="a/b", dtype=torch.float32).folder  # fmt: skip
    edit(folder, draftloop=None)
    refused(folder, "how many layers the target has", "together with its target")
    loaded = load_drafter(folder, target)
    assert loaded.spec == replace(drafter.spec, made_for={"target": "a/b"})
    assert same_bits(loaded, drafter)
    edit(folder, aux_hidden_state_layer_ids=[1, 5])
    refused(folder, "[0, 4] do not all exist", target=target)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"speculators_model_type": None}, ["speculators_model_type is missing"]),
        ({"speculators_model_type": "eagle"}, ["EAGLE", "not read yet", "needs"]),
        ({"speculators_model_type": "peagle"}, ["P-EAGLE", "not read yet"]),
        ({"speculators_model_type": "dspark"}, ["its anchor slot predicts nothing"]),
        ({"speculators_model_type": "dflash2"}, ["algorithm is not dflash2"]),
        ({"speculators_model_type": "xpress"}, ["XPress"]),
        ({"speculators_model_type": ["dflash"]}, ["speculators_model_type"]),
        ({"architectures": ["DFlash2Speculator"]}, ["DFlash 2"]),
        ({"transformer_layer_config": None}, ["transformer_layer_config is missing"]),
        ({"transformer_layer_config": 3}, ["transformer_layer_config"]),
        ({"aux_hidden_state_layer_ids": None}, ["aux_hidden_state_layer_ids is missing"]),
        ({"aux_hidden_state_layer_ids": [0, 4, 7]}, ["begin at 0", "add 1"]),
        ({"aux_hidden_state_layer_ids": [2, 8, 5]}, ["not strictly ascending"]),
        ({"aux_hidden_state_layer_ids": [2, 5, 5]}, ["not strictly ascending"]),
        ({"aux_hidden_state_layer_ids": [2, 5, 10]}, ["do not all exist"]),
        ({"aux_hidden_state_layer_ids": [2, 5, 8.0]}, ["no list of layer numbers"]),
        ({"aux_hidden_state_layer_ids": [2, 5, 9]}, ["draftloop.target_layers is [1, 4, 7]", "is [1, 4, 8]"]),
        ({"aux_hidden_state_layer_ids": [2, 5], "draftloop__target_layers": None}, ["fc.weight", "[6, 18]", "[6, 12]"]),
        ({LAYERS + "aux_hidden_state_layer_ids": [1, 4, 7]}, ["[2, 5, 8] at top level and [1, 4, 7]"]),
        ({LAYERS + "eagle_aux_hidden_state_layer_ids": [1, 4, 7]}, ["[1, 4, 7] are not one more"]),
        ({LAYERS + "block_size": 6}, ["block_size is 5 at top level and 6 in transformer_layer_config"]),
        ({LAYERS + "mask_token_id": 3}, ["mask_token_id is 19 at top level and 3"]),
        ({"draftloop__num_target_layers": 7}, ["[1, 4, 7] do not all exist"]),
        ({"block_size": None}, ["block_size is missing"]),
        ({"block_size": 1}, ["speculative_tokens is 4"]),
        ({"mask_token_id": None}, ["mask_token_id is missing"]),
        ({"mask_token_id": 20}, ["mask token 20 is outside"]),
        ({FIRST + "speculative_tokens": 5}, ["speculative_tokens is 5", "a block_size of 5 drafts 4"]),
        ({FIRST + "speculative_tokens": 0}, ["speculative_tokens is 0"]),
        ({"sample_from_anchor": True}, ["sample_from_anchor is true", "not read yet"]),
        ({"draft_vocab_size": 12}, ["draft_vocab_size is 12", "reduced vocabulary"]),
        ({"target_hidden_size": 12}, ["target_hidden_size is 12"]),
        ({"speculators_config__algorithm": "eagle3"}, ["algorithm is not dflash"]),
        ({LAYERS + "layer_types": ["full_attention", "sliding_attention"]}, ["sliding_attention"]),
        ({LAYERS + "is_causal": True}, ["is_causal is true", "causal blocks"]),
        ({LAYERS + "dflash_config": {"causal": True}}, ["dflash_config.causal is true"]),
        ({LAYERS + "dflash_config": 3}, ["dflash_config is no object"]),
        ({LAYERS + "dflash_config": {"target_layer_ids": [2, 5, 8]}}, ["other layers"]),
        ({LAYERS + "model_type": "llama"}, ["model_type is 'llama'"]),
        ({LAYERS + "hidden_size": None, "target_hidden_size": None}, ["fc.weight", "[6, 18]"]),
        ({"draftloop": [1]}, ["draftloop"]),
    ],
)  # fmt: skip
def test_what_cannot_be_read_rightly_is_refused(saved, change, words):
    edit(saved, **change)
    refused(saved, *words)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_value_of_any_key_escapes_as_another_error(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz") / "d"
    export(loose(), folder, engine="vllm", form="speculators")
    config = json.loads((folder / "config.json").read_text())
    facts = config["speculators_config"]
    places = [config, config["transformer_layer_config"], facts, facts["proposal_methods"][0], facts["verifier"]]
    place = data.draw(st.sampled_from(places))
    leaf = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.just(10**400))
    value = st.one_of(leaf, st.lists(leaf, max_size=3), st.dictionaries(st.text(max_size=3), leaf, max_size=2))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(value)
    (folder / "config.json").write_text(json.dumps(config))
    try:
        load_drafter(folder)
    except InputError as error:
        assert "\n" not in str(error)  # noqa: PT017 - loading may also succeed
