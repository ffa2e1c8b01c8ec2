"""Acceptance length (tau) and acceptance by position, from the records of verify steps.

Knows nothing of models, prompts or files: it reads how many tokens each verification committed and how many drafts it
accepted. Two definitions are in use and both are reported: pooled (over all steps, as DeepSpec and the engines count)
and mean (over responses of their own mean, as the DFlash benchmark counts).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftloop.core.errors import DraftloopError, InputError

Interval = tuple[float, float]


def shown(interval: Interval, responses: int) -> Interval | None:
    """An interval as tables and JSON have it: none of a single response, which resampling cannot vary."""
    return interval if responses > 1 else None


_LEVELS = (0.025, 0.975)
_CHUNK = 1 << 22  # resampled indices held at a time (32 MiB)


@dataclass(frozen=True)
class Response:
    """The verify steps of one response; the prefill token belongs to none of them.

    A step is *cut* when end-of-sequence or the length limit fell among its accepted drafts: then all committed tokens
    are drafts (committed = accepted) and what verification thought of later positions is not recorded. Every other
    step ends with the target's own bonus or correction token (committed = accepted + 1).

    Args:
        id: of the prompt (and sample), unique within its set.
        set: prompt set that it belongs to.
        committed: tokens committed per step, after the cut; each >= 1.
        accepted: drafted tokens accepted per step, after the cut; each 0..drafted.
        drafted: K, tokens drafted per step.
        lengths: drafts verified per step, each 0..drafted; None = all. A step that verified fewer says nothing of the
            others.

    Raises:
        DraftloopError: the counts contradict each other.
    """

    id: str
    set: str
    committed: tuple[int, ...]
    accepted: tuple[int, ...]
    drafted: int
    lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        where = f"response {self.id!r}"
        if len(self.committed) != len(self.accepted):
            counts = f"{len(self.committed)} committed and {len(self.accepted)} accepted"
            raise DraftloopError(f"{counts} counts do not describe the same steps", where=where)
        for step, (committed, accepted) in enumerate(zip(self.committed, self.accepted, strict=True)):
            if not (0 <= accepted <= self.drafted and committed >= 1 and committed - accepted in (0, 1)):
                what = f"step {step} commits {committed} tokens with {accepted} of {self.drafted} drafts accepted"
                raise DraftloopError(what, where=where, fix="A step commits its accepted drafts and at most one more.")
        if self.lengths is not None and (
            len(self.lengths) != len(self.accepted)
            or any(not a <= n <= self.drafted for a, n in zip(self.accepted, self.lengths, strict=True))
        ):
            raise DraftloopError("a step accepts more drafts than it verified, or verifies more than K", where=where)

    def to_json(self) -> dict[str, Any]:
        """Its fields as a raw row has them; `lengths` only where they say something."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def tally(self) -> Tally:
        """Its steps, counted."""
        survivors, refusals = [0.0] * self.drafted, [0.0] * self.drafted
        lengths = self.lengths if self.lengths is not None else (self.drafted,) * len(self.accepted)
        for committed, accepted, verified in zip(self.committed, self.accepted, lengths, strict=True):
            for k in range(accepted):
                survivors[k] += 1
            if committed == accepted + 1 and accepted < verified:  # it says no at position accepted + 1
                refusals[accepted] += 1
        tokens, steps = sum(self.committed), len(self.committed)
        tau = tokens / steps if steps else 0.0
        return Tally(
            self.id, self.set, tokens, float(steps), tau, tuple(survivors), tuple(refusals), float(sum(lengths))
        )


@dataclass(frozen=True)
class Tally:
    """The verify steps of one response in sums: counted (real decoding) or expected (the offline evaluation).

    Attributes:
        id: of the prompt (and sample), unique within its set.
        set: prompt set that it belongs to.
        tokens: committed by the steps; the prefill token is not among them.
        steps: verify steps.
        tau: tokens / steps of this response (expected: the mean of that quotient, not the quotient of the means).
        survivors: [K] steps that accepted their drafts 1..k.
        refusals: [K] steps that accepted 1..k-1 and rejected the k-th.
        verified: drafts that the steps verified.
    """

    id: str
    set: str
    tokens: int
    steps: float
    tau: float
    survivors: tuple[float, ...]
    refusals: tuple[float, ...]
    verified: float

    def to_json(self) -> dict[str, Any]:
        """Its fields as a raw row has them."""
        return asdict(self)


