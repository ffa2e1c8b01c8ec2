"""Files that are whole or absent, and weight files that are read with suspicion."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import stat
import struct
import subprocess
import sys
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from draftloop.core.errors import DraftloopError, EnvironmentFault, InputError
from draftloop.core.files import atomic_path, fingerprint, sha256_file, write_json, write_text, writing_fault
from draftloop.core.weights import check_folder, check_safetensors, read_tensors, write_tensors

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2], dtype=torch.int64)}


def names(folder):
    return sorted(p.name for p in folder.iterdir())


# ---------------------------------------------------------------- atomic writes


def test_text_and_json_arrive_whole(tmp_path):
    write_text(tmp_path / "deep" / "er" / "t.txt", "é\n")
    assert (tmp_path / "deep" / "er" / "t.txt").read_bytes() == "é\n".encode()
    write_json(tmp_path / "j.json", {"b": [1.5, None], "a": "東"})
    assert json.loads((tmp_path / "j.json").read_text(encoding="utf-8")) == {"b": [1.5, None], "a": "東"}
    write_json(tmp_path / "j.json", 1)
    assert (tmp_path / "j.json").read_text() == "1\n"
    assert names(tmp_path) == ["deep", "j.json"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_written_file_has_the_usual_permissions(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_text(tmp_path / "t", "x")
        assert os.umask(umask) == umask, "the process keeps its own umask"
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "t").stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("error", [ValueError("ours"), KeyboardInterrupt(), InputError("x")], ids=repr)
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, error):
    write_text(tmp_path / "t", "old")

    def fail():
        with atomic_path(tmp_path / "t") as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert (tmp_path / "t").read_text() == "old"
    assert names(tmp_path) == ["t"]


def test_nan_is_no_json(tmp_path):
    for value in (float("nan"), [float("inf")]):
        with pytest.raises(ValueError):
            write_json(tmp_path / "j.json", value)
    assert names(tmp_path) == []


def test_a_killed_writer_leaves_the_old_file(tmp_path):
    write_text(tmp_path / "t", "old")
    script = (
        "import os, signal, sys; from pathlib import Path; from draftloop.core.files import atomic_path\n"
        "with atomic_path(Path(sys.argv[1])) as t:\n    t.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "t")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "t").read_text() == "old"


def test_what_cannot_be_written_is_the_environments_fault(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "below", tmp_path / "folder", tmp_path / ("n" * 300)):
        with pytest.raises(EnvironmentFault, match="cannot write") as caught:
            write_text(path, "x")
        assert str(path) in str(caught.value)
        assert caught.value.exit_code == 3
    assert names(tmp_path) == ["file", "folder"]
    assert names(tmp_path / "folder") == []


def test_a_full_disk_is_named(tmp_path):
    for number in (errno.ENOSPC, errno.EDQUOT):
        assert "the disk is full" in str(writing_fault(OSError(number, os.strerror(number)), tmp_path))
    with pytest.raises(EnvironmentFault, match="the disk is full"), atomic_path(tmp_path / "t"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert names(tmp_path) == []


def test_weights_that_do_not_fit_on_the_disk(tmp_path):
    """The writer of safetensors wraps the operating system's error; a limit on file sizes stands in for the disk."""
    script = (
        "import resource, signal, sys, torch; from pathlib import Path\n"
        "from draftloop.core.weights import write_tensors; from draftloop.core.errors import EnvironmentFault\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "try:\n    write_tensors(Path(sys.argv[1]), {'a': torch.zeros(9000)})\n"
        "except EnvironmentFault as fault:\n    print(fault)\n"
    )
    path = tmp_path / "w.safetensors"
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{path}: cannot write (File too large)")
    assert names(tmp_path) == []


def test_fingerprints(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    assert sha256_file(tmp_path / "f") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1}) == "086f5758f155b8d7"
    assert fingerprint({"a": 1}) != fingerprint({"a": 2}) != fingerprint({"a": "1"})
    assert fingerprint("a", "b") != fingerprint("ab")
    assert len(fingerprint(tmp_path)) == 16


def test_an_error_says_what_where_and_what_to_do():
    assert str(InputError("x is y", where="f.json", fix="Do z.")) == "f.json: x is y. Do z."
    assert str(InputError("x is y")) == "x is y."
    assert [e("x").exit_code for e in (DraftloopError, InputError, EnvironmentFault)] == [1, 2, 3]


# ---------------------------------------------------------------- weight files


