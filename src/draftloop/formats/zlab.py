"""DFlash checkpoints in z-lab's form, which z-lab's own class, vLLM and SGLang load: config.json + model.safetensors.

The published form has no tensor for a learned mask vector, so one lies beside them in mask_embedding.safetensors.
Engines do not use that: they look for `mask_embedding.pt`, a pickle, which is neither written nor read here.

Knows the published tensor names, and how to put a folder on disk so that nobody ever reads half of one. Knows no hub
and no engine, and does not read other forms (speculators, EAGLE-3, DFlash 2, causal or sliding blocks): they are
refused by name. The target is met only through its public attributes.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import warnings
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftloop.core.errors import EnvironmentFault, InputError
from draftloop.core.files import sha256_file, write_json, writing_fault
from draftloop.core.weights import check_folder, read_tensors, write_tensors
from draftloop.drafter.dflash import DFlash
from draftloop.drafter.spec import DrafterSpec, check_fits
from draftloop.formats.zlab_config import check_form, config_of, read_config, spec_of

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
MASK = "mask_embedding.safetensors"
_VECTOR = "mask_embedding"  # the one tensor in MASK, and the drafter's name for it
_WEIGHTS_OF_OTHERS = ("*.safetensors", "pytorch_model*.bin", "mask_embedding.pt")  # engines would read them too
_FLOATS = {"F64", "F32", "F16", "BF16"}
_COMPLETE = "Use a complete checkpoint, or mend config.json if it belongs to another one."
_AGAIN = "Save or copy the whole folder again."


def published_shapes(spec: DrafterSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of a published DFlash checkpoint and its shape; matrices are [out, in].

    Embedding and readout are the target's and are not stored: engines share them, and a stray copy ruins acceptance.
    """
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (spec.head_dim,),
        "self_attn.k_norm": (spec.head_dim,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, len(spec.target_layers) * hidden)}
    shapes |= {f"{name}.weight": (hidden,) for name in ("hidden_norm", "norm")}
    return shapes | {f"layers.{i}.{name}.weight": shape for i in range(spec.layers) for name, shape in layer.items()}


