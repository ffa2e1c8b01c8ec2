"""Loading a drafter from a checkpoint folder, whichever form it is in; the others are refused by name.

The one place where a family plugs in: a `Reader` in `READERS`. Knows no hub and no engine. The target is met only
through its public attributes.
"""

from __future__ import annotations

import os
import re
import shlex
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from draftloop.core.errors import InputError
from draftloop.core.files import sha256_file
from draftloop.core.weights import check_folder
from draftloop.drafter.families import FAMILIES
from draftloop.drafter.mtp import MTPSpec
from draftloop.drafter.ngram import ngram_drafter, ngram_spec
from draftloop.drafter.spec import DFlashSpec, DrafterSpec, check_fits
from draftloop.formats import dflash2_config, dspark, eagle3, eagle3_tensors, mtp, speculators, zlab_config
from draftloop.formats.bundled_drafter import named_folder
from draftloop.formats.history import SUMMARY
from draftloop.formats.mask_vector import ENGINE_MASK, MASK, read_mask
from draftloop.formats.tensors import AGAIN, VECTOR, read_published
from draftloop.formats.zlab import CONFIG, WEIGHTS


@dataclass(frozen=True)
class Reader:
    """How one form of one family is read.

    Attributes:
        form: its name, as `export` spells it.
        claims: whether a config.json says that it is in this form.
        spec_of: (config.json, its path, num_target_layers=...) -> the spec, or an InputError.
        tensors: (weight files, spec, folder, target) -> the drafter's tensors by name, checked.
    """

    form: str
    claims: Callable[[dict[str, Any]], bool]
    spec_of: Callable[..., DrafterSpec]
    tensors: Callable[[list[Path], Any, Path, Any], dict[str, Tensor]]


READERS = (
    Reader(eagle3.FORM, eagle3.claims, eagle3.spec_of, eagle3_tensors.read_published),
    Reader("speculators", eagle3.claims_speculators, eagle3.speculators_spec_of, eagle3_tensors.read_published),
    Reader("mtp", mtp.claims, mtp.spec_of, mtp.read_module),
    Reader("native", mtp.claims_native, mtp.spec_of, mtp.read_module),
    Reader("speculators", dspark.claims_speculators, dspark.speculators_spec_of, read_published),
    Reader("deepspec", dspark.claims, dspark.spec_of, read_published),
    Reader("speculators", dflash2_config.claims_speculators, dflash2_config.spec_of_speculators, read_published),
    Reader("zlab", dflash2_config.claims_zlab, dflash2_config.spec_of_zlab, read_published),
    Reader("speculators", speculators.claims, speculators.spec_of, read_published),
    Reader("zlab", zlab_config.claims, zlab_config.spec_of, read_published),
)

_RUN = "run.json"  # only a run directory has one

# A mark (regular expression) in an architecture or in speculators_model_type, whose drafter that is, and what we would
# need to read it.
_OTHERS = (
    ("peagle", "a P-EAGLE drafter", "an EAGLE-3 layer that drafts in parallel"),
    ("eagle3qwen", "an EAGLE-3 drafter of a Qwen3 layer", "its normed heads"),
    ("eagle(?!3)", "an EAGLE drafter", "a layer that reads its own output, token by token"),
    ("xpress", "an XPress drafter", "its layers"),
    ("medusa", "a Medusa drafter", "its heads"),
)


def load_drafter(
    path: str | os.PathLike[str],
    target: Any = None,
    *,
    dtype: torch.dtype | None = None,
    block_size: int | None = None,
    to_train: bool = False,
) -> Any:
    """Read a drafter from a checkpoint folder, ours or a published one, in z-lab's form or in speculators'.

    Names may carry a `model.` prefix, and the weights may be split over several files. A copy of the target's embedding
    or readout is accepted only beside a target whose own it is. A learned mask vector comes along, from our file or
    from the one that engines read.

    Args:
        path: the folder; or `bundled`, the embedded target's drafter that comes with the project; or `native`, the
            multi-token-prediction head in the target's own checkpoint (its folder does as well); or `ngram`, the lookup
            that has no weights (`drafter.ngram`).
        target: a `Target` to check against, move to and bind to; None leaves the drafter unbound on the CPU.
        dtype: of the weights; None = as stored (train in float32; `for_decoding` gives the target's).
        block_size: B of a native head, which has none of its own; default 4.
        to_train: it is about to learn this target, so it is no matter which one it was trained for.

    Returns:
        the drafter, trainable. Its `spec.made_for` is what the file says.

    Warns:
        UserWarning: the target is not the very one that the drafter was trained for. Only a warning, since drafting for
        a fine-tuned target is lossless, and often the point. Or the drafter's run did not come to its end.

    Raises:
        InputError: not a whole, finite checkpoint of a form that is read, one that says a thing twice and differently,
            or one made for a target of another shape.
    """
    if isinstance(target, (str, os.PathLike)):
        raise InputError("the target is a name, not a loaded target", fix="Load it first: load_target(...).")
    if (lookup := ngram_spec(path)) is not None:
        return ngram_drafter(lookup, target)
    folder = mtp.native_folder(target) if str(path) == mtp.NATIVE and target is not None else named_folder(path)
    config, reader = _looked_at(folder)
    _note_unfinished(folder, config)
    spec = reader.spec_of(config, folder / CONFIG, num_target_layers=None if target is None else target.num_layers)
    if target is not None:
        check_fits(spec, target, str(folder))
    if reader.form == mtp.NATIVE and isinstance(spec, MTPSpec):
        spec = mtp.settled(spec, target, block_size)
    vector = read_mask(spec, folder) if isinstance(spec, DFlashSpec) else None
    files = [file for file in sorted(folder.glob("*.safetensors")) if file.name != MASK]
    tensors = reader.tensors(files, spec, folder, target)
    if vector is not None:
        tensors[VECTOR] = vector
        spec = replace(spec, learned_mask=True)  # type: ignore[call-arg]  # a published checkpoint says so by its file alone
    _check_pair(config, folder)
    kind = dtype or reduce(torch.promote_types, [tensor.dtype for tensor in tensors.values()])
    with torch.device("meta"):  # shapes only: nothing is initialised to be thrown away
        drafter = FAMILIES[spec.family].build(spec)
    # copied off the file, which is mapped: were it cut short later, touching a weight would kill the process
    drafter.load_state_dict(
        {n: t.to(kind if t.is_floating_point() else t.dtype, copy=True) for n, t in tensors.items()}, assign=True
    )
    if target is None:
        return drafter
    known = spec.made_for.get("target_fingerprint")
    if known is not None and known != target.fingerprint and not to_train:
        warnings.warn(
            f"{folder}: the drafter was made for {spec.made_for.get('target')} ({known}), the target is {target.name} "
            f"({target.fingerprint}); output stays exact, but fewer tokens may be accepted",
            stacklevel=2,
        )
    return drafter.to(target.device).bind(target.embed, target.readout)


