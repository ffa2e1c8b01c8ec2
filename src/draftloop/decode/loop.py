"""Speculative decoding: propose, verify, commit, until every row has ended.

Batched, with ragged acceptance: each row advances at its own pace. Plain decoding is the same loop with no drafter
(K = 0). Draws are keyed, so a row's sample does not depend on its batch; target draws are keyed by position alone,
so under `match` the output at any temperature is token for token that of plain decoding.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftloop.core.errors import InputError
from draftloop.decode.graph import GraphEngine, unsupported
from draftloop.decode.round import Cut, RowState
from draftloop.decode.rules import Proposal, Verdict
from draftloop.decode.trace import Commit, Drafts, Engine, Generation, Options, Request, Step
from draftloop.drafter.draft import has_confidence


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
    decoder = Decoder(target, drafter, options, requests)
    try:
        return decoder.decode(requests)
    finally:
        decoder.close()


def rounds(
    target: Any, drafter: Any | None, requests: Sequence[Request], options: Options, results: list[Generation]
) -> Iterator[list[Commit]]:
    """As `decode`, but yield what each round committed; `results` fill up as it goes."""
    decoder = Decoder(target, drafter, options, requests)
    try:
        yield from decoder.rounds(requests, results)
    finally:
        decoder.close()


def engine_of(target: Any, drafter: Any | None, options: Options) -> Engine:
    """The engine that these options mean, never `auto`."""
    engine: Engine = options.engine if options.engine != "auto" else getattr(target, "engine", "auto")
    if engine != "auto":
        return engine
    return "graph" if target.device.type == "cuda" and not unsupported(target, drafter) else "eager"


_ON_A_CPU = {
    "graph": "engine graph: a CPU has no CUDA graphs, so rounds of fixed shape run without one; eager is faster there",
    "fused": "engine fused: compiling the layers, minutes on a CPU; eager compiles nothing and begins at once",
}


@cache  # Python's own "once" forgets what it said whenever somebody changes a filter
def _tell(engine: Engine) -> None:
    """Say once what an engine that was made for a GPU does on a CPU, before it begins to."""
    if engine in _ON_A_CPU:
        warnings.warn(_ON_A_CPU[engine], stacklevel=1)


class Decoder:
    """Decodes one call after another; what the engine of fixed shapes needs is built once.

    Args:
        target: a `Target`.
        drafter: a bound drafter, or None.
        options: as for `decode`.
        requests: all that will be decoded, of which the longest and the number count.
    """

    def __init__(self, target: Any, drafter: Any | None, options: Options, requests: Sequence[Request]) -> None:
        _check(target, drafter, requests, options)
        self._target, self._drafter, self._requests = target, drafter, requests
        self.options = replace(options, engine=engine_of(target, drafter, options))
        self._fixed: GraphEngine | None = None
        if requests and target.device.type == "cpu":
            _tell(self.options.engine)

    def warm_up(self) -> None:
        """Build what is built once, or decode a few tokens."""
        if self.options.engine != "eager":
            self._build()
        elif self._requests:
            few = replace(self.options, max_new_tokens=min(4, self.options.max_new_tokens))
            decode(self._target, self._drafter, self._requests[:1], few)

    def close(self) -> None:
        """Let go of what was built."""
        if self._fixed is not None:
            self._fixed.close()
            self._fixed = None

    def _build(self) -> GraphEngine:
        if self._fixed is None:
            longest = max(len(request.ids) for request in self._requests) + self.options.max_new_tokens
            rows = min(self.options.batch_size, len(self._requests))
            self._fixed = GraphEngine(self._target, self._drafter, self.options, rows=rows, longest=longest)
        return self._fixed

    def decode(self, requests: Sequence[Request]) -> list[Generation]:
        """Continue these requests to their ends."""
        results = [Generation(request.ids) for request in requests]
        for _ in self.rounds(requests, results):
            pass
        return results

    def rounds(self, requests: Sequence[Request], results: list[Generation]) -> Iterator[list[Commit]]:
        """Continue these requests; yield what each round committed, `results` fill up as it goes."""
        if self.options.engine != "eager":
            yield from self._build().decode(requests, results) if requests else ()
            return
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].ids))  # little padding
        for start in range(0, len(order), self.options.batch_size):
            indices = order[start : start + self.options.batch_size]
            batch = _Batch(self._target, self._drafter, [requests[i] for i in indices], self.options)
            yield batch.publish(batch.prefill(), indices, results)
            while batch.rows:
                yield batch.publish(batch.round(), indices, results)


def check_confidence(drafter: Any | None, options: Options) -> None:
    """Refuse to go by the confidence of a drafter that has none.

    Raises:
        InputError: it is asked for and there is none.
    """
    if options.confidence is not None and drafter is not None and not has_confidence(drafter):
        raise InputError(
            "confidence is asked for, and the drafter has no confidence head",
            where="--confidence",
            fix="Leave it out, or use a DSpark drafter with one.",
        )


def _check(target: Any, drafter: Any | None, requests: Sequence[Request], options: Options) -> None:
    """Refuse what cannot be decoded before anything is."""
    check_confidence(drafter, options)
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


class _Batch(RowState):
    """The rows that are still running, on the device."""

    def __init__(self, target: Any, drafter: Drafts | None, requests: list[Request], options: Options) -> None:
        super().__init__(target, drafter, options)
        self.requests = requests
        longest = max(len(r.ids) for r in requests) + options.max_new_tokens
        self.cache = target.new_cache(longest)
        self.cache.capacity += self.drafted + 1  # a last block may reach beyond the limit; nothing of that is kept
        self.context = drafter.new_cache(self.cache.capacity) if drafter is not None else None
        self.which = list(range(len(requests)))  # running row -> request of this batch
        self.enter(requests)
        self.kept: list[list[tuple[Any, ...]]] = [[] for _ in requests]

    @property
    def rows(self) -> int:
        return len(self.which)

    def prefill(self) -> list[tuple[int, list[int], bool, Step | None]]:
        """Feed the prompts and draw the first token."""
        fed, token, cut = self.feed(self.requests)
        self._keep(fed, self.anchor + 1)
        return self._commit(token, cut, None, None)

    def round(self) -> list[tuple[int, list[int], bool, Step | None]]:
        """Draft, verify, commit."""
        outcome = self.play()
        self._keep(outcome.fed, outcome.verdict.accepted + 1)
        return self._commit(outcome.tokens, outcome.cut, outcome.proposal, outcome.verdict)

    def _fit(self, proposal: Proposal) -> Proposal:
        """Feed no more drafts than the row that has most of them verified."""
        return proposal if proposal.lengths is None else proposal.narrowed(int(proposal.lengths.max()))

    def _keep(self, rows: Any, fed: Tensor) -> None:
        """Remember features and hidden rows of what was fed; `fed` [b] of them lie on the committed text."""
        if not self.options.record:
            return
        for i, (row, n) in enumerate(zip(self.which, fed.tolist(), strict=True)):
            feature = None if rows.features is None else rows.features[i, :n].clone()
            verified = None
            if self.kept[row] and self.drafted:
                verified = F.pad(rows.hidden[i], (0, 0, 0, self.drafted + 1 - rows.hidden.shape[1]))
            self.kept[row].append((feature, rows.hidden[i, :n].clone(), verified))

    def _commit(
        self, tokens: Tensor, cut: Cut, proposal: Proposal | None, verdict: Verdict | None
    ) -> list[tuple[int, list[int], bool, Step | None]]:
        """Append what the cut leaves of each row's tokens; drop the rows that ended."""
        out: list[tuple[int, list[int], bool, Step | None]] = []
        listed = zip(
            self.which, tokens.tolist(), cut.stop.tolist(), cut.ended.tolist(), self.anchor.tolist(), strict=True
        )
        drafts = proposal.tokens.tolist() if proposal is not None else []
        scores = proposal.log_q.tolist() if proposal is not None else []
        accepted = verdict.accepted.tolist() if verdict is not None else []
        lengths = proposal.lengths.tolist() if proposal is not None and proposal.lengths is not None else None
        for i, (row, line, n, ended, anchor) in enumerate(listed):
            step = None
            if verdict is not None:
                seen = slice(None if lengths is None else lengths[i])
                step = Step(anchor, tuple(drafts[i][seen]), tuple(scores[i][seen]), accepted[i], n)
            out.append((row, line[:n], ended, step))
        self.last, self.anchor = cut.last, self.anchor + cut.stop
        self._drop(cut.done)
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
