"""DFlash (arXiv 2602.06036): a block-parallel drafter that reads the target's features through its keys and values.

Slot 0 of a block holds the anchor token, slots 1..K the mask token; slot k predicts the token at anchor + k. A block
sees the target's features strictly below its anchor and itself, in both directions. Tensor names are those of the
published checkpoints, but for `mask_embedding`, the learned vector of a drafter whose target has no token to spare.
Embedding and readout belong to the target and are only borrowed (`bind`); sampling is not this room's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftloop.drafter.borrower import Borrower
from draftloop.drafter.cache import DraftCache, FixedDraftCache
from draftloop.drafter.draft import ParallelDrafter
from draftloop.drafter.masks import attend, block_mask
from draftloop.drafter.spec import DFlashSpec, DrafterSpec


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32 over the last axis."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape and type."""
        wide = x.float() if x.dtype != torch.float64 else x
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide.to(x.dtype)).to(x.dtype)


Turn = tuple[Tensor, Tensor]  # cosines and sines [b, 1, t, d] of rotary positions


def turning(positions: Tensor, width: int, theta: float, like: Tensor) -> Turn:
    """How heads turn at int64 [b, t]: the same in every layer, so it is computed once a forward.

    Args:
        width: d, of a head.
        theta: base of the wavelengths.
        like: of the type that is computed in, unless autocast says another.
    """
    auto = torch.is_autocast_enabled(like.device.type)
    kind = torch.get_autocast_dtype(like.device.type) if auto else like.dtype
    wide = torch.float64 if kind == torch.float64 else torch.float32
    half = width // 2
    frequency = theta ** (-torch.arange(half, device=positions.device, dtype=wide) / half)
    angle = positions[:, None, :, None].to(wide) * frequency
    return torch.cat([angle.cos()] * 2, -1).to(kind), torch.cat([angle.sin()] * 2, -1).to(kind)


