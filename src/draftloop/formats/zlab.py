"""Saving DFlash checkpoints in z-lab's form, which z-lab's own class, vLLM and SGLang load.

Knows how to put a folder on disk so that nobody ever reads half of one. The published form has no tensor for a learned
mask vector, so one lies beside the weights in mask_embedding.safetensors; the form that engines look for is written by
`export`. Reading is in `load.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from draftloop.core.errors import EnvironmentFault, InputError
from draftloop.core.files import sha256_file, write_json, writing_fault
from draftloop.core.weights import write_tensors
from draftloop.formats.facts import Facts
from draftloop.formats.mask_vector import ENGINE_MASK, MASK
from draftloop.formats.tensors import VECTOR
from draftloop.formats.writers import writer_of
from draftloop.formats.zlab_config import read_config

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_WEIGHTS_OF_OTHERS = ("*.safetensors", "pytorch_model*.bin", ENGINE_MASK)  # engines would read them too


def save_drafter(
    drafter: Any, folder: Path, *, dtype: torch.dtype = torch.bfloat16, extra: dict[str, Any] | None = None
) -> Path:
    """Write a drafter as a checkpoint folder; the same drafter gives the same bytes.

    A new folder appears in one piece. In an existing one, which must be empty of other models, first the weights and
    then config.json are replaced, each in one piece; config.json holds the weights' SHA-256, so that a mixture (a kill
    between the two) is refused by `load_drafter` and never drafted with.

    A learned mask vector goes into a file of its own, for engines refuse tensors that are not in the published table.
    They pass over that file in silence and would draft with the stand-in token's embedding: `export` writes theirs.

    Args:
        drafter: bound or not, on any device.
        folder: where to write; parents are made.
        dtype: type of the stored weights; bfloat16 is what engines serve, float32 loses nothing.
        extra: more facts for config.json (JSON values), under `draftloop.extra`.

    Returns:
        `folder`.

    Raises:
        InputError: the weights hold NaN or infinity (in `dtype`), or the folder holds another model.
        EnvironmentFault: the disk is full or the folder cannot be written.
    """
    writer, form = writer_of(drafter.spec)
    tensors, vector = writer.tensors(drafter, dtype, Path(folder))
    place = Path(folder).expanduser().resolve()
    stage: Path | None = None
    try:
        _check_place(place)
        fresh = not place.exists()
        place.parent.mkdir(parents=True, exist_ok=True)
        # beside a new folder, but inside an old one: its parent may be another file system, or not ours to write
        stage = Path(tempfile.mkdtemp(dir=place.parent if fresh else place, prefix=f".{place.name}.", suffix=".part"))
        write_tensors(stage / WEIGHTS, writer.named(form, tensors))
        weights, mask = sha256_file(stage / WEIGHTS), None
        if vector is not None:
            write_tensors(stage / MASK, {VECTOR: vector})
            mask = sha256_file(stage / MASK)
        write_json(stage / CONFIG, writer.configs[form](drafter.spec, Facts(dtype, weights, mask, extra)))
        if fresh:
            umask = os.umask(0)
            os.umask(umask)
            stage.chmod(0o777 & ~umask)  # mkdtemp makes 0700; others may need to read a drafter
            os.rename(stage, place)
        else:
            for name in (WEIGHTS, MASK, CONFIG):
                if name == MASK and vector is None:
                    (place / MASK).unlink(missing_ok=True)  # of the drafter that was here
                else:
                    os.replace(stage / name, place / name)
    except EnvironmentFault as fault:  # say the folder that the user named, not the temporary one
        raise EnvironmentFault(fault.what, where=str(folder), fix=fault.fix) from fault
    except OSError as error:
        raise writing_fault(error, Path(folder)) from error
    except SafetensorError as error:  # it wraps the operating system's error in text
        code = re.search(r"os error (\d+)", str(error))
        number = int(code[1]) if code else 0
        raise writing_fault(OSError(number, os.strerror(number) if code else str(error)), Path(folder)) from error
    finally:
        if stage is not None:
            shutil.rmtree(stage, ignore_errors=True)
    return folder


def _check_place(place: Path) -> None:
    """Only a drafter may be overwritten: never a file, another model, or weights of which we know nothing.

    Raises:
        InputError: something else is there.
    """
    fix = "Name a new folder."
    if not place.exists():
        return
    if not place.is_dir():
        raise InputError("this is a file, not a folder", where=str(place), fix=fix)
    others = [
        p.name for pattern in _WEIGHTS_OF_OTHERS for p in sorted(place.glob(pattern)) if p.name not in (WEIGHTS, MASK)
    ]
    if others:
        raise InputError(f"the folder holds other weights ({others[0]})", where=str(place), fix=fix)
    if (place / CONFIG).exists():
        if not _is_drafter(place / CONFIG):
            raise InputError("the folder holds another model, which is not overwritten", where=str(place), fix=fix)
    elif (place / WEIGHTS).exists() or (place / MASK).exists():
        raise InputError(
            "the folder holds weights without a config.json, which are not overwritten", where=str(place), fix=fix
        )


def _is_drafter(path: Path) -> bool:
    try:
        return "draftloop" in read_config(path)
    except InputError:
        return False
