"""Measured decoding speed: speculative against plain, in the same run, on the same prompts.

Prefill is not counted: it costs both the same. Round cost is the time of a speculative round over that of a plain step;
it is also the acceptance length at which speculation starts to pay (break-even).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftloop.core.draws import key_of
from draftloop.data.trunk import Trunk
from draftloop.decode.loop import Decoder
from draftloop.decode.trace import Generation, Options, Request
from draftloop.evaluate.tau import Acceptance, Response, acceptance
from draftloop.evaluate.walk import responses_of


@dataclass(frozen=True)
class Timed:
    """One arm's decoding of all prompts.

    Attributes:
        seconds: time in rounds, prefill excluded.
        rounds: target forwards after prefill.
        tokens: tokens committed in those rounds.
    """

    name: str
    seconds: float
    rounds: int
    tokens: int
    generations: list[Generation]

    @property
    def tokens_per_s(self) -> float:
        """Tokens committed per second of rounds."""
        return self.tokens / self.seconds

    @property
    def ms_per_round(self) -> float:
        """Milliseconds a round (a token, in plain decoding)."""
        return 1e3 * self.seconds / max(self.rounds, 1)


@dataclass(frozen=True)
class SpeedArm:
    """Speculative decoding with one drafter against plain decoding; `responses` are what was counted, a prompt each."""

    name: str
    acceptance: Acceptance
    tokens_per_s: float
    ms_per_round: float
    round_cost: float
    speedup: float
    responses: list[Response]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The raw rows."""
        return [{"kind": "decode", "arm": self.name, **response.to_json()} for response in self.responses]

    def to_json(self) -> dict[str, Any]:
        """The arm as summary.json wants it."""
        return {
            "name": self.name,
            "tau_pooled": self.acceptance.tau_pooled,
            "tokens_per_s": self.tokens_per_s,
            "ms_per_round": self.ms_per_round,
            "round_cost": self.round_cost,
            "break_even_tau": self.round_cost,
            "speedup": self.speedup,
            "sets": {name: part.to_json() for name, part in self.acceptance.sets.items()},
        }


FEW = 4  # prompts; below it a neighbour's work on the machine decides which arm wins


def doubt(prompts: int, round_costs: Iterable[float]) -> str:
    """What keeps measured speeds from being believed, in a sentence or two; empty if nothing does.

    Args:
        prompts: how many were decoded by each arm.
        round_costs: of the arms that draft.
    """
    told = []
    if prompts < FEW:
        told.append(f"Speeds from {prompts} prompt{'s' if prompts > 1 else ''} are noise: decode {FEW} or more.")
    if any(cost < 1.0 for cost in round_costs):
        told.append("A round cost below 1 (*) cannot be: measurement noise, and so is the speed-up beside it.")
    return " ".join(told)


def cost_text(round_cost: float) -> str:
    """A round's cost in plain steps; `*` marks one that cannot be."""
    return f"{round_cost:.2f}{'*' if round_cost < 1.0 else ''}"


def spread(trunks: Sequence[Trunk], count: int) -> list[tuple[str, str, Request]]:
    """The prompts of so many trunks, an equal share of every set, as `compare` takes them."""
    sets: dict[str, list[tuple[str, str, Request]]] = {}
    for trunk in trunks:
        sets.setdefault(trunk.set, []).append((trunk.id, trunk.set, Request(trunk.prompt, key_of(trunk.id))))
    longest = max(map(len, sets.values()), default=0)
    turns = [group[i] for i in range(longest) for group in sets.values() if i < len(group)]
    return turns[:count]


def compare(
    target: Any,
    drafters: Sequence[tuple[str, Any]],
    requests: Sequence[tuple[str, str, Request]],
    options: Options,
    *,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Timed, list[SpeedArm]]:
    """Decode every prompt plainly and with each drafter, arm beside arm, so that a busy machine slows all alike.

    Args:
        target: a `Target`.
        drafters: (name, bound drafter for decoding).
        requests: (id, set, request).
        options: `batch_size` prompts are decoded together.
        advance: called with (prompts x arms done, in all).
    """
    arms: list[tuple[str, Any]] = [("plain", None), *drafters]
    total = [Timed(name, 0.0, 0, 0, []) for name, _ in arms]  # by place: a stage may be called "plain" too
    decoders = [Decoder(target, drafter, options, [request for _, _, request in requests]) for _, drafter in arms]
    for decoder in decoders:
        decoder.warm_up()
    for start in range(0, len(requests), options.batch_size):
        batch = [request for _, _, request in requests[start : start + options.batch_size]]
        for n, (name, _) in enumerate(arms):
            one, old = _timed(name, target, decoders[n], batch), total[n]
            total[n] = Timed(
                name,
                old.seconds + one.seconds,
                old.rounds + one.rounds,
                old.tokens + one.tokens,
                old.generations + one.generations,
            )
            advance(start * len(arms) + (n + 1) * len(batch), len(requests) * len(arms))
    for decoder in decoders:
        decoder.close()
    plain = total[0]
    names = [(prompt, group) for prompt, group, _ in requests]
    out = []
    for (name, drafter), timed in zip(drafters, total[1:], strict=True):
        responses = responses_of(timed.generations, names, drafter.spec.drafted)
        out.append(
            SpeedArm(
                name,
                acceptance(responses),
                timed.tokens_per_s,
                timed.ms_per_round,
                timed.ms_per_round / plain.ms_per_round,
                timed.tokens_per_s / plain.tokens_per_s,
                responses,
            )
        )
    return plain, out


def _timed(name: str, target: Any, decoder: Decoder, requests: list[Request]) -> Timed:
    results = [Generation(request.ids) for request in requests]
    running = decoder.rounds(requests, results)
    next(running)  # prefill and the first token
    _settle(target)
    start = time.perf_counter()
    for _ in running:
        pass
    _settle(target)
    seconds = time.perf_counter() - start
    tokens = sum(len(made.tokens) - 1 for made in results)
    count = max(len(made.steps) for made in results)
    return Timed(name, max(seconds, 1e-9), count, tokens, results)  # all ended in prefill: no round, no token


def _settle(target: Any) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
