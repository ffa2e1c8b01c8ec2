"""The lossless audit: greedy speculative output against plain output, token for token, in float32.

Differences are looked into, not waved through: where the two texts part, the target's two largest logits are
compared; a gap below `GAP` is a near-tie, which rounding may decide either way, and is counted. Temperatures above 0
are proved by enumeration on toy vocabularies in the tests, not here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftloop.core.tree import hang_branches
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options, Request

GAP = 1e-4


@dataclass(frozen=True)
class Difference:
    """Where a speculative response first leaves the plain one.

    Attributes:
        prompt: id of the prompt.
        position: index in the response.
        plain: token of plain decoding, -1 if it had ended.
        speculative: token of speculative decoding, -1 if it had ended.
        gap: difference of the target's two largest logits there; None where one text had ended.
    """

    prompt: str
    position: int
    plain: int
    speculative: int
    gap: float | None


@dataclass(frozen=True)
class AuditArm:
    """One drafter's outcome: equal token for token (near-ties aside), and its first difference that is none."""

    name: str
    equal: bool
    tokens: int
    steps: int
    accepted: int
    at_ties: int
    first_difference: Difference | None


@dataclass(frozen=True)
class Audit:
    """The whole outcome.

    Attributes:
        near_ties: response tokens whose two largest logits lie closer than `gap`.
    """

    dtype: str
    prompts: int
    tokens: int
    equal: bool
    near_ties: int
    gap: float
    arms: tuple[AuditArm, ...]


def audit(
    target: Any,
    drafters: Sequence[tuple[str, Any]],
    requests: Sequence[tuple[str, Request]],
    *,
    max_new_tokens: int,
    batch_size: int = 8,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Audit:
    """Decode the requests plainly and with each drafter, and compare.

    Args:
        target: a `Target` in float32.
        drafters: (name, bound drafter in float32).
        requests: (prompt id, request).
        max_new_tokens: length limit.
        batch_size: rows of speculative decoding; plain decoding runs at the same.
        advance: called with (decodes done, decodes in all).
    """
    options = Options(max_new_tokens, batch_size=batch_size)
    wanted = [request for _, request in requests]
    plain = decode(target, None, wanted, options)
    gaps = [_gaps(target, request.ids, made.tokens) for request, made in zip(wanted, plain, strict=True)]
    advance(1, 1 + len(drafters))
    arms = []
    for n, (name, drafter) in enumerate(drafters):
        made = decode(target, drafter, wanted, options)
        parted = []
        for (prompt, _), want, got, gap in zip(requests, plain, made, gaps, strict=True):
            if got.tokens == want.tokens and got.finished == want.finished:
                continue
            both = zip(want.tokens, got.tokens, strict=False)
            place = next((i for i, (a, b) in enumerate(both) if a != b), min(len(want.tokens), len(got.tokens)))
            a, b = (line[place] if place < len(line) else -1 for line in (want.tokens, got.tokens))
            parted.append(Difference(prompt, place, a, b, gap[place] if a >= 0 <= b else None))
        real = [d for d in parted if d.gap is None or d.gap >= GAP]
        steps = [step for one in made for step in one.steps]
        arms.append(
            AuditArm(
                name,
                not real,
                sum(len(one.tokens) for one in made),
                len(steps),
                sum(step.accepted for step in steps),
                len(parted) - len(real),
                real[0] if real else None,
            )
        )
        advance(2 + n, 1 + len(drafters))
    return Audit(
        str(target.dtype).removeprefix("torch."),
        len(requests),
        sum(len(one.tokens) for one in plain),
        all(arm.equal for arm in arms),
        sum(gap < GAP for line in gaps for gap in line),
        GAP,
        tuple(arms),
    )


def _gaps(target: Any, prompt: Sequence[int], response: Sequence[int]) -> list[float]:
    """Difference of the two largest logits at every response token."""
    text = torch.tensor([*prompt, *response][:-1], device=target.device)
    none = text.new_zeros(0)
    tree, _ = hang_branches([text], none, none, none.view(0, 1), none)
    rows = target.score(tree).hidden[0, len(prompt) - 1 :]
    top = torch.cat([target.readout.logits(part).topk(2).values for part in rows.split(256)])
    return (top[:, 0] - top[:, 1]).tolist()