def test_tensors_survive(tmp_path):
    path = tmp_path / "new" / "w.safetensors"
    tensors = {**TENSORS, "strided": torch.arange(12.0).reshape(3, 4).T, "empty": torch.empty(0, 3)}
    tensors["leaf"] = torch.ones(2, requires_grad=True)
    tensors["bf16"] = torch.tensor([1.5, -2.0]).bfloat16()
    write_tensors(path, tensors, {"made_by": "test"})
    got = read_tensors(path)
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor.detach())
    assert names(path.parent) == ["w.safetensors"]
    length = struct.unpack("<Q", path.read_bytes()[:8])[0]
    assert json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"] == {"format": "pt", "made_by": "test"}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_truncation_is_seen(tmp_path_factory, data):
    whole = save(TENSORS)
    cut = data.draw(st.integers(0, len(whole) - 1))
    path = tmp_path_factory.mktemp("cut") / "w.safetensors"
    path.write_bytes(whole[:cut])
    for reader in (check_safetensors, read_tensors):
        with pytest.raises(InputError) as caught:
            reader(path)
        assert str(path) in str(caught.value)
    path.write_bytes(whole + b"\0")
    with pytest.raises(InputError, match="promises"):
        check_safetensors(path)


@pytest.mark.parametrize("length", [640, 896, 1152, 1408])
def test_a_header_that_begins_like_a_pickle_is_no_pickle(tmp_path, length):
    """640 = 0x0280 is written as 80 02, which is also how a pickle of protocol 2 begins."""
    pad = length - 240  # roughly; the header is padded to eights
    path = tmp_path / "w.safetensors"
    while not path.exists() or struct.unpack("<Q", path.read_bytes()[:8])[0] < length:
        save_file(TENSORS, path, metadata={"pad": "x" * pad})
        pad += 1
    assert path.read_bytes()[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
    assert torch.equal(read_tensors(path)["a"], TENSORS["a"])


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickles_are_refused_as_such(tmp_path, protocol):
    path = tmp_path / "w.safetensors"
    path.write_bytes(pickle.dumps({"a": [1.5] * 100}, protocol))
    with pytest.raises(InputError, match="pickle, which can run code"):
        check_safetensors(path)
    for zipped in (False, True):
        torch.save(TENSORS, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(InputError, match="pickle, which can run code"):
            check_safetensors(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", "y" * 100)
    with pytest.raises(InputError, match="pickle, which can run code"):
        check_safetensors(path)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b"\xff\xfe",
        b"7",
        b"[" * 100_000,
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [1]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": null}}',
    ],
    ids=range(10),
)
def test_broken_headers_are_the_users_input(tmp_path, header):
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(InputError, match="broken"):
        check_safetensors(path)


def test_a_header_that_lies_about_shapes(tmp_path):
    header = b'{"a": {"dtype": "F32", "shape": [7], "data_offsets": [0, 4]}}'
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0\0\0")
    with pytest.raises(InputError, match="cannot be read"):
        read_tensors(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_nan_is_found_and_named(tmp_path, dtype):
    path = tmp_path / "w.safetensors"
    bad = torch.tensor([1.0, float("nan")]).to(dtype)
    write_tensors(path, {"fine": torch.ones(2).to(dtype), "spoilt": bad})
    with pytest.raises(InputError, match="tensor spoilt holds NaN"):
        read_tensors(path)
    write_tensors(path, {"fine": torch.ones(2).to(dtype)})
    assert read_tensors(path)["fine"].dtype == dtype


def test_folders(tmp_path):
    def complaint(folder):
        with pytest.raises(InputError) as caught:
            check_folder(folder)
        return str(caught.value)

    assert "there is no such folder" in complaint(tmp_path / "no")
    (tmp_path / "file").write_text("")
    assert "there is no such folder" in complaint(tmp_path / "file")
    folder = tmp_path / "model"
    folder.mkdir()
    assert "no config.json" in complaint(folder)
    (folder / "config.json").write_text("{}")
    assert "no safetensors weights" in complaint(folder)
    (folder / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    assert "only pickled weights (pytorch_model-00001-of-00002.bin)" in complaint(folder)
    assert "Convert it to safetensors" in complaint(folder)
    save_file(TENSORS, folder / "model-00001-of-00002.safetensors")
    check_folder(folder)  # a pickle beside safetensors is never read
    (folder / "model-00002-of-00002.safetensors").write_bytes(save(TENSORS)[:-1])
    assert "model-00002-of-00002.safetensors" in complaint(folder)
    assert load_file(folder / "model-00001-of-00002.safetensors").keys() == TENSORS.keys()
