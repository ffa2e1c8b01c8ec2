"""DSpark (arXiv 2607.05147): DFlash's backbone, a Markov head that looks at the token before, and a confidence head.

Every slot predicts, the anchor's too: slot k of B predicts the token at anchor + k + 1, so a block of B slots drafts B
tokens. The Markov head adds W2 a_k to the logits, where a_k comes from e_k = W1[y_{k-1}], the token before:

- `vanilla`: a = e; `gated`: a = sigmoid(G [h; e]) * e;
- `rnn`: [g; c; o] = J [s; e; h], s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c) from s = 0, a = tanh(o).

The confidence c_k = sigmoid(w [h_k; e_k] + b) estimates alpha_k = sum_v min(p_k, q_k), the chance that token k survives
given that those before it did. It reads nothing of token k itself: how many tokens are verified may depend on it.
Tensor names are those of the published checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftloop.core.errors import InputError
from draftloop.core.law import Readout
from draftloop.drafter.dflash import DFlash
from draftloop.drafter.draft import Draft, ParallelDraft
from draftloop.drafter.spec import DFlashSpec, block_shape
from draftloop.recipe import DrafterPart

Markov = Literal["vanilla", "gated", "rnn", "none"]
RANK = 256  # of the published drafters


@dataclass(frozen=True, kw_only=True)
class DSparkSpec(DFlashSpec):
    """Shape of a DSpark drafter.

    Attributes:
        markov: which Markov head.
        markov_rank: R; 0 without one.
        confidence: whether it has a confidence head.
    """

    family = "dspark"

    markov: Markov = "vanilla"
    markov_rank: int = RANK
    confidence: bool = True

    @property
    def drafted(self) -> int:
        """K = B tokens a block: the anchor's slot predicts as well."""
        return self.block_size

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.markov == "none") != (self.markov_rank == 0) or self.markov_rank < 0:
            raise InputError(
                f"a Markov head {self.markov} has no rank {self.markov_rank}",
                fix="Use a rank of at least 1, and 0 without a Markov head.",
            )


def dspark_spec(part: DrafterPart, target: Any) -> DSparkSpec:
    """The shape of a DSpark drafter for a target; as `shape_for`."""
    markov = part.markov or "vanilla"
    return DSparkSpec(
        **block_shape(part, target),
        markov=markov,
        markov_rank=0 if markov == "none" else part.markov_rank or RANK,
        confidence=part.confidence is not False,
    )


