"""Drafters side by side: tau of each on the same answers (offline, exact), speed of each beside one plain decoding.

Knows drafters by name and as what is decoded with; plain decoding may be one of them. Does not know where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftloop.core.errors import InputError
from draftloop.core.files import fingerprint
from draftloop.core.law import Sampling
from draftloop.core.weights import tensors_fingerprint
from draftloop.data.prompts import read_prompts
from draftloop.data.trunk import Trunk
from draftloop.decode.trace import Options, Request
from draftloop.drafter.build import for_decoding
from draftloop.evaluate import PLAIN, speed
from draftloop.evaluate.answers import evaluation_trunks
from draftloop.evaluate.offline import offline
from draftloop.evaluate.tau import Acceptance, Paired, Tally, acceptance, paired

ALL = "all"  # of gains: every prompt set together

Advance = Callable[[int, int], None]
Report = Callable[[str, str], AbstractContextManager[Advance]]  # (title, unit) -> a context


def silent(title: str, unit: str) -> AbstractContextManager[Advance]:
    """Report nothing."""
    return nullcontext(lambda done, total: None)


@dataclass(frozen=True)
class Entrant:
    """One drafter of a comparison.

    Attributes:
        name: as the user named it.
        drafter: bound, as it is served; None = plain decoding.
        parameters: its own; embedding and readout are the target's.
        block_size: B = anchor slot + K drafted slots; 1 = nothing is drafted.
        made_for: what its checkpoint says of the target that it was made for.
        identity: the same for the same drafter, wherever it lies.
    """

    name: str
    drafter: Any | None
    parameters: int
    block_size: int
    made_for: dict[str, Any]
    identity: str

    def to_json(self) -> dict[str, Any]:
        """All but the drafter itself."""
        told = {name: getattr(self, name) for name in ("parameters", "block_size", "made_for", "identity")}
        return {"drafter": self.name, **told}


@dataclass(frozen=True)
class Standing:
    """How one entrant does at one temperature.

    Attributes:
        acceptance: tau, as a whole and by prompt set.
        gains: against the first entrant, by prompt set and `all`; empty for the first.
        speed: tokens_per_s, ms_per_round, round_cost, speedup, and tau_pooled and prompts of what was decoded for it;
            None where nothing was.
    """

    name: str
    temperature: float
    acceptance: Acceptance
    gains: dict[str, Paired]
    speed: dict[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "drafter": self.name,
            "temperature": self.temperature,
            "acceptance": self.acceptance.to_json(),
            "against_first": {name: gain.to_json() for name, gain in self.gains.items()},
            "speed": self.speed,
        }


@dataclass(frozen=True)
class Contest:
    """All entrants at one temperature, in order; and the speed of the plain decoding that they share, if measured."""

    temperature: float
    standings: tuple[Standing, ...]
    plain: dict[str, Any] | None


@dataclass(frozen=True)
class Comparison:
    """What was compared, on what, and how each did at each temperature."""

    target: dict[str, Any]
    settings: dict[str, Any]
    entrants: tuple[Entrant, ...]
    contests: tuple[Contest, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; each row names its drafter."""
        return {
            "how": "compare",
            "target": self.target,
            "settings": self.settings,
            "drafters": [one.to_json() for one in self.entrants],
            "plain": [{"temperature": one.temperature, "speed": one.plain} for one in self.contests],
            "rows": [standing.to_json() for one in self.contests for standing in one.standings],
        }


