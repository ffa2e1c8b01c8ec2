"""Dense masks against FlexAttention: time and memory of one forward over a packed tree, by the length of its row.

    python benchmarks/tree_attention.py [--quick]

A random Qwen3, one trunk and branches of 7 tokens that take half of the row, whole and on a kept trunk. The length from
which FlexAttention pays is `draftloop.target.flex.LONG`.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from scoring import random_qwen3

from draftloop.core.tree import pack_branches

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
        for way in ("dense", "flex"):
            target.tree_attention = way
            seconds = []
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


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main(quick: bool) -> None:
    """Print one JSON line a measurement."""
    cuda = torch.cuda.is_available()
    target = random_qwen3(32768, quick)
    if cuda:
        target.model.to("cuda", torch.bfloat16)
    for slots in (128,) if quick else LENGTHS:
        for row in measure(target, slots, 1 if quick else 10):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short row, to see that it runs")
    main(parser.parse_args().quick)
