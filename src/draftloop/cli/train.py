"""The commands that train: `train`, `quickstart`, `prepare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from draftloop.cli.app import AsJson, Out, Overrides, app, places, say
from draftloop.cli.early import note_idle


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="The recipe (YAML); see docs/recipe.md.")],
    overrides: Overrides = None,
    out: Out = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew in a directory that holds a run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a recipe: answer the prompts, train stage by stage, evaluate, audit, report.

    Killed or stopped, the same command goes on where it was. Example:

        draftloop train recipes/draft-opd.yaml target.model=./my-model data.limit=500 --out runs/mine
    """
    from draftloop.recipe_file import load_recipe
    from draftloop.train.job import train as run

    _finish(run(load_recipe(recipe, overrides or []), out=out, fresh=fresh, quiet=as_json, say=say(as_json)), as_json)


@app.command()
def quickstart(
    overrides: Overrides = None,
    out: Out = None,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Train a new drafter: SFT, then Draft-OPD and SpecOPD.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew in a directory that holds a run.")] = False,
    as_json: AsJson = False,
) -> None:
    """The main job on a real model, in minutes: the bundled drafter measured, trained further by SpecOPD, audited."""
    from draftloop.quickstart import quickstart as run

    _finish(
        run(overrides or [], from_scratch=from_scratch, out=out, fresh=fresh, quiet=as_json, say=say(as_json)), as_json
    )


@app.command()
def prepare(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="The recipe (YAML).")],
    overrides: Overrides = None,
    out: Out = None,
    show: Annotated[
        int, typer.Option("--show", min=0, help="Print so many sequences, supervised tokens coloured.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Answer a recipe's prompts by its target and check the loss mask; `train` takes up the result."""
    from draftloop import api
    from draftloop.data.show import show as shown
    from draftloop.target.load import load_tokenizer

    if as_json:
        note_idle(context, "with --json", "show")
    loaded = api.load_recipe(recipe, overrides or [])
    parts = api.prepare(loaded, out=out, quiet=as_json)
    facts = {
        name: {
            "responses": len(part.trunks),
            "tokens": sum(len(t) for t in part.trunks),
            "supervised": sum(t.supervised for t in part.trunks),
            "too_long": part.too_long,
            "too_short": part.too_short,
            "refused": part.refused,
        }
        for name, part in parts.items()
    }
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    if show:
        part = loaded.target
        tokenizer = load_tokenizer(part.model, revision=part.revision, trust_remote_code=part.trust_remote_code)
        Console().print(shown(parts["train"].trunks, tokenizer, show))
    for name, fact in facts.items():
        left_out = sum(len(fact[why]) for why in ("too_long", "too_short", "refused"))  # type: ignore[misc,arg-type]
        told = (
            f"{name}: {fact['responses']} responses, {fact['tokens']} tokens, {fact['supervised']} of them supervised"
        )
        print(told + (f"; {left_out} prompts left out" if left_out else ""))


def _finish(folder: Path, as_json: bool) -> None:
    from draftloop.evaluate.summary import read_summary
    from draftloop.evaluate.table import summary_tables

    if as_json:
        print((folder / "summary.json").read_text(encoding="utf-8"))
        return
    Console().print(summary_tables(read_summary(folder)))
    print(places(folder))
