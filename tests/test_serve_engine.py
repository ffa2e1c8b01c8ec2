"""`draftloop serve`: the command is exact, the engine's Python is checked, and its end is passed on."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import draftloop.cli.serve  # noqa: F401  (registers the command)
from draftloop.cli import main
from draftloop.core.errors import EnvironmentFault, InputError
from draftloop.engines.serve import CPU_VLLM, Engine, find_engine, in_environment, run_engine, shell_line
from draftloop.formats.zlab import save_drafter
from tests.tiny import tiny_drafter, tiny_target


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def engine_python(path: Path, *, device="cpu", cli=True, then="exit 7") -> Path:
    """A stand-in for an environment's interpreter: it answers the probe, and ends as told when it is to serve."""
    facts = json.dumps({"version": "0.32.0", "device": device, "cli": cli})
    return script(path, f'if [ "$1" = "-c" ]; then echo noise; echo \'{facts}\'; exit 0; fi\n{then}')


@pytest.fixture
def drafter(tmp_path):
    target = tiny_target()
    save_drafter(tiny_drafter(target), tmp_path / "run" / "drafter")
    return tmp_path / "run"


def run(*arguments):
    with pytest.raises(SystemExit) as done:
        main(["serve", *map(str, arguments)])
    return done.value.code


def test_dry_run_prints_the_command_and_exports_first(drafter, tmp_path, capsys, monkeypatch):
    for name in CPU_VLLM:
        monkeypatch.delenv(name, raising=False)
    python = engine_python(tmp_path / "python")
    code = run(drafter, "--engine-python", python, "-t", "org/model", "--port", 8123, "--dry-run", "--", "--seed", "3")
    assert code == 0
    said = capsys.readouterr()
    line = said.out.strip()
    folder = (drafter / "export-vllm").resolve()
    assert (folder / "config.json").is_file()
    words = subprocess.run(
        ["sh", "-c", 'f() { for w; do echo "$w"; done; }; f ' + line], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [f"{name}={value}" for name, value in CPU_VLLM.items()] == words[: len(CPU_VLLM)]
    command = words[len(CPU_VLLM) :]
    assert command[:5] == [str(python), "-m", "vllm.entrypoints.cli.main", "serve", "org/model"]
    config = json.loads(command[command.index("--speculative-config") + 1])
    assert config == {"method": "dflash", "model": str(folder), "num_speculative_tokens": 3}
    assert command[-6:] == ["--host", "127.0.0.1", "--port", "8123", "--seed", "3"]
    assert "CPU backend" in said.err
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert run(drafter, "--engine-python", python, "-t", "org/model", "--dry-run") == 0
    assert (folder / "model.safetensors").stat().st_mtime_ns == before  # not exported again
    os.utime(drafter / "drafter" / "model.safetensors", (time.time() + 9,) * 2)
    assert run(drafter, "--engine-python", python, "-t", "org/model", "--dry-run") == 0
    assert (folder / "model.safetensors").stat().st_mtime_ns != before  # a newer drafter


def test_plain_is_the_target_alone_and_a_drafter_folder_is_served_as_it_is(drafter, tmp_path, capsys):
    python = engine_python(tmp_path / "python", device="cuda", cli=False)
    assert run(drafter / "drafter", "--engine-python", python, "-t", "org/model", "--plain", "--dry-run") == 0
    line = capsys.readouterr().out
    assert line.startswith(f"{python} -m vllm.entrypoints.openai.api_server --model org/model --host")
    assert "speculative" not in line
    assert run(drafter / "drafter", "--engine-python", python, "-t", "org/model", "--dry-run") == 0
    assert str((drafter / "drafter").resolve()) in capsys.readouterr().out
    assert not list(drafter.glob("export-*"))
    assert run(drafter, "--engine", "sglang", "--engine-python", python, "-t", "org/model", "--dry-run") == 0
    assert " -m sglang.launch_server --model-path org/model --speculative-algorithm DFLASH" in capsys.readouterr().out


def test_the_engines_exit_status_is_ours(drafter, tmp_path):
    for then, code in (("exit 7", 7), ("exit 0", 0), ("kill -9 $$", 137)):
        python = engine_python(tmp_path / "python", then=then)
        assert run(drafter / "drafter", "--engine-python", python, "-t", "org/model") == code


def test_a_python_without_the_engine_is_one_sentence(drafter, tmp_path, capsys):
    assert run(drafter, "--engine-python", tmp_path / "none", "--dry-run") == 2
    assert "there is no Python that can be run" in capsys.readouterr().err
    broken = script(tmp_path / "python", "echo \"ModuleNotFoundError: No module named 'vllm'\" >&2; exit 1")
    with pytest.raises(EnvironmentFault, match="cannot import vllm .ModuleNotFoundError"):
        find_engine("vllm", broken)
    assert run(drafter, "--engine-python", broken, "-t", "org/model") == 3
    capsys.readouterr()
    assert (
        run(drafter, "--engine-python", broken, "-t", "org/model", "--dry-run") == 0
    )  # the command is known all the same
    said = capsys.readouterr()
    assert said.out.startswith("vllm serve org/model --speculative-config")
    assert "vllm was not found here (this Python cannot import vllm" in said.err
    with pytest.raises(EnvironmentFault, match="does not answer"):
        find_engine("vllm", script(tmp_path / "python", "echo hello; exit 0"))


def test_the_users_own_variables_win(monkeypatch):
    for name in CPU_VLLM:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    engine = Engine("vllm", Path("/p"), "1", "cpu", True)
    assert engine.environment == {name: value for name, value in CPU_VLLM.items() if name != "OMP_NUM_THREADS"}
    assert Engine("vllm", Path("/p"), "1", "cuda", True).environment == {}
    assert Engine("sglang", Path("/p"), "1", "cpu", True).environment == {}


def test_commands_of_another_form_are_refused():
    with pytest.raises(InputError, match="no command for vllm"):
        in_environment(["python", "-m", "sglang.launch_server"], Engine("vllm", Path("/p"), "1", "cpu", True))
    assert shell_line(["a b", "c"], {"X": "1 2"}) == "X='1 2' 'a b' c"


def test_stopping_us_stops_the_engine(tmp_path):
    note = tmp_path / "pid"
    child = script(tmp_path / "child", f"echo $$ > {note}\nexec sleep 60")

    def stop():
        deadline = time.monotonic() + 20
        while not (note.is_file() and note.read_text(encoding="utf-8").strip()) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_engine([str(child)], {})
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text(encoding="utf-8")), 0)


def test_variables_reach_the_engine(tmp_path):
    assert run_engine([sys.executable, "-c", "import os, sys; sys.exit(int(os.environ['CODE']))"], {"CODE": "5"}) == 5
