"""The command that starts an engine on a drafter: `serve`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from draftloop.cli.app import Trust, app, drafter_folder, engine_target
from draftloop.core.errors import EnvironmentFault, InputError


@app.command()
def serve(
    run: Annotated[Path, typer.Argument(help="A run directory, an exported drafter, any drafter folder, or ngram.")],
    extra: Annotated[
        list[str] | None, typer.Argument(help="After --: more arguments for the engine; they win over ours.")
    ] = None,
    engine: Annotated[Literal["vllm", "sglang"], typer.Option(help="Who serves.")] = "vllm",
    engine_python: Annotated[
        Path | None,
        typer.Option(
            "--engine-python",
            help="The Python of the environment that the engine is installed in (default: the one that runs this).",
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="Folder, hub id, or smollm2; default: the drafter's own.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="The target alone, to compare with (see `bench`).")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on; the default is this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command and end; the export that it names is still made.")
    ] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Serve a target with a drafter through vLLM or SGLang, as they are; Ctrl-C stops the engine.

    A run directory without an export is exported first. The exit status is the engine's. Example:

        draftloop serve runs/mine --engine-python ~/vllm/bin/python -t Qwen/Qwen3-8B -- --max-model-len 4096
    """
    from draftloop.drafter.ngram import NgramSpec
    from draftloop.engines.serve import find_engine, in_environment, run_engine, shell_line
    from draftloop.formats.history import objective_of
    from draftloop.formats.load import load_drafter
    from draftloop.formats.serving import OVERLAP_OBJECTIVES, caveats, check_served, plain_command, serve_command
    from draftloop.formats.target_config import check_target_folder

    found, absent = None, ""
    try:  # first: a wrong path should not cost an export
        found = find_engine(engine, engine_python or Path(sys.executable))
    except EnvironmentFault as fault:
        if not dry_run:
            raise
        absent = f"{engine} was not found here ({fault.what}); this is the command for where it is installed."
    folder, facts = _folder(run, engine, target)
    spec = load_drafter(folder).spec
    lookup = isinstance(spec, NgramSpec)
    check_served(engine, facts.get("form", "zlab"), spec)
    name = engine_target(target or facts.get("target") or spec.made_for.get("target"))
    if name is None:
        raise InputError("the drafter does not say which target it was made for", where=str(run), fix="Give --target.")
    if not lookup:
        check_target_folder(spec, name)
    own = [["--host", host], ["--port", str(port)], *([["--trust-remote-code"]] if trust_remote_code else [])]
    given = {word.split("=")[0] for word in extra or []}
    more = [*(word for words in own if words[0] not in given for word in words), *(extra or [])]
    probabilistic = not lookup and bool(facts.get("probabilistic", objective_of(folder) in OVERLAP_OBJECTIVES))
    if plain:
        command = plain_command(engine, name, more)
    else:
        command = serve_command(engine, name, folder, spec, probabilistic, more)
    environment: dict[str, str] = {}
    cautions: list[str] = []
    if found is not None:
        command, environment, cautions = in_environment(command, found), found.environment, list(found.cautions)
        print(f"{engine} {found.version} on {found.device}:", file=sys.stderr)
    if environment:
        print(f"set for its CPU backend: {', '.join(environment)} (yours win where you set them).", file=sys.stderr)
    for said in [*([absent] if absent else []), *([] if plain else [*cautions, *caveats(engine, spec, probabilistic)])]:
        print(f"note: {said}", file=sys.stderr)
    print(shell_line(command, environment), flush=True)
    if not dry_run:
        raise typer.Exit(run_engine(command, environment))


def _folder(run: Path, engine: Literal["vllm", "sglang"], target: str | None) -> tuple[Path, dict[str, Any]]:
    """The folder to serve and what its serve.json says; a run's drafter is exported where no export is up to date."""
    from draftloop.drafter.ngram import ngram_spec
    from draftloop.formats.bundled_drafter import named_folder
    from draftloop.formats.export import SERVE, export
    from draftloop.formats.history import objective_of, read_history
    from draftloop.formats.load import load_drafter
    from draftloop.formats.zlab import WEIGHTS

    if ngram_spec(run) is not None:  # a lookup, which an engine does by itself
        return run, {}
    drafter, place = drafter_folder(run), run / f"export-{engine}"
    if drafter == named_folder(run):  # an export, or a drafter's own folder, which is served as it lies there
        return drafter.resolve(), _facts(drafter / SERVE)
    weights = place / WEIGHTS
    if not weights.is_file() or weights.stat().st_mtime < (drafter / WEIGHTS).stat().st_mtime:
        name = engine_target(target)
        history, objective = read_history(run), objective_of(drafter)
        export(load_drafter(drafter), place, engine=engine, target_name=name, history=history, objective=objective)
        print(f"exported to {place}", file=sys.stderr)
    return place.resolve(), _facts(place / SERVE)


def _facts(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError("this is not JSON", where=str(file), fix="Export the drafter again.") from error
    return found if isinstance(found, dict) else {}
