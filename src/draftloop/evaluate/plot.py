"""A comparison as one PNG: bars of tau by prompt set with their intervals, and of tokens per second beside plain.

Knows only what `compare` found. A row of panels a temperature.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftloop.core.files import atomic_path
from draftloop.evaluate import PLAIN
from draftloop.evaluate.compare import ALL, Comparison, Contest, tail
from draftloop.evaluate.tau import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, told apart by people who see colours differently
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
_GREY = "#8c8c8c"  # plain decoding
_STYLE: dict[Any, Any] = {
    "text.usetex": False,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
}


def plot_comparison(comparison: Comparison, path: Path) -> Path:
    """Draw it.

    Args:
        comparison: with at least one contest.
        path: the PNG; replaced in one piece.

    Raises:
        EnvironmentFault: it cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    colours = _colours(comparison)
    contests = comparison.contests
    sets = max(len(_sets(contest)) for contest in contests)
    width = 3.6 + max(4.0, 0.35 * sets * len(comparison.entrants))
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a letter that the font lacks is drawn as a box
        figure = Figure(figsize=(min(width, 16.0), 0.6 + 2.9 * len(contests)), layout="constrained", dpi=144)
        grid = figure.subplots(len(contests), 2, squeeze=False, width_ratios=(2, 1))
        for contest, (left, right) in zip(contests, grid, strict=True):
            _bars_of_tau(left, contest, colours)
            _bars_of_speed(right, contest, colours)
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), frameon=False)
        figure.suptitle(f"Target: {comparison.target['name']}", x=0.01, ha="left", fontsize=10)
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format="png")
    return path


def _colours(comparison: Comparison) -> dict[str, str]:
    drafting = [one.name for one in comparison.entrants if one.drafter is not None]
    return {PLAIN: _GREY} | {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(drafting)}


def _sets(contest: Contest) -> list[str]:
    sets = list(contest.standings[0].acceptance.sets)
    return [ALL, *sets] if len(sets) > 1 else [ALL]


def _bars_of_tau(axis: Axes, contest: Contest, colours: Mapping[str, str]) -> None:
    """A group of bars a prompt set, a bar a drafter; from 1, which is no use at all."""
    drafting = [one for one in contest.standings if one.name != PLAIN]  # plain decoding has tau 1
    sets, count = _sets(contest), len(drafting)
    for place, one in enumerate(drafting):
        x, heights, below, above = [], [], [], []
        for group, name in enumerate(sets):
            part = one.acceptance if name == ALL else one.acceptance.sets.get(name)
            if part is None:
                continue
            x.append(group + 0.8 * ((place + 0.5) / count - 0.5))
            heights.append(part.tau_pooled)
            low, high = shown(part.interval, part.responses) or (nan, nan)  # no whisker
            below.append(part.tau_pooled - low)
            above.append(high - part.tau_pooled)
        bars: dict[str, Any] = {"color": colours[one.name], "label": tail(one.name, 32)}
        bars |= {"ecolor": "#333333", "capsize": 2}
        axis.bar(x, [h - 1 for h in heights], 0.8 / count, bottom=1, yerr=(below, above), **bars)
    axis.set_xticks(range(len(sets)), [tail(name, 16) for name in sets])
    axis.set_ylim(bottom=1)
    axis.grid(visible=False, axis="x")
    axis.set_title(f"tau by prompt set, temperature {contest.temperature:g}")
    axis.set_ylabel("tokens per verification")


def _bars_of_speed(axis: Axes, contest: Contest, colours: Mapping[str, str]) -> None:
    """A bar an entrant, plain decoding first, where its speed was measured."""
    if contest.plain is None:
        axis.set_axis_off()
        return
    speeds = {PLAIN: contest.plain} | {one.name: one.speed for one in contest.standings if one.speed is not None}
    for place, (name, speed) in enumerate(speeds.items()):
        rate = speed["tokens_per_s"]
        axis.bar(place, rate, 0.7, color=colours[name])
        words = f"{rate:.0f}" if name == PLAIN else f"{rate:.0f}\n{speed['speedup']:.2f}x"
        axis.text(place, rate, words, ha="center", va="bottom", fontsize=8)
    axis.axhline(contest.plain["tokens_per_s"], color="#333333", linewidth=0.8, linestyle=":", zorder=0.5)
    axis.set_ylim(top=1.25 * max(speed["tokens_per_s"] for speed in speeds.values()))
    axis.set_xticks([])
    axis.grid(visible=False, axis="x")
    axis.set_title("tokens/s; grey = plain decoding")
