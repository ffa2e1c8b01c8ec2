"""Speculative decoding: propose, verify, commit, until every row has ended.

Batched, with ragged acceptance: each row advances at its own pace. Plain decoding is the same loop with no drafter
(K = 0). Draws are keyed, so a row's sample does not depend on its batch; target draws are keyed by position alone,
so under `match` the output at any temperature is token for token that of plain decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftloop.core.draws import Purpose, uniforms
from draftloop.core.errors import InputError
from draftloop.core.law import Law
from draftloop.decode.rules import Coins, Proposal, Verdict, verify
from draftloop.decode.trace import Drafts, Generation, Options, Request, Step


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


def decode(target: Any, drafter: Any | None, requests: Sequence[Request], options: Options) -> list[Generation]:
    """Continue every request; results in the order of the requests.

    Args:
        target: a `Target`.
        drafter: a bound drafter (see `Drafts`), or None for plain decoding.
        requests: prompts; longer than the target's context is refused.
        options: lengths, sampling, rule, seed.

    Raises:
        InputError: an empty prompt, one that does not fit, or a token that the target does not have.
    """
    results = [Generation(request.ids) for request in requests]
    for _ in rounds(target, drafter, requests, options, results):
        pass
    return results


def rounds(
    target: Any, drafter: Any | None, requests: Sequence[Request], options: Options, results: list[Generation]
) -> Iterator[list[Commit]]:
    """As `decode`, but yield what each round committed; `results` fill up as it goes."""
    _check(target, requests, options)
    order = sorted(range(len(requests)), key=lambda i: len(requests[i].ids))  # little padding
    for start in range(0, len(order), options.batch_size):
        indices = order[start : start + options.batch_size]
        batch = _Batch(target, drafter, [requests[i] for i in indices], options)
        yield batch.publish(batch.prefill(), indices, results)
        while batch.rows:
            yield batch.publish(batch.round(), indices, results)


def _check(target: Any, requests: Sequence[Request], options: Options) -> None:
    """Refuse what cannot be decoded before anything is."""
    for number, request in enumerate(requests):
        where = f"request {number}"
        if not request.ids:
            raise InputError("a prompt has no tokens", where=where, fix="Give every prompt at least one token.")
        if not 0 <= min(request.ids) <= max(request.ids) < target.vocab_size:
            raise InputError(
                f"a prompt holds a token outside the target's vocabulary of {target.vocab_size}",
                where=where,
                fix="Tokenize prompts with the target's own tokenizer.",
            )
    target.check_length(max((len(request.ids) for request in requests), default=0) + options.max_new_tokens)


class _Batch:
    """The rows that are still running, on the device."""

    def __init__(self, target: Any, drafter: Drafts | None, requests: list[Request], options: Options) -> None:
        self.target, self.drafter, self.options = target, drafter, options
        self.taps: tuple[int, ...] = drafter.spec.target_layers if drafter is not None else ()  # type: ignore[attr-defined]
        self.drafted = drafter.spec.drafted if drafter is not None else 0  # type: ignore[attr-defined]
        self.requests = requests
        longest = max(len(r.ids) for r in requests) + options.max_new_tokens
        self.cache = target.new_cache(longest)
        self.cache.capacity += self.drafted + 1  # a last block may reach beyond the limit; nothing of that is kept
        self.context = drafter.new_cache(self.cache.capacity) if drafter is not None else None
        device = target.device
        self.which = list(range(len(requests)))  # running row -> request of this batch
        self.key = torch.tensor([r.key for r in requests], device=device)
        self.sample = torch.tensor([r.sample for r in requests], device=device)
        self.limit = torch.tensor([len(r.ids) + options.max_new_tokens for r in requests], device=device)
        self.anchor = torch.tensor([len(r.ids) - 1 for r in requests], device=device)  # last committed position
        self.last = torch.zeros_like(self.anchor)  # its token
        self.eos = torch.tensor(target.eos_ids, dtype=torch.int64, device=device)
        self.kept: list[list[tuple[Any, ...]]] = [[] for _ in requests]

    @property
    def rows(self) -> int:
        return len(self.which)

    def prefill(self) -> list[tuple[int, list[int], bool, Step | None]]:
        """Feed the prompts and draw the first token."""
        lengths = self.anchor + 1
        width = int(lengths.max())
        ids = torch.zeros(self.rows, width, dtype=torch.int64, device=self.target.device)
        for i, request in enumerate(self.requests):
            ids[i, : len(request.ids)] = torch.tensor(request.ids, device=ids.device)
        positions = torch.arange(width, device=ids.device).expand_as(ids)
        self.cache.least = int(lengths.min())
        rows = self.target.extend(self.cache, ids, positions, self.taps)
        if self.context is not None:
            self.drafter.extend(self.context, rows.features, positions)  # type: ignore[union-attr]
        ends = rows.hidden[torch.arange(self.rows, device=ids.device), self.anchor]
        law = self.target.law(ends, self.options.sampling)
        token = law.draw(self._uniform(Purpose.TARGET, lengths))[0]
        self._keep(rows, lengths)
        return self._commit(token.unsqueeze(1), torch.ones_like(token), None, None)

    def round(self) -> list[tuple[int, list[int], bool, Step | None]]:
        """Draft, verify, commit."""
        proposal = self._propose()
        block = torch.cat([self.last.unsqueeze(1), proposal.tokens], 1)
        positions = self.anchor.unsqueeze(1) + torch.arange(block.shape[1], device=block.device)
        rows = self.target.extend(self.cache, block, positions, self.taps)
        if self.context is not None:
            # rejected positions too: they are overwritten before any anchor rises above them
            self.drafter.extend(self.context, rows.features, positions)  # type: ignore[union-attr]
        law = self.target.law(rows.hidden.flatten(0, 1), self.options.sampling)
        verdict = verify(self.options.rule, proposal, law, self._coins())
        k = self.drafted
        tokens = torch.cat([proposal.tokens, verdict.token.unsqueeze(1)], 1)
        tokens = tokens.scatter(1, verdict.accepted.unsqueeze(1), verdict.token.unsqueeze(1))
        self._keep(rows, verdict.accepted + 1)
        return self._commit(tokens[:, : k + 1], verdict.accepted + 1, proposal, verdict)

    def _propose(self) -> Proposal:
        """K tokens a row from the drafter's law (no drafter: K = 0)."""
        if self.drafter is None:
            none = self.last.new_zeros(self.rows, 0)
            return Proposal(none, none.float(), self.target.law(self.target.readout.weight[:0], self.options.sampling))
        hidden = self.drafter.begin(self.context, self.anchor, self.last)  # type: ignore[arg-type]
        law = Law(hidden.flatten(0, 1), self.drafter.readout, self.options.drafting)
        place = self.anchor.unsqueeze(1) + torch.arange(1, self.drafted + 1, device=self.anchor.device)
        tokens, log_q = law.draw(self._uniform(Purpose.DRAFT, place, self.anchor).flatten())
        return Proposal(tokens.view(self.rows, -1), log_q.view(self.rows, -1), law)

    def _uniform(self, purpose: Purpose, position: Tensor, anchor: Tensor | None = None) -> Tensor:
        """Keyed uniforms of the shape of `position` ([b] or [b, n])."""
        keys = [self.key, self.sample, torch.zeros_like(self.key) if anchor is None else anchor]
        if position.dim() == 2:
            keys = [key.unsqueeze(1) for key in keys]
        return uniforms(self.options.seed, purpose, *keys, position)

    def _coins(self) -> Coins:
        place = self.anchor.unsqueeze(1) + torch.arange(1, self.drafted + 2, device=self.anchor.device)
        if self.options.sampling.greedy:
            unused = torch.full(place.shape, 0.5, dtype=torch.float64, device=place.device)
            return Coins(unused, unused[:, 1:], unused[:, 1:])
        return Coins(
            self._uniform(Purpose.TARGET, place),
            self._uniform(Purpose.ACCEPT, place[:, :-1], self.anchor),
            self._uniform(Purpose.RESIDUAL, place[:, :-1], self.anchor),
        )

    def _keep(self, rows: Any, fed: Tensor) -> None:
        """Remember features and hidden rows of what was fed; `fed` [b] of them lie on the committed text."""
        if not self.options.record:
            return
        for i, (row, n) in enumerate(zip(self.which, fed.tolist(), strict=True)):
            feature = None if rows.features is None else rows.features[i, :n].clone()
            verified = rows.hidden[i].clone() if self.kept[row] and self.drafted else None
            self.kept[row].append((feature, rows.hidden[i, :n].clone(), verified))

    def _commit(
        self, tokens: Tensor, count: Tensor, proposal: Proposal | None, verdict: Verdict | None
    ) -> list[tuple[int, list[int], bool, Step | None]]:
        """Append `count` tokens a row, cut at end-of-sequence and length; drop the rows that ended."""
        place = torch.arange(tokens.shape[1], device=tokens.device)
        count = torch.minimum(count, self.limit - 1 - self.anchor)
        ends = torch.isin(tokens, self.eos) & (place < count.unsqueeze(1))
        stop = torch.where(ends.any(1), ends.int().argmax(1) + 1, count)
        done = ends.any(1) | (self.anchor + stop >= self.limit - 1)
        out: list[tuple[int, list[int], bool, Step | None]] = []
        listed = zip(
            self.which, tokens.tolist(), stop.tolist(), ends.any(1).tolist(), self.anchor.tolist(), strict=True
        )
        drafts = proposal.tokens.tolist() if proposal is not None else []
        scores = proposal.log_q.tolist() if proposal is not None else []
        accepted = verdict.accepted.tolist() if verdict is not None else []
        for i, (row, line, n, ended, anchor) in enumerate(listed):
            step = None
            if verdict is not None:
                step = Step(anchor, tuple(drafts[i]), tuple(scores[i]), accepted[i], n)
            out.append((row, line[:n], ended, step))
        self.last = tokens.gather(1, (stop - 1).unsqueeze(1)).squeeze(1)
        self.anchor = self.anchor + stop
        self._drop(done)
        return out

    def _drop(self, done: Tensor) -> None:
        if not bool(done.any()):
            return
        stay = (~done).nonzero().squeeze(1)
        self.which = [self.which[i] for i in stay.tolist()]
        self.key, self.sample, self.limit = self.key[stay], self.sample[stay], self.limit[stay]
        self.anchor, self.last = self.anchor[stay], self.last[stay]
        if self.which:
            self.cache.select(stay)
            if self.context is not None:
                self.context.select(stay)

    def publish(
        self, news: list[tuple[int, list[int], bool, Step | None]], indices: list[int], results: list[Generation]
    ) -> list[Commit]:
        """Move a round's outcome into the results."""
        commits = []
        running = set(self.which)
        for row, tokens, ended, step in news:
            result = results[indices[row]]
            result.tokens.extend(tokens)
            result.finished = ended
            if step is not None:
                result.steps.append(step)
            done = row not in running
            if done and self.options.record:
                self._unpack(row, result)
            commits.append(Commit(indices[row], tuple(tokens), done))
        return commits

    def _unpack(self, row: int, result: Generation) -> None:
        features, hidden, verified = zip(*self.kept[row], strict=True)
        length = len(result.prompt) + len(result.tokens) - 1
        result.features = torch.cat(features)[:length] if features[0] is not None else None
        result.hidden = torch.cat(hidden)[:length]
        blocks = [v for v in verified if v is not None]
        result.verified = torch.stack(blocks) if blocks else None
        self.kept[row] = []
