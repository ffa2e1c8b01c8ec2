"""The summary record and its tables at 80 columns, on made-up runs."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from draftloop.core.errors import DraftloopError, InputError
from draftloop.evaluate.report import write_report
from draftloop.evaluate.summary import acceptance_fields, check_summary, read_summary, write_summary
from draftloop.evaluate.table import (
    duration,
    evaluation_table,
    percent_change,
    short,
    summary_tables,
)
from draftloop.evaluate.tau import Response, acceptance
from tests.made_up_runs import (
    RUNS,
    a_summary,
    screen,
)


@pytest.mark.parametrize("run", RUNS)
def test_tables_fit_80_columns_and_a_pipe(run: str) -> None:
    summary = check_summary(RUNS[run](), where="x")
    text = screen(summary_tables(summary))
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for part in summary.stages:
        assert f"{part.tau_pooled:.2f}" in text
        assert f"[{part.interval[0]:.2f}, {part.interval[1]:.2f}]" in text


def test_tables_hold_the_figures() -> None:
    text = screen(summary_tables(check_summary(a_summary(), where="x")))
    for words in ("draft-opd *", "+115 %", "+80 %", "358k", "3 min 04 s", "1.52x faster", "0.71x SLOWER", "tau 1.58"):
        assert words in text, words
    assert "3990 (48 %)" in text
    row = next(line for line in text.splitlines() if re.match(r"untrained +\d+ +\d+ +\d+ +\d+ +\d+ +\d+ +\d+ *$", line))
    assert row.split()[1:3] == ["52", "27"]


def test_evaluation_table() -> None:
    responses = [Response(str(i), name, (3, 1, 4), (2, 0, 3), 3) for i in range(4) for name in ("math", "[red]")]
    found = acceptance([*responses, Response("e", "math", (1,), (1,), 3)], resamples=50)
    text = screen(evaluation_table(found, name="drafts/one"))
    assert max(map(len, text.splitlines())) <= 80
    assert "[red]" in text
    assert "drafts/one" in text
    assert re.search(r"all +2\.60 .*9 +25", text)
    one = acceptance([Response("e", "math", (1,), (1,), 3)], resamples=5)
    text = screen(evaluation_table(one))
    assert "all" not in text.split()
    assert re.search(r"accepted +100 +- +-", text)


def test_a_stage_takes_its_fields_from_acceptance() -> None:
    found = acceptance([Response("a", "math", (3, 1), (2, 1), 3)], resamples=5)
    value = a_summary()
    value["stages"][3] |= acceptance_fields(found)
    summary = check_summary(value, where="x")
    assert summary.best.tau_pooled == 2.0
    assert summary.best.steps == 400  # optimiser steps, not verify steps
    assert summary.best.per_position == [1.0, 1.0, 0.0]


def test_read_returns_what_was_written(tmp_path: Path) -> None:
    value = a_summary() | {"note": "kept"}
    write_summary(tmp_path, value)
    assert json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(value))
    assert read_summary(tmp_path) == check_summary(value, where="x")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.pop("stages"), "stages: Field required"),
        (lambda v: v["stages"][0].pop("tau_mean"), "stages.0.tau_mean"),
        (lambda v: v.update(schema=2), "schema 2 is not 1"),
        (lambda v: v.update(delivered="sft"), "delivered is 'sft'"),
        (lambda v: v["stages"][1].update(name="untrained"), "same name"),
        (lambda v: v["stages"][2].update(start="draft-opd"), "no earlier stage"),
        (lambda v: v["audit"]["arms"][0].update(equal=False), "not equal"),
        (lambda v: v["audit"].update(equal=False), "not equal"),
        (lambda v: v.update(lossless=None), "lossless is null"),
        (lambda v: v["stages"][0].update(tau_pooled=float("nan")), "stages.0.tau_pooled"),
    ],
)
def test_a_bad_summary_is_refused_whole(tmp_path: Path, change: Any, words: str) -> None:
    value = copy.deepcopy(a_summary())
    change(value)
    with pytest.raises(InputError, match=re.escape(words)):
        write_summary(tmp_path, value)
    assert not list(tmp_path.iterdir())
    (tmp_path / "summary.json").write_text(json.dumps(value))
    with pytest.raises(InputError, match=re.escape(words)):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_nan_outside_the_known_keys_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(DraftloopError, match="not JSON"):
        write_summary(tmp_path, a_summary() | {"note": float("nan")})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("text", "words"), [(None, "no summary"), ("{", "not JSON"), ("[]", "not a JSON object")])
def test_a_missing_or_broken_file_is_a_clear_error(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "summary.json").write_text(text)
    with pytest.raises(InputError, match=words):
        write_report(tmp_path)


def test_small_words() -> None:
    assert [duration(x) for x in (0.0, 9.96, 59.6, 61, 3599.7, 7500)] == [
        "0.0 s",
        "10.0 s",
        "1 min 00 s",
        "1 min 01 s",
        "1 h 00 min",
        "2 h 05 min",
    ]
    assert [short(x) for x in (9999, 358_400, 7_345_920)] == ["9999", "358k", "7.35M"]
    assert [percent_change(x, 2.0) for x in (2.4, 2.1, 1.9)] == ["+20 %", "+5.0 %", "-5.0 %"]
