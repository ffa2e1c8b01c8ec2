"""A running server under load: streamed requests at several concurrencies, each written down as one raw row.

Measures from outside, over HTTP, what a client sees. Knows no model; what the rows add up to is in `bench_table.py`.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from draftloop.core.errors import DraftloopError, EnvironmentFault
from draftloop.target.server import Server, side_by_side

Row = dict[str, Any]

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+([0-9.eE+-]+)(?:\s+\d+)?$")
_POSITION = re.compile(r'position="(\d+)"')
_COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
}
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_GAUGE = "sglang:spec_accept_length"


@dataclass(frozen=True)
class Ask:
    """One prompt, as chat messages (the server's template renders them) or as token ids (exactly these are read)."""

    id: str
    messages: list[dict[str, Any]] | None = None
    ids: list[int] | None = None


@dataclass(frozen=True)
class Arm:
    """A server under test: `name` is plain or speculative, `model` what it is asked for."""

    name: str
    server: Server
    model: str


def bench(
    arms: Sequence[Arm],
    asks: Sequence[Ask],
    *,
    concurrencies: Sequence[int],
    requests: int,
    max_new_tokens: int,
    write: Callable[[Row], None],
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> list[Row]:
    """Load each server at each concurrency, arm beside arm, so that a busy machine slows all alike.

    Greedy. Every level asks other prompts while they last, the same ones of every arm, after one warm-up request.

    Args:
        arms: the servers.
        asks: the prompts, taken in turn.
        concurrencies: requests under way at a time.
        requests: per arm and level.
        max_new_tokens: longest answer.
        write: called with each raw row: kind `request` (one each) and `level` (wall time, the server's counters).
        advance: called with (requests done, in all).

    Returns:
        All raw rows.

    Raises:
        EnvironmentFault: the warm-up or all requests of a level failed, or a silent server is gone.
    """
    rows: list[Row] = []

    def note(row: Row) -> None:
        rows.append(row)
        write(row)

    total, begun = len(arms) * len(concurrencies) * requests, 0
    for arm in arms:
        failed = _request(arm, asks[-1], max_new_tokens)["error"]
        if failed:
            raise EnvironmentFault(f"the first request failed ({failed})", where=arm.server.url, fix=arm.server.fix)
    for level, concurrency in enumerate(concurrencies):
        chosen = [asks[(level * requests + i) % len(asks)] for i in range(requests)]
        for arm in arms:
            here = {"arm": arm.name, "concurrency": concurrency}
            found: list[Row] = []

            def came(_: Ask, row: Row, here: Row = here, found: list[Row] = found, begun: int = begun) -> None:
                found.append(row)
                note({"kind": "request", **here, **row})
                advance(begun + len(found), total)

            before, start = acceptance_counters(arm.server.metrics()), time.perf_counter()
            side_by_side(
                chosen,
                lambda ask, arm=arm: _request(arm, ask, max_new_tokens),  # type: ignore[misc]
                came,
                concurrency=concurrency,
                check=arm.server.models,
            )
            seconds = time.perf_counter() - start
            counted = counted_between(before, acceptance_counters(arm.server.metrics()))
            note({"kind": "level", **here, "seconds": seconds, "counters": counted})
            begun += requests
            if all(row["error"] for row in found):
                raise EnvironmentFault(
                    f"all {requests} requests failed ({found[0]['error']})", where=arm.server.url, fix=arm.server.fix
                )
    return rows


def _request(arm: Arm, ask: Ask, max_new_tokens: int) -> Row:
    """One streamed request, timed; failures become the row's `error`."""
    body: dict[str, Any] = {"model": arm.model, "max_tokens": max_new_tokens, "temperature": 0.0}
    body["stream_options"] = {"include_usage": True}
    if ask.ids is not None:
        path, body = "/completions", {**body, "prompt": ask.ids}
    else:
        path, body = "/chat/completions", {**body, "messages": ask.messages}
    row: Row = {"id": ask.id, "error": "", "tokens": None}
    times: list[float] = []
    start = time.perf_counter()
    try:
        for at, event in arm.server.stream(path, body):
            if event.get("usage"):
                row["tokens"] = event["usage"].get("completion_tokens")
                row["prompt_tokens"] = event["usage"].get("prompt_tokens")
            if _carries(event):
                times.append(at)
        if not times or row["tokens"] is None:
            row["error"] = "no token came" if not times else "the server counted no tokens (usage)"
    except DraftloopError as error:
        row["error"] = error.what
    row["latency_s"] = time.perf_counter() - start
    row["ttft_s"] = times[0] - start if times else None
    row["gaps_ms"] = [round(1e3 * (b - a), 3) for a, b in itertools.pairwise(times)]
    return row


def _carries(event: Row) -> bool:
    """Whether a streamed event brings tokens: text, or the (textless) end."""
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        said = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        if said or choice.get("finish_reason"):
            return True
    return False


def acceptance_counters(page: str | None) -> Row:
    """What a Prometheus page says of speculative decoding, summed over engines; empty where it says nothing.

    Returns:
        vLLM: `drafts` (verifications), `drafted`, `accepted` tokens, `accepted_at` {position from 0: tokens}, counted
        since the server's start. SGLang: `accept_length`, a gauge of its last moments.
    """
    found: Row = {}
    for line in (page or "").splitlines():
        sample = _SAMPLE.match(line.strip())
        if sample is None:
            continue
        name, labels, value = sample[1], sample[2] or "", float(sample[3])
        if name in _COUNTERS:
            found[_COUNTERS[name]] = found.get(_COUNTERS[name], 0.0) + value
        elif name == _BY_POSITION and (position := _POSITION.search(labels)):
            places = found.setdefault("accepted_at", {})
            places[position[1]] = places.get(position[1], 0.0) + value
        elif name == _GAUGE:
            found["accept_length"] = value
    return found


def counted_between(before: Row, after: Row) -> Row:
    """What was counted between two readings of `acceptance_counters`; a gauge is the later one."""
    found: Row = {}
    for name, value in after.items():
        if name == "accept_length":
            found[name] = value
        elif isinstance(value, dict):
            old = before.get(name, {})
            found[name] = {place: count - old.get(place, 0.0) for place, count in value.items()}
        else:
            found[name] = value - before.get(name, 0.0)
    return found
