"""report.html of a run directory: one file, no scripts, nothing fetched from anywhere.

Knows only the files of a run directory: summary.json (needed), metrics.jsonl and recipe.yaml (shown where present).
Charts are inline SVG whose colours are CSS variables of the page, so that they follow light and dark; everything that
came from outside is escaped.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftloop.core.files import write_text
from draftloop.evaluate import table
from draftloop.evaluate.summary import Stage, Summary, read_summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FILE = "report.html"
TEMPLATE = Path(__file__).with_name("report.html.j2")

# Colours that matplotlib writes and the page replaces: no chart uses them otherwise.
_INK, _MUTED, _GRID, _GOOD, _BAD = "#0b0a01", "#0b0a02", "#0b0a03", "#0b0a04", "#0b0a05"
_SERIES = tuple(f"#0b0b{index:02x}" for index in range(8))  # 0 = the untrained drafter, grey
_VARIABLES = {_INK: "ink", _MUTED: "muted", _GRID: "grid", _GOOD: "good", _BAD: "bad"}
_VARIABLES |= {colour: f"s{index}" for index, colour in enumerate(_SERIES)}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: small, selectable, in the page's font
    "text.usetex": False,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "font.family": ["DejaVu Sans"],
    "font.size": 9.0,
    "text.color": _INK,
    "axes.labelcolor": _MUTED,
    "axes.titlecolor": _INK,
    "axes.titlesize": 9.0,
    "axes.titlelocation": "left",
    "axes.edgecolor": _GRID,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _MUTED,
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
}
_WIDTH = 7.6  # inches at 72 dots: the column of the page
_LOSS_POINTS = 160  # per stage; more are averaged in bins


@dataclass
class Metrics:
    """metrics.jsonl by stage and step; a step that was done twice (after a resume) counts once, the later one."""

    loss: dict[str, dict[int, float]] = field(default_factory=dict)
    tau: dict[str, dict[int, float]] = field(default_factory=dict)
    found: bool = False
    unreadable: int = 0  # lines, as a kill may leave one


def write_report(run_dir: Path) -> Path:
    """Write report.html beside the summary.json of a finished run.

    Returns:
        The report's path.

    Raises:
        InputError: there is no summary.json, or it is not valid.
        EnvironmentFault: the report cannot be written.
    """
    summary = read_summary(run_dir)
    metrics = read_metrics(run_dir / "metrics.jsonl")
    recipe = run_dir / "recipe.yaml"
    text = recipe.read_text(encoding="utf-8", errors="replace") if recipe.is_file() else None
    write_text(run_dir / FILE, render(summary, metrics, text))
    return run_dir / FILE


def read_metrics(path: Path) -> Metrics:
    """Read the training log: lines of kind `train` (loss) and `validation` (tau_pooled); other kinds are skipped."""
    metrics = Metrics(found=path.is_file())
    if not metrics.found:
        return metrics
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            kind = value["kind"]
            if kind == "train":
                metrics.loss.setdefault(value["stage"], {})[int(value["step"])] = _number(value["loss"])
            elif kind == "validation":
                metrics.tau.setdefault(value["stage"], {})[int(value["step"])] = _number(value["tau_pooled"])
        except (ValueError, KeyError, TypeError):
            metrics.unreadable += 1
    return metrics


def _number(value: Any) -> float:
    """Read a number of the log, in which null stands for NaN."""
    return float("nan") if value is None else float(value)


def render(summary: Summary, metrics: Metrics, recipe: str | None) -> str:
    """Make the whole page.

    Args:
        summary: the run's record.
        metrics: its training log, may be empty.
        recipe: text of the resolved recipe, or None.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    for name in ("count", "short", "duration", "interval_text", "percent_change", "share", "place"):
        environment.filters[name] = getattr(table, name)
    charts = {
        "validation": validation_chart(summary, metrics),
        "loss": loss_chart(summary, metrics),
        "positions": position_chart(summary),
        "split": split_chart(summary),
        "sets": set_chart(summary),
        "decoding": decoding_chart(summary),
    }
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        s=summary,
        metrics=metrics,
        recipe=recipe,
        colours=[_VARIABLES[_colour(summary, stage.name)] for stage in summary.stages],
        charts={name: None if chart is None else Markup(chart) for name, chart in charts.items()},
        tau_sentence=table.tau_sentence(summary),
        ngram_sentence=table.ngram_sentence(summary),
        speed_sentence=table.speed_sentence(summary),
        lossless_sentence=table.lossless_sentence(summary),
    )


