"""What the raw rows of a parity run say: tau of both sides, paired intervals, first differences, pass or fail.

Reads rows (plain JSON objects) and nothing else, so that published figures can be derived from committed rows again.

The rule: at each temperature |delta tau| is at most 0.03 and the paired 95 % interval of delta tau holds 0, every step
at which the two drafters part is a near-tie of the drafter, the engine's own counts agree with its steps, and greedy
texts are equal but for near-ties of the target. Whether the engine samples the target's law at a temperature above 0
is judged apart (`law`): it is the engine's business, not the drafter's, and a drafter can agree where it does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from draftloop.core.errors import InputError
from draftloop.evaluate.tau import Response, acceptance, paired

CLOSE = 0.03  # tokens per verification
SIGMAS = 4.0

Row = Mapping[str, Any]


def summarise(rows: Iterable[Row]) -> dict[str, Any]:
    """Judge a parity run.

    Args:
        rows: of `parity.jsonl`: the head, then one a prompt, temperature and arm (`engine`, `replay`, `own`).

    Returns:
        plain JSON values: `passed`, `sentence`, and by temperature `tau_engine`, the comparison with each of our arms
        (tau, difference, its interval, acceptance by position), steps that differ, the law.

    Raises:
        InputError: there is no head, or no row of the engine's.
    """
    listed = list(rows)
    head = next((row for row in listed if row["kind"] == "run"), None)
    answers = [row for row in listed if row["kind"] == "answer"]
    if head is None or not answers:
        raise InputError("these are no rows of a parity run", fix="Run `draftloop parity` to its end.")
    temperatures = sorted({row["temperature"] for row in answers})
    parts = {f"{t:g}": _temperature([row for row in answers if row["temperature"] == t], t) for t in temperatures}
    passed = all(part["passed"] for part in parts.values())
    lawful = all(part["law"] is None or part["law"]["holds"] for part in parts.values())
    return {
        "passed": passed,
        "lawful": lawful,
        "sentence": _sentence(parts, passed),
        "engine": head["engine"],
        "draft_sample_method": head["draft_sample_method"],
        "dtype": head["dtype"],
        "max_new_tokens": head["max_new_tokens"],
        "temperatures": parts,
    }


def _temperature(rows: Sequence[Row], temperature: float) -> dict[str, Any]:
    arms: dict[str, list[Row]] = {}
    for row in rows:
        arms.setdefault(row["arm"], []).append(row)
    engine = [_response(row) for row in arms["engine"]]
    measured = acceptance(engine)
    found: dict[str, Any] = {
        "prompts": len(engine),
        "tau_engine": measured.tau_pooled,
        "tau_engine_interval": list(measured.interval),
        "per_position_engine": list(measured.per_position),
        "faults": [{"prompt": row["id"], "what": what} for row in arms["engine"] for what in row["faults"]],
        "law": _law(arms.get("replay", []), temperature),
    }
    for arm in ("replay", "own"):
        if arm in arms:
            found[arm] = _against(engine, arms[arm])
    why = [f"{fault['prompt']}: {fault['what']}" for fault in found["faults"][:1]]
    if "replay" in found:
        steps = [{"prompt": row["id"], **one} for row in arms["replay"] for one in row["differences"]]
        real = [one for one in steps if not one["tie"]]
        found["steps"] = {
            "compared": measured.steps,
            "differ": len(steps),
            "at_ties": len(steps) - len(real),
            "first_difference": real[0] if real else None,
        }
        why += [_step(real[0], len(real), measured.steps)] if real else []
    if "own" in found and temperature == 0:
        parted = [{"prompt": row["id"], **row["parting"]} for row in arms["own"] if row.get("parting")]
        real = [one for one in parted if not one["tie"]]
        found["texts"] = {
            "equal": len(arms["own"]) - len(parted),
            "at_ties": len(parted) - len(real),
            "differ": len(real),
            "first_difference": real[0] if real else None,
        }
        why += [_text(real[0], len(real))] if real else []
    for arm in _judged(found, temperature):
        why += _tau(arm, found[arm])
    found["passed"], found["why"] = not why, why
    return found


def _judged(found: Mapping[str, Any], temperature: float) -> list[str]:
    """Arms whose tau must agree: the replay; our own decoding while it writes the engine's texts, or without a replay.

    Greedy texts that part at a near-tie go on as other texts, and draws are others anyhow: their tau differs by chance.
    """
    arms = [arm for arm in ("replay", "own") if arm in found]
    same_texts = temperature == 0 and not found.get("texts", {}).get("at_ties")
    return arms if same_texts or "replay" not in arms else ["replay"]


def _against(engine: Sequence[Response], rows: Sequence[Row]) -> dict[str, Any]:
    """Ours minus the engine's."""
    ours = [_response(row) for row in rows]
    mine, pair = acceptance(ours), paired(engine, ours)
    low, high = pair.difference_interval
    return {
        "tau": mine.tau_pooled,
        "interval": list(mine.interval),
        "per_position": list(mine.per_position),
        "difference": pair.difference,
        "difference_interval": [low, high],
        "within_interval": low <= 0.0 <= high,
        "close": abs(pair.difference) <= CLOSE,
    }


