"""A target or drafter that is missing, broken or made for another: one sentence on what, where and what to do, from every
command, nothing written."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftloop.core.errors import InputError
from draftloop.target.load import load_target
from tests.bad_input import assert_names, make_drafter
from tests.bad_input import copy as copy
from tests.bad_input import refused as refused
from tests.bad_input import toy as toy
from tests.bad_input import train as train
from tests.tiny import tiny_model
from tests.toy_run import toy_checkpoint, toy_tokenizer


# target ----------------------------------------------------------------------------------------------------------------
@pytest.fixture
def broken(refused, train, toy, copy):
    """The same sentence from `train` and, but for the drafter, from `audit`."""

    def run():
        told = train(f"target.model={copy}")
        assert refused("audit", toy / "drafter", "--target", copy, "-p", toy / "test.jsonl") == told
        return told

    return run


def test_target_directory_missing(train, tmp_path):
    assert_names(train(f"target.model={tmp_path / 'none'}"), tmp_path / "none", "no such folder", "path")


def test_a_target_without_weights(broken, copy):
    (copy / "model.safetensors").unlink()
    assert_names(broken(), copy, "no safetensors weights")


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_target(broken, copy, keep):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])
    assert_names(broken(), "model.safetensors", "again")


def test_a_pickled_target(broken, copy):
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    torch.save(tensors, copy / "pytorch_model.bin")
    assert_names(broken(), "pickle", "pytorch_model.bin", "safetensors")


def test_a_pickle_by_the_name_of_safetensors(broken, copy):
    (copy / "model.safetensors").write_bytes(pickle.dumps({"a": list(range(100))}))
    assert_names(broken(), "model.safetensors", "pickle")


def test_a_target_with_nan(broken, copy):
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert_names(broken(), "model.layers.2.mlp.up_proj.weight", "NaN")


def test_a_target_that_lacks_a_tensor(broken, copy):
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert_names(broken(), "model.layers.2.mlp.up_proj.weight", "complete")


def test_a_broken_config(broken, copy):
    (copy / "config.json").write_text("{", encoding="utf-8")
    assert_names(broken(), copy)


@pytest.mark.parametrize("value", [None, [1]])
def test_a_config_with_a_value_of_a_wrong_type(broken, copy, value):
    """Fails if only the first line of the complaint is told, which ends in a colon."""
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    (copy / "config.json").write_text(json.dumps({**config, "hidden_size": value}), encoding="utf-8")
    assert_names(broken(), copy, "Field 'hidden_size' expected int", "Correct its config.json")


def test_a_tokenizer_with_more_tokens(broken, copy):
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens([f"<more{i}>" for i in range(40)])
    tokenizer.save_pretrained(copy)
    assert_names(broken(), len(tokenizer), "tokens", "tokenizer that the model was trained with")


def test_a_tokenizer_with_another_end(broken, copy):
    tokenizer = toy_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(copy)
    assert_names(broken(), "ends text with token 0", "tokenizer that the model was trained with")


def test_no_tokenizer(broken, copy):
    for file in copy.glob("*token*"):
        file.unlink()
    assert_names(broken(), "tokenizer", copy)


def test_a_hub_id_that_cannot_be_reached(toy, tmp_path):
    """No network is the machine's fault: exit status 3. In a process of its own, told to be offline."""
    env = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "draftloop.cli", "train", toy / "recipe.yaml", "target.model=some-body/no-such-model",
         "--out", tmp_path / "run"],
        capture_output=True, text=True, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert_names(done.stderr, "some-body/no-such-model", "hub cannot be reached")
    assert not (tmp_path / "run").exists()


def test_an_eager_live_module():
    with pytest.raises(InputError, match="attends by `eager`.*sdpa"):
        load_target(tiny_model(attn_implementation="eager"))


# drafter ---------------------------------------------------------------------------------------------------------------
@pytest.fixture
def foreign(refused, train, toy, tmp_path):
    """The sentences with which `audit`, `evaluate` and `train` refuse a drafter; they are one."""

    def run(drafter: Path):
        rest = ["--target", toy / "target", "-p", toy / "test.jsonl"]
        told = refused("audit", drafter, *rest)
        assert refused("evaluate", drafter, *rest, "--cache", tmp_path / "cache") == told
        assert not (tmp_path / "cache").exists()
        assert train(f"drafter.init='{drafter}'") == told
        return told

    return run


@pytest.mark.parametrize(
    ("changes", "shape", "words"),
    [
        ({"num_hidden_layers": 6}, {}, ["6", "4"]),
        ({"num_hidden_layers": 6}, {"target_layers": [0, 5]}, ["6", "4"]),
        ({"hidden_size": 64}, {}, ["64", "48"]),
        ({"vocab_size": 400}, {}, ["400"]),
    ],
)
def test_a_drafter_for_another_target(foreign, tmp_path, changes, shape, words):
    toy_checkpoint_with(tmp_path / "other", **changes)
    told = foreign(make_drafter(tmp_path / "other", tmp_path / "drafter", **shape))
    assert_names(told, tmp_path / "drafter", *words)


def toy_checkpoint_with(folder: Path, vocab_size: int | None = None, **changes) -> None:
    if vocab_size is None:
        toy_checkpoint(folder, **changes)
        return
    tokenizer = toy_tokenizer()
    eos = tokenizer.eos_token_id
    tiny_model(vocab=vocab_size, eos_token_id=eos, pad_token_id=eos, bos_token_id=None).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture
def draft(toy, tmp_path) -> Path:
    """A copy of the drafter to break."""
    return Path(shutil.copytree(toy / "drafter", tmp_path / "draft"))


def test_drafter_missing(foreign, tmp_path):
    assert_names(foreign(tmp_path / "none"), tmp_path / "none", "no such folder")


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
def test_a_truncated_drafter(foreign, draft, keep):
    file = draft / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])
    assert_names(foreign(draft), "model.safetensors", "again")


def test_a_pickled_drafter(foreign, draft):
    torch.save(load_file(draft / "model.safetensors"), draft / "pytorch_model.bin")
    (draft / "model.safetensors").unlink()
    assert_names(foreign(draft), "pickle")


def test_a_drafter_with_nan(foreign, draft):
    tensors = load_file(draft / "model.safetensors")
    tensors["fc.weight"][0, 0] = float("inf")
    save_file(tensors, draft / "model.safetensors")
    assert_names(foreign(draft), "fc.weight", "infinity")


def test_a_target_given_as_drafter(foreign, toy):
    assert_names(foreign(toy / "target"), toy / "target")


def test_an_unfinished_run_given_as_drafter(foreign, tmp_path):
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "run.json").write_text("{}")
    told = foreign(tmp_path / "unfinished")
    assert_names(told, "delivered no drafter yet", f"draftloop train RECIPE --out {tmp_path / 'unfinished'}")
