"""One round of speculative decoding as tensor work alone: draft, verify, and where each row now ends.

Rows are state on the device; nothing here asks the device for a value, so the same lines run row by row in the eager
loop and inside a CUDA graph. Draws are keyed: what a row draws does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftloop.core.draws import Purpose, uniforms
from draftloop.core.host import sent
from draftloop.decode.rules import Coins, Matching, Proposal, Verdict, trusted, verify
from draftloop.decode.trace import Drafts, Options, Request


@dataclass(frozen=True)
class Cut:
    """What is left of drafted text at end-of-sequence and length limit.

    Attributes:
        stop: int64 [b], tokens committed.
        ended: bool [b], whether the last of them ends the sequence.
        done: bool [b], whether the row has ended, by that or by its limit.
        last: int64 [b], the last token committed (the first of the block where none is).
    """

    stop: Tensor
    ended: Tensor
    done: Tensor
    last: Tensor


@dataclass(frozen=True)
class Outcome:
    """One verification of every row.

    Attributes:
        fed: hidden rows [b, n + 1, H] and features of the block; n = K, or as many drafts as were verified.
        tokens: int64 [b, n + 1], the accepted drafts and what the target adds; what stands behind `cut.stop` is void.
    """

    fed: Any
    proposal: Proposal
    verdict: Verdict
    tokens: Tensor
    cut: Cut


def _ends(
    tokens: Tensor, count: Tensor, anchor: Tensor, limit: Tensor, eos: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The parts of a `Cut`."""
    place = torch.arange(tokens.shape[1], device=tokens.device)
    count = torch.minimum(count, limit - 1 - anchor)
    ends = (tokens.unsqueeze(-1) == eos).any(-1) & (place < count.unsqueeze(1))
    ended = ends.any(1)
    stop = torch.where(ended, ends.int().argmax(1) + 1, count)
    last = tokens.gather(1, (stop - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    return stop, ended, ended | (anchor + stop >= limit - 1), last


def _committed(
    drafts: Tensor, accepted: Tensor, token: Tensor, anchor: Tensor, limit: Tensor, eos: Tensor
) -> tuple[Tensor, ...]:
    """An `Outcome`'s tokens and the parts of its `Cut`: a pure function of tensors, to be compiled where wanted."""
    tokens = token.unsqueeze(1)
    if drafts.shape[1]:
        tokens = torch.cat([drafts, tokens], 1).scatter(1, accepted.unsqueeze(1), tokens)
    return tokens, *_ends(tokens, accepted + 1, anchor, limit, eos)


class RowState:
    """b rows on the device: keys of their draws, where each ends, its last committed token, and the caches.

    Attributes:
        key, sample: int64 [b], of the draws.
        limit: int64 [b], the longest text.
        anchor: int64 [b], position of the last committed token.
        last: int64 [b], that token.
    """

    key: Tensor
    sample: Tensor
    limit: Tensor
    anchor: Tensor
    last: Tensor
    cache: Any
    context: Any

    def __init__(self, target: Any, drafter: Drafts | None, options: Options) -> None:
        self.target, self.drafter, self.options = target, drafter, options
        self.taps: tuple[int, ...] = drafter.spec.target_layers if drafter is not None else ()  # type: ignore[attr-defined]
        self.drafted = drafter.spec.drafted if drafter is not None else 0  # type: ignore[attr-defined]
        self.eos = torch.tensor(target.eos_ids, dtype=torch.int64, device=target.device)

    def enter(self, requests: Sequence[Request]) -> None:
        """Make each request a row; nothing of it is fed yet. The caches are set by the caller."""
        device, longest = self.target.device, self.options.max_new_tokens
        self.key = sent([r.key for r in requests], device)
        self.sample = sent([r.sample for r in requests], device)
        self.limit = sent([len(r.ids) + longest for r in requests], device)
        self.anchor = sent([len(r.ids) - 1 for r in requests], device)
        self.last = torch.zeros_like(self.anchor)

    def feed(self, requests: Sequence[Request]) -> tuple[Any, Tensor, Cut]:
        """Feed the prompts of the rows that just entered and draw the first token of each.

        Returns:
            hidden rows and features of all prompt positions, tokens int64 [b, 1], what is left of them.
        """
        width = max(len(r.ids) for r in requests)
        ids = sent([[*r.ids, *[0] * (width - len(r.ids))] for r in requests], self.target.device)
        positions = torch.arange(width, device=ids.device).expand_as(ids)
        self.cache.least = min(len(r.ids) for r in requests)
        fed = self.target.extend(self.cache, ids, positions, self.taps)
        if self.context is not None:
            self.drafter.extend(self.context, fed.features, positions, ids)  # type: ignore[union-attr]
        ends = fed.hidden[torch.arange(len(ids), device=ids.device), self.anchor]
        law = self.target.law(ends, self.options.sampling)
        token = law.draw(self._uniform(Purpose.TARGET, self.anchor + 1))[0].unsqueeze(1)
        return fed, token, Cut(*_ends(token, torch.ones_like(self.anchor), self.anchor, self.limit, self.eos))

    def play(self) -> Outcome:
        """Draft and verify one block a row. Writes to the caches, moves no row."""
        proposal = self._fit(self._propose())
        block = torch.cat([self.last.unsqueeze(1), proposal.tokens], 1)
        positions = self.anchor.unsqueeze(1) + torch.arange(block.shape[1], device=block.device)
        fed = self.target.extend(self.cache, block, positions, self.taps)
        if self.context is not None:
            # rejected positions too: they are overwritten before any anchor rises above them
            self.drafter.extend(self.context, fed.features, positions, block)  # type: ignore[union-attr]
        law = self.target.law(fed.hidden.flatten(0, 1), self.options.sampling)
        verdict = verify(self.options.rule, proposal, law, self._coins(proposal.tokens.shape[1]), *self._matching)
        tokens, *cut = self._committed(
            proposal.tokens, verdict.accepted, verdict.token, self.anchor, self.limit, self.eos
        )
        return Outcome(fed, proposal, verdict, tokens, Cut(*cut))

    def _propose(self) -> Proposal:
        """K tokens a row from the drafter's law (no drafter: K = 0)."""
        if self.drafter is None:
            none = self.last.new_zeros(self.last.shape[0], 0)
            return Proposal(none, none.float(), self.target.law(self.target.readout.weight[:0], self.options.sampling))
        readout, drafting = self.drafter.readout, self.options.drafting
        if drafting.greedy:  # not random, and hashing is many small kernels
            coins = self.anchor.unsqueeze(1).expand(-1, self.drafted)
        else:
            place = self.anchor.unsqueeze(1) + torch.arange(1, self.drafted + 1, device=self.anchor.device)
            coins = self._uniform(Purpose.DRAFT, place, self.anchor)

        draft = self.drafter.draft(self.context, self.anchor, self.last)

        def choose(rows: Tensor, slots: slice) -> tuple[Tensor, Tensor]:
            tokens, scores = draft.law(rows, slots, readout, drafting).draw(coins[:, slots].flatten())
            return tokens.view(rows.shape[:2]), scores.view(rows.shape[:2])

        tokens, log_q, rows = draft.drawn(choose)
        lengths = None
        if self.options.confidence is not None:
            sure = self.drafter.confidence(rows, self.last, tokens)  # type: ignore[attr-defined]  # checked: it has a head
            lengths = trusted(sure, self.options.confidence)
        return Proposal(tokens, log_q, draft.law(rows, slice(0, self.drafted), readout, drafting), lengths)

    def _fit(self, proposal: Proposal) -> Proposal:
        """What of a proposal the target is fed: here all of it, for shapes may be fixed."""
        return proposal

    def _uniform(self, purpose: Purpose, position: Tensor, anchor: Tensor | None = None) -> Tensor:
        """Keyed uniforms of the shape of `position` ([b] or [b, n])."""
        keys = [self.key, self.sample, torch.zeros_like(self.key) if anchor is None else anchor]
        if position.dim() == 2:
            keys = [key.unsqueeze(1) for key in keys]
        return uniforms(self.options.seed, purpose, *keys, position)

    def _coins(self, drafted: int) -> Coins:
        device = self.anchor.device
        unused = torch.empty(len(self.anchor), drafted + 1, dtype=torch.float64, device=device)
        if self.options.sampling.greedy:
            return Coins(unused, unused[:, 1:], unused[:, 1:])
        place = self.anchor.unsqueeze(1) + torch.arange(1, drafted + 2, device=device)
        target = self._uniform(Purpose.TARGET, place)
        if self.options.rule == "match" or not drafted:
            return Coins(target, unused[:, 1:], unused[:, 1:])
        return Coins(
            target,
            self._uniform(Purpose.ACCEPT, place[:, :-1], self.anchor),
            self._uniform(Purpose.RESIDUAL, place[:, :-1], self.anchor),
        )

    _committed = staticmethod(_committed)
    _matching: tuple[Matching, ...] = ()  # what takes the place of `rules.matching`, compiled
