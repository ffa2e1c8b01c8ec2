"""Trunks: prompt + response as one token sequence, with the tokens that a drafter learns from marked.

Knows token ids only. Does not know text, chat templates or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from draftloop.core.errors import InputError
from draftloop.core.law import Sampling


@dataclass(frozen=True)
class Trunk:
    """One token sequence of length T.

    Attributes:
        id: of the prompt (see `turn_id` for the turns of one conversation).
        set: the prompt set's name.
        sample: which of several answers to the same prompt, from 0.
        tokens: T token ids.
        mask: T flags: supervised, i.e. the assistant's tokens, end-of-sequence included. At least one is set, and the
            first one is not, for a block needs a committed token before it.
        finished: the (last) response ended by end-of-sequence, not by the length limit.
        drawn: how the target drew the response; None where it did not (an answer that came with its prompt).

    Raises:
        InputError: the mask is empty or all ones, or does not fit the tokens.
    """

    id: str
    set: str
    sample: int
    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    finished: bool
    drawn: Sampling | None = None

    def __post_init__(self) -> None:
        problem = ""
        if len(self.mask) != len(self.tokens):
            problem = f"the trunk has {len(self.tokens)} tokens but {len(self.mask)} mask flags"
        elif not any(self.mask):
            problem = "no token of the trunk is supervised (the response is empty)"
        elif self.mask[0]:
            problem = "the first token of the trunk is supervised, so there is no prompt before the response"
        if problem:
            raise InputError(problem, where=self.id, fix="Take this prompt out, or mend its messages.")

    @cached_property
    def first(self) -> int:
        """Position of the first response token (>= 1)."""
        return self.mask.index(True)

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Every run of supervised tokens as (start, end), end excluded, in order."""
        flags = (False, *self.mask, False)
        edges = [at for at in range(len(flags) - 1) if flags[at] != flags[at + 1]]
        return tuple(zip(edges[::2], edges[1::2], strict=True))

    @property
    def supervised(self) -> int:
        """Number of supervised tokens."""
        return sum(self.mask)

    @property
    def answered(self) -> tuple[int, ...]:
        """The supervised tokens."""
        return tuple(token for token, mine in zip(self.tokens, self.mask, strict=True) if mine)

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens before the first response."""
        return self.tokens[: self.first]

    def __len__(self) -> int:
        return len(self.tokens)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; the mask is written as its spans."""
        return {
            "id": self.id,
            "set": self.set,
            "sample": self.sample,
            "tokens": list(self.tokens),
            "supervised": [list(span) for span in self.spans],
            "finished": self.finished,
            **({} if self.drawn is None else {"drawn": asdict(self.drawn)}),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any], where: str = "") -> Trunk:
        """Read what `to_json` wrote.

        Args:
            value: the JSON object.
            where: file and line, for messages.

        Raises:
            InputError: a field is missing or of the wrong type, or the spans do not fit the tokens.
        """
        try:
            tokens = tuple(map(int, value["tokens"]))
            mask = [False] * len(tokens)
            for start, end in value["supervised"]:
                if not 0 <= start < end <= len(tokens):
                    raise ValueError(f"span {start}..{end} of {len(tokens)} tokens")
                mask[start:end] = [True] * (end - start)
            drawn = value.get("drawn")  # files of earlier versions do not say
            return cls(
                str(value["id"]),
                str(value["set"]),
                int(value["sample"]),
                tokens,
                tuple(mask),
                bool(value["finished"]),
                None if drawn is None else Sampling(**drawn),
            )
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise InputError(f"this is not a trunk ({reason})", where=where, fix="Write the file anew.") from error


def response_trunk(
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    id: str,
    set: str,
    sample: int,
    finished: bool,
    drawn: Sampling | None = None,
) -> Trunk:
    """Make the trunk of a generated answer: the very tokens prompted and generated, never tokenised again.

    Args:
        prompt_ids: what the target was prompted with, generation prompt included.
        response_ids: what was generated, end-of-sequence included where there was one.
        id: of the prompt.
        set: the prompt set's name.
        sample: which answer, from 0.
        finished: the response ended by end-of-sequence.
        drawn: how the target drew it, if it did.

    Raises:
        InputError: the prompt or the response is empty.
    """
    mask = (False,) * len(prompt_ids) + (True,) * len(response_ids)
    return Trunk(id, set, sample, (*prompt_ids, *response_ids), mask, finished, drawn)


def turn_id(id: str, turn: int) -> str:
    """Name one turn's own trunk: the prompt's id for turn 0, then "id/turn2", "id/turn3", ..."""
    return id if turn == 0 else f"{id}/turn{turn + 1}"
