"""What the small hybrid target and its drafters came to, from raw rows; `hybrid_results.py` asks for the summaries.

results/raw/hybrid-target-NAME.jsonl: rows of `small_hybrid.py`; results/raw/hybrid-drafter-NAME.jsonl: the run of
recipes/hybrid.yaml on that target, taken by `results.py take`. Either may be absent.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from run_rows import interval, read

from draftloop.evaluate.tau import acceptance, paired

NOTE = """\
It exists to show training end to end on a target with recurrent layers: three of Gated DeltaNet to one of full
attention. The prompt files are those of the runs `specopd-...`. `sft-continued`, `specopd` and `overlap` (the objective
of `specopd` on the answers' own tokens) start from the same SFT drafter and have the same minutes. Text that repeats
itself, as greedy answers of so small a model may, is easy to draft: read tau beside the share of repetitions.

"""
TARGET, DRAFTER = "hybrid-target-", "hybrid-drafter-"
Row = dict[str, Any]


def summaries(raw: Path) -> dict[str, Row]:
    """By NAME: `target`, how it was made, and `drafter`, what its drafters came to; what is absent is left out.

    Raises:
        ValueError: the drafters were trained for another target than the one beside them.
    """
    found: dict[str, Row] = {}
    for path in sorted(raw.glob(f"{TARGET}*.jsonl")):
        found.setdefault(path.stem.removeprefix(TARGET), {})["target"] = _target(path)
    for path in sorted(raw.glob(f"{DRAFTER}*.jsonl")):
        one = found.setdefault(path.stem.removeprefix(DRAFTER), {})
        one["drafter"] = _drafter(path)
        made, used = one.get("target", one["drafter"])["fingerprint"], one["drafter"]["fingerprint"]
        if made != used:
            raise ValueError(f"{path.name} is of the target {used}, the one beside it is {made}")
    return found


def _target(path: Path) -> Row:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    head, answers = rows[0], [row for row in rows if row["kind"] == "answer"]
    looks = [row for row in rows if row["kind"] == "look"]
    grams = sum(row["grams"] for row in answers)
    return {
        **{key: value for key, value in head.items() if key != "kind"},
        "chosen_step": min(looks, key=lambda row: row["held_out"])["step"],
        "greedy_answers": len(answers),
        "finished": sum(row["finished"] for row in answers),
        "repeated": sum(row["repeated"] for row in answers) / grams if grams else None,
    }


def _drafter(path: Path) -> Row:
    head, stages, arms = read(path)
    out: Row = {key: head[key] for key in ("command", "versions", "hardware", "seconds", "delivered")}
    out["fingerprint"] = head["target"]["fingerprint"]
    out["audit"] = None
    if head["audit"]:
        out["audit"] = {key: head["audit"][key] for key in ("equal", "prompts", "tokens", "dtype", "near_ties")}
    out["arms"] = []
    for stage in stages:
        name = stage["name"]
        arm = {key: stage[key] for key in ("name", "start", "steps", "labels", "seconds")}
        arm["acceptance"] = acceptance(arms[name]).to_json()
        arm["over"] = {
            base: paired(arms[base], arms[name]).to_json()
            for base in ("sft", "sft-continued")
            if base in arms and base != name and stage["start"] == "sft"
        }
        out["arms"].append(arm)
    return out


def table(raw: Path) -> str:
    """All of it as Markdown; empty where there are no rows."""
    pages = "\n".join(_page(name, one) for name, one in summaries(raw).items())
    return NOTE + pages if pages else ""


def _page(name: str, found: Row) -> str:
    lines = [f"### {name}", ""]
    if "target" in found:
        lines += [_told(found["target"]), ""]
    if "drafter" in found:
        lines += _arms(found["drafter"])
    return "\n".join(lines)


def _told(made: Row) -> str:
    """How the target was made, in sentences."""
    again = "" if made["repeated"] is None else f", {made['repeated']:.0%} of their 8-grams are repetitions"
    return (
        f"The target: `{made['command']}` on {_machine(made)}; {made['parameters'] / 1e6:.1f} M parameters,"
        f" {made['embedding_parameters'] / 1e6:.1f} M of them embeddings; {made['train']['texts']:,} texts of"
        f" {made['train']['tokens']:,} tokens, {made['steps']} steps (weights of step {made['chosen_step']}),"
        f" {made['seconds'] / 60:.1f} minutes in all. Held-out loss {made['loss']['answers']:.2f} nats a token on"
        f" answers ({made['held_out']['texts']} texts, {made['loss']['dtype']}), {made['loss']['prompts']:.2f} on"
        f" prompts. Of {made['greedy_answers']} greedy answers to held-out prompts, up to {made['answer_length']}"
        f" tokens, {made['finished']} end by themselves{again}."
    )


def _arms(run: Row) -> list[str]:
    """The drafters' acceptance lengths on the held-out prompts, T = 0."""
    sets = list(run["arms"][0]["acceptance"]["sets"])
    lines = [
        f"Its drafters: `{run['command']}` on {_machine(run)}, torch {run['versions']['torch']}, transformers"
        f" {run['versions']['transformers']}; {run['seconds'] / 60:.1f} minutes in all. Acceptance length on"
        " held-out prompts at T = 0, 95 % intervals.",
        "",
        f"| drafter | tau pooled | 95 % | over SFT | over SFT continued | {' | '.join(sets)} | steps | seconds |",
        "|---" * (7 + len(sets)) + "|",
    ]
    for arm in run["arms"]:
        a = arm["acceptance"]
        star = " (delivered)" if arm["name"] == run["delivered"] else ""
        over = [_ratio(arm["over"].get(base)) for base in ("sft", "sft-continued")]
        each = " | ".join(f"{a['sets'][name]['tau_pooled']:.2f}" for name in sets)
        lines.append(
            f"| {arm['name']}{star} | {a['tau_pooled']:.3f} | {interval(a['interval'])}"
            f" | {over[0]} | {over[1]} | {each} | {arm['steps']} | {arm['seconds']:.0f} |"
        )
    if audit := run["audit"]:
        lines += [
            "",
            f"Lossless: {audit['equal']} ({audit['prompts']} prompts, {audit['tokens']} tokens, {audit['dtype']},"
            f" {audit['near_ties']} near-ties).",
        ]
    return [*lines, ""]


def _ratio(found: Row | None) -> str:
    if found is None:
        return ""
    return f"{found['ratio']:.3f}" + (f" ({interval(found['interval'])})" if found["interval"] else "")


def _machine(head: Row) -> str:
    return head["hardware"].get("gpu") or f"{head['hardware']['threads']} CPU threads"
