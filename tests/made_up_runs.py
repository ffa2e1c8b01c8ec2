"""Made-up runs, as summary records and as run directories, for the report and the tables."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from draftloop.evaluate.summary import write_summary

ATTACK = "<script>alert('x')</script>[bold]$x_1^2$ & \"q\""


LOOKUP_KEYS = ("name", "tau_pooled", "tau_mean", "interval", "per_position", "sets")


def stage(name: str, tau: float, *, drafted: int = 7, **changes: Any) -> dict[str, Any]:
    alphas = [0.3 + 0.1 * tau - 0.02 * k for k in range(drafted)]
    shares = [0.5 ** (1 + k) + 0.02 * tau for k in range(drafted)]
    part = {"tau_pooled": tau, "tau_mean": tau + 0.07, "interval": [tau - 0.15, tau + 0.16]}
    untrained = {"start": None, "method": None, "cells": None, "steps": 0, "labels": 0, "seconds": 0.0}
    out = {"name": name, **untrained, "chosen_step": None, **part, "per_position": shares, "conditional": alphas}
    sets = {"math": part, "code": {**part, "tau_pooled": tau + 0.4, "interval": [tau + 0.2, tau + 0.6]}, "chat": part}
    return {**out, "sets": sets, "validation": [], "split": None, "delivered": False} | changes


def trained(name: str, start: str, method: str, tau: float, *, steps: int = 400, **changes: Any) -> dict[str, Any]:
    cells = {"trunks": "fixed", "anchors": "random", "proposals": "trunk", "objective": "ce"}
    walk = [{"step": s, "tau_pooled": tau - 0.4 * (1 - s / steps) ** 2} for s in range(0, steps + 1, steps // 8)]
    effort = {"cells": cells, "steps": steps, "labels": 358_400, "seconds": 184.2, "chosen_step": steps}
    return stage(name, tau, **(effort | {"start": start, "method": method, "validation": walk} | changes))


def a_summary() -> dict[str, Any]:
    by_position = [{"accepted": 900 - 110 * k, "rejected": 300 + 110 * k} for k in range(7)]
    split = {"accepted": 3990, "first_rejected": 1100, "later_rejected": 3310, "blocks": 1200, "full_blocks": 100}
    split["by_position"] = by_position  # type: ignore[assignment]
    stages = [
        stage("untrained", 1.12),
        trained("sft", "init", "sft", 2.02, split=None),
        trained("sft-more", "sft", "sft", 2.11, chosen_step=350),
        trained("draft-opd", "sft", "draft-opd", 2.41, split=split, delivered=True, seconds=290.0),
    ]
    numbers = {"tau_pooled": 2.41, "tokens_per_s": 61.0, "ms_per_round": 39.5, "round_cost": 1.58}
    arms = [
        {**numbers, "name": "untrained", "tau_pooled": 1.12, "tokens_per_s": 28.4, "break_even_tau": 1.58}
        | {"speedup": 0.71, "sets": {}},
        {**numbers, "name": "draft-opd", "break_even_tau": 1.58, "speedup": 1.52, "sets": {}},
    ]
    decoding = {"batch_size": 1, "dtype": "bfloat16", "prompts": 12, "max_new_tokens": 256}
    audit_arms = [{"name": name, "equal": True, "first_difference": None} for name in ("untrained", "draft-opd")]
    data = {"prompts": 900, "responses": 900, "tokens": 180_412, "sets": {"math": 300, "code": 300, "chat": 300}}
    return {
        "schema": 1,
        "name": "first-run",
        "command": "draftloop train recipes/first.yaml stages.0.optimiser.lr=1e-3",
        "created": "2026-03-01T12:00:00+00:00",
        "seconds": 1234.5,
        "versions": {"draftloop": "0.1.0", "torch": "2.11.0", "transformers": "5.24.0"},
        "hardware": {"cpu": "2 cores", "gpu": None, "memory_gb": 8},
        "target": {"name": "SmolLM2-135M", "fingerprint": "abc123", "parameters": 134_515_008, "dtype": "bfloat16"},
        "drafter": {"family": "dflash", "parameters": 7_345_920, "bytes": 14_700_000, "block_size": 8, "layers": 2}
        | {"target_layers": [1, 14], "mask_token_id": 17, "mask_token": "<mask>"},
        "data": {"train": data, "validation": data, "test": data}
        | {"overlap": {"n": 8, "share_of_ngrams": 0.012, "share_of_prompts": 0.0}},
        "stages": stages,
        "delivered": "draft-opd",
        "gain": {"ratio": 2.15, "interval": [2.01, 2.29]},
        "ngram": {key: value for key, value in stage("ngram:7:2:4", 1.31).items() if key in LOOKUP_KEYS}
        | {"gain": {"ratio": 1.84, "interval": [1.7, 1.99]}},
        "decoding": {**decoding, "plain": {"tokens_per_s": 40.1, "ms_per_token": 24.9}, "arms": arms},
        "lossless": True,
        "audit": {"dtype": "float32", "prompts": 6, "tokens": 1536, "equal": True, "near_ties": 3, "gap": 1e-4}
        | {"arms": audit_arms},
    }


def slow_run() -> dict[str, Any]:
    value = a_summary()
    value["decoding"]["arms"][1] |= {"tokens_per_s": 22.3, "round_cost": 4.33, "break_even_tau": 4.33, "speedup": 0.556}
    return value


def failed_audit() -> dict[str, Any]:
    value = a_summary()
    value["lossless"] = value["audit"]["equal"] = False
    value["audit"]["arms"][1] |= {"equal": False, "first_difference": {"prompt": "math-3", "position": 41}}
    return value


def hostile() -> dict[str, Any]:
    """Every string of the record is an attack, but those that name one another stay consistent."""

    def spoil(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                (key if key not in ("math", "code", "chat") else key + ATTACK): spoil(v) for key, v in value.items()
            }
        if isinstance(value, list):
            return [spoil(v) for v in value]
        return value + ATTACK if isinstance(value, str) and value not in ("init", "previous") else value

    out: dict[str, Any] = spoil(a_summary())
    out["lossless"] = False
    out["audit"]["arms"][0] |= {"equal": False, "first_difference": ATTACK}
    return out


def single_stage() -> dict[str, Any]:
    value = a_summary()
    value["stages"] = [stage("untrained", 1.12, delivered=True, sets={})]
    value |= {"delivered": "untrained", "gain": None, "decoding": None, "lossless": None, "audit": None}
    value["data"] |= {"validation": None, "test": None, "overlap": None}
    value["drafter"] |= {"mask_token_id": None, "mask_token": None}
    return value


def many_and_long() -> dict[str, Any]:
    """Long names, a long block, unknown positions, ten stages."""
    value = a_summary()
    first = stage("untrained", 1.1, drafted=31)
    first["per_position"][20:], first["conditional"][20:] = [None] * 11, [None] * 11
    rest = [
        trained(f"a-very-long-stage-name-number-{i}", "previous", "custom", 2 + i / 9, drafted=31) for i in range(9)
    ]
    rest[-1]["delivered"] = True
    value |= {"stages": [first, *rest], "delivered": rest[-1]["name"], "decoding": slow_run()["decoding"]}
    value["decoding"]["arms"][1]["name"] = rest[-1]["name"]
    return value


RUNS = {f.__name__: f for f in (a_summary, slow_run, failed_audit, hostile, single_stage, many_and_long)}


def metrics_lines(summary: dict[str, Any]) -> list[str]:
    lines = []
    for part in summary["stages"][1:]:
        for step in range(10, part["steps"] + 1, 10):
            train = {"kind": "train", "stage": part["name"], "step": step, "loss": 5 / step**0.3, "lr": 1e-3}
            lines.append(json.dumps({**train, "grad_norm": 0.4, "seconds": step * 0.4}))
        lines += [json.dumps({"kind": "validation", "stage": part["name"], **point}) for point in part["validation"]]
    return lines


def run_directory(path: Path, summary: dict[str, Any], *, metrics: bool = True) -> Path:
    write_summary(path, summary)
    if metrics:
        (path / "metrics.jsonl").write_text("\n".join(metrics_lines(summary)) + "\n")
        (path / "recipe.yaml").write_text(f"name: first-run\n# {ATTACK}\n")
    return path


def screen(renderable: RenderableType, width: int = 80) -> str:
    buffer = io.StringIO()
    Console(file=buffer, width=width).print(renderable)
    return buffer.getvalue()
