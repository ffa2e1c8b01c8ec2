"""What the raw rows of `bench` add up to: one line for each concurrency and server.

Pure arithmetic on rows; the same function makes the command's table and the published results.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

Row = dict[str, Any]


def summarise(rows: Iterable[Row]) -> list[Row]:
    """Summarise raw rows.

    Args:
        rows: of `bench`, in any order; other kinds are passed over.

    Returns:
        One object for each (concurrency, arm), in the order measured: `tokens_per_s` (completion tokens of the requests
        that succeeded over wall time), `ttft_ms` and `inter_token_ms` (p50, p95; the latter is a request's time from
        its first to its last streamed piece over the tokens between), `pieces_ms` (p50, p95 of the pauses between
        streamed pieces, each of one or more tokens), `requests`, `failed`, `tau` with `tau_from`, `accepted_at`
        (share of verifications that accepted position k), `speedup` against the plain arm at the same concurrency.
    """
    rows = list(rows)
    levels = [row for row in rows if row["kind"] == "level"]
    found = []
    for level in levels:
        key = (level["arm"], level["concurrency"])
        mine = [row for row in rows if row["kind"] == "request" and (row["arm"], row["concurrency"]) == key]
        good = [row for row in mine if not row["error"]]
        tokens = sum(row["tokens"] for row in good)
        pace = [sum(row["gaps_ms"]) / (row["tokens"] - 1) for row in good if row["tokens"] > 1 and row["gaps_ms"]]
        tau, source = _tau(level["counters"], good, level["concurrency"])
        drafts = level["counters"].get("drafts")
        places = level["counters"].get("accepted_at", {})
        found.append(
            {
                "arm": level["arm"],
                "concurrency": level["concurrency"],
                "requests": len(mine),
                "failed": len(mine) - len(good),
                "tokens": tokens,
                "seconds": level["seconds"],
                "tokens_per_s": tokens / level["seconds"],
                "ttft_ms": _percentiles([1e3 * row["ttft_s"] for row in good]),
                "inter_token_ms": _percentiles(pace),
                "pieces_ms": _percentiles([gap for row in good for gap in row["gaps_ms"]]),
                "tau": tau,
                "tau_from": source,
                "accepted_at": [places[k] / drafts for k in sorted(places, key=int)] if drafts else None,
                "speedup": None,
            }
        )
    plain = {one["concurrency"]: one["tokens_per_s"] for one in found if one["arm"] == "plain"}
    for one in found:
        if one["arm"] != "plain" and plain.get(one["concurrency"]):
            one["speedup"] = one["tokens_per_s"] / plain[one["concurrency"]]
    return found


def _tau(counters: Row, good: Sequence[Row], concurrency: int) -> tuple[float | None, str]:
    """Tokens per verification (accepted + 1), and where that is known from."""
    if counters.get("drafts"):
        return 1 + counters["accepted"] / counters["drafts"], "the server's counters"
    if counters.get("accept_length"):
        return counters["accept_length"], "the server's gauge (its last moments)"
    steps = sum(len(row["gaps_ms"]) for row in good)
    if concurrency == 1 and steps:  # alone on the server, each verification is one streamed piece
        return sum(row["tokens"] - 1 for row in good) / steps, "tokens per streamed piece"
    return None, "the server does not tell"


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """The median and the 95th percentile: the smallest value with at least that share of values at or below it."""
    ordered = sorted(values)
    if not ordered:
        return None
    return {f"p{p}": ordered[max(math.ceil(p / 100 * len(ordered)) - 1, 0)] for p in (50, 95)}


def bench_table(found: Sequence[Row]) -> Table:
    """The summary for people."""
    table = Table(title="server under load", caption=_caption(found), caption_justify="left")
    for name in (
        "at a time",
        "server",
        "tokens/s",
        "against plain",
        "first token ms",
        "inter-token ms",
        "failed",
        "tau",
    ):
        table.add_column(name, justify="left" if name == "server" else "right")
    for one in found:
        speedup = "" if one["speedup"] is None else f"{one['speedup']:.2f}" + ("" if one["speedup"] > 1 else " SLOWER")
        table.add_row(
            str(one["concurrency"]),
            one["arm"],
            f"{one['tokens_per_s']:.1f}",
            speedup,
            _pair(one["ttft_ms"]),
            _pair(one["inter_token_ms"]),
            f"{one['failed']} of {one['requests']}",
            "" if one["tau"] is None else f"{one['tau']:.2f}",
        )
    return table


def _caption(found: Sequence[Row]) -> str:
    sources = sorted({one["tau_from"] for one in found if one["arm"] != "plain"})
    return f"Milliseconds are p50 / p95. tau: {', '.join(sources) or 'no speculative server was measured'}."


def _pair(value: dict[str, float] | None) -> str:
    return "" if value is None else f"{value['p50']:.0f} / {value['p95']:.0f}"
