"""Checkpoints from which a killed run goes on as if it had never stopped.

A run's checkpoint folder holds one complete generation, `00000012/`, and for moments a second. A new one is written
under a hidden name, synced and renamed, and only then does the old one go: whenever the process dies, one complete
generation bears its final name. Tensors are safetensors, all else is JSON, so that loading runs no code.

Knows tensors by name; knows neither drafter nor optimiser nor what `extra` means. One writer at a time.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftloop.core.errors import EnvironmentFault, InputError
from draftloop.core.files import writing_fault

SCHEMA = 1
FOLDER = "checkpoints"  # inside a run directory
_STATE = "state.json"
_HIDDEN = ".part-"  # a generation being written or removed


@dataclass
class Best:
    """The best drafter of the present stage by validation.

    Attributes:
        step: updates of the stage after which it was measured.
        tau: its acceptance length.
        tensors: its parameters by name.
    """

    step: int
    tau: float
    tensors: dict[str, Tensor]


@dataclass
class State:
    """All that a run needs in order to go on.

    Attributes:
        stage: index of the present stage.
        step: updates made in it.
        drafter: parameters by name.
        optimiser: `DrafterOptimiser.tensors()`.
        fingerprints: what must be the same on resume, by name ("recipe", "target", "tokenizer").
        best: the best drafter of the stage, once one was measured.
        labels: supervised positions so far, over all stages.
        seconds: training time so far, in seconds.
        extra: anything else, as JSON (an order's epoch, the number of metrics lines, ...).
    """

    stage: int
    step: int
    drafter: dict[str, Tensor]
    optimiser: dict[str, Tensor]
    fingerprints: dict[str, str]
    best: Best | None = None
    labels: int = 0
    seconds: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)


def save(folder: Path, state: State) -> Path:
    """Write a state as the newest generation of a checkpoint folder; older ones and the rests of killed saves go.

    Args:
        folder: the run's checkpoint folder; made where missing.
        state: tensors on any device.

    Returns:
        The new generation's folder.

    Raises:
        EnvironmentFault: it cannot be written (the disk is full); the previous generation is intact.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clean(folder)
        old = _generations(folder)
        name = f"{int(old[-1].name) + 1 if old else 1:08d}"
        hidden = folder / (_HIDDEN + name)
        hidden.mkdir()
        try:
            _write(hidden, state)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        os.rename(hidden, folder / name)
        _sync(folder)
        for generation in old:  # renamed first, so that a half-removed one never bears a final name
            os.rename(generation, folder / (_HIDDEN + generation.name))
        _clean(folder)
    except OSError as error:
        raise writing_fault(error, folder) from error
    return folder / name


def load(folder: Path, fingerprints: Mapping[str, str] | None = None) -> State | None:
    """Read the newest generation of a checkpoint folder.

    Args:
        folder: the run's checkpoint folder, or one generation of it.
        fingerprints: those of the run that wants to go on; None to take any.

    Returns:
        The state with all tensors on the CPU, bit for bit as saved; None where there is no checkpoint.

    Raises:
        InputError: a file is missing, damaged or of another schema, or a fingerprint differs.
    """
    generation = folder if (folder / _STATE).is_file() else _newest(folder)
    if generation is None:
        return None
    path = generation / _STATE
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        schema = told["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, "cannot be read") from error
    if schema != SCHEMA:
        raise InputError(
            f"checkpoint schema {schema} is not {SCHEMA}, the one that this version reads",
            where=str(path),
            fix="Resume with the draftloop that wrote it.",
        )
    try:
        _compare(told["fingerprints"], fingerprints, generation)
        best = told["best"]
        return State(
            stage=told["stage"],
            step=told["step"],
            drafter=_read(generation / "drafter.safetensors"),
            optimiser=_read(generation / "optimiser.safetensors"),
            fingerprints=told["fingerprints"],
            best=Best(best["step"], best["tau"], _read(generation / "best.safetensors")) if best else None,
            labels=told["labels"],
            seconds=told["seconds"],
            extra=told["extra"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, "is incomplete") from error


def resolve(run: Path) -> Path | None:
    """Return the folder of a run directory's last complete checkpoint, or None where it has none."""
    return _newest(run / FOLDER)


def _newest(folder: Path) -> Path | None:
    found = _generations(folder) if folder.is_dir() else []
    return found[-1] if found else None


def _generations(folder: Path) -> list[Path]:
    """List the complete generations, oldest first."""
    found = [path for path in folder.iterdir() if path.is_dir() and path.name.isdecimal()]
    return sorted(found, key=lambda path: int(path.name))


def _clean(folder: Path) -> None:
    """Remove what a killed or finished save left under hidden names."""
    for path in folder.iterdir():
        if path.name.startswith(_HIDDEN):
            shutil.rmtree(path)


def _write(folder: Path, state: State) -> None:
    """Write and sync every file of a generation."""
    parts = {"drafter": state.drafter, "optimiser": state.optimiser}
    if state.best:
        parts["best"] = state.best.tensors
    for name, tensors in parts.items():
        path = folder / f"{name}.safetensors"
        try:
            # copies of their own on the CPU: safetensors takes no views and no shared memory
            own = {key: value.detach().to("cpu", copy=True).contiguous() for key, value in tensors.items()}
            save_file(own, path)
        except SafetensorError as error:  # its only way to report the system's errors
            if "No space left" in str(error):
                raise OSError(errno.ENOSPC, "No space left on device") from error
            raise EnvironmentFault(
                f"cannot write ({error})", where=str(path), fix="Look after the disk and resume."
            ) from error
        _sync(path)
    told = {
        "schema": SCHEMA,
        "stage": state.stage,
        "step": state.step,
        "labels": state.labels,
        "seconds": state.seconds,
        "best": {"step": state.best.step, "tau": state.best.tau} if state.best else None,
        "fingerprints": state.fingerprints,
        "extra": state.extra,
    }
    path = folder / _STATE
    path.write_text(json.dumps(told, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    """Force a file's bytes, or a folder's names, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file, whose header tells whether all of it is there."""
    if not path.is_file():
        raise _damaged(path, "is missing")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, f"cannot be read ({error})") from error


def _damaged(path: Path, what: str) -> InputError:
    return InputError(
        f"this part of a checkpoint {what}", where=str(path), fix="Copy the checkpoint anew, or begin a new run."
    )


def _compare(saved: Mapping[str, str], now: Mapping[str, str] | None, generation: Path) -> None:
    """Refuse to go on with another recipe, target or tokenizer."""
    if now is None:
        return
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    if names:
        listed = " and ".join(f"{name} ({saved.get(name)}, now {now.get(name)})" for name in names)
        raise InputError(
            f"the checkpoint was made with another {listed}",
            where=str(generation),
            fix="Resume with what the run began with, or begin a new run in another directory.",
        )
