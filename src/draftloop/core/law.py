"""Law: a next-token distribution in its cheap form, hidden rows + a readout.

Sampling, verification, losses and metrics read only laws, a few rows at a time: nothing of shape
[anchors x K x vocabulary] is ever held. `Sampling` is what turns a law into the distribution that tokens are really
drawn from (temperature, top-k, top-p); its log-probability is stored with each token, so a stale q cannot happen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftloop.core.errors import InputError


@dataclass(frozen=True)
class Candidates:
    """The only tokens that some rows can give: the k with the largest base logits, among equals the lower ids.

    Attributes:
        ids: int64 [..., k], ascending.
        base: [..., k], their base logits.
    """

    ids: Tensor
    base: Tensor

    def __getitem__(self, index: Any) -> Candidates:
        """Those of a selection of rows."""
        return Candidates(self.ids[index], self.base[index])


@dataclass(frozen=True)
class Readout:
    """Rows [n, W] -> logits [n, V] over the target's vocabulary; W = H, the width of a hidden row, unless `added`.

    Attributes:
        weight: [V, H] (or [V_d, H] with `support`), usually the target's own head, frozen.
        bias: [V] or None.
        scale: the logits are multiplied by it (Cohere, Granite).
        soft_cap: c in c * tanh(logits / c) (Gemma), or None.
        support: int64 [V_d], target ids of a reduced vocabulary's rows; logits elsewhere are -inf.
        vocab_size: V; needed only with `support`.
        added: [V, R]: W = H + R, and the row's last R numbers times it are added to the logits. So a bias that depends
            on the token before (DSpark's Markov head) is part of the row, and no law needs to know of it.
        candidates: k: only the k tokens with the largest base logits (those before `added`) have any chance, and only
            for them is `added` computed; logits elsewhere are -inf. 0 = all. Among equal base logits lower ids win,
            wherever and in whichever type the law is computed (in bfloat16 equals are common). Not with `support`.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None
    support: Tensor | None = None
    vocab_size: int | None = None
    added: Tensor | None = None
    candidates: int = 0

    @property
    def uncut(self) -> Readout:
        """The same logits over the whole vocabulary, whatever the candidates."""
        return replace(self, candidates=0) if self.candidates else self

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """What of it is trained; empty for a head that is only borrowed."""
        every = (self.weight, self.bias, self.added)
        return tuple(one for one in every if one is not None and one.requires_grad)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, W] -> float32 (or float64) [n, V]; contiguous rows, for bf16 matmuls crawl on strided ones."""
        if self.candidates:
            found = self.shortlist(hidden)
            scores = self.scores(hidden, found)
            return _spread(scores, found.ids, self.weight.shape[0])
        z = self._base(hidden)
        if self.added is not None:
            z = z + F.linear(self._tail(hidden).contiguous(), self.added).to(z.dtype)
        if self.support is not None:
            assert self.vocab_size is not None
            full = z.new_full((*z.shape[:-1], self.vocab_size), float("-inf"))
            z = full.index_copy(-1, self.support, z)
        return z

    def shortlist(self, hidden: Tensor) -> Candidates:
        """The candidates of rows [..., W], of which only the first H numbers are read."""
        assert self.candidates, "this readout has all tokens for candidates"
        assert self.support is None, "candidates of a reduced vocabulary are not defined"
        z = self._base(hidden)
        ids = _largest(z.detach(), self.candidates)
        return Candidates(ids, z.gather(-1, ids))

    def scores(self, hidden: Tensor, candidates: Candidates) -> Tensor:
        """Logits [..., k] of the candidates of rows [..., W]."""
        if self.added is None:
            return candidates.base
        rows = self.added[candidates.ids]  # [..., k, R]
        return candidates.base + (rows @ self._tail(hidden).unsqueeze(-1)).squeeze(-1).to(candidates.base.dtype)

    def _base(self, hidden: Tensor) -> Tensor:
        z = F.linear(hidden[..., : self.weight.shape[1]].contiguous().to(self.weight.dtype), self.weight, self.bias)
        z = z if z.dtype == torch.float64 else z.float()
        if self.scale != 1.0:
            z = z * self.scale
        if self.soft_cap is not None:
            z = self.soft_cap * torch.tanh(z / self.soft_cap)
        return z

    def _tail(self, hidden: Tensor) -> Tensor:
        assert self.added is not None
        return hidden[..., self.weight.shape[1] :].to(self.added.dtype)


def _largest(z: Tensor, k: int) -> Tensor:
    """int64 [..., k], ascending: places of the k largest of [..., V], among equals the first (topk leaves it open)."""
    k = min(k, z.shape[-1])
    least = z.topk(k, dim=-1).values[..., -1:]
    # float32 holds every place of a vocabulary exactly, and exactly k are taken without asking the device how many tie
    order = torch.arange(0, -z.shape[-1], -1, device=z.device, dtype=torch.float32)
    rank = torch.where(z == least, order, float("-inf")).masked_fill_(z > least, 1.0)
    return rank.topk(k, dim=-1).indices.sort(dim=-1).values


def _spread(values: Tensor, ids: Tensor, size: int) -> Tensor:
    """[..., k] -> [..., size] with -inf elsewhere."""
    return values.new_full((*values.shape[:-1], size), float("-inf")).scatter(-1, ids, values)


_COLDEST = 1e-6


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn from a law. temperature 0 = greedy (a point mass on the first largest logit).

    Args:
        temperature: 0, or at least 1e-6 (float32 logits overflow when divided by less).
        top_k: keep the k most likely tokens, and those that tie with the k-th; 0 = all.
        top_p: of what top_k keeps, keep the smallest set of most likely tokens whose mass reaches top_p (among ties,
            lower ids first); 1 = all.

    Raises:
        InputError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature != 0.0 and not (_COLDEST <= self.temperature < float("inf")):
            raise InputError(
                f"temperature {self.temperature} is neither 0 nor a number from {_COLDEST} up",
                fix="Use 0 for greedy, 1 for plain sampling.",
            )
        if self.top_k < 0:
            raise InputError(f"top_k {self.top_k} is below 0", fix="Use 0 to draw from all tokens.")
        if not (0.0 < self.top_p <= 1.0):
            raise InputError(f"top_p {self.top_p} is not above 0 and at most 1", fix="Use 1 to draw from all tokens.")

    @property
    def greedy(self) -> bool:
        """Whether every draw is the argmax."""
        return self.temperature == 0.0

    def log_probs(self, logits: Tensor) -> Tensor:
        """Float [n, V] logits -> log-probabilities [n, V] of the law really drawn from (-inf where filtered)."""
        if self.greedy:
            return torch.full_like(logits, float("-inf")).scatter_(-1, logits.argmax(-1, keepdim=True), 0.0)
        z = logits if self.temperature == 1.0 else logits / self.temperature
        if self.top_k and self.top_k < z.shape[-1]:
            kth = z.topk(self.top_k, dim=-1).values[..., -1:]
            z = z.masked_fill(z < kth, float("-inf"))
        if self.top_p < 1.0:
            ordered, index = z.sort(dim=-1, descending=True, stable=True)
            mass = ordered.softmax(-1)
            drop = mass.cumsum(-1) - mass >= self.top_p  # keeps the token that crosses the line
            z = z.masked_fill(torch.zeros_like(drop).scatter_(-1, index, drop), float("-inf"))
        return z.log_softmax(-1)


_GROUP = 256  # tokens: a running sum along a whole vocabulary is slow, and float64 of it is large


def inverse_cdf(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token a row: the first v whose cumulative probability exceeds `uniform`.

    In two steps, the group of tokens and then the token: only sums of groups and a single group are read in float64,
    while the group's own sum has the type of `log_probs`, which already rounds every probability as much.

    Args:
        log_probs: [n, V], normalised or not.
        uniform: float64 [n] in (0, 1).

    Returns:
        int64 [n]; never a token of probability 0. A row without any probability (all -inf, or NaN) gives the last one.
    """
    mass = log_probs.exp()
    size = mass.shape[-1]
    whole = size // _GROUP
    sums = mass[..., : whole * _GROUP].unflatten(-1, (whole, _GROUP)).sum(-1)
    if whole * _GROUP < size:
        sums = torch.cat([sums, mass[..., whole * _GROUP :].sum(-1, keepdim=True)], -1)
    running = sums.double().cumsum(-1)
    level = uniform.unsqueeze(-1) * running[..., -1:]
    group = _first_beyond(sums, running, level)
    below = torch.where(group > 0, running.gather(-1, (group - 1).clamp(min=0)), 0.0)
    tokens = group * _GROUP + torch.arange(min(_GROUP, size), device=mass.device)
    near = mass.gather(-1, tokens.clamp(max=size - 1)).double().masked_fill(tokens >= size, 0.0)
    place = _first_beyond(near, near.cumsum(-1), level - below)
    return (group * _GROUP + place).clamp(max=size - 1).squeeze(-1)


