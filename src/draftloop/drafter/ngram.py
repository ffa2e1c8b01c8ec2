"""N-gram lookup: propose what followed the same tokens earlier in the text. No weights, nothing to train.

The untrained baseline that every engine has (prompt lookup; LLMA, arXiv 2304.04487). Of the last n = `longest` ..
`shortest` tokens the longest run that also stands earlier in the text is taken, there its first occurrence, and what
follows it is proposed, up to the text's end: vLLM's `ngram` to the token, which has no further settings.

Blocks have a fixed width, so a slot with nothing to propose holds the target's end-of-sequence. Where the target agrees
by chance the text ends there either way: tau, and every output, are those of proposing nothing. In statistics by
position such a slot counts as a draft, nearly always a rejected one; so acceptance *by position* reads lower than where
only rounds that drafted are counted.

Reads the text of its own row alone, and no feature: all of it is tensor work on the device.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftloop.core.errors import InputError
from draftloop.core.law import Readout
from draftloop.drafter.draft import Choose, Draft, ParallelDraft

NAME = "ngram"  # says so wherever a drafter folder is asked for; with settings, ngram:K:SHORTEST:LONGEST
_NOTHING = -1  # in no text
_MOST = 128  # tokens that vLLM verifies in a step (its MAX_SPEC_LEN)


@dataclass(frozen=True)
class NgramSpec:
    """What is looked up.

    Attributes:
        drafted: K, tokens proposed at most.
        shortest, longest: how many of the last tokens must be found, and how many are looked for.
        target_layers: none is read.

    Raises:
        InputError: a number is out of range.
    """

    family: ClassVar[str] = NAME

    drafted: int = 7
    shortest: int = 2
    longest: int = 4
    target_layers: tuple[int, ...] = ()
    made_for: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem, wanted = "", ""
        if self.drafted < 1:
            problem, wanted = f"proposes {self.drafted} tokens", "K at least 1"
        elif self.shortest < 1:
            problem, wanted = f"looks for as few as {self.shortest} tokens", "SHORTEST at least 1"
        elif self.shortest > self.longest:
            problem = f"looks for at least {self.shortest} and at most {self.longest} tokens"
            wanted = "LONGEST no less than SHORTEST"
        if problem:
            fix = f"Write {NAME}:K:SHORTEST:LONGEST with {wanted}, as {NAME}:7:2:4."
            raise InputError(f"{self.name} {problem}", fix=fix)

    @property
    def block_size(self) -> int:
        """B = K + 1."""
        return self.drafted + 1

    @property
    def name(self) -> str:
        """Its name with every setting, `ngram:7:2:4`."""
        return f"{NAME}:{self.drafted}:{self.shortest}:{self.longest}"


def ngram_spec(name: str | os.PathLike[str] | None) -> NgramSpec | None:
    """What `ngram`, `ngram:K`, `ngram:K:N` (N for both) or `ngram:K:SHORTEST:LONGEST` means; None for another name.

    A file or folder of that very name comes first.

    Raises:
        InputError: what stands behind `ngram:` are no such numbers, or too large ones.
    """
    words = str(name).split(":")
    if name is None or words[0] != NAME or Path(name).exists():
        return None
    if len(words) > 4 or not all(word.isdecimal() for word in words[1:]):
        raise InputError(
            f"{name} is not {NAME}:K:SHORTEST:LONGEST",
            fix=f"Write {NAME}, {NAME}:7 or {NAME}:7:2:4: tokens proposed, fewest and most tokens looked for.",
        )
    if any(len(word) > len(str(_MOST)) or int(word) > _MOST for word in words[1:]):
        raise InputError(
            f"{str(name)[:60]} asks for more than {_MOST} tokens, the most that an engine verifies in a step",
            fix=f"Keep every number at {_MOST} or below, as in {NAME}:7:2:4.",
        )
    drafted, *sizes = [int(word) for word in words[1:]] or [NgramSpec.drafted]
    shortest, longest = (sizes * 2)[:2] or (NgramSpec.shortest, NgramSpec.longest)
    return NgramSpec(drafted, shortest, longest)


def refuse_ngram(name: str | os.PathLike[str] | None, what: str, where: str) -> None:
    """Refuse the name of an n-gram lookup where weights are needed.

    Args:
        name: whatever stands for a drafter.
        what: what it is wanted for, "be trained".
        where: the key or option.

    Raises:
        InputError: it is one.
    """
    if ngram_spec(name) is not None:
        raise InputError(
            f"{name} is a lookup without weights, so it cannot {what}",
            where=where,
            fix=f"Name a drafter folder here; `draftloop evaluate {NAME}` measures the lookup, and `draftloop serve"
            f" {NAME}` has an engine do it.",
        )


@dataclass(frozen=True)
class PointMass(Readout):
    """Rows [n, 1] that hold a token's id -> logits 0 for it and -inf for all others.

    `weight` is [V, 0]: all that it says is V. Under `ratio` this is exact: log q = 0, and the residual is p without the
    drafted token.
    """

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, 1] -> float32 [n, V]."""
        shape = (*hidden.shape[:-1], self.weight.shape[0])
        return torch.full(shape, float("-inf"), device=hidden.device).scatter_(-1, hidden.long(), 0.0)


class NgramDraft(ParallelDraft):
    """Rows are the tokens themselves, int64 [..., K, 1], so nothing is drawn."""

    def drawn(self, choose: Choose) -> tuple[Tensor, Tensor, Tensor]:
        """All slots at once, each with certainty."""
        tokens = self.rows.squeeze(-1)
        return tokens, torch.zeros(tokens.shape, device=tokens.device), self.rows


