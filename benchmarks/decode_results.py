"""results/decode.json from the raw rows of `benchmarks/decode.py`; `results.py` calls `derive` and `table`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_results import rounded
from run_rows import whole_rows as read

ROOT = Path(__file__).resolve().parent.parent
RUNS = ("", "tuned-", "joined-", "joined-plain-", "joined-large-")  # a later one wins
RAW = tuple(ROOT / "results" / "raw" / f"decode-{name}h200.jsonl" for name in RUNS)
OUT = ROOT / "results" / "decode.json"
WHERE = ("batch", "temperature", "engine", "kernel")
CHECKED = ("arm", "temperature", "rule", "kernel", "engine")
LEFT_OUT = ("kind", "at_s")
Row = dict[str, Any]


def derive(raws: Sequence[Path] = RAW) -> dict[Path, str]:
    """Every derived file's text; nothing where there are no raw rows."""
    rows = _rows(raws)
    return {OUT: json.dumps(rounded(summarise(rows)), indent=1, sort_keys=True) + "\n"} if rows else {}


def _rows(raws: Sequence[Path]) -> list[Row]:
    return [row for raw in raws if raw.is_file() for row in read(raw)]


def summarise(rows: list[Row]) -> Row:
    """The cells, plain and speculative side by side, and the headline at batch 1 and temperature 0.

    The headline sets the fastest speculative decoding against the fastest plain decoding, each by the engine and kernel
    that suit it best: speculation has to beat the best that goes without it.
    """
    heads = [row for row in rows if row["kind"] == "run"]
    cells = [row for row in rows if row["kind"] == "cell"]
    pairs: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in cells:
        pairs.setdefault(tuple(row[key] for key in WHERE), {})[row["arm"]] = row
    table = [_pair(dict(zip(WHERE, where, strict=True)), arms) for where, arms in pairs.items()]
    checks = {tuple(row.get(key, "graph") for key in CHECKED): {k: v for k, v in row.items() if k not in LEFT_OUT}
              for row in rows if row["kind"] == "check"}  # fmt: skip
    found: Row = {
        "settings": {key: value for key, value in heads[0].items() if key not in ("kind", "at_s")},
        "commands": [head["command"] for head in heads],
        "checks": list(checks.values()),
        "cells": table,
        "generation": [{key: value for key, value in row.items() if key not in ("kind", "at_s")}
                       for row in rows if row["kind"] == "generation"],
        "failed": [row["why"] for row in rows if row["kind"] == "failed"],
    }  # fmt: skip
    found["same_tokens"] = bool(found["checks"]) and all(row["same"] == row["prompts"] for row in found["checks"])
    first = [cell for cell in table if (cell["batch"], cell["temperature"]) == (1, 0)]
    first = [cell for cell in first if cell["engine"] != "eager"]  # it decodes fewer prompts, for comparison
    best = {arm: max((cell for cell in first if arm in cell), key=lambda cell: cell[arm]["tokens_per_s"], default=None)
            for arm in ("plain", "speculative")}  # fmt: skip
    plain, drafted = best["plain"], best["speculative"]
    if plain is not None:
        found["plain_tokens_per_s_b1"] = plain["plain"]["tokens_per_s"]
    if plain is not None and drafted is not None:
        found["speculative_over_plain_b1"] = drafted["speculative"]["tokens_per_s"] / plain["plain"]["tokens_per_s"]
        found["tau_b1"] = drafted["speculative"]["tau"]
    found["engines_b1"] = {arm: f"{cell['engine']}, {cell['kernel']}" for arm, cell in best.items() if cell is not None}
    return found


