"""Trees read by FlexAttention through the unmodified model: blocks of the mask that are empty are skipped, not masked.

Entered in transformers' registry of attention functions under a name of ours, and switched to only while a tree is
read; texts are always read with dense masks. Before it is used on a model, its rows are compared with the dense ones:
models do more in attention than a registry knows of.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from draftloop.core.flex import flex
from draftloop.core.tree import pack_branches
from draftloop.target.attention import narrowed
from draftloop.target.implementation import attending_by

NAME = "draftloop_tree"
LONG = 32768  # slots of a row; up to half as many, dense masks were faster on an H200 (benchmarks/tree_attention.py)


def chosen(way: str, device: torch.device, dtype: torch.dtype, slots: int) -> bool:
    """Whether a tree with rows of `slots` slots is to be read by FlexAttention.

    `auto` takes it on CUDA, for long rows, in 16-bit types: its float32 kernels may multiply in tf32.
    """
    if way == "auto":
        return device.type == "cuda" and dtype.itemsize == 2 and slots >= LONG
    return way == "flex"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: [b, heads, t, d] queries under a BlockMask -> [b, t, heads, d].

    Raises:
        ValueError: it is asked for something else, which only wrong rows could answer.
    """
    from torch.nn.attention.flex_attention import BlockMask

    asked = [name for name in ("softcap", "position_bias", "s_aux", "sinks") if more.get(name) is not None]
    if asked or dropout or not isinstance(attention_mask, BlockMask):
        raise ValueError(f"tree attention knows no {asked or 'dropout, and no mask but a BlockMask'}")
    return flex(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


@contextmanager
def attending_flex(base: nn.Module) -> Iterator[None]:
    """Let the layers of a model attend by `attend` for a while."""
    from transformers import AttentionInterface  # not above: it brings all of transformers' models' ground

    AttentionInterface.register(NAME, attend)
    with attending_by(NAME, [one.config for one in base.modules() if hasattr(one, "config")]):
        yield


def flex_fault(target: Any) -> str:
    """What is wrong with reading trees of this target by FlexAttention; empty if its rows are the dense ones.

    Two trunks that share a row of more than one block of the mask, under windows so narrow that they matter, read whole
    and from kept states.
    """
    if why := target.family.why_not_flex():
        return f"FlexAttention cannot read its trees ({why})"
    ids = torch.arange(150, device=target.device) * 31 % target.vocab_size
    on = torch.tensor([0, 1, 0, 0], device=ids.device)
    fork = torch.tensor([3, 20, 90, 40], device=ids.device)
    length = torch.tensor([4, 4, 2, 4], device=ids.device)
    size = min(100, target.context_limit - 5)
    trunks = [ids[:size], ids[40 : 40 + size // 2]]
    packed = pack_branches(
        trunks, [0, 0], on, fork.clamp(max=size // 2 - 1), ids[100:116].view(4, 4), length, aligned=True
    )
    slots = packed.slot[packed.slot >= 0]
    reads = [(torch.zeros_like(part), part) for part in (torch.arange(packed.first, device=ids.device), slots)]
    way, rows = target.tree_attention, []
    try:
        with narrowed(target.config, 3):
            states = []
            for trunk in trunks:
                cache, place = target.new_cache(len(trunk)), torch.arange(len(trunk), device=ids.device).unsqueeze(0)
                states.append(cache.state(0, target.extend(cache, trunk.unsqueeze(0), place).hidden[0], target.version))
            for target.tree_attention in ("dense", "flex"):
                whole = [target.score(packed.tree, read=read).hidden for read in reads]
                rows.append(torch.cat([*whole, target.resume(packed, states, reads[1])]))
    except Exception as error:  # a kernel that cannot be compiled fails in as many ways as there are compilers
        return f"FlexAttention cannot read its trees ({type(error).__name__}: {str(error).strip()[:200]})"
    finally:
        target.tree_attention = way
    dense, flexed = (target.readout.logits(part).float() for part in rows)
    limit = 6e-2  # as for any other probe in 16 bits; a wrong edge is far above
    if target.dtype.itemsize > 2:
        limit = 1e-4 if target.device.type == "cpu" else 1e-2  # CUDA may multiply in tf32
    gap = float((flexed - dense).abs().max() / dense.abs().max().clamp(min=1e-6))
    if gap <= limit:
        return ""
    return f"FlexAttention reads its trees otherwise (off by {gap:.1e} of the largest logit)"
