"""One step of decoding under torch.profiler, as text: how many kernels, how long none ran, which cost most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

TURNS = 5
TOP = 15


def profile_text(name: str, engine: Any, target: Any) -> str:
    """Kernels, gaps and the costliest kernels of a round of this engine."""
    engine.rows.at.zero_()
    weights = sum(p.numel() * p.element_size() for p in target.model.parameters())
    return listing(name, engine.turn, target.device.type == "cuda", "round", weights)


def listing(name: str, turn: Callable[[], Any], cuda: bool, unit: str, weights: int = 0) -> str:
    """The account of what `turn` does; with `weights` bytes, how fast they would be read once in its time."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    turn()
    with profile(activities=activities) as seen:
        for _ in range(TURNS):
            turn()
        if cuda:
            torch.cuda.synchronize()
    if cuda:
        spans = [
            (e.time_range.start, e.time_range.end, e.name) for e in seen.events() if e.device_type == DeviceType.CUDA
        ]
    else:  # operators that call no other
        spans = [(e.time_range.start, e.time_range.end, e.name) for e in seen.events() if not e.cpu_children]
    if not spans:
        return f"{name}: the profiler saw no kernel"
    spans.sort()
    busy, reach, gaps = 0.0, spans[0][0], []
    for start, end, _ in spans:
        if start > reach:
            gaps.append(start - reach)
        busy += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    whole = reach - spans[0][0]
    cost: dict[str, list[float]] = defaultdict(list)
    for start, end, kernel in spans:
        cost[kernel].append(end - start)
    speed = weights / (whole / TURNS) / 1e3
    reading = f"; reading the weights once ({weights / 1e6:.0f} MB) in this time is {speed:.0f} GB/s" if weights else ""
    lines = [
        f"{name}: {len(spans) / TURNS:.0f} {'kernels' if cuda else 'operators'}, {whole / TURNS:.0f} us a {unit},"
        f" {busy / TURNS:.0f} us of them busy, {len(gaps) / TURNS:.0f} gaps of {sum(gaps) / TURNS:.0f} us in all",
        f"mean kernel {busy / len(spans):.2f} us{reading}",
        f"{'us/' + unit:>9} {'calls':>6} {'us each':>8}  name",
    ]
    for kernel, times in sorted(cost.items(), key=lambda item: -sum(item[1]))[:TOP]:
        total = sum(times)
        lines.append(f"{total / TURNS:9.1f} {len(times) / TURNS:6.1f} {total / len(times):8.2f}  {kernel[:110]}")
    return "\n".join(lines)
