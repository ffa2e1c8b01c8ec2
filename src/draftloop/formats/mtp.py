"""MTP modules on disk: those that targets bring along in their own checkpoints, and ours, which have the same names.

A folder of ours holds the target's config.json with a section `draftloop`, and the module's tensors by the names that
engines read from the target's checkpoint; so the one weight file serves both. Everything is read with suspicion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftloop.core.errors import InputError
from draftloop.core.version import VERSION
from draftloop.drafter.host import text_part
from draftloop.drafter.mtp import MTP, MTPSpec
from draftloop.formats.facts import Facts
from draftloop.formats.mtp_names import (
    BORROWED,
    SCHEMES,
    Scheme,
    belongs,
    in_file,
    modules,
    own_names,
    published,
    scheme_of,
)
from draftloop.formats.tensors import AGAIN, COMPLETE, Stored, check_copy, check_kind, finite, header

SCHEMA = 1
NATIVE = "native"  # says so where a drafter folder is asked for
DEFAULT_BLOCK = 4  # of a native head, which knows of no block
_MEND = "Save or copy the whole folder again."
_NEW = "Train a new module (drafter.family: mtp, without drafter.init)."


def claims(config: dict[str, Any]) -> bool:
    """Whether a config.json is of an MTP module that we saved."""
    ours = config.get("draftloop")
    return isinstance(ours, dict) and ours.get("family") == "mtp"


def claims_native(config: dict[str, Any]) -> bool:
    """Whether a config.json is of a target whose class may bring its own head along."""
    text = config.get("text_config")
    given = (config.get("model_type"), text.get("model_type") if isinstance(text, dict) else None)
    kinds = {kind for kind in given if isinstance(kind, str)}  # a broken file may hold anything
    return "draftloop" not in config and bool(kinds & set(SCHEMES))


def config_of(spec: MTPSpec, facts: Facts) -> dict[str, Any]:
    """The config.json of a module; as `zlab_config.config_of`."""
    ours: dict[str, Any] = {
        "schema": SCHEMA,
        "version": VERSION,
        "family": spec.family,
        "block_size": spec.block_size,
        "vocab_size": spec.vocab_size,
        "feeds": spec.feeds,
        "blank_first": spec.blank_first,
        "made_for": spec.made_for,
        "weights_sha256": facts.weights,
    }
    if facts.extra is not None:
        ours["extra"] = facts.extra
    return {**spec.target_config, "dtype": facts.kind, "draftloop": ours}


def spec_of(config: dict[str, Any], where: Path, *, num_target_layers: int | None = None) -> MTPSpec:
    """The spec that a config.json of ours, or of a target with its own head, describes.

    Raises:
        InputError: it describes none.
    """
    ours = config.get("draftloop", {})
    if ours.get("schema", SCHEMA) != SCHEMA:
        raise InputError(
            f"the key draftloop has schema {ours['schema']}, this version reads {SCHEMA}",
            where=str(where),
            fix="Update draftloop.",
        )
    told = {key: value for key, value in config.items() if key not in ("draftloop", "dtype")}
    try:
        text = text_part(told)
        heads = int(text.num_attention_heads)
        rope = getattr(text, "rope_parameters", None) or {}
        return MTPSpec(
            hidden_size=int(text.hidden_size),
            layers=1,
            heads=heads,
            kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            intermediate_size=int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size),
            vocab_size=int(ours.get("vocab_size") or text.vocab_size),
            num_target_layers=int(text.num_hidden_layers),
            target_layers=(int(text.num_hidden_layers),),
            block_size=int(ours.get("block_size") or DEFAULT_BLOCK),
            rope_theta=float(rope.get("rope_theta") or 10000.0),
            norm_eps=float(getattr(text, "rms_norm_eps", None) or 1e-6),
            max_positions=int(getattr(text, "max_position_embeddings", None) or 2048),
            made_for=dict(ours.get("made_for") or {}),
            target_config=told,
            feeds="raw" if ours.get("feeds") == "raw" else "normed",
            blank_first=ours.get("blank_first") is True,
        )
    except InputError as error:
        raise InputError(error.what, where=str(where), fix=error.fix) from error
    except Exception as error:  # a configuration class of transformers, with whatever stands in the file
        raise InputError(
            f"the file describes no model whose layer can be made ({type(error).__name__}: {error})",
            where=str(where),
            fix=_MEND,
        ) from error


def _scheme(spec: MTPSpec) -> Scheme:
    return scheme_of(spec.kind)


def _state(spec: MTPSpec) -> dict[str, Tensor]:
    with torch.device("meta"):
        return MTP(spec).state_dict()


def tensors_of(drafter: MTP, dtype: torch.dtype, where: Path) -> tuple[dict[str, Tensor], None]:
    """What a checkpoint of this module stores, on the CPU in `dtype`, by the names that engines read.

    Raises:
        InputError: a tensor holds NaN or infinity in `dtype`.
    """
    spec = drafter.spec
    named = published(drafter.state_dict(), _scheme(spec), spec.num_target_layers)
    tensors = {in_file(name): tensor.detach().to("cpu", dtype).contiguous() for name, tensor in named.items()}
    return finite(tensors, where), None


def read_module(files: list[Path], spec: MTPSpec, folder: Path, target: Any = None) -> dict[str, Tensor]:
    """Read a module's tensors out of its own file or out of the target's many, and nothing else of theirs.

    Copies of the target's embedding and readout (DeepSeek's layer has them) must be the target's own, and are dropped.

    Raises:
        InputError: there is no module, or several (one for each depth), or a tensor is missing, unexpected, stored
            twice, of another shape, quantised, or not finite.
    """
    layers = spec.num_target_layers
    place: dict[str, Path] = {}
    stored: dict[str, Stored] = {}
    for file in files:
        for name, entry in header(file).items():
            bare = name.removeprefix("language_model.")
            if not belongs(bare, layers) or bare.endswith("rotary_emb.inv_freq"):
                continue
            if bare in stored:
                raise InputError(f"tensor {name} is stored twice", where=str(file), fix=AGAIN)
            stored[bare], place[bare] = entry, file
    if not stored:
        raise InputError(
            "the checkpoint holds no multi-token-prediction tensors",
            where=str(folder),
            fix=_NEW,
        )
    depth = modules(stored, layers)
    if depth > 1:
        raise InputError(
            f"the target has {depth} MTP modules, one for each depth, and only a single one can be run",
            where=str(folder),
            fix=_NEW,
        )
    scheme: Scheme = "mtp" if any(name.startswith("mtp.") for name in stored) else "nextn"
    borrowed = [name for name in stored if any(name == f"layers.{layers}.{one}" for one in BORROWED)]
    wanted = _state(spec)
    fused = any(name.endswith("experts.gate_up_proj") for name in stored)
    expected = published(wanted, scheme, layers, fused=fused)
    _check({name: entry for name, entry in stored.items() if name not in borrowed}, expected, folder)
    tensors = _read(place)
    for name in borrowed:
        copy, kind = tensors.pop(name), BORROWED[name.removeprefix(f"layers.{layers}.")]
        if target is not None:
            check_copy(f"{kind}.weight", copy, target, folder)
    return own_names(tensors, wanted, scheme, layers)


def _check(stored: Mapping[str, Stored], expected: Mapping[str, Tensor], folder: Path) -> None:
    """Demand exactly the expected names and shapes, in a floating-point type."""

    def refuse(what: str) -> None:
        raise InputError(what, where=str(folder), fix=COMPLETE)

    missing, unexpected = sorted(set(expected) - set(stored)), sorted(set(stored) - set(expected))
    for name, entry in stored.items():
        check_kind(name, entry, folder)
    if missing:
        refuse(f"tensor {missing[0]} is missing" + (f", and {len(missing) - 1} more" if missing[1:] else ""))
    if unexpected:
        more = f" (and {len(unexpected) - 1} more)" if unexpected[1:] else ""
        refuse(f"tensor {unexpected[0]}{more} is no part of an MTP module with a layer of this target's class")
    for name, tensor in expected.items():
        if stored[name].shape != tuple(tensor.shape):
            refuse(f"tensor {name} has shape {list(stored[name].shape)}, config.json promises {list(tensor.shape)}")


def _read(place: Mapping[str, Path]) -> dict[str, Tensor]:
    """These tensors (no leading `model.`), each out of its file."""
    out: dict[str, Tensor] = {}
    for file in sorted(set(place.values())):
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 - not a dictionary
                    bare = name.removeprefix("model.").removeprefix("language_model.")
                    if place.get(bare) == file:
                        out[bare] = handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"the weight file cannot be read ({error})", where=str(file), fix=AGAIN) from error
    for name, tensor in out.items():
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(
                f"tensor {name} holds NaN or infinity", where=str(place[name]), fix="Use another checkpoint."
            )
    return out


def settled(spec: MTPSpec, target: Any, block_size: int | None) -> MTPSpec:
    """A native head's spec with what its checkpoint does not say.

    Raises:
        InputError: there is no target, to which most of the folder belongs.
    """
    if target is None:
        raise InputError(
            "this is a target's checkpoint, and its own head is loaded together with it",
            where="drafter",
            fix="Name the drafter's folder, or load the target as well.",
        )
    made_for = {"target": target.name, "target_fingerprint": target.fingerprint}
    return replace(spec, block_size=block_size or spec.block_size, made_for=made_for)


def native_folder(target: Any) -> Path:
    """Where the target's own checkpoint lies.

    Raises:
        InputError: it came from no folder, or its class brings no head along that we know.
    """
    if target.config.model_type not in SCHEMES:
        raise InputError(
            f"no checkpoint of a {target.config.model_type} is known to bring a multi-token-prediction head along",
            where=target.name,
            fix=_NEW,
        )
    name = str(getattr(target.model.config, "_name_or_path", "") or getattr(target.model, "name_or_path", ""))
    folder = Path(name)
    if name and not folder.is_dir():
        from transformers.utils import cached_file

        try:
            folder = Path(str(cached_file(name, "config.json"))).parent
        except Exception as error:
            raise InputError(
                f"the target's own checkpoint cannot be found ({error})", where=target.name, fix="Name its folder."
            ) from error
    if not name:
        raise InputError(
            "the target was made in memory, so there is no checkpoint with a head of its own",
            where=target.name,
            fix="Load it from a folder.",
        )
    return folder
