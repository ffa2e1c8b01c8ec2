"""The tensors of an EAGLE-3 checkpoint: their published names and shapes, and reading them with suspicion.

`d2t` holds how far each of the readout's rows lies below its id in the target's vocabulary, `t2d` marks those ids; ours
is `support`, the ids. Knows no config.json; the target is met through its public attributes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from draftloop.core.errors import InputError
from draftloop.core.weights import read_tensors
from draftloop.drafter.eagle3 import Eagle3, Eagle3Spec
from draftloop.formats.tensors import AGAIN, COMPLETE, Stored, bare, check_copy, check_kind, finite, header

OLD = ("midlayer.", "layers.0.")  # the name that every engine reads, and speculators', which is ours
_MAPS = {"d2t": "I64", "t2d": "BOOL"}
_FOREIGN = {
    "mask_hidden": "parallel drafting (P-EAGLE)",
    "input_norm.weight": "a norm before its projection of features",
    "fc_norm.0.weight": "norms before its projection of features",
}


def shapes_of(spec: Eagle3Spec) -> dict[str, tuple[int, ...]]:
    """Every floating-point tensor of a checkpoint and its shape; matrices are [out, in]."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "hidden_norm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, 2 * hidden),
        "self_attn.k_proj": (keys, 2 * hidden),
        "self_attn.v_proj": (keys, 2 * hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {f"layers.0.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"fc.weight": (hidden, len(spec.target_layers) * hidden), "norm.weight": (hidden,)}
    return shapes if spec.draft_vocab is None else {**shapes, "lm_head.weight": (spec.draft_vocab, hidden)}


def tensors_of(drafter: Eagle3, dtype: torch.dtype, where: Path) -> tuple[dict[str, Tensor], None]:
    """What a checkpoint of this drafter stores, on the CPU, floats in `dtype`; as `tensors.tensors_of`.

    Raises:
        InputError: a tensor holds NaN or infinity in `dtype`.
    """
    state = drafter.state_dict()
    support = state.pop("support", None)
    tensors = finite({name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in state.items()}, where)
    if support is not None:
        ids = support.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(drafter.spec.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return tensors, None


def read_published(files: list[Path], spec: Eagle3Spec, folder: Path, target: Any = None) -> dict[str, Tensor]:
    """Read a checkpoint's tensors, checked to be exactly those that the spec means; `support` in the place of the maps.

    Names may carry a `model.` prefix, and the layer either of its names. A copy of the target's embedding, or of its
    readout where it is borrowed, is accepted only beside a target, when it is equal to the target's own.

    Raises:
        InputError: a tensor is missing, unexpected, stored twice, of another shape, quantised, or not finite; or the
            maps are not those of a reduced vocabulary.
    """
    stored: dict[str, Stored] = {}
    for file in files:
        for name, entry in header(file).items():
            if _ours(name) in stored:
                _refuse(f"tensor {name} is stored twice", file, AGAIN)
            stored[_ours(name)] = entry
    for name, meaning in _FOREIGN.items():
        if name in stored:
            _refuse(f"tensor {name} belongs to {meaning}, which is not read yet", folder, "Use a plain one.")
    shapes = shapes_of(spec)
    copies = {n for n in ("embed_tokens.weight", "lm_head.weight") if n in stored and n not in shapes}
    maps = {"d2t", "t2d"} & set(stored)
    if spec.reduced and "d2t" not in stored:
        _refuse("tensor d2t is missing, which says what tokens its readout's rows are", folder)
    missing, unexpected = sorted(set(shapes) - set(stored)), sorted(set(stored) - set(shapes) - copies - maps)
    if missing:
        _refuse(f"tensor {missing[0]} is missing" + (f", and {len(missing) - 1} more" if missing[1:] else ""), folder)
    if unexpected:
        _refuse(f"tensor {unexpected[0]} is no part of an EAGLE-3 drafter", folder, "Use a plain one.")
    for name in (*shapes, *sorted(copies)):
        if name in shapes and stored[name].shape != shapes[name]:
            what = f"tensor {name} has shape {list(stored[name].shape)}"
            _refuse(f"{what}, config.json promises {list(shapes[name])}", folder)
        check_kind(name, stored[name], folder)
    if copies and target is None:
        _refuse(
            f"the checkpoint holds {min(copies)}, a tensor of its target's", folder,
            "Load it together with its target, so that the two can be compared.",
        )  # fmt: skip
    tensors = {_ours(bare(name)): tensor for file in files for name, tensor in read_tensors(file).items()}
    for name in copies:
        check_copy(name, tensors.pop(name), target, folder)
    found = {name: tensors.pop(name) for name in maps}
    if spec.reduced:
        tensors["support"] = _support(found, spec, folder)
    elif bool(found.get("d2t", torch.zeros(1)).any()):
        _refuse("d2t moves tokens of a whole vocabulary", folder)
    return tensors


def _support(maps: dict[str, Tensor], spec: Eagle3Spec, folder: Path) -> Tensor:
    """int64 [V_d], the target's ids of the readout's rows."""
    d2t = maps["d2t"]
    if d2t.dtype != torch.int64 or d2t.shape != (spec.draft_vocab,):
        _refuse(f"d2t is {d2t.dtype} {list(d2t.shape)}, not one whole number for each of {spec.draft_vocab}", folder)
    ids = d2t + torch.arange(len(d2t))
    if not 0 <= int(ids.min()) <= int(ids.max()) < spec.vocab_size or len(ids.unique()) < len(ids):
        _refuse("d2t names tokens that the target does not have, or one twice", folder)
    t2d = maps.get("t2d")
    if t2d is not None and not torch.equal(t2d.bool().nonzero().flatten(), ids.sort().values):
        _refuse("d2t and t2d name different tokens", folder)
    return ids


def _ours(name: str) -> str:
    return OLD[1] + name.removeprefix(OLD[0]) if name.startswith(OLD[0]) else name


def _refuse(what: str, where: Path, fix: str = COMPLETE) -> NoReturn:
    raise InputError(what, where=str(where), fix=fix)
