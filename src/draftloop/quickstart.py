"""The quickstart: one packaged recipe on the embedded target, sized for two CPU cores, larger batches on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from draftloop.recipe_file import load_recipe
from draftloop.train.job import train

RECIPE = Path(__file__).parent / "recipes" / "quickstart.yaml"
GPU = (
    "stages.sft.batch_size=16",
    "stages.sft.anchors_per_sequence=64",
    "stages.sft-continued.batch_size=16",
    "stages.sft-continued.anchors_per_sequence=64",
    "stages.draft-opd.batch_size=16",
    "stages.draft-opd.anchors_per_sequence=64",
)


def quickstart(
    overrides: Sequence[str] = (),
    *,
    out: Path | None = None,
    fresh: bool = False,
    quiet: bool = False,
    say: Callable[[str], None] = print,
) -> Path:
    """Run it; see `draftloop.train.job.train` for arguments, result and errors."""
    sized = GPU if torch.cuda.is_available() else ()
    recipe = load_recipe(RECIPE, [*sized, *overrides])
    return train(recipe, out=out, fresh=fresh, quiet=quiet, say=say)
