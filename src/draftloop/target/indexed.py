"""Targets with indexed attention (QSA), Gated DeltaNet and n-gram embeddings in one model (`qwen4_exp` and its like).

What the indexers and the n-gram modules remember of a text is kept slot by slot, as keys and values are; the rest is
`HybridAttention`'s. The model selects by our groups, its attention then takes our mask and the selection together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from draftloop.core.tree import Tree
from draftloop.target.attention import FULL
from draftloop.target.cache import Forgotten, RowCache, TrunkCache
from draftloop.target.hybrid import HybridAttention, HybridCache, replaced
from draftloop.target.qsa import Indexer, NGrams

INDEXED = frozenset(["indexed_attention", "qwen_sparse_attention"])  # the second before transformers 5.24
KEYS, WORDS, INPUTS = "index keys", "tokens", "inputs of the n-gram convolution"


class IndexedCache(HybridCache):
    """A `HybridCache` that also holds, slot by slot, what indexers and n-gram modules look back at.

    Attributes:
        store: by kind and layer, [rows, capacity, ...].
    """

    position_ids = Forgotten(absent=True)  # before transformers 5.24

    def __init__(self, layers: int, capacity: int, spacing: int) -> None:
        super().__init__(layers, capacity, spacing)
        self.store: dict[tuple[str, int], Tensor] = {}

    def write(self, kind: str, layer: int, new: Tensor) -> Tensor:
        """Write [rows, t, ...] at the aimed slots; everything up to the span, [rows, span, ...]."""
        if (kind, layer) not in self.store:
            self.store[kind, layer] = new.new_zeros(new.shape[0], self.capacity, *new.shape[2:])
        held = self.store[kind, layer]
        held[torch.arange(len(new), device=new.device).unsqueeze(1), self.slots] = new
        return held[:, : self.span]

    def select(self, rows: Tensor) -> None:
        """See `RowCache.select`."""
        super().select(rows)
        self.store = {key: held.index_select(0, rows) for key, held in self.store.items()}

    def held(self, layer: int, row: int, size: int) -> tuple[Tensor, ...]:
        """See `RowCache.held`; index keys and convolution inputs come last."""
        more = [self.store[kind, layer][row, :size] for kind in (KEYS, INPUTS) if (kind, layer) in self.store]
        return (*super().held(layer, row, size), *(part.clone() for part in more))

    def state_bytes(self, size: int) -> int:
        """See `RowCache.state_bytes`."""
        return super().state_bytes(size) + size * sum(
            held[0, 0].nbytes for (kind, _), held in self.store.items() if kind != WORDS
        )


@dataclass(frozen=True)
class IndexedAttention(HybridAttention):
    """Gated DeltaNet in some layers, indexed attention in the others, n-gram embeddings in front of some.

    Attributes:
        indexers: of the indexed layers.
        ngrams: the n-gram modules.
    """

    indexers: tuple[Indexer, ...] = ()
    ngrams: tuple[NGrams, ...] = ()

    def new_cache(self, layers: int, capacity: int) -> IndexedCache:
        """See `AttentionFamily.new_cache`."""
        return IndexedCache(layers, capacity, self.spacing)

    @contextmanager
    def mixing(self, over: RowCache | TrunkCache | Tree) -> Iterator[None]:
        """See `AttentionFamily.mixing`."""
        with ExitStack() as stack:
            stack.enter_context(super().mixing(over))
            if isinstance(over, IndexedCache):
                self._through_cached(stack, over)
            else:
                self._through_slots(stack, over)
            yield

    def _through_cached(self, stack: ExitStack, cache: IndexedCache) -> None:
        for one in self.indexers:
            forward = one.in_cache(partial(cache.write, KEYS, one.index), cache.slots)
            stack.enter_context(replaced(one.module, "forward", forward))
        for gram in self.ngrams:
            back = cache.slots.unsqueeze(-1) - torch.arange(gram.reach, device=cache.slots.device)
            words, inputs = partial(cache.write, WORDS, gram.index), partial(cache.write, INPUTS, gram.index)
            stack.enter_context(gram.over(back.clamp(min=-1), words, inputs))

    def _through_slots(self, stack: ExitStack, over: RowCache | TrunkCache | Tree) -> None:
        fed = over if isinstance(over, TrunkCache) else None
        tree = over.packed.tree if isinstance(over, TrunkCache) else over
        assert isinstance(tree, Tree)
        lines, first = tree.lines(), 0 if fed is None else fed.packed.first
        order = [] if fed is None else torch.argsort(fed.packed.row, stable=True).tolist()

        def kept(layer: int, which: int) -> Tensor:
            """What the trunks hold of a layer, [A, T, ...]."""
            assert fed is not None
            parts = [fed.states[i].layers[layer][which] for i in order]
            longest = max(len(part) for part in parts)
            return torch.stack([pad(part, (0, 0, 0, longest - len(part))) for part in parts])

        for one in self.indexers:
            raw = None if fed is None else kept(one.index, 2)
            stack.enter_context(replaced(one.module, "forward", one.in_tree(lines, tree, first, raw)))
        for gram in self.ngrams:

            def everywhere(new: Tensor, at: int = gram.index) -> Tensor:
                if fed is None:
                    return new
                whole = new.new_zeros(len(new), tree.tokens.shape[1], new.shape[-1])
                real = lines.trunk_slot >= 0
                row = lines.trunk_row.unsqueeze(1).expand_as(lines.trunk_slot)
                whole[row[real], lines.trunk_slot[real]] = kept(at, -1)[:, : real.shape[1]][real]
                whole[:, first:] = new
                return whole

            back = tree.ancestors(gram.reach)[:, first:]
            stack.enter_context(gram.over(back, lambda ids: tree.tokens, everywhere))

    def takes_numbers(self) -> bool:
        """No: a selection is boolean, and before transformers 5.24 the model would add it to numbers as 0 and 1."""
        return False

    def why_not_flex(self) -> str:
        """See `AttentionFamily.why_not_flex`."""
        return "its indexers select keys for each query, and are given to attention together with a dense mask"

    def _by_kind(self, made_by: Callable[..., Any]) -> dict[str, Any]:
        masks = super()._by_kind(made_by)
        seen = masks[FULL] if FULL in masks else made_by()
        return {**masks, **dict.fromkeys(INDEXED, seen)}


def indexers_of(base: nn.Module, layers: list[int]) -> tuple[Indexer, ...] | None:
    """The indexers of these decoder layers, ascending; None if they are of another make."""
    rotary = getattr(base, "rotary_emb", None)
    found = sorted((Indexer(one, rotary) for one in base.modules() if Indexer.fits(one)), key=lambda one: one.index)
    return tuple(found) if rotary is not None and [one.index for one in found] == layers else None


def ngrams_of(base: nn.Module) -> tuple[NGrams, ...]:
    """The n-gram modules, ascending."""
    return tuple(sorted((NGrams(one) for one in base.modules() if NGrams.fits(one)), key=lambda one: one.index))
