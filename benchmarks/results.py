"""Derive results/*.json and the tables of docs/results.md from the raw rows of runs.

    python benchmarks/results.py take RUN...   copy the raw rows of finished runs into results/raw/
    python benchmarks/results.py derive        write results/*.json and the tables again
    python benchmarks/results.py check         demand that deriving them again changes nothing

Nothing in results/ or in the marked parts of docs/results.md and docs/drafters.md is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import bench_results
import branch_throughput
import decode_results
import families_results
import fused_results
import hybrid_results
import parity_results
import scoring_results
import small_hybrid_results
import tree_attention
from run_rows import interval, read

from draftloop.evaluate.tau import Response, acceptance, paired, shown

ROOT = Path(__file__).resolve().parent.parent
RAW = ROOT / "results" / "raw"
PAGE = ROOT / "docs" / "results.md"
CHOICE = ROOT / "docs" / "drafters.md"
RUN_KEYS = (
    "name", "command", "versions", "hardware", "target", "drafter", "delivered", "seconds", "decoding", "audit",
)  # fmt: skip
STAGE_KEYS = ("name", "start", "cells", "steps", "labels", "seconds", "chosen_step", "split")
README_STAGES = ("before", "sft", "specopd", "draft-opd", "sft-continued")
STUDIES = ("quickstart", "specopd", "bundled", "adapt")  # results/NAME.json; a run's study is what its name begins with
OPEN, SHUT = "<!-- results: derived by benchmarks/results.py -->\n", "<!-- /results -->\n"
MARK = "<!-- derived by benchmarks/results.py; do not edit below -->\n"


def take(runs: list[Path]) -> None:
    """Copy each run's rows, headed by what they were measured with."""
    RAW.mkdir(parents=True, exist_ok=True)
    for run in runs:
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        head = {"kind": "run", **{key: summary[key] for key in RUN_KEYS}}
        # not the folders of one machine
        head["command"] = re.sub(r"--out \S*/\S+", f"--out runs/{run.name}", head["command"])
        head["command"] = re.sub(r"=/\S*/(?=[^/\s])", "=", head["command"])
        stages = [{"kind": "stage", **{key: stage[key] for key in STAGE_KEYS}} for stage in summary["stages"]]
        rows = (run / "raw.jsonl").read_text(encoding="utf-8")
        name = f"{run.name}.jsonl"
        (RAW / name).write_text("".join(json.dumps(row) + "\n" for row in (head, *stages)) + rows, encoding="utf-8")
        print(f"took {name}")


def derive() -> dict[Path, str]:
    """Every derived file's text."""
    others = ("parity-", "bench-", "branch-", "fused-", "decode-", "hybrid-", "tree-", "families-")
    runs = {path.stem: read(path) for path in sorted(RAW.glob("*.jsonl")) if not path.name.startswith(others)}
    out = parity_results.derived() | bench_results.derive() | branch_throughput.derived() | decode_results.derive()
    out |= hybrid_results.derive() | families_results.derive()
    tables = []
    found: dict[str, dict[str, Any]] = {study: {} for study in STUDIES}
    for name, (head, stages, arms) in runs.items():
        if name.startswith("ablations-"):
            continue
        study = next(study for study in STUDIES if name.startswith(study))
        found[study][name] = {
            "hardware": head["hardware"],
            "versions": head["versions"],
            "command": head["command"],
            "seconds": head["seconds"],
            "stages": {arm: acceptance(rows).to_json() for arm, rows in arms.items()},
            "decoding": head["decoding"],
            "lossless": head["audit"]["equal"] if head["audit"] else None,
        }
        tables.append(_run_table(name, head, stages, arms))
    out |= {ROOT / "results" / f"{study}.json": _json(part) for study, part in found.items() if part}
    ablations = {name: run for name, run in runs.items() if name.startswith("ablations-")}
    if ablations:
        arms_of_seeds = _ablations(ablations)
        out[ROOT / "results" / "ablations.json"] = _json(arms_of_seeds)
        tables.append(_ablation_table(arms_of_seeds))
    if alike := families_results.table():
        tables.append("## Families\n\n" + alike)
    if served := bench_results.table():
        tables.append("## A running server under load\n\n" + served)
    if decoded := decode_results.table():
        tables.append("## Decoding on CUDA\n\n" + decoded)
    if kernels := fused_results.table():
        tables.append("## Readout and loss fused\n\n" + kernels)
    if supervised := branch_throughput.table():
        tables.append("## Supervised draft tokens per second\n\n" + supervised)
    if packed := scoring_results.table():
        tables.append("## Scoring branches on a CPU\n\n" + packed)
    if masked := tree_attention.table():
        tables.append("## Dense masks and FlexAttention for trees\n\n" + masked)
    if agreed := parity_results.table():
        tables.append("## Parity with vLLM\n\n" + agreed)
    if scored := hybrid_results.table():
        tables.append("## Scoring branches through Gated DeltaNet\n\n" + scored)
    if trained := small_hybrid_results.table(RAW):
        tables.append("## A small hybrid target\n\n" + trained)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    before, rest = readme.split(OPEN)
    out[ROOT / "README.md"] = before + OPEN + _readme(found["quickstart"]) + SHUT + rest.split(SHUT)[1]
    before, rest = CHOICE.read_text(encoding="utf-8").split(OPEN)
    out[CHOICE] = before + OPEN + families_results.choice() + SHUT + rest.split(SHUT)[1]
    page = PAGE.read_text(encoding="utf-8").split(MARK)[0]
    out[PAGE] = page + MARK + "\n" + "\n".join(tables)
    return out


