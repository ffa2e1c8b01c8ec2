"""Law: a next-token distribution in its cheap form, hidden rows + a readout.

Sampling, verification, losses and metrics read only laws, a few rows at a time: nothing of shape
[anchors x K x vocabulary] is ever held. `Sampling` is what turns a law into the distribution that tokens are really
drawn from (temperature, top-k, top-p); its log-probability is stored with each token, so a stale q cannot happen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftloop.core.errors import InputError


@dataclass(frozen=True)
class Readout:
    """hidden [n, H] -> logits [n, V] over the target's vocabulary.

    Attributes:
        weight: [V, H] (or [V_d, H] with `support`), usually the target's own head, frozen.
        bias: [V] or None.
        scale: the logits are multiplied by it (Cohere, Granite).
        soft_cap: c in c * tanh(logits / c) (Gemma), or None.
        support: int64 [V_d], target ids of a reduced vocabulary's rows; logits elsewhere are -inf.
        vocab_size: V; needed only with `support`.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None
    support: Tensor | None = None
    vocab_size: int | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> float32 (or float64) [n, V]; contiguous rows, for bf16 matmuls crawl on strided ones."""
        z = F.linear(hidden.contiguous().to(self.weight.dtype), self.weight, self.bias)
        z = z if z.dtype == torch.float64 else z.float()
        if self.scale != 1.0:
            z = z * self.scale
        if self.soft_cap is not None:
            z = self.soft_cap * torch.tanh(z / self.soft_cap)
        if self.support is not None:
            assert self.vocab_size is not None
            full = z.new_full((*z.shape[:-1], self.vocab_size), float("-inf"))
            z = full.index_copy(-1, self.support, z)
        return z


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
        if self.top_k < 0 or not (0.0 < self.top_p <= 1.0):
            raise InputError(
                f"top_k {self.top_k} / top_p {self.top_p} are out of range", fix="top_k >= 0 and 0 < top_p <= 1."
            )

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


def inverse_cdf(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token a row: the first v whose cumulative probability exceeds `uniform`.

    Args:
        log_probs: [n, V], normalised or not.
        uniform: float64 [n] in (0, 1).

    Returns:
        int64 [n]; never a token of probability 0.
    """
    cumulative = log_probs.double().exp().cumsum(-1)
    level = uniform.unsqueeze(-1) * cumulative[..., -1:]
    token = torch.searchsorted(cumulative, level, right=True).squeeze(-1)
    # rounding may point behind the last token that has any mass
    last = cumulative.shape[-1] - 1 - (log_probs > float("-inf")).flip(-1).to(torch.int8).argmax(-1)
    return torch.minimum(token, last)


@dataclass(frozen=True)
class Law:
    """Distributions of many rows in cheap form.

    Attributes:
        hidden: [n, H] rows after the final norm.
        readout: what turns them into logits.
        sampling: how tokens are drawn from them.
    """

    hidden: Tensor
    readout: Readout
    sampling: Sampling

    def rows(self, index: Tensor | slice) -> Law:
        """The law of a selection of rows."""
        return Law(self.hidden[index], self.readout, self.sampling)

    def log_probs(self) -> Tensor:
        """[n, V]; call it on few rows."""
        return self.sampling.log_probs(self.readout.logits(self.hidden))

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
            logits = self.readout.logits(self.hidden[part])
            if self.sampling.greedy:
                tokens.append(logits.argmax(-1))
                scores.append(torch.zeros_like(tokens[-1], dtype=torch.float32))
                continue
            log_probs = self.sampling.log_probs(logits)
            token = inverse_cdf(log_probs, uniform[part])
            tokens.append(token)
            scores.append(log_probs.gather(-1, token.unsqueeze(-1)).squeeze(-1).float())
        if not tokens:
            empty = torch.empty(0, dtype=torch.int64, device=self.hidden.device)
            return empty, empty.float()
        return torch.cat(tokens), torch.cat(scores)
