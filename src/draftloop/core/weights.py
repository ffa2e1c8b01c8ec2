"""Reading weight files with suspicion: safetensors only, complete, finite.

Knows no model class.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftloop.core.errors import InputError
from draftloop.core.files import atomic_path

PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_PICKLED = (
    b"\x80\x02",
    b"\x80\x03",
    b"\x80\x04",
    b"\x80\x05",
    b"PK\x03\x04",
)  # protocols 2 to 5; zip, torch's wrapping
_LONGEST_HEADER = 100_000_000  # bytes; what the format allows
_AGAIN = "Copy or download it again."
_CONVERT = "Convert it to safetensors (model.save_pretrained does) and use that."


def check_safetensors(path: Path) -> None:
    """Compare a safetensors file's length with what its header promises; reads the header only.

    Raises:
        InputError: the file is missing, truncated, or no safetensors file at all (a pickle, say).
    """
    if not path.is_file():
        raise InputError(
            "there is no such weight file", where=str(path), fix="Name a folder that holds safetensors weights."
        )
    size = path.stat().st_size
    with open(path, "rb") as handle:
        head = handle.read(8)
        if len(head) < 8:
            raise InputError("the weight file is truncated", where=str(path), fix=_AGAIN)
        (length,) = struct.unpack("<Q", head)
        if length > min(size - 8, _LONGEST_HEADER):
            # asked only here, for a header of 640 bytes starts with 80 02 too
            if head.startswith(_PICKLED):
                raise InputError("this is a pickle, which can run code when it is read", where=str(path), fix=_CONVERT)
            raise InputError("the weight file is truncated or no safetensors file", where=str(path), fix=_AGAIN)
        try:
            header = json.loads(handle.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            promised = 8 + length + max(ends, default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise InputError("the header of the weight file is broken", where=str(path), fix=_AGAIN) from error
    if size != promised:
        raise InputError(
            f"the weight file has {size} bytes where its header promises {promised}", where=str(path), fix=_AGAIN
        )


def check_folder(folder: Path) -> None:
    """Check every safetensors file of a checkpoint folder; refuse one that only has pickles.

    Raises:
        InputError: no folder, no config.json, no safetensors, or a broken one.
    """
    if not folder.is_dir():
        raise InputError("there is no such folder", where=str(folder), fix="Check the spelling of the path.")
    if not (folder / "config.json").is_file():
        raise InputError(
            "the folder has no config.json", where=str(folder), fix="Name a Hugging Face checkpoint folder."
        )
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = [p.name for pattern in PICKLES for p in folder.glob(pattern)]
        if pickles:
            raise InputError(f"the folder holds only pickled weights ({pickles[0]})", where=str(folder), fix=_CONVERT)
        raise InputError(
            "the folder holds no safetensors weights", where=str(folder), fix="Name a complete checkpoint."
        )
    for file in files:
        check_safetensors(file)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of one safetensors file, on the CPU, checked to be complete and finite.

    Raises:
        InputError: as `check_safetensors`, or a tensor holds NaN or infinity (named).
    """
    check_safetensors(path)
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"the weight file cannot be read ({error})", where=str(path), fix=_AGAIN) from error
    for name, tensor in tensors.items():
        wide = tensor if tensor.element_size() > 1 else tensor.float()  # isfinite knows no 8-bit floats
        if tensor.is_floating_point() and not bool(torch.isfinite(wide).all()):
            raise InputError(f"tensor {name} holds NaN or infinity", where=str(path), fix="Use an earlier checkpoint.")
    return tensors


def tensors_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """16 hex digits of names, types, shapes and every bit of the values, in whatever order they come."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors to one safetensors file in one piece (atomic).

    Raises:
        EnvironmentFault: the disk is full or the folder cannot be written.
    """
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_path(path) as temporary:
        try:
            save_file(ready, temporary, metadata={"format": "pt", **(metadata or {})})
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))  # a full disk arrives as text
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
