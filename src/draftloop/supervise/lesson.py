"""A lesson: one trunk with what the target knows about it, from which any number of blocks can be taught.

Holds tensors; knows no drafter and no loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from draftloop.core.draws import key_of
from draftloop.core.host import sent
from draftloop.data.trunk import Trunk
from draftloop.decode.trace import Generation, Step
from draftloop.supervise.disk import TrunkFiles
from draftloop.target.cache import TrunkState


@dataclass
class Lesson:
    """One trunk of T tokens.

    Attributes:
        trunk: tokens and loss mask.
        features: [T - 1, F * H] tapped target features of positions 0..T-2, or None while not computed.
        hidden: [T - 1, H] the target's hidden rows there (the law of the next token), or None.
        steps: verifications that wrote this trunk, if it was rolled out.
        verified: [len(steps), K + 1, H] the target's rows on the drafter's own prefixes, or None.
        state: what the target needs to go on from any position of the trunk without feeding it again, or None.
    """

    trunk: Trunk
    features: Tensor | None = None
    hidden: Tensor | None = None
    steps: tuple[Step, ...] = ()
    verified: Tensor | None = None
    state: TrunkState | None = None

    @cached_property
    def key(self) -> int:
        """Integer key of this trunk, for keyed draws."""
        return key_of(f"{self.trunk.id}#{self.trunk.sample}")

    @cached_property
    def step_at(self) -> dict[int, int]:
        """Anchor -> index of the verification that began there."""
        return {step.anchor: i for i, step in enumerate(self.steps)}

    @cached_property
    def text(self) -> Tensor:
        """int64 [T] tokens, on the host."""
        return torch.tensor(self.trunk.tokens, dtype=torch.int64)

    @cached_property
    def room(self) -> Tensor:
        """int64 [T], on the host: supervised tokens behind each position, without a gap."""
        room = torch.zeros(len(self.trunk), dtype=torch.int64)
        for start, end in self.trunk.spans:  # none begins at 0
            room[start - 1 : end] = torch.arange(end - start, -1, -1)
        return room

    @cached_property
    def recorded(self) -> tuple[Tensor, Tensor]:
        """int64 [steps, 3 + K] anchor, accepted, committed and drafts; float32 [steps, K] log q; on the host."""
        rows = [(step.anchor, step.accepted, step.committed, *step.proposed) for step in self.steps]
        return torch.tensor(rows, dtype=torch.int64), torch.tensor([step.log_q for step in self.steps])

    def anchors(self) -> list[int]:
        """Positions that may be an anchor: its and the next token are supervised (so never the last prompt token)."""
        return [anchor for start, end in self.trunk.spans for anchor in range(start, end - 1)]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held."""
        rows = self.hidden if self.state is None else self.state  # `hidden` is a view of the state's
        return sum(t.nbytes for t in (self.features, rows, self.verified) if t is not None)

    def forget(self) -> None:
        """Drop what the target computed; it can be computed again."""
        self.features = self.hidden = self.state = None


def rolled_out(trunk: Trunk, generation: Generation) -> Lesson:
    """The lesson that a recorded speculative generation leaves; needs no further target forward."""
    return Lesson(trunk, generation.features, generation.hidden, tuple(generation.steps), generation.verified)


def slots_at_once(target: Any) -> int:
    """Slots of one forward, padding included: 4096; on a GPU a thousand for every 2 GiB beside the weights.

    On a GPU a forward costs its launches first, so it takes as many as memory has plenty of room for, 16384 at least.
    Told by all of the memory and not by what is free: a resumed run must share forwards as the first one did.
    """
    if target.device.type != "cuda":
        return 4096
    held = sum(parameter.nbytes for parameter in target.model.parameters())
    return max(16384, (torch.cuda.get_device_properties(target.device).total_memory - held) >> 21)


