"""What a command can say before a model is loaded: a wrong path, and options that have no effect beside the others."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from draftloop.cli.app import drafter_folder, is_plain
from draftloop.cli.rows import check_new
from draftloop.core.errors import InputError
from draftloop.core.files import check_writable


def check_inputs(
    drafters: Sequence[str | Path],
    prompts: Sequence[str],
    limit: int | None = None,
    *,
    out: Path | None = None,
    folders: Sequence[Path] = (),
) -> None:
    """Look at what is read and at where it is written.

    Args:
        drafters: as named by the user.
        prompts: prompt files.
        limit: most prompts that are used.
        out: a file that is to be new.
        folders: others that are written in.

    Raises:
        InputError: prompts or a drafter cannot be used, or `out` is there.
        EnvironmentFault: a folder cannot be written.
    """
    from draftloop.data.prompts import read_prompts

    check_new(out)
    for one in drafters:
        if is_plain(one):
            what = "this stands for plain decoding, and here a drafter is asked for"
            fix = f"Name a drafter folder or a run directory; {one} is for `draftloop evaluate --compare` alone."
            raise InputError(what, where=str(one), fix=fix)
    read_prompts(list(prompts), Path("."), limit)
    for folder in (*folders, *([] if out is None else [out.parent])):
        check_writable(folder)
    from draftloop.formats.load import check_drafter  # last, for it takes long to import

    for one in drafters:
        check_drafter(drafter_folder(Path(one)))


def note_idle(context: typer.Context, why: str, *names: str) -> None:
    """Say on standard error which of these options were given though they have no effect.

    Args:
        context: of the command.
        why: "at temperature 0".
        names: parameters of the command.
    """
    sources = {name: context.get_parameter_source(name) for name in names}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        options = " and ".join("--" + name.replace("_", "-") for name in given)
        print(f"note: {options} ha{'ve' if given[1:] else 's'} no effect {why}.", file=sys.stderr)
