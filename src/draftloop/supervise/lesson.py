"""A lesson: one trunk with what the target knows about it, from which any number of blocks can be taught.

Holds tensors; knows no drafter and no loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from draftloop.core.draws import key_of
from draftloop.data.trunk import Trunk
from draftloop.decode.trace import Generation, Step


@dataclass
class Lesson:
    """One trunk of T tokens.

    Attributes:
        trunk: tokens and loss mask.
        features: [T - 1, F * H] tapped target features of positions 0..T-2, or None while not computed.
        hidden: [T - 1, H] the target's hidden rows there (the law of the next token), or None.
        steps: verifications that wrote this trunk, if it was rolled out.
        verified: [len(steps), K + 1, H] the target's rows on the drafter's own prefixes, or None.
    """

    trunk: Trunk
    features: Tensor | None = None
    hidden: Tensor | None = None
    steps: tuple[Step, ...] = ()
    verified: Tensor | None = None

    @property
    def key(self) -> int:
        """Integer key of this trunk, for keyed draws."""
        return key_of(f"{self.trunk.id}#{self.trunk.sample}")

    @cached_property
    def step_at(self) -> dict[int, int]:
        """Anchor -> index of the verification that began there."""
        return {step.anchor: i for i, step in enumerate(self.steps)}

    def anchors(self) -> list[int]:
        """Positions that may be an anchor: its and the next token are supervised (so never the last prompt token)."""
        mask = self.trunk.mask
        return [a for a in range(len(mask) - 1) if mask[a] and mask[a + 1]]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held."""
        return sum(t.nbytes for t in (self.features, self.hidden, self.verified) if t is not None)


def rolled_out(trunk: Trunk, generation: Generation) -> Lesson:
    """The lesson that a recorded speculative generation leaves; needs no further target forward."""
    return Lesson(trunk, generation.features, generation.hidden, tuple(generation.steps), generation.verified)


class FeatureStore:
    """Computes features of trunks once and leaves them on the lesson within a budget; beyond it they are recomputed.

    Args:
        target: a `Target`.
        taps: layers whose outputs the drafter reads.
        budget: bytes that may be kept.
    """

    def __init__(self, target: Any, taps: tuple[int, ...], budget: float) -> None:
        self.target, self.taps, self.budget = target, taps, budget
        self._version = target.version
        self._held = 0
        self._kept: dict[int, Lesson] = {}  # by identity
        self._in_use: dict[int, Lesson] = {}  # filled, not yet released

    def fits(self, lessons: list[Lesson]) -> bool:
        """Whether the rows of these lessons can all be kept beside those that are."""
        row = (len(self.taps) + 1) * self.target.hidden_size * self.target.readout.weight.element_size()
        return self._held + sum(len(lesson.trunk) - 1 for lesson in lessons) * row <= self.budget

    def fill(self, lessons: list[Lesson], tokens_at_once: int = 4096) -> None:
        """Give every lesson its features and hidden rows; lessons of similar length share a forward."""
        if self.target.version != self._version:  # the target's weights changed
            for lesson in (*self._kept.values(), *self._in_use.values()):
                lesson.features = lesson.hidden = None
            self._kept, self._in_use, self._held, self._version = {}, {}, 0, self.target.version
        missing = sorted((one for one in lessons if one.features is None), key=lambda one: len(one.trunk))
        start = 0
        while start < len(missing):
            end = start + 1
            while end < len(missing) and len(missing[end].trunk) * (end + 1 - start) <= tokens_at_once:
                end += 1
            self._compute(missing[start:end])
            start = end

    @torch.no_grad()
    def _compute(self, lessons: list[Lesson]) -> None:
        sizes = [len(lesson.trunk) - 1 for lesson in lessons]
        ids = torch.zeros(len(lessons), max(sizes), dtype=torch.int64)
        for i, lesson in enumerate(lessons):
            ids[i, : sizes[i]] = torch.tensor(lesson.trunk.tokens[:-1])
        ids = ids.to(self.target.device)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        rows = self.target.extend(self.target.new_cache(ids.shape[1]), ids, positions, self.taps)
        for i, lesson in enumerate(lessons):
            lesson.features = rows.features[i, : sizes[i]].clone()
            lesson.hidden = rows.hidden[i, : sizes[i]].clone()
            self._in_use[id(lesson)] = lesson

    def release(self, lessons: list[Lesson]) -> None:
        """After use: keep what the budget allows, drop the rest (it will be computed again)."""
        for lesson in lessons:
            self._in_use.pop(id(lesson), None)
            if lesson.steps or id(lesson) in self._kept:
                continue  # a rollout's rows belong to the rollout
            if self._held + lesson.nbytes <= self.budget:
                self._kept[id(lesson)] = lesson
                self._held += lesson.nbytes
            else:
                lesson.features = lesson.hidden = None
