"""The tensors of DFlash and DFlash 2 checkpoints: their published names and shapes, and reading them with suspicion.

z-lab's form and speculators' share them. Knows no config.json; the target is met through its public attributes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftloop.core.errors import InputError
from draftloop.core.weights import read_tensors
from draftloop.drafter.dflash import DFlash
from draftloop.drafter.dflash2 import DFlash2Spec
from draftloop.drafter.dspark import DSparkSpec
from draftloop.drafter.families import FAMILIES
from draftloop.drafter.spec import DFlashSpec

AGAIN = "Save or copy the whole folder again."
COMPLETE = "Use a complete checkpoint, or mend config.json if it belongs to another one."
VECTOR = "mask_embedding"  # the drafter's name for its learned mask vector, which has no published name
_FLOATS = {"F64", "F32", "F16", "BF16"}
_BORROWED = ("embed_tokens.weight", "lm_head.weight")
_FOREIGN = {
    "d2t": "a reduced vocabulary",
    "t2d": "a reduced vocabulary",
    "mask_hidden": "a learned mask vector in another form",
    VECTOR: "a learned mask vector in another form",
}


class Stored(NamedTuple):
    """A tensor as a file's header describes it."""

    shape: tuple[int, ...]
    kind: str


def published_shapes(spec: DFlashSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of a published checkpoint and its shape; matrices are [out, in].

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
    shapes |= {f"layers.{i}.{name}.weight": shape for i in range(spec.layers) for name, shape in layer.items()}
    shapes |= _head_shapes(spec) if isinstance(spec, DSparkSpec) else {}
    return shapes | _beyond_dflash(spec) if isinstance(spec, DFlash2Spec) else shapes


def _beyond_dflash(spec: DFlash2Spec) -> dict[str, tuple[int, ...]]:
    """What DFlash 2 has besides: the codebooks' names end without `.weight`."""
    hidden, taps, codebook = spec.hidden_size, spec.conv_kernel_size, (spec.vocab_size, spec.selector_rank)
    conv = {
        "base_kernel": (2, taps, hidden),
        "kernel_projection.weight": (2 * taps * (hidden // spec.conv_group_size), hidden),
    }
    return {
        **{
            f"layers.{i}.{side}_conv.{name}": shape
            for i in range(spec.layers)
            for side in ("attention", "mlp")
            for name, shape in conv.items()
        },
        **{f"candidate_selector.{side}_codebook": codebook for side in ("predecessor", "successor")},
        "candidate_selector.hidden_projection.weight": (spec.selector_rank, hidden),
    }


def _head_shapes(spec: DSparkSpec) -> dict[str, tuple[int, ...]]:
    """What a DSpark checkpoint has besides."""
    hidden, rank = spec.hidden_size, spec.markov_rank
    shapes: dict[str, tuple[int, ...]] = {}
    if spec.markov != "none":
        shapes |= {f"markov_head.markov_{name}.weight": (spec.vocab_size, rank) for name in ("w1", "w2")}
    if spec.markov == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
    if spec.markov == "rnn":
        wide = hidden + 2 * rank
        shapes |= {"markov_head.joint_proj.weight": (3 * rank, wide), "markov_head.joint_proj.bias": (3 * rank,)}
    if spec.confidence:
        shapes |= {"confidence_head.proj.weight": (1, hidden + rank), "confidence_head.proj.bias": (1,)}
    return shapes


def tensors_of(drafter: DFlash, dtype: torch.dtype, where: Path) -> tuple[dict[str, Tensor], Tensor | None]:
    """What a checkpoint of this drafter stores, on the CPU in `dtype`.

    Args:
        drafter: bound or not, on any device.
        dtype: of the stored tensors.
        where: the folder, for errors.

    Returns:
        the published tensors by name, and the learned mask vector [H] where it has one.

    Raises:
        InputError: a tensor holds NaN or infinity in `dtype`.
    """
    state = drafter.state_dict().items()
    tensors = finite({name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in state}, where)
    vector = tensors.pop(VECTOR, None)
    check_published({name: Stored(tuple(t.shape), "F32") for name, t in tensors.items()}, drafter.spec, where)
    return tensors, vector


def finite(tensors: dict[str, Tensor], where: Path) -> dict[str, Tensor]:
    """The same, refused where one holds NaN or infinity."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(
                f"tensor {name} of the drafter holds NaN or infinity, so it is not saved",
                where=str(where),
                fix="Go back to an earlier checkpoint and lower the learning rate.",
            )
    return tensors


def read_published(files: list[Path], spec: DFlashSpec, folder: Path, target: Any = None) -> dict[str, Tensor]:
    """Read the published tensors out of weight files, checked to be exactly those that the spec means.

    Names may carry a `model.` prefix. A copy of the target's embedding or readout is accepted only beside a target,
    when it is equal to the target's own, and then dropped; any other would be silently replaced by the target's.

    Raises:
        InputError: a tensor is missing, unexpected, stored twice, of another shape, quantised, or not finite.
    """
    stored: dict[str, Stored] = {}
    for file in files:
        for name, entry in header(file).items():
            if name in stored:
                raise InputError(f"tensor {name} is stored twice", where=str(file), fix=AGAIN)
            stored[name] = entry
    borrowed = {name: stored.pop(name) for name in _BORROWED if name in stored}
    check_published(stored, spec, folder)
    for name, entry in borrowed.items():
        check_kind(name, entry, folder)
        if target is None:
            raise InputError(
                f"the checkpoint holds {name}, a tensor of its target's",
                where=str(folder),
                fix="Load it together with its target, so that the two can be compared.",
            )
    tensors = {bare(name): tensor for file in files for name, tensor in read_tensors(file).items()}
    for name in borrowed:
        check_copy(name, tensors.pop(name), target, folder)
    return tensors


def header(file: Path) -> dict[str, Stored]:
    """Names, shapes and kinds in one file, without reading a tensor."""
    try:
        with safe_open(file, framework="pt") as handle:
            parts = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 - not a dictionary
            entries = {name: Stored(tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
    except (SafetensorError, OSError) as error:
        raise InputError(f"the weight file cannot be read ({error})", where=str(file), fix=AGAIN) from error
    if len({bare(name) for name in entries}) < len(entries):
        raise InputError("a tensor is stored twice, with and without the prefix model.", where=str(file), fix=AGAIN)
    return {bare(name): entry for name, entry in entries.items()}


def check_published(stored: dict[str, Stored], spec: DFlashSpec, folder: Path) -> None:
    """Demand exactly the published names, with the shapes that config.json promises, in a floating-point type."""
    title = FAMILIES[spec.family].title
    other = f"Use a plain {title} checkpoint."

    def refuse(what: str, fix: str = COMPLETE) -> None:
        raise InputError(what, where=str(folder), fix=fix)

    for name in stored:
        for sign, meaning in _FOREIGN.items():
            if sign in name.split("."):
                refuse(f"tensor {name} belongs to {meaning}, which is not read yet", other)
    depth = len({name.split(".")[1] for name in stored if name.startswith("layers.")})
    if depth != spec.layers:  # also keeps an absurd num_hidden_layers from being laid out below
        refuse(f"the weights hold {depth} layers, config.json promises {spec.layers}")
    shapes = published_shapes(spec)
    missing, unexpected = sorted(set(shapes) - set(stored)), sorted(set(stored) - set(shapes))
    if missing:
        refuse(f"tensor {missing[0]} is missing" + (f", and {len(missing) - 1} more" if missing[1:] else ""))
    if unexpected:
        more = f" (and {len(unexpected) - 1} more)" if unexpected[1:] else ""
        refuse(f"tensor {unexpected[0]}{more} is no part of a {title} drafter", other)
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            refuse(f"tensor {name} has shape {list(stored[name].shape)}, config.json promises {list(shape)}")
        check_kind(name, stored[name], folder)


def check_kind(name: str, entry: Stored, folder: Path) -> None:
    """Demand a floating-point type that we compute in."""
    if entry.kind not in _FLOATS:
        raise InputError(
            f"tensor {name} is stored as {entry.kind}, and quantised weights are not read",
            where=str(folder),
            fix="Use the bfloat16 checkpoint.",
        )


def bare(name: str) -> str:
    """A tensor's name without the prefix that some savers give, and with the one that some releases leave out."""
    bare = name.removeprefix("model.")
    flat = bare.removesuffix(".weight")
    return f"markov_head.{flat}.weight" if flat in ("markov_w1", "markov_w2") else bare


def check_copy(name: str, copy: Tensor, target: Any, folder: Path) -> None:
    """Demand that a stored embedding or readout is the target's own, for the target's is what we use."""
    own = target.readout.weight if name.startswith("lm_head") else target.model.get_input_embeddings().weight
    if copy.shape != own.shape or not torch.equal(copy.to(own.device, own.dtype), own):
        raise InputError(
            f"tensor {name} is not the target's own, and we draft with the target's",
            where=str(folder),
            fix="Use the target it was trained for, or a checkpoint without that tensor.",
        )
