"""EAGLE-3 on disk: both forms read back, published ones load, what is not whole is refused, engines take it."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftloop.core.errors import InputError
from draftloop.drafter.eagle3 import default_taps
from draftloop.formats.export import export
from draftloop.formats.load import load_drafter
from draftloop.formats.serving import check_served, serve_command
from draftloop.formats.zlab import save_drafter
from tests.chains import chain_drafter
from tests.engine_sources import pieces, source
from tests.tiny import tiny_target

pytestmark = pytest.mark.families


def config_of(folder):
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def rewrite(folder, tensors=None, **changes):
    """Change config.json (None removes a key) and the tensors; the pair's checksum goes."""
    config = {key: value for key, value in {**config_of(folder), **changes}.items() if value is not None}
    if "draftloop" in config:
        config["draftloop"].pop("weights_sha256", None)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if tensors is not None:
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def same(a, b) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("form", ["eagle3", "speculators"])
@pytest.mark.parametrize(("vocab", "beside"), [(40, False), (61, True), (None, False)])
def test_an_export_reads_back_as_it_was(tmp_path, form, vocab, beside):
    target = tiny_target()
    drafter = chain_drafter(target, vocab=vocab, norm_before_residual=beside)
    made = export(drafter, tmp_path / "out", engine="vllm", form=form, target_name="some/target", dtype=torch.float32)
    again = load_drafter(made.folder, target)
    assert again.spec == drafter.spec
    assert same(again, drafter)
    names = set(load_file(made.folder / "model.safetensors"))
    assert ("midlayer.hidden_norm.weight" if form == "eagle3" else "layers.0.hidden_norm.weight") in names
    assert {"d2t", "t2d"} <= names if vocab == 40 else not {"d2t", "t2d"} & names
    assert ("lm_head.weight" in names) == (vocab is not None)
    assert "embed_tokens.weight" not in names
    card = (made.folder / "README.md").read_text(encoding="utf-8")
    assert "EAGLE-3" in card
    assert "eagle3" in card


def test_layers_are_counted_as_each_engine_counts(tmp_path):
    target = tiny_target(layers=8)
    config = config_of(save_drafter(chain_drafter(target, taps=(0, 3, 5)), tmp_path / "out"))
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6]
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 3, 5], "use_aux_hidden_state": True}
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 40


def test_published_checkpoints_load(tmp_path):
    """No key of ours, the layer's other name, a prefix, a copy of the target's embedding, layers by default."""
    target = tiny_target(layers=8)
    drafter = chain_drafter(target, taps=default_taps(8, 3), block=8)
    folder = save_drafter(drafter, tmp_path / "out", dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    tensors = {f"model.{n}" if n not in ("d2t", "t2d", "lm_head.weight") else n: t for n, t in tensors.items()}
    tensors["model.embed_tokens.weight"] = target.model.get_input_embeddings().weight.detach().clone()
    rewrite(folder, tensors, draftloop=None, eagle_aux_hidden_state_layer_ids=None, eagle_config=None)
    again = load_drafter(folder, target)
    assert same(again, drafter)
    assert replace(again.spec, made_for={}) == replace(drafter.spec, made_for={})
    tensors["model.embed_tokens.weight"] += 1
    rewrite(folder, tensors)
    with pytest.raises(InputError, match="not the target's own"):
        load_drafter(folder, target)


def gone(name):
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


@pytest.mark.parametrize(
    ("words", "spoil", "changes"),
    [
        ("tensor norm.weight is missing", gone("norm.weight"), {}),
        ("tensor d2t is missing", gone("d2t"), {}),
        ("d2t and t2d name different tokens", lambda t: {**t, "t2d": ~t["t2d"]}, {}),
        ("one twice", lambda t: {**t, "d2t": t["d2t"] - torch.arange(40)}, {}),
        ("has shape", lambda t: {**t, "fc.weight": t["fc.weight"][:, 1:]}, {}),
        ("no part of an EAGLE-3", lambda t: {**t, "midlayer.self_attn.q_norm.weight": t["norm.weight"]}, {}),
        ("parallel drafting", lambda t: {**t, "mask_hidden": t["norm.weight"]}, {}),
        ("stored twice", lambda t: {**t, "layers.0.hidden_norm.weight": t["midlayer.hidden_norm.weight"]}, {}),
        ("name different layers", None, {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}),
        ("ascending", None, {"eagle_aux_hidden_state_layer_ids": [2, 1, 3]}),
        ("more than one layer", None, {"num_hidden_layers": 2}),
        ("only llama", None, {"model_type": "qwen3"}),
        ("normed states", None, {"norm_output": True}),
        ("target_hidden_size", None, {"target_hidden_size": 7}),
        ("biases", None, {"attention_bias": True}),
    ],
)
def test_what_is_not_whole_or_not_plain_is_refused(tmp_path, words, spoil, changes):
    target = tiny_target()
    folder = save_drafter(chain_drafter(target), tmp_path / "out", dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    rewrite(folder, spoil(tensors) if spoil else tensors, **changes)
    with pytest.raises(InputError) as caught:
        load_drafter(folder, target)
    text = f"{caught.value.what} {caught.value.fix}"
    assert words in text, text
    assert "\n" not in text


def test_serve_commands(tmp_path):
    spec = chain_drafter(tiny_target(), block=8).spec
    told = " ".join(serve_command("sglang", "t", tmp_path, spec, probabilistic=True))
    assert "--speculative-algorithm EAGLE3" in told
    assert "--speculative-num-steps 7 --speculative-eagle-topk 1 --speculative-num-draft-tokens 8" in told
    assert told.endswith("--speculative-use-rejection-sampling")
    assert '"method":"eagle3"' in " ".join(serve_command("vllm", "t", tmp_path, spec))
    with pytest.raises(InputError, match="three target layers"):
        check_served("sglang", "eagle3", replace(spec, target_layers=(0, 1)))
    with pytest.raises(InputError, match="speculators form"):
        check_served("sglang", "speculators", spec)


def test_vllm_takes_every_tensor(tmp_path):
    """vLLM's own renaming over an export: each of its parameters is filled, and the drafted ids are ours."""
    text = source("DRAFTLOOP_VLLM", "vllm/model_executor/models/llama_eagle3.py")
    got: dict = {}

    class Loader:
        def __init__(self, model): ...

        def load_weights(self, weights, mapper=None):
            got.update(weights)

    space = pieces(
        text, ["Eagle3LlamaForCausalLM.load_weights"], AutoWeightsLoader=Loader, WeightsMapper=dict,
        process_eagle_weight=lambda model, name: None, logger=None,
    )  # fmt: skip
    inner = SimpleNamespace(use_aux_hidden_state=True, norm_before_fc=False)
    model = SimpleNamespace(model=inner, use_parallel_drafting=False)
    drafter = chain_drafter(tiny_target())
    folder = save_drafter(drafter, tmp_path / "out", dtype=torch.float32)
    space["load_weights"](model, load_file(folder / "model.safetensors").items())
    mapped = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in got.items()}
    ours = {name if "lm_head" in name else f"model.{name}": p for name, p in drafter.named_parameters()}
    assert mapped.keys() == {*ours, "draft_id_to_target_id"}
    assert all(torch.equal(mapped[name], p) for name, p in ours.items())
    assert torch.equal(mapped["draft_id_to_target_id"] + torch.arange(40), drafter.support)
