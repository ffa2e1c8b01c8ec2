"""Tiny DSpark drafters whose heads matter: what the token before adds is as loud as the rest."""

from __future__ import annotations

from dataclasses import fields

import torch

from draftloop.drafter.build import new_drafter
from draftloop.drafter.dspark import DSparkSpec
from tests.tiny import tiny_spec

HEADS = ("vanilla", "gated", "rnn", "none")
RANK = 6


def dspark_shape(target, markov="vanilla", *, confidence=True, **changes) -> DSparkSpec:
    base = tiny_spec(target, **changes)
    shared = {field.name: getattr(base, field.name) for field in fields(base)}
    return DSparkSpec(**shared, markov=markov, markov_rank=0 if markov == "none" else RANK, confidence=confidence)


def tiny_dspark(target, markov="vanilla", *, seed=0, confidence=True, **changes):
    """A bound drafter in the target's type, with confidences on both sides of a half."""
    drafter = new_drafter(dspark_shape(target, markov, confidence=confidence, **changes), target, seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if "markov" in name or name.startswith("confidence"):
                loud = 0.25 if name.startswith("confidence") else 0.7
                weight.copy_(torch.randn(weight.shape, generator=draw) * loud)
            elif weight.dim() > 1:
                weight.mul_(8)
    return drafter.to(target.dtype)
