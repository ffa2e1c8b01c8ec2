"""The exact offline evaluation: what speculative decoding would do on texts that the target drew, without decoding.

Verification is lossless: the target's text x has law p whatever the drafter. So texts are drawn once, and for each the
drafts and coins are averaged over, given that x came out, instead of drawn. What is left of the noise is that of the
texts, which two drafters share: a comparison on them is paired, and takes seconds.

`match`: a draft is the argmax of q and survives while it equals the sample of p, that is x: given x a round is certain.
`ratio` (2211.17192; 2302.01318): a draft d ~ q survives with min(1, p(d)/q(d)); then comes a draw from (p - q)+ / Z.
Let r_k = min(1, q_k/p_k) at x's own k-th token, on x's own prefix. From an anchor,

    P(m drafts survive, and are x_1..x_m) = prod_{k<=m} q_k min(1, p_k/q_k) = prod_{k<=m} min(p_k, q_k) = prod p_k r_k
    P(they do, the next does not, and x_{m+1} is the correction) = prod_{k<=m} p_k r_k * p_{m+1} (1 - r_{m+1}),

for Z is the probability of a rejection and cancels. Whatever a round committed, the rest of x follows by its own p, so
division by P(x) = prod p_k leaves P(run >= m | x) = prod_{k<=m} r_k: a Markov chain on the positions of x, which
`tally_chain` sums up. The prefix that counts was accepted, hence is x's: true also of drafters that read their drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftloop.core.errors import InputError
from draftloop.core.law import Law, Readout, Sampling
from draftloop.data.trunk import Trunk
from draftloop.decode.trace import Options
from draftloop.evaluate.tau import Tally
from draftloop.evaluate.walk import anchors_of, drafted_rows
from draftloop.supervise.lesson import FeatureStore, Lesson
from draftloop.supervise.propose import greedy_run

_IMPOSSIBLE = 0.01  # share of tokens that rounding may have put behind the edge of top-k or top-p
_ROWS = 256  # rows of logits held at a time


@torch.no_grad()
def offline(
    target: Any,
    drafters: Sequence[Any],
    trunks: Sequence[Trunk],
    options: Options,
    *,
    slots: int = 4096,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> list[list[Tally]]:
    """What decoding would do on these texts with each drafter, on average over drafts and coins.

    Args:
        target: a `Target`, the one that drew the texts.
        drafters: bound; usually copies for decoding. Those that read the same layers share the target's forwards.
        trunks: one response each, drawn with `options.sampling`. Their tokens are scored anew, so no more than how
            they were drawn has to be written down.
        options: sampling, rule and draft sampling; nothing else is read.
        slots: drafted slots (anchors x block) in one forward of a drafter, tokens in one of the target.
        advance: called with (texts done, texts in all).

    Returns:
        for each drafter a tally a trunk, to be read by `acceptance` and `paired` of `draftloop.evaluate.tau`.

    Raises:
        InputError: a text was drawn in another way, or has several responses.
    """
    for trunk in trunks:
        _check_drawn(trunk, options.sampling)
    taps = dict.fromkeys(tuple(drafter.spec.target_layers) for drafter in drafters)
    out: list[list[Tally]] = [[] for _ in drafters]
    done = 0
    for layers in taps:
        store = FeatureStore(target, layers, 0)
        arms = [(arm, one) for arm, one in zip(out, drafters, strict=True) if tuple(one.spec.target_layers) == layers]
        for lessons in _batches(trunks, slots):
            store.fill(lessons, slots)
            for lesson in lessons:
                trunk = lesson.trunk
                chains = _chains(target, [one for _, one in arms], lesson, options, slots)
                for (arm, _), keep in zip(arms, chains, strict=True):
                    arm.append(tally_chain(f"{trunk.id}#{trunk.sample}", trunk.set, keep))
            store.release(lessons)
            done += len(lessons)
            advance(done, len(taps) * len(trunks))
    return out


def _batches(trunks: Sequence[Trunk], tokens: int) -> Iterator[list[Lesson]]:
    """Lessons in order, as many at once as have that many tokens in all (or one)."""
    batch: list[Lesson] = []
    for trunk in trunks:
        if batch and sum(len(one.trunk) for one in batch) + len(trunk) > tokens:
            yield batch
            batch = []
        batch.append(Lesson(trunk))
    if batch:
        yield batch


def _chains(
    target: Any, drafters: Sequence[Any], lesson: Lesson, options: Options, slots: int
) -> Iterator[NDArray[np.float64]]:
    """[n, K] for each drafter: `survival` of every draft from every anchor of the text."""
    anchors = anchors_of(lesson.trunk, target.device)
    certain = options.drafting.greedy  # drafts are the argmax: no law of the target is needed
    log_p = None if certain or not len(anchors) else _log_p(lesson, anchors, target.readout, options.sampling)
    for drafter in drafters:
        parts = anchors.split(max(1, slots // drafter.spec.block_size)) if len(anchors) else ()
        keep = [_keep(drafter, lesson, part, log_p, options.drafting) for part in parts]
        yield torch.cat(keep).numpy() if keep else np.zeros((0, drafter.spec.drafted))


def survival(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Probability that a token of the target's text was a draft that survived, given the text: r = min(1, q/p).

    Args:
        log_p: the target's log-probabilities of the tokens.
        log_q: the drafter's.

    Returns:
        float64 of the same shape; 1 where p is 0 (a token that rounding alone excludes).
    """
    ratio = (log_q.double() - log_p.double()).clamp(max=0).exp()
    return torch.where(log_p == float("-inf"), 1.0, ratio)


