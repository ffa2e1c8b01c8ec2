"""Anchor policies: from which positions of a trunk blocks are taught. Knows no tensors of models and no loss."""

from __future__ import annotations

from typing import Literal

from draftloop.core.draws import Purpose, permutation
from draftloop.core.errors import InputError
from draftloop.supervise.lesson import Lesson

AnchorPolicy = Literal["random", "rollout", "all"]


def choose(policy: AnchorPolicy, lesson: Lesson, count: int, seed: int, visit: int) -> list[int]:
    """Anchors of one lesson, ascending.

    Args:
        policy: `random` draws anew at each visit, without replacement; `rollout` = where verification really began a
            block; `all` = every valid position.
        count: at most this many (`all` ignores it); more recorded blocks than that are sampled.
        seed: of the keyed draws.
        visit: how often this lesson was seen before; part of the key.

    Raises:
        InputError: no valid anchor, because the response is too short.
    """
    if policy == "rollout":
        pool = [step.anchor for step in lesson.steps]
    else:
        pool = lesson.anchors()
    if not pool:
        raise InputError(
            "the response is too short for an anchor (it needs two supervised tokens in a row)",
            where=lesson.trunk.id,
            fix="Leave this prompt out, or allow longer responses.",
        )
    if policy == "all" or len(pool) <= count:
        return pool
    picked = permutation(seed, Purpose.ANCHOR, len(pool), lesson.key, visit)[:count]
    return sorted(pool[i] for i in picked.tolist())
