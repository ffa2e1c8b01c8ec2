"""Writing files so that a kill or a full disk never leaves half of one; fingerprints.

Knows nothing of what the files mean.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftloop.core.errors import EnvironmentFault, InputError


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is synced and renamed over it, on failure removed.

    Raises:
        EnvironmentFault: the disk is full or the folder cannot be written.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with open(temporary, "rb+") as done:
            os.fsync(done.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes 0600; others may need to read a drafter
        os.replace(temporary, path)
    except OSError as error:
        raise writing_fault(error, path) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def exchange(one: Path, other: Path) -> bool:
    """Let two paths of one file system change places in one step; False where the system cannot (nothing is done)."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return call is not None and call(_HERE, bytes(one), _HERE, bytes(other), _RENAME_EXCHANGE) == 0


_HERE, _RENAME_EXCHANGE = -100, 2  # AT_FDCWD and the flag of Linux's renameat2


def writing_fault(error: OSError, path: Path) -> EnvironmentFault:
    """The operating system's complaint about `path`, as one of ours."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EnvironmentFault(
            "the disk is full", where=str(path), fix="Free some space and run the same command again."
        )
    reason = error.strerror or str(error)
    return EnvironmentFault(
        f"cannot write ({reason})", where=str(path), fix="Choose another output folder or mend its permissions."
    )


def check_writable(folder: Path) -> None:
    """Refuse a folder in which nothing can be written, or which cannot be made; leaves nothing behind.

    Raises:
        InputError: it, or what lies above it, is a file.
        EnvironmentFault: the system lets nothing be written there.
    """
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not there.is_dir():
        raise InputError("this is a file, not a folder", where=str(there), fix="Name another folder.")
    try:
        tempfile.TemporaryFile(dir=there).close()  # permissions alone do not tell: root passes, /proc refuses
    except OSError as error:
        raise writing_fault(error, there) from error


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in one piece (atomic)."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON in one piece (atomic); NaN is refused, for JSON has none."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def fingerprint(*parts: object) -> str:
    """A short, stable name (16 hex digits) for anything whose JSON says what it is."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
