"""Hybrid targets: layers with a recurrent state (Gated DeltaNet) between layers of softmax attention.

A recurrence cannot be told by a mask what to see. So while a forward of ours runs, the forward of each such module is
replaced, on that module object alone, by one that knows the layout: texts that go on from where verification left them
(`HybridCache`), or a tree whose branches leave their trunk at their fork. The softmax layers take masks as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from draftloop.core.tree import Lines, Tree
from draftloop.target.attention import SoftmaxAttention
from draftloop.target.cache import RowCache, TrunkCache, TrunkState
from draftloop.target.gated_deltanet import GatedDeltaNet, Log, Projected

LINEAR = "linear_attention"
SPACING = 64  # tokens between two snapshots; see benchmarks/hybrid.py
_BRANCH_TOKENS = 1 << 15  # of the branches that are run at a time, replay included

Mix = Callable[[Projected], Tensor]  # what a layer's tokens say -> [n, t, H, Dv]


class HybridCache(RowCache):
    """A cache in which recurrent layers hold the log of the last feed: a row may go on from any token of that.

    Attributes:
        base: int64 [rows], position of the first token of the last feed that is remembered.
        fed: how many tokens a row are remembered.
        dropped: how many of the last feed are not, in front of them.
        offset: int64 [rows], where the running feed begins, counted from the base of the one before.
        logs: what the recurrent layers remember, by layer.
    """

    def __init__(self, layers: int, capacity: int, spacing: int) -> None:
        super().__init__(layers, capacity)
        self.spacing = spacing
        self.base: Tensor | None = None
        self.fed = self.dropped = 0
        self.offset = torch.empty(0, dtype=torch.int64)
        self.logs: dict[int, Log] = {}

    def aim(self, positions: Tensor) -> Tensor:
        """See `RowCache.aim`; positions ascend by one, and begin at 0 or within the last feed or right behind it."""
        start = positions[:, 0]
        self.offset = torch.full_like(start, -1) if self.base is None else start - self.base
        known = (self.offset >= 0) & (self.offset <= self.fed) | (start == 0)
        assert bool(known.all()), "a recurrent state goes back to the start of the last feed or of the text, no further"
        self.offset = torch.where(start == 0, -1, self.offset)
        # of prompts, no more than a row may go back to: states and writings are large
        self.dropped = max(0, self.least - 1) // self.spacing * self.spacing if bool((start == 0).all()) else 0
        self.base, self.fed = start + self.dropped, positions.shape[1] - self.dropped
        return super().aim(positions)

    def select(self, rows: Tensor) -> None:
        """See `RowCache.select`."""
        super().select(rows)
        self.logs = {layer: log.select(rows) for layer, log in self.logs.items()}
        if self.base is not None:
            self.base = self.base.index_select(0, rows)

    def held(self, layer: int, row: int, size: int) -> tuple[Tensor, ...]:
        """See `RowCache.held`."""
        if layer not in self.logs:
            return super().held(layer, row, size)
        assert self.base is not None
        assert int(self.base[row]) == 0, "the state of a trunk is kept from the feed of the whole trunk"
        return self.logs[layer].kept(row, size)

    def state_bytes(self, size: int) -> int:
        """See `RowCache.state_bytes`."""
        return super().state_bytes(size) + sum(log.kept_bytes(size) for log in self.logs.values())


@dataclass(frozen=True)
class HybridAttention(SoftmaxAttention):
    """Softmax attention in some layers, Gated DeltaNet in the others.

    Attributes:
        mixers: the Gated DeltaNet layers.
        spacing: tokens between two snapshots of a state: fewer cost memory, more cost replay.
    """

    mixers: tuple[GatedDeltaNet, ...]
    spacing: int = SPACING

    def spaced(self, spacing: int) -> HybridAttention:
        """The same with snapshots `spacing` tokens apart (1 to 64, or a multiple of 64)."""
        return replace(self, spacing=spacing)

    def new_cache(self, layers: int, capacity: int) -> HybridCache:
        """See `AttentionFamily.new_cache`."""
        return HybridCache(layers, capacity, self.spacing)

    @contextmanager
    def mixing(self, over: RowCache | TrunkCache | Tree) -> Iterator[None]:
        """See `AttentionFamily.mixing`."""
        if isinstance(over, HybridCache):
            plan = [self._through_cache(mixer, over) for mixer in self.mixers]
        elif isinstance(over, TrunkCache):
            lines = over.packed.tree.lines()
            order = torch.argsort(over.packed.row, stable=True).tolist()
            states = [over.states[i] for i in order]
            plan = [self._on_trunks(mixer, lines, states, over.packed.first) for mixer in self.mixers]
        else:
            assert isinstance(over, Tree)
            lines = over.lines()
            plan = [self._through_tree(mixer, lines) for mixer in self.mixers]
        with ExitStack() as stack:
            for mixer, mix in zip(self.mixers, plan, strict=True):
                stack.enter_context(replaced(mixer.module, "forward", _forward(mixer, mix)))
            yield

    def _through_cache(self, mixer: GatedDeltaNet, cache: HybridCache) -> Mix:
        def mix(given: Projected) -> Tensor:
            state, tail = mixer.start(len(given.g), given.raw)
            if mixer.index in cache.logs:
                rows = torch.arange(len(given.g), device=given.g.device)
                before = mixer.state_at(cache.logs[mixer.index], rows, cache.offset.clamp(min=0))
                begins = cache.offset < 0
                state = torch.where(begins[:, None, None, None], state, before[0])
                tail = torch.where(begins[:, None, None], tail, before[1])
            out, log = mixer.go_on(given, state, tail, self.spacing)
            cache.logs[mixer.index] = log.without(cache.dropped)
            return out

        return mix

    def _through_tree(self, mixer: GatedDeltaNet, lines: Lines) -> Mix:
        def mix(given: Projected) -> Tensor:
            out = given.z.new_zeros(given.z.shape, dtype=mixer.dtype)
            trunks = given.at(lines.trunk_row, lines.trunk_slot)
            got, log = mixer.go_on(trunks, *mixer.start(len(trunks.g), given.raw), self.spacing)
            lay(out, got, lines.trunk_row, lines.trunk_slot)
            self._branches(mixer, lines, log, given, out)
            return out

        return mix

    def _on_trunks(self, mixer: GatedDeltaNet, lines: Lines, states: list[TrunkState], first: int) -> Mix:
        slots = torch.where(lines.slot >= 0, lines.slot - first, -1)

        def mix(given: Projected) -> Tensor:
            out = given.z.new_zeros(given.z.shape, dtype=mixer.dtype)
            log = Log.stack([state.layers[mixer.index][: Log.PARTS] for state in states], self.spacing)
            self._branches(mixer, replace(lines, slot=slots), log, given, out)
            return out

        return mix

    def _branches(self, mixer: GatedDeltaNet, lines: Lines, log: Log, given: Projected, out: Tensor) -> None:
        """Run the branches from their forks, all that fit at once, into `out`."""
        if not lines.slot.numel():
            return
        at_once = max(1, _BRANCH_TOKENS // (self.spacing + lines.slot.shape[1]))
        for part in torch.arange(len(lines.slot), device=out.device).split(at_once):
            row, slot = lines.row[part], lines.slot[part]
            state, tail = mixer.state_at(log, lines.trunk[part], lines.fork[part] + 1)
            got, _ = mixer.go_on(given.at(row, slot), state, tail, self.spacing)
            lay(out, got, row, slot)

    def why_not_fixed(self) -> str:
        """See `AttentionFamily.why_not_fixed`."""
        return "its layers of Gated DeltaNet keep a state that is put back after every block, which fixed shapes lack"

    def kept_as(self) -> Hashable:
        """Where snapshots stand."""
        return self.spacing

    def _by_kind(self, made_by: Callable[..., Any]) -> dict[str, Any]:
        return {**super()._by_kind(made_by), LINEAR: None}


def lay(out: Tensor, got: Tensor, row: Tensor, slot: Tensor) -> None:
    """Write [m, t, ...] to slots int64 [m, t] of rows int64 [m]."""
    real = slot >= 0
    out[row.unsqueeze(1).expand_as(slot)[real], slot[real]] = got[real]


def _forward(mixer: GatedDeltaNet, mix: Mix) -> Callable[..., Tensor]:
    """The forward of a mixer's module, with a recurrence of ours."""

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = mixer.project(hidden_states)
        return mixer.finish(mix(given), given.z)

    return forward


@contextmanager
def replaced(owner: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    """Let a method of one object be another for a while."""
    own = owner.__dict__.get(name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def mixers_of(base: nn.Module, layers: list[int]) -> tuple[GatedDeltaNet, ...] | None:
    """The Gated DeltaNet modules of these decoder layers, ascending; None if they are of another make."""
    found = sorted((GatedDeltaNet(one) for one in base.modules() if GatedDeltaNet.fits(one)), key=lambda m: m.index)
    return tuple(found) if [mixer.index for mixer in found] == layers else None
