"""MTP modules on disk: ours and native ones load back, engines' names, exports, and what is refused with a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftloop.core.errors import InputError
from draftloop.drafter.mtp import computed_by
from draftloop.formats import mtp
from draftloop.formats.beside import HEAD, INDEX, target_with_head
from draftloop.formats.export import export
from draftloop.formats.load import load_drafter
from draftloop.formats.zlab import save_drafter
from tests.mtp_tiny import NATIVE, mtp_drafter, mtp_target, native_folder, native_live, native_target

pytestmark = pytest.mark.families


@pytest.fixture(scope="module")
def owned(tmp_path_factory) -> Path:
    """A target with experts and a head, in one file."""
    return native_folder("qwen3_next", tmp_path_factory.mktemp("owned"))


def tampered(folder: Path, place: Path, change) -> Path:
    """A copy of a checkpoint whose tensors were changed by `change(tensors)`."""
    place.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".json":
            (place / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    return place


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "deepseek_v3"])
def test_saved_and_loaded_is_the_same(kind, tmp_path):
    target = mtp_target(kind)
    drafter = mtp_drafter(target)
    save_drafter(drafter, tmp_path / "a", dtype=torch.float32)
    save_drafter(drafter, tmp_path / "b", dtype=torch.float32)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    back = load_drafter(tmp_path / "a", target)
    assert back.spec == drafter.spec
    mine, theirs = drafter.state_dict(), back.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert load_drafter(tmp_path / "a").spec == drafter.spec  # without its target


@pytest.mark.parametrize("kind", NATIVE)
def test_a_native_head_is_found_by_name_and_by_folder(kind, tmp_path):
    target = native_target(native_folder(kind, tmp_path / "t"))
    one, other = load_drafter("native", target, block_size=3), load_drafter(tmp_path / "t", target)
    assert (one.spec.block_size, other.spec.block_size) == (3, 4)
    assert one.spec.made_for["target_fingerprint"] == target.fingerprint
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_experts_are_written_one_by_one_and_read_either_way(owned, tmp_path):
    target = native_target(owned)
    drafter = load_drafter("native", target)
    save_drafter(drafter, tmp_path / "ours", dtype=torch.float32)
    names = set(load_file(tmp_path / "ours/model.safetensors"))
    assert "mtp.layers.0.mlp.experts.3.gate_proj.weight" in names
    assert not any("gate_up_proj" in name for name in names)

    def fuse(tensors):
        stack = "mtp.layers.0.mlp.experts"
        parts = [[tensors.pop(f"{stack}.{i}.{part}_proj.weight") for i in range(4)] for part in ("gate", "up", "down")]
        tensors[f"{stack}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(*parts[:2], strict=True)])
        tensors[f"{stack}.down_proj"] = torch.stack(parts[2])

    back = load_drafter(tampered(owned, tmp_path / "fused", fuse), target)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), back.parameters(), strict=True))


def test_deepseeks_copies_of_embedding_and_readout_must_be_the_targets_own(tmp_path):
    folder = native_folder("deepseek_v3", tmp_path / "t")
    target = native_target(folder)

    def copied(tensors):
        tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()

    def other(tensors):
        copied(tensors)
        tensors["model.layers.3.shared_head.head.weight"] += 1

    load_drafter(tampered(folder, tmp_path / "same", copied), target)
    with pytest.raises(InputError, match="lm_head.weight is not the target's own"):
        load_drafter(tampered(folder, tmp_path / "other", other), target)


def lose(tensors):
    del tensors["mtp.fc.weight"]


def widen(tensors):
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"][:, :-1].contiguous()


def add(tensors):
    tensors["mtp.layers.0.self_attn.sinks"] = torch.zeros(4)


def quantise(tensors):
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"].to(torch.float8_e4m3fn)


def spoil(tensors):
    tensors["mtp.fc.weight"][0, 0] = float("nan")


def deepen(tensors):
    tensors["mtp.layers.1.input_layernorm.weight"] = torch.zeros(32)


def behead(tensors):
    for name in [name for name in tensors if name.startswith("mtp.")]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lose, "tensor mtp.fc.weight is missing"),
        (widen, r"mtp.fc.weight has shape \[32, 63\], config.json promises \[32, 64\]"),
        (add, "mtp.layers.0.self_attn.sinks is no part of an MTP module"),
        (quantise, "quantised weights are not read"),
        (spoil, "holds NaN or infinity"),
        (deepen, "2 MTP modules, one for each depth"),
        (behead, "no multi-token-prediction tensors"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_heads_that_are_not_whole_are_refused(owned, tmp_path, change, words):
    target = native_target(owned)
    with pytest.raises(InputError, match=words):
        load_drafter(tampered(owned, tmp_path / "t", change), target)


def test_native_means_nothing_without_a_checkpoint_or_a_head(owned):
    with pytest.raises(InputError, match="made in memory"):
        load_drafter("native", native_live("qwen3_5"))
    with pytest.raises(InputError, match="no checkpoint of a llama is known"):
        load_drafter("native", mtp_target("llama"))
    with pytest.raises(InputError, match="loaded together with it"):
        load_drafter(owned)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 9}, "schema 9, this version reads 1"),
        ({"block_size": 1}, "block_size 1 drafts nothing"),
        ({"model_type": "gpt9"}, "knows no model of type 'gpt9'"),
        ({"hidden_size": "wide"}, "describes no model whose layer can be made"),
        ({"num_hidden_layers": 9}, "number of target layers 9"),
    ],
    ids=str,
)
def test_a_config_that_describes_no_module_is_refused(tmp_path, change, words):
    target = mtp_target("llama")
    save_drafter(mtp_drafter(target), tmp_path / "d")
    file = tmp_path / "d/config.json"
    config = json.loads(file.read_text())
    for key, value in change.items():
        (config["draftloop"] if key in ("schema", "block_size") else config)[key] = value
    file.write_text(json.dumps(config))
    with pytest.raises(InputError, match=words):
        load_drafter(tmp_path / "d", target)


def test_an_export_is_what_engines_read_beside_the_target(tmp_path):
    folder = native_folder("deepseek_v3", tmp_path / "t")
    target = native_target(folder)
    drafter = load_drafter("native", target, block_size=3)
    with torch.no_grad():
        drafter.fc.weight.mul_(2)
    made = export(drafter, tmp_path / "out", target_name=str(folder), dtype=torch.float32)
    head = load_file(made.folder / "model.safetensors")
    stored = load_file(folder / "model.safetensors")
    assert {name for name in stored if name.startswith("model.layers.3.")} == set(head)
    assert torch.equal(head["model.layers.3.eh_proj.weight"], 2 * stored["model.layers.3.eh_proj.weight"])
    config = json.loads(made.commands["vllm"][-1])
    assert config == {"method": "mtp", "num_speculative_tokens": 2}
    sglang = made.commands["sglang"]
    assert sglang[sglang.index("--speculative-algorithm") + 1] == "NEXTN"
    assert sglang[sglang.index("--speculative-num-draft-tokens") + 1] == "3"
    assert "--speculative-draft-model-path" not in sglang
    card = (made.folder / "README.md").read_text()
    assert "copy model.safetensors there as mtp.safetensors" in card
    assert "the hidden row after the final norm" in card
    stored |= head  # put beside the target's shards, it is the target's new head
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    again = load_drafter(folder, target)
    assert torch.equal(again.fc.weight, drafter.fc.weight)
    assert torch.equal(load_drafter(made.folder, target).fc.weight, drafter.fc.weight)


def test_a_head_says_how_it_is_computed_and_who_does_otherwise(tmp_path):
    target = mtp_target("glm4_moe")
    drafter = mtp_drafter(target)
    made = export(drafter, tmp_path / "a", engine="both", target_name="t")
    unlike = [note for note in made.notes if "other than the head was trained for" in note]
    assert len(unlike) == 1
    assert "vLLM leaves out the embedding" in unlike[0]
    assert "before the head's norm" in unlike[0]
    drafter.spec = computed_by(drafter.spec, "vllm")
    made = export(drafter, tmp_path / "b", engine="vllm", target_name="t")
    assert not any("other than" in note for note in made.notes)
    back = load_drafter(tmp_path / "b", target)
    assert (back.spec.feeds, back.spec.blank_first) == ("raw", True)


@pytest.mark.parametrize("kind", ["glm4_moe", "qwen3_5"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_target_with_our_head_in_it_is_that_target(kind, shards, tmp_path):
    folder = native_folder(kind, tmp_path / "t")
    before = load_file(folder / "model.safetensors")
    if shards > 1:
        names = sorted(before)
        for i in range(shards):
            save_file({n: before[n] for n in names[i::shards]}, folder / f"model-{i}.safetensors")
        (folder / "model.safetensors").unlink()
        index = {"metadata": {}, "weight_map": {n: f"model-{i % shards}.safetensors" for i, n in enumerate(names)}}
        (folder / INDEX).write_text(json.dumps(index))
    (folder / "tokenizer.json").write_text("{}")
    config = json.loads((folder / "config.json").read_text())
    key = "mtp_num_hidden_layers" if kind == "qwen3_5" else "num_nextn_predict_layers"
    (folder / "config.json").write_text(json.dumps({**config, key: 1}))
    target = native_target(folder)
    drafter = load_drafter("native", target)
    with torch.no_grad():
        drafter.fc.weight.mul_(2)
    made = export(drafter, tmp_path / "out", engine="vllm", target_name=str(folder), dtype=torch.float32)
    for _ in range(2):  # made again, it is the same
        place = target_with_head(folder, made.folder, drafter.spec, tmp_path / "both")
    after = {name: tensor for file in place.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert after.keys() == before.keys(), "an engine that reads whole files finds each tensor once"
    assert sum(len(load_file(file)) for file in place.glob("*.safetensors")) == len(before)
    head = set(load_file(place / HEAD))
    assert head == set(load_file(made.folder / "model.safetensors"))
    assert all(torch.equal(after[name], before[name]) for name in before.keys() - head)
    where = json.loads((place / INDEX).read_text())["weight_map"]
    assert all(name in load_file(place / file) for name, file in where.items())
    assert where.keys() == before.keys()
    assert (place / "tokenizer.json").is_symlink()
    again = native_target(place)
    assert again.fingerprint == target.fingerprint
    assert torch.equal(load_drafter("native", again).fc.weight, drafter.fc.weight)


def test_a_target_without_a_head_is_linked_and_promises_one(tmp_path):
    target = native_live("deepseek_v3")
    target.model.save_pretrained(tmp_path / "t")
    drafter = mtp_drafter(target)
    made = export(drafter, tmp_path / "out", engine="vllm", target_name="t", dtype=torch.float32)
    place = target_with_head(tmp_path / "t", made.folder, drafter.spec, tmp_path / "both")
    assert (place / "model.safetensors").is_symlink()
    assert json.loads((place / "config.json").read_text())["num_nextn_predict_layers"] == 1
    (tmp_path / "mine").mkdir()
    with pytest.raises(InputError, match="holds something else"):
        target_with_head(tmp_path / "t", made.folder, drafter.spec, tmp_path / "mine")


def test_a_class_that_no_engine_reads_a_head_of_is_not_exported(tmp_path):
    drafter = mtp_drafter(mtp_target("llama"))
    with pytest.raises(InputError, match="no engine reads a multi-token-prediction head beside a llama"):
        export(drafter, tmp_path / "out", target_name="somewhere")


def test_a_model_type_that_is_no_name_is_nobodys_head():
    for spoilt in ([], {}, [1], None, 3):
        assert not mtp.claims_native({"model_type": spoilt})
        assert not mtp.claims_native({"model_type": "x", "text_config": {"model_type": spoilt}})
    assert mtp.claims_native({"model_type": [], "text_config": {"model_type": "qwen3_5_text"}})
