"""The raw rows of one run, as `results.py take` left them: the head, the stages, and the walks by arm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftloop.evaluate.tau import Response


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, list[Response]]]:
    """The head, the stages and the walks of one run."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    arms: dict[str, list[Response]] = {}
    for row in rows:
        if row["kind"] == "walk":
            response = Response(row["id"], row["set"], tuple(row["committed"]), tuple(row["accepted"]), row["drafted"])
            arms.setdefault(row["arm"], []).append(response)
    return rows[0], [row for row in rows if row["kind"] == "stage"], arms
