"""A training step on branches at the shapes of a large target with random weights: time, tokens/s, memory, utilisation.

Target and drafter are made on the device, no checkpoint is read. Operations are those of weights alone, 2 a weight and
token (6 where it is trained), attention left out; their rate is told as a share of that of a large matrix product,
measured in the same run. Replay is what packing stands against: branches scored one after the other on kept trunks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from draftloop.data.trunk import response_trunk
from draftloop.drafter.dflash import DFlash
from draftloop.drafter.families import spec_for
from draftloop.learn.update import differentiate
from draftloop.recipe import DrafterPart, OptimiserPart, StagePart
from draftloop.supervise.batch import Scored, supervise
from draftloop.supervise.lesson import FeatureStore, Lesson
from draftloop.supervise.score import scored_rows
from draftloop.target.load import load_target
from draftloop.train.material import command, hardware, versions
from draftloop.train.optimiser import DrafterOptimiser

Row = dict[str, Any]
# of Qwen3: width, MLP, layers, heads, key heads, head width, vocabulary; the drafter's layers, block, taps, mask token
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, int, list[int], int]]] = {
    "qwen3-8b": ((4096, 12288, 36, 32, 8, 128, 151936), (5, 16, [1, 9, 17, 25, 33], 151669)),
    "tiny": ((32, 48, 4, 4, 2, 8, 97), (2, 5, [0, 2], 5)),
}
# trunk, anchors and trunks a step; the first two are those of docs/performance.md's account of operations
CELLS = {"qwen3-8b": ((2048, 64, 2), (1024, 32, 8), (2048, 256, 2)), "tiny": ((24, 4, 2), (16, 3, 2))}
REPLAYED = 4


def shape_rows(options: argparse.Namespace) -> Iterator[Row]:
    """The head, the rate of a matrix product, and a row a cell while the time lasts."""
    end = time.monotonic() + options.seconds
    found = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(found if options.device == "auto" else options.device)
    tiny = options.shape == "tiny"
    target, drafter = made(options.shape, device)
    yield {
        "kind": "head", "shape": options.shape, "command": command(), "versions": versions(), "hardware": hardware(),
        "target_parameters": weights(target.model), "drafter_parameters": weights(drafter),
        "target_dtype": str(target.dtype), "drafted": drafter.spec.drafted, "temperature": 1.0,
    }  # fmt: skip
    rate = matmul_rate(device, 256 if tiny else 8192)
    yield {"kind": "matmul", "tflops": rate}
    for cell in CELLS[options.shape]:
        for state in ("keep", "recompute"):
            if time.monotonic() < end:
                yield step_row(target, drafter, *cell, state, rate, 2 if tiny else 5)
    if time.monotonic() < end:
        yield replay_row(target, drafter, CELLS[options.shape][0][0])


def made(shape: str, device: torch.device) -> tuple[Any, DFlash]:
    """A random target in bfloat16 (float32 on a CPU) and a random drafter in float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    (width, inner, layers, heads, shared, head, vocabulary), (depth, block, taps, mask) = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=shared, head_dim=head, max_position_embeddings=40960,
        tie_word_embeddings=False, eos_token_id=None, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    was = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with device:
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(was)
    target = load_target(model.eval())
    spec = spec_for(DrafterPart(block_size=block, layers=depth, target_layers=taps, mask_token=mask), target)
    with device:
        drafter = DFlash(spec)
    return target, drafter.bind(target.embed, target.readout).train().requires_grad_(True)