def _pair(where: Row, arms: dict[str, Row]) -> Row:
    """Plain and speculative decoding in one cell; speculation pays above tau = round cost.

    A cell decodes as many texts as it has rows, so those that end first stand idle: `speedup` is of that. Tau over
    round cost, `speedup_at_most`, is what no row standing idle would bring.
    """
    cell = dict(where)
    for arm, row in arms.items():
        told = {key: row[key] for key in ("tokens_per_s", "ms_per_round", "rounds", "tokens", "seconds")}
        steps = sum(steps for _, steps in row["responses"])
        if arm == "speculative":
            told["tau"] = sum(tokens for tokens, _ in row["responses"]) / max(steps, 1)
        cell[arm] = told
    if len(arms) == 2:
        cell["round_cost"] = cell["speculative"]["ms_per_round"] / cell["plain"]["ms_per_round"]
        cell["speedup"] = cell["speculative"]["tokens_per_s"] / cell["plain"]["tokens_per_s"]
        cell["pays"] = cell["speedup"] > 1
        cell["speedup_at_most"] = cell["speculative"]["tau"] / cell["round_cost"]
    return cell


def _checked(checks: list[Row]) -> str:
    """How many answers were the eager loop's, by the type computed in; rows of before it was written down: float32."""
    counts: dict[str, list[int]] = {}
    for row in checks:
        count = counts.setdefault(row.get("dtype", "float32").removeprefix("torch."), [0, 0])
        count[0], count[1] = count[0] + row["same"], count[1] + row["prompts"]
    told = ", ".join(f"in {dtype} for {same} of {prompts} answers" for dtype, (same, prompts) in counts.items())
    return f"The engine wrote the eager loop's tokens {told}." if told else "No tokens were compared."


def table(raws: Sequence[Path] = RAW) -> str:
    """The cells as Markdown tables."""
    rows = _rows(raws)
    if not rows:
        return ""
    found = rounded(summarise(rows))
    settings, checks = found["settings"], found["checks"]
    lines = [
        f"{' and '.join(f'`{one}`' for one in found['commands'])} on {settings['hardware'].get('gpu', 'CPU')},"
        f" torch {settings['versions']['torch']}, transformers {settings['versions']['transformers']};"
        f" drafter {settings['drafter']['from']}, block {settings['drafter']['block_size']}. {_checked(checks)}"
        " Round cost = the tau above which speculation pays. Each cell decodes as many texts as it has rows (one"
        " after the other at batch 1): speculative rows end at unlike times and then stand idle, so the last"
        " column but one falls with the batch. The last is tau over round cost, computed and not timed: what"
        " refilling rows can bring at most.",
        "",
        "| batch | T | engine | kernel | plain tokens/s | ms a step | speculative tokens/s | ms a round | round cost"
        " | tau | against plain | at most |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in sorted(found["cells"], key=lambda cell: (cell["temperature"], cell["batch"], cell["engine"])):
        columns = [f"{cell['batch']}", f"{cell['temperature']:g}", cell["engine"], cell["kernel"]]
        for arm in ("plain", "speculative"):
            row = cell.get(arm)
            columns += [f"{row['tokens_per_s']:.0f}", f"{row['ms_per_round']:.3f}"] if row else ["", ""]
        tau = f"{cell['speculative']['tau']:.2f}" if "speculative" in cell else ""
        if "speedup" in cell:
            columns += [f"{cell['round_cost']:.2f}", tau, f"{cell['speedup']:.2f}{'' if cell['pays'] else ' (SLOWER)'}"]
            columns.append(f"{cell['speedup_at_most']:.2f}")
        else:
            columns += ["", tau, "", ""]
        lines.append(f"| {' | '.join(columns)} |")
    for row in found["generation"]:
        lines += [
            "",
            f"Plain generation, {row['batch']} rows ({row['engine']}, {row['kernel']}), prefill and refills counted:"
            f" {row['tokens_per_s']:.0f} tokens/s ({row['prompts']} prompts, {row['tokens']} tokens,"
            f" {row['seconds']:.1f} s; {row['ms_per_round']:.2f} ms a step).",
        ]
    lines += [f"\nNot measured: {why}" for why in found["failed"]]
    return "\n".join([*lines, ""])
