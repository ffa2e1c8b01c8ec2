"""A parity verdict and a diagnosis for the terminal; knows their JSON alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

_ARMS = {"replay": "replay", "own": "own"}


def verdict_table(found: Mapping[str, Any]) -> Table:
    """Lay out `summarise`'s result: a row for each temperature and arm.

    Args:
        found: what `draftloop.engines.verdict.summarise` returns.
    """
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        caption="replay: our drafter on the engine's text; own: our own decoding",
        caption_justify="left",
    )
    for name in ("T", "ours"):
        table.add_column(Text(name))
    for name in ("tau", "engine", "difference", "95 %", "steps that\ndiffer", "at\nties", "law\nz"):
        table.add_column(Text(name), justify="right", no_wrap=True)
    for temperature, part in found["temperatures"].items():
        for arm, title in _ARMS.items():
            if arm not in part:
                continue
            one, steps, law = part[arm], part.get("steps"), part["law"]
            low, high = one["difference_interval"]
            mine = arm == "replay"
            cells = [
                temperature,
                title,
                f"{one['tau']:.3f}",
                f"{part['tau_engine']:.3f}",
                f"{one['difference']:+.2f}",
                f"[{low:+.2f}, {high:+.2f}]",
                f"{steps['differ']} of {steps['compared']}" if mine and steps else "",
                str(steps["at_ties"]) if mine and steps else "",
                f"{law['z']:+.1f}" if mine and law else "",
            ]
            table.add_row(*map(Text, cells))
    return table