def save_drafter(
    drafter: DFlash, folder: Path, *, dtype: torch.dtype = torch.bfloat16, extra: dict[str, Any] | None = None
) -> Path:
    """Write a drafter as a checkpoint folder; the same drafter gives the same bytes.

    A new folder appears in one piece. In an existing one, which must be empty of other models, first the weights and
    then config.json are replaced, each in one piece; config.json holds the weights' SHA-256, so that a mixture (a kill
    between the two) is refused by `load_drafter` and never drafted with.

    A learned mask vector goes into a file of its own, for engines refuse tensors that are not in the published table.
    vLLM and SGLang read such a vector only from `mask_embedding.pt` ({"embedding", "mask_token_id"}), a pickle, which
    is not written. Without it they pass over our file in silence and draft with the stand-in token's embedding: output
    stays exact, fewer tokens are accepted.

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
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in drafter.state_dict().items()}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(
                f"tensor {name} of the drafter holds NaN or infinity, so it is not saved",
                where=str(folder),
                fix="Go back to an earlier checkpoint and lower the learning rate.",
            )
    vector = tensors.pop(_VECTOR, None)
    _check_published({name: _Stored(tuple(t.shape), "F32") for name, t in tensors.items()}, drafter.spec, Path(folder))
    place = Path(folder).expanduser().resolve()
    stage: Path | None = None
    try:
        _check_place(place)
        fresh = not place.exists()
        place.parent.mkdir(parents=True, exist_ok=True)
        # beside a new folder, but inside an old one: its parent may be another file system, or not ours to write
        stage = Path(tempfile.mkdtemp(dir=place.parent if fresh else place, prefix=f".{place.name}.", suffix=".part"))
        write_tensors(stage / WEIGHTS, tensors)
        weights, mask = sha256_file(stage / WEIGHTS), None
        if vector is not None:
            write_tensors(stage / MASK, {_VECTOR: vector})
            mask = sha256_file(stage / MASK)
        write_json(stage / CONFIG, config_of(drafter.spec, dtype, weights=weights, mask=mask, extra=extra))
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


def load_drafter(path: str | os.PathLike[str], target: Any = None, *, dtype: torch.dtype | None = None) -> DFlash:
    """Read a drafter from a checkpoint folder, ours or a published one.

    Names may carry a `model.` prefix, and the weights may be split over several files. A copy of the target's embedding
    or readout (`embed_tokens.weight`, `lm_head.weight`) is accepted only beside a target, when it is equal to the
    target's own, and then dropped; any other would be silently replaced by the target's.

    Args:
        path: the folder.
        target: a `Target` to check against, move to and bind to; None leaves the drafter unbound on the CPU.
        dtype: of the weights; None = as stored (train in float32; `for_decoding` gives the target's).

    Returns:
        the drafter, trainable. Its `spec.made_for` is what the file says.

    Warns:
        UserWarning: the target is not the very one that the drafter was trained for. Only a warning, since drafting for
        a fine-tuned target is lossless, and often the point.

    Raises:
        InputError: not a whole, finite, plain DFlash checkpoint, or one made for a target of another shape.
    """
    folder = Path(path).expanduser()
    try:
        check_folder(folder)
    except OSError as error:
        raise InputError(
            f"it cannot be read ({error.strerror})", where=str(folder), fix="Check its permissions."
        ) from error
    config = read_config(folder / CONFIG)
    spec = spec_of(config, folder / CONFIG, num_target_layers=None if target is None else target.num_layers)
    if target is not None:
        check_fits(spec, target, str(folder))
    if (folder / "mask_embedding.pt").exists():
        raise InputError(
            "the drafter has a learned mask vector in mask_embedding.pt, a pickle, which is not read",
            where=str(folder),
            fix=f"Use a drafter whose mask is a token of the vocabulary, or one saved here, with {MASK}.",
        )
    _check_mask(spec, folder)
    files = [file for file in sorted(folder.glob("*.safetensors")) if file.name != MASK]
    stored: dict[str, _Stored] = {}
    for file in files:
        for name, entry in _header(file).items():
            if name in stored:
                raise InputError(f"tensor {name} is stored twice", where=str(file), fix=_AGAIN)
            stored[name] = entry
    borrowed = {name: stored.pop(name) for name in _BORROWED if name in stored}
    _check_published(stored, spec, folder)
    for name, entry in borrowed.items():
        _check_kind(name, entry, folder)
        if target is None:
            raise InputError(
                f"the checkpoint holds {name}, a tensor of its target's",
                where=str(folder),
                fix="Load it together with its target, so that the two can be compared.",
            )
    tensors = {_bare(name): tensor for file in files for name, tensor in read_tensors(file).items()}
    for name in borrowed:
        _check_copy(name, tensors.pop(name), target, folder)
    if spec.learned_mask:
        tensors |= read_tensors(folder / MASK)
    _check_pair(config, folder)
    kind = dtype or reduce(torch.promote_types, [tensor.dtype for tensor in tensors.values()])
    with torch.device("meta"):  # shapes only: nothing is initialised to be thrown away
        drafter = DFlash(spec)
    # copied off the file, which is mapped: were it cut short later, touching a weight would kill the process
    drafter.load_state_dict({name: tensor.to(kind, copy=True) for name, tensor in tensors.items()}, assign=True)
    if target is None:
        return drafter
    known = spec.made_for.get("target_fingerprint")
    if known is not None and known != target.fingerprint:
        warnings.warn(
            f"{folder}: the drafter was made for {spec.made_for.get('target')} ({known}), the target is {target.name} "
            f"({target.fingerprint}); output stays exact, but fewer tokens may be accepted",
            stacklevel=2,
        )
    return drafter.to(target.device).bind(target.embed, target.readout)


class _Stored(NamedTuple):
    """A tensor as a file's header describes it."""

    shape: tuple[int, ...]
    kind: str


_BORROWED = ("embed_tokens.weight", "lm_head.weight")
_FOREIGN = {
    "d2t": "a reduced vocabulary",
    "t2d": "a reduced vocabulary",
    "mask_hidden": "a learned mask vector in another form",
    "mask_embedding": "a learned mask vector in another form",
}


def _bare(name: str) -> str:
    return name.removeprefix("model.")


def _header(file: Path) -> dict[str, _Stored]:
    """Names, shapes and kinds in one file, without reading a tensor."""
    try:
        with safe_open(file, framework="pt") as handle:
            parts = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 - not a dictionary
            entries = {name: _Stored(tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
    except (SafetensorError, OSError) as error:
        raise InputError(f"the weight file cannot be read ({error})", where=str(file), fix=_AGAIN) from error
    if len({_bare(name) for name in entries}) < len(entries):
        raise InputError("a tensor is stored twice, with and without the prefix model.", where=str(file), fix=_AGAIN)
    return {_bare(name): entry for name, entry in entries.items()}


def _check_published(stored: dict[str, _Stored], spec: DrafterSpec, folder: Path) -> None:
    """Exactly the published names, with the shapes that config.json promises, in a floating-point type."""

    def refuse(what: str, fix: str = _COMPLETE) -> None:
        raise InputError(what, where=str(folder), fix=fix)

    for name in stored:
        for sign, meaning in _FOREIGN.items():
            if sign in name.split("."):
                refuse(f"tensor {name} belongs to {meaning}, which is not read yet", "Use a plain DFlash checkpoint.")
    depth = len({name.split(".")[1] for name in stored if name.startswith("layers.")})
    if depth != spec.layers:  # also keeps an absurd num_hidden_layers from being laid out below
        refuse(f"the weights hold {depth} layers, config.json promises {spec.layers}")
    shapes = published_shapes(spec)
    missing, unexpected = sorted(set(shapes) - set(stored)), sorted(set(stored) - set(shapes))
    if missing:
        refuse(f"tensor {missing[0]} is missing" + (f", and {len(missing) - 1} more" if missing[1:] else ""))
    if unexpected:
        more = f" (and {len(unexpected) - 1} more)" if unexpected[1:] else ""
        refuse(f"tensor {unexpected[0]}{more} is no part of a DFlash drafter", "Use a plain DFlash checkpoint.")
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            refuse(f"tensor {name} has shape {list(stored[name].shape)}, config.json promises {list(shape)}")
        _check_kind(name, stored[name], folder)


def _check_kind(name: str, entry: _Stored, folder: Path) -> None:
    if entry.kind not in _FLOATS:
        raise InputError(
            f"tensor {name} is stored as {entry.kind}, and quantised weights are not read",
            where=str(folder),
            fix="Use the bfloat16 checkpoint.",
        )


def _check_mask(spec: DrafterSpec, folder: Path) -> None:
    """The learned mask vector's file is there exactly where config.json promises one, and holds it alone."""
    file = folder / MASK
    if not spec.learned_mask:
        if file.exists():
            raise InputError(
                f"the folder holds a learned mask vector ({MASK}) that config.json does not promise",
                where=str(folder),
                fix=_AGAIN,
            )
        return
    if not file.is_file():
        raise InputError(
            f"config.json promises a learned mask vector, but {MASK} is missing", where=str(folder), fix=_AGAIN
        )
    stored = _header(file)
    if list(stored) != [_VECTOR]:
        raise InputError(
            f"the file must hold one tensor, {_VECTOR}, and holds {sorted(stored)}", where=str(file), fix=_AGAIN
        )
    if stored[_VECTOR].shape != (spec.hidden_size,):
        raise InputError(
            f"the learned mask vector has shape {list(stored[_VECTOR].shape)}, config.json promises"
            f" [{spec.hidden_size}]",
            where=str(file),
            fix=_COMPLETE,
        )
    _check_kind(_VECTOR, stored[_VECTOR], folder)


def _check_pair(config: dict[str, Any], folder: Path) -> None:
    """Refuse weights that config.json was not saved with: their shapes may agree, what they mean does not."""
    for name, key, what in ((WEIGHTS, "weights_sha256", "weights"), (MASK, "mask_sha256", "the learned mask vector")):
        promised = (config.get("draftloop") or {}).get(key)
        if promised is not None and (not (folder / name).is_file() or sha256_file(folder / name) != promised):
            raise InputError(
                f"{what} and config.json come from two different saves",
                where=str(folder),
                fix=f"{_AGAIN} If you changed the file on purpose, remove draftloop.{key} from config.json.",
            )


def _check_copy(name: str, copy: Tensor, target: Any, folder: Path) -> None:
    """Demand that a stored embedding or readout is the target's own, for the target's is what we use."""
    own = target.readout.weight if name.startswith("lm_head") else target.model.get_input_embeddings().weight
    if copy.shape != own.shape or not torch.equal(copy.to(own.device, own.dtype), own):
        raise InputError(
            f"tensor {name} is not the target's own, and we draft with the target's",
            where=str(folder),
            fix="Use the target it was trained for, or a checkpoint without that tensor.",
        )


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
        try:
            check_form(read_config(place / CONFIG), place / CONFIG)
        except InputError as error:
            raise InputError(
                "the folder holds another model, which is not overwritten", where=str(place), fix=fix
            ) from error
    elif (place / WEIGHTS).exists() or (place / MASK).exists():
        raise InputError(
            "the folder holds weights without a config.json, which are not overwritten", where=str(place), fix=fix
        )
