"""Metrics that a resume leaves as if nothing had happened; progress that says what is true."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draftloop.core.errors import EnvironmentFault, InputError
from draftloop.train.metrics import MetricsLog, read_metrics, same_but_timings, without_timings
from draftloop.train.progress import Cost, Progress, cost_sheet, human_bytes, human_count, human_seconds

# ------------------------------------------------------------------------------------------------------------- metrics


def write(log: MetricsLog, steps: range) -> None:
    for step in steps:
        log.write("train", stage="sft", step=step, loss=1 / (step + 1), tokens_per_s=100.0 + step, seconds=step)
        if step % 3 == 2:
            log.write("validate", stage="sft", step=step, tau=1.5, sets={"a": 1.0, "seconds_a": id(log) % 97})


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_lines_are_there_at_once_and_read_back(tmp_path):
    log = MetricsLog(tmp_path)
    log.write("train", stage="sft", step=1, loss=torch.tensor(2.5), n=np.int64(3), x=np.float32(0.5), set="é", ok=True)
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()  # before any close
    row = json.loads(lines[0])
    assert row.pop("time_s") > 1e9
    assert list(row.items()) == [
        ("schema", 1),
        ("kind", "train"),
        ("stage", "sft"),
        ("step", 1),
        ("loss", 2.5),
        ("n", 3),
        ("x", 0.5),
        ("set", "é"),
        ("ok", True),
    ]
    log.close()
    assert len(read_metrics(tmp_path)) == 1
    assert read_metrics(tmp_path) == read_metrics(tmp_path / "metrics.jsonl")


def test_nan_is_null_at_any_depth(tmp_path):
    with MetricsLog(tmp_path) as log:
        nan = float("nan")
        log.write("t", stage="s", step=1, a=nan, b=torch.tensor(float("inf")), c=[1.0, -np.inf], d={"e": (nan,)})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    row = read_metrics(tmp_path)[0]
    assert (row["a"], row["b"], row["c"], row["d"]) == (None, None, [1.0, None], {"e": [None]})
    assert scalars(tmp_path) == {}


def test_a_disk_that_is_full_when_lines_are_forced_onto_it_names_the_file(tmp_path, monkeypatch):
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with MetricsLog(tmp_path) as log:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(EnvironmentFault, match=r"metrics\.jsonl: the disk is full"):
            log.position()


def test_a_resumed_log_is_that_of_a_run_that_never_stopped(tmp_path):
    through, stopped = tmp_path / "through", tmp_path / "stopped"
    with MetricsLog(through) as log:
        write(log, range(9))
    log = MetricsLog(stopped)
    write(log, range(4))
    kept = log.position()
    write(log, range(4, 7))  # after the checkpoint
    log.close()
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write('{"schema": 1, "kind": "tra')  # the kill's torn line
    assert len(read_metrics(stopped)) == 9
    with MetricsLog(stopped, keep=kept) as log:
        assert log.position() == kept == 5
        assert len(read_metrics(stopped)) == kept
        write(log, range(4, 9))
    a, b = read_metrics(through), read_metrics(stopped)
    assert a != b  # timings
    assert same_but_timings(a, b)
    assert not same_but_timings(a, b[:-1])
    b[0]["loss"] += 1e-12
    assert not same_but_timings(a, b)
    found = scalars(stopped)
    assert found == scalars(through)
    assert [step for step, _ in found["sft/train/loss"]] == list(range(9))
    assert found["sft/validate/tau"] == [(2, 1.5), (5, 1.5), (8, 1.5)]


def test_what_is_kept_stays_byte_for_byte(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write("t", stage="s", step=1, x=0.1 + 0.2, y=1e-300, é="ü", z={"b": 1, "a": [1e22, 10**30]})
        log.write("t", stage="s", step=2)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    MetricsLog(tmp_path, keep=2).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_starting_anew_empties_the_log(tmp_path):
    for _ in range(2):
        with MetricsLog(tmp_path) as log:
            write(log, range(2))
    assert len(read_metrics(tmp_path)) == 2
    assert [step for step, _ in scalars(tmp_path)["sft/train/loss"]] == [0, 1]


def test_a_log_shorter_than_its_checkpoint_is_refused(tmp_path):
    with MetricsLog(tmp_path) as log:
        write(log, range(2))
    with pytest.raises(InputError, match="2 lines, but the checkpoint was saved after 3"):
        MetricsLog(tmp_path, keep=3)
    assert len(read_metrics(tmp_path)) == 2  # untouched


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"schema": 2}', "{}", "\udcff"])
def test_lines_of_another_kind_are_named(tmp_path, line):
    with MetricsLog(tmp_path) as log:
        write(log, range(1))
    path = tmp_path / "metrics.jsonl"
    with path.open("a", errors="surrogateescape") as file:
        file.write(line + "\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl:2"):
        read_metrics(tmp_path)
    MetricsLog(tmp_path, keep=1).close()  # a resume cuts it
    assert len(read_metrics(tmp_path)) == 1
    with pytest.raises(InputError, match="cannot be read"):
        read_metrics(tmp_path / "none")


def test_which_keys_are_timings():
    row = {"seconds": 1, "seconds_eval": 1, "time_s": 1, "tokens_per_s": 1, "loss": 1, "steps": 1, "runs": {"a_s": 1}}
    assert without_timings(row) == {"loss": 1, "steps": 1, "runs": {}}
    assert same_but_timings([{"a": [{"x_s": 1}]}], [{"a": [{"x_s": 2}]}])
    assert not same_but_timings([{"a": [{"x": 1}]}], [{"a": [{"x": 2}]}])


# ------------------------------------------------------------------------------------------------------------ progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=40)


def text(console: Console) -> str:
    return console.file.getvalue()


def test_plain_lines_now_and_then():
    clock, console = Clock(), plain()
    with Progress("sft [x]", 1000, done=200, console=console, clock=clock, every_s=10) as progress:
        for done in range(201, 301):
            clock.now += 0.5
            progress.update(done, loss=2.34567, tau=1.5 if done == 205 else None)
    lines = text(console).splitlines()
    assert len(lines) == 5  # after 10, 20, ... 50 s, which is the end
    assert lines[0] == "sft [x]  220/1000 steps  2.0 steps/s  6 min 30 s left  loss 2.346  tau 1.5"
    assert lines[-1].startswith("sft [x]  300/1000 steps  2.0 steps/s  5 min 50 s left")


def test_slow_work_and_its_end():
    clock, console = Clock(), plain()
    with Progress("walk", 2, unit="prompts", console=console, clock=clock) as progress:
        clock.now += 20
        progress.update(1)
        clock.now += 20
        progress.update(2)
    assert text(console) == "walk  2/2 prompts  20.0 s/prompt  took 40 s\n"  # once


def test_silence():
    console, terminal = plain(), Console(file=io.StringIO(), force_terminal=True)
    for place in (console, terminal):
        with Progress("x", 10, silent=True, console=place, every_s=0) as progress:
            progress.update(5)
        assert text(place) == ""


def test_a_terminal_gets_a_bar():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Progress("sft", 10, console=console) as progress:
        progress.update(10, loss=1.25)
    assert "10/10 steps" in text(console)
    assert "loss 1.25" in text(console)
    assert "\x1b[" in text(console)


def test_no_work_at_all():
    console = plain()
    with Progress("x", 0, console=console):
        pass
    assert text(console) == "x  0/0 steps\n"


def test_cost_sheet():
    sheet = cost_sheet(
        [
            Cost("answers", tokens=3_830_000, disk_bytes=2**20, memory_bytes=3 * 2**30, seconds=61),
            Cost("sft", steps=3000, tokens=200_000, disk_bytes=2**30, memory_bytes=2**30, seconds=7500, bound=True),
            Cost("opd", steps=1000),
        ]
    )
    lines = [line.split("  ") for line in sheet.splitlines()]
    words = [[word.strip() for word in line if word.strip()] for line in lines]
    assert words == [
        ["what it will cost", "steps", "tokens", "disk", "memory", "time"],
        ["answers", "-", "3.8 M", "1.0 MiB", "3.0 GiB", "1 min 1 s"],
        ["sft", "3000", "200.0 k", "1.0 GiB", "1.0 GiB", "at most 2 h 5 min"],
        ["opd", "1000", "-", "-", "-", "not measured yet"],
        ["in all", "4000", "4.0 M", "1.0 GiB", "3.0 GiB", "at most 2 h 6 min + unmeasured"],
    ]
    assert len(cost_sheet([Cost("sft", steps=1)]).splitlines()) == 2
    timed = Cost("opd", steps=None, tokens=None, seconds=60)
    *_, one, both = cost_sheet([Cost("sft", steps=7), timed]).splitlines()
    assert one.split() == ["opd", "by", "time", "by", "time", "-", "-", "1", "min"]
    assert both.split()[:6] == ["in", "all", "7", "by", "time", "-"]
    assert cost_sheet([Cost("a", bound=True), Cost("b", seconds=61)]).endswith(
        "  1 min 1 s + unmeasured"
    )  # no bound in it
    assert cost_sheet([Cost("a", bound=True), Cost("b")]).splitlines()[-1].endswith("  not measured yet")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0.0 s"),
        (9.94, "9.9 s"),
        (42, "42 s"),
        (59.6, "1 min"),
        (260, "4 min 20 s"),
        (3600, "1 h"),
        (7500, "2 h 5 min"),
        (86400 * 3 + 3600 * 4 + 59, "3 d 4 h"),
    ],
)
def test_durations(seconds, words):
    assert human_seconds(seconds) == words


@given(st.floats(0, 1e9))
def test_any_duration_has_words(seconds):
    assert human_seconds(seconds)


def test_sizes():
    assert [human_bytes(n) for n in (0, 1023, 1536, 5 * 2**40)] == ["0 B", "1023 B", "1.5 KiB", "5.0 TiB"]
    assert [human_count(n) for n in (950, 1200, 3_400_000)] == ["950", "1.2 k", "3.4 M"]
