"""The table of the fused loss from the raw rows of `benchmarks/fused.py`; `results.py` calls `table`."""

from __future__ import annotations

import json
from pathlib import Path

RAW = Path(__file__).resolve().parent.parent / "results" / "raw"
WAYS = ("chunks of 512", "chunks of 4096", "all logits", "triton")


def table() -> str:
    """Time and peak memory of each way as a Markdown table; nothing where there are no raw rows."""
    files = sorted(RAW.glob("fused-*.jsonl"))
    rows = [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    if not rows:
        return ""
    told = {(row["shape"], row["objective"], row["way"]): row for row in rows}  # of a repeated run the last one
    gpu = " / ".join(sorted({str(row["hardware"].get("gpu", row["hardware"].get("machine"))) for row in rows}))
    lines = [
        f"Forward and gradient on {gpu}, median of the turns, bfloat16: ms (times the chunks of 512), peak MiB.",
        "",
        "| shape | rows x vocabulary x hidden | objective | " + " | ".join(WAYS) + " |",
        "|---" * (3 + len(WAYS)) + "|",
    ]
    for shape, objective in dict.fromkeys((row["shape"], row["objective"]) for row in rows):
        found = [told.get((shape, objective, way)) for way in WAYS]
        size = next(row for row in found if row)
        cells = [
            "" if row is None else f"{row['ms']:.1f} ({row['to_chunks']:.2f}), {(row['peak_bytes'] or 0) / 2**20:.0f}"
            for row in found
        ]
        lines.append(
            f"| {shape} | {size['rows']} x {size['vocabulary']} x {size['hidden']} | {objective} | "
            + " | ".join(cells)
            + " |"
        )
    return "\n".join([*lines, ""])
