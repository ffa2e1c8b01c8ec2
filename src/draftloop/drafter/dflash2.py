"""DFlash 2 (Inco and z-lab, August 2026): DFlash with short convolutions along the block and a selector of paths.

Convolutions. Before and after each sublayer, slot t of a block becomes sum_o (base[o] + delta_t[o]) * x_{t-o} over its
taps o = 0, 1 (or more): what lies before the block's first slot is 0, so nothing crosses its edge. delta is one number
for every group of channels; those of both convolutions of a sublayer come from one projection of its normed input. They
begin as the identity, and the drafter as a plain DFlash.

Selector. With U_k the logits of slot k, the token a drafted before it is seen through two codebooks,

    S_k(a, b) = U_k(b) + <A[a] * (W_h h_k), B[b]>,

for the k tokens b with the largest U_k alone (among equals the lower ids, `core.law.Readout.candidates`): that law of a
few points is the one that is drawn from, verified and trained for overlap. Rows are [h; A[a] * (W_h h)], and B is the
readout's `added`; B begins at 0. Cross-entropy and KL are taken before the cut, on S over the whole vocabulary: the law
of few points gives no gradient to a token that is no candidate and should be one. alpha is at most p's mass of the
candidates, so an overlap objective wants a share of cross-entropy beside it (`objective.ce_weight`). Tensor names are
those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftloop.core.errors import InputError
from draftloop.core.law import Candidates, Law, Readout, Sampling
from draftloop.drafter.dflash import DFlash, Layer, Turn
from draftloop.drafter.draft import Choose, Draft
from draftloop.drafter.spec import DFlashSpec, block_shape
from draftloop.recipe import DrafterPart

RANK, TOP_K, TAPS, GROUP = 256, 16, 2, 16  # of the published drafters
_AT_ONCE = 256  # rows whose logits are held while candidates are looked for


@dataclass(frozen=True, kw_only=True)
class DFlash2Spec(DFlashSpec):
    """Shape of a DFlash 2 drafter.

    Attributes:
        selector_rank: R, width of the codebooks.
        selector_top_k: how many candidates a slot has.
        conv_kernel_size: taps of a convolution, the slot's own included.
        conv_group_size: channels that share a delta.
        sliding_window: the context that a slot sees, counted from its own position; None = all. Ours see all of it,
            published ones have 2048.
        output_multiplier, final_logit_softcapping: the drafter's U is these of the plain product with the target's
            readout, scaled first; they stand in place of the target's own.
    """

    family = "dflash2"

    selector_rank: int = RANK
    selector_top_k: int = TOP_K
    conv_kernel_size: int = TAPS
    conv_group_size: int = GROUP
    sliding_window: int | None = None
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for what in ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size"):
            if getattr(self, what) < 1:
                raise InputError(f"{what} {getattr(self, what)} is not a size", fix="Use at least 1.")
        if self.selector_top_k > self.vocab_size:
            raise InputError(
                f"{self.selector_top_k} candidates are more than the {self.vocab_size} tokens that there are",
                where="selector_top_k",
                fix=f"Use at most {self.vocab_size}, usually {TOP_K}.",
            )
        if self.conv_kernel_size > self.block_size:
            raise InputError(
                f"a convolution of {self.conv_kernel_size} taps is longer than the block of {self.block_size}",
                where="conv_kernel_size",
                fix=f"Use at most {self.block_size}, usually {TAPS}.",
            )
        if self.hidden_size % self.conv_group_size:
            raise InputError(
                f"{self.hidden_size} channels do not fall into groups of {self.conv_group_size}",
                where="conv_group_size",
                fix="Use a divisor of the hidden size.",
            )
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise InputError(
                f"a window of {self.sliding_window} is shorter than the block of {self.block_size}",
                where="sliding_window",
                fix="Use the one that it was trained with.",
            )


def dflash2_spec(part: DrafterPart, target: Any) -> DFlash2Spec:
    """The shape of a DFlash 2 drafter for a target; as `shape_for`."""
    return DFlash2Spec(
        **block_shape(part, target),
        selector_rank=part.selector_rank or RANK,
        selector_top_k=part.selector_top_k or TOP_K,
        conv_kernel_size=part.conv_kernel_size or TAPS,
        conv_group_size=part.conv_group_size or GROUP,
        output_multiplier=target.readout.scale,
        final_logit_softcapping=target.readout.soft_cap,
    )


class GroupedConv(nn.Module):
    """The convolutions before and after one sublayer.

    Attributes:
        base_kernel: [2, taps, H]: of what goes into the sublayer, and of what comes out of it.
        kernel_projection: H -> 2 * taps * groups, the deltas of both.
    """

    def __init__(self, spec: DFlash2Spec) -> None:
        super().__init__()
        self.block, self.taps, self.width = spec.block_size, spec.conv_kernel_size, spec.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, spec.hidden_size))
        groups = spec.hidden_size // self.width
        self.kernel_projection = nn.Linear(spec.hidden_size, 2 * self.taps * groups, bias=False)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Normed input [b, N * B, H] of whole blocks -> the sublayer's output, convolved on both sides."""
        deltas = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        inside = self._convolve(x, deltas[..., 0, :, :], self.base_kernel[0])
        return self._convolve(sublayer(inside), deltas[..., 1, :, :], self.base_kernel[1])

    def _convolve(self, x: Tensor, delta: Tensor, base: Tensor) -> Tensor:
        """Convolve x [b, N * B, H] by delta [b, N * B, taps, groups], base [taps, H] -> [b, N * B, H], in x's type."""
        blocks = x.unflatten(1, (-1, self.block)).unflatten(-1, (-1, self.width))  # [b, N, B, groups, width]
        delta = delta.unflatten(1, (-1, self.block)).unsqueeze(-1)
        base = base.unflatten(-1, (-1, self.width))
        out = (base[0] + delta[..., 0, :, :]) * blocks
        for tap in range(1, self.taps):
            shifted = F.pad(blocks[:, :, : self.block - tap], (0, 0, 0, 0, tap, 0))
            out = out + (base[tap] + delta[..., tap, :, :]) * shifted
        return out.flatten(-2).flatten(1, 2).to(x.dtype)


