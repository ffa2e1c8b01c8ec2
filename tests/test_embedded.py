"""The embedded target's cache: made once, checked, never half there. The real model only where marked `smollm2`."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from draftloop.core.errors import EnvironmentFault
from draftloop.target import embedded
from draftloop.target.embedded import FOLDER, GGUF_MEMBER, MANIFEST, cache_root, embedded_fault, embedded_target

BODY = b"GGUF, but a small one\n" * 100
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"

# What a helper process of ours does before it asks for the target: a small GGUF is the known one, and "converting" it
# writes two small files. `prove` is left to each test.
FAKE = f"""
import hashlib, os, sys, time
from pathlib import Path
from draftloop.target import embedded
embedded.GGUF_BYTES = {len(BODY)}
embedded.GGUF_SHA256 = {hashlib.sha256(BODY).hexdigest()!r}
def convert(gguf, made):
    with open(os.environ["MADE_LOG"], "a") as log:
        log.write("made\\n")
    (made / "model.safetensors").write_bytes(gguf.read_bytes())
    (made / "config.json").write_text("{{}}")
embedded.convert = convert
embedded.prove = lambda made: None
"""


def write_wheel(path: Path, body: bytes = BODY, member: str = GGUF_MEMBER) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, body)
    return path


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A cache in which the target is a small fake, out of a wheel of our own; returns the cache root."""

    def convert(gguf: Path, made: Path) -> None:
        (made / "model.safetensors").write_bytes(gguf.read_bytes())
        (made / "config.json").write_text("{}")

    monkeypatch.setattr(embedded, "GGUF_BYTES", len(BODY))
    monkeypatch.setattr(embedded, "GGUF_SHA256", hashlib.sha256(BODY).hexdigest())
    monkeypatch.setattr(embedded, "convert", convert)
    monkeypatch.setattr(embedded, "prove", lambda made: None)
    monkeypatch.setenv(embedded.SOURCE_VARIABLE, str(write_wheel(tmp_path / "given.whl")))
    return tmp_path / "cache"


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_made_once_then_only_checked(fake, monkeypatch):
    said: list[str] = []
    folder = embedded_target(fake, say=said.append)
    assert folder == fake / FOLDER
    assert (folder / "model.safetensors").read_bytes() == BODY
    assert "Apache-2.0" in (folder / "README.md").read_text()
    assert left_in(fake) == [FOLDER]
    assert said[-1].endswith(str(folder))
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o666 & ~umask()}

    monkeypatch.setattr(embedded, "_obtain", lambda *_: pytest.fail("fetched again"))
    assert embedded_target(fake, say=lambda line: pytest.fail(line)) == folder


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_bare_gguf_will_do(fake, tmp_path, monkeypatch):
    (tmp_path / "bare.gguf").write_bytes(BODY)
    monkeypatch.setenv(embedded.SOURCE_VARIABLE, str(tmp_path / "bare.gguf"))
    assert (embedded_target(fake, say=print) / "model.safetensors").read_bytes() == BODY


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def flipped(path: Path) -> None:
    write_wheel(path, BODY[:-1] + b"?")


def of_another_size(path: Path) -> None:
    write_wheel(path, BODY + b"x")


def of_another_package(path: Path) -> None:
    write_wheel(path, member="other/model.gguf")


@pytest.mark.parametrize("spoil", [cut_short, flipped, of_another_size, of_another_package, Path.unlink])
def test_a_wrong_wheel_is_refused_and_leaves_nothing(fake, tmp_path, spoil):
    spoil(tmp_path / "given.whl")
    with pytest.raises(EnvironmentFault, match=r"given\.whl") as caught:
        embedded_target(fake, say=print)
    assert embedded.SOURCE_VARIABLE in caught.value.fix
    assert caught.value.exit_code == 3
    assert left_in(fake) == []


def test_a_long_gguf_is_not_read_to_its_end(fake, tmp_path, monkeypatch):
    (tmp_path / "long.gguf").write_bytes(BODY + b"x" * (8 << 20))
    monkeypatch.setenv(embedded.SOURCE_VARIABLE, str(tmp_path / "long.gguf"))
    copied = tmp_path / "copied"
    with open(tmp_path / "long.gguf", "rb") as stream:
        assert embedded._copy_hashed(stream, copied) != embedded.GGUF_SHA256
    assert copied.stat().st_size == len(BODY) + 1
    with pytest.raises(EnvironmentFault, match="not the expected one"):
        embedded_target(fake, say=print)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", BODY[:-1]),
        ("config.json", b"[]"),  # the same size
        ("config.json", None),
        (MANIFEST, b"{"),
        (MANIFEST, b"{}"),
        (MANIFEST, b'{"files": {}}'),
        (MANIFEST, b'{"files": [1]}'),
        (MANIFEST, None),
    ],
)
def test_a_damaged_cache_is_noticed_and_made_anew(fake, name, content):
    folder = embedded_target(fake, say=print)
    assert embedded_fault(fake) == ""
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    assert name in embedded_fault(fake)

    said: list[str] = []
    embedded_target(fake, say=said.append)
    assert "damaged" in said[0]
    assert embedded_fault(fake) == ""
    assert (folder / "config.json").read_text() == "{}"
    assert left_in(fake) == [FOLDER]