def compare(
    target: Any,
    drafters: Mapping[str, Any | None],
    prompts: Sequence[str],
    *,
    folder: Path,
    temperatures: Sequence[float] = (0.0,),
    top_k: int = 0,
    top_p: float = 1.0,
    rule: Literal["match", "ratio"] = "match",
    max_new_tokens: int = 128,
    decode_prompts: int = 8,
    batch_size: int = 1,
    limit: int | None = None,
    seed: int = 0,
    template_kwargs: Mapping[str, Any] | None = None,
    write: Callable[[dict[str, Any]], None] = lambda row: None,
    report: Report = silent,
) -> Comparison:
    """Compare drafters on the same prompts: tau by set, paired with the first one; speed beside one plain decoding.

    Args:
        target: from `load_target`.
        drafters: by name, bound to the target; None = plain decoding.
        prompts: prompt files (or `builtin:test`).
        folder: where the target's answers are kept.
        temperatures: of the target; tau is exact given its answers at each.
        top_k: 0 = all.
        top_p: 1 = all.
        rule: how drafts are verified at a temperature above 0.
        max_new_tokens: length limit.
        decode_prompts: prompts decoded for real at each temperature, for speed; 0 = none.
        batch_size: of real decoding.
        limit: use at most this many prompts.
        seed: of the keyed draws.
        template_kwargs: passed to the chat template.
        write: takes raw rows as they are measured; each names its drafter.
        report: (title, unit) -> a context that yields a function of (done, in all).

    Raises:
        InputError: fewer than two drafters, one of them twice, or prompts that cannot be used.
    """
    entrants = [
        entrant(name, None if drafter is None else for_decoding(drafter, target)) for name, drafter in drafters.items()
    ]
    check_entrants(entrants)
    read = read_prompts(list(prompts), Path("."), limit)
    contests = []
    for temperature in temperatures:
        options = Options(max_new_tokens, Sampling(temperature, top_k, top_p), rule, seed=seed, batch_size=batch_size)
        at = f" at temperature {temperature:g}"
        with report(f"answer{at}", "responses") as advance:
            trunks = evaluation_trunks(
                target,
                read,
                prompts,
                folder,
                max_new_tokens=max_new_tokens,
                sampling=options.sampling,
                seed=seed,
                template_kwargs=template_kwargs,
                advance=advance,
            )
        with report(f"tau{at}", "answers") as walking, report(f"speed{at}", "responses") as decoding:
            contests.append(
                side_by_side(
                    target,
                    entrants,
                    trunks,
                    options,
                    decode_prompts=decode_prompts,
                    write=write,
                    walking=walking,
                    decoding=decoding,
                )
            )
    kind = str(target.dtype).removeprefix("torch.")
    settings = {"prompts": [Path(name).name for name in prompts], "responses": len(read), "rule": rule, "seed": seed}
    settings |= {"temperatures": list(temperatures), "top_k": top_k, "top_p": top_p, "batch_size": batch_size}
    settings |= {"max_new_tokens": max_new_tokens, "decode_prompts": decode_prompts}
    told = {"name": target.name, "fingerprint": target.fingerprint, "dtype": kind}
    return Comparison(told, settings, tuple(entrants), tuple(contests))


def tail(name: str, width: int) -> str:
    """Cut the front of a name, for drafters differ in the last words of their paths."""
    return name if len(name) <= width else f"…{name[1 - width :]}"


def entrant(name: str, drafter: Any | None) -> Entrant:
    """Describe a drafter, of whatever family; None = plain decoding."""
    if drafter is None:
        return Entrant(name, None, 0, 1, {}, PLAIN)
    tensors = drafter.state_dict() if hasattr(drafter, "state_dict") else {}
    parameters = sum(p.numel() for p in drafter.parameters()) if hasattr(drafter, "parameters") else 0
    spec = drafter.spec
    shape = {key: value for key, value in vars(spec).items() if key != "made_for"}
    identity = fingerprint(type(drafter).__name__, repr(sorted(shape.items())), tensors_fingerprint(tensors))
    return Entrant(name, drafter, parameters, spec.block_size, dict(getattr(spec, "made_for", {})), identity)


def check_entrants(entrants: Sequence[Entrant]) -> None:
    """Refuse to compare a drafter with itself.

    Raises:
        InputError: two are the same, wherever they lie; or there are fewer than two.
    """
    if len(entrants) < 2:
        raise InputError(
            "a comparison takes two drafters or more", where="--compare", fix="Name another; none = plain."
        )
    seen: dict[str, Entrant] = {}
    for one in entrants:
        first = seen.setdefault(one.identity, one)
        if first is not one:
            what = "is named twice" if first.name == one.name else f"is the same drafter as {first.name}"
            raise InputError(f"{one.name} {what}", where="--compare", fix="Name each drafter once.")


