"""Drafters whose one layer reads its own output, token by token (EAGLE-3, multi-token prediction).

Write g_j for the target's feature at position j as the drafter takes it in (`take`), and x_j for the token there. The
layer's input for position j pairs g_j with the embedding of x_{j+1}; from its row x_{j+2} is predicted. Let a be an
anchor. Slot 1 of its chain is the input for a - 1, (g_{a-1}, x_a); slot k > 1 the input for a - 2 + k, (the layer's own
output in slot k - 1, the token drafted there). A slot sees the inputs of all positions below a - 1, made of the
target's features, and slots 1..k of its chain. This is what engines compute after a verification, which puts inputs
made of features in the place of the last chain's, and what training-time test unrolls (EAGLE-3, arXiv 2503.01840).

With one layer, keys and values of context are projections of inputs: context needs no attention of its own. They lie in
slot j + 1 of the cache, written when x_{j+1} becomes known; so an anchor sees slots 1..a - 1, and slot 0 is nothing's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftloop.drafter.borrower import Borrower
from draftloop.drafter.cache import DraftCache, FixedDraftCache
from draftloop.drafter.dflash import MLP, RMSNorm, Turn, rotate, turning
from draftloop.drafter.draft import Draft
from draftloop.drafter.masks import CachedChains, PackedChains
from draftloop.drafter.spec import DrafterSpec

Chains = PackedChains | CachedChains


class ChainAttention(nn.Module):
    """Projections of the layer's inputs; a family may give heads their own norm.

    Args:
        spec: heads.
        width: of the inputs.
        normed: whether queries and keys are normed head by head.
    """

    def __init__(self, spec: DrafterSpec, width: int, normed: bool = False) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width, self.theta = spec.heads, spec.kv_heads, spec.head_dim, spec.rope_theta
        self.q_proj = nn.Linear(width, spec.heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(width, spec.kv_heads * spec.head_dim, bias=False)
        self.v_proj = nn.Linear(width, spec.kv_heads * spec.head_dim, bias=False)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, spec.hidden_size, bias=False)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps) if normed else nn.Identity()
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps) if normed else nn.Identity()

    def turned(self, positions: Tensor, like: Tensor) -> Turn:
        """How heads turn at int64 [b, t], in the type of `like` or autocast's."""
        return turning(positions, self.width, self.theta, like)

    def projected(self, x: Tensor, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
        """[b, t, width] -> queries [b, heads, t, d], which are turned with the keys; keys and values as below."""
        query, key, value = (one(x).unflatten(-1, (-1, self.width)) for one in (self.q_proj, self.k_proj, self.v_proj))
        both = torch.cat([self.q_norm(query), self.k_norm(key)], 2).transpose(1, 2)
        query, key = rotate(both, turn).split([self.heads, self.kv_heads], 1)
        return query, key, value.transpose(1, 2)

    def keys_values(self, x: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        """[b, t, width] -> keys and values [b, kv heads, t, d]."""
        shape = (*x.shape[:-1], self.kv_heads, self.width)
        key = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        return rotate(key, turn), self.v_proj(x).view(shape).transpose(1, 2)

    def output(self, found: Tensor, x: Tensor) -> Tensor:
        """What attention found [b, heads, t, d], for inputs [b, t, width] -> [b, t, H]."""
        return self.o_proj(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class ChainLayer(nn.Module):
    """The one layer; a family says how it joins a state and an embedding.

    Args:
        spec: shape.
        width: of what attention projects.
        normed: as in `ChainAttention`.
    """

    def __init__(self, spec: DrafterSpec, width: int, normed: bool = False) -> None:
        super().__init__()
        self.self_attn = ChainAttention(spec, width, normed)
        self.mlp = MLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)

    def join(self, state: Tensor, lifted: Tensor) -> tuple[Tensor, Tensor]:
        """State and normed embedding [..., H] -> residual stream [..., H], and what attention projects [..., width]."""
        raise NotImplementedError

    def close(self, stream: Tensor, found: Tensor, x: Tensor) -> Tensor:
        """The layer's output [b, t, H], from what attention found."""
        stream = stream + self.self_attn.output(found, x)
        return stream + self.mlp(self.post_attention_layernorm(stream))  # type: ignore[no-any-return]


class ChainCache(DraftCache):
    """Keys and values by slot, and the features as taken in by position: a verified position's waits for its token."""

    taken: Tensor | None = None  # [rows, capacity, H]

    def keep(self, taken: Tensor, positions: Tensor) -> None:
        """Put features [rows, t, H] at int64 [rows, t]."""
        if self.taken is None:
            self.taken = taken.new_zeros(taken.shape[0], self.capacity, taken.shape[2])
        self.taken.scatter_(1, positions.unsqueeze(-1).expand_as(taken), taken)

    def kept(self, positions: Tensor) -> Tensor | None:
        """[rows, t, H] at int64 [rows, t]; None while there is nothing."""
        if self.taken is None:
            return None
        return self.taken.gather(1, positions.unsqueeze(-1).expand(-1, -1, self.taken.shape[2]))

    def select(self, rows: Tensor) -> None:
        """As `DraftCache.select`."""
        super().select(rows)
        self.taken = None if self.taken is None else self.taken.index_select(0, rows)


class FixedChainCache(FixedDraftCache, ChainCache):
    """The same, of tensors that keep their size and place; `width` H. Values may have a shape of their own."""

    taken: Tensor

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        width: int,
        like: Tensor,
        values: tuple[int, int, int, int] | None = None,
    ) -> None:
        super().__init__(shape, 1, like)
        if values is not None:
            self._values[:] = [like.new_zeros(values)]
        self.taken = like.new_zeros(shape[0], shape[2], width)

    def keep(self, taken: Tensor, positions: Tensor) -> None:
        """As `ChainCache.keep`; in place also where it is compiled."""
        self.taken[self._row, positions] = taken

    def admit(self, rows: Tensor, prompts: Any, width: int) -> None:
        """As `FixedDraftCache.admit`; `prompts` is a `ChainCache`."""
        super().admit(rows, prompts, width)
        self.taken[rows, :width] = prompts.taken[:, :width].to(self.taken.dtype)


class ChainDrafter(Borrower):
    """What such drafters have in common. A family builds `layer` and says what it takes in and gives out.

    Attributes:
        compiled: the methods that a round of decoding calls, tensors in and tensors out.
    """

    compiled: tuple[str, ...] = ("extend", "advance")

    spec: Any

    # the family's part -----------------------------------------------------------------------------------------------
    @property
    def layer(self) -> ChainLayer:
        """The one layer."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """As `Borrower.weight`."""
        return self.layer.self_attn.o_proj.weight

    def lift(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """What an input has of its token: normed embeddings [..., H] of int64 [...], for inputs at int64 [...]."""
        return self.layer.input_layernorm(self._embedded(tokens))  # type: ignore[no-any-return]

    def turned(self, positions: Tensor, like: Tensor) -> Any:
        """How heads turn at int64 [b, t]: tensors whose last axis but one is t."""
        return self.layer.self_attn.turned(positions, like)

    def keys_values(self, state: Tensor, lifted: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [b, kv heads, t, d] of inputs: states and `lift`ed tokens [b, t, H] at int64 [b, t]."""
        turn = self.turned(positions, state)
        return self.layer.self_attn.keys_values(self.layer.join(state, lifted)[1], turn)

    def through(self, state: Tensor, lifted: Tensor, positions: Tensor, turn: Any, chains: Chains) -> Tensor:
        """The layer's output [b, N, H] for inputs of one slot; `chains` attends."""
        stream, x = self.layer.join(state, lifted)
        found = chains.attend(*self.layer.self_attn.projected(x, turn))
        return self.layer.close(stream, found, x)

    def take(self, features: Tensor) -> Tensor:
        """The target's features [..., F * H] -> states [..., H]."""
        raise NotImplementedError

    def give(self, output: Tensor) -> Tensor:
        """The layer's output [..., H] -> the state of the next slot [..., H]."""
        raise NotImplementedError

    def read(self, state: Tensor) -> Tensor:
        """That state -> rows of the readout [..., W]."""
        raise NotImplementedError

    def settle(self, target: Any) -> None:
        """Initial values that are not generic."""

    # what follows ----------------------------------------------------------------------------------------------------
    def pack(self, features: Tensor, anchor: Tensor, text: Tensor) -> Draft:
        """Draft from many anchors of many texts at once.

        Args:
            features: [b, S, F * H] tapped target features; an anchor sees those below it.
            anchor: int64 [b, N], at most S; padding may hold any position.
            text: int64 [b, T], T > the last anchor: the tokens of the texts.

        Returns:
            a draft of [b, N] blocks.
        """
        taken = self.take(self._own(features))
        length = min(features.shape[1], text.shape[1])
        positions = torch.arange(-1, length - 1, device=anchor.device).expand(len(anchor), -1)
        lifted = self.lift(text[:, :length], positions)
        context = self.keys_values(F.pad(taken, (0, 0, 1, 0))[:, :length], lifted, positions)
        before = (anchor - 1).clamp(0, features.shape[1] - 1).unsqueeze(-1)
        first = taken.gather(1, before.expand(-1, -1, taken.shape[-1]))
        return ChainDraft(self, context, first, anchor, text.gather(1, anchor.clamp(max=text.shape[1] - 1)))

    def new_cache(self, capacity: int) -> ChainCache:
        """An empty context cache for texts of at most `capacity` tokens."""
        return ChainCache(1, capacity)

    def new_fixed_cache(self, rows: int, capacity: int) -> FixedChainCache:
        """A context cache of `rows` texts whose tensors keep their size and place."""
        spec = self.spec
        shape = (rows, spec.kv_heads, capacity, spec.head_dim)
        return FixedChainCache(shape, spec.hidden_size, self.weight.detach())

    @torch.no_grad()
    def extend(self, cache: ChainCache, features: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Put features [b, t, F * H] and tokens int64 [b, t] at int64 [b, t], each row's one after the other.

        A position given again is overwritten. What lies before the first was put there earlier.
        """
        taken = self.take(self._own(features))
        before = cache.kept((positions[:, :1] - 1).clamp(min=0))
        shifted = F.pad(taken[:, :-1], (0, 0, 1, 0)) if before is None else torch.cat([before, taken[:, :-1]], 1)
        found = self.keys_values(shifted, self.lift(tokens, positions - 1), positions - 1)
        cache.write(0, *found, positions)
        cache.keep(taken, positions)

    def draft(self, cache: ChainCache, anchor: Tensor, tokens: Tensor) -> Draft:
        """Draft one block a row from cached context.

        Args:
            cache: holds features and tokens of every position below the anchors.
            anchor: int64 [b].
            tokens: int64 [b], the token at each anchor.
        """
        first = cache.kept((anchor - 1).clamp(min=0).unsqueeze(1))
        assert first is not None, "extend the cache before drafting"
        context = cache.read(0, cache.span(anchor))
        return CachedChainDraft(self, context, first, anchor.unsqueeze(1), tokens.unsqueeze(1))

    def advance(
        self,
        state: Tensor,
        tokens: Tensor,
        positions: Tensor,
        anchor: Tensor,
        context: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        seen: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One slot of N chains a row, from cached context.

        Args:
            state: [b, N, H].
            tokens, positions, anchor: int64 [b, N].
            context: keys and values [b, kv heads, C, d] by slot of the cache.
            own: keys and values [b, kv heads, N, J, d] of the chains' other slots.
            seen: bool [J + 1], which of them are there yet, the present one last.

        Returns:
            rows [b, N, W]; the next states [b, N, H]; keys and values [b, kv heads, N, 1, d] of this slot.
        """
        chains = CachedChains(context, own, anchor, seen)
        turn = self.turned(positions, state)
        state = self.give(self.through(state, self.lift(tokens, positions), positions, turn, chains))
        return self.read(state), state, chains.key, chains.value


class ChainDraft(Draft):
    """Chains of N anchors a row, in one packed pass; with its graph where gradients are wanted.

    Args:
        drafter: whose layer is gone through slot by slot.
        context: keys and values [b, kv heads, C, d] by slot of the cache.
        first: [b, N, H], the states that the chains begin with.
        anchor: int64 [b, N].
        tokens: int64 [b, N], the tokens there.
    """

    def __init__(
        self, drafter: Any, context: tuple[Tensor, Tensor], first: Tensor, anchor: Tensor, tokens: Tensor
    ) -> None:
        self._drafter, self._context, self._first, self._tokens = drafter, context, first, tokens
        self.drafted = drafter.spec.drafted
        self._chains = PackedChains(anchor, self.drafted)
        slots = torch.arange(-1, self.drafted - 1, device=anchor.device).view(1, -1, 1)
        self._positions = anchor.unsqueeze(1) + slots  # [b, K, N]
        self._turns = _apart(drafter.turned(self._positions.flatten(1), first), self.drafted)

    def step(self, slot: int, previous: Tensor | None) -> Tensor:
        """As `Draft.step`."""
        tokens = self._tokens if previous is None else previous
        state = self._through(slot, self._drafter.lift(tokens, self._positions[:, slot]))
        return self._drafter.read(state)  # type: ignore[no-any-return]

    def forced(self, tokens: Tensor) -> Tensor:
        """Rows [b, N, K, W] given int64 [b, N, K]; what reads no state is computed of all slots at once."""
        before = torch.cat([self._tokens.unsqueeze(1), tokens[..., :-1].transpose(1, 2)], 1)
        lifted = self._drafter.lift(before, self._positions)  # [b, K, N, H]
        states = [self._through(slot, one) for slot, one in enumerate(lifted.unbind(1))]
        return self._drafter.read(torch.stack(states, 2))  # type: ignore[no-any-return]

    def _through(self, slot: int, lifted: Tensor) -> Tensor:
        """The state that a slot hands on [b, N, H]."""
        if slot == 0:
            self._state = self._first
            self._chains.begin(self._context)
        place, turn = self._positions[:, slot], self._turns[slot]
        self._state = self._drafter.give(self._drafter.through(self._state, lifted, place, turn, self._chains))
        return self._state


def _apart(turned: Any, slots: int) -> list[Any]:
    """What `turned` says of int64 [b, slots * N], slot by slot."""
    if isinstance(turned, Tensor):
        return list(turned.unflatten(-2, (slots, -1)).unbind(-3))
    return list(zip(*(_apart(one, slots) for one in turned), strict=True))


class CachedChainDraft(Draft):
    """One chain a row, from cached context; what is computed has the same shapes in every slot.

    Args:
        drafter: whose `advance` is called.
        context: keys and values [b, kv heads, C, d] by slot of the cache.
        first: [b, 1, H], the states that the chains begin with.
        anchor: int64 [b, 1].
        tokens: int64 [b, 1], the tokens there.
    """

    def __init__(
        self, drafter: Any, context: tuple[Tensor, Tensor], first: Tensor, anchor: Tensor, tokens: Tensor
    ) -> None:
        self._drafter, self._context, self._first = drafter, context, first
        self._anchor, self._tokens = anchor, tokens
        self.drafted = drafter.spec.drafted

    def step(self, slot: int, previous: Tensor | None) -> Tensor:
        """Rows [b, W] given int64 [b]."""
        if slot == 0:
            self._state = self._first
            self._own = tuple(one.new_zeros(*one.shape[:2], 1, self.drafted - 1, one.shape[3]) for one in self._context)
        place = torch.arange(self.drafted, device=self._anchor.device)
        rows, self._state, *found = self._drafter.advance(
            self._state,
            self._tokens if previous is None else previous.unsqueeze(1),
            self._anchor - 1 + slot,
            self._anchor,
            self._context,
            self._own,
            (place < slot) | (place == self.drafted - 1),  # the present slot stands last
        )
        for own, new in zip(self._own, found, strict=True) if slot < self.drafted - 1 else ():
            own[:, :, :, slot] = new.squeeze(3)
        return rows.squeeze(1)  # type: ignore[no-any-return]