def test_what_cannot_be_mended_stays_and_is_reported(fake, tmp_path):
    folder = embedded_target(fake, say=print)
    (folder / "config.json").write_text("[]")
    (tmp_path / "given.whl").unlink()
    with pytest.raises(EnvironmentFault):
        embedded_target(fake, say=print)
    assert "config.json" in embedded_fault(fake)


def test_a_failed_proof_leaves_nothing(fake, monkeypatch):
    def prove(made: Path) -> None:
        raise EnvironmentFault("no")

    monkeypatch.setattr(embedded, "prove", prove)
    with pytest.raises(EnvironmentFault):
        embedded_target(fake, say=print)
    assert left_in(fake) == []


def test_a_full_disk_and_a_cache_that_is_a_file_are_named(fake, monkeypatch):
    fake.write_text("not a folder")
    with pytest.raises(EnvironmentFault, match="cannot write"):
        embedded_target(fake, say=print)
    fake.unlink()
    monkeypatch.setattr(embedded, "ROOM_NEEDED", 1 << 80)
    with pytest.raises(EnvironmentFault, match="disk is full"):
        embedded_target(fake, say=print)


def in_process(code: str, cache: Path, tmp_path: Path) -> subprocess.Popen[str]:
    wheel = write_wheel(tmp_path / "given.whl")
    env = os.environ | {
        embedded.SOURCE_VARIABLE: str(wheel),
        "MADE_LOG": str(tmp_path / "made.log"),
        "CACHE": str(cache),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    ask = "\nprint(embedded.embedded_target(Path(os.environ['CACHE'])))"
    return subprocess.Popen([sys.executable, "-c", FAKE + code + ask], env=env, stdout=subprocess.PIPE, text=True)


def test_killed_in_the_middle_then_asked_again(fake, tmp_path):
    killed = in_process("embedded.prove = lambda made: os.kill(os.getpid(), 9)", fake, tmp_path)
    assert killed.wait() == -9
    assert embedded_fault(fake) == "it is not there yet"
    assert [name for name in left_in(fake) if ".part-" in name], "the test should have left a part behind"
    embedded_target(fake, say=print)
    assert left_in(fake) == [FOLDER]


def test_processes_at_once_make_it_once(fake, tmp_path):
    slow = "embedded.prove = lambda made: time.sleep(0.5)"
    asking = [in_process(slow, fake, tmp_path) for _ in range(3)]
    answers = [process.communicate(timeout=60)[0].strip() for process in asking]
    assert answers == [str(fake / FOLDER)] * 3
    assert (tmp_path / "made.log").read_text() == "made\n"
    assert left_in(fake) == [FOLDER]


def test_without_a_network_pip_fails_and_the_fix_is_named(fake, monkeypatch):
    monkeypatch.delenv(embedded.SOURCE_VARIABLE)
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(EnvironmentFault, match=r"No matching|could not fetch") as caught:
        embedded_target(fake, say=print)
    assert embedded.SOURCE_VARIABLE in caught.value.fix
    assert left_in(fake) == []


def test_without_pip_the_fix_is_named(fake, tmp_path, monkeypatch):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    monkeypatch.delenv(embedded.SOURCE_VARIABLE)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(EnvironmentFault, match=r"no pip.*ensurepip"):
        embedded_target(fake, say=print)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(embedded.CACHE_VARIABLE, raising=False)
    assert cache_root() == tmp_path / ".cache" / "draftloop"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "draftloop"
    monkeypatch.setenv(embedded.CACHE_VARIABLE, "~/own")
    assert cache_root() == tmp_path / "own"


@pytest.fixture(scope="module")
def folder():
    return embedded_target()


@pytest.mark.smollm2
class TestTheRealOne:
    def test_it_is_the_one_that_results_speak_of(self, folder):
        manifest = json.loads((folder / MANIFEST).read_text())
        assert manifest["files"]["model.safetensors"]["sha256"] == WEIGHTS_SHA256
        assert embedded.sha256_file(folder / "model.safetensors") == WEIGHTS_SHA256

    def test_the_second_call_is_offline_and_fast(self, folder, monkeypatch):
        monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("went online"))
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("started a process"))
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            assert embedded_target() == folder
            seconds.append(time.perf_counter() - start)
        assert min(seconds) < 0.05

    def test_the_tokenizer_is_that_of_the_model(self, folder, monkeypatch):
        from transformers import AutoTokenizer

        monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("went online"))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        pieces = tokenizer.convert_ids_to_tokens(tokenizer("a = [\n    10]").input_ids)
        assert pieces == ["a", "Ġ=", "Ġ[", "ĊĠĠĠĠ", "1", "0", "]"]  # digits one by one, the blanks before them together
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
        chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer(text).input_ids
        assert ids.count(1) == 3
        assert ids.count(2) == 2
        assert tokenizer.decode(ids) == text

    def test_it_predicts_english(self, folder, monkeypatch):
        """Rotary rows left in GGUF's order cost 0.7 nats, q alone, gate for up or wrong heads 6 and more."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("went online"))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        text = "The sun rises in the east and sets in the west. Water boils at a temperature of one hundred degrees."
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            loss = model(ids, labels=ids).loss.item()
        assert loss < 2.9
        assert model.generation_config.eos_token_id == 2
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        assert model.config.rope_parameters["rope_theta"] == 100_000
