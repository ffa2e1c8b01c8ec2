"""results/hybrid.json; `results.py` calls `derive` and `table`.

What scoring costs, from the raw rows of `benchmarks/hybrid.py`; and under `small_hybrid` what a trained target and its
drafters came to (`small_hybrid_results.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import small_hybrid_results
from bench_results import rounded

ROOT = Path(__file__).resolve().parent.parent
RAW = ROOT / "results" / "raw"
OUT = ROOT / "results" / "hybrid.json"
Row = dict[str, Any]


def derive() -> dict[Path, str]:
    """Every derived file's text; nothing where there are no raw rows."""
    runs: dict[str, Any] = {path.stem: summarise(_read(path)) for path in _costs()}
    if trained := small_hybrid_results.summaries(RAW):
        runs["small_hybrid"] = trained
    return {OUT: json.dumps(rounded(runs), indent=1, sort_keys=True) + "\n"} if runs else {}


def summarise(rows: list[Row]) -> Row:
    """The fastest of each turn (other work on the machine only adds time), and the ratio to replaying prefixes."""
    head = {key: value for key, value in rows[0].items() if key != "kind"}
    levels = []
    for row in rows[1:]:
        level = {key: value for key, value in row.items() if key not in ("kind", "seconds")}
        levels.append({**level, "ms": 1e3 * min(row["seconds"])})
    replayed = {(one["part"], one["length"]): one["ms"] for one in levels if one["way"] == "replayed"}
    for one in levels:
        base = replayed.get((one["part"], one["length"]))
        one["times_faster"] = None if base is None else base / one["ms"]
    return {"settings": head, "levels": levels}


def show(rows: list[Row]) -> str:
    """One run as a Markdown table."""
    found = summarise(rows)
    head = found["settings"]
    machine = head["hardware"].get("gpu") or f"{head['hardware']['threads']} CPU threads"
    lines = [
        f"`{head['command']}` on {machine}, torch {head['versions']['torch']}, transformers"
        f" {head['versions']['transformers']}; {head['branches']} branches of {head['width']} proposed tokens, size"
        f" {head['size']} ({head['parameters'] / 1e6:.0f} M parameters), {head['dtype']}.",
        "",
        "| part | trunk | way | C | ms | times faster than replay | memory, MiB | kept, MiB | gap to plain |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found["levels"]:
        peak, kept = (
            "" if one.get(key) is None else f"{one[key] / 2**20:.0f}" for key in ("peak_bytes", "state_bytes")
        )
        way = one["way"] + (f" ({one['measured']} of {head['branches']}, scaled)" if one["way"] == "replayed" else "")
        ratio = "" if one["times_faster"] is None else f"{one['times_faster']:.1f}"
        gap = "" if one.get("gap") is None else f"{one['gap']:.1e}"
        lines.append(
            f"| {one['part']} | {one['length']} | {way} | {one['spacing'] or ''} | {one['ms']:.2f} | {ratio} | {peak}"
            f" | {kept} | {gap} |"
        )
    return "\n".join([*lines, ""])


def table() -> str:
    """All runs as Markdown."""
    return "\n".join(show(_read(path)) for path in _costs())


def _costs() -> list[Path]:
    """The raw rows of `benchmarks/hybrid.py`."""
    trained = (small_hybrid_results.TARGET, small_hybrid_results.DRAFTER)
    return [path for path in sorted(RAW.glob("hybrid-*.jsonl")) if not path.name.startswith(trained)]


def _read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
