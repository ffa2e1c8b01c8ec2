"""The quickstart: a packaged recipe on the embedded target, sized for two CPU cores, larger batches on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from draftloop.recipe_file import load_recipe
from draftloop.train.job import train

RECIPES = Path(__file__).parent / "recipes"
ON_GPU = ("batch_size=16", "anchors_per_sequence=64")  # of every stage


def quickstart(
    overrides: Sequence[str] = (),
    *,
    from_scratch: bool = False,
    out: Path | None = None,
    fresh: bool = False,
    quiet: bool = False,
    say: Callable[[str], None] = print,
) -> Path:
    """Train the bundled drafter further, or a new one; `draftloop.train.job.train` has arguments, result and errors."""
    path = RECIPES / ("from-scratch.yaml" if from_scratch else "quickstart.yaml")
    stages = load_recipe(path).stages if torch.cuda.is_available() else []
    sized = [f"stages.{stage.name}.{size}" for stage in stages for size in ON_GPU]
    return train(load_recipe(path, [*sized, *overrides]), out=out, fresh=fresh, quiet=quiet, say=say)
