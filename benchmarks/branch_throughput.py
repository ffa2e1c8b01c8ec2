"""Supervised draft tokens per second: branches of fixed trunks, all at once, against sequential decoding and replay.

    python benchmarks/branch_throughput.py measure OUT.jsonl --drafter bundled --prompts FILE
    python benchmarks/branch_throughput.py measure OUT.jsonl --shape qwen3-8b    a training step, see branch_shapes.py
    python benchmarks/branch_throughput.py take OUT.jsonl    copy the rows to results/raw/branch-NAME.jsonl

Both sides collect and score with the same drafter and target on one machine, up to the hidden rows of both at every
slot; readout, loss and gradient, which cost both the same, are left out. Drafted tokens
that a loss would read are counted. Branch-parallel: `anchors` blocks a trunk are drafted in one forward, sampled, and
scored in one packed forward of the target; the trunks' features are cached and not charged, their generation is charged
in `with_generation`. Sequential: the drafter really decodes (every verification recorded), then its blocks are drafted
again where they began and scored by the rows kept from verification. Source: SpecOPD, arXiv 2611.02846, section 5.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from branch_shapes import SHAPES, derived_shape, shape_rows, shape_table

from draftloop.core.draws import key_of
from draftloop.core.law import Sampling
from draftloop.data.chat import encode_prompt
from draftloop.data.prompts import read_prompts
from draftloop.data.trunk import response_trunk
from draftloop.decode.loop import Decoder, decode
from draftloop.decode.trace import Options, Request
from draftloop.drafter.build import for_decoding
from draftloop.formats.load import load_drafter
from draftloop.recipe import StagePart
from draftloop.supervise.batch import supervise
from draftloop.supervise.lesson import FeatureStore, Lesson
from draftloop.supervise.rollout import options_of, requests_of, roll_out
from draftloop.target.load import load_target
from draftloop.train.material import command, hardware, versions

ROOT = Path(__file__).resolve().parent.parent
RAW = ROOT / "results" / "raw"
FOUND = ROOT / "results" / "branch-throughput.json"
Row = dict[str, Any]


def measure(options: argparse.Namespace) -> None:
    """Measure every cell and append its row at once."""
    end = time.monotonic() + options.seconds
    with open(options.out, "a", encoding="utf-8") as handle:

        def write(row: Row) -> None:
            handle.write(json.dumps(row) + "\n")
            handle.flush()
            os.fsync(handle.fileno())
            print(json.dumps(row)[:200], flush=True)

        if options.shape:
            for row in shape_rows(options):
                write(row)
            return
        target = load_target(options.target, device=options.device)
        drafter = load_drafter(options.drafter, target, dtype=torch.float32)
        prompts = read_prompts([options.prompts], Path("."), options.count)
        ids = [tuple(encode_prompt(target.tokenizer, list(p.question), template_kwargs={})) for p in prompts]
        write(
            {"kind": "head", "command": command(), "versions": versions(), "hardware": hardware(),
             "drafter": str(options.drafter), "max_new_tokens": options.max_new_tokens, "temperature": 1.0,
             "target_dtype": str(target.dtype), "drafted": drafter.spec.drafted, "engine": options.engine}
        )  # fmt: skip
        law = Sampling(1.0)
        asked = [Request(one, key_of(str(i))) for i, one in enumerate(ids)]
        plain = Options(options.max_new_tokens, law, batch_size=len(asked))
        decode(target, None, asked[:2], Options(4, law, batch_size=2))  # warm up
        made, seconds = timed(target, lambda: decode(target, None, asked, plain))
        tokens = sum(len(one.tokens) for one in made)
        write({"kind": "generation", "responses": len(made), "tokens": tokens, "seconds": seconds})
        trunks = [response_trunk(one.prompt, one.tokens, str(i), "", 0, one.finished, law)
                  for i, one in enumerate(made) if len(one.tokens) > 1]  # fmt: skip
        for size in options.trunks:
            for anchors in options.anchors:
                for state in ("recompute", "keep"):
                    write(branches(target, drafter, trunks, anchors, state, size, options.batches))
        served = for_decoding(drafter, target)
        target.engine = options.engine
        for batch in options.batch:
            if time.monotonic() < end:
                write(sequential(target, drafter, served, trunks, batch, options))


def branches(target: Any, drafter: Any, trunks: list[Any], anchors: int, state: str, size: int, batches: int) -> Row:
    """Batches of `size` trunks, `anchors` branches each."""
    stage = StagePart.model_validate(
        {
            "name": "b",
            "method": "specopd",
            "anchors_per_sequence": anchors,
            "batch_size": size,
            "branch": {"state": state},
        }
    )
    store = FeatureStore(target, drafter.spec.target_layers, 60 * 2**30, keep_state=state == "keep")
    lessons = [Lesson(trunk) for trunk in trunks]
    store.fill(lessons)
    counts: list[int] = []
    precision = training_type(target)

    def run(visit: int) -> None:
        for n in range(batches):
            some = [lessons[(n * size + i) % len(lessons)] for i in range(size)]
            with torch.no_grad():
                batch = supervise(
                    stage, some, [visit] * len(some), target=target, drafter=drafter, store=store, seed=visit,
                    need_teacher=True, precision=precision,
                )  # fmt: skip
            counts.append(batch.blocks.valid.sum())  # type: ignore[arg-type]

    run(0)
    counts.clear()
    _, seconds = timed(target, lambda: run(1))
    return {"kind": "branches", "anchors": anchors, "state": state, "trunks": size, "batches": batches,
            "trunk_tokens": sum(map(len, trunks)) / len(trunks),
            "draft_tokens": int(sum(counts)), "responses": size * batches, "seconds": seconds}  # fmt: skip


def sequential(
    target: Any, drafter: Any, served: Any, trunks: list[Any], batch: int, options: argparse.Namespace
) -> Row:
    """One decoding of as many prompts as a batch holds (at least two batches' worth at batch 1), then the replay.

    What the engine builds once, graphs and compiled code, is built before the clock starts.
    """
    stage = StagePart.model_validate(
        {"name": "s", "method": "draft-opd", "anchors": "rollout", "batch_size": max(options.trunks),
         "anchors_per_sequence": options.max_new_tokens,
         "rollout": {"batch_size": batch, "temperature": 1.0, "rule": "ratio", "teacher": "store"}}
    )  # fmt: skip
    precision = training_type(target)
    prompts = [trunks[i % len(trunks)] for i in range(max(batch, 2))]
    store = FeatureStore(target, drafter.spec.target_layers, 60 * 2**30)

    new = options.max_new_tokens
    decoder = Decoder(target, served, options_of(stage.rollout, new, 0), requests_of(prompts, 0))

    def roll(visit: int, some: list[Any]) -> list[Lesson]:
        return roll_out(target, served, some, stage.rollout, max_new_tokens=new, seed=0, visit=visit, decoder=decoder)

    def replay(lessons: list[Lesson]) -> int:
        count = 0
        for start in range(0, len(lessons), stage.batch_size):
            some = lessons[start : start + stage.batch_size]
            with torch.no_grad():
                scored = supervise(
                    stage, some, [0] * len(some), target=target, drafter=drafter, store=store, seed=0,
                    need_teacher=True, precision=precision,
                )  # fmt: skip
            scored.drafted_rows(drafter, precision)  # the branches' blocks were drafted as they were sampled
            count += int(scored.blocks.valid.sum())
        return count

    replay(roll(0, prompts))  # warm up, graphs included
    lessons, looped = timed(target, lambda: roll(1, prompts))
    decoder.close()
    count, replayed = timed(target, lambda: replay(lessons))
    return {"kind": "sequential", "batch": batch, "engine": options.engine, "responses": len(prompts),
            "draft_tokens": count, "loop_seconds": looped, "replay_seconds": replayed}  # fmt: skip


def training_type(target: Any) -> torch.dtype:
    """Compute type of the drafter's forward, as training has it."""
    return torch.bfloat16 if target.device.type == "cuda" else torch.float32


def timed(target: Any, work: Callable[[], Any]) -> tuple[Any, float]:
    """What the work returns, and its seconds on the device."""
    wait = torch.cuda.synchronize if target.device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    found = work()
    wait()
    return found, time.perf_counter() - began


def derived() -> dict[Path, str]:
    """results/branch-throughput.json, from the raw rows; nothing where there are none."""
    runs = {path.stem.removeprefix("branch-"): _derive(path) for path in sorted(RAW.glob("branch-*.jsonl"))}
    return {FOUND: json.dumps(runs, indent=1, sort_keys=True) + "\n"} if runs else {}


def _derive(path: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    head = rows[0]
    if "shape" in head:
        return derived_shape(rows)
    made = next(row for row in rows if row["kind"] == "generation")
    each = made["seconds"] / made["responses"]
    cells = []
    for row in rows:
        if row["kind"] == "branches":
            charged = row["seconds"] + each * row["responses"]
            rates = {
                "tokens_per_s": row["draft_tokens"] / row["seconds"],
                "with_generation": row["draft_tokens"] / charged,
            }
            cells.append({**row, **rates})
        elif row["kind"] == "sequential":
            cells.append({**row, "tokens_per_s": row["draft_tokens"] / (row["loop_seconds"] + row["replay_seconds"])})
    best = max((cell for cell in cells if cell["kind"] == "branches"), key=lambda cell: cell["tokens_per_s"])
    by_batch = {str(cell["batch"]): cell["tokens_per_s"] for cell in cells if cell["kind"] == "sequential"}
    return {
        "branch_parallel_tokens_per_s": best["tokens_per_s"],
        "branch_parallel_with_generation": best["with_generation"],
        "sequential_tokens_per_s": by_batch,
        "ratios": {batch: best["tokens_per_s"] / rate for batch, rate in by_batch.items()},
        "ratios_with_generation": {batch: best["with_generation"] / rate for batch, rate in by_batch.items()},
        "generation_tokens_per_s": made["tokens"] / made["seconds"],
        "cells": cells,
        **{key: head[key] for key in ("command", "versions", "hardware", "drafter", "max_new_tokens", "temperature")},
    }


def table() -> str:
    """The same as Markdown."""
    text = next(iter(derived().values()), "")
    lines: list[str] = []
    for name, run in (json.loads(text) if text else {}).items():
        if "shape" in run:
            lines += shape_table(name, run)
            continue
        lines += [f"### {name}", "", "| collection | draft tokens/s | generation charged |", "|---|---|---|"]
        for cell in run["cells"]:
            if cell["kind"] == "branches":
                label = (
                    f"branch-parallel, {cell['trunks']} trunks x {cell['anchors']} anchors, trunk state {cell['state']}"
                )
                lines.append(f"| {label} | {cell['tokens_per_s']:,.0f} | {cell['with_generation']:,.0f} |")
            else:
                lines.append(f"| sequential, batch {cell['batch']} | {cell['tokens_per_s']:,.0f} | (it generates) |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Measure or take."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "take"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default="bundled")
    parser.add_argument("--prompts", default="builtin:train")
    parser.add_argument("--count", type=int, default=256, help="prompts answered for the trunks")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--anchors", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--trunks", type=int, nargs="*", default=[32], help="of one batch")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32, 256], help="of the sequential side")
    parser.add_argument("--engine", default="auto", help="that the sequential side decodes with")
    parser.add_argument("--device", default="auto", help="auto (default), cpu or cuda")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape instead")
    parser.add_argument("--seconds", type=float, default=600, help="after which no further cell is begun")
    options = parser.parse_args()
    if options.what == "measure":
        measure(options)
    else:
        RAW.mkdir(parents=True, exist_ok=True)
        place = RAW / f"branch-{options.out.stem}.jsonl"
        place.write_text(options.out.read_text(encoding="utf-8"), encoding="utf-8")
        print(f"took {place.name}")


if __name__ == "__main__":
    main()