class ConvLayer(Layer):
    """A decoder layer of DFlash with convolutions around attention and MLP."""

    def __init__(self, spec: DFlash2Spec) -> None:
        super().__init__(spec)
        self.attention_conv = GroupedConv(spec)
        self.mlp_conv = GroupedConv(spec)

    def forward(self, x: Tensor, turn: Turn, context: tuple[Tensor, Tensor], mask: Any) -> Tensor:
        """As `Layer.forward`."""

        def attention(inside: Tensor) -> Tensor:
            return self.self_attn(inside, turn, context, mask)  # type: ignore[no-any-return]

        x = x + self.attention_conv(self.input_layernorm(x), attention)
        return x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp)  # type: ignore[no-any-return]


class Selector(nn.Module):
    """The two codebooks, A [V, R] and B [V, R], and W_h."""

    def __init__(self, spec: DFlash2Spec) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(spec.vocab_size, spec.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(spec.vocab_size, spec.selector_rank))
        self.hidden_projection = nn.Linear(spec.hidden_size, spec.selector_rank, bias=False)


class PathDraft(Draft):
    """Rows [h; A[a] * (W_h h)], a the token before; the backbone's part of all slots is there from the beginning.

    Args:
        hidden: [..., K, H], the backbone's.
        projected: [..., K, R], W_h of them.
        anchor: int64 [...], the token at each anchor.
        codebook: A [V, R].
        readout: of the rows.
    """

    def __init__(self, hidden: Tensor, projected: Tensor, anchor: Tensor, codebook: Tensor, readout: Readout) -> None:
        self._hidden, self._projected, self._anchor = hidden, projected, anchor
        self._codebook, self._readout = codebook, readout
        self._found: Candidates | None = None
        self.drafted = hidden.shape[-2]

    def step(self, slot: int, previous: Tensor | None) -> Tensor:
        """Rows [..., H + R] given int64 [...]: two products of R numbers, no matter how large the vocabulary."""
        before = self._anchor if previous is None else previous
        return self._rows(self._hidden[..., slot, :], self._projected[..., slot, :], before)

    def forced(self, tokens: Tensor) -> Tensor:
        """Rows [..., K, H + R] given int64 [..., K], all at once."""
        before = torch.cat([self._anchor.unsqueeze(-1), tokens[..., :-1]], -1)
        return self._rows(self._hidden, self._projected, before)

    def drawn(self, choose: Choose) -> tuple[Tensor, Tensor, Tensor]:
        """As `Draft.drawn`; the graph is that of all slots at once, for what is drawn is known then."""
        if not torch.is_grad_enabled():
            return super().drawn(choose)
        with torch.no_grad():
            tokens, scores, _ = super().drawn(choose)
        return tokens, scores, self.forced(tokens)

    def law(self, rows: Tensor, slots: slice, readout: Readout, sampling: Sampling, only: Any = ...) -> Law:
        """As `Draft.law`. Candidates do not depend on the path: they are looked for once, for all slots."""
        found = self._candidates()[..., slots, :][only]
        known = Candidates(found.ids.flatten(0, 1), found.base.flatten(0, 1))
        return Law(rows[only].flatten(0, 1), readout, sampling, known)

    def at(self, cells: tuple[Tensor, ...]) -> PathDraft:
        """The rows of these blocks."""
        return PathDraft(
            self._hidden[cells], self._projected[cells], self._anchor[cells], self._codebook, self._readout
        )

    def _rows(self, hidden: Tensor, projected: Tensor, before: Tensor) -> Tensor:
        # in the backbone's type, also under autocast: the same rows as the drafter is served with
        return torch.cat([hidden, (self._codebook[before] * projected).to(hidden.dtype)], -1)

    @torch.no_grad()
    def _candidates(self) -> Candidates:
        """[..., K, k] of all slots."""
        if self._found is None:
            rows, shape = self._hidden.flatten(0, -2), self._hidden.shape[:-1]
            parts = [self._readout.shortlist(part) for part in rows.split(_AT_ONCE)]
            ids, base = torch.cat([part.ids for part in parts]), torch.cat([part.base for part in parts])
            self._found = Candidates(ids.view(*shape, -1), base.view(*shape, -1))
        return self._found


