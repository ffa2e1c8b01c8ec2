"""The command line's frame: the application, and the options and helpers that several commands share.

Each command registers itself on `app` in a file of its own. PyTorch is imported inside the commands, so that `--help`
answers at once.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from draftloop.core.errors import InputError
from draftloop.core.version import VERSION
from draftloop.evaluate import PLAIN
from draftloop.formats.bundled_drafter import named_folder

app = typer.Typer(
    name="draftloop",
    help="Train the draft model behind speculative decoding on its own mistakes; prove that decoding stays lossless.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 done, 1 our fault, 2 your input, 3 the environment. Recipes: docs/recipe.md.",
)

Overrides = Annotated[
    list[str] | None, typer.Argument(help="Changes to the recipe, e.g. stages.0.optimiser.lr=3e-4 or data.limit=100.")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Run directory (default: the recipe's, else runs/NAME).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output, and nothing else.")]
TargetName = Annotated[str, typer.Option("--target", "-t", help="Checkpoint folder, hub id, or smollm2 (embedded).")]
Files = Annotated[list[str], typer.Option("--prompts", "-p", help="Prompt file, or builtin:test; may be repeated.")]
EngineName = Annotated[
    Literal["auto", "eager", "graph", "fused"],
    typer.Option("--engine", help="How texts are decoded; auto = graph on CUDA where it can be, else eager."),
]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python that comes with the checkpoint.")]


def above_zero(context: typer.Context, param: typer.CallbackParam, value: float | None) -> float | None:
    """Of an option whose value is above 0 and at most 1, as its help says; checked before anything is loaded.

    Raises:
        InputError: it is not.
    """
    if value is not None and not 0 < value <= 1:
        raise InputError(
            f"{value:g} is not above 0 and at most 1", where=param.opts[0], fix="Name a share or leave it out."
        )
    return value


def _version(wanted: bool) -> None:
    if wanted:
        print(f"draftloop {VERSION}")
        raise typer.Exit()


@app.callback()
def _settings(
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option("--log-level", help="debug also shows tracebacks.")
    ] = "warning",
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("draftloop").setLevel(log_level.upper())
    if log_level != "debug":
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def say(as_json: bool) -> Callable[[str], None]:
    """How a command talks: to standard error when standard output is for JSON."""
    return lambda text: print(text, file=sys.stderr if as_json else sys.stdout, flush=True)


def places(run: Path) -> str:
    """Where a finished run left what is looked for, in a line below an empty one."""
    return f"\nDrafter: {run / 'drafter'}   report: {run / 'report.html'}   figures: {run / 'summary.json'}"


def engine_target(name: str | None) -> str | None:
    """What an engine is to load a target from: the whole path of a folder, or a hub id; None stays None.

    Raises:
        InputError: it is written like a path, and there is no checkpoint.
    """
    from draftloop.target.embedded import embedded_target
    from draftloop.target.load import EMBEDDED

    if name is None:
        return None
    if name == EMBEDDED:
        return str(embedded_target())
    local = Path(name).expanduser()
    if (local / "config.json").is_file():
        return str(local.resolve())
    if local.exists() or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name):
        what = "the folder has no config.json" if local.is_dir() else "there is no such target folder"
        raise InputError(what, where=name, fix="Give --target the target's checkpoint folder or its hub id.")
    return name


def is_plain(name: str | Path) -> bool:
    """Whether a drafter's name is the word for plain decoding; a folder of that name comes first."""
    return str(name) == PLAIN and not Path(name).exists()


def drafter_folder(path: Path) -> Path:
    """A run directory stands for its drafter, `bundled` for the one that comes with the project."""
    path = named_folder(path)
    return path / "drafter" if (path / "drafter" / "config.json").is_file() else path