def _first_beyond(mass: Tensor, running: Tensor, level: Tensor) -> Tensor:
    """int64 [n, 1]: first place of [n, m] with mass whose running sum exceeds the level, else the last with mass.

    Asked of every place, not searched for: sums that a GPU takes in parallel need not rise where nothing is added.
    """
    there = mass > 0
    beyond = there & (running > level)
    last = mass.shape[-1] - 1 - there.flip(-1).to(torch.int8).argmax(-1, keepdim=True)
    return torch.where(beyond.any(-1, keepdim=True), beyond.to(torch.int8).argmax(-1, keepdim=True), last)


@dataclass(frozen=True)
class Law:
    """Distributions of many rows in cheap form.

    Attributes:
        hidden: [n, W] rows after the final norm.
        readout: what turns them into logits.
        sampling: how tokens are drawn from them.
        candidates: of these rows, where they are known already and the readout has some; else they are found.
    """

    hidden: Tensor
    readout: Readout
    sampling: Sampling
    candidates: Candidates | None = None

    def rows(self, index: Tensor | slice) -> Law:
        """The law of a selection of rows."""
        known = None if self.candidates is None else self.candidates[index]
        return Law(self.hidden[index], self.readout, self.sampling, known)

    def log_probs(self) -> Tensor:
        """[n, V]; call it on few rows."""
        log_probs, ids = self._points()
        return log_probs if ids is None else _spread(log_probs, ids, self.readout.weight.shape[0])

    def draw(self, uniform: Tensor, chunk: int = 256) -> tuple[Tensor, Tensor]:
        """One token a row and the log-probability that it was drawn with, `chunk` rows at a time.

        Args:
            uniform: float64 [n] in (0, 1); unused when greedy.

        Returns:
            tokens int64 [n], log-probabilities float32 [n] (0 when greedy).
        """
        tokens, scores = [], []
        for start in range(0, self.hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            few = self.rows(part)
            if self.sampling.greedy:
                logits, ids = few._logits()
                token = logits.argmax(-1)
                score = torch.zeros_like(token, dtype=torch.float32)
            else:
                log_probs, ids = few._points()
                token = inverse_cdf(log_probs, uniform[part])
                score = log_probs.gather(-1, token.unsqueeze(-1)).squeeze(-1).float()
            tokens.append(token if ids is None else ids.gather(-1, token.unsqueeze(-1)).squeeze(-1))
            scores.append(score)
        if not tokens:
            empty = torch.empty(0, dtype=torch.int64, device=self.hidden.device)
            return empty, empty.float()
        if len(tokens) == 1:  # a piece alone would be copied
            return tokens[0], scores[0]
        return torch.cat(tokens), torch.cat(scores)

    def _logits(self) -> tuple[Tensor, Tensor | None]:
        """Logits [n, k] and which tokens they are of (int64 [n, k], ascending; None: of all, k = V)."""
        if not self.readout.candidates:
            return self.readout.logits(self.hidden), None
        found = self.candidates or self.readout.shortlist(self.hidden)
        return self.readout.scores(self.hidden, found), found.ids

    def _points(self) -> tuple[Tensor, Tensor | None]:
        """As `_logits`, log-probabilities of the law really drawn from."""
        logits, ids = self._logits()
        return self.sampling.log_probs(logits), ids