@dataclass(frozen=True)
class Acceptance:
    """How well a drafter does on some responses.

    Attributes:
        tau_pooled: tokens committed / verify steps, over all steps.
        tau_mean: mean over responses of (tokens committed / verify steps).
        interval: 95 % interval of `tau_pooled`, percentile bootstrap over responses. Of one response it is the point,
            which says nothing: `shown` leaves it out.
        interval_mean: the same of `tau_mean`.
        steps: verify steps; where they are expected, not counted, the nearest whole number.
        responses: responses with at least one verify step; the others are left out.
        per_position: [K] share of steps whose k-th draft was accepted, as vLLM reports it. Where steps were cut it is
            the product-limit estimate (Kaplan and Meier 1958), prod_{j<=k} of `conditional`, which without cut steps is
            that very share. Counting unseen positions as rejected, or dropping the cut steps, would bias it downwards,
            because only steps that had accepted everything up to the cut are cut. None where nothing was seen. Where
            confidence shortened the steps it is of the ones that were left long enough, which are the likelier ones.
        conditional: [K] alpha_k, share accepted among the steps whose drafts 1..k-1 were accepted and whose k-th draft
            was drafted and not cut off; None where there is no such step.
        sets: the same by prompt set, in order of name; empty in the parts.
        verified: drafts verified a step, K unless confidence shortened them; None in older records.
    """

    tau_pooled: float
    tau_mean: float
    interval: Interval
    interval_mean: Interval
    steps: int
    responses: int
    per_position: tuple[float | None, ...]
    conditional: tuple[float | None, ...]
    sets: dict[str, Acceptance] = field(default_factory=dict)
    verified: float | None = None

    def saved(self, drafted: int) -> float | None:
        """Drafts not verified for each token committed, against verifying all `drafted` at every step."""
        return None if self.verified is None else (drafted - self.verified) / self.tau_pooled

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; None stays null (as the intervals of one response are), and there is no NaN."""
        return {
            "tau_pooled": self.tau_pooled,
            "tau_mean": self.tau_mean,
            "interval": _listed(self.interval, self.responses),
            "interval_mean": _listed(self.interval_mean, self.responses),
            "steps": self.steps,
            "responses": self.responses,
            "per_position": list(self.per_position),
            "conditional": list(self.conditional),
            "sets": {name: part.to_json() for name, part in self.sets.items()},
            "verified": self.verified,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Acceptance:
        """Read what `to_json` wrote.

        Raises:
            InputError: a key is missing or has the wrong shape.
        """
        try:
            return cls(
                tau_pooled=float(value["tau_pooled"]),
                tau_mean=float(value["tau_mean"]),
                interval=_interval(value["interval"], value["tau_pooled"]),
                interval_mean=_interval(value["interval_mean"], value["tau_mean"]),
                steps=int(value["steps"]),
                responses=int(value["responses"]),
                per_position=_shares(value["per_position"]),
                conditional=_shares(value["conditional"]),
                sets={name: cls.from_json(part) for name, part in value["sets"].items()},
                verified=None if value.get("verified") is None else float(value["verified"]),
            )
        except KeyError as error:
            raise InputError(f"key {error.args[0]!r} is missing", where="acceptance record") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise InputError(f"a value has the wrong shape ({error})", where="acceptance record") from error


@dataclass(frozen=True)
class Paired:
    """Arm b against arm a on the same prompts.

    Attributes:
        ratio: tau_pooled of b / tau_pooled of a.
        interval: its 95 % interval, paired percentile bootstrap over prompts; of one pair the point (see `shown`).
        difference: tau_pooled of b - tau_pooled of a, in tokens per verification.
        difference_interval: its 95 % interval, from the same resamples.
        responses: pairs compared.
        left_out: pairs left out because one arm made no verify step.
    """

    ratio: float
    interval: Interval
    difference: float
    difference_interval: Interval
    responses: int
    left_out: int

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, for `gain` in summary.json."""
        return {
            "ratio": self.ratio,
            "interval": _listed(self.interval, self.responses),
            "difference": self.difference,
            "difference_interval": _listed(self.difference_interval, self.responses),
            "responses": self.responses,
            "left_out": self.left_out,
        }


def acceptance(responses: Sequence[Response | Tally], *, resamples: int = 2000, seed: int = 0) -> Acceptance:
    """Measure the acceptance length of `responses`, as a whole and by prompt set.

    The result, intervals included, depends neither on the order of the responses nor, for a set, on the other sets.

    Args:
        responses: in any order.
        resamples: bootstrap resamples, >= 1.
        seed: of the bootstrap.

    Raises:
        InputError: no response has a verify step.
    """
    tallies = [_tally(response) for response in responses]
    walked = sorted((t for t in tallies if t.steps), key=lambda t: (t.set, t.id, t.tokens, t.steps, t.survivors))
    if not walked:
        raise InputError(
            f"none of {len(responses)} responses has a verify step, so there is no acceptance length",
            where="evaluation",
            fix="Use more prompts or a larger max_new_tokens: the first token comes from the prefill.",
        )
    sets: dict[str, list[Tally]] = {}
    for response in walked:
        sets.setdefault(response.set, []).append(response)
    parts = {name: _acceptance(part, {}, resamples, seed) for name, part in sets.items()}
    return _acceptance(walked, parts, resamples, seed)


