"""Files to rows: JSON lines or Parquet, one dictionary at a time, each with the place that an error message names.

Knows encodings and file formats. Does not know what a row means (see `shapes.py`), nor any tokenizer or model.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftloop.core.errors import InputError

_PARQUET_MAGIC = b"PAR1"
_BROKEN = "Download or write the file again, or give its rows as JSON lines."
_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true/false", int: "a number", float: "a number"}


def kind(value: Any) -> str:
    """Say what a JSON value is, for error messages."""
    return "null" if value is None else _KINDS.get(type(value), type(value).__name__)


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, row) of a JSON-lines or Parquet file; numbers count lines (rows, for Parquet) from 1.

    Blank lines are skipped but counted. In Parquet an absent key and a null are the same, so nulls are left out.

    Raises:
        InputError: the file is missing, unreadable, a directory, empty, in another format, or a line of it is not a
            JSON object in UTF-8 (named by number, when it is reached).
    """
    _check_file(path)
    with _opened(path) as handle:
        head = handle.read(len(_PARQUET_MAGIC))
    is_parquet = head == _PARQUET_MAGIC
    if (
        path.suffix == ".parquet"
        and head
        and not is_parquet
        and not head.lstrip(b"\xef\xbb\xbf \n\r\t").startswith(b"{")
    ):
        raise InputError("this is neither Parquet nor JSON lines", where=str(path), fix=_BROKEN)
    empty = True
    for numbered in _parquet_rows(path) if is_parquet else _json_rows(path):
        empty = False
        yield numbered
    if empty:
        raise InputError(
            "the file holds no prompts", where=str(path), fix="Give a file with one JSON object on each line."
        )


def _check_file(path: Path) -> None:
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.suffix in (".jsonl", ".parquet"))
        names = f" (it holds {', '.join(inside[:3])}{', ...' if len(inside) > 3 else ''})" if inside else ""
        raise InputError(
            f"this is a directory, not a prompt file{names}", where=str(path), fix="Name the files themselves."
        )
    if not path.exists():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, beside, n=1)
        hint = f"Did you mean {near[0]}?" if near else "File names start from data.dir of the recipe."
        raise InputError("there is no such prompt file", where=str(path), fix=hint)


def _opened(path: Path) -> Any:
    try:
        return open(path, "rb")
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            f"the prompt file cannot be read ({reason})", where=str(path), fix="Mend its permissions."
        ) from error


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with _opened(path) as handle:
        first = True
        for number, raw in enumerate(handle, start=1):
            where = f"{path}:{number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise InputError(
                    f"line {number} is not UTF-8 (byte {error.start + 1})", where=where, fix="Save the file as UTF-8."
                ) from error
            if not line:
                continue
            if first and line.startswith("["):
                raise InputError(
                    "the file is one JSON array, not JSON lines",
                    where=str(path),
                    fix=f"Write one object on each line (`jq -c '.[]' {path.name} > {path.stem}-lines.jsonl`).",
                )
            first = False
            yield number, _json_row(line, number, where)


def _json_row(line: str, number: int, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _fault(error, number, where) from error
    if not isinstance(row, dict):
        raise InputError(f"line {number} is {kind(row)}, not an object", where=where, fix='Write {"prompt": "..."}.')
    try:
        json.dumps(row, ensure_ascii=False).encode()  # half an escaped pair is JSON, but no tokenizer takes it
    except UnicodeEncodeError as error:
        raise InputError(
            f"line {number} holds half of a surrogate pair, which is no character",
            where=where,
            fix="Write the character itself, or both of its \\u escapes.",
        ) from error
    except RecursionError as error:
        raise _fault(error, number, where) from error
    return row


def _fault(error: Exception, number: int, where: str) -> InputError:
    """What is wrong with a line, in words of JSON's and not of Python's."""
    if isinstance(error, RecursionError):
        return InputError(f"line {number} is nested too deeply", where=where, fix="Flatten the row or take it out.")
    if not isinstance(error, json.JSONDecodeError):
        return InputError(f"line {number} holds a number of too many digits", where=where, fix="Write it as text.")
    what = f"line {number} is not JSON ({error.msg} at column {error.colno})"
    return InputError(what, where=where, fix="Put one whole JSON object on each line.")


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow as pa  # here, for it takes long to import and most files are JSON lines
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:  # type: ignore[no-untyped-call]
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield number, without_nulls(row)
    except (pa.lib.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).split("\n")[0].rstrip(".")
        part = f"cannot be read behind row {number}" if number else "is damaged or cut off"
        raise InputError(f"the Parquet file {part} ({reason})", where=str(path), fix=_BROKEN) from error


def without_nulls(value: Any) -> Any:
    """Copy `value` with every null entry of its objects left out, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