def _law(rows: Sequence[Row], temperature: float) -> dict[str, Any] | None:
    """Whether the engine's tokens could have been drawn from the target's law."""
    scored = [row["law"] for row in rows if row.get("law") is not None]
    if temperature == 0 or not scored:
        return None
    total, error = math.fsum(s for s, _ in scored), math.sqrt(math.fsum(v for _, v in scored))
    z = total / error if error else 0.0
    return {"sum": total, "standard_error": error, "z": z, "holds": abs(z) <= SIGMAS}


def _response(row: Row) -> Response:
    return Response(row["id"], row["set"], tuple(row["committed"]), tuple(row["accepted"]), row["drafted"])


def _sentence(parts: Mapping[str, Mapping[str, Any]], passed: bool) -> str:
    if passed:
        judged = [part[arm] for t, part in parts.items() for arm in _judged(part, float(t))]
        most = max(abs(one["difference"]) for one in judged)
        said = f"Parity holds: the engine accepts what our decoding accepts (tau within {most:.3f})"
    else:
        temperature, part = next((t, p) for t, p in parts.items() if not p["passed"])
        said = f"NO PARITY at temperature {temperature}: {part['why'][0]}"
    unlawful = [(t, p["law"]) for t, p in parts.items() if p["law"] and not p["law"]["holds"]]
    for temperature, law in unlawful[:1]:
        said += (
            f"; and at temperature {temperature} the engine does not sample the target's law"
            f" ({law['z']:+.1f} standard errors): its output is not lossless"
        )
    return said + "."


def _tau(arm: str, found: Mapping[str, Any]) -> list[str]:
    low, high = found["difference_interval"]
    if found["close"] and found["within_interval"]:
        return []
    name = {"replay": "our drafter on the engine's text", "own": "our own decoding"}[arm]
    return [f"tau of {name} differs from the engine's by {found['difference']:+.3f} [{low:+.3f}, {high:+.3f}]"]


def _step(one: Row, count: int, steps: int) -> str:
    return (
        f"{count} of {steps} verifications differ, first in {one['prompt']}, verification {one['step'] + 1}, token"
        f" {one['position'] + 1}: the engine accepts {one['engine']} drafts, ours would have {one['ours']} (we draft"
        f" {one['drafted']}, {one['committed']} stands there; the drafter's logits are {one['drafter_gap']:.2g} apart,"
        f" no near-tie)"
    )


def _text(one: Row, count: int) -> str:
    return (
        f"{count} greedy texts differ, first in {one['prompt']} at token {one['position'] + 1} ({one['ours']} here,"
        f" {one['engine']} there), where the target's logits are {one['gap']:.2g} apart, no near-tie"
        if one["gap"] is not None
        else f"{count} greedy texts differ, first in {one['prompt']}, where one ends at token {one['position'] + 1}"
    )