def _readme(found: dict[str, Any]) -> str:
    """The quickstart's outcome in one table."""
    lines = [
        "",
        "| begins with | on | " + " | ".join(README_STAGES) + " | lossless | speed against plain | minutes in all |",
    ]
    lines.append("|---" * (len(README_STAGES) + 5) + "|")
    for run_name, run in found.items():
        begins = "a new drafter" if "-scratch-" in run_name else "the bundled drafter"
        machine = run["hardware"].get("gpu") or f"{run['hardware']['threads']} CPU cores"
        taus = []
        for name in README_STAGES:
            stage = next(iter(run["stages"].values())) if name == "before" else run["stages"].get(name)
            if stage is None:
                taus.append("")
                continue
            taus.append(f"{stage['tau_pooled']:.2f}" + _bracketed(stage["interval"], 2))
        arm = run["decoding"]["arms"][-1]
        speed = f"{arm['speedup']:.2f}, pays above tau {arm['round_cost']:.2f}"
        lossless = "yes" if run["lossless"] else "NO"
        lines.append(
            f"| {begins} | {machine} | {' | '.join(taus)} | {lossless} | {speed} | {run['seconds'] / 60:.1f} |"
        )
    note = (
        "Acceptance length tau on the 30 held-out prompts, with 95 % intervals; higher is better, 1 is no use at all."
    )
    return "\n".join([*lines, "", note, ""])


