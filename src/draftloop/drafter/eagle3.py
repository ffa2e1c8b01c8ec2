"""EAGLE-3 (arXiv 2503.01840): one Llama layer over the target's features and its own states, drafting token by token.

Its inputs are the normed embedding and the normed state side by side, 2 H wide; the state itself is the residual
stream. It has a readout of its own, over the tokens that the target's answers hold most often (`vocabulary`), unless it
borrows the target's. Tensor names are those of the published checkpoints, but for `support`, which is their `d2t` as
ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftloop.core.errors import InputError
from draftloop.core.law import Readout
from draftloop.drafter.chain import ChainDrafter, ChainLayer
from draftloop.drafter.dflash import RMSNorm
from draftloop.drafter.spec import DrafterSpec, default_target_layers, shape_for
from draftloop.recipe import DrafterPart

DRAFT_VOCAB = 32000  # tokens of the published drafters


@dataclass(frozen=True, kw_only=True)
class Eagle3Spec(DrafterSpec):
    """Shape of an EAGLE-3 drafter.

    Attributes:
        draft_vocab: V_d, rows of its own readout; None = it borrows the target's.
        norm_before_residual: the normed state is what goes on beside, not the raw one (published drafters of
            speculators).
    """

    family = "eagle3"

    draft_vocab: int | None = None
    norm_before_residual: bool = False

    @property
    def reduced(self) -> bool:
        """Whether its readout lacks some of the target's tokens."""
        return self.draft_vocab is not None and self.draft_vocab < self.vocab_size

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers != 1:
            raise InputError(
                f"an EAGLE-3 drafter of {self.layers} layers is not portable",
                where="layers",
                fix="Set drafter.layers to 1 or leave it out (recipes/families/eagle3.yaml is a recipe for it).",
            )
        if self.draft_vocab is not None and not 1 <= self.draft_vocab <= self.vocab_size:
            raise InputError(
                f"draft_vocab {self.draft_vocab} is no part of a vocabulary of {self.vocab_size}",
                fix="Use 1 to all tokens of the target.",
            )


class Eagle3Layer(ChainLayer):
    """One Llama layer with inputs 2 H wide."""

    def __init__(self, spec: Eagle3Spec) -> None:
        super().__init__(spec, 2 * spec.hidden_size)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self._normed_beside = spec.norm_before_residual

    def join(self, state: Tensor, lifted: Tensor) -> tuple[Tensor, Tensor]:
        """As `ChainLayer.join`."""
        normed = self.hidden_norm(state)
        return normed if self._normed_beside else state, torch.cat([lifted, normed], -1)


class Eagle3(ChainDrafter):
    """The drafter. `bind` it to a target before use.

    Attributes:
        spec: shape.
        support: int64 [V_d], the target's ids of its readout's rows, ascending; None where it has all of them.
    """

    support: Tensor | None

    def __init__(self, spec: Eagle3Spec) -> None:
        super().__init__()
        self.spec = spec
        self.fc = nn.Linear(len(spec.target_layers) * spec.hidden_size, spec.hidden_size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(spec)])
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        own = spec.draft_vocab
        self.lm_head = nn.Linear(spec.hidden_size, own, bias=False) if own is not None else None
        self.register_buffer("support", torch.arange(own) if own is not None and spec.reduced else None)

    @property
    def layer(self) -> ChainLayer:
        """The one layer."""
        return self.layers[0]  # type: ignore[return-value]

    @property
    def readout(self) -> Readout:
        """Its own, trained with it; or the target's."""
        if self.lm_head is None:
            return super().readout
        return Readout(self.lm_head.weight, support=self.support, vocab_size=self.spec.vocab_size)

    def take(self, features: Tensor) -> Tensor:
        """As `ChainDrafter.take`: one projection of all tapped layers."""
        return self.fc(features)  # type: ignore[no-any-return]

    def give(self, output: Tensor) -> Tensor:
        """As `ChainDrafter.give`: before the norm."""
        return output

    def read(self, state: Tensor) -> Tensor:
        """As `ChainDrafter.read`: normed."""
        return self.norm(state)  # type: ignore[no-any-return]

    @torch.no_grad()
    def settle(self, target: Any) -> None:
        """Begin the readout as the target's own rows of its tokens."""
        if self.lm_head is None:
            return
        rows = target.readout.weight * target.readout.scale
        self.lm_head.weight.copy_(rows if self.support is None else rows[self.support.to(rows.device)])

    def meet(self, counts: Tensor, target: Any) -> None:
        """Choose the readout's tokens, once the answers to learn from are there, and settle it anew.

        Args:
            counts: int64 [V], how often each token is in them.
            target: a `Target`.
        """
        if self.support is None:
            return
        self.support.copy_(vocabulary(counts, len(self.support), target.eos_ids))
        self.settle(target)


def vocabulary(counts: Tensor, size: int, always: tuple[int, ...]) -> Tensor:
    """The `size` most frequent tokens, ascending; of equals the lower ids, which most tokenizers made first.

    Args:
        counts: int64 [V].
        size: at most V.
        always: tokens that come first whatever their count: an answer's end must be draftable.
    """
    wanted = counts.clone()
    wanted[list(always)] = torch.iinfo(torch.int64).max
    return wanted.sort(descending=True, stable=True).indices[:size].sort().values


def eagle3_spec(part: DrafterPart, target: Any) -> Eagle3Spec:
    """The shape of an EAGLE-3 drafter for a target; as `shape_for`."""
    layers = () if part.target_layers is not None else default_taps(target.num_layers, part.taps or 3)
    wanted = part.draft_vocab
    own = None if wanted == "target" else min(wanted or DRAFT_VOCAB, target.vocab_size)
    return Eagle3Spec(**shape_for(part, target, layers, depth=1), draft_vocab=own)


def default_taps(num_layers: int, taps: int) -> tuple[int, ...]:
    """Where engines look unless told otherwise: the outputs of layers 1, N/2 - 1 and N - 4; else evenly spread."""
    ids = (1, num_layers // 2 - 1, num_layers - 4)
    return ids if taps == 3 and ids[0] < ids[1] < ids[2] else default_target_layers(num_layers, taps)
