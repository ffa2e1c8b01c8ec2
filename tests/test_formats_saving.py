"""Saving a drafter: all of it or nothing, and nothing else is overwritten."""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from draftloop.core.errors import EnvironmentFault, InputError
from draftloop.formats import zlab
from draftloop.formats.load import load_drafter
from draftloop.formats.zlab import save_drafter
from tests.checkpoints import SPEC, loose, refused, same_bits, unpair

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
