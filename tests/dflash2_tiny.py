"""A tiny DFlash 2 on the tiny targets, loud enough that no part of it is idle."""

from __future__ import annotations

from dataclasses import fields

import torch

from draftloop.drafter.build import new_drafter
from draftloop.drafter.dflash2 import DFlash2, DFlash2Spec
from tests.tiny import tiny_spec

SIZES = {"selector_rank": 6, "selector_top_k": 5, "conv_kernel_size": 2, "conv_group_size": 12}
LOUD = {"codebook": 2.0, "base_kernel": 0.5, "kernel_projection": 0.1}


def widened(base, **changes) -> DFlash2Spec:
    """The DFlash 2 spec of the same backbone."""
    return DFlash2Spec(**{f.name: getattr(base, f.name) for f in fields(base)}, **{**SIZES, **changes})


def fresh_dflash2(target, seed: int = 0, *, sizes=(), **changes) -> DFlash2:
    return new_drafter(widened(tiny_spec(target, **changes), **dict(sizes)), target, seed)


def tiny_dflash2(target, seed: int = 0, *, sizes=(), **changes) -> DFlash2:
    drafter = fresh_dflash2(target, seed, sizes=sizes, **changes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            kind = next((k for k in LOUD if k in name), None)
            if kind is not None:
                weight.add_(torch.randn(weight.shape, generator=generator) * LOUD[kind])
            elif weight.dim() > 1:
                weight.mul_(8)
    return drafter
