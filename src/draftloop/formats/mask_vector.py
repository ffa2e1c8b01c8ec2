"""A learned mask vector on disk: `mask_embedding.safetensors` in our checkpoints, `mask_embedding.pt` in exports.

The published forms have no tensor for it. Engines look for the second file, which torch.save wrote, so it is written
for them alone, and read (from published checkpoints) only as plain tensors and numbers, never as code. Knows no
config.json.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from draftloop.core.errors import InputError
from draftloop.core.files import atomic_path
from draftloop.core.weights import read_tensors
from draftloop.drafter.spec import DFlashSpec
from draftloop.formats.tensors import AGAIN, COMPLETE, VECTOR, check_kind, header

MASK = "mask_embedding.safetensors"
ENGINE_MASK = "mask_embedding.pt"
_KINDS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def write_engine_mask(path: Path, vector: Tensor, mask_token_id: int) -> None:
    """Write a learned vector as vLLM and SGLang read it: {"embedding": [H], "mask_token_id": int} by torch.save.

    Args:
        path: `mask_embedding.pt` beside the weights.
        vector: [H] in the type that is served.
        mask_token_id: the id that config.json names; engines refuse a file that names another.
    """
    state = {"embedding": vector.detach().cpu().clone(), "mask_token_id": int(mask_token_id)}
    with atomic_path(path) as temporary, open(temporary, "wb") as handle:
        torch.save(state, handle)


def read_mask(spec: DFlashSpec, folder: Path) -> Tensor | None:
    """Read the learned mask vector of a checkpoint folder, from whichever of the two files is there.

    Args:
        spec: what config.json says; its `learned_mask` is a promise that must be kept.
        folder: the checkpoint.

    Returns:
        [H] as stored; None where the folder has none.

    Raises:
        InputError: a promised file is missing, both are there, or one is not what it should be.
    """
    ours, engines = folder / MASK, folder / ENGINE_MASK
    if engines.exists():
        if ours.exists():
            raise InputError(
                f"the learned mask vector is there twice ({MASK} and {ENGINE_MASK})",
                where=str(folder),
                fix="Keep the one that belongs to the weights.",
            )
        return _read_engine_mask(engines, spec)
    if not spec.learned_mask:
        if ours.exists():
            raise InputError(
                f"the folder holds a learned mask vector ({MASK}) that config.json does not promise",
                where=str(folder),
                fix=AGAIN,
            )
        return None
    if not ours.is_file():
        raise InputError(
            f"config.json promises a learned mask vector, but {MASK} is missing", where=str(folder), fix=AGAIN
        )
    stored = header(ours)
    if list(stored) != [VECTOR]:
        raise InputError(
            f"the file must hold one tensor, {VECTOR}, and holds {sorted(stored)}", where=str(ours), fix=AGAIN
        )
    _check_shape(stored[VECTOR].shape, spec, ours)
    check_kind(VECTOR, stored[VECTOR], folder)
    return read_tensors(ours)[VECTOR]


def _read_engine_mask(file: Path, spec: DFlashSpec) -> Tensor:
    """Read `mask_embedding.pt`, as tensors and numbers only: what else a pickle may do is refused by torch."""

    def refuse(what: str, fix: str = "Use the file that was published with the weights.") -> InputError:
        return InputError(what, where=str(file), fix=fix)

    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise refuse(f"the learned mask vector cannot be read ({type(error).__name__})", AGAIN) from error
    except (pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise refuse("the file is broken or holds more than tensors and numbers, which could run code") from error
    if not isinstance(state, dict) or not isinstance(state.get("embedding"), Tensor):
        raise refuse("the file holds no object with a tensor `embedding`")
    if state.get("per_position"):
        raise refuse("it holds a vector for each position, which is not read yet")
    named = state.get("mask_token_id", spec.mask_token_id)
    if type(named) is not int or named != spec.mask_token_id:
        raise refuse(f"mask_token_id is {named} in {file.name} and {spec.mask_token_id} in config.json")
    vector = state["embedding"]
    if vector.dtype not in _KINDS:
        raise refuse(f"the learned mask vector is stored as {vector.dtype}, and quantised weights are not read")
    vector = vector.reshape(-1) if vector.numel() == spec.hidden_size else vector
    _check_shape(tuple(vector.shape), spec, file)
    if not bool(torch.isfinite(vector).all()):
        raise refuse("the learned mask vector holds NaN or infinity", "Use an earlier checkpoint.")
    return vector


def _check_shape(shape: tuple[int, ...], spec: DFlashSpec, file: Path) -> None:
    if shape != (spec.hidden_size,):
        raise InputError(
            f"the learned mask vector has shape {list(shape)}, config.json promises [{spec.hidden_size}]",
            where=str(file),
            fix=COMPLETE,
        )