class FeatureStore:
    """Computes features of trunks once and keeps them within a budget; beyond it they go to disk, or are recomputed.

    With `keep_state` the forward that makes the features also leaves the trunk's state (its keys and values), so that
    only branches need feeding later. States count against the same budget, at all times: one that does not fit is not
    made, and its trunk is fed again in the forward that scores its branches, which gives the same rows. After use,
    features stay before states do. Trunks that were just rolled out have no state.

    With `files`, what memory has no room for is written there after use and read back bit for bit; where the states of
    a batch need room, lessons kept earlier make way for them. What the files have no room for is computed again.

    Args:
        target: a `Target`.
        taps: layers whose outputs the drafter reads.
        budget: bytes that may be kept in memory.
        keep_state: whether to keep trunk states too.
        files: where to put what memory has no room for.

    Attributes:
        left_out: how many times a state did not fit.
    """

    def __init__(
        self,
        target: Any,
        taps: tuple[int, ...],
        budget: float,
        keep_state: bool = False,
        files: TrunkFiles | None = None,
    ) -> None:
        self.target, self.taps, self.budget, self.keep_state, self.files = target, taps, budget, keep_state, files
        self.left_out = 0
        self._held = 0
        self._kept: dict[int, Lesson] = {}  # by identity
        self._in_use: dict[int, Lesson] = {}  # filled, not yet released
        self._begin()

    def _begin(self) -> None:
        """Begin with nothing kept, under the target's present weights."""
        for lesson in (*self._kept.values(), *self._in_use.values()):
            lesson.forget()
        self._kept, self._in_use, self._held, self._version = {}, {}, 0, self.target.version
        if self.files is not None:
            shared = slots_at_once(self.target)  # what a row is computed beside moves its last bits
            where = (
                str(self.target.dtype),
                self.target.device.type,
                shared,
                torch.__version__,
                version("transformers"),
            )
            kept = (self.keep_state, self.target.family.kept_as())
            self.files.open(self.target.fingerprint, self.taps, kept, where)

    def fits(self, lessons: list[Lesson]) -> bool:
        """Whether the rows of these lessons can all be kept beside those that are, in memory or on disk."""
        row = (len(self.taps) + 1) * self.target.hidden_size * self.target.readout.weight.element_size()
        budget = self.budget + (self.files.budget if self.files is not None else 0)
        return self._held + sum(len(lesson.trunk) - 1 for lesson in lessons) * row <= budget

    def fill(self, lessons: list[Lesson], tokens_at_once: int | None = None, together: bool = False) -> None:
        """Give every lesson its features and hidden rows; lessons of similar length share a forward.

        Args:
            lessons: in use from now until they are released.
            tokens_at_once: slots of one forward; default: `slots_at_once`.
            together: if the rows of one are missing on disk too, compute those of all that are missing in memory, so
                that forwards are shared alike however much an earlier process left there.

        Raises:
            EnvironmentFault: the disk is full.
        """
        if self.target.version != self._version:  # the target's weights changed
            self._begin()
        missing = sorted((one for one in lessons if one.features is None), key=lambda one: len(one.trunk))
        self._in_use |= {id(one): one for one in lessons if not one.steps}
        if self.files is not None and not (together and not all(self.files.holds(one.trunk) for one in missing)):
            missing = [one for one in missing if not self._recall(one)]
        for part in _shared(missing, tokens_at_once or slots_at_once(self.target)):
            self._compute(part)

    def read_ahead(self, lessons: list[Lesson]) -> Iterator[int]:
        """Fill and release all of these, shortest first, a forward of many at a time.

        Who shares a forward follows from the lessons and the device alone, so a resumed run has the very same rows.

        Yields:
            how many are done.

        Raises:
            EnvironmentFault: the disk is full.
        """
        done = 0
        for part in _shared(sorted(lessons, key=lambda one: len(one.trunk)), slots_at_once(self.target)):
            self.fill(part, together=True)
            self.release(part)
            done += len(part)
            yield done

    @torch.no_grad()
    def _compute(self, lessons: list[Lesson]) -> None:
        # the last token has no successor to teach, but branches may go on from it
        sizes = [len(lesson.trunk) - (0 if self.keep_state else 1) for lesson in lessons]
        ids = torch.zeros(len(lessons), max(sizes), dtype=torch.int64)
        for i, lesson in enumerate(lessons):
            ids[i, : sizes[i]] = lesson.text[: sizes[i]]
        ids = sent(ids, self.target.device)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        cache = self.target.new_cache(ids.shape[1])
        rows = self.target.extend(cache, ids, positions, self.taps)
        for i, lesson in enumerate(lessons):
            known = len(lesson.trunk) - 1
            hidden = rows.hidden[i, : sizes[i]].clone()
            features = rows.features[i, :known].clone() if self.taps else hidden[:known, :0]
            lesson.features, lesson.hidden = features, hidden[:known]
            if not self.keep_state:
                continue
            if self._has_room(cache.state_bytes(sizes[i]) + hidden.nbytes):
                lesson.state = cache.state(i, hidden, self.target.version)
            elif not self._write(lesson, cache.state(i, hidden, self.target.version) if self.files else None):
                self._leave_out()

    def _recall(self, lesson: Lesson) -> bool:
        """Read a lesson's rows back from disk; whether they were there."""
        assert self.files is not None
        found = self.files.read(lesson.trunk, self.target.device)
        if found is None:
            return False
        lesson.features, hidden, layers = found
        lesson.hidden = hidden[: len(lesson.trunk) - 1]
        if layers:
            state = TrunkState(layers, hidden, self.target.version)
            if self._has_room(state.nbytes):
                lesson.state = state
            else:
                self._leave_out()
        return True

    def _write(self, lesson: Lesson, state: TrunkState | None) -> bool:
        """Put a lesson's rows on disk; whether they are there now."""
        if self.files is None:
            return False
        assert lesson.features is not None
        assert lesson.hidden is not None
        return self.files.write(lesson.trunk, lesson.features, lesson.hidden, state)

    def _has_room(self, nbytes: int) -> bool:
        """Whether a state of this size fits, once lessons kept earlier have made way as far as the disk takes them."""
        fresh = sum(
            one.state.nbytes for key, one in self._in_use.items() if one.state is not None and key not in self._kept
        )
        for key in reversed(list(self._kept) if self.files is not None else []):
            if self._held + fresh + nbytes <= self.budget:
                break
            lesson = self._kept[key]
            if key not in self._in_use and self._write(lesson, lesson.state):
                self._held -= self._kept.pop(key).nbytes
                lesson.forget()
        return self._held + fresh + nbytes <= self.budget

    def _leave_out(self) -> None:
        if not self.left_out:
            warnings.warn(
                "feature_memory_gb has no room for every trunk's keys and values: the others are recomputed with their"
                " branches, which gives the same numbers in more time. Raise it (or feature_disk_gb), or set"
                " branch.state: recompute.",
                stacklevel=2,
            )
        self.left_out += 1

    def release(self, lessons: list[Lesson]) -> None:
        """After use: keep what the budgets allow, in memory first; drop the rest (it will be computed again).

        Raises:
            EnvironmentFault: the disk is full.
        """
        for lesson in lessons:
            self._in_use.pop(id(lesson), None)
            if lesson.steps or id(lesson) in self._kept:
                continue  # a rollout's rows belong to the rollout
            stateless = self.keep_state and lesson.state is None
            if self._held + lesson.nbytes > self.budget or stateless:
                if self._write(lesson, lesson.state):
                    lesson.forget()
                    continue
                lesson.state = None
            if self._held + lesson.nbytes <= self.budget:
                self._kept[id(lesson)] = lesson
                self._held += lesson.nbytes
            else:
                lesson.forget()

    def close(self) -> None:
        """Remove what lies on disk."""
        if self.files is not None:
            self.files.remove()


def _shared(lessons: list[Lesson], tokens_at_once: int) -> Iterator[list[Lesson]]:
    """Lessons by length, ascending, in groups that share a forward."""
    start = 0
    while start < len(lessons):
        end = start + 1
        while end < len(lessons) and len(lessons[end].trunk) * (end + 1 - start) <= tokens_at_once:
            end += 1
        yield lessons[start:end]
        start = end
