"""Raw rows of what a command measures: whole, or not there, wherever the disk is full."""

from __future__ import annotations

import errno
import io
import json
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from draftloop.cli.rows import row_writer
from draftloop.core.errors import EnvironmentFault

HEAD = {"kind": "test"}
ROWS = [{"n": n} for n in range(5)]


def write_rows(out: Path) -> None:
    with ExitStack() as stack:
        write = row_writer(stack, out, HEAD)
        for row in ROWS:
            write(row)


class Full(io.FileIO):
    """A file on a disk with room for so many bytes; `room` is set by the test."""

    room = 0

    def write(self, data) -> int:
        left = self.room - self.tell()
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(bytes(data)[:left])


def full_disk(monkeypatch, room: int) -> None:
    monkeypatch.setattr(Full, "room", room)

    def opened(path, mode, *, encoding, buffering):
        return io.TextIOWrapper(
            io.BufferedWriter(Full(path, mode)), encoding=encoding, line_buffering=buffering == 1
        )  # as the real one, closing it writes once more

    monkeypatch.setattr(Path, "open", opened)


@pytest.mark.parametrize("room", [0, 5, 20, 33])
def test_a_full_disk_is_one_sentence_and_the_same_command_works_again(tmp_path, monkeypatch, room):
    """Fails if closing the file hides what is wrong with which file, or if what was begun stays."""
    out = tmp_path / "deep" / "rows.jsonl"
    with monkeypatch.context() as patch:
        full_disk(patch, room)
        with pytest.raises(EnvironmentFault) as caught:
            write_rows(out)
    assert str(caught.value) == f"{out}: the disk is full. Free some space and run the same command again."
    assert not list(out.parent.iterdir())
    write_rows(out)
    assert [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] == [HEAD, *ROWS]


def test_a_disk_that_tells_at_the_end_only(tmp_path, monkeypatch):
    def full(handle: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentFault, match=r"rows\.jsonl: the disk is full"):
        write_rows(tmp_path / "rows.jsonl")
    assert not list(tmp_path.iterdir())


def test_a_file_that_came_meanwhile_is_not_removed(tmp_path):
    out = tmp_path / "rows.jsonl"
    with ExitStack() as stack:
        write = row_writer(stack, out, HEAD)
        out.write_text("another's", encoding="utf-8")
        with pytest.raises(EnvironmentFault, match="cannot write"):
            write(ROWS[0])
    assert out.read_text(encoding="utf-8") == "another's"


def test_what_was_measured_before_another_fault_is_kept(tmp_path):
    out = tmp_path / "rows.jsonl"

    def stopped() -> None:
        with ExitStack() as stack:
            row_writer(stack, out, HEAD)(ROWS[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert len(out.read_text(encoding="utf-8").splitlines()) == 2