def _run_table(name: str, head: dict[str, Any], stages: list[dict[str, Any]], arms: dict[str, list[Response]]) -> str:
    machine = head["hardware"].get("gpu") or f"{head['hardware']['threads']} CPU threads"
    lines = [
        f"## {name}",
        "",
        f"`{head['command']}` on {machine}, torch {head['versions']['torch']},"
        f" transformers {head['versions']['transformers']};"
        f" {head['seconds'] / 60:.1f} minutes in all.",
        "",
        "| stage | tau pooled | 95 % | tau mean | over the first | steps | labels | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for stage in stages:
        a = acceptance(arms[stage["name"]])
        gain = paired(arms[stages[0]["name"]], arms[stage["name"]])
        star = " (delivered)" if stage["name"] == head["delivered"] else ""
        lines.append(
            f"| {stage['name']}{star} | {a.tau_pooled:.3f} | {interval(shown(a.interval, a.responses))}"
            f" | {a.tau_mean:.3f} | {gain.ratio:.3f} | {stage['steps']} | {stage['labels']} | {stage['seconds']:.0f} |"
        )
    if "ngram" in arms:  # untrained, beside the stages
        a = acceptance(arms["ngram"])
        wide = interval(shown(a.interval, a.responses))
        lines.append(f"| n-gram lookup | {a.tau_pooled:.3f} | {wide} | {a.tau_mean:.3f} | | | | |")
    if head["decoding"]:
        plain = head["decoding"]["plain"]
        lines += [
            "",
            f"Real decoding, batch 1, {head['decoding']['dtype']}, {head['decoding']['prompts']} prompts:",
            "",
        ]
        lines += ["| arm | tau | tokens/s | round cost = break-even tau | against plain |", "|---|---|---|---|---|"]
        lines.append(f"| plain | 1 | {plain['tokens_per_s']:.1f} | 1 | 1 |")
        for arm in head["decoding"]["arms"]:
            word = "faster" if arm["speedup"] > 1 else "SLOWER"
            lines.append(
                f"| {arm['name']} | {arm['tau_pooled']:.3f} | {arm['tokens_per_s']:.1f} | {arm['round_cost']:.2f}"
                f" | {arm['speedup']:.2f} ({word}) |"
            )
    if head["audit"]:
        audit = head["audit"]
        lines += [
            "",
            f"Lossless: {audit['equal']} ({audit['prompts']} prompts, {audit['tokens']} tokens, {audit['dtype']},"
            f" {audit['near_ties']} near-ties).",
        ]
    return "\n".join([*lines, ""])


def _ablations(runs: dict[str, Any]) -> dict[str, Any]:
    """Each arm over the seeds, against the SFT drafter that it started from."""
    names = list(dict.fromkeys(stage["name"] for _, stages, _ in runs.values() for stage in stages))
    arms = {}
    for name in names:
        taus = [acceptance(a[name], resamples=1).tau_pooled for _, _, a in runs.values()]
        ratios = [paired(a["sft"], a[name]).to_json() for _, _, a in runs.values()]
        arms[name] = {"tau_pooled": taus, "mean": sum(taus) / len(taus), "over_sft": ratios}
    first = next(iter(runs.values()))[0]
    return {"runs": list(runs), "hardware": first["hardware"], "versions": first["versions"], "arms": arms}


def _ablation_table(study: dict[str, Any]) -> str:
    count = len(study["runs"])
    lines = [
        "## Draft-OPD and its ablations",
        "",
        f"`draftloop train recipes/ablations.yaml seed=S drafter.mask_token=3 --out runs/ablations-S`, {count} seeds,"
        f" on {study['hardware'].get('gpu', 'CPU')}. Every arm starts from the same SFT drafter (300 steps) and takes"
        " 100 steps.",
        "",
        "| arm | tau pooled, mean of seeds | each seed | over SFT, each seed (95 %) |",
        "|---|---|---|---|",
    ]
    for name, arm in sorted(study["arms"].items(), key=lambda item: -item[1]["mean"]):
        each = " / ".join(f"{tau:.3f}" for tau in arm["tau_pooled"])
        over = " / ".join(f"{r['ratio']:.3f}{_bracketed(r['interval'], 3)}" for r in arm["over_sft"])
        lines.append(f"| {name} | {arm['mean']:.3f} | {each} | {over if name not in ('sft', 'untrained') else ''} |")
    return "\n".join([*lines, ""])


def _bracketed(found: list[float] | None, digits: int) -> str:
    return f" ({interval(found, digits)})" if found and found[1] > found[0] else ""


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def main() -> int:
    """Run one of the three commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("take", "derive", "check"))
    parser.add_argument("runs", nargs="*", type=Path, help="finished run directories (take)")
    arguments = parser.parse_args()
    if arguments.what == "take":
        take(arguments.runs)
        return 0
    derived = derive()
    if arguments.what == "derive":
        for path, text in derived.items():
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [path for path, text in derived.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        fix = "run `python benchmarks/results.py derive`"
        print(f"{path.relative_to(ROOT)} is not what its raw rows give; {fix}", file=sys.stderr)
    if not stale:
        print(f"files that are what their raw rows give: {len(derived)}")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
