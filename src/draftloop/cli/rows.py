"""Raw rows of what a command measures: a JSON-lines file, headed by what it was measured with, written as they come."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TextIO

from draftloop.core.errors import EnvironmentFault, InputError
from draftloop.core.files import writing_fault


def head_of(kind: str, target: Any) -> dict[str, Any]:
    """What rows were measured with: command, versions, machine, target."""
    from draftloop.train.material import command, hardware, versions

    dtype = str(target.dtype).removeprefix("torch.")
    head = {"kind": kind, "command": command(), "versions": versions(), "hardware": hardware()}
    return {**head, "target": {"name": target.name, "fingerprint": target.fingerprint, "dtype": dtype}}


def check_new(out: Path | None) -> None:
    """Refuse a file that is there.

    Raises:
        InputError: it is, or a folder of that name.
    """
    if out is not None and out.is_dir():
        raise InputError("this is a folder, not a file", where=str(out), fix="Name a file in it.")
    if out is not None and out.exists():
        raise InputError("there is such a file already, and it is not overwritten", where=str(out), fix="Name another.")


def row_writer(stack: ExitStack, out: Path | None, head: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """A function that writes one row to `out`, made with the first row and headed by `head`; to nowhere without it.

    Row by row, so that a killed command has kept what it measured. What cannot be written to its end is removed: the
    same command would refuse it.

    Args:
        stack: closes the file.
        out: the file, which must not exist.
        head: what it is measured with.

    Raises:
        InputError: there is such a file.
        EnvironmentFault: the disk is full, now or at a later row, or at the end; the file is gone.
    """
    if out is None:
        return lambda row: None
    check_new(out)
    opened: list[TextIO] = []

    def failed(error: OSError) -> EnvironmentFault:
        if opened:  # else it is not ours
            with suppress(OSError):  # closing tries to write once more what could not be written
                opened[0].close()
            out.unlink(missing_ok=True)
        return writing_fault(error, out)

    def close() -> None:
        try:
            if not opened[0].closed:
                os.fsync(opened[0].fileno())  # some file systems tell only then that there was no room
                opened[0].close()
        except OSError as error:
            raise failed(error) from error

    def write(row: dict[str, Any]) -> None:
        try:
            if not opened:
                out.parent.mkdir(parents=True, exist_ok=True)
                opened.append(out.open("x", encoding="utf-8", buffering=1))
                stack.callback(close)
                opened[0].write(json.dumps(head) + "\n")
            opened[0].write(json.dumps(row) + "\n")
        except OSError as error:
            raise failed(error) from error

    return write
