"""The lossless audit: greedy speculative output against plain output, token for token, in float32.

Differences are looked into, not waved through: where the two texts part, the logits of both tokens are held against
the largest; where both lie within `GAP` of it, rounding may decide either way, and the near-tie is counted. Any other
token is a fault, however close the two largest are. Temperatures above 0
are proved by enumeration on toy vocabularies in the tests, not here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
        gap: how far the less likely of the two lies below the largest logit there; None where one text had ended.
    """

    prompt: str
    position: int
    plain: int
    speculative: int
    gap: float | None


@dataclass(frozen=True)
class AuditArm:
    """One drafter's outcome.

    Attributes:
        equal: token for token, near-ties aside.
        tokens: of all responses.
        steps: verifications.
        accepted: drafts that they committed.
        at_ties: responses that part from the plain ones at a near-tie.
        first_difference: the first that is no near-tie.
    """

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
    confidence: float | None = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Audit:
    """Decode the requests plainly and with each drafter, and compare.

    Args:
        target: a `Target` in float32.
        drafters: (name, bound drafter in float32).
        requests: (prompt id, request).
        max_new_tokens: length limit.
        batch_size: rows of speculative decoding; plain decoding runs at the same.
        confidence: as in `Options`; shortens what is verified, and must not change a token.
        advance: called with (decodes done, decodes in all).
    """
    options = Options(max_new_tokens, batch_size=batch_size, confidence=confidence)
    wanted = [request for _, request in requests]
    plain = decode(target, None, wanted, options)
    gaps = [_gaps(target, request.ids, made.tokens) for request, made in zip(wanted, plain, strict=True)]
    advance(1, 1 + len(drafters))
    arms = []
    for n, (name, drafter) in enumerate(drafters):
        made = decode(target, drafter, wanted, options)
        parted = []
        for (prompt, request), want, got in zip(requests, plain, made, strict=True):
            if got.tokens == want.tokens and got.finished == want.finished:
                continue
            both = zip(want.tokens, got.tokens, strict=False)
            place = next((i for i, (a, b) in enumerate(both) if a != b), min(len(want.tokens), len(got.tokens)))
            a, b = (line[place] if place < len(line) else -1 for line in (want.tokens, got.tokens))
            gap = _gap(target, [*request.ids, *want.tokens[:place]], a, b) if a >= 0 <= b else None
            parted.append(Difference(prompt, place, a, b, gap))
        real = [d for d in parted if d.gap is None or d.gap >= GAP]
        steps = [step for one in made for step in one.steps]
        arms.append(
            AuditArm(
                name,
                not real,
                sum(len(one.tokens) for one in made),
                len(steps),
                sum(min(step.accepted, step.committed) for step in steps),
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
    rows = _rows(target, [*prompt, *response][:-1])[len(prompt) - 1 :]
    top = torch.cat([target.readout.logits(part).topk(2).values for part in rows.split(256)])
    return (top[:, 0] - top[:, 1]).tolist()


def _gap(target: Any, text: Sequence[int], a: int, b: int) -> float:
    """How far the less likely of two next tokens lies below the largest logit."""
    logits = target.readout.logits(_rows(target, text)[-1:])[0]
    return float(logits.max() - torch.minimum(logits[a], logits[b]))


def _rows(target: Any, text: Sequence[int]) -> Tensor:
    """[T, H] hidden rows of a text, in one forward that shares nothing with decoding's cache."""
    ids = torch.tensor(text, device=target.device)
    none = ids.new_zeros(0)
    tree, _ = hang_branches([ids], none, none, none.view(0, 1), none)
    hidden: Tensor = target.score(tree).hidden[0]
    return hidden
