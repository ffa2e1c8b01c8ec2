"""A target's folder with a multi-token-prediction head of ours in it, which is where engines look for one.

The folder is made of links to the target's own files. Only what must change is written anew: config.json and the
weights' index, and a weight file that holds an earlier head, without that head. No weight of the target is touched.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from draftloop.core.errors import InputError
from draftloop.core.files import write_json, writing_fault
from draftloop.core.weights import read_tensors, write_tensors
from draftloop.drafter.mtp import MTPSpec
from draftloop.formats.mtp_names import belongs, depth_key
from draftloop.formats.tensors import AGAIN
from draftloop.formats.zlab import CONFIG, WEIGHTS
from draftloop.formats.zlab_config import read_config

HEAD = "mtp.safetensors"
INDEX = "model.safetensors.index.json"


def target_with_head(target: Path, head: Path, spec: MTPSpec, place: Path) -> Path:
    """Make, or make again, a folder that an engine serves with speculative method `mtp`.

    Args:
        target: the target's checkpoint folder, in safetensors.
        head: the drafter's folder, as `save_drafter` or `export` wrote it.
        spec: of that drafter.
        place: the folder to make; one that this made earlier is replaced.

    Returns:
        `place`, absolute.

    Raises:
        InputError: the target has no safetensors, or something else is at `place`.
        EnvironmentFault: it cannot be written.
    """
    shards = sorted(target.glob("*.safetensors"))
    if not shards:
        raise InputError("the target's folder holds no safetensors to put a head beside", where=str(target))
    place = place.resolve()
    if place.exists() and not (place / HEAD).is_symlink():
        raise InputError("the folder holds something else", where=str(place), fix="Name another --out.")
    try:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        where: dict[str, str] = {}
        for shard in shards:
            told = _names(shard)
            names = [name for name in told if not _of_head(name, spec)]
            if len(names) == len(told):
                _link(shard, place / shard.name)
            elif names:
                kept = read_tensors(shard)
                write_tensors(place / shard.name, {name: kept[name] for name in names})
            where |= dict.fromkeys(names, shard.name)
        where |= dict.fromkeys(_names(head / WEIGHTS), HEAD)
        _link(head / WEIGHTS, place / HEAD)
        write_json(place / INDEX, {"metadata": {}, "weight_map": where})
        write_json(place / CONFIG, _promising(read_config(target / CONFIG), spec))
        for file in target.iterdir():
            if file.is_file() and file.suffix != ".safetensors" and not (place / file.name).exists():
                _link(file, place / file.name)
    except OSError as error:
        raise writing_fault(error, place) from error
    return place


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as handle:
            return list(handle.keys())
    except SafetensorError as error:
        raise InputError(f"the weight file cannot be read ({error})", where=str(file), fix=AGAIN) from error


def _of_head(name: str, spec: MTPSpec) -> bool:
    bare = name.removeprefix("model.").removeprefix("language_model.")
    return belongs(bare, spec.num_target_layers)


def _promising(config: dict[str, Any], spec: MTPSpec) -> dict[str, Any]:
    """The target's config.json, which says that there is one head."""
    config = json.loads(json.dumps(config))
    text = config.get("text_config")
    (text if isinstance(text, dict) else config)[depth_key(spec.kind)] = 1
    return config


def _link(file: Path, to: Path) -> None:
    os.symlink(file.resolve(), to)
