"""The table of branches scored on a CPU, from results/raw/bench_scoring.json; `results.py` calls it.

The rows: `python benchmarks/run.py --threads 1 --parts score --out results/raw/bench_scoring.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RAW = Path(__file__).resolve().parent.parent / "results" / "raw" / "bench_scoring.json"


def table() -> str:
    """Milliseconds of each way, and how many times the packed one's; empty where there are no rows."""
    if not RAW.is_file():
        return ""
    found: dict[str, Any] = json.loads(RAW.read_text(encoding="utf-8"))
    head = "| target | tokens | branches | way | ms | times packed, recompute | times packed, keep |"
    lines = [f"`{found['command']}`, bfloat16 for SmolLM2, float32 for the random target.", "", head, "|---" * 7 + "|"]
    for row in found["rows"]:
        cells = [row["target"], row["text"], row["branches"], row["way"], f"{row['ms']:.1f}",
                 f"{row['to_packed']:.2f}", f"{row['to_packed_keep']:.2f}"]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, ""])