class DFlash2(DFlash):
    """The drafter; `bind` it to a target before use.

    Attributes:
        spec: shape, mask, convolutions and selector.
        candidate_selector: A, B and W_h.
    """

    spec: DFlash2Spec
    layer_kind = ConvLayer

    def __init__(self, spec: DFlash2Spec) -> None:
        super().__init__(spec)
        self.window = spec.sliding_window
        self.candidate_selector = Selector(spec)

    @property
    def readout(self) -> Readout:
        """U by the target's readout, B for what the selector adds, and how many candidates a row has."""
        return replace(
            super().readout,
            scale=self.spec.output_multiplier,
            soft_cap=self.spec.final_logit_softcapping,
            added=self.candidate_selector.successor_codebook,
            candidates=self.spec.selector_top_k,
        )

    @torch.no_grad()
    def settle(self, target: Any) -> None:
        """As DFlash's; convolutions begin as the identity, and B at 0."""
        super().settle(target)
        for layer in self.layers:
            for conv in (layer.attention_conv, layer.mlp_conv):
                conv.base_kernel.zero_()  # type: ignore[union-attr, operator]
                conv.base_kernel[:, 0] = 1.0  # type: ignore[union-attr, index, operator]
                conv.kernel_projection.weight.zero_()  # type: ignore[union-attr, operator]
        self.candidate_selector.successor_codebook.zero_()

    def draft(self, cache: Any, anchor: Tensor, tokens: Tensor) -> Draft:
        """Draft one block a row from cached context; as `ParallelDrafter.draft`."""
        return self._path(self.begin(cache, anchor, tokens), tokens)

    def pack(self, features: Tensor, anchor: Tensor, text: Tensor) -> Draft:
        """Draft from many anchors of many texts at once; as `ParallelDrafter.pack`."""
        tokens = text.gather(1, anchor)
        return self._path(self(features, anchor, tokens), tokens)

    def _path(self, hidden: Tensor, tokens: Tensor) -> Draft:
        selector = self.candidate_selector
        return PathDraft(
            hidden, selector.hidden_projection(hidden), tokens, selector.predecessor_codebook, self.readout
        )