def rotate(x: Tensor, turn: Turn) -> Tensor:
    """Rotary positions of [b, heads, t, d], rotate-half form."""
    half = x.shape[-1] // 2
    cos, sin = (one.to(x.dtype) for one in turn)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Attention(nn.Module):
    """Queries from the block; keys and values from context features and block, by the same projections."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = spec.heads, spec.kv_heads, spec.head_dim
        self.q_proj = nn.Linear(spec.hidden_size, spec.heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(spec.hidden_size, spec.kv_heads * spec.head_dim, bias=False)
        self.v_proj = nn.Linear(spec.hidden_size, spec.kv_heads * spec.head_dim, bias=False)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, spec.hidden_size, bias=False)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps)

    def keys_values(self, x: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        """[b, t, H] -> keys and values [b, kv heads, t, d]."""
        shape = (*x.shape[:-1], self.kv_heads, self.width)
        key = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        return rotate(key, turn), self.v_proj(x).view(shape).transpose(1, 2)

    def forward(self, x: Tensor, turn: Turn, context: tuple[Tensor, Tensor], mask: Any) -> Tensor:
        """Block stream x [b, q, H], context keys and values, mask over context + block -> [b, q, H]."""
        query = self.q_norm(self.q_proj(x).view(*x.shape[:-1], self.heads, self.width)).transpose(1, 2)
        key, value = self.keys_values(x, turn)
        query = rotate(query, turn)
        key, value = torch.cat([context[0].to(key.dtype), key], 2), torch.cat([context[1].to(value.dtype), value], 2)
        out = attend(query, key, value, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One decoder layer: attention into context and block, then the MLP."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = MLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)

    def forward(self, x: Tensor, turn: Turn, context: tuple[Tensor, Tensor], mask: Any) -> Tensor:
        """As `Attention.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), turn, context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class DFlash(ParallelDrafter, Borrower):
    """The drafter. `bind` it to a target before use.

    Attributes:
        spec: shape and mask.
        mask_embedding: [H], what the drafted slots hold where the spec says `learned_mask`; else None.
        readout: the target's, after `bind`.
        causal: whether a slot sees no later slot of its block; plain DFlash is not (a diagnosis asks what if).
        window: a slot sees no context feature that lies this far or further before it; None = it sees all.
        layer_kind: what its layers are; other families have others.
        compiled: the methods that a round of decoding calls, tensors in and tensors out.
    """

    causal = False
    window: int | None = None
    layer_kind: Callable[[Any], nn.Module] = Layer
    compiled = ("extend", "begin")

    def __init__(self, spec: DFlashSpec) -> None:
        super().__init__()
        self.spec = spec
        self.fc = nn.Linear(len(spec.target_layers) * spec.hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.layers = nn.ModuleList(self.layer_kind(spec) for _ in range(spec.layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.mask_embedding = nn.Parameter(torch.zeros(spec.hidden_size)) if spec.learned_mask else None

    @property
    def weight(self) -> Tensor:
        """As `Borrower.weight`."""
        return self.fc.weight

    @torch.no_grad()
    def settle(self, target: Any) -> None:
        """Begin a learned mask vector as the mean of the target's embedding rows: of their size, like no token's."""
        if self.mask_embedding is None:
            return
        total = torch.zeros(target.hidden_size, dtype=torch.float64)
        for ids in torch.arange(target.vocab_size).split(8192):  # a large vocabulary in float64 would take gigabytes
            total += target.embed(ids.to(target.device)).cpu().double().sum(0)
        self.mask_embedding.copy_(total / target.vocab_size)

    def _block(self, tokens: Tensor) -> Tensor:
        """Anchor tokens int64 [...] -> embeddings [..., B, H]: the anchor, then masks."""
        if self.mask_embedding is not None:
            first = self._embedded(tokens).unsqueeze(-2)
            masks = self.mask_embedding.to(first.dtype).expand(*tokens.shape, self.spec.block_size - 1, -1)
            return torch.cat([first, masks], -2)
        ids = tokens.unsqueeze(-1).repeat_interleave(self.spec.block_size, -1)
        ids[..., 1:].fill_(self.spec.mask_token_id)
        return self._embedded(ids)

    def _context(self, features: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(self._own(features)))  # type: ignore[no-any-return]

    def _turn(self, positions: Tensor, like: Tensor) -> Turn:
        return turning(positions, self.spec.head_dim, self.spec.rope_theta, like)

    def _context_kv(self, layer: nn.Module, context: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        return layer.self_attn.keys_values(context, turn)  # type: ignore[operator, union-attr, no-any-return]

    def forward(self, features: Tensor, anchor: Tensor, tokens: Tensor) -> Tensor:
        """Draft from many anchors of many trunks at once (the packed path).

        Args:
            features: [b, S, F * H] tapped target features of the trunks; an anchor sees those below it.
            anchor: int64 [b, N] positions, at most S; padding may hold any position.
            tokens: int64 [b, N], the token at each anchor.

        Returns:
            [b, N, K, H] hidden rows of the drafted slots, after the final norm.
        """
        b, n = anchor.shape
        size = self.spec.block_size
        context = self._context(features)
        where = torch.arange(features.shape[1], device=features.device).expand(b, -1)
        positions = (anchor.unsqueeze(-1) + torch.arange(size, device=anchor.device)).flatten(1)
        x = self._block(tokens).flatten(1, 2)
        mask = block_mask(anchor, features.shape[1], size, self.causal, self.window)
        turn, far = self._turn(positions, x), self._turn(where, x)
        for layer in self.layers:
            x = self.through(layer, x, turn, context, far, mask)
        return self.norm(x).unflatten(1, (n, size))[:, :, size - self.spec.drafted :]  # type: ignore[no-any-return]

    def through(self, layer: nn.Module, x: Tensor, turn: Turn, context: Tensor, far: Turn, mask: Any) -> Tensor:
        """One layer of the packed path, context included: what `compiled.compile_layers` compiles."""
        return layer(x, turn, self._context_kv(layer, context, far), mask)  # type: ignore[no-any-return]

    def new_cache(self, capacity: int) -> DraftCache:
        """An empty context cache for texts of at most `capacity` tokens."""
        return DraftCache(len(self.layers), capacity)

    def new_fixed_cache(self, rows: int, capacity: int) -> FixedDraftCache:
        """A context cache of `rows` texts whose tensors keep their size and place."""
        shape = (rows, self.spec.kv_heads, capacity, self.spec.head_dim)
        return FixedDraftCache(shape, len(self.layers), self.fc.weight.detach())

    @torch.no_grad()
    def extend(self, cache: DraftCache, features: Tensor, positions: Tensor, tokens: Tensor | None = None) -> None:
        """Put target features [b, t, F * H] at int64 [b, t] into the cache; a position given again is overwritten.

        The tokens there are not read.
        """
        context = self._context(features)
        turn = self._turn(positions, context)
        for i, layer in enumerate(self.layers):
            key, value = self._context_kv(layer, context, turn)
            cache.write(i, key, value, positions)

    @torch.no_grad()
    def begin(self, cache: DraftCache, anchor: Tensor, tokens: Tensor) -> Tensor:
        """Draft one block a row from cached context (the decode path).

        Args:
            cache: holds the features of every position below the anchors.
            anchor: int64 [b].
            tokens: int64 [b], the token at each anchor.

        Returns:
            [b, K, H] hidden rows of all drafted slots: a parallel drafter's law does not depend on what is drafted.
        """
        size = self.spec.block_size
        positions = anchor.unsqueeze(-1) + torch.arange(size, device=anchor.device)
        span = cache.span(anchor)
        place = torch.arange(span, device=anchor.device)
        seen = (place < anchor.unsqueeze(-1)).unsqueeze(1).expand(-1, size, -1)
        if self.window is not None:
            seen = seen & (positions.unsqueeze(-1) - place < self.window)
        own = torch.ones(size, size, dtype=torch.bool, device=anchor.device)
        own = own.tril() if self.causal else own
        mask = torch.cat([seen, own.expand(len(anchor), -1, -1)], -1).unsqueeze(1)
        x = self._block(tokens)
        turn = self._turn(positions, x)
        for i, layer in enumerate(self.layers):
            x = layer(x, turn, cache.read(i, span), mask)
        return self.norm(x)[:, size - self.spec.drafted :]  # type: ignore[no-any-return]