class MarkovHead(nn.Module):
    """What the token before adds to a slot's logits, up to the product with W2, which is the readout's."""

    def __init__(self, spec: DSparkSpec) -> None:
        super().__init__()
        rank = spec.markov_rank
        self.kind = spec.markov
        self.markov_w1 = nn.Embedding(spec.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, spec.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(spec.hidden_size + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(spec.hidden_size + 2 * rank, 3 * rank)

    def forward(self, hidden: Tensor, before: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Rows [h; a] of slots, and the state that a slot leaves to the next one.

        Args:
            hidden: [..., H].
            before: int64 [...], the token before each slot.
            state: [..., R] of the slot before, None at the first; kept by `rnn` alone.

        Returns:
            [..., H + R], and the new state.
        """
        embedded = self.markov_w1(before)
        added = embedded
        if self.kind == "gated":
            added = torch.sigmoid(self.gate_proj(_joined(hidden, embedded))) * embedded
        elif self.kind == "rnn":
            state = torch.zeros_like(embedded) if state is None else state
            gate, candidate, out = self.joint_proj(torch.cat([state, _joined(embedded, hidden)], -1)).chunk(3, -1)
            keep = torch.sigmoid(gate)
            state, added = (keep * state + (1 - keep) * torch.tanh(candidate)).to(state.dtype), torch.tanh(out)
        return _joined(hidden, added), state


class ConfidenceHead(nn.Module):
    """How likely a slot's token is to be accepted, as a logit."""

    def __init__(self, spec: DSparkSpec) -> None:
        super().__init__()
        self.proj = nn.Linear(spec.hidden_size + spec.markov_rank, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H + R] -> float32 (or float64) [...]; a threshold is compared with it, so it is not rounded."""
        wide = torch.float64 if self.proj.weight.dtype == torch.float64 else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(wide), self.proj.weight.to(wide), self.proj.bias.to(wide)).squeeze(-1)


class MarkovDraft(Draft):
    """Rows [h; a] whose second part reads the token before.

    Args:
        head: makes them.
        hidden: [..., K, H], the backbone's.
        anchor: int64 [...], the token at each anchor.
    """

    def __init__(self, head: MarkovHead, hidden: Tensor, anchor: Tensor) -> None:
        self._head, self._hidden, self._anchor = head, hidden, anchor
        self._state: Tensor | None = None
        self.drafted = hidden.shape[-2]

    def step(self, slot: int, previous: Tensor | None) -> Tensor:
        """Rows [..., H + R] given int64 [...]."""
        before, state = (self._anchor, None) if previous is None else (previous, self._state)
        row, self._state = self._head(self._hidden[..., slot, :], before, state)
        return row

    def forced(self, tokens: Tensor) -> Tensor:
        """Rows [..., K, H + R] given int64 [..., K]; at once where no state is handed on."""
        if self._head.kind == "rnn":
            return super().forced(tokens)
        rows: Tensor = self._head(self._hidden, tokens_before(self._anchor, tokens), None)[0]
        return rows


def tokens_before(anchor: Tensor, tokens: Tensor) -> Tensor:
    """int64 [...] anchor tokens and [..., K] drafts -> the token before each slot [..., K]."""
    return torch.cat([anchor.unsqueeze(-1), tokens[..., :-1]], -1)


def _joined(first: Tensor, second: Tensor) -> Tensor:
    """Both along the last axis, in the first one's type: under autocast the backbone decides."""
    return torch.cat([first, second.to(first.dtype)], -1)


class DSpark(DFlash):
    """The drafter; `bind` it to a target before use.

    Attributes:
        spec: shape, mask and heads.
        markov_head: None without one; the rows are then the backbone's.
        confidence_head: None without one.
    """

    spec: DSparkSpec

    def __init__(self, spec: DSparkSpec) -> None:
        super().__init__(spec)
        self.markov_head = MarkovHead(spec) if spec.markov != "none" else None
        self.confidence_head = ConfidenceHead(spec) if spec.confidence else None

    @property
    def readout(self) -> Readout:
        """The target's readout, and W2 for what the Markov head adds."""
        own = super().readout
        return own if self.markov_head is None else replace(own, added=self.markov_head.markov_w2.weight)

    @torch.no_grad()
    def settle(self, target: Any) -> None:
        """As DFlash's; the heads' biases begin at 0."""
        super().settle(target)
        for head in (self.markov_head, self.confidence_head):
            for name, parameter in head.named_parameters() if head is not None else ():
                if name.endswith("bias"):
                    parameter.zero_()

    def draft(self, cache: Any, anchor: Tensor, tokens: Tensor) -> Draft:
        """Draft one block a row from cached context; as `ParallelDrafter.draft`."""
        return self._draft(self.begin(cache, anchor, tokens), tokens)

    def pack(self, features: Tensor, anchor: Tensor, text: Tensor) -> Draft:
        """Draft from many anchors of many texts at once; as `ParallelDrafter.pack`."""
        tokens = text.gather(1, anchor)
        return self._draft(self(features, anchor, tokens), tokens)

    def _draft(self, hidden: Tensor, tokens: Tensor) -> Draft:
        return ParallelDraft(hidden) if self.markov_head is None else MarkovDraft(self.markov_head, hidden, tokens)

    def confidence(self, rows: Tensor, anchor: Tensor, tokens: Tensor) -> Tensor:
        """Logits of how likely each drafted token is to be accepted, given that those before it were.

        Args:
            rows: [..., K, W] of a draft.
            anchor: int64 [...], the token at each anchor.
            tokens: int64 [..., K], the drafted tokens; that of slot k is read by slot k + 1 alone, the last by none.

        Returns:
            float32 (or float64) [..., K].
        """
        assert self.confidence_head is not None, "the drafter has no confidence head"
        x = rows[..., : self.spec.hidden_size]
        if self.markov_head is not None:
            x = _joined(x, self.markov_head.markov_w1(tokens_before(anchor, tokens)))
        logits: Tensor = self.confidence_head(x)
        return logits
