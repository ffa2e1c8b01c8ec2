"""Reading raw rows: those of one run, as `results.py take` left them, and those of a measurement that may be cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftloop.evaluate.tau import Response


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, list[Response]]]:
    """The head, the stages and the walks of one run."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return rows[0], [row for row in rows if row["kind"] == "stage"], walks(rows)


def walks(rows: list[dict[str, Any]]) -> dict[str, list[Response]]:
    """The walked answers by arm."""
    arms: dict[str, list[Response]] = {}
    for row in rows:
        if row["kind"] == "walk":
            response = Response(row["id"], row["set"], tuple(row["committed"]), tuple(row["accepted"]), row["drafted"])
            arms.setdefault(row["arm"], []).append(response)
    return arms


def whole_rows(path: Path) -> list[dict[str, Any]]:
    """Every row of a measurement; a line that a kill cut off is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def interval(found: Sequence[float] | None, digits: int = 3) -> str:
    """`1.980 to 2.310`; nothing of a single response, which has none."""
    return "" if found is None else f"{found[0]:.{digits}f} to {found[1]:.{digits}f}"