def gains(keep: NDArray[np.float64], left: int) -> NDArray[np.float64]:
    """The law of what one round commits.

    Args:
        keep: [K], each draft's probability to survive, given the text and the drafts before it.
        left: tokens of the text behind the anchor, >= 1. The round that reaches the last one is cut there.

    Returns:
        [min(K + 1, left)]: probability that it commits 1, 2, ... tokens.
    """
    reach = np.concatenate([[1.0], np.cumprod(keep)])[:left]
    return np.append(reach[:-1] - reach[1:], reach[-1])


def tally_chain(id: str, set: str, keep: NDArray[np.float64]) -> Tally:
    """Sum up the chain of rounds over one text, from the law of how many rounds lead to each position.

    Args:
        id, set: of the response.
        keep: [n, K], `survival` of the k-th draft from each of the n anchors of the text, the prefill token first;
            what lies behind the text's end is not read.
    """
    n, drafted = keep.shape
    ring = np.zeros((drafted + 2, n + 1))  # [position, rounds]: probability to stand there after so many rounds
    ring[0, 0] = 1.0
    steps, survivors, refusals = 0.0, np.zeros(drafted), np.zeros(drafted)
    for at in range(n):
        here = ring[at % len(ring)].copy()
        ring[at % len(ring)] = 0.0
        visit, seen = here.sum(), min(drafted, n - at)
        reach = np.cumprod(keep[at, :seen])
        steps += visit
        survivors[:seen] += visit * reach
        refusals[:seen] += visit * (np.append(1.0, reach[:-1]) - reach)
        for gain, share in enumerate(gains(keep[at], n - at), start=1):
            ring[(at + gain) % len(ring), 1:] += share * here[:-1]
    rounds = ring[n % len(ring), 1:]
    tau = float((rounds * (n / np.arange(1, n + 1))).sum())
    verified = float(steps) * drafted
    return Tally(id, set, n, float(steps), tau, tuple(survivors.tolist()), tuple(refusals.tolist()), verified)


def _keep(drafter: Any, lesson: Lesson, anchors: Tensor, log_p: Tensor | None, drafting: Sampling) -> Tensor:
    """float64 [N, K] on the CPU: `survival` of every draft from these anchors, 0 behind the end of the text."""
    hidden, tokens = drafted_rows(drafter, lesson, anchors)
    slot = torch.arange(tokens.shape[1], device=tokens.device)
    if log_p is None:
        run = greedy_run(hidden, tokens, drafter.readout)
        return (slot < run.unsqueeze(1)).double().cpu()
    there = tokens >= 0
    log_q = _scores(hidden[there], tokens[there], drafter.readout, drafting)
    place = (anchors - lesson.trunk.first).unsqueeze(1) + slot  # log_p begins with the first anchor's next token
    keep = torch.zeros(tokens.shape, dtype=torch.float64, device=tokens.device)
    keep[there] = survival(log_p[place[there]], log_q)
    return keep.cpu()


def _log_p(lesson: Lesson, anchors: Tensor, readout: Readout, sampling: Sampling) -> Tensor:
    """[n] log-probability of the token behind each anchor under the law that it was drawn from.

    Raises:
        InputError: too many tokens cannot have been drawn from it.
    """
    assert lesson.hidden is not None
    tokens = torch.tensor(lesson.trunk.tokens, device=anchors.device)
    log_p = _scores(lesson.hidden[anchors], tokens[anchors + 1], readout, sampling)
    impossible = int((log_p == float("-inf")).sum())
    if impossible > max(1.0, _IMPOSSIBLE * len(log_p)):
        raise InputError(
            f"{impossible} of {len(log_p)} tokens of a response have probability 0 under the law it was drawn from",
            where=lesson.trunk.id,
            fix="Let this very target answer the prompts anew.",
        )
    return log_p


def _scores(hidden: Tensor, tokens: Tensor, readout: Readout, sampling: Sampling) -> Tensor:
    """[n] log-probabilities of tokens int64 [n], the whole vocabulary held for few rows at a time."""
    parts = [
        Law(rows, readout, sampling).log_probs().gather(-1, own.unsqueeze(-1)).squeeze(-1)
        for rows, own in zip(hidden.split(_ROWS), tokens.split(_ROWS), strict=True)
    ]
    return torch.cat(parts)


def _check_drawn(trunk: Trunk, wanted: Sampling) -> None:
    if trunk.drawn is None:
        raise InputError(
            "it is not written down that and how the target drew this response, so nothing exact can be said of it",
            where=trunk.id,
            fix="Let the target answer the prompts anew (data.response.regenerate: true).",
        )
    if trunk.drawn != wanted and not (trunk.drawn.greedy and wanted.greedy):
        raise InputError(
            f"the response was drawn at {_named(trunk.drawn)}, not at {_named(wanted)}",
            where=trunk.id,
            fix="Let the target answer the prompts at the temperature and filters that are evaluated.",
        )


def _named(sampling: Sampling) -> str:
    return f"temperature {sampling.temperature:g} (top_k {sampling.top_k}, top_p {sampling.top_p:g})"
