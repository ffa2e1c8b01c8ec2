"""What decoding with shapes that never change needs of the target: cache, attention, layers compiled one for all.

The model above stays Hugging Face's own: the cache comes in through its cache interface, the attention through its
table of attention functions, and a compiled layer is the layer's own forward. Knows no drafter and no loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftloop.core.errors import InputError
from draftloop.target.cache import RowCache, _RowLayer
from draftloop.target.flash import bounds, check_pieces, flash
from draftloop.target.implementation import attending_by
from draftloop.target.joined import Joined

Kernel = Literal["sdpa", "matmul", "flash"]


class _FixedLayer(_RowLayer):
    """Keys and values of one decoder layer, written in place; attention always gets the whole of them."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new states [rows, kv heads, t, d] at the owner's slots."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        row, slots = self.owner.row, self.owner.slots  # type: ignore[attr-defined]
        # an index_put, which a compiler writes in place: of a scatter it makes a copy of the whole cache
        self.keys[row, :, slots] = key_states.transpose(1, 2)
        self.values[row, :, slots] = value_states.transpose(1, 2)
        return self.keys, self.values


class WholeCache(RowCache):
    """A cache of which attention is always given all slots, so that the device is never asked how far its texts go."""

    def __init__(self, layers: int, capacity: int) -> None:
        super().__init__(layers, capacity)
        self.span = capacity

    def aim(self, positions: Tensor) -> Tensor:
        """As `RowCache.aim`; bool [rows, 1, t, capacity]."""
        self.slots = positions
        seen = torch.arange(self.span, device=positions.device)
        return (seen <= positions.unsqueeze(-1)).unsqueeze(1)


