"""How a drafter came to be, read from the summary.json of its run: what an export tells its readers.

Knows the few keys that it takes, and nothing of how they were measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftloop.core.errors import InputError

SUMMARY = "summary.json"


@dataclass(frozen=True)
class Step:
    """One stage on the way to the drafter; `labels` counts supervised positions."""

    name: str
    method: str
    objective: str
    steps: int
    labels: int


@dataclass(frozen=True)
class History:
    """A run in a few facts.

    Attributes:
        command: what was run.
        target: the name under which the target was loaded.
        hardware: the machine, in words.
        stages: those that were trained, in order.
        delivered: name of the stage whose drafter was delivered.
        objective: what that stage minimised; "" for an untrained drafter.
        tau: tokens committed per target verification on the test prompts, with its 95 % interval (None of one).
        sets: the same by test set, as (tau, interval).
    """

    command: str
    target: str
    hardware: str
    stages: tuple[Step, ...]
    delivered: str
    objective: str
    tau: float
    interval: tuple[float, float] | None
    sets: dict[str, tuple[float, tuple[float, float] | None]]


def objective_of(folder: Path) -> str:
    """What a drafter saved by us was last trained on, as its config.json says; "" where that is not said."""
    try:
        said = json.loads((folder / "config.json").read_text(encoding="utf-8"))["draftloop"]["extra"]["objective"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return said if isinstance(said, str) else ""


def read_history(run: Path) -> History | None:
    """Read what a run directory tells; None where it has no summary (the run has not ended, or it is no run).

    Raises:
        InputError: there is a summary, and it is not one of ours.
    """
    file = run / SUMMARY
    if not file.is_file():
        return None
    try:
        return _history(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise InputError(
            f"it is not a summary that draftloop wrote ({type(error).__name__}: {error})",
            where=str(file),
            fix="Export the drafter folder by itself, or run the same recipe again.",
        ) from error


def _history(summary: dict[str, Any]) -> History:
    last = next(stage for stage in summary["stages"] if stage["name"] == summary["delivered"])
    machine = summary["hardware"]
    return History(
        command=str(summary["command"]),
        target=str(summary["target"]["name"]),
        hardware=str(machine.get("gpu") or f"{machine['cpu_cores']} CPU cores"),
        stages=tuple(
            Step(s["name"], s["method"], s["cells"]["objective"], int(s["steps"]), int(s["labels"]))
            for s in summary["stages"]
            if s["cells"] is not None
        ),
        delivered=str(last["name"]),
        objective=str(last["cells"]["objective"]) if last["cells"] is not None else "",
        tau=float(last["tau_pooled"]),
        interval=_interval(last),
        sets={str(name): (float(part["tau_pooled"]), _interval(part)) for name, part in last["sets"].items()},
    )


def _interval(part: dict[str, Any]) -> tuple[float, float] | None:
    found = part["interval"]
    return None if found is None else (float(found[0]), float(found[1]))