def paired(
    a: Sequence[Response | Tally], b: Sequence[Response | Tally], *, resamples: int = 2000, seed: int = 0
) -> Paired:
    """Compare two drafters: ratio and difference of tau_pooled, b over a.

    Args:
        a: the responses of one drafter, one per prompt id and set.
        b: those of another, to the same prompts; in any order.
        resamples: bootstrap resamples, >= 1.
        seed: of the bootstrap.

    Raises:
        InputError: the prompts are not the same, an id occurs twice, or no pair has verify steps in both arms.
    """
    by_key_a, by_key_b = _by_key(a), _by_key(b)
    alone = sorted(by_key_a.keys() ^ by_key_b.keys())
    if alone:
        raise InputError(
            f"{len(alone)} prompts were answered in one arm only (first: {alone[0][1]!r} of set {alone[0][0]!r})",
            where="paired comparison",
            fix="Evaluate both drafters on the same prompts.",
        )
    keys = [key for key in sorted(by_key_a) if by_key_a[key].steps and by_key_b[key].steps]
    if not keys:
        raise InputError(
            f"none of {len(by_key_a)} pairs has a verify step in both arms",
            where="paired comparison",
            fix="Use more prompts or a larger max_new_tokens: the first token comes from the prefill.",
        )
    tokens_a, steps_a = _totals([by_key_a[key] for key in keys])
    tokens_b, steps_b = _totals([by_key_b[key] for key in keys])
    before, after = tokens_a.sum() / steps_a.sum(), tokens_b.sum() / steps_b.sum()
    taus_a, taus_b = [], []
    for index in _resampled(len(keys), resamples, seed):
        taus_a.append(tokens_a[index].sum(-1) / steps_a[index].sum(-1))
        taus_b.append(tokens_b[index].sum(-1) / steps_b[index].sum(-1))
    drawn_a, drawn_b = np.concatenate(taus_a), np.concatenate(taus_b)
    return Paired(
        ratio=float(after / before),
        interval=_quantiles(drawn_b / drawn_a),
        difference=float(after - before),
        difference_interval=_quantiles(drawn_b - drawn_a),
        responses=len(keys),
        left_out=len(by_key_a) - len(keys),
    )


def _acceptance(walked: Sequence[Tally], sets: dict[str, Acceptance], resamples: int, seed: int) -> Acceptance:
    """Of responses that all have a step."""
    tokens, steps = _totals(walked)
    means = np.array([tally.tau for tally in walked])
    pooled, mean = [], []
    for index in _resampled(len(walked), resamples, seed):
        pooled.append(tokens[index].sum(-1) / steps[index].sum(-1))
        mean.append(means[index].mean(-1))
    per_position, conditional = _by_position(walked)
    return Acceptance(
        tau_pooled=float(tokens.sum() / steps.sum()),
        tau_mean=float(means.mean()),
        interval=_quantiles(np.concatenate(pooled)),
        interval_mean=_quantiles(np.concatenate(mean)),
        steps=round(float(steps.sum())),
        responses=len(walked),
        per_position=per_position,
        conditional=conditional,
        sets=sets,
        verified=float(sum(tally.verified for tally in walked) / steps.sum()),
    )


def _tally(response: Response | Tally) -> Tally:
    return response.tally if isinstance(response, Response) else response


def _totals(walked: Sequence[Tally]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Tokens committed and verify steps of each response: two float64 [n], whose sums are exact where counted."""
    return np.array([float(t.tokens) for t in walked]), np.array([t.steps for t in walked])


def _by_position(walked: Sequence[Tally]) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
    """Survival to k and alpha_k, k = 1..K; a step leaves the count where it was cut or its drafts ended."""
    survivors, refusals = np.zeros((2, max(len(t.survivors) for t in walked)))
    for tally in walked:
        survivors[: len(tally.survivors)] += tally.survivors
        refusals[: len(tally.refusals)] += tally.refusals
    per_position: list[float | None] = []
    conditional: list[float | None] = []
    share: float | None = 1.0
    for yes, no in zip(survivors.tolist(), refusals.tolist(), strict=True):
        alpha = yes / (yes + no) if yes + no else None
        if share:  # once 0 it stays 0, once unknown it stays unknown
            share = share * alpha if alpha is not None else None
        conditional.append(alpha)
        per_position.append(share)
    return tuple(per_position), tuple(conditional)


def _resampled(responses: int, resamples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Index arrays [r, responses], drawn with replacement, that add up to `resamples` rows."""
    generator = np.random.default_rng(seed)
    rows = max(1, _CHUNK // responses)
    for start in range(0, resamples, rows):
        yield generator.integers(responses, size=(min(rows, resamples - start), responses))


def _quantiles(values: NDArray[np.float64]) -> Interval:
    low, high = np.quantile(values, _LEVELS).tolist()
    return low, high


def _by_key(responses: Sequence[Response | Tally]) -> dict[tuple[str, str], Tally]:
    out: dict[tuple[str, str], Tally] = {}
    for tally in map(_tally, responses):
        key = (tally.set, tally.id)
        if key in out:
            what = f"prompt {tally.id!r} of set {tally.set!r} occurs twice in one arm"
            raise InputError(what, where="paired comparison", fix="Give each prompt an id of its own.")
        out[key] = tally
    return out


def _listed(interval: Interval, responses: int) -> list[float] | None:
    return list(interval) if shown(interval, responses) else None


def _interval(value: Sequence[float] | None, point: float) -> Interval:
    low, high = (point, point) if value is None else value
    return float(low), float(high)


def _shares(value: Sequence[float | None]) -> tuple[float | None, ...]:
    return tuple(None if share is None else float(share) for share in value)
