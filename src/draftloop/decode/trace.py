"""What decoding leaves behind: requests in, generations and verification steps out.

A trace records every verification: where the block began, what was proposed and with which log-probability, how much
of it survived. The loss reads it (Draft-OPD, arXiv 2605.29343, section on replay), so does every metric.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from torch import Tensor

from draftloop.core.errors import InputError
from draftloop.core.law import Readout, Sampling
from draftloop.drafter.draft import Draft

Engine = Literal["auto", "eager", "graph", "fused"]


@dataclass(frozen=True)
class Request:
    """One text to continue.

    Attributes:
        ids: prompt tokens, at least one.
        key: integer key of the prompt, for keyed draws.
        sample: which of several samples of this prompt.
    """

    ids: tuple[int, ...]
    key: int = 0
    sample: int = 0


@dataclass(frozen=True)
class Options:
    """How to decode.

    Args:
        max_new_tokens: length limit of a response.
        sampling: the target's temperature and filters.
        rule: `match` or `ratio`.
        draft_sampling: how drafts are drawn under `ratio`; None = the target's temperature, no filters. `match` and
            temperature 0 draft the argmax.
        seed: of the keyed draws.
        batch_size: rows decoded together.
        record: keep in each generation the tapped features and the target's hidden rows (for training).
        confidence: verify a draft while the product of the drafter's confidences up to it is at least this, in (0, 1];
            None = verify all. The text's law stays the same. Needs a drafter with a confidence head. Where rounds have
            fixed shapes the target's forward is as wide as ever, so that it saves nothing there.
        engine: how rounds run. eager = one after the other, the reference; graph = with fixed shapes, on CUDA each a
            single graph; fused = the same, with compiled layers; auto = what the target says (`Target.engine`), which
            unless told otherwise is graph on CUDA, where target and drafter have fixed shapes, and else eager.

    Raises:
        InputError: a value is out of range.
    """

    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    rule: Literal["match", "ratio"] = "match"
    draft_sampling: Sampling | None = None
    seed: int = 0
    batch_size: int = 16
    record: bool = False
    engine: Engine = "auto"
    confidence: float | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.batch_size < 1:
            raise InputError("max_new_tokens and batch_size must be at least 1", fix="Raise them.")
        if self.rule not in ("match", "ratio"):
            raise InputError(f"there is no verification rule {self.rule!r}", fix="Use match or ratio.")
        if self.engine not in get_args(Engine):
            raise InputError(f"there is no engine {self.engine!r}", fix=f"Use one of {', '.join(get_args(Engine))}.")
        if self.confidence is not None and not 0 < self.confidence <= 1:
            raise InputError(
                f"confidence {self.confidence} is not in (0, 1]",
                fix="Use about 0.02 to 0.3, or leave it out to verify all.",
            )
        if self.draft_sampling is not None and self.drafting != self.draft_sampling:
            raise InputError(
                "draft_sampling has no effect where drafts are the argmax",
                fix="Use rule ratio and a temperature above 0.",
            )

    @property
    def drafting(self) -> Sampling:
        """The sampling that drafts are drawn with."""
        if self.rule == "match" or self.sampling.greedy:
            return Sampling()
        return self.draft_sampling or Sampling(self.sampling.temperature)


@dataclass(frozen=True)
class Step:
    """One verification of one row.

    Attributes:
        anchor: position of the last committed token when the block began.
        proposed: the drafted tokens that were verified: K, or fewer where the drafter's confidence was too small.
        log_q: log-probability each was drawn with.
        accepted: r, drafted tokens that survived verification.
        committed: tokens committed, correction or bonus included, after cutting at end-of-sequence or length.
    """

    anchor: int
    proposed: tuple[int, ...]
    log_q: tuple[float, ...]
    accepted: int
    committed: int


@dataclass
class Generation:
    """A response.

    Attributes:
        prompt: its prompt's tokens.
        tokens: response tokens, the end-of-sequence token included if it was reached.
        finished: whether end-of-sequence was reached.
        steps: verifications in order; the prefill, which commits the first token, is none. Plain decoding's steps have
            no drafts and commit one token each.
        features: [T - 1, F * H] tapped features of every position that was fed, if recorded.
        hidden: [T - 1, H] hidden rows of the same positions, if recorded.
        verified: [len(steps), K + 1, H] hidden rows of each verification on the drafter's own prefix, if recorded; void
            behind the tokens that were verified.
    """

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    steps: list[Step] = field(default_factory=list)
    features: Tensor | None = None
    hidden: Tensor | None = None
    verified: Tensor | None = None


@dataclass(frozen=True)
class Commit:
    """Tokens that one row gained in one round (streaming).

    Attributes:
        index: which request.
        tokens: the new tokens.
        done: whether the row has ended.
    """

    index: int
    tokens: tuple[int, ...]
    done: bool


class Drafts(Protocol):
    """What decoding needs of a drafter."""

    @property
    def readout(self) -> Readout:
        """Logits from its hidden rows."""

    def new_cache(self, capacity: int) -> DraftContext:
        """An empty context cache."""

    def extend(self, cache: DraftContext, features: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Put target features, and the tokens that they are of, into the cache."""

    def draft(self, cache: DraftContext, anchor: Tensor, tokens: Tensor) -> Draft:
        """Draft one block a row behind the anchors."""


class DraftContext(Protocol):
    """A drafter's cache, as far as decoding handles it."""

    def select(self, rows: Tensor) -> None:
        """Keep only these rows."""
