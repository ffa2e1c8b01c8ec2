"""The command for a drafter whose target was fine-tuned: `adapt`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from draftloop.cli.app import AsJson, Out, Overrides, Trust, app, drafter_folder, places, say
from draftloop.cli.export import exported, print_commands
from draftloop.core.errors import InputError
from draftloop.formats.bundled_drafter import NAME

_FORMS: tuple[tuple[Literal["vllm", "both"], str | None], ...] = (
    ("both", None),
    ("vllm", "speculators"),
)


@app.command()
def adapt(
    target: Annotated[str, typer.Option("--target", "-t", help="The fine-tuned target: checkpoint folder, or hub id.")],
    drafter: Annotated[
        str, typer.Option("--drafter", "-d", help="The drafter gone stale: a run, a drafter folder, or bundled.")
    ],
    prompts: Annotated[
        list[str], typer.Option("--prompts", "-p", help="Your traffic: a prompt file; may be repeated.")
    ],
    overrides: Overrides = None,
    out: Out = None,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.01, help="Most time of training (default: the recipe's 10).")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=3, help="Use at most this many prompts.")] = None,
    keep_answers: Annotated[
        bool, typer.Option("--keep-answers", help="Train on the answers in the traffic: this very target gave them.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would do and cost; train nothing, write nothing.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew in a directory that holds a run.")] = False,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Your target was fine-tuned and its drafter went stale: let it learn again.

    The fine-tuned target answers your prompts, and the drafter learns from the
    answers. A tenth of the prompts (at most 200) chooses the best checkpoint and
    ends the training when acceptance no longer rises; another tenth measures
    acceptance length and speed before and after. The best drafter is exported
    for vLLM and SGLang. Killed or stopped, the same command goes on.

    What it would do and cost, then the work:

        draftloop adapt -t ./my-fine-tune -d runs/mine -p traffic.jsonl --dry-run
        draftloop adapt -t ./my-fine-tune -d runs/mine -p traffic.jsonl

    Traffic is JSON lines or Parquet with prompt, messages, conversations or
    turns, with answers or without. It is all one recipe, adapt.yaml in
    draftloop/recipes; any cell can be changed, e.g.
    data.response.max_new_tokens=512 or stages.adapt.method=specopd.
    """
    from draftloop.train import adapt as room

    recipe = room.adapt_recipe(
        target,
        drafter if drafter == NAME else str(drafter_folder(Path(drafter))),  # a name stays one in the recipe
        prompts,
        minutes=minutes,
        limit=limit,
        keep_answers=keep_answers,
        trust_remote_code=trust_remote_code,
        overrides=overrides or [],
    )
    if dry_run:
        plan = room.adapt_plan(recipe, out=out, fresh=fresh, say=say(as_json))
        if as_json:
            print(json.dumps(plan, indent=2))
        return
    found = room.adapt(recipe, out=out, fresh=fresh, quiet=as_json, say=say(as_json))
    made, notes = _exports(found.folder, target) if found.better else ([], [])
    _tell(found, made, notes, as_json)


def _exports(run: Path, target: str) -> tuple[list[Any], list[str]]:
    """Write every form that an engine serves; what one cannot read is said, and left out."""
    made, notes = [], []
    for engine, form in _FORMS:
        try:
            one, _, said = exported(run, engine, form, target=target, known=True)
        except InputError as refusal:
            notes.append(str(refusal))
            if engine != "both":
                continue
            one, _, said = exported(run, "vllm", form, target=target, known=True)
        made.append(one)
        notes += said
    return made, list(dict.fromkeys(notes))


def _tell(found: Any, made: list[Any], notes: list[str], as_json: bool) -> None:
    """What it brought, what it cost, and how the drafter is served."""
    from draftloop.evaluate.table import cost_sentence, summary_tables

    folder = found.folder
    if as_json:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        exports = [{"folder": str(one.folder), "form": one.form, "commands": one.commands} for one in made]
        facts = {"folder": str(folder), "better": found.better, "exports": exports, "notes": notes}
        facts["summary"] = summary
        print(json.dumps(facts, indent=2))
        return
    if not made:
        print("Adapting brought nothing on the validation prompts, so nothing is exported: keep the drafter you have.")
        print("What follows is of the checkpoint that came nearest, for the record.\n")
    Console().print(summary_tables(found.summary))
    print(cost_sentence(found.summary))
    print(places(folder))
    if not made:
        return
    for one in made:
        print(f"Exported ({one.form}): {one.folder}")
    print_commands(made[0].commands, notes)
