"""Key/value caches: one whose rows advance at their own pace, and one that holds finished trunks for their branches.

Slot = logical position in every row of the first: feeding a position again overwrites it, so rejected drafts need no
cropping; the mask alone decides what is visible. The model above is Hugging Face's, unmodified.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from draftloop.core.host import sent
from draftloop.core.tree import Packed


@dataclass(frozen=True)
class TrunkState:
    """What the target computed for one trunk of T tokens, enough to score branches without feeding it again.

    Attributes:
        layers: of each decoder layer, keys and values [kv heads, T, head dim]; of a recurrent one, its `Log.parts`.
        hidden: [T, H] rows after the final norm (the law of each next token).
        version: the target's `version` at that time; a state of another version does not count.
    """

    layers: tuple[tuple[Tensor, ...], ...]
    hidden: Tensor
    version: int

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tensors held."""
        return self.hidden.nbytes + sum(part.nbytes for layer in self.layers for part in layer)


class Forgotten:
    """An attribute in which a model would collect the positions fed: ours are told with every forward, whole.

    Args:
        absent: whether the model looks if there is such an attribute; else it is None.
    """

    def __init__(self, absent: bool = False) -> None:
        self.absent = absent

    def __get__(self, owner: Any, kind: Any = None) -> None:
        if self.absent:
            raise AttributeError
        return None

    def __set__(self, owner: Any, value: Any) -> None:
        pass


class _RowLayer(CacheLayerMixin):
    """Keys and values of one decoder layer, [rows, kv heads, capacity, head dim], written at `owner.slots`."""

    is_sliding = False
    indexer_position_ids = Forgotten()

    def __init__(self, owner: RowCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, heads, _, width = key_states.shape
        self.keys = key_states.new_zeros(rows, heads, self.owner.capacity, width)
        self.values = value_states.new_zeros(rows, value_states.shape[1], self.owner.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new states at the owner's slots; return everything up to its span."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        at = self.owner.slots[:, None, :, None]
        self.keys.scatter_(2, at.expand_as(key_states), key_states)
        self.values.scatter_(2, at.expand_as(value_states), value_states)
        return self.keys[:, :, : self.owner.span], self.values[:, :, : self.owner.span]

    def get_seq_length(self, *args: Any) -> int:
        return self.owner.span

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        return self.owner.span, 0

    def get_max_length(self) -> int:
        return self.owner.capacity

    get_max_cache_shape = get_max_length  # its name before transformers 5.24


class RowCache(Cache):
    """The cache of a batch: `rows` texts of at most `capacity` tokens each.

    Attributes:
        slots: int64 [rows, t], where the running forward writes (set by `aim`).
        span: slots [0, span) are shown to attention.
        least: no later feed will begin before this position; what only such a feed would need may be forgotten.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.span = self.least = 0
        self.slots = torch.empty(0, 0, dtype=torch.int64)
        super().__init__(layers=[_RowLayer(self) for _ in range(layers)])

    def aim(self, positions: Tensor) -> Tensor:
        """Say which positions the next forward feeds.

        Args:
            positions: int64 [rows, t].

        Returns:
            bool [rows, 1, t, span]: slot j is visible to a query at position >= j.
        """
        self.slots = positions
        self.span = max(self.span, int(positions.max()) + 1)
        assert self.span <= self.capacity, "the cache is too small for these positions"
        seen = torch.arange(self.span, device=positions.device)
        return (seen <= positions.unsqueeze(-1)).unsqueeze(1)

    def fit(self, masks: Any) -> Any:
        """The masks of a forward, in the form that its attention reads: as they are."""
        return masks

    def select(self, rows: Tensor) -> None:
        """Keep only these rows (int64 [m]), in this order."""
        for layer in self.layers:
            if not layer.is_initialized:
                continue
            layer.keys = layer.keys.index_select(0, rows)
            layer.values = layer.values.index_select(0, rows)

    def state_bytes(self, size: int) -> int:
        """What the state of the first `size` tokens of a row weighs, hidden rows left out."""
        held = [one for one in self.layers if one.is_initialized]
        return size * sum((one.keys[0, :, 0].nbytes + one.values[0, :, 0].nbytes) for one in held)

    def held(self, layer: int, row: int, size: int) -> tuple[Tensor, ...]:
        """A copy of what a layer holds of the first `size` tokens of a row."""
        one = self.layers[layer]
        return one.keys[row, :, :size].clone(), one.values[row, :, :size].clone()

    def state(self, row: int, hidden: Tensor, version: int) -> TrunkState:
        """A copy of what row `row` holds of its first [T] tokens, `hidden` [T, H] being theirs."""
        layers = tuple(self.held(layer, row, hidden.shape[0]) for layer in range(len(self.layers)))
        return TrunkState(layers, hidden, version)


class _TrunkLayer(CacheLayerMixin):
    """One decoder layer of finished trunks; laid into rows only while that layer runs."""

    is_sliding = False
    indexer_position_ids = Forgotten()

    def __init__(self, owner: TrunkCache, index: int) -> None:
        super().__init__()
        self.owner, self.index, self.is_initialized = owner, index, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is held here."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The trunks' keys and values in front, the new states behind; nothing is written."""
        return self._behind(key_states, 0), self._behind(value_states, 1)

    def _behind(self, new: Tensor, part: int) -> Tensor:
        states = [state.layers[self.index][part] for state in self.owner.states]
        held = torch.cat(states, 1)[:, self.owner.place]  # [kv heads, rows, span, d]
        return torch.cat([held.transpose(0, 1), new], 2)

    def get_seq_length(self, *args: Any) -> int:
        return self.owner.span

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        return self.owner.span, 0

    def get_max_length(self) -> int:
        return self.owner.span

    get_max_cache_shape = get_max_length


class TrunkCache(Cache):
    """Trunks that were computed before, in the rows of a packed tree whose branches are fed now. Read only.

    Attributes:
        place: int64 [rows, span], which token of all the states, one after the other, stands in each slot.

    Args:
        states: one a trunk of the tree, in its order; each at least as long as what the tree holds of it.
        packed: the tree, laid out `aligned`.
    """

    def __init__(self, states: list[TrunkState], packed: Packed) -> None:
        self.span = packed.first
        self.states, self.packed = states, packed
        # which of all the states' tokens stands in each slot of a row; where none does, any: no branch sees that slot
        place = torch.zeros(len(packed.tree.tokens), self.span, dtype=torch.int64)
        first = 0
        parts = zip(states, packed.row.tolist(), packed.start.tolist(), packed.size.tolist(), strict=True)
        for state, row, start, size in parts:
            place[row, start : start + size] = torch.arange(first, first + size)
            first += len(state.hidden)
        self.place = sent(place, states[0].hidden.device)
        super().__init__(layers=[_TrunkLayer(self, i) for i in range(len(states[0].layers))])
