"""What the benchmarks measure: decoding side by side, training steps by chunk size, packed against single drafting.

Each function gives rows (plain dictionaries) and prints nothing. What is compared is measured in turn, round by round,
so that a machine that slows down slows all of it down.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from draftloop.data.trunk import Trunk, response_trunk
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options, Request
from draftloop.drafter.build import for_decoding
from draftloop.evaluate.speed import compare
from draftloop.learn.update import differentiate
from draftloop.objective.terms import needs_teacher
from draftloop.recipe import OptimiserPart, RolloutPart, StagePart
from draftloop.supervise.batch import supervise
from draftloop.supervise.lesson import FeatureStore, Lesson
from draftloop.supervise.rollout import roll_out
from draftloop.train.optimiser import DrafterOptimiser

CHUNKS = (64, 512, 4096)
METHODS = {"ce": "sft", "forward_kl": "off-policy-kl", "draft_opd": "draft-opd"}
Row = dict[str, Any]


def decoding(
    target: Any, drafter: Any, requests: Sequence[Request], *, max_new_tokens: int, batch_sizes: Sequence[int]
) -> list[Row]:
    """Tokens per second of plain and speculative greedy decoding, prefill left out, at every batch size."""
    rows: list[Row] = []
    served = for_decoding(drafter, target)
    named = [(f"prompt {i}", "", request) for i, request in enumerate(requests)]
    for size in batch_sizes:
        plain, (arm,) = compare(target, [("speculative", served)], named, Options(max_new_tokens, batch_size=size))
        common = {"part": "decode", "batch_size": size, "prompts": len(named), "max_new_tokens": max_new_tokens}
        rows.append({**common, "arm": "plain", "tokens_per_s": plain.tokens_per_s, "ms_per_round": plain.ms_per_round,
                     "seconds": plain.seconds, "tokens": plain.tokens})  # fmt: skip
        rows.append({**common, "arm": "speculative", "tokens_per_s": arm.tokens_per_s, "ms_per_round": arm.ms_per_round,
                     "round_cost": arm.round_cost, "speedup": arm.speedup, "tau": arm.acceptance.tau_pooled,
                     "raw": arm.rows})  # fmt: skip
    return rows


def training(
    target: Any,
    drafter: Any,
    requests: Sequence[Request],
    *,
    max_new_tokens: int,
    anchors: int,
    repeats: int,
    precision: torch.dtype,
) -> list[Row]:
    """Time and peak memory of a whole training step (supervision, loss, gradient, update) by chunk size."""
    made = decode(target, None, requests, Options(max_new_tokens))
    trunks = [
        response_trunk(request.ids, one.tokens, f"prompt {i}", "", 0, one.finished)
        for i, (request, one) in enumerate(zip(requests, made, strict=True))
        if len(one.tokens) > 1
    ]
    rows: list[Row] = []
    for kind, method in METHODS.items():
        lessons = lessons_of(target, drafter, trunks, method, max_new_tokens)
        steps = {chunk: _step(target, drafter, lessons, method, chunk, anchors, precision) for chunk in CHUNKS}
        for step in steps.values():
            step()  # the first forwards allocate
        seconds: dict[int, list[float]] = {chunk: [] for chunk in CHUNKS}
        peaks: dict[int, list[int]] = {chunk: [] for chunk in CHUNKS}
        labels = 0
        for _ in range(repeats):
            for chunk, step in steps.items():
                took, peak, labels = watched(step, target.device)
                seconds[chunk].append(took)
                peaks[chunk] += [peak] if peak is not None else []
        base = statistics.median(seconds[512])
        for chunk in CHUNKS:
            middle = statistics.median(seconds[chunk])
            rows.append({
                "part": "train", "objective": kind, "chunk": chunk, "labels": labels, "seconds": seconds[chunk],
                "ms_per_step": 1e3 * middle, "ratio_to_512": middle / base,
                "peak_bytes": max(peaks[chunk]) if peaks[chunk] else None,
            })  # fmt: skip
    return rows


def drafting(target: Any, drafter: Any, *, length: int, counts: Sequence[int], repeats: int) -> list[Row]:
    """Drafting from N anchors of one text: in one packed forward, and one after the other from a cache."""
    served = for_decoding(drafter, target)
    ids = (torch.arange(length, device=target.device) * 7919 % target.vocab_size).unsqueeze(0)
    places = torch.arange(length, device=target.device).unsqueeze(0)
    features = target.extend(target.new_cache(length), ids, places, served.spec.target_layers).features
    rows: list[Row] = []
    for count in counts:
        anchors = torch.linspace(1, length - 1, count, device=target.device).long().unsqueeze(0)
        tokens = ids.gather(1, anchors)

        def packed(anchors: torch.Tensor = anchors, tokens: torch.Tensor = tokens) -> None:
            served(features, anchors, tokens)

        def single(anchors: torch.Tensor = anchors, tokens: torch.Tensor = tokens) -> None:
            cache = served.new_cache(length)
            served.extend(cache, features, places)
            for i in range(anchors.shape[1]):
                served.begin(cache, anchors[:, i], tokens[:, i])

        seconds: dict[str, list[float]] = {"packed": [], "single": []}
        with torch.no_grad():
            for turn in range(repeats + 1):
                for name, work in (("packed", packed), ("single", single)):
                    took = _timed(work, target.device)
                    seconds[name] += [took] if turn else []  # the first turn warms up
        a, b = (statistics.median(seconds[name]) for name in ("packed", "single"))
        rows.append({"part": "draft", "anchors": count, "text": length, "packed_ms": 1e3 * a, "single_ms": 1e3 * b,
                     "ratio": b / a, "seconds": seconds})  # fmt: skip
    return rows


def lessons_of(target: Any, drafter: Any, trunks: list[Trunk], method: str, max_new_tokens: int) -> list[Lesson]:
    """The fixed trunks, or for `draft-opd` their prompts rolled out with this drafter."""
    if method != "draft-opd":
        return [Lesson(trunk) for trunk in trunks]
    served = for_decoding(drafter, target)
    return roll_out(target, served, trunks, RolloutPart(), max_new_tokens=max_new_tokens, seed=0, visit=0)


def _step(
    target: Any,
    drafter: Any,
    lessons: list[Lesson],
    method: str,
    chunk: int,
    anchors: int,
    precision: torch.dtype,
) -> Callable[[], int]:
    """A training step as a run makes it; gives the number of labels. The learning rate is 0: every step is the same."""
    stage = StagePart.model_validate(
        {"name": "bench", "method": method, "anchors_per_sequence": anchors, "objective": {"chunk": chunk}}
    )
    store = FeatureStore(target, drafter.spec.target_layers, 2**33)
    drafter.train().requires_grad_(True)
    optimiser = DrafterOptimiser(drafter.named_parameters(), OptimiserPart())

    def step() -> int:
        batch = supervise(stage, lessons, [0] * len(lessons), target=target, drafter=drafter, store=store, seed=0,
                          need_teacher=needs_teacher(stage.objective))  # fmt: skip
        learnt = differentiate(stage.objective, [batch], drafter, target.readout, precision)
        optimiser.step(learnt.loss, 0.0, 1)
        return learnt.labels

    return step


def watched(step: Callable[[], int], device: torch.device) -> tuple[float, int | None, int]:
    """Seconds of a step, the bytes by which memory rose above where it stood, and the labels."""
    labels = 0

    def work() -> None:
        nonlocal labels
        labels = step()

    before = _reset_peak(device)
    seconds = _timed(work, device)
    after = _peak(device)
    return seconds, None if before is None or after is None else max(0, after - before), labels


def _timed(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _reset_peak(device: torch.device) -> int | None:
    """Let the peak begin where memory stands now; that level. None where the system does not tell."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return int(torch.cuda.memory_allocated(device))
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak of resident memory anew
    except OSError:
        return None
    return _status("VmRSS")


def _peak(device: torch.device) -> int | None:
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else _status("VmHWM")


def _status(name: str) -> int | None:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
