"""Dense masks against FlexAttention: time and memory of one forward over a packed tree, by the length of its row.

    python benchmarks/tree_attention.py --out results/raw/tree-NAME.jsonl [--quick]

A random Qwen3, one trunk and branches of 7 tokens that take half of the row, whole and on a kept trunk. The length from
which FlexAttention pays is `draftloop.target.flex.LONG`. `flex, compiled mask`: the block mask, which otherwise is read
off a dense one, is built by compiled code too. `table` is what `results.py` publishes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from scoring import random_qwen3

from draftloop.core.tree import pack_branches
from draftloop.train.material import command, hardware, versions

RAW = Path(__file__).resolve().parent.parent / "results" / "raw"
WAYS = ("dense", "flex", "flex, compiled mask")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def measure(target: Any, slots: int, repeats: int) -> list[dict[str, Any]]:
    """Milliseconds (the fastest of `repeats`) and peak memory of each way over a row of `slots` slots."""
    device, branches = target.device, slots // 14
    trunk = torch.arange(slots - 7 * branches, device=device) * 31 % target.vocab_size
    fork = torch.linspace(0, len(trunk) - 1, branches, device=device).long()
    tokens = torch.arange(7 * branches, device=device).view(-1, 7) * 17 % target.vocab_size
    on, length = torch.zeros_like(fork), torch.full_like(fork, 7)
    packed = pack_branches([trunk], [0], on, fork, tokens, length, aligned=True)
    cache, place = target.new_cache(len(trunk)), torch.arange(len(trunk), device=device).unsqueeze(0)
    state = cache.state(0, target.extend(cache, trunk.unsqueeze(0), place).hidden[0], target.version)
    at = packed.slot.flatten()
    read = (torch.zeros_like(at), at)
    work = {
        "whole": lambda: target.score(packed.tree, read=read).hidden,
        "kept": lambda: target.resume(packed, [state], read),
    }
    rows, found = [], {}
    for part, run in work.items():
        for way in WAYS if device.type == "cuda" else WAYS[:2]:
            target.tree_attention = "dense" if way == "dense" else "flex"
            seconds = []
            with _compiled_mask() if way == WAYS[2] else nullcontext():
                for turn in range(repeats + 2):  # the first two compile and allocate
                    if turn == 2 and device.type == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                    begin = _now(device)
                    found[way] = run()
                    seconds += [_now(device) - begin] if turn > 1 else []
            peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else None
            rows.append({"slots": slots, "part": part, "way": way, "ms": 1e3 * min(seconds), "peak_mib": peak})
        logits = {way: target.readout.logits(hidden).float() for way, hidden in found.items()}
        rows[-1]["gap"] = float((logits["flex"] - logits["dense"]).abs().max() / logits["dense"].abs().max())
    return rows


@contextmanager
def _compiled_mask() -> Iterator[None]:
    flexible = importlib.import_module("torch.nn.attention.flex_attention")
    with patch.object(flexible, "create_block_mask", torch.compile(flexible.create_block_mask, dynamic=True)):
        yield


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main(quick: bool, out: str | None) -> None:
    """Print one JSON line a measurement, and write it to `out`."""
    cuda = torch.cuda.is_available()
    target = random_qwen3(32768, quick)
    if cuda:
        target.model.to("cuda", torch.bfloat16)
    with open(out or os.devnull, "x" if out else "w", encoding="utf-8") as file:

        def write(row: dict[str, Any]) -> None:
            print(json.dumps(row), file=file, flush=True)
            print(json.dumps(row), flush=True)

        write({"kind": "head", "command": command(), "versions": versions(), "hardware": hardware()})
        for slots in (128,) if quick else LENGTHS:
            for row in measure(target, slots, 1 if quick else 10):
                write(row)


def table() -> str:
    """Milliseconds and peak memory of each way, from the raw rows; nothing where there are none."""
    rows = [json.loads(line) for path in sorted(RAW.glob("tree-*.jsonl")) for line in path.read_text().splitlines()]
    told = {(row["slots"], row["part"], row["way"]): row for row in rows if "ms" in row}
    if not told:
        return ""
    gpu = " / ".join(sorted({str(row["hardware"].get("gpu", "CPU")) for row in rows if "hardware" in row}))
    ways = [way for way in WAYS if any(key[2] == way for key in told)]
    lines = [f"One forward on {gpu}, bfloat16: ms (peak MiB).", "", "| slots | trunk | " + " | ".join(ways) + " |"]
    lines.append("|---" * (2 + len(ways)) + "|")
    for slots, part in dict.fromkeys(key[:2] for key in told):
        found = [told.get((slots, part, way)) for way in ways]
        cells = ["" if row is None else f"{row['ms']:.1f} ({row['peak_mib'] or 0:.0f})" for row in found]
        lines.append(f"| {slots} | {'kept' if part == 'kept' else 'fed again'} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short row, to see that it runs")
    parser.add_argument("--out", metavar="FILE", help="a new file for the rows")
    options = parser.parse_args()
    main(options.quick, options.out)
