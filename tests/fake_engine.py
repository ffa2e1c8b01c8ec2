"""An engine made of our own decoding: what the real worker would write, for the comparison to read."""

from __future__ import annotations

from draftloop.core.law import Sampling
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options, Request
from draftloop.engines.compare import Answer


def fake_answers(target, drafter, asked, *, temperature=0.0, length=22, seed=0) -> list[Answer]:
    """Answer (id, prompt) pairs as an engine at batch 1 with greedy drafts would."""
    options = Options(length, Sampling(temperature), seed=seed, batch_size=1)
    made = decode(target, drafter, [Request(ids, i) for i, (_, ids) in enumerate(asked)], options)
    return [
        Answer(
            name, "toy", tuple(ids), tuple(one.tokens), (1, *(step.committed for step in one.steps)), len(one.steps),
            sum(step.accepted for step in one.steps), one.finished,
        )
        for (name, ids), one in zip(asked, made, strict=True)
    ]  # fmt: skip
