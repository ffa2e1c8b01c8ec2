"""Deliberately broken verifiers, each wrong in one part: the tests of losslessness must catch every one of them.

Same signature as `draftloop.decode.rules.verify`, or a change to the proposal or to the uniforms before it.
"""

from __future__ import annotations

import dataclasses

import torch

from draftloop.core.draws import Purpose
from draftloop.core.law import Law, Sampling, inverse_cdf
from draftloop.decode.rules import Proposal, Verdict, leading, verify
from tests.toy import Method


def _rows(target: Law, index: torch.Tensor, b: int) -> Law:
    """Row index[i] of each of b blocks."""
    per = target.hidden.shape[0] // b
    return target.rows(torch.arange(b) * per + index)


def _tokens_p(proposal: Proposal, target: Law) -> torch.Tensor:
    """log p of each draft, [b, K]."""
    b, k = proposal.tokens.shape
    return target.log_probs().view(b, k + 1, -1)[:, :k].gather(-1, proposal.tokens.unsqueeze(-1)).squeeze(-1).double()


def _last(uniform: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    return uniform.gather(1, accepted.clamp(max=uniform.shape[1] - 1).unsqueeze(1)).squeeze(1)


# the proposal --------------------------------------------------------------------------------------------------------
def argmax_drafts(proposal):
    """Drafts are the argmax, yet q is said to be the softmax."""
    log_q = proposal.law.log_probs()
    best = log_q.argmax(-1, keepdim=True)
    return Proposal(best.view_as(proposal.tokens), log_q.gather(-1, best).view_as(proposal.log_q), proposal.law)


def _other(law: Law) -> Law:
    return Law(law.hidden, law.readout, Sampling(2 * law.sampling.temperature))


def stale_log_q(proposal):
    """log q is that of another temperature than the one the drafts were drawn with."""
    log_q = _other(proposal.law).log_probs().gather(-1, proposal.tokens.view(-1, 1))
    return dataclasses.replace(proposal, log_q=log_q.view_as(proposal.log_q).float())


def stale_law(proposal):
    """The residual is taken of another temperature's law; log q is right."""
    return dataclasses.replace(proposal, law=_other(proposal.law))


def stale_weights(proposal):
    """The whole of q (law and log q) is that of another row's hidden state, as after a weight update."""
    law = dataclasses.replace(proposal.law, hidden=proposal.law.hidden.flip(-1))
    log_q = law.log_probs().gather(-1, proposal.tokens.view(-1, 1)).view_as(proposal.log_q)
    return dataclasses.replace(proposal, law=law, log_q=log_q.float())


# the verifier --------------------------------------------------------------------------------------------------------
def resample_p(rule, proposal, target, coins):
    """After a rejection the token comes from p, not from the residual."""
    verdict = verify(rule, proposal, target, coins)
    b, k = proposal.tokens.shape
    fresh = inverse_cdf(_rows(target, verdict.accepted, b).log_probs(), _last(coins.residual, verdict.accepted))
    return Verdict(verdict.accepted, torch.where(verdict.accepted < k, fresh, verdict.token))


def unfiltered_residual(rule, proposal, target, coins):
    """The residual is taken of p before its filters."""
    wide = dataclasses.replace(target, sampling=Sampling(target.sampling.temperature))
    verdict = verify(rule, proposal, target, coins)
    b, k = proposal.tokens.shape
    p = _rows(wide, verdict.accepted, b).log_probs().double().exp()
    q = _rows(proposal.law, verdict.accepted.clamp(max=k - 1), b).log_probs().double().exp()
    fresh = inverse_cdf((p - q).clamp(min=0).log(), _last(coins.residual, verdict.accepted))
    return Verdict(verdict.accepted, torch.where(verdict.accepted < k, fresh, verdict.token))


def unfiltered_p(rule, proposal, target, coins):
    """Top-k and top-p are forgotten in verification."""
    return verify(rule, proposal, dataclasses.replace(target, sampling=Sampling(target.sampling.temperature)), coins)


def shifted(by):
    def wrong(rule, proposal, target, coins):
        """p rows off by one: slot k is judged by the law of its neighbour."""
        b, k = proposal.tokens.shape
        at = (torch.arange(k + 1) + by).clamp(0, k)
        hidden = target.hidden.view(b, k + 1, -1)[:, at].flatten(0, 1)
        return verify(rule, proposal, dataclasses.replace(target, hidden=hidden), coins)

    return wrong


def miscounted(by):
    def wrong(rule, proposal, target, coins):
        """The accepted count is off by one."""
        verdict = verify(rule, proposal, target, coins)
        return Verdict((verdict.accepted + by).clamp(0, proposal.tokens.shape[1]), verdict.token)

    return wrong


def early_bonus(rule, proposal, target, coins):
    """The bonus token is drawn from the last draft's row instead of the row after it."""
    verdict = verify(rule, proposal, target, coins)
    b, k = proposal.tokens.shape
    early = inverse_cdf(_rows(target, torch.full((b,), k - 1), b).log_probs(), coins.target[:, k])
    return Verdict(verdict.accepted, torch.where(verdict.accepted == k, early, verdict.token))


def _judged(passes, count=leading):
    """The ratio rule with another test of the drafts, or another count of those that pass; the rest as it should be."""

    def judged(rule, proposal, target, coins):
        b, k = proposal.tokens.shape
        r = count(passes(_tokens_p(proposal, target), proposal.log_q.double(), coins.accept))
        p = _rows(target, r, b).log_probs().double().exp()
        q = _rows(proposal.law, r.clamp(max=k - 1), b).log_probs().double().exp()
        left = (p - q).clamp(min=0)
        weight = torch.where((r == k).unsqueeze(-1) | (left.sum(-1, keepdim=True) <= 0), p, left)
        return Verdict(r, inverse_cdf(weight.log(), torch.where(r == k, coins.target[:, k], _last(coins.residual, r))))

    return judged


def _ratio(log_p, log_q, u):
    return u < (log_p - log_q).exp()


by_hand = _judged(_ratio)  # not broken: the twin that shows that the next ones differ from it in one part only
gaps = _judged(_ratio, count=lambda run: run.sum(-1))
upside_down = _judged(lambda log_p, log_q, u: u < (log_q - log_p).exp())
lenient = _judged(lambda log_p, log_q, u: u < 1.5 * (log_p - log_q).exp())
wrong_side = _judged(lambda log_p, log_q, u: u >= (log_p - log_q).exp())
ignores_q = _judged(lambda log_p, log_q, u: u < log_p.exp())


def fresh_correction(rule, proposal, target, coins):
    """`match`, but the correction is drawn anew instead of being the sample that the draft failed against."""
    return resample_p(rule, proposal, target, coins)


def argmax_correction(rule, proposal, target, coins):
    """`match`, but the correction is the target's argmax."""
    verdict = verify(rule, proposal, target, coins)
    best = _rows(target, verdict.accepted, proposal.tokens.shape[0]).log_probs().argmax(-1)
    return Verdict(verdict.accepted, torch.where(verdict.accepted < proposal.tokens.shape[1], best, verdict.token))


# all of them ---------------------------------------------------------------------------------------------------------
RATIO_BROKEN = [
    Method("softmax q with argmax drafts", "ratio", spoil=argmax_drafts),
    Method("log q of another temperature", "ratio", spoil=stale_log_q, fine=8),
    Method("residual of another temperature's q", "ratio", spoil=stale_law, fine=8),
    Method("q of other weights", "ratio", spoil=stale_weights, fine=8),
    Method("resampling from p", "ratio", resample_p),
    Method("p of the next slot", "ratio", shifted(1)),
    Method("p of the slot before", "ratio", shifted(-1)),
    Method("one accepted too many", "ratio", miscounted(1)),
    Method("one accepted too few", "ratio", miscounted(-1)),
    Method("bonus of the last draft's row", "ratio", early_bonus),
    Method("accepted across a gap", "ratio", gaps),
    Method("min(1, q/p)", "ratio", upside_down),
    Method("lenient acceptance", "ratio", lenient),
    Method("coin read from the wrong side", "ratio", wrong_side),
    Method("accepted with p though drawn from q", "ratio", ignores_q),
    Method("residual drawn by the draft's uniform", "ratio", share={Purpose.RESIDUAL: Purpose.DRAFT}),
    Method("residual drawn by the coin", "ratio", share={Purpose.RESIDUAL: Purpose.ACCEPT}),
    Method("coin is the draft's uniform", "ratio", share={Purpose.ACCEPT: Purpose.DRAFT}),
]
FILTER_BROKEN = [
    Method("residual of unfiltered p", "ratio", unfiltered_residual),
    Method("verification by unfiltered p", "ratio", unfiltered_p),
    Method("match by unfiltered p", "match", unfiltered_p),
]
MATCH_BROKEN = [
    Method("correction drawn anew", "match", fresh_correction),
    Method("correction by argmax", "match", argmax_correction),
    Method("p of the next slot", "match", shifted(1)),
    Method("p of the slot before", "match", shifted(-1)),
    Method("one accepted too many", "match", miscounted(1)),
    Method("one accepted too few", "match", miscounted(-1)),
]