def check_drafter(path: str | os.PathLike[str]) -> None:
    """Refuse what `load_drafter` would refuse at the first look, before a target is loaded for it.

    Args:
        path: as for `load_drafter`; a target's own head is taken on trust.

    Raises:
        InputError: no checkpoint folder, or one of a form that is not read.
    """
    if ngram_spec(path) is None and str(path) != mtp.NATIVE:
        _looked_at(named_folder(path))


def _looked_at(folder: Path) -> tuple[dict[str, Any], Reader]:
    """The config.json of a whole checkpoint folder, and who reads it; weights are not read."""
    if (folder / _RUN).is_file() and not (folder / CONFIG).exists():
        raise InputError(
            "this run has delivered no drafter yet",
            where=str(folder),
            fix=f"`draftloop train RECIPE --out {shlex.quote(str(folder))}` makes one, with the recipe of the run.",
        )
    try:
        check_folder(folder)
    except OSError as error:
        raise InputError(
            f"it cannot be read ({error.strerror})", where=str(folder), fix="Check its permissions."
        ) from error
    config = zlab_config.read_config(folder / CONFIG)
    return config, reader_for(config, folder / CONFIG)


def _note_unfinished(folder: Path, config: dict[str, Any]) -> None:
    """Warn where a run delivered a drafter and was stopped before it had measured it."""
    run = folder.parent
    if folder.name != "drafter" or not (run / _RUN).is_file() or (run / SUMMARY).is_file():
        return
    ours = config.get("draftloop")
    extra = ours.get("extra") if isinstance(ours, dict) else None
    stage = extra.get("stage") if isinstance(extra, dict) else None
    whose = f"its drafter is that of stage {stage}" if stage else "it has a drafter"
    warnings.warn(
        f"{run}: this run is unfinished (no {SUMMARY}): {whose}, and was not measured or audited; the command that"
        " began the run goes on with that",
        stacklevel=3,
    )


def reader_for(config: dict[str, Any], where: Path) -> Reader:
    """Who reads a config.json.

    Raises:
        InputError: a form or a family that is not read, named, with what it would need.
    """
    given = config.get("architectures")
    if given is not None and not (isinstance(given, list) and all(isinstance(name, str) for name in given)):
        _refuse(f"architectures is {str(given)[:60]}, and not a list of names", where)
    names = given or []
    model = config.get("speculators_model_type")
    algorithm = model if isinstance(model, str) else ""
    for mark, kind, missing in _OTHERS:
        for name in (algorithm, *names):
            if re.search(mark, name.lower()):
                _refuse(f"this is {kind} ({name}), which is not read yet: it needs {missing}", where)
    for reader in READERS:
        if reader.claims(config):
            return reader
    if not names:
        _refuse("the key architectures is missing, so this is no drafter in a form that is read", where)
    _refuse(f"this is a {names[0]}, a form that is not read yet", where)


def _check_pair(config: dict[str, Any], folder: Path) -> None:
    """Refuse weights that config.json was not saved with: their shapes may agree, what they mean does not."""
    mask = ENGINE_MASK if (folder / ENGINE_MASK).is_file() else MASK
    for name, key, what in ((WEIGHTS, "weights_sha256", "weights"), (mask, "mask_sha256", "the learned mask vector")):
        promised = (config.get("draftloop") or {}).get(key)
        if promised is not None and (not (folder / name).is_file() or sha256_file(folder / name) != promised):
            raise InputError(
                f"{what} and config.json come from two different saves",
                where=str(folder),
                fix=f"{AGAIN} If you changed the file on purpose, remove draftloop.{key} from config.json.",
            )


def _refuse(what: str, where: Path) -> NoReturn:
    raise InputError(what, where=str(where), fix="Use a DFlash, DFlash 2, DSpark or EAGLE-3 checkpoint.")
