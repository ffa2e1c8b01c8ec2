"""What a run reports while it trains: metrics.jsonl, and TensorBoard events derived from it.

Knows no loop: it writes the numbers that it is handed. `position()` goes into every checkpoint; a resumed run hands it
back and every later line is cut, so that the file is the one of a run that never stopped, but for timings.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from draftloop.core.errors import InputError
from draftloop.core.files import write_text, writing_fault

SCHEMA = 1
FILE = "metrics.jsonl"
EVENTS = "tensorboard"
_HEAD = ("schema", "kind", "stage", "step", "time_s")


class MetricsLog:
    """The metrics of one run: a JSON object a line, each on the disk's side of a kill when `write` returns.

    Every line has `schema`, `kind` ("train", "validate", ...), `stage`, `step` and `time_s` (seconds since 1970), then
    the values. TensorBoard shows every number among them as stage/kind/name.

    Args:
        run: the run directory.
        keep: lines to keep of an earlier attempt, its checkpoint's `position()`; 0 begins anew.

    Raises:
        InputError: the file has fewer whole lines than that.
        EnvironmentFault: it cannot be written.
    """

    def __init__(self, run: Path, keep: int = 0) -> None:
        self._path = run / FILE
        lines = _lines(self._path) if keep else []
        if len(lines) < keep:
            raise InputError(
                f"there are {len(lines)} lines, but the checkpoint was saved after {keep}",
                where=str(self._path),
                fix="Put the file back as it was, or begin a new run.",
            )
        rows = _rows(self._path, lines[:keep])  # later lines are cut, whatever is in them
        self._written = keep
        write_text(self._path, "".join(_json(row) for row in rows))
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only this class needs it

        try:
            shutil.rmtree(run / EVENTS, ignore_errors=True)  # all of it stands in the lines, which are shown anew
            self._events = SummaryWriter(log_dir=str(run / EVENTS), flush_secs=30)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise writing_fault(error, run) from error
        for row in rows:
            self._show(row)

    def write(self, kind: str, *, stage: str, step: int, **values: object) -> None:
        """Add one line.

        Args:
            kind: what the numbers are of ("train", "validate", "rollout", ...).
            stage: the stage's name.
            step: updates made in the stage.
            values: numbers (also one-element tensors), text, lists and dicts; NaN and infinities become null. Names of
                timings begin with `seconds` or end with `_s`.

        Raises:
            EnvironmentFault: the disk is full.
        """
        head = {"schema": SCHEMA, "kind": kind, "stage": stage, "step": step, "time_s": round(time.time(), 3)}
        assert not head.keys() & values.keys(), "these names are taken"
        row = {**head, **{name: _plain(value) for name, value in values.items()}}
        try:
            self._file.write(_json(row))
            self._file.flush()
        except OSError as error:
            raise writing_fault(error, self._path) from error
        self._written += 1
        self._show(row)

    def position(self) -> int:
        """Return the number of lines so far, after forcing them onto the disk: save it with the checkpoint.

        Raises:
            EnvironmentFault: the disk is full.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise writing_fault(error, self._path) from error
        return self._written

    def _show(self, row: dict[str, Any]) -> None:
        for name, value in row.items():
            if name not in _HEAD and isinstance(value, int | float) and not isinstance(value, bool):
                tag = f"{row['stage']}/{row['kind']}/{name}"
                self._events.add_scalar(tag, value, row["step"], walltime=row["time_s"])  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Close the file and the events."""
        self._events.close()  # type: ignore[no-untyped-call]
        try:
            self._file.close()
        except OSError as error:
            raise writing_fault(error, self._path) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SilentLog(MetricsLog):
    """Writes nothing: the log of a process that is not the first of those that train together."""

    def __init__(self) -> None:
        pass

    def write(self, kind: str, *, stage: str, step: int, **values: object) -> None:
        """Do nothing."""

    def position(self) -> int:
        """Return 0."""
        return 0

    def close(self) -> None:
        """Do nothing."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl; a last line without an end (a run killed, or writing right now) is left out.

    Args:
        path: the file, or the run directory that holds it.

    Raises:
        InputError: there is no such file, or a line is not a JSON object of this schema.
    """
    path = path / FILE if path.is_dir() else path
    return _rows(path, _lines(path))


def _lines(path: Path) -> list[bytes]:
    """Return the whole lines of a file."""
    try:
        return path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"these metrics cannot be read ({reason})", where=str(path), fix="Check the path.") from error


def _rows(path: Path, lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Parse lines and check their schema."""
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError("this line is not JSON", where=f"{path}:{number}", fix="Mend or remove it.") from error
        if not isinstance(row, dict) or row.get("schema") != SCHEMA:
            raise InputError(
                f"this line is no metrics line of schema {SCHEMA}",
                where=f"{path}:{number}",
                fix="Read it with the draftloop that wrote it.",
            )
        rows.append(row)
    return rows


def _json(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def without_timings(value: Any) -> Any:
    """Drop, at any depth, the keys that begin with `seconds` or end with `_s` (`tokens_per_s`, `time_s`, ...)."""
    if isinstance(value, Mapping):
        kept = {key: item for key, item in value.items() if not (key.startswith("seconds") or key.endswith("_s"))}
        return {key: without_timings(item) for key, item in kept.items()}
    return [without_timings(item) for item in value] if isinstance(value, list) else value


def same_but_timings(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> bool:
    """Whether two logs, as `read_metrics` gives them, say exactly the same in all but timings."""
    return bool(without_timings(list(a)) == without_timings(list(b)))


def _plain(value: object) -> Any:
    """Turn a value into what JSON has."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().tolist()
    elif hasattr(value, "tolist"):  # numpy
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
