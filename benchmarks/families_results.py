"""results/families.json from the raw rows of `benchmarks/families.py`; `results.py` calls derive, table and choice."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from bench_results import rounded
from run_rows import interval
from run_rows import whole_rows as read

from draftloop.evaluate.tau import Tally, acceptance

ROOT = Path(__file__).resolve().parent.parent
RAW = ROOT / "results" / "raw" / "families-h200.jsonl"
OUT = ROOT / "results" / "families.json"
ORDER = ("dflash", "eagle3", "dspark", "dflash2", "mtp", "ngram")
TITLES = {"dflash": "DFlash", "eagle3": "EAGLE-3", "dspark": "DSpark", "dflash2": "DFlash 2", "mtp": "MTP head",
          "ngram": "n-gram lookup"}  # fmt: skip
Row = dict[str, Any]


def derive(raw: Path = RAW) -> dict[Path, str]:
    """Every derived file's text; nothing where there are no raw rows."""
    if not raw.is_file():
        return {}
    return {OUT: json.dumps(rounded(summarise(read(raw))), indent=1, sort_keys=True) + "\n"}


def summarise(rows: list[Row]) -> Row:
    """A row a family: tau by temperature, rule and set, untrained, size, training, speed; or what there is of it."""
    head = next((row for row in rows if row["kind"] == "run"), {})
    tallies: dict[tuple[str, str], list[Tally]] = {}
    for row in rows:
        if row["kind"] == "tally":
            name = f"t{row['temperature']:g}" + (f"_{row['rule']}" if row["temperature"] else "")
            key = (row["family"], name if row["arm"] == "trained" else row["arm"])
            tallies.setdefault(key, []).append(_tally(row))
    shortened: dict[tuple[str, str, float], list[Tally]] = {}
    found: dict[str, Row] = {}
    for row in rows:
        if row["kind"] == "greedy":
            found.setdefault(row["family"], {}).update(_account(row))
        elif row["kind"] == "confidence":
            shortened.setdefault((row["family"], row["way"], row["value"]), []).append(_tally(row))
        elif row["kind"] == "speed":
            keys = ("tokens_per_s", "plain_tokens_per_s", "ms_per_round", "round_cost", "speedup", "prompts")
            found.setdefault(row["family"], {})["speed"] = {key: row[key] for key in keys} | {"tau": row["tau_pooled"]}
    for (family, name), some in tallies.items():
        measure = acceptance(some)
        if name == "untrained":
            found.setdefault(family, {})["tau_untrained"] = measure.tau_pooled
            continue
        found.setdefault(family, {}).setdefault("tau", {})[name] = measure.to_json()
        if family == "ngram" and name == "t0":
            found[family]["tau_untrained"] = measure.tau_pooled  # nothing of it is ever trained
    for (family, way, value), some in shortened.items():
        measure = acceptance(some, resamples=1)
        told = {"way": way, "value": value, "tau": measure.tau_pooled, "verified": measure.verified}
        found.setdefault(family, {}).setdefault("verifying_less", []).append(told)
    keys = ("family", "what", "why")  # the last word on each
    last = {(row["family"], row["what"]): row for row in rows if row["kind"] == "failed"}
    failed = [{key: row[key] for key in keys} for row in last.values()]
    measured = {("greedy", name) for name, row in found.items() if "t0" in row.get("tau", {})}
    measured |= {("sampled", name) for name, row in found.items() if "t1_ratio" in row.get("tau", {})}
    measured |= {("speed", name) for name, row in found.items() if "speed" in row}
    return {
        "settings": {key: value for key, value in head.items() if key != "kind"},
        "families": {name: found[name] for name in ORDER if name in found},
        "failed": [one for one in failed if (one["what"], one["family"]) not in measured],
    }


def _tally(row: Row) -> Tally:
    told = {one.name: row[one.name] for one in fields(Tally)}
    return Tally(**{name: tuple(value) if isinstance(value, list) else value for name, value in told.items()})


def _account(row: Row) -> Row:
    """Size and training of a family, as its run tells it."""
    out = {key: row[key] for key in ("drafted", "parameters", "bytes", "layers", "command", "name") if key in row}
    trained = [stage for stage in row.get("stages", []) if stage["steps"]]
    if trained:
        out["seconds_of_training"] = sum(stage["seconds"] for stage in trained)
        out["steps"] = sum(stage["steps"] for stage in trained)
        out["labels"] = sum(stage["labels"] for stage in trained)
    return out


