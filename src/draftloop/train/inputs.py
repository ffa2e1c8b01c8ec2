"""What a run is given, as far as it can be read or refused before a model is loaded.

A wrong name should not cost a target's loading. Knows files and folders, no model.
"""

from __future__ import annotations

import os
from pathlib import Path

from draftloop.core.errors import InputError
from draftloop.core.files import check_writable
from draftloop.data.prompts import Prompt, read_prompts, split
from draftloop.drafter.ngram import refuse_ngram
from draftloop.formats.load import check_drafter
from draftloop.recipe import Recipe

SPLITS = ("train", "validation", "test")
_THREADS = 4  # at most a core: more only get in each other's way, and past what the system allows PyTorch crashes


def read_inputs(recipe: Recipe, folder: Path) -> dict[str, list[Prompt]]:
    """The prompts of every split, once the drafter that is named and the run's folder have been looked at too.

    Args:
        recipe: of the run.
        folder: where it would lie.

    Raises:
        InputError: prompts cannot be used, or there is no such drafter, or none that learns, or too many threads are
            asked for.
        EnvironmentFault: nothing can be written in the folder.
    """
    _check_threads(recipe.threads)
    refuse_ngram(recipe.drafter.init, "be trained", "drafter.init")
    prompts = read_splits(recipe)
    if recipe.drafter.init:
        check_drafter(recipe.drafter.init)
    check_writable(folder)
    return prompts


def _check_threads(threads: int | None) -> None:
    cores = os.cpu_count() or 1
    if threads is not None and threads > _THREADS * cores:
        raise InputError(
            f"{threads} threads are more than {_THREADS} a core ({cores} here)",
            where="threads",
            fix="Leave it out: one a core is the default.",
        )


def read_splits(recipe: Recipe) -> dict[str, list[Prompt]]:
    """The prompts of every split; held-out ones are split off the training files where none are named.

    Raises:
        InputError: no training file, or one that cannot be read.
    """
    data = recipe.data
    if not data.train:
        raise InputError(
            "no training prompts are named", where="data.train", fix="Set data.train to one or more prompt files."
        )
    base = Path(data.dir).expanduser()
    parts = {name: read_prompts(getattr(data, name), base, data.limit) for name in SPLITS}
    if not (parts["validation"] and parts["test"]):
        tenth = max(1, round(0.1 * len(parts["train"])))
        each = min(tenth, data.held_out or tenth)
        sizes = {name: 0 if parts[name] else each for name in ("validation", "test")}
        train, validation, test = split(parts["train"], seed=recipe.seed, **sizes)
        parts = {"train": train, "validation": parts["validation"] or validation, "test": parts["test"] or test}
    return parts
