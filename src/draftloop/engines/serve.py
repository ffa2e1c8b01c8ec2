"""Starting an inference engine on a drafter: its Python is checked, its command is built, its end is passed on.

The engine runs in its own environment as a child process, through its public command line; nothing of it is imported
here or patched. What its flags mean is in `formats.serving`.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from draftloop.core.errors import EnvironmentFault, InputError

EngineName = Literal["vllm", "sglang"]

_IMPORT_S, _STOP_S = 180, 20

# Two spinning OpenMP threads on two cores make vLLM's CPU backend ten times slower (measured with 0.32).
CPU_VLLM = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
}

_PROBES = {
    "vllm": """
import importlib.metadata, json, vllm
from vllm.platforms import current_platform
try:
    importlib.metadata.version("vllm")
    cli = True
except importlib.metadata.PackageNotFoundError:
    cli = False
print("\\n" + json.dumps({"version": vllm.__version__, "device": current_platform.device_type, "cli": cli}))
""",
    "sglang": """
import json, sglang, torch
device = "cuda" if torch.cuda.is_available() else "cpu"
print("\\n" + json.dumps({"version": sglang.__version__, "device": device, "cli": True}))
""",
}


@dataclass(frozen=True)
class Engine:
    """An installed engine.

    Attributes:
        name: vllm or sglang.
        python: the interpreter of its environment.
        version: its own word.
        device: cuda, cpu, ...
        cli: its command line runs; vLLM's does not where the distribution has another name (vllm-cpu).
    """

    name: EngineName
    python: Path
    version: str
    device: str
    cli: bool

    @property
    def environment(self) -> dict[str, str]:
        """Variables that it needs here, where the user has not set them."""
        wanted = CPU_VLLM if (self.name, self.device) == ("vllm", "cpu") else {}
        return {name: value for name, value in wanted.items() if name not in os.environ}

    @property
    def cautions(self) -> tuple[str, ...]:
        """Known faults, for somebody who serves with a drafter."""
        if (self.name, self.device) != ("vllm", "cpu"):
            return ()
        return (
            "on a CPU, vLLM up to 0.32 does not follow the target's law above temperature 0 when it speculates: ask for"
            " temperature 0 only. Drafters of several layers lose acceptance. See docs/engines.md.",
        )


def find_engine(name: EngineName, python: Path) -> Engine:
    """Ask an interpreter for its engine.

    Args:
        name: vllm or sglang.
        python: the interpreter of the environment that it is installed in.

    Raises:
        InputError: there is no such interpreter.
        EnvironmentFault: it cannot import the engine.
    """
    place = python.expanduser()
    if not (place.is_file() and os.access(place, os.X_OK)):
        fix = f"Give the Python of the environment with {name}, e.g. ~/{name}/bin/python."
        raise InputError("there is no Python that can be run", where=str(python), fix=fix)
    fix = f"Install {name} there, or give another --engine-python."
    try:
        done = subprocess.run(
            [place, "-c", _PROBES[name]], capture_output=True, text=True, timeout=_IMPORT_S, check=False
        )
        facts = json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise EnvironmentFault(
            f"this Python does not answer ({type(error).__name__})", where=str(python), fix=fix
        ) from error
    if facts is None:
        why = (done.stderr.strip().splitlines() or ["it says nothing"])[-1][:200].rstrip(".")
        raise EnvironmentFault(f"this Python cannot import {name} ({why})", where=str(python), fix=fix)
    return Engine(name, place, str(facts["version"]), str(facts["device"]), bool(facts["cli"]))


def in_environment(command: Sequence[str], engine: Engine) -> list[str]:
    """The same command, run by the interpreter of the engine's environment.

    Args:
        command: as `serve_command` gives it: `vllm serve TARGET ...` or `python -m sglang.launch_server ...`.
        engine: from `find_engine`.

    Raises:
        InputError: the command is of neither form.
    """
    head, rest = command[0], list(command[1:])
    if engine.name == "vllm" and head == "vllm" and rest[:1] == ["serve"]:
        if engine.cli:
            return [str(engine.python), "-m", "vllm.entrypoints.cli.main", *rest]
        return [str(engine.python), "-m", "vllm.entrypoints.openai.api_server", "--model", *rest[1:]]
    if engine.name == "sglang" and rest[:2] == ["-m", "sglang.launch_server"]:
        return [str(engine.python), *rest]
    raise InputError(f"this is no command for {engine.name}", where=shlex.join(command))


def shell_line(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """The command as one line for a POSIX shell, its variables in front."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(command)])


def run_engine(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the engine until it ends; Ctrl-C or SIGTERM here stops it there.

    Args:
        command: from `in_environment`.
        environment: variables beside our own.

    Returns:
        Its exit status; 128 + n where signal n ended it.
    """
    child = subprocess.Popen(list(command), env={**os.environ, **environment})

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        return _status(child.wait())
    except KeyboardInterrupt:
        child.terminate()
        try:
            child.wait(timeout=_STOP_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            child.kill()
            child.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _status(code: int) -> int:
    return 128 - code if code < 0 else code