def table(raw: Path = RAW) -> str:
    """All that was measured, as Markdown."""
    if not raw.is_file():
        return ""
    found = summarise(read(raw))
    head = found["settings"]
    machine = head["hardware"].get("gpu") or f"{head['hardware']['threads']} CPU threads"
    count = head["trained_side_by_side"]
    together = "one training at a time" if count == 1 else f"{count} trainings side by side"
    sets = sorted(
        {name for row in found["families"].values() for name in row.get("tau", {}).get("t0", {}).get("sets", {})}
    )
    lines = [
        f"`recipes/families/*.yaml`, then `benchmarks/families.py`, on {machine}, torch {head['versions']['torch']},"
        f" transformers {head['versions']['transformers']}; {together} on one device. Tau at T = 0 as the runs walked"
        " their test prompts, at T = 1 by the exact offline evaluation under both rules; intervals over prompts.",
        "",
        "| family | tau, T = 0 | 95 % | untrained | " + " | ".join(sets) + " | T = 1, match | T = 1, ratio |",
        "|---" * (6 + len(sets)) + "|",
    ]
    for name, row in found["families"].items():
        taus = row.get("tau", {})
        cells = [
            _tau(taus.get("t0")),
            interval(taus["t0"]["interval"], 2) if "t0" in taus else "",
            _number(row.get("tau_untrained")),
        ]
        cells += [_tau(taus.get("t0", {}).get("sets", {}).get(one)) for one in sets]
        cells += [_tau(taus.get("t1_match")), _tau(taus.get("t1_ratio"))]
        lines.append(f"| {TITLES[name]} | {' | '.join(cells)} |")
    lines += [
        "",
        "| family | drafts | parameters | trained, s | steps | labels | round cost | tokens/s | against plain |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in found["families"].items():
        speed = row.get("speed", {})
        cells = [
            str(row.get("drafted", "")),
            _millions(row.get("parameters")),
            _number(row.get("seconds_of_training"), 0),
        ]
        cells += [str(row.get("steps", "")), str(row.get("labels", "")), _number(speed.get("round_cost"))]
        cells += [_number(speed.get("tokens_per_s"), 0), _against(speed)]
        lines.append(f"| {TITLES[name]} | {' | '.join(cells)} |")
    lines += [
        f"\n{TITLES.get(one['family'], one['family'])}: {one['what']} failed ({one['why']})." for one in found["failed"]
    ]
    for name, row in found["families"].items():
        if "verifying_less" in row:
            lines += _less(name, row["verifying_less"])
    return "\n".join([*lines, ""])


def _less(name: str, cells: list[Row]) -> list[str]:
    """Drafts verified by confidence beside the same number of drafts verified always."""
    whole = sorted((cell["verified"], cell["tau"]) for cell in cells if cell["way"] == "first")
    lines = [
        "",
        f"{TITLES[name]}'s confidence head, T = 0: a draft is verified while the product of confidences is above the"
        " threshold. Beside it, tau of verifying always as many, the first n (between whole n: on the line).",
        "",
        "| threshold | drafts verified a round | tau | tau of as many always | verified a token | of always as many |",
        "|---|---|---|---|---|---|",
    ]
    for cell in cells:
        if cell["way"] == "above":
            other = float(np.interp(cell["verified"], *zip(*whole, strict=True)))
            lines.append(
                f"| {cell['value']:g} | {cell['verified']:.2f} | {cell['tau']:.3f} | {other:.3f}"
                f" | {(cell['verified'] + 1) / cell['tau']:.2f} | {(cell['verified'] + 1) / other:.2f} |"
            )
    rows = ", ".join(f"{n:.0f}: {tau:.3f}" for n, tau in whole)
    return [*lines, "", f"Tau of verifying always the first n: {rows}."]


def choice(raw: Path = RAW) -> str:
    """The short table of docs/drafters.md."""
    if not raw.is_file():
        return "\nNot measured yet.\n\n"
    found = summarise(read(raw))
    lines = [
        "",
        "| family | tau, T = 0 | T = 1 (ratio) | untrained | round cost | speed against plain | parameters |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in found["families"].items():
        taus, speed = row.get("tau", {}), row.get("speed", {})
        cells = [_tau(taus.get("t0")), _tau(taus.get("t1_ratio")), _number(row.get("tau_untrained"))]
        cells += [_number(speed.get("round_cost")), _against(speed), _millions(row.get("parameters"))]
        lines.append(f"| {TITLES[name]} | {' | '.join(cells)} |")
    absent = [TITLES[name] for name in ORDER if name not in found["families"]]
    more = f"\nNot measured: {', '.join(absent)}.\n" if absent else ""
    return "\n".join([*lines, more, ""])


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _tau(part: Row | None) -> str:
    return _number(part["tau_pooled"]) if part else ""


def _millions(value: int | None) -> str:
    return "" if value is None else f"{value / 1e6:.1f} M" if value else "none"


def _against(speed: Row) -> str:
    if not speed:
        return ""
    return f"{speed['speedup']:.2f}" + ("" if speed["speedup"] > 1 else " (SLOWER)")
