"""`evaluate --compare`: several drafters side by side, on the screen, as a picture and as rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from draftloop.cli.app import drafter_folder, is_plain, say
from draftloop.cli.early import check_inputs
from draftloop.cli.rows import head_of, row_writer
from draftloop.core.errors import EnvironmentFault, InputError

PICTURE = "compare.png"  # beside the kept answers, where no rows are written


def compare(
    names: Sequence[str],
    prompts: Sequence[str],
    *,
    target: str,
    dtype: str,
    engine: str,
    trust_remote_code: bool,
    cache: Path,
    out: Path | None,
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Load, compare, print, draw; `options` are those of `draftloop.evaluate.compare.compare`."""
    _check_names(names)
    drafting = [name for name in names if not is_plain(name)]
    picture = plot or (out.with_suffix(".png") if out else cache / PICTURE)
    check_inputs(drafting, prompts, options["limit"], out=out, folders=[cache, picture.parent])
    from draftloop import api  # here, for it takes long to import and what is wrong should be told at once
    from draftloop.evaluate.plot import plot_comparison
    from draftloop.evaluate.table import comparison_tables
    from draftloop.train.progress import reporting

    loaded = api.load_target(target, dtype=dtype, trust_remote_code=trust_remote_code)
    loaded.engine = engine
    drafters = {name: None if is_plain(name) else api.load_drafter(_folder(name), loaded) for name in names}
    with ExitStack() as stack:
        found = api.compare(
            loaded,
            drafters,
            prompts,
            folder=cache,
            write=row_writer(stack, out, head_of("compare", loaded)),
            report=lambda title, unit: reporting(title, unit=unit, silent=as_json),
            **options,
        )
    try:
        plot_comparison(found, picture)
    except EnvironmentFault as fault:
        if out is None:
            raise
        fix = f"Mend that and name another --out: the rows are whole in {out}, which is not overwritten."
        raise EnvironmentFault(fault.what, where=fault.where, fix=fix) from fault
    if as_json:
        print(json.dumps({**found.to_json(), "picture": str(picture)}, indent=2))
    else:
        Console().print(comparison_tables(found))
    tell = say(as_json)
    tell(f"Picture: {picture}" + (f"   rows: {out}" if out else ""))


def _folder(name: str) -> Path:
    return drafter_folder(Path(name))


def _check_names(names: Sequence[str]) -> None:
    """Refuse one named twice, in one way or in two, before a model is loaded."""
    seen: dict[Path | str, str] = {}
    for name in names:
        folder = _folder(name)
        place = folder.resolve() if folder.exists() else name
        if place in seen:
            what = "it is named twice" if seen[place] == name else f"it is the same drafter as {seen[place]}"
            raise InputError(what, where=name, fix="Name each drafter once.")
        seen[place] = name