def validation_chart(summary: Summary, metrics: Metrics) -> str | None:
    """Chart tau on validation against training steps and training time; branches begin where their start was chosen."""
    curves = [(stage, _validation(stage, metrics)) for stage in summary.stages]
    if not any(points for _, points in curves):
        return None
    steps, seconds = _offsets(summary)
    with _chart("validation", 2.6, 1, 2) as (figure, axes):
        for stage, points in curves:
            if not points:
                continue
            colour = _colour(summary, stage.name)
            per_step = stage.seconds / stage.steps if stage.steps else 0.0
            for axis, start, scale in ((axes[0], steps, 1.0), (axes[1], seconds, per_step)):
                x = [start[stage.name] + scale * step for step in points]
                axis.plot(x, list(points.values()), color=colour, marker="o")
                if stage.chosen_step in points:
                    at = (start[stage.name] + scale * stage.chosen_step, points[stage.chosen_step])
                    axis.plot(*at, "o", markersize=8, markerfacecolor="none", markeredgecolor=colour)
        axes[0].set(title="Tau on validation", xlabel="optimiser steps from the start")
        axes[1].set(title="Tau on validation", xlabel="training seconds from the start")
        return _svg(figure)


def loss_chart(summary: Summary, metrics: Metrics) -> str | None:
    """Chart the training loss, a panel a stage: stages minimise different things, so they share no scale."""
    stages = [stage for stage in summary.stages if metrics.loss.get(stage.name)]
    if not stages:
        return None
    columns = min(3, len(stages))
    rows = -(-len(stages) // columns)
    with _chart("loss", 1.9 * rows, rows, columns) as (figure, axes):
        for axis, stage in zip(axes, stages, strict=False):
            points = _binned(sorted(metrics.loss[stage.name].items()))
            axis.plot(*zip(*points, strict=True), color=_colour(summary, stage.name), marker="" if points[1:] else "o")
            axis.set(title=_shortened(stage.name), xlabel="step")
        for axis in axes[len(stages) :]:
            axis.set_axis_off()
        axes[0].set_ylabel("loss")
        return _svg(figure)


def position_chart(summary: Summary) -> str | None:
    """Chart the share of steps whose k-th draft was accepted, and the same given that the drafts before it were."""
    if not any(stage.per_position for stage in summary.stages):
        return None
    with _chart("positions", 2.6, 1, 2) as (figure, axes):
        for stage in summary.stages:
            for axis, values in zip(axes, (stage.per_position, stage.conditional), strict=True):
                _shares(axis, values, _colour(summary, stage.name))
        axes[0].set_title("Accepted up to position k, %")
        axes[1].set_title("Accepted at k, given all before, %")
        return _svg(figure)


def split_chart(summary: Summary) -> str | None:
    """Chart what became of the drafted tokens that stages were trained on: shares, and acceptance by position."""
    stages = [stage for stage in summary.stages if stage.split is not None]
    if not stages:
        return None
    with _chart("split", 1.4 + 0.35 * len(stages), 1, 2) as (figure, axes):
        for row, stage in enumerate(stages):
            assert stage.split is not None
            counts = (stage.split.accepted, stage.split.first_rejected, stage.split.later_rejected)
            left, total = 0.0, max(1, sum(counts))
            for number, colour, alpha in zip(counts, (_GOOD, _BAD, _BAD), (0.85, 0.85, 0.4), strict=True):
                width = 100 * number / total
                axes[0].barh(row, width, left=left, color=colour, alpha=alpha, height=0.6)
                left += width
            by_position = stage.split.by_position
            drafted = [at.accepted + at.rejected for at in by_position]
            values = [at.accepted / n if n else None for at, n in zip(by_position, drafted, strict=True)]
            _shares(axes[1], values, _colour(summary, stage.name))
        _names(axes[0], [stage.name for stage in stages])
        axes[0].set(title="Drafted tokens trained on, %", xlim=(0, 100))
        axes[1].set_title("Accepted by position k, %")
        return _svg(figure)


def set_chart(summary: Summary) -> str | None:
    """Chart tau by prompt set, a dot a stage, with 95 % intervals."""
    names = sorted({name for stage in summary.stages for name in stage.sets})
    if not names:
        return None
    stages = summary.stages
    with _chart("sets", 0.8 + len(names) * (0.15 + 0.14 * len(stages)), 1, 1) as (figure, axes):
        for row, name in enumerate(names):
            for index, stage in enumerate(stages):
                if (part := stage.sets.get(name)) is None:
                    continue
                y = row + 0.7 * ((index + 0.5) / len(stages) - 0.5)
                colour = _colour(summary, stage.name)
                if part.interval is not None:
                    axes[0].plot(part.interval, (y, y), color=colour, linewidth=1.2)
                axes[0].plot(part.tau_pooled, y, "o", color=colour, markersize=5)
        _names(axes[0], names)
        axes[0].set_title("Tau pooled, with 95 % interval")
        return _svg(figure)


def decoding_chart(summary: Summary) -> str | None:
    """Chart tokens per second, plain and speculative."""
    if summary.decoding is None:
        return None
    plain, arms = summary.decoding.plain, summary.decoding.arms
    with _chart("decoding", 0.7 + 0.32 * (1 + len(arms)), 1, 1) as (figure, axes):
        axis = axes[0]
        axis.barh(0, plain.tokens_per_s, color=_MUTED, height=0.6)
        axis.axvline(plain.tokens_per_s, color=_INK, linewidth=0.8, linestyle=":")
        for row, arm in enumerate(arms, 1):
            axis.barh(row, arm.tokens_per_s, color=_colour(summary, arm.name), height=0.6)
            words = f" {arm.speedup:.2f}x{' (slower)' if arm.speedup < 1 else ''}"
            axis.text(max(arm.tokens_per_s, plain.tokens_per_s), row, words, va="center")
        axis.set_xlim(0, 1.18 * max(plain.tokens_per_s, *(arm.tokens_per_s for arm in arms), 1e-9))
        _names(axis, ["plain", *(arm.name for arm in arms)])
        axis.set_title("Tokens per second")
        return _svg(figure)


def _validation(stage: Stage, metrics: Metrics) -> dict[int, float]:
    """Step -> tau, ascending; the log serves where the summary holds none."""
    points = {point.step: point.tau_pooled for point in stage.validation} or metrics.tau.get(stage.name, {})
    return dict(sorted(points.items()))


def _offsets(summary: Summary) -> tuple[dict[str, float], dict[str, float]]:
    """Optimiser steps, and seconds, that had gone into each stage's start; seconds spread evenly over steps."""
    steps, seconds = {summary.first.name: 0.0}, {summary.first.name: 0.0}
    for before, stage in zip(summary.stages, summary.stages[1:], strict=False):
        start = (
            before if stage.start == "previous" else next((s for s in summary.stages if s.name == stage.start), None)
        )
        used, share = 0, 0.0
        if start is not None:
            used = start.steps if start.chosen_step is None else start.chosen_step
            share = used / start.steps if start.steps else 0.0
        steps[stage.name] = used + (steps[start.name] if start else 0.0)
        seconds[stage.name] = share * start.seconds + seconds[start.name] if start else 0.0
    return steps, seconds


def _binned(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """Means of neighbours, so that a long run stays a small chart."""
    size = -(-len(points) // _LOSS_POINTS)
    bins = [points[at : at + size] for at in range(0, len(points), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in bins]


def _colour(summary: Summary, name: str) -> str:
    """Grey for the untrained drafter, then a colour a stage, in order; more than seven stages share colours."""
    index = next((i for i, stage in enumerate(summary.stages) if stage.name == name), 1)
    return _SERIES[(index - 1) % 7 + 1] if index else _SERIES[0]


def _shares(axis: Axes, values: Sequence[float | None], colour: str) -> None:
    """Draw a line of per cents over k = 1..K; None leaves a gap."""
    from matplotlib.ticker import MaxNLocator

    heights = [float("nan") if value is None else 100 * value for value in values]
    axis.plot(range(1, len(heights) + 1), heights, color=colour, marker="o")
    axis.set(ylim=(0, 102), xlabel="position k")
    axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))


def _shortened(name: str) -> str:
    """Cut a name to what fits beside or above a panel; the tables hold it whole."""
    return name if len(name) <= 26 else f"{name[:25]}…"


def _names(axis: Axes, names: Sequence[str]) -> None:
    """Name the rows of a horizontal chart, the first on top."""
    axis.set_yticks(range(len(names)), [_shortened(name) for name in names])
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(visible=False, axis="y")
    axis.tick_params(axis="y", length=0)


@contextmanager
def _chart(name: str, height: float, rows: int, columns: int) -> Iterator[tuple[Figure, list[Axes]]]:
    """Open a figure and its axes in the report's style; height in inches. The salt keeps ids apart between charts."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # only measured here: the page's fonts draw the text
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        yield figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _svg(figure: Figure) -> str:
    """Inline SVG: colours become the page's variables, only ids in use stay, nothing points outside."""
    buffer = StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg, count=2).replace("xlink:href", "href")
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda m: m.group(0) if m.group(1) in used else "", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return svg
