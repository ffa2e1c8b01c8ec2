"""Exporting a drafter: a folder that vLLM or SGLang serves as it is, with a model card and the commands for it.

Knows the forms and which engine reads which. Does not start an engine.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from draftloop.core.errors import EnvironmentFault, InputError
from draftloop.core.files import exchange, sha256_file, write_json, write_text, writing_fault
from draftloop.core.version import VERSION
from draftloop.core.weights import write_tensors
from draftloop.formats.card import model_card
from draftloop.formats.facts import Facts
from draftloop.formats.history import History
from draftloop.formats.mask_vector import ENGINE_MASK, write_engine_mask
from draftloop.formats.serving import (
    ENGINES,
    OVERLAP_OBJECTIVES,
    Engine,
    Form,
    caveats,
    check_served,
    serve_command,
)
from draftloop.formats.writers import writer_of
from draftloop.formats.zlab import CONFIG, WEIGHTS

Wanted = Literal["vllm", "sglang", "both"]
CARD = "README.md"
SERVE = "serve.json"
SCHEMA = 1  # of serve.json
_FILES = (CONFIG, WEIGHTS, ENGINE_MASK, CARD, SERVE)


@dataclass(frozen=True)
class Export:
    """What was exported.

    Attributes:
        folder: where, absolute.
        form: of the checkpoint.
        files: names in the folder.
        commands: the serve command by engine, as lists of arguments.
        notes: sentences that somebody who serves should read.
    """

    folder: Path
    form: Form
    files: tuple[str, ...]
    commands: dict[Engine, list[str]]
    notes: tuple[str, ...]


def export(
    drafter: Any,
    folder: Path,
    *,
    engine: Wanted = "both",
    form: Form | None = None,
    target_name: str | None = None,
    target_architectures: Sequence[str] = (),
    history: History | None = None,
    objective: str = "",
    probabilistic: bool | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Export:
    """Write a drafter as a folder that engines serve.

    The folder appears in one piece, or not at all; an earlier export there is replaced.

    Args:
        drafter: bound or not, on any device.
        folder: where to; parents are made.
        engine: who is to serve it.
        form: of those that the family has (`WRITERS`); `zlab` is read by both engines, `speculators` by vLLM alone.
            Default: the family's first.
        target_name: folder or hub id under which engines find the target; default: what the drafter was made for.
        target_architectures: of the target's config.json, for the speculators form.
        history: how it was trained, for the card.
        objective: what it was last trained on, where there is no history (`objective_of` its folder).
        probabilistic: draw drafts from the drafter's law when sampling (vLLM); default: when the last objective was
            one of overlap (`OVERLAP_OBJECTIVES`).
        dtype: of the stored weights; engines serve bfloat16.

    Raises:
        InputError: an engine cannot read this, the target has no name, the weights are not finite, or something else
            is in the folder.
        EnvironmentFault: the disk is full or the folder cannot be written.
    """
    spec = drafter.spec
    writer, form = writer_of(spec, form)
    engines: tuple[Engine, ...] = ENGINES if engine == "both" else (engine,)
    for each in engines:
        check_served(each, form, spec)
    target = target_name or spec.made_for.get("target")
    if not isinstance(target, str) or not target:
        raise InputError(
            "the drafter does not say which target it was made for",
            where="--target",
            fix="Name the folder or the hub id under which the engine finds the target.",
        )
    objective = history.objective if history is not None else objective
    if probabilistic is None:
        probabilistic = objective in OVERLAP_OBJECTIVES
    place = Path(folder).expanduser().resolve()
    _check_place(place)
    tensors, vector = writer.tensors(drafter, dtype, place)
    commands = {each: serve_command(each, target, place, spec, probabilistic) for each in engines}
    notes = tuple(note for each in engines for note in caveats(each, spec, probabilistic))
    kind = str(dtype).removeprefix("torch.")
    extra = {"export": form} | ({"objective": objective} if objective else {})
    extra |= {"stage": history.delivered} if history is not None else {}
    stage: Path | None = None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}.", suffix=".part"))
        write_tensors(stage / WEIGHTS, writer.named(form, tensors))
        mask = None
        if vector is not None:
            write_engine_mask(stage / ENGINE_MASK, vector, spec.mask_token_id)
            mask = sha256_file(stage / ENGINE_MASK)
        weights = sha256_file(stage / WEIGHTS)
        facts = Facts(dtype, weights, mask, extra, target, target_architectures)
        write_json(stage / CONFIG, writer.configs[form](spec, facts))
        card = model_card(
            spec,
            name=place.name,
            target=target,
            form=form,
            dtype=kind,
            parameters=sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point()),
            commands=commands,
            notes=notes,
            history=history,
        )
        write_text(stage / CARD, card)
        files = tuple(name for name in _FILES if name == SERVE or (stage / name).exists())
        write_json(
            stage / SERVE,
            {
                "schema": SCHEMA,
                "draftloop": VERSION,
                "form": form,
                "target": target,
                "folder": str(place),
                "block_size": spec.block_size,
                "num_speculative_tokens": spec.drafted,
                "probabilistic": probabilistic,
                "commands": commands,
                "notes": list(notes),
                "files": list(files),
            },
        )
        _move(stage, place)
    except EnvironmentFault as fault:  # say the folder that the user named, not the temporary one
        raise EnvironmentFault(fault.what, where=str(folder), fix=fault.fix) from fault
    except OSError as error:
        raise writing_fault(error, Path(folder)) from error
    finally:
        if stage is not None:
            shutil.rmtree(stage, ignore_errors=True)
    return Export(place, form, files, commands, notes)


def _move(stage: Path, place: Path) -> None:
    """Put a finished folder in its place, in one step; an earlier export is then where that folder was.

    Where the file system cannot exchange two folders, the earlier one is moved aside first, and back if that fails: a
    kill between the two renames leaves it whole under a hidden name, `.NAME.*.old/old`.
    """
    umask = os.umask(0)
    os.umask(umask)
    stage.chmod(0o777 & ~umask)  # mkdtemp makes 0700; others may need to read it
    if not place.exists():
        os.rename(stage, place)
        return
    if exchange(stage, place):
        return
    aside = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}.", suffix=".old"))
    os.rename(place, aside / "old")
    try:
        os.rename(stage, place)
    except BaseException:
        os.rename(aside / "old", place)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _check_place(place: Path) -> None:
    """Only an export of ours may be replaced, and only where nobody added a file to it.

    Raises:
        InputError: something else is there.
    """
    if not place.exists():
        return
    fix = "Name a new folder with --out."
    if not place.is_dir():
        raise InputError("this is a file, not a folder", where=str(place), fix=fix)
    names = {path.name for path in place.iterdir()}
    if not names:
        return
    if not _is_export(place / SERVE):
        raise InputError("the folder holds something that is no export of ours", where=str(place), fix=fix)
    others = sorted(names - set(_FILES))
    if others:
        raise InputError(
            f"the folder holds {others[0]}, which an export does not write and which would be lost",
            where=str(place),
            fix=fix,
        )


def _is_export(file: Path) -> bool:
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(said, dict) and "draftloop" in said and "commands" in said
