"""How far long work is, and, before it starts, what it will cost.

A live bar on a terminal, a plain line now and then elsewhere (CI logs), nothing when silent. Writes to standard error,
so that standard output stays free for results. Knows no loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar


class Progress:
    """The progress of one piece of work; a context manager.

    Args:
        title: what is being done.
        total: units of work in all.
        done: units done before (a resumed run); the rate is reckoned without them.
        unit: what is counted.
        silent: write nothing.
        every_s: seconds between plain lines where the output is no terminal.
        console: where to write; standard error by default.
        clock: seconds from any start.
    """

    def __init__(
        self,
        title: str,
        total: int,
        *,
        done: int = 0,
        unit: str = "steps",
        silent: bool = False,
        every_s: float = 30.0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._begin, self._done = done, done
        self._silent, self._every, self._clock = silent, every_s, clock
        self._console = console or Console(stderr=True)
        self._values: dict[str, float] = {}
        self._said: int | None = None
        self._started = self._spoke = clock()
        self._bar: Bar | None = None
        if not silent and self._console.is_terminal:
            columns = TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[words]}")
            self._bar = Bar(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task(title, total=total, completed=done, words=self._words())

    def __enter__(self) -> Self:
        self._started = self._spoke = self._clock()
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
        if not self._silent and self._said != self._done:  # how far it came, also when it failed
            self._say()

    def update(self, done: int, **values: float | None) -> None:
        """Say how far the work is.

        Args:
            done: units done so far, those before a resume included.
            values: numbers to show, such as loss and tau; each stays until it is given anew. None is left out.
        """
        self._done = done
        self._values |= {name: value for name, value in values.items() if value is not None}
        if self._bar:
            self._bar.update(self._task, completed=done, words=self._words())
        elif not self._silent and self._clock() - self._spoke >= self._every:
            self._say()

    def _say(self) -> None:
        self._spoke, self._said = self._clock(), self._done
        self._console.print(f"{self._title}  {self._words()}", soft_wrap=True, markup=False, highlight=False)

    def _words(self) -> str:
        """Say steps, rate, time left and the values in a line."""
        elapsed = self._clock() - self._started
        fresh = self._done - self._begin
        parts = [f"{self._done}/{self._total} {self._unit}"]
        if fresh > 0 and elapsed > 0:
            parts.append(_rate(fresh / elapsed, self._unit))
            left = (self._total - self._done) * elapsed / fresh
            parts.append(f"{human_seconds(left)} left" if left > 0 else f"took {human_seconds(elapsed)}")
        return "  ".join(parts + [f"{name} {value:.4g}" for name, value in self._values.items()])


@contextmanager
def reporting(title: str, *, unit: str, silent: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Progress for work that knows its size only when it begins: yields a function of (done, in all)."""
    with ExitStack() as stack:
        shown: list[Progress] = []

        def advance(done: int, total: int) -> None:
            if not shown:
                shown.append(stack.enter_context(Progress(title, total, unit=unit, silent=silent)))
            shown[0].update(done)

        yield advance


def _rate(per_second: float, unit: str) -> str:
    if per_second >= 1:
        return f"{per_second:.1f} {unit}/s"
    return f"{1 / per_second:.1f} s/{unit.removesuffix('s')}"


@dataclass(frozen=True)
class Cost:
    """What a piece of work will cost.

    Attributes:
        name: the piece, such as a stage.
        steps: optimiser steps (0 where there are none); None where a time decides, of which they are not yet reckoned.
        tokens: tokens that go through the target; None likewise.
        disk_bytes: bytes that stay on the disk.
        memory_bytes: largest memory of the device at a time.
        seconds: time, or None where it was not measured yet.
        bound: tokens and time are the most that they can be.
    """

    name: str
    steps: int | None = 0
    tokens: int | None = 0
    disk_bytes: int = 0
    memory_bytes: int = 0
    seconds: float | None = None
    bound: bool = False


def cost_sheet(costs: Sequence[Cost]) -> str:
    """Lay out what a run will cost: a row a piece and, for several, a last one in all (memory: the largest).

    Steps and tokens that a time decides are "by time", and a total leaves them out. A time says "at most" where it is,
    or sums up, a bound, and a total "+ unmeasured" while a piece's is unknown.
    """
    rows = [_row(cost) for cost in costs]
    if len(costs) > 1:
        known = [cost.seconds for cost in costs if cost.seconds is not None]
        total = Cost(
            "in all",
            _known(cost.steps for cost in costs),
            _known(cost.tokens for cost in costs),
            sum(cost.disk_bytes for cost in costs),
            max(cost.memory_bytes for cost in costs),
            sum(known) if known else None,
            any(cost.bound and cost.seconds is not None for cost in costs),
        )
        rows.append(_row(total, " + unmeasured" if len(known) < len(costs) else ""))
    table = [["what it will cost", "steps", "tokens", "disk", "memory", "time"], *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    aligned = [[word.rjust(width) for word, width in zip(row, widths, strict=True)] for row in table]
    lines = ["  ".join([row[0].ljust(widths[0]), *words[1:]]) for row, words in zip(table, aligned, strict=True)]
    return "\n".join(line.rstrip() for line in lines)


def _row(cost: Cost, missing: str = "") -> list[str]:
    told = "not measured yet"
    if cost.seconds is not None:
        told = ("at most " if cost.bound else "") + human_seconds(cost.seconds) + missing
    return [
        cost.name,
        _counted(cost.steps, str),
        _counted(cost.tokens, human_count),
        human_bytes(cost.disk_bytes) if cost.disk_bytes else "-",
        human_bytes(cost.memory_bytes) if cost.memory_bytes else "-",
        told,
    ]


def _known(counts: Iterable[int | None]) -> int | None:
    """What is known of a sum; None where nothing is, and something is decided by time."""
    found = list(counts)
    return sum(filter(None, found)) or (None if None in found else 0)


def _counted(count: int | None, words: Callable[[int], str]) -> str:
    if count is None:
        return "by time"
    return words(count) if count else "-"


def human_seconds(seconds: float) -> str:
    """Write a duration with its two leading units: "42 s", "4 min 20 s", "2 h 5 min", "3 d 4 h"."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    sizes = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    size, unit, small, below = next(entry for entry in sizes if whole >= entry[0])
    rest = whole % size // small
    return f"{whole // size} {unit}" + (f" {rest} {below}" if rest else "")


def human_bytes(count: int) -> str:
    """Write a size in powers of 1024: "512 B", "1.5 GiB"."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def human_count(count: int) -> str:
    """Write a number in powers of 1000: "950", "1.2 k", "3.4 M"."""
    return _scaled(count, 1000, ("", "k", "M", "G", "T")).strip()


def _scaled(count: int, base: int, units: Sequence[str]) -> str:
    value, power = float(count), 0
    while value >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    number = f"{value:.1f}" if power else str(count)
    return f"{number} {units[power]}"
