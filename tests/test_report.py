"""The one-file report and the sentences that it shares with the tables, on made-up runs."""

from __future__ import annotations

import functools
import json
import math
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from draftloop.evaluate.report import Metrics, read_metrics, render, set_chart, write_report
from draftloop.evaluate.summary import check_summary, write_summary
from draftloop.evaluate.table import lossless_sentence, speed_sentence, summary_tables, tau_sentence
from tests.made_up_runs import ATTACK, RUNS, a_summary, failed_audit, run_directory, screen, slow_run

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
