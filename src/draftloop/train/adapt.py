"""A drafter gone stale because its target was fine-tuned: one stage on the user's own traffic, by a packaged recipe.

Knows which cells of the recipe the user's few facts fill. Everything else is the run that any recipe makes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftloop.core.errors import InputError
from draftloop.drafter.ngram import refuse_ngram
from draftloop.evaluate.summary import Stage, Summary, read_summary
from draftloop.recipe import Recipe
from draftloop.recipe_file import load_recipe
from draftloop.train.job import train
from draftloop.train.plan import dry_run
from draftloop.train.progress import human_seconds

RECIPE = Path(__file__).parent.parent / "recipes" / "adapt.yaml"
ON_GPU = ("stages.adapt.batch_size=16", "stages.adapt.anchors_per_sequence=64", "data.response.batch_size=128")


@dataclass(frozen=True)
class Adapted:
    """What adapting left.

    Attributes:
        folder: the run directory: drafter/, summary.json, report.html, ...
        summary: of the run; its first stage is the drafter as it was, its last the adapted one.
    """

    folder: Path
    summary: Summary

    @property
    def stage(self) -> Stage:
        """The adapted drafter."""
        return self.summary.best

    @property
    def better(self) -> bool:
        """Whether it does better than the drafter as it was, on the validation prompts, by which it was chosen."""
        looks = self.stage.validation
        return max(look.tau_pooled for look in looks[1:]) > looks[0].tau_pooled


def adapt_recipe(
    target: str,
    drafter: str,
    prompts: Sequence[str],
    *,
    minutes: float | None = None,
    limit: int | None = None,
    keep_answers: bool = False,
    trust_remote_code: bool = False,
    overrides: Sequence[str] = (),
) -> Recipe:
    """The packaged recipe, with what the user gave filled in.

    Args:
        target: the fine-tuned target: checkpoint folder, hub id or `smollm2`.
        drafter: a drafter folder, or `bundled`.
        prompts: files of traffic, in any shape that prompt files have.
        minutes: most time of training; None = the recipe's.
        limit: use at most this many prompts.
        keep_answers: train on the answers that the traffic holds; those held out are answered anew all the same.
        trust_remote_code: run Python that comes with the target.
        overrides: dotted ones, laid upon all this.

    Raises:
        InputError: no prompts, an override is wrong, or it leaves another pipeline than one stage that begins with the
            drafter and has a patience.
    """
    if not prompts:
        raise InputError("no traffic is given", where="--prompts", fix="Give one or more prompt files.")
    refuse_ngram(drafter, "learn a target", "--drafter")
    filled = [
        f"target.model={json.dumps(target)}",
        f"drafter.init={json.dumps(drafter)}",
        f"data.train={json.dumps(list(prompts))}",
        f"data.response.regenerate={json.dumps(not keep_answers)}",
        f"target.trust_remote_code={json.dumps(trust_remote_code)}",
    ]
    filled += [f"stages.adapt.minutes={minutes}"] if minutes is not None else []
    filled += [f"data.limit={limit}"] if limit is not None else []
    recipe = load_recipe(RECIPE, [*(ON_GPU if torch.cuda.is_available() else ()), *filled, *overrides])
    first = recipe.stages[0] if len(recipe.stages) == 1 else None
    if first is None or first.stop.patience is None or not recipe.drafter.init:
        raise InputError(
            "adapting is one stage that begins with a drafter and stops when tau no longer rises",
            where="overrides",
            fix="Change cells of that stage; for other pipelines there is `draftloop train`.",
        )
    return recipe


def adapt(
    recipe: Recipe,
    *,
    out: Path | None = None,
    fresh: bool = False,
    quiet: bool = False,
    say: Callable[[str], None] = print,
) -> Adapted:
    """Run such a recipe, or go on with it; `draftloop.train.job.train` has the arguments and errors."""
    folder = train(recipe, out=out, fresh=fresh, quiet=quiet, say=say)
    return Adapted(folder, read_summary(folder))


def adapt_plan(
    recipe: Recipe, *, out: Path | None = None, fresh: bool = False, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Say what it would do and cost, and return that as JSON values; loads target and drafter, writes nothing."""
    (stage,) = recipe.stages
    most = human_seconds(stage.minutes * 60) if stage.minutes else f"{stage.steps} steps"
    say(f"{recipe.drafter.init} would learn {recipe.target.model} by {stage.method}, for at most {most}.")
    say(
        f"It would end before where tau on the validation prompts has not risen by more than {stage.stop.rise:g} in"
        f" {stage.stop.patience} of {stage.evaluations} walks."
    )
    return dry_run(recipe, out, say, fresh=fresh)
