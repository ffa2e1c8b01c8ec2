"""A new drafter with keyed initial weights, bound to its target; copies for decoding."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from draftloop.core.draws import Purpose, key_of, uniforms
from draftloop.drafter.dflash import DFlash
from draftloop.drafter.spec import DrafterSpec


def new_drafter(spec: DrafterSpec, target: Any, seed: int = 0) -> DFlash:
    """An untrained drafter in float32 on the target's device.

    Matrices are normal with deviation 0.02, what writes to the residual stream is scaled down by depth, norms are ones.
    A learned mask vector begins as the mean of the target's embedding rows: of their size, and like no token's.
    Weights are keyed by (seed, name, place): the same on every machine.
    """
    drafter = DFlash(spec)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() < 2:
                continue
            scale = 0.02 / math.sqrt(2 * spec.layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            place = torch.arange(parameter.numel())
            u, v = (uniforms(seed, Purpose.INIT, key_of(name), place, half) for half in (0, 1))
            normal = torch.sqrt(-2 * torch.log(u)) * torch.cos(2 * math.pi * v)  # Box-Muller
            parameter.copy_((normal * scale).view_as(parameter))
        if drafter.mask_embedding is not None:
            drafter.mask_embedding.copy_(_mean_embedding(target))
    return drafter.to(target.device).bind(target.embed, target.readout)


def _mean_embedding(target: Any) -> Tensor:
    """The mean of the target's embedding rows, float64 [H] on the CPU."""
    total = torch.zeros(target.hidden_size, dtype=torch.float64)
    for ids in torch.arange(target.vocab_size).split(8192):  # a large vocabulary in float64 would take gigabytes
        total += target.embed(ids.to(target.device)).cpu().double().sum(0)
    return total / target.vocab_size


def for_decoding(drafter: DFlash, target: Any) -> DFlash:
    """A frozen copy in the target's type, which is what an engine serves."""
    borrowed, drafter._borrowed = drafter._borrowed, None  # the target must not be copied along
    try:
        twin = copy.deepcopy(drafter)
    finally:
        drafter._borrowed = borrowed
    twin = twin.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    return twin.bind(target.embed, target.readout)
