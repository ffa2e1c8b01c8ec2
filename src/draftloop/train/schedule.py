"""The learning rate's course over a stage: a linear warm-up, then cosine, warm-up-stable-decay or constant.

Pure functions of the step. Knows no optimiser.
"""

from __future__ import annotations

import math

from draftloop.recipe import OptimiserPart


def learning_rate_factor(part: OptimiserPart, step: int, steps: int) -> float:
    """Return the learning rate of one update as a share of `part.lr`, in (0, 1].

    The warm-up never begins at 0 and the fall would reach `final` one step after the last, so no update is wasted.
    cosine: Loshchilov & Hutter, "SGDR" (2017), eq. 5, one period. wsd: Hu et al., "MiniCPM" (2024), with the linear
    fall of Haegele et al., "Scaling laws and compute-optimal training beyond fixed training durations" (2024).

    Args:
        part: the stage's optimiser section.
        step: updates made before this one, 0 <= step < steps.
        steps: updates of the whole stage.
    """
    if not 0 <= step < steps:
        raise ValueError(f"step {step} is outside a stage of {steps}")
    warm = round(part.warmup * steps)
    if step < warm:
        return (step + 1) / (warm + 1)
    if part.schedule == "cosine":
        progress = (step - warm) / (steps - warm)
        return part.final + (1 - part.final) * (1 + math.cos(math.pi * progress)) / 2
    if part.schedule == "wsd":
        fall = min(round(part.decay_share * steps), steps - warm)
        left = steps - step
        return 1.0 if left >= fall else part.final + (1 - part.final) * left / fall
    return 1.0
