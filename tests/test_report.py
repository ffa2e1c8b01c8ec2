"""The summary record, its tables at 80 columns and the one-file report, on made-up runs."""

from __future__ import annotations

import copy
import functools
import io
import json
import math
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from draftloop.core.errors import DraftloopError, InputError
from draftloop.evaluate.report import Metrics, read_metrics, render, set_chart, write_report
from draftloop.evaluate.summary import acceptance_fields, check_summary, read_summary, write_summary
from draftloop.evaluate.table import (
    duration,
    evaluation_table,
    lossless_sentence,
    percent_change,
    short,
    speed_sentence,
    summary_tables,
    tau_sentence,
)
from draftloop.evaluate.tau import Response, acceptance

ATTACK = "<script>alert('x')</script>[bold]$x_1^2$ & \"q\""


LOOKUP_KEYS = ("name", "tau_pooled", "tau_mean", "interval", "per_position", "sets")


def stage(name: str, tau: float, *, drafted: int = 7, **changes: Any) -> dict[str, Any]:
    alphas = [0.3 + 0.1 * tau - 0.02 * k for k in range(drafted)]
    shares = [0.5 ** (1 + k) + 0.02 * tau for k in range(drafted)]
    part = {"tau_pooled": tau, "tau_mean": tau + 0.07, "interval": [tau - 0.15, tau + 0.16]}
    untrained = {"start": None, "method": None, "cells": None, "steps": 0, "labels": 0, "seconds": 0.0}
    out = {"name": name, **untrained, "chosen_step": None, **part, "per_position": shares, "conditional": alphas}
    sets = {"math": part, "code": {**part, "tau_pooled": tau + 0.4, "interval": [tau + 0.2, tau + 0.6]}, "chat": part}
    return {**out, "sets": sets, "validation": [], "split": None, "delivered": False} | changes


