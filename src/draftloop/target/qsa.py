"""Block-sparse attention with an indexer (QSA), and n-gram embeddings with a dilated convolution (PLE).

QSA pools the index keys of every `ratio` tokens that a query sees into a group, scores complete groups and lets the
query attend to the best of them and to the incomplete tail. A group is counted along the text: those wholly before a
fork are the trunk's and shared, those behind mix the trunk's last tokens with the branch's own and are private. Ties go
to the earlier group. PLE looks a fixed number of tokens back: the tree's ancestor table says which slots those are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from draftloop.core.errors import InputError
from draftloop.core.tree import Lines, Tree
from draftloop.target.hybrid import lay, replaced

_QUERIES_AT_ONCE = 1 << 10


class Indexer:
    """One QSA indexer of the model.

    Args:
        module: as `fits` recognised it.
        rotary: the model's rotary embedding.
    """

    def __init__(self, module: Any, rotary: Any) -> None:
        self.module, self.rotary = module, rotary
        self.index = int(module.layer_idx)
        self.heads, self.width = int(module.index_n_heads), int(module.index_head_dim)
        self.ratio, self.best = int(module.compress_ratio), int(module.block_topk)

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether a module has these parts (its numbers are compared by the probe)."""
        names = ("index_qk_proj", "q_layernorm", "k_layernorm", "index_n_heads", "index_head_dim", "compress_ratio",
                 "block_topk", "layer_idx")  # fmt: skip
        return all(hasattr(module, name) for name in names) and getattr(module, "index_kv_heads", 0) == 1

    def project(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [n, t, heads, d], and raw keys [n, t, d], of hidden rows at positions int64 [n, t]."""
        both = self.module.index_qk_proj(hidden).unflatten(-1, (-1, self.width))
        query = self.module.q_layernorm(both[..., : self.heads, :])
        return self._turned(query, positions), both[..., self.heads, :]

    def pooled(self, raw: Tensor, first: Tensor) -> Tensor:
        """Keys [n, G, d] of groups of raw keys [n, G * ratio, d] that begin at positions int64 [n, G]."""
        mean = raw.unflatten(1, (-1, self.ratio)).float().mean(2).to(raw.dtype)
        return self._turned(self.module.k_layernorm(mean).unsqueeze(2), first).squeeze(2)

    def choose(self, query: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        """Which groups each query attends to.

        Args:
            query: [n, t, heads, d].
            keys: [n, G, d]; those of groups that a query has not completed are not looked at.
            positions: int64 [n, t].

        Returns:
            bool [n, t, G + 1]: the best complete groups, and the tail.
        """
        parts = zip(query.split(_QUERIES_AT_ONCE, 1), positions.split(_QUERIES_AT_ONCE, 1), strict=True)
        return torch.cat([self._choose(part, keys, place) for part, place in parts], 1)

    def _choose(self, query: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        groups = keys.shape[1]
        complete = (positions + 1) // self.ratio
        scores = torch.einsum("nthd,ngd->nthg", query.float(), keys.float()).relu().sum(2) / self.width**0.5
        known = torch.arange(groups, device=keys.device) < complete.unsqueeze(-1)
        scores = scores.masked_fill(~known, -1.0)
        order = torch.argsort(scores, dim=-1, descending=True, stable=True)[
            ..., : self.best
        ]  # a tie goes to the earlier
        chosen = torch.zeros_like(known).scatter_(-1, order, True) & known
        tail = torch.arange(groups + 1, device=keys.device) == complete.unsqueeze(-1)
        return pad(chosen, (0, 1)) | tail

    def in_tree(self, lines: Lines, tree: Tree, first: int, raw_of: Tensor | None) -> Callable[..., Tensor]:
        """The indexer's forward over slots of a tree from `first` on; raw keys [A, T, d] of trunks fed before."""

        def forward(hidden: Tensor, turns: Any, mask: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            _check(mask)
            query, raw = self.project(hidden, tree.position[:, first:])
            trunk_raw = _at(raw, lines.trunk_row, lines.trunk_slot) if raw_of is None else raw_of
            groups = int(tree.position.max() + 1) // self.ratio + 1
            count = trunk_raw.shape[1] // self.ratio
            starts = torch.arange(count, device=raw.device) * self.ratio
            shared = self.pooled(trunk_raw[:, : count * self.ratio], starts.expand(len(trunk_raw), -1))
            shared = pad(shared, (0, 0, 0, groups - count))
            chosen = torch.zeros(*hidden.shape[:2], groups + 1, dtype=torch.bool, device=raw.device)
            if raw_of is None:
                places = torch.arange(lines.trunk_slot.shape[1], device=raw.device).expand_as(lines.trunk_slot)
                got = self.choose(_at(query, lines.trunk_row, lines.trunk_slot), shared, places)
                lay(chosen, got, lines.trunk_row, lines.trunk_slot)
            if lines.slot.numel():
                slot = torch.where(lines.slot >= 0, lines.slot - first, -1)
                keys = self._private(lines, shared, trunk_raw, _at(raw, lines.row, slot))
                places = lines.fork.unsqueeze(1) + 1 + torch.arange(slot.shape[1], device=raw.device)
                lay(chosen, self.choose(_at(query, lines.row, slot), keys, places), lines.row, slot)
            group = (tree.position // self.ratio).unsqueeze(1)
            return chosen.gather(2, group.expand(-1, chosen.shape[1], -1)).unsqueeze(1)

        return forward

    def in_cache(self, store: Callable[[Tensor], Tensor], positions: Tensor) -> Callable[..., Tensor]:
        """The indexer's forward through a cache; `store` writes raw keys and gives those of all slots of the span."""

        def forward(hidden: Tensor, turns: Any, mask: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            _check(mask)
            query, raw = self.project(hidden, positions)
            held = store(raw)
            count = held.shape[1] // self.ratio
            starts = torch.arange(count, device=raw.device) * self.ratio
            keys = self.pooled(held[:, : count * self.ratio], starts.expand(len(held), -1))
            chosen = self.choose(query, keys, positions)
            group = torch.arange(held.shape[1], device=raw.device) // self.ratio
            return chosen[..., group].unsqueeze(1)

        return forward

    def _private(self, lines: Lines, shared: Tensor, trunk_raw: Tensor, raw: Tensor) -> Tensor:
        """Keys [M, G, d] of the groups of each branch's text: the trunk's before the fork, its own behind."""
        before = (lines.fork + 1) // self.ratio
        count = -(-(self.ratio - 1 + raw.shape[1]) // self.ratio)
        own = before.unsqueeze(1) + torch.arange(count, device=raw.device)
        place = (before * self.ratio).unsqueeze(1) + torch.arange(count * self.ratio, device=raw.device)
        depth = place - lines.fork.unsqueeze(1) - 1
        branch = torch.arange(len(raw), device=raw.device).unsqueeze(1)
        of_trunk = trunk_raw[lines.trunk.unsqueeze(1), place.clamp(max=trunk_raw.shape[1] - 1)]
        of_branch = raw[branch, depth.clamp(0, raw.shape[1] - 1)]
        keys = self.pooled(torch.where((depth < 0).unsqueeze(-1), of_trunk, of_branch), own * self.ratio)
        table = pad(shared[lines.trunk], (0, 0, 0, count))
        table[branch, own] = keys
        return table[:, : shared.shape[1]]

    def _turned(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of [n, t, heads, d] at positions int64 [n, t]."""
        cos, sin = self.rotary(rows, positions.expand(3, *positions.shape))
        return sys.modules[type(self.module).__module__].apply_rotary_pos_emb(rows, cos=cos, sin=sin, unsqueeze_dim=2)


@dataclass(frozen=True)
class NGrams:
    """One PLE module: hashed n-grams of the text, gated, through a dilated depthwise convolution.

    Attributes:
        module: as `fits` recognised it.
    """

    module: Any

    @property
    def index(self) -> int:
        """Which decoder layer it stands in."""
        return int(self.module.layer_idx)

    @property
    def reach(self) -> int:
        """How many tokens it looks back, the token itself included."""
        return max(self._words, (self._taps - 1) * self._apart + 1)

    @property
    def _words(self) -> int:
        return int(self.module.ple_embedding.ngram_size)

    @property
    def _taps(self) -> int:
        return int(self.module.conv1d.kernel_size[0])

    @property
    def _apart(self) -> int:
        return int(self.module.conv1d.dilation[0])

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether a module has these parts."""
        embedding = getattr(module, "ple_embedding", None)
        return hasattr(module, "_short_conv") and hasattr(module, "conv1d") and hasattr(embedding, "ngram_size")

    @contextmanager
    def over(
        self, back: Tensor, tokens: Callable[[Tensor], Tensor], values: Callable[[Tensor], Tensor]
    ) -> Iterator[None]:
        """Let it look back along a table of slots.

        Args:
            back: int64 [b, t, reach], the slot of each fed token, of the one before it, ...; -1 where there is none.
            tokens: given the fed tokens int64 [b, t], those of all slots [b, N].
            values: given the convolution's inputs [b, t, C] of the fed tokens, those of all slots [b, N, C].
        """
        embedding = self.module.ple_embedding
        own = type(embedding).forward
        row = torch.arange(len(back), device=back.device)[:, None, None]

        def embed(input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            chain = back[:, :, : self._words].flip(-1)
            words = torch.where(chain >= 0, tokens(input_ids)[row, chain.clamp(min=0)], embedding.eos_token_id)
            return own(embedding, words.flatten(0, 1), None)[:, -1].unflatten(0, words.shape[:2])

        def convolved(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            chain = back[:, :, : (self._taps - 1) * self._apart + 1 : self._apart].flip(-1)
            window = values(hidden)[row, chain.clamp(min=0)]
            window = torch.where((chain >= 0).unsqueeze(-1), window, 0)
            return silu(torch.einsum("btkc,ck->btc", window, self.module.conv1d.weight.squeeze(1)))

        with ExitStack() as stack:
            stack.enter_context(replaced(embedding, "forward", embed))
            stack.enter_context(replaced(self.module, "_short_conv", convolved))
            yield


def _check(mask: Tensor) -> None:
    """Refuse a mask of numbers, to which some versions of the model would add the selection as 0 and 1."""
    if mask.dtype != torch.bool:
        raise InputError(
            "an indexer was given a mask of numbers, which it cannot select from",
            fix="Load the target with attn_implementation='sdpa'.",
        )


def _at(part: Tensor, row: Tensor, slot: Tensor) -> Tensor:
    """[b, N, ...] at slots int64 [m, t] of rows int64 [m]; anything where the slot is -1."""
    return part[row.unsqueeze(1), slot.clamp(min=0)]
