"""Rows of fixed number and size: every tensor keeps its place, so that a round can be a CUDA graph.

A row that has ended stands still until another request takes it over, memory and all. What each round committed is
written to a log on the device, which the host reads later, many rounds at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from draftloop.core.draws import Purpose, bits, uniforms_after
from draftloop.core.host import sent
from draftloop.decode.round import RowState
from draftloop.decode.rules import matching
from draftloop.decode.trace import Options, Request


@dataclass(frozen=True)
class Line:
    """One row's part of a round, as the host reads it.

    Attributes:
        anchor, accepted, ended: as in `Step` and `Generation`.
        tokens: committed; empty where the row stood still.
        proposed, log_q: the drafts that were verified.
        done: whether the row has ended.
    """

    anchor: int
    accepted: int
    ended: bool
    done: bool
    tokens: tuple[int, ...]
    proposed: tuple[int, ...]
    log_q: tuple[float, ...]


def _moved(
    state: tuple[Tensor, ...], played: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor], cut: tuple[Tensor, ...]
) -> None:
    """Log a round and move the rows, in place; tensors alone, to be compiled where wanted.

    Args:
        state: log, scores, at, anchor, last, done of `FixedRows`.
        played: tokens, drafts, their log q, how many were verified (None: all), accepted.
        cut: the parts of a `Cut`.
    """
    log, scores, at, anchor, last, finished = state
    tokens, drafts, log_q, lengths, accepted = played
    stop, ended, done, newest = cut
    stop, done = stop.masked_fill(finished, 0), finished | done
    lengths = torch.full_like(stop, drafts.shape[1]) if lengths is None else lengths
    head = torch.stack([stop, anchor, accepted, ended.long(), done.long(), lengths], 1)
    log.index_copy_(0, at, torch.cat([head, tokens, drafts], 1).unsqueeze(0))
    if drafts.shape[1]:
        scores.index_copy_(0, at, log_q.unsqueeze(0))
    last.copy_(torch.where(finished, last, newest))
    anchor.add_(stop)
    finished.copy_(done)
    at.add_(1)


_DRAWS = (Purpose.TARGET, Purpose.DRAFT, Purpose.ACCEPT, Purpose.RESIDUAL)
_HEAD = 6  # stop, anchor, accepted, ended, done, verified; then K + 1 tokens, then K drafts


class FixedRows(RowState):
    """`rows` rows, all idle at first.

    Args:
        target: a `Target`.
        drafter: a drafter with a cache of fixed size, or None.
        options: sampling, rule, seed, whether to record.
        rows: texts at a time.
        longest: the longest text, prompt and response.
        turns: rounds that the log holds.
        compiler: what compiles the drafter's two forwards, the hash of the draws and what is counted after them
            (`torch.compile` with its options).
    """

    def __init__(
        self,
        target: Any,
        drafter: Any | None,
        options: Options,
        *,
        rows: int,
        longest: int,
        turns: int,
        compiler: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(target, drafter, options)
        self._moved = _moved if compiler is None else compiler(_moved)
        self._feeding = drafter  # prompts come in every length: for them nothing is compiled
        self._hashed = uniforms_after if compiler is None else compiler(uniforms_after)
        if compiler is not None:
            self._committed = compiler(RowState._committed)  # type: ignore[method-assign]
            self._matching = (compiler(matching),)
            self.drafter = _Compiled(drafter, compiler) if drafter is not None else None
        device, k = target.device, self.drafted
        capacity = -(-(longest + k + 1) // 64) * 64  # attention kernels want whole tiles
        self.cache = target.new_fixed_cache(rows, capacity)
        if compiler is not None:
            self.cache.bounds = compiler(self.cache.bounds)
        self.context = drafter.new_fixed_cache(rows, capacity) if drafter is not None else None
        self.anchor, self.last, self.limit = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3))
        # what the draws of a text have in common is hashed when it enters: a hash is a hundred small kernels
        self._begun = {purpose: torch.zeros_like(self.anchor) for purpose in _DRAWS if not options.sampling.greedy}
        self.done = torch.ones(rows, dtype=torch.bool, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)  # where the next round is logged
        self.log = torch.zeros(turns, rows, _HEAD + 2 * k + 1, dtype=torch.int64, device=device)
        self.scores = torch.zeros(turns, rows, k, dtype=torch.float32, device=device)
        self.hidden: Tensor | None = None  # [rows, capacity, H] by position
        self.features: Tensor | None = None  # [rows, capacity, F * H]
        self.verified: Tensor | None = None  # [turns, rows, K + 1, H]
        if options.record:
            wide = {"dtype": target.dtype, "device": device}
            self.hidden = torch.zeros(rows, capacity, target.hidden_size, **wide)
            if self.taps:
                self.features = torch.zeros(rows, capacity, len(self.taps) * target.hidden_size, **wide)
            if drafter is not None:
                self.verified = torch.zeros(turns, rows, k + 1, target.hidden_size, **wide)
        self.admit([0], [Request((0,))])  # the cache's layers learn their shapes, before anything is compiled
        self.done.fill_(True)

    @torch.no_grad()
    def turn(self) -> None:
        """One round of every row: what a graph captures. Idle rows play too, and nothing comes of it."""
        out = self.play()
        cut, proposal = out.cut, out.proposal
        if self.hidden is not None:
            place = (
                self.cache.row,
                self.anchor.unsqueeze(1) + torch.arange(out.tokens.shape[1], device=self.at.device),
            )
            self.hidden[place] = out.fed.hidden
            if self.features is not None:
                self.features[place] = out.fed.features
            if self.verified is not None:
                self.verified.index_copy_(0, self.at, out.fed.hidden.unsqueeze(0))
        self._moved(
            (self.log, self.scores, self.at, self.anchor, self.last, self.done),
            (out.tokens, proposal.tokens, proposal.log_q, proposal.lengths, out.verdict.accepted),
            (cut.stop, cut.ended, cut.done, cut.last),
        )

    def _uniform(self, purpose: Purpose, position: Tensor, anchor: Tensor | None = None) -> Tensor:
        """As `RowState._uniform` for positions [b, n], from what was hashed on entering."""
        return self._hashed(self._begun[purpose].unsqueeze(1), 0 if anchor is None else anchor.unsqueeze(1), position)

    @torch.no_grad()
    def admit(self, rows: Sequence[int], requests: Sequence[Request]) -> Tensor:
        """Let requests into idle rows: feed their prompts and draw the first token of each.

        Returns:
            int64 [m, 3]: token, whether it ends the sequence, whether the row has ended.
        """
        entering = RowState(self.target, self._feeding, self.options)
        width = max(len(r.ids) for r in requests)
        entering.cache = self.target.new_prompt_cache(width)
        entering.context = self._feeding.new_cache(width) if self._feeding is not None else None
        entering.enter(requests)
        fed, token, cut = entering.feed(requests)
        at = sent(list(rows), self.target.device)
        self.cache.admit(at, entering.cache)
        if self.context is not None:
            self.context.admit(at, entering.context, width)
        if self.hidden is not None:
            self.hidden[at, :width] = fed.hidden
        if self.features is not None:
            self.features[at, :width] = fed.features
        self.limit[at] = entering.limit
        for purpose, begun in self._begun.items():
            begun[at] = bits(self.options.seed, purpose, entering.key, entering.sample)
        self.anchor[at] = entering.anchor + cut.stop
        self.last[at] = cut.last
        self.done[at] = cut.done
        return torch.stack([token.squeeze(1), cut.ended.long(), cut.done.long()], 1)


class _Compiled:
    """A drafter whose forwards in a round (`compiled`) are compiled; all else is its own."""

    def __init__(self, drafter: Any, compiler: Callable[[Any], Any]) -> None:
        self._drafter = drafter
        kind = type(drafter)
        for name in kind.compiled:
            # what is inside no_grad: all functions wrapped by it are one and the same to the compiler
            setattr(self, name, partial(compiler(inspect.unwrap(getattr(kind, name))), drafter))
        self.draft = MethodType(kind.draft, self)  # calls what is compiled here

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)


def lines(log: Tensor, scores: Tensor, drafted: int) -> list[list[Line | None]]:
    """Read a piece of the log on the host: for each round and row what it did, None where it stood still.

    Args:
        log: int64 [n, rows, 6 + 2 K + 1], on the CPU.
        scores: float32 [n, rows, K].
        drafted: K.
    """
    first = _HEAD + drafted + 1

    def line(row: list[int], q: list[float]) -> Line | None:
        stop, anchor, accepted, ended, done, verified = row[:_HEAD]
        if not stop:
            return None
        tokens, proposed = tuple(row[_HEAD : _HEAD + stop]), tuple(row[first : first + verified])
        return Line(anchor, accepted, bool(ended), bool(done), tokens, proposed, tuple(q[:verified]))

    none: list[list[float]] = [[]] * log.shape[1]
    return [
        [line(row, q) for row, q in zip(turn, score, strict=True)]
        for turn, score in zip(log.tolist(), scores.tolist() if drafted else [none] * len(log), strict=True)
    ]