def trained(name: str, start: str, method: str, tau: float, *, steps: int = 400, **changes: Any) -> dict[str, Any]:
    cells = {"trunks": "fixed", "anchors": "random", "proposals": "trunk", "objective": "ce"}
    walk = [{"step": s, "tau_pooled": tau - 0.4 * (1 - s / steps) ** 2} for s in range(0, steps + 1, steps // 8)]
    effort = {"cells": cells, "steps": steps, "labels": 358_400, "seconds": 184.2, "chosen_step": steps}
    return stage(name, tau, **(effort | {"start": start, "method": method, "validation": walk} | changes))


def a_summary() -> dict[str, Any]:
    by_position = [{"accepted": 900 - 110 * k, "rejected": 300 + 110 * k} for k in range(7)]
    split = {"accepted": 3990, "first_rejected": 1100, "later_rejected": 3310, "blocks": 1200, "full_blocks": 100}
    split["by_position"] = by_position  # type: ignore[assignment]
    stages = [
        stage("untrained", 1.12),
        trained("sft", "init", "sft", 2.02, split=None),
        trained("sft-more", "sft", "sft", 2.11, chosen_step=350),
        trained("draft-opd", "sft", "draft-opd", 2.41, split=split, delivered=True, seconds=290.0),
    ]
    numbers = {"tau_pooled": 2.41, "tokens_per_s": 61.0, "ms_per_round": 39.5, "round_cost": 1.58}
    arms = [
        {**numbers, "name": "untrained", "tau_pooled": 1.12, "tokens_per_s": 28.4, "break_even_tau": 1.58}
        | {"speedup": 0.71, "sets": {}},
        {**numbers, "name": "draft-opd", "break_even_tau": 1.58, "speedup": 1.52, "sets": {}},
    ]
    decoding = {"batch_size": 1, "dtype": "bfloat16", "prompts": 12, "max_new_tokens": 256}
    audit_arms = [{"name": name, "equal": True, "first_difference": None} for name in ("untrained", "draft-opd")]
    data = {"prompts": 900, "responses": 900, "tokens": 180_412, "sets": {"math": 300, "code": 300, "chat": 300}}
    return {
        "schema": 1,
        "name": "first-run",
        "command": "draftloop train recipes/first.yaml stages.0.optimiser.lr=1e-3",
        "created": "2026-03-01T12:00:00+00:00",
        "seconds": 1234.5,
        "versions": {"draftloop": "0.1.0", "torch": "2.11.0", "transformers": "5.24.0"},
        "hardware": {"cpu": "2 cores", "gpu": None, "memory_gb": 8},
        "target": {"name": "SmolLM2-135M", "fingerprint": "abc123", "parameters": 134_515_008, "dtype": "bfloat16"},
        "drafter": {"family": "dflash", "parameters": 7_345_920, "bytes": 14_700_000, "block_size": 8, "layers": 2}
        | {"target_layers": [1, 14], "mask_token_id": 17, "mask_token": "<mask>"},
        "data": {"train": data, "validation": data, "test": data}
        | {"overlap": {"n": 8, "share_of_ngrams": 0.012, "share_of_prompts": 0.0}},
        "stages": stages,
        "delivered": "draft-opd",
        "gain": {"ratio": 2.15, "interval": [2.01, 2.29]},
        "ngram": {key: value for key, value in stage("ngram:7:2:4", 1.31).items() if key in LOOKUP_KEYS}
        | {"gain": {"ratio": 1.84, "interval": [1.7, 1.99]}},
        "decoding": {**decoding, "plain": {"tokens_per_s": 40.1, "ms_per_token": 24.9}, "arms": arms},
        "lossless": True,
        "audit": {"dtype": "float32", "prompts": 6, "tokens": 1536, "equal": True, "near_ties": 3, "gap": 1e-4}
        | {"arms": audit_arms},
    }


def slow_run() -> dict[str, Any]:
    value = a_summary()
    value["decoding"]["arms"][1] |= {"tokens_per_s": 22.3, "round_cost": 4.33, "break_even_tau": 4.33, "speedup": 0.556}
    return value


def failed_audit() -> dict[str, Any]:
    value = a_summary()
    value["lossless"] = value["audit"]["equal"] = False
    value["audit"]["arms"][1] |= {"equal": False, "first_difference": {"prompt": "math-3", "position": 41}}
    return value


def hostile() -> dict[str, Any]:
    """Every string of the record is an attack, but those that name one another stay consistent."""

    def spoil(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                (key if key not in ("math", "code", "chat") else key + ATTACK): spoil(v) for key, v in value.items()
            }
        if isinstance(value, list):
            return [spoil(v) for v in value]
        return value + ATTACK if isinstance(value, str) and value not in ("init", "previous") else value

    out: dict[str, Any] = spoil(a_summary())
    out["lossless"] = False
    out["audit"]["arms"][0] |= {"equal": False, "first_difference": ATTACK}
    return out


def single_stage() -> dict[str, Any]:
    value = a_summary()
    value["stages"] = [stage("untrained", 1.12, delivered=True, sets={})]
    value |= {"delivered": "untrained", "gain": None, "decoding": None, "lossless": None, "audit": None}
    value["data"] |= {"validation": None, "test": None, "overlap": None}
    value["drafter"] |= {"mask_token_id": None, "mask_token": None}
    return value


def many_and_long() -> dict[str, Any]:
    """Long names, a long block, unknown positions, ten stages."""
    value = a_summary()
    first = stage("untrained", 1.1, drafted=31)
    first["per_position"][20:], first["conditional"][20:] = [None] * 11, [None] * 11
    rest = [
        trained(f"a-very-long-stage-name-number-{i}", "previous", "custom", 2 + i / 9, drafted=31) for i in range(9)
    ]
    rest[-1]["delivered"] = True
    value |= {"stages": [first, *rest], "delivered": rest[-1]["name"], "decoding": slow_run()["decoding"]}
    value["decoding"]["arms"][1]["name"] = rest[-1]["name"]
    return value


RUNS = {f.__name__: f for f in (a_summary, slow_run, failed_audit, hostile, single_stage, many_and_long)}


def metrics_lines(summary: dict[str, Any]) -> list[str]:
    lines = []
    for part in summary["stages"][1:]:
        for step in range(10, part["steps"] + 1, 10):
            train = {"kind": "train", "stage": part["name"], "step": step, "loss": 5 / step**0.3, "lr": 1e-3}
            lines.append(json.dumps({**train, "grad_norm": 0.4, "seconds": step * 0.4}))
        lines += [json.dumps({"kind": "validation", "stage": part["name"], **point}) for point in part["validation"]]
    return lines


def run_directory(path: Path, summary: dict[str, Any], *, metrics: bool = True) -> Path:
    write_summary(path, summary)
    if metrics:
        (path / "metrics.jsonl").write_text("\n".join(metrics_lines(summary)) + "\n")
        (path / "recipe.yaml").write_text(f"name: first-run\n# {ATTACK}\n")
    return path


def screen(renderable: RenderableType, width: int = 80) -> str:
    buffer = io.StringIO()
    Console(file=buffer, width=width).print(renderable)
    return buffer.getvalue()


Pages = Callable[..., str]


@pytest.fixture(scope="module")
def html_of(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    """The report of a run by name; each is made once."""

    @functools.cache
    def make(run: str, metrics: bool = True) -> str:
        directory = run_directory(tmp_path_factory.mktemp(run), RUNS[run](), metrics=metrics)
        path = write_report(directory)
        assert path == directory / "report.html"
        assert not [left.name for left in directory.iterdir() if left.name.startswith(".")]
        return path.read_text()

    return make


class Page(HTMLParser):
    """Checks that tags nest, and gathers what a browser would see."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "path", "use", "rect"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs, closed=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]], closed: bool = False) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if not closed and tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


@pytest.mark.parametrize(
    ("run", "metrics"), [("a_summary", False), ("single_stage", False), *((name, True) for name in RUNS)]
)
def test_the_report_is_one_safe_file(html_of: Pages, run: str, metrics: bool) -> None:
    html = html_of(run) if metrics else html_of(run, metrics=False)
    page = Page(html)
    assert not page.open
    assert not {"script", "link", "img", "iframe", "object", "embed", "image"} & set(page.tags)
    assert "http:" not in html
    assert "https:" not in html
    assert "@import" not in html
    for name, value in page.attributes:
        assert not name.startswith("on")
        if name in ("href", "src", "xlink:href"):
            assert value.startswith("#")
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    used = {value[1:] for name, value in page.attributes if name == "href"} | set(re.findall(r"url\(#([^)]+)\)", html))
    assert used <= set(ids)
    assert len(html) < 900_000
    assert "None" not in page.text.replace("none", "")
    assert "nan" not in page.text.split()
    assert ("There is no metrics.jsonl" in html) == (not metrics)
    assert ("There is no recipe.yaml" in html) == (not metrics)


def test_the_report_says_what_was_found(html_of: Pages) -> None:
    page = Page(html_of("a_summary"))
    for words in (
        "1.12 → 2.41",
        "2.15x [2.01, 2.29]",
        "1.52×",
        "equals plain greedy decoding",
        "draftloop train recipes/first.yaml stages.0.optimiser.lr=1e-3",
        "+115 %",
        "1,200",
        "torch",
        "2.11.0",
        "abc123",
        "8-grams",
    ):
        assert words in page.text, words
    assert page.tags.count("svg") == 6
    # charts take the page's colours, in light and in dark
    assert "var(--s3)" in "".join(value for name, value in page.attributes if name == "style")
    assert "#0b0" not in "".join(value for _, value in page.attributes)


def test_names_reach_the_page_as_text(html_of: Pages) -> None:
    html = html_of("hostile")
    assert "<script" not in html
    page = Page(html)
    assert page.text.count(ATTACK) > 20
    assert f"name: first-run\n# {ATTACK}" in page.text


def test_dollar_signs_are_no_formula() -> None:
    value = a_summary()
    value["stages"][0]["sets"]["$x_1^2$"] = value["stages"][0]["sets"]["math"]
    chart = set_chart(check_summary(value, where="x"))
    assert chart is not None
    assert "$x_1^2$" in Page(chart).text


def test_the_report_is_the_same_again_and_leaves_no_trace_in_matplotlib(html_of: Pages, tmp_path: Path) -> None:
    import matplotlib

    first, before = html_of("a_summary"), dict(matplotlib.rcParams)
    assert write_report(run_directory(tmp_path, a_summary())).read_text() == first
    assert dict(matplotlib.rcParams) == before
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


def test_a_slowdown_is_called_a_slowdown(html_of: Pages) -> None:
    summary = check_summary(slow_run(), where="x")
    sentence = speed_sentence(summary)
    assert "SLOWDOWN" in sentence
    assert "slower than plain decoding, 0.56x" in sentence
    assert "22.3 against 40.1" in sentence
    assert "above tau 4.33, but tau is 2.41" in sentence
    assert "SLOWER" in screen(summary_tables(summary))
    page = Page(html_of("slow_run"))
    assert "0.56× slower" in page.text
    assert "SLOWDOWN" in page.text
    assert "SLOW" not in speed_sentence(check_summary(a_summary(), where="x"))


def test_a_failed_audit_is_called_one(html_of: Pages) -> None:
    summary = check_summary(failed_audit(), where="x")
    text = lossless_sentence(summary)
    assert text.startswith("NOT LOSSLESS")
    assert "draft-opd, first at prompt math-3, position 41" in text
    page = Page(html_of("failed_audit"))
    assert "not lossless" in page.text
    assert "near-ties (top-2 gap below 0.0001): 3" in page.text
    ties = a_summary()
    ties["audit"]["arms"][0]["at_ties"] = 2
    assert "but for 2 responses that part from it at a near-tie" in lossless_sentence(check_summary(ties, where="x"))
    # without an audit nothing is claimed, whatever the flag says
    claimed = a_summary() | {"audit": None, "lossless": True}
    assert "not audited" in lossless_sentence(check_summary(claimed, where="x"))
    assert "equals plain" not in screen(summary_tables(check_summary(claimed, where="x")))


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        ([1.1, 1.3], "1.20x [1.10, 1.30]."),
        ([0.9, 1.3], "cannot tell"),
        ([0.7, 0.9], "WORSE"),
        (None, "n=1: these prompts cannot tell"),
    ],
)
def test_a_gain_is_claimed_only_where_the_interval_shows_one(interval: list[float] | None, words: str) -> None:
    value = a_summary() | {"gain": {"ratio": 1.2, "interval": interval}}
    assert words in tau_sentence(check_summary(value, where="x"))


def test_a_set_of_one_response_has_no_interval() -> None:
    # were it drawn as a point, it would look certain; `plot` and the filters must take a null
    value = a_summary()
    for one in value["stages"]:
        one["sets"]["code"]["interval"] = None
    summary = check_summary(value, where="x")
    assert screen(summary_tables(summary)).count("n=1") == len(value["stages"])
    assert set_chart(summary)
    value["stages"][0]["interval"] = None
    assert "<td>n=1</td>" in render(check_summary(value, where="x"), Metrics(), None)


def test_branches_begin_where_their_start_was_chosen() -> None:
    from draftloop.evaluate.report import _offsets

    value = a_summary()
    value["stages"][1] |= {"steps": 400, "chosen_step": 300, "seconds": 100.0}
    steps, seconds = _offsets(check_summary(value, where="x"))
    assert steps == {"untrained": 0.0, "sft": 0.0, "sft-more": 300.0, "draft-opd": 300.0}
    assert seconds["draft-opd"] == pytest.approx(75.0)
    value["stages"][3]["start"] = "previous"
    assert _offsets(check_summary(value, where="x"))[0]["draft-opd"] == 300 + 350


def test_metrics_keep_the_later_of_two_and_count_what_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    train = {"kind": "train", "stage": "sft", "step": 1, "loss": 3.0}
    lines = [
        train,
        {**train, "loss": 2.0},
        {**train, "step": 4, "loss": None},
        {"kind": "rollout"},
        {"kind": "train", "stage": "sft", "step": 2},
        [],
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n\n{"kind": "tra')
    metrics = read_metrics(path)
    assert metrics.loss["sft"].keys() == {1, 4}
    assert metrics.loss["sft"][1] == 2.0
    assert math.isnan(metrics.loss["sft"][4])  # a null loss was not finite: a gap, not a broken line
    assert metrics.unreadable == 3
    assert not read_metrics(tmp_path / "none").found
    path.write_text(path.read_text() + '\n{"kind": "train", "stage": "sft", "step": 3, "loss": NaN}')
    write_summary(tmp_path, a_summary())
    assert "3 line(s) of metrics.jsonl" in write_report(tmp_path).read_text()


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
