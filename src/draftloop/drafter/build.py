"""A new drafter with keyed initial weights, bound to its target; copies for decoding."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from draftloop.core.draws import Purpose, key_of, uniforms
from draftloop.drafter.families import FAMILIES
from draftloop.drafter.spec import DrafterSpec


def new_drafter(spec: DrafterSpec, target: Any, seed: int = 0) -> Any:
    """An untrained drafter in float32 on the target's device.

    Matrices are normal with deviation 0.02, what writes to the residual stream is scaled down by depth, norms are ones.
    Weights are keyed by (seed, name, place), the same on every machine; what begins otherwise the family settles.
    """
    drafter = FAMILIES[spec.family].build(spec)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() < 2:
                continue
            scale = 0.02 / math.sqrt(2 * spec.layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            place = torch.arange(parameter.numel())
            u, v = (uniforms(seed, Purpose.INIT, key_of(name), place, half) for half in (0, 1))
            normal = torch.sqrt(-2 * torch.log(u)) * torch.cos(2 * math.pi * v)  # Box-Muller
            parameter.copy_((normal * scale).view_as(parameter))
        drafter.settle(target)
    return drafter.to(target.device).bind(target.embed, target.readout)


def meet_answers(drafter: Any, answers: Iterable[Sequence[int]], target: Any) -> None:
    """Let a new drafter settle what depends on the answers that it will learn from (a reduced vocabulary).

    Args:
        drafter: of `new_drafter`; most families have nothing to settle.
        answers: token ids of each, prompts left out.
        target: a `Target`.
    """
    if not hasattr(drafter, "meet"):
        return
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    for ids in answers:
        counts += torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=target.vocab_size)
    drafter.meet(counts, target)


def for_decoding(drafter: Any, target: Any) -> Any:
    """A frozen copy in the target's type, which is what an engine serves."""
    borrowed, drafter._borrowed = drafter._borrowed, None  # the target must not be copied along
    try:
        twin = copy.deepcopy(drafter)
    finally:
        drafter._borrowed = borrowed
    twin.__dict__.pop("through", None)  # of layers compiled for training
    twin = twin.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    return twin.bind(target.embed, target.readout)