def step_row(
    target: Any, drafter: DFlash, length: int, anchors: int, trunks: int, state: str, rate: float, turns: int
) -> Row:
    """Training steps of SpecOPD: their parts with the device brought to rest between them, and whole."""
    stage = StagePart.model_validate(
        {"name": "b", "method": "specopd", "anchors_per_sequence": anchors, "branch": {"state": state},
         "objective": {"chunk": 1024}}
    )  # fmt: skip
    lessons = lessons_of(target, length, trunks)
    store = FeatureStore(target, drafter.spec.target_layers, 60 * 2**30, keep_state=state == "keep")
    store.fill(lessons)
    optimiser = DrafterOptimiser(drafter.named_parameters(), OptimiserPart())
    precision = torch.bfloat16 if target.device.type == "cuda" else torch.float32
    last: list[Scored] = []

    def supervised(visit: int) -> Scored:
        return supervise(
            stage, lessons, [visit] * trunks, target=target, drafter=drafter, store=store, seed=0, need_teacher=True,
            precision=precision,
        )  # fmt: skip

    def step(visit: int, rest: Callable[[], float]) -> list[float]:
        times = [rest()]
        last[:] = [supervised(visit)]
        times.append(rest())
        learnt = differentiate(stage.objective, last, drafter, target.readout, precision)
        times.append(rest())
        optimiser.step(learnt.loss, 0.0, 1)
        return [*times, now(target.device)]

    step(0, time.perf_counter)  # compiles and allocates
    parts = [step(1 + turn, lambda: now(target.device)) for turn in range(turns)]
    if target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begun = now(target.device)
    tokens = rows = fed = 0
    for turn in range(turns):
        step(1 + turns + turn, time.perf_counter)
        valid = last[0].blocks.valid
        tokens, rows = tokens + int(valid.sum()), rows + len(valid)
        fed += int((valid.sum(1) - 1).clamp(min=0).sum())
    seconds = (now(target.device) - begun) / turns
    peak = torch.cuda.max_memory_allocated() if target.device.type == "cuda" else None
    recomputed = 0 if state == "keep" else trunks * length
    work = operations(target, drafter, trunks * length, rows // turns, tokens // turns, fed // turns + recomputed)
    split = [statistics.median(one[i + 1] - one[i] for one in parts) for i in range(3)]
    return {
        "kind": "step", "trunk": length, "anchors": anchors, "trunks": trunks, "state": state, "seconds": seconds,
        **dict(zip(("supervise_s", "differentiate_s", "optimiser_s"), split, strict=True)),
        "draft_tokens": tokens // turns, "peak_bytes": peak, "tera_operations": work / 1e12,
        "share_of_matmul": work / 1e12 / seconds / rate,
    }  # fmt: skip


def operations(target: Any, drafter: DFlash, context: int, blocks: int, rows: int, fed: int) -> float:
    """Operations of a step: tokens fed to the target, the drafter's blocks and context, and four products a row.

    Args:
        context: positions whose features the drafter reads.
        blocks: drafted.
        rows: whose laws are drawn from, compared and differentiated.
        fed: tokens fed to the target.
    """
    layers = sum(weights(layer) for layer in target._layers)
    reading = weights(drafter.fc) + sum(
        weights(one.self_attn.k_proj) + weights(one.self_attn.v_proj)
        for one in drafter.layers  # type: ignore[union-attr, arg-type]
    )
    own = sum(weights(one) for one in drafter.layers)
    head = 4 * target.readout.weight.numel()  # drawn from; both laws of the loss; the derivative
    return 2.0 * (layers * fed + head * rows) + 6.0 * (own * blocks * drafter.spec.block_size + reading * context)


def replay_row(target: Any, drafter: DFlash, length: int) -> Row:
    """Branches scored one after the other on a kept trunk; a few of them, for each takes as long."""
    (lesson,) = lessons_of(target, length, 1)
    store = FeatureStore(target, drafter.spec.target_layers, 60 * 2**30, keep_state=True)
    stage = StagePart.model_validate({"name": "b", "method": "specopd", "anchors_per_sequence": REPLAYED + 1})
    precision = torch.bfloat16 if target.device.type == "cuda" else torch.float32
    with torch.no_grad():
        blocks = supervise(
            stage, [lesson], [0], target=target, drafter=drafter, store=store, seed=0, need_teacher=True,
            precision=precision,
        ).blocks  # fmt: skip
        ones = [
            replace(blocks, **{name: getattr(blocks, name)[i : i + 1]
                               for name in ("row", "anchor", "tokens", "valid", "accepted", "log_q")})
            for i in range(len(blocks.row))
        ]  # fmt: skip
        scored_rows(target, [lesson], ones[0])
        begun = now(target.device)
        for one in ones[1:]:
            scored_rows(target, [lesson], one)
        seconds = (now(target.device) - begun) / (len(ones) - 1)
    return {"kind": "replay", "trunk": length, "concurrency": 1,
            "engine": "eager, keys and values kept", "branch_seconds": seconds,
            "draft_tokens": int(ones[1].valid.sum())}  # fmt: skip


def lessons_of(target: Any, length: int, count: int) -> list[Lesson]:
    """Random texts, an eighth of each its prompt."""
    draw = torch.Generator().manual_seed(length)
    texts = torch.randint(6, target.vocab_size, (count, length), generator=draw).tolist()
    asked = length // 8
    return [Lesson(response_trunk(text[:asked], text[asked:], f"{i}", "", 0, False)) for i, text in enumerate(texts)]


def matmul_rate(device: torch.device, size: int) -> float:
    """Teraoperations per second of a square matrix product in the training's type, the best of ten."""
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    seconds = []
    for _ in range(10):
        begun = now(device)
        left @ right
        seconds.append(now(device) - begun)
    return 2 * size**3 / min(seconds) / 1e12


def weights(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def now(device: torch.device) -> float:
    """Seconds, the device at rest."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def derived_shape(rows: list[Row]) -> dict[str, Any]:
    """What results/branch-throughput.json holds of such a run."""
    head = rows[0]
    rate = next(row["tflops"] for row in rows if row["kind"] == "matmul")
    cells = [{**row, "tokens_per_s": row["draft_tokens"] / row["seconds"]} for row in rows if row["kind"] == "step"]
    replays = [{**row, "tokens_per_s": row["draft_tokens"] / row["branch_seconds"]}
               for row in rows if row["kind"] == "replay"]  # fmt: skip
    kept = ("shape", "command", "versions", "hardware", "drafted", "target_parameters", "drafter_parameters")
    return {**{key: head[key] for key in kept}, "matmul_tflops": rate, "cells": cells, "replay": replays}


def shape_table(name: str, run: dict[str, Any]) -> list[str]:
    """The same as lines of Markdown."""
    lines = [
        f"### {name}: a training step at the shapes of {run['shape']}, random weights", "",
        f"Target of {run['target_parameters'] / 1e9:.2f} billion weights, drafter of "
        f"{run['drafter_parameters'] / 1e9:.2f}; {run['drafted']} drafted tokens a branch. A large matrix product ran "
        f"at {run['matmul_tflops']:.0f} teraoperations a second.", "",
        "| trunks x tokens | anchors | trunk state | ms a step | of them supervision | draft tokens/s | peak GiB | "
        "of the matrix product's rate |", "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for cell in run["cells"]:
        peak = "" if cell["peak_bytes"] is None else f"{cell['peak_bytes'] / 2**30:.1f}"
        told = (
            f"{cell['trunks']} x {cell['trunk']}", cell["anchors"], cell["state"], f"{1e3 * cell['seconds']:.0f}",
            f"{1e3 * cell['supervise_s']:.0f}", f"{cell['tokens_per_s']:,.0f}", peak, f"{cell['share_of_matmul']:.0%}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, told))} |")
    for row in run["replay"]:
        lines += ["", f"Scored one branch after the other ({row['engine']}): {1e3 * row['branch_seconds']:.0f} ms a "
                  f"branch, {row['tokens_per_s']:,.0f} draft tokens/s, neither drafting nor loss counted."]  # fmt: skip
    return [*lines, ""]
