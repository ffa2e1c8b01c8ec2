"""results/bench-vllm.json from the raw rows of `draftloop bench`; `results.py` calls `derive` and `table`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftloop.engines.bench_table import summarise

ROOT = Path(__file__).resolve().parent.parent
RAW = ROOT / "results" / "raw" / "bench-vllm.jsonl"
OUT = ROOT / "results" / "bench-vllm.json"


def derive() -> dict[Path, str]:
    """Every derived file's text; nothing where there are no raw rows."""
    if not RAW.is_file():
        return {}
    rows = [json.loads(line) for line in RAW.read_text(encoding="utf-8").splitlines()]
    head = {key: value for key, value in rows[0].items() if key != "kind"}
    return {OUT: json.dumps({"settings": head, "levels": rounded(summarise(rows))}, indent=1, sort_keys=True) + "\n"}


def table() -> str:
    """The levels as a Markdown table."""
    if not RAW.is_file():
        return ""
    lines = [
        "| requests at a time | server | tokens/s | against plain | first token, ms (p50 / p95) "
        "| inter-token, ms (p50 / p95) | failed | tau |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in summarise(json.loads(line) for line in RAW.read_text(encoding="utf-8").splitlines()):
        speed = "" if one["speedup"] is None else f"{one['speedup']:.2f}{'' if one['speedup'] > 1 else ' (SLOWER)'}"
        pairs = [f"{pair['p50']:.0f} / {pair['p95']:.0f}" for pair in (one["ttft_ms"], one["inter_token_ms"])]
        tau = "" if one["tau"] is None else f"{one['tau']:.2f}"
        lines.append(
            f"| {one['concurrency']} | {one['arm']} | {one['tokens_per_s']:.1f} | {speed} | {pairs[0]} | {pairs[1]}"
            f" | {one['failed']} of {one['requests']} | {tau} |"
        )
    return "\n".join([*lines, ""])


def rounded(value: Any) -> Any:
    """Floats to six digits, so that the file does not depend on the order of additions."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value
