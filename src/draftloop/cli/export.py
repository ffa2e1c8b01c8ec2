"""The command that hands a drafter to an engine: `export`."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from draftloop.cli.app import AsJson, app, drafter_folder, engine_target


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run directory, or a drafter folder (ours or a published one).")],
    engine: Annotated[
        Literal["vllm", "sglang", "both"], typer.Option("--for", help="The engine that is to serve it.")
    ] = "both",
    form: Annotated[
        str | None,
        typer.Option(help="speculators: for vLLM alone; default: the family's own (zlab, deepspec, eagle3), for both."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where to (default: RUN/export-ENGINE[-speculators]).")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", "-t", help="Folder or hub id under which the engine finds the target."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a drafter as a folder that vLLM or SGLang serves as it is, with a model card and the commands.

    Both read the default form. Example:

        draftloop export runs/mine --for vllm --target Qwen/Qwen3-8B
    """
    made, name, notes = exported(run, engine, form, out, target)
    if as_json:
        commands = {each: list(command) for each, command in made.commands.items()}
        facts = {"folder": str(made.folder), "form": made.form, "target": name, "files": list(made.files)}
        print(json.dumps({**facts, "commands": commands, "notes": notes}, indent=2))
        return
    print(f"Exported to {made.folder} ({', '.join(made.files)}).")
    print_commands(made.commands, notes)


def print_commands(commands: Mapping[Any, Sequence[str]], notes: Sequence[str]) -> None:
    """Say how each engine serves it, and what is to be known."""
    from draftloop.formats.serving import TITLES

    for each, command in commands.items():
        print(f"\n{TITLES[each]}:\n  {shlex.join(command)}")
    for note in notes:
        print(f"\nNote: {note}")


def exported(
    run: Path,
    engine: Literal["vllm", "sglang", "both"],
    form: str | None = None,
    out: Path | None = None,
    target: str | None = None,
    *,
    known: bool = False,
) -> tuple[Any, str | None, list[str]]:
    """Export, for the command line.

    Args:
        run, engine, form, out, target: as the command takes them.
        known: the target is certainly the one that the drafter was trained on, so it is not loaded to be compared.

    Returns:
        the export, the target's name, what somebody who serves should read.
    """
    from draftloop.drafter.ngram import refuse_ngram
    from draftloop.formats.export import export as run_export
    from draftloop.formats.history import objective_of, read_history
    from draftloop.formats.load import load_drafter
    from draftloop.formats.target_config import check_target_folder
    from draftloop.formats.writers import writer_of

    refuse_ngram(run, "be exported", "RUN")
    folder = drafter_folder(run)
    drafter = load_drafter(folder)
    name = engine_target(target or drafter.spec.made_for.get("target"))
    if name is not None:
        check_target_folder(drafter.spec, name)
    unsure = "" if known else _unlike(name, drafter.spec.made_for)
    own = form is None or form == writer_of(drafter.spec)[1]
    place = f"export-{engine}" if own else f"export-{engine}-{form}"
    made = run_export(
        drafter,
        out or (run / place if run.exists() else Path(f"{run}-{place}")),  # the bundled drafter: not into the package
        engine=engine,
        form=form,
        target_name=name,
        target_architectures=_architectures(name),
        history=read_history(run),
        objective=objective_of(folder),
    )
    return made, name, [*made.notes, *([unsure] if unsure else [])]


def _unlike(name: str | None, made_for: dict[str, Any]) -> str:
    """A sentence where the target is not, or may not be, the one that the drafter was trained for; else empty."""
    known = made_for.get("target_fingerprint")
    if name is None or known is None:
        return ""
    if not Path(name).is_dir():
        return f"{name} is no folder here, so it is taken as a hub id, and its weights were not compared."
    size = sum(file.stat().st_size for file in Path(name).glob("*.safetensors"))
    if size > 0.5 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        return f"{name} is too large for the memory that is free here, so its weights were not compared."
    from draftloop.core.errors import DraftloopError
    from draftloop.target.load import load_target

    try:
        found = load_target(name, device="cpu").fingerprint
    except DraftloopError as error:  # an engine may read what we cannot
        return f"the weights in {name} were not compared ({error.what})."
    if found == known:
        return ""
    return (
        f"the target in {name} ({found}) is not the one that the drafter was trained for ({made_for.get('target')},"
        f" {known}): output stays exact, but fewer tokens may be accepted."
    )


def _architectures(target: str | None) -> list[str]:
    """What a target folder says of its architecture; nothing for a hub id, which is not asked."""
    file = Path(target).expanduser() / "config.json" if target else None
    if file is None or not file.is_file():
        return []
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("architectures")
    except (OSError, ValueError, AttributeError):
        return []
    return [str(name) for name in found] if isinstance(found, list) else []