def side_by_side(
    target: Any,
    entrants: Sequence[Entrant],
    trunks: Sequence[Trunk],
    options: Options,
    *,
    decode_prompts: int,
    write: Callable[[dict[str, Any]], None] = lambda row: None,
    walking: Advance = lambda done, total: None,
    decoding: Advance = lambda done, total: None,
) -> Contest:
    """Compare drafters at one temperature.

    Args:
        target: a `Target`.
        entrants: checked; the others are compared with the first.
        trunks: the target's answers, drawn with `options.sampling`.
        options: sampling, rule, length and batch of decoding.
        decode_prompts: how many prompts are decoded for real, an equal share of every set; 0 = none.
        write: takes every raw row as soon as it is known; each names its drafter.
        walking: called with (answers done, in all).
        decoding: called with (prompts x arms done, in all).
    """
    temperature = options.sampling.temperature
    drafting = [one for one in entrants if one.drafter is not None]
    found = iter(offline(target, [one.drafter for one in drafting], trunks, options, advance=walking))
    tallies = [next(found) if one.drafter is not None else plain_tallies(trunks) for one in entrants]
    for one, rows in zip(entrants, tallies, strict=True):
        for row in rows:
            write({"kind": "offline", "drafter": one.name, "temperature": temperature, **row.to_json()})
    plain, speeds = _speeds(target, drafting, speed.spread(trunks, decode_prompts), options, write, decoding)
    standings = tuple(
        Standing(
            one.name,
            temperature,
            acceptance(rows),
            _gains(tallies[0], rows) if place else {},
            plain if one.drafter is None else speeds.get(one.name),
        )
        for place, (one, rows) in enumerate(zip(entrants, tallies, strict=True))
    )
    return Contest(temperature, standings, plain)


def plain_tallies(trunks: Sequence[Trunk]) -> list[Tally]:
    """What plain decoding does on these texts: a token a step, the prefill's aside."""
    out = []
    for trunk in trunks:
        steps = len(trunk) - 1 - trunk.first
        out.append(Tally(f"{trunk.id}#{trunk.sample}", trunk.set, steps, float(steps), float(steps > 0), (), (), 0.0))
    return out


def _gains(first: Sequence[Tally], rows: Sequence[Tally]) -> dict[str, Paired]:
    """How one does against the first, over all prompts and by set; sets without a verify step are left out."""
    gains = {ALL: paired(first, rows)}
    names = sorted({row.set for row in rows if row.steps})
    for name in names if len(names) > 1 else ():
        gains[name] = paired([r for r in first if r.set == name], [r for r in rows if r.set == name])
    return gains


def _speeds(
    target: Any,
    drafting: Sequence[Entrant],
    requests: list[tuple[str, str, Request]],
    options: Options,
    write: Callable[[dict[str, Any]], None],
    advance: Advance,
) -> tuple[dict[str, Any] | None, dict[str, dict[str, Any]]]:
    """The speed of plain decoding, and of each drafter by name, on the same prompts in the same minutes."""
    if not requests:
        return None, {}
    timed, arms = speed.compare(
        target, [(one.name, one.drafter) for one in drafting], requests, options, advance=advance
    )
    plain = {"tokens_per_s": timed.tokens_per_s, "ms_per_round": timed.ms_per_round, "tau_pooled": 1.0}
    plain |= {"round_cost": 1.0, "speedup": 1.0, "prompts": len(requests)}
    speeds = {}
    for arm in arms:
        told = arm.to_json()
        speeds[arm.name] = {**{name: told[name] for name in plain if name in told}, "prompts": len(requests)}
        for row in arm.responses:
            here = {"kind": "decode", "drafter": arm.name, "temperature": options.sampling.temperature}
            write({**here, **row.to_json()})
    for name, found in {PLAIN: plain, **speeds}.items():
        write({"kind": "speed", "drafter": name, "temperature": options.sampling.temperature, **found})
    return plain, speeds