class TextCache:
    """The tokens of rows by position, int64 [rows, capacity]; of fixed size and place where the rows are known."""

    def __init__(self, capacity: int, tokens: Tensor | None = None) -> None:
        self.capacity, self.tokens = capacity, tokens

    def write(self, tokens: Tensor, positions: Tensor) -> None:
        """Put tokens at positions, int64 [rows, t] each; a position given again is overwritten."""
        if self.tokens is None:
            self.tokens = torch.full((len(tokens), self.capacity), _NOTHING, device=tokens.device)
        self.tokens.scatter_(1, positions, tokens)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows (int64 [m]), in this order."""
        if self.tokens is not None:
            self.tokens = self.tokens[rows]

    def admit(self, rows: Tensor, prompts: TextCache, width: int) -> None:
        """Let new texts into `rows` (int64 [m]): the first `width` positions of what `prompts` holds of its m texts."""
        assert self.tokens is not None
        assert prompts.tokens is not None
        self.tokens[rows, :width] = prompts.tokens[:, :width]


def look_up(text: Tensor, anchor: Tensor, spec: NgramSpec, filler: int) -> Tensor:
    """What followed the longest run of last tokens where it stood first.

    Args:
        text: int64 [b, T]; what stands behind an anchor is not read.
        anchor: int64 [b, N], the last token of each text so far.
        spec: lengths.
        filler: what a slot holds that has nothing to propose.

    Returns:
        int64 [b, N, K].
    """
    size, device = text.shape[1], text.device
    place = torch.arange(size, device=device)
    alike = place < anchor.unsqueeze(-1)  # [b, N, T]: whether the last j + 1 tokens are those up to here
    run = torch.zeros(alike.shape, dtype=torch.int64, device=device)
    for j in range(spec.longest):
        mine = text.gather(1, (anchor - j).clamp(min=0))
        before = F.pad(text, (j, 0), value=_NOTHING)[:, :size]
        alike = alike & (before.unsqueeze(1) == mine.unsqueeze(-1))
        run = run + alike
    best = (run * size + (size - 1 - place)).amax(-1)  # the longest, of those the first
    length, first = best // size, size - 1 - best % size
    slot = torch.arange(1, spec.drafted + 1, device=device)
    source = first.unsqueeze(-1) + slot
    there = (source <= anchor.unsqueeze(-1)) & (length >= spec.shortest).unsqueeze(-1)
    found = text.gather(1, source.clamp(max=size - 1).flatten(1)).view(source.shape)
    return torch.where(there, found, filler)


class Ngram(nn.Module):
    """The drafter. `bind` it to a target before use.

    Args:
        spec: lengths.
        filler: a token that a slot with nothing to propose holds: the target's end-of-sequence, if it has one.
    """

    compiled = ("begin",)

    def __init__(self, spec: NgramSpec, filler: int = 0) -> None:
        super().__init__()
        self.spec, self.filler = spec, filler
        self._borrowed: PointMass | None = None

    def bind(self, embed: Any, readout: Readout) -> Ngram:
        """Learn the target's vocabulary from its readout; nothing of the target is used."""
        self._borrowed = PointMass(readout.weight.new_empty(readout.weight.shape[0], 0))
        return self

    @property
    def readout(self) -> Readout:
        """Turns rows into point masses."""
        assert self._borrowed is not None, "bind the drafter to a target first"
        return self._borrowed

    def new_cache(self, capacity: int) -> TextCache:
        """An empty cache for texts of at most `capacity` tokens."""
        return TextCache(capacity)

    def new_fixed_cache(self, rows: int, capacity: int) -> TextCache:
        """A cache of `rows` texts whose tensor keeps its size and place."""
        return TextCache(capacity, torch.full((rows, capacity), _NOTHING, device=self.readout.weight.device))

    @torch.no_grad()
    def extend(self, cache: TextCache, features: Tensor | None, positions: Tensor, tokens: Tensor) -> None:
        """Put tokens int64 [b, t] at positions; features are not read."""
        cache.write(tokens, positions)

    @torch.no_grad()
    def begin(self, cache: TextCache, anchor: Tensor, tokens: Tensor) -> Tensor:
        """Rows int64 [b, K, 1] behind the anchors, int64 [b]; `tokens` [b] stand there."""
        assert cache.tokens is not None, "extend the cache before drafting"
        text = cache.tokens.scatter(1, anchor.unsqueeze(1), tokens.unsqueeze(1))
        return look_up(text, anchor.unsqueeze(1), self.spec, self.filler)[:, 0].unsqueeze(-1)

    def draft(self, cache: TextCache, anchor: Tensor, tokens: Tensor) -> Draft:
        """One block a row, as `begin`."""
        return NgramDraft(self.begin(cache, anchor, tokens))

    def pack(self, features: Tensor | None, anchor: Tensor, text: Tensor) -> Draft:
        """Blocks [b, N] of texts int64 [b, T] at anchors int64 [b, N]; features are not read."""
        return NgramDraft(look_up(text, anchor, self.spec, self.filler).unsqueeze(-1))


def ngram_drafter(spec: NgramSpec, target: Any = None) -> Ngram:
    """The drafter for a target (bound to it), or for none."""
    if target is None:
        return Ngram(spec)
    return Ngram(spec, next(iter(target.eos_ids), 0)).bind(target.embed, target.readout)