class FixedCache(WholeCache):
    """The cache of `rows` texts whose tensors keep their size and place, whoever occupies a row.

    Args:
        layers: decoder layers.
        rows: texts at a time.
        capacity: slots of each.
        group: query heads that share a key head.
        like: a tensor of the target's type and device.
    """

    def __init__(self, layers: int, rows: int, capacity: int, group: int, like: Tensor) -> None:
        super().__init__(layers, capacity)
        self.layers = [_FixedLayer(self) for _ in range(layers)]
        self.group, self.dtype = group, like.dtype
        self.row = torch.arange(rows, device=like.device).unsqueeze(1)
        self.kernel: Kernel = "sdpa"
        self.bounds: Callable[[Tensor], Tensor] = bounds

    def fit(self, masks: Any) -> Any:
        """Bool [rows, 1, t, span] -> what attention reads.

        That is what it adds to its scores, [rows, 1, group * t, span]; for the kernel flash, the `bounds`.
        """
        if isinstance(masks, dict):
            return {kind: self.fit(mask) for kind, mask in masks.items()}
        if self.kernel == "flash":
            return self.bounds(masks)
        bias = torch.zeros_like(masks, dtype=self.dtype).masked_fill_(~masks, float("-inf"))
        return bias.repeat(1, 1, self.group, 1)

    def drop(self) -> None:
        """Let go of all memory now: layers and cache know each other, which a count of references cannot undo."""
        self.layers = []

    def admit(self, rows: Tensor, prompts: RowCache) -> None:
        """Let new texts into `rows` (int64 [m]): what `prompts` holds of its m texts, up to its span.

        What the last text left behind it goes: kernels weigh it with nothing, which of an infinity makes no number.
        """
        span = prompts.span
        for mine, theirs in zip(self.layers, prompts.layers, strict=True):
            if not mine.is_initialized:
                mine.lazy_initialization(theirs.keys[:1].expand(len(self.row), -1, -1, -1), theirs.values)
            for kept, new in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                kept[rows, :, :span] = new[:, :, :span]
                kept[rows, :, span:] = 0


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    kernel: Kernel,
    **more: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: queries [b, heads, t, d] over all slots of keys [b, kv heads, span, d].

    The query heads that share a key head stand behind one another in the length, so that no key is copied for them.

    Args:
        attention_mask: as `FixedCache.fit` makes it.

    Returns:
        [b, t, heads, d], as the models want it.

    Raises:
        InputError: the model asks for more than a softmax over biased scores.
    """
    b, heads, t, width = query.shape
    stacked = t if kernel == "flash" else heads // key.shape[1] * t
    wanted = [name for name in ("softcap", "position_bias", "s_aux", "sinks") if more.get(name) is not None]
    if wanted or attention_mask is None or attention_mask.shape[2] != stacked:
        raise InputError(
            f"the model's attention asks for {wanted[0] if wanted else 'masks of its own'}, which fixed shapes lack",
            fix="Decode with engine eager.",
        )
    scale = width**-0.5 if scaling is None else scaling
    if kernel == "flash":
        return flash(query.to(key.dtype), key, value, attention_mask, scale), None
    query = query.reshape(b, key.shape[1], stacked, width)
    if kernel == "sdpa":
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    else:  # spreads a single text over the whole GPU, and fuses with its neighbours when compiled
        # scaled first: in float16 a product that has overflowed cannot be
        scores = torch.matmul(query * scale, key.transpose(2, 3)) + attention_mask
        wide = scores.dtype if scores.dtype == torch.float64 else torch.float32
        out = torch.matmul(scores.softmax(-1, dtype=wide).to(value.dtype), value)
    return out.reshape(b, heads, t, -1).transpose(1, 2).contiguous(), None


_NAMES: dict[Kernel, str] = {"sdpa": "draftloop_sdpa", "matmul": "draftloop_matmul", "flash": "draftloop_flash"}


@cache
def _register() -> None:
    """Put our kernels into the table of attention functions; our masks are taken as they are."""
    from transformers import AttentionInterface  # brings all of transformers' models' machinery
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    for kernel, name in _NAMES.items():
        AttentionInterface.register(name, partial(_attend, kernel=kernel))
        AttentionMaskInterface.register(name, sdpa_mask)  # type: ignore[arg-type]


@contextmanager
def attending_fixed(configs: tuple[Any, ...], kernel: Kernel) -> Iterator[None]:
    """Let a model attend by `_attend` for a while."""
    _register()
    with attending_by(_NAMES[kernel], configs):
        yield


@contextmanager
def compiled(
    base: nn.Module,
    layers: nn.ModuleList,
    kept: FixedCache,
    cache_name: str,
    compiler: Callable[[Any], Any],
    joined: Joined | None = None,
) -> Iterator[None]:
    """Run decoder layers compiled for a while: one for all of a kind, each being given its own part of the cache.

    Args:
        base: the model without its head; what it has beside layers and embeddings (last norm, rotary positions) is
            compiled too.
        layers: the target's decoder layers.
        kept: the cache that they write to.
        cache_name: the keyword by which they are given it.
        compiler: `torch.compile` with its options.
        joined: what of the layers is computed by one product.
    """
    made: dict[type, Any] = {}

    def run(module: nn.Module) -> Callable[..., Any]:
        return partial(made.setdefault(type(module), compiler(type(module).forward)), module)

    def forward(layer: nn.Module, part: _FixedLayer) -> Callable[..., Any]:
        whole = run(layer)

        def call(*args: Any, **kwargs: Any) -> Any:
            if cache_name in kwargs:
                kwargs[cache_name] = part  # a layer asks the cache for its own number: it need not be compiled for each
            return whole(*args, **kwargs)

        return call

    many = torch._dynamo.config.patch(  # type: ignore[attr-defined]  # every batch size is a shape of its own
        recompile_limit=256, accumulated_recompile_limit=4096, fail_on_recompile_limit_hit=True,
        skip_nnmodule_hook_guards=False,  # a hook that comes or goes inside a layer is seen
    )  # fmt: skip
    others = [one for one in base.children() if one is not layers and not isinstance(one, nn.Embedding | nn.ModuleList)]
    ours: list[nn.Module] = []
    try:
        for other in others:
            if "forward" not in vars(other):  # else somebody has patched it, and what he wrote runs as it is
                other.forward = run(other)
                ours.append(other)
        for layer, part in zip(layers, kept.layers, strict=True):
            if "forward" not in vars(layer):
                layer.forward = forward(layer, part)
                ours.append(layer)
        with many, joined.in_place() if joined is not None else nullcontext():
            yield
    finally:
        for one in ours:
            one.__dict__.pop("forward", None)


def why_not_fixed(config: Any) -> str:
    """Why a model cannot decode with fixed shapes, as a clause; empty if it can."""
    if getattr(config, "_attn_implementation", "") == "eager":
        return "its class only attends by code of its own (sinks, ...), which fixed shapes lack"
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    kinds = {part.get("rope_type") for part in parts} & {"dynamic", "longrope"}
    return f"its rotary positions ({kinds.pop()}) change with the length of the text" if kinds else ""


def check_flash(target: Any, capacity: int) -> None:
    """Ask whether intervals say what a target's masks show, near the beginning of a text and far from it.

    Raises:
        InputError: they do not, and the kernel flash would show more.
    """
    here = torch.arange(capacity, device=target.device)[:: max(1, capacity // 64)].unsqueeze(0)
    masks = target.family.text_masks(WholeCache(0, capacity).aim(here), here)
    for mask in masks.values() if isinstance(masks, dict) else (masks,):
        check_pieces(mask)
