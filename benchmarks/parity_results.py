"""results/parity-vllm.json from the raw rows of parity runs in results/raw/parity-*.jsonl.

    python benchmarks/parity_results.py take NAME RUN   copy a parity run's rows into results/raw/parity-NAME.jsonl

Names: `wrong-NAME` are exports spoilt on purpose, with what the diagnosis said of them; all others are parity runs
proper. `benchmarks/results.py` calls `derived`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from draftloop.engines.verdict import summarise

ROOT = Path(__file__).resolve().parent.parent
RAW = ROOT / "results" / "raw"
FOUND = ROOT / "results" / "parity-vllm.json"
_WRONG = "wrong-"


def take(name: str, run: Path) -> Path:
    """Copy rows (and a diagnosis, if there is one), without the folders of one machine."""
    rows = [json.loads(line) for line in (run / "parity.jsonl").read_text(encoding="utf-8").splitlines()]
    rows[0]["command"] = re.sub(r"\S*/(?=[^/\s])", "", rows[0]["command"])
    if name.startswith(_WRONG):
        rows = [{key: value for key, value in row.items() if key != "tokens"} for row in rows]
    if (run / "diagnosis.json").is_file():
        rows.append(json.loads((run / "diagnosis.json").read_text(encoding="utf-8")))
    path = RAW / f"parity-{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def derived() -> dict[Path, str]:
    """The derived file's text; nothing where there are no rows."""
    runs = {path.stem.removeprefix("parity-"): _rows(path) for path in sorted(RAW.glob("parity-*.jsonl"))}
    if not runs:
        return {}
    families = {name: _family(rows) for name, rows in runs.items() if not name.startswith(_WRONG)}
    wrong = {name.removeprefix(_WRONG): _wrong(rows) for name, rows in runs.items() if name.startswith(_WRONG)}
    found = {"families": families, "wrong_exports": wrong}
    return {FOUND: json.dumps(found, indent=1, sort_keys=True) + "\n"}


def table() -> str:
    """Parity runs and spoilt exports as Markdown; empty where there are no rows."""
    text = next(iter(derived().values()), "")
    if not text:
        return ""
    found = json.loads(text)
    lines = [
        "| run | engine | drafts | T | prompts | tau vLLM | tau ours, on its text | difference (95 %)"
        " | steps that differ | tau ours, decoding | parity |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, run in found["families"].items():
        lines += [_line(name, run, temperature, part) for temperature, part in run["temperatures"].items()]
    lines += ["", "| spoilt export | parity | named from the engine's steps | named from tau |", "|---|---|---|---|"]
    for name, run in found["wrong_exports"].items():
        causes = [run[f"cause_by_{side}"] or "" for side in ("engine", "checkpoint")]
        lines.append(f"| {name} | {'NO' if run['failed'] else 'yes'} | {causes[0]} | {causes[1]} |")
    return "\n".join([*lines, ""])


def _line(name: str, run: dict[str, Any], temperature: str, part: dict[str, Any]) -> str:
    """One run at one temperature; with drafts that the engine sampled there is no replay, only two decodings."""
    plugins = [key.removeprefix("vllm plugin ") for key in run["engine"]["versions"] if key.startswith("vllm plugin ")]
    engine = " + ".join([run["engine"]["versions"]["vllm"], run["dtype"], *plugins])
    ours = part.get("replay")
    judged = ours or part["own"]
    low, high = judged["difference_interval"]
    steps = part.get("steps") or {}
    differ = f"{steps['differ']} of {steps['compared']}" if ours else ""
    cells = [
        name, engine, run["draft_sample_method"], temperature, part["prompts"], f"{part['tau_engine']:.3f}",
        f"{ours['tau']:.3f}" if ours else "", f"{judged['difference']:+.3f} ({low:+.3f} to {high:+.3f})", differ,
        f"{part['own']['tau']:.3f}", "yes" if part["passed"] else "NO",
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _family(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The verdict, and at its top the figures of the lowest temperature's replay."""
    verdict = summarise(rows)
    part = next(iter(verdict["temperatures"].values()))
    ours = part.get("replay") or part["own"]
    diagnosis = next((row for row in rows if row["kind"] == "diagnosis"), None)
    return {
        "tau_vllm": part["tau_engine"],
        "tau_ours": ours["tau"],
        "difference": ours["difference"],
        "paired_interval": ours["difference_interval"],
        "within_interval": ours["within_interval"] and ours["close"],
        "first_difference": (part.get("steps") or {}).get("first_difference"),
        "hardware": rows[0]["hardware"],
        "command": rows[0]["command"],
        "versions": rows[0]["versions"],
        "drafter": rows[0]["drafter"],
        "explained_by": diagnosis["engine"]["sentence"] if diagnosis else None,
        **verdict,
    }


def _wrong(rows: list[dict[str, Any]]) -> dict[str, Any]:
    verdict = summarise(rows)
    said = next(row for row in rows if row["kind"] == "diagnosis")
    part = verdict["temperatures"]["0"]
    cause = {side: (said[side]["cause"] or {}).get("name") for side in ("engine", "checkpoint")}
    return {
        "failed": not verdict["passed"],
        "diagnosed": cause["engine"] is not None or cause["checkpoint"] is not None,
        "cause_by_engine": cause["engine"],
        "cause_by_checkpoint": cause["checkpoint"],
        "tau_vllm": part["tau_engine"],
        "tau_ours": part["replay"]["tau"],
        "sentence": verdict["sentence"],
    }


def main() -> int:
    """Take a run."""
    if len(sys.argv) != 4 or sys.argv[1] != "take":
        print(__doc__, file=sys.stderr)
        return 2
    print(f"took {take(sys.argv[2], Path(sys.argv[3])).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
