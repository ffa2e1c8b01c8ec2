"""Where a training step's host time goes: seconds by phase, what calls what taken apart."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from draftloop.learn import update
from draftloop.supervise import batch
from draftloop.train.optimiser import DrafterOptimiser

PHASES: dict[str, tuple[tuple[Any, str], ...]] = {
    "choose anchors": ((batch, "choose"),),
    "propose": tuple((batch, f"{name}_blocks") for name in ("trunk", "recorded", "sampled")),
    "score": tuple((batch, f"{name}_rows") for name in ("trunk", "recorded", "scored")),
    "other supervision": ((batch, "supervise"),),
    "draft": ((batch, "packed_draft"),),
    "loss": ((update, "loss"),),
    "backward": ((torch.Tensor, "backward"),),
    "other learning": ((update, "differentiate"),),
    "optimiser": ((DrafterOptimiser, "step"),),
}


@contextmanager
def watching(rest: Callable[[], None]) -> Iterator[dict[str, float]]:
    """Seconds by phase, without those of the phases called from it; `rest` runs at every border."""
    seconds: dict[str, float] = defaultdict(float)
    inner = [0.0]

    def wrapped(phase: str, honest: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            rest()
            inner.append(0.0)
            begun = time.perf_counter()
            found = honest(*args, **kwargs)
            rest()
            took = time.perf_counter() - begun
            seconds[phase] += took - inner.pop()
            inner[-1] += took
            return found

        return call

    with ExitStack() as stack:
        for phase, places in PHASES.items():
            for owner, name in places:
                stack.enter_context(patch.object(owner, name, wrapped(phase, getattr(owner, name))))
        yield seconds
