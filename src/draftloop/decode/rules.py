"""Verification: which drafted tokens survive, and which token the target commits after them.

Two lossless rules. `match`: the target samples every slot; a draft survives while it equals the sample. `ratio`
(Leviathan et al. 2211.17192; Chen et al. 2302.01318): a draft d ~ q survives with probability min(1, p(d)/q(d)); the
first that does not is replaced by a draw from the residual max(0, p - q). Pure functions of laws and uniforms: no
model, no loop, no random stream, so that tests can enumerate the law of the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from draftloop.core.law import Law, inverse_cdf

Rule = Literal["match", "ratio"]


@dataclass(frozen=True)
class Proposal:
    """What the drafter proposed for each of b rows.

    Attributes:
        tokens: int64 [b, K].
        log_q: float32 [b, K], the log-probability each token was really drawn with (0 for an argmax).
        law: the law they were drawn from; hidden [b * K, H].
        lengths: int64 [b], how many of them are verified; None = all. Whether token k is may depend on the tokens
            before it and on the drafter's rows, never on token k itself: under `ratio` that would change the text's
            law.
    """

    tokens: Tensor
    log_q: Tensor
    law: Law
    lengths: Tensor | None = None

    def narrowed(self, width: int) -> Proposal:
        """Its first tokens alone, at least as many as any row has verified."""
        b, k = self.tokens.shape
        hidden = self.law.hidden.view(b, k, self.law.hidden.shape[-1])[:, :width].flatten(0, 1)
        return Proposal(self.tokens[:, :width], self.log_q[:, :width], replace(self.law, hidden=hidden), self.lengths)

    def among(self) -> Tensor:
        """Bool [b or 1, K], which tokens are verified."""
        place = torch.arange(self.tokens.shape[1], device=self.tokens.device).unsqueeze(0)
        return place < self.tokens.shape[1] if self.lengths is None else place < self.lengths.unsqueeze(1)


@dataclass(frozen=True)
class Coins:
    """The uniforms that one verification may use, float64 in (0, 1).

    Attributes:
        target: [b, K + 1], for tokens drawn from p.
        accept: [b, K].
        residual: [b, K].
    """

    target: Tensor
    accept: Tensor
    residual: Tensor


@dataclass(frozen=True)
class Verdict:
    """The outcome of one verification.

    Attributes:
        accepted: int64 [b], r = drafted tokens that survive.
        token: int64 [b], the token committed after them (correction, or bonus where all that were verified survive).
    """

    accepted: Tensor
    token: Tensor


def leading(run: Tensor) -> Tensor:
    """Bool [b, K] -> int64 [b], how many are true before the first that is not."""
    return run.long().cumprod(-1).sum(-1)


def trusted(confidence: Tensor, threshold: float) -> Tensor:
    """How many drafts are worth verifying: while the product of their confidences is at least the threshold.

    Confidence in draft k reads the tokens before it alone, and so does this count up to k.

    Args:
        confidence: logits [b, K], how likely each draft survives given that those before it did.
        threshold: in (0, 1].

    Returns:
        int64 [b], 0 to K.
    """
    return leading(F.logsigmoid(confidence).cumsum(-1) >= math.log(threshold))


def matching(drafts: Tensor, among: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
    """The parts of a `Verdict` by the rule `match`; integers alone, so compiling it changes no text.

    Args:
        drafts: int64 [b, K].
        among: bool [b or 1, K], which are verified.
        sample: int64 [b, K + 1], the target's own tokens.
    """
    accepted = leading((drafts == sample[:, : drafts.shape[1]]) & among)
    return accepted, sample.gather(1, accepted.unsqueeze(1)).squeeze(1)


Matching = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def verify(rule: Rule, proposal: Proposal, target: Law, coins: Coins, match: Matching = matching) -> Verdict:
    """Decide K drafted tokens a row, or the first `proposal.lengths` of them.

    Args:
        rule: `match` or `ratio`; at temperature 0 they are the same.
        proposal: the drafts.
        target: hidden [b * (K + 1), H]; row k of a block is the law after k drafted tokens.
        coins: uniforms, unused where nothing is random.
        match: `matching`, or the same compiled.
    """
    if rule == "match" or target.sampling.greedy or not proposal.tokens.shape[1]:  # nothing drafted: draw from p
        sample = target.draw(coins.target.reshape(-1))[0].view(coins.target.shape)
        return Verdict(*match(proposal.tokens, proposal.among(), sample))
    return _ratio(proposal, target, coins)


def _ratio(proposal: Proposal, target: Law, coins: Coins, chunk: int = 32) -> Verdict:
    b, k = proposal.tokens.shape
    accepted, token = [], []
    among = proposal.among().expand(b, k)
    for start in range(0, b, chunk):
        rows = range(start, min(start + chunk, b))
        n = len(rows)
        drafts = proposal.tokens[start : start + n]
        log_p = target.rows(slice(start * (k + 1), (start + n) * (k + 1))).log_probs().view(n, k + 1, -1)
        of_drafts = log_p[:, :k].gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
        ratio = (of_drafts.double() - proposal.log_q[start : start + n].double()).exp()
        verified = among[start : start + n]
        r = leading((coins.accept[start : start + n] < ratio) & verified)
        full = r == verified.sum(-1)
        p = log_p[torch.arange(n, device=r.device), r].double().exp()
        place = (torch.arange(start, start + n, device=r.device) * k + r).clamp(max=(start + n) * k - 1)
        q = proposal.law.rows(place).log_probs().double().exp()
        left = (p - q).clamp(min=0)
        # rounding can reject where p = q and leave nothing: then any draw from p is right; so it is where q is no
        # number, for no draft from such a row is ever accepted
        some = left.sum(-1) > 0
        weight = torch.where((full | ~some).unsqueeze(-1), p, left)
        last = coins.residual[start : start + n].gather(1, r.clamp(max=k - 1).unsqueeze(1)).squeeze(1)
        bonus = coins.target[start : start + n].gather(1, r.unsqueeze(1)).squeeze(1)
        uniform = torch.where(full, bonus, last)
        accepted.append(r)
        token.append(inverse_cdf(weight.log(), uniform))
    return Verdict(torch.cat(accepted), torch.cat(token))
