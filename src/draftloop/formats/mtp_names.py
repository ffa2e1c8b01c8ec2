"""What the tensors of an MTP module are called in checkpoints: Qwen's names, DeepSeek's names, experts one by one.

Knows names and shapes, reads no file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

Scheme = Literal["mtp", "nextn"]

# classes whose native heads engines read from the target's checkpoint, by the `model_type` of the decoder
SCHEMES: dict[str, Scheme] = {
    "qwen3_next": "mtp",
    "qwen3_5_text": "mtp",
    "qwen3_5_moe_text": "mtp",
    "deepseek_v3": "nextn",
    "glm4_moe": "nextn",
}
_NEXTN = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
_FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)$")
_SINGLE = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
BORROWED = {"embed_tokens.weight": "embed_tokens", "shared_head.head.weight": "lm_head"}  # in DeepSeek's layer


def depth_key(model_type: str) -> str:
    """The key of config.json that says how many heads a checkpoint of the class holds."""
    return "mtp_num_hidden_layers" if model_type.startswith("qwen3_5") else "num_nextn_predict_layers"


def scheme_of(model_type: str) -> Scheme:
    """How a class names its head; ours where it has none of its own."""
    return SCHEMES.get(model_type, "mtp")


def published_name(name: str, scheme: Scheme, layers: int) -> str:
    """The module's name for a tensor -> the checkpoint's, without a leading `model.`; `layers` are the target's."""
    if scheme == "mtp":
        return f"mtp.{name}"
    if name.startswith("layers.0."):
        return f"layers.{layers}.{name.removeprefix('layers.0.')}"
    head, _, rest = name.partition(".")
    return f"layers.{layers}.{_NEXTN[head]}.{rest}"


def in_file(name: str) -> str:
    """A published name with the prefix that engines expect in the target's checkpoint."""
    return f"model.{name}" if name.startswith("layers.") else name


def belongs(name: str, layers: int) -> bool:
    """Whether a tensor of a target's checkpoint (no leading `model.`) is of its MTP modules."""
    found = re.match(r"layers\.(\d+)\.", name)
    return name.startswith("mtp.") or (found is not None and int(found[1]) >= layers)


def modules(names: Iterable[str], layers: int) -> int:
    """How many modules these tensors are of, one for each depth."""
    deep = [re.match(r"(mtp\.)?layers\.(\d+)\.", name) for name in names]
    depths = {int(found[2]) - (0 if found[1] else layers) for found in deep if found is not None}
    return max(depths, default=0) + 1


def published(state: dict[str, Tensor], scheme: Scheme, layers: int, *, fused: bool = False) -> dict[str, Tensor]:
    """The module's tensors (on the meta device as well) by published names, experts one by one unless `fused`."""
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        stacked = None if fused else _FUSED.match(name)
        if stacked is None:
            out[published_name(name, scheme, layers)] = tensor
            continue
        for i, one in enumerate(tensor.unbind(0)):
            parts = {"down": one} if stacked[2] == "down_proj" else dict(zip(("gate", "up"), one.chunk(2), strict=True))
            for part, values in parts.items():
                single = f"{stacked[1]}.{i}.{part}_proj.weight"
                out[published_name(single, scheme, layers)] = values
    return out


def own_names(tensors: dict[str, Tensor], wanted: dict[str, Tensor], scheme: Scheme, layers: int) -> dict[str, Tensor]:
    """Published tensors -> the module's, experts stacked.

    Args:
        tensors: by published name, all that `published` gives.
        wanted: the module's state, for its names.
        scheme: of the names.
        layers: of the target.
    """
    out: dict[str, Tensor] = {}
    for name in wanted:
        direct = published_name(name, scheme, layers)
        if direct in tensors:
            out[name] = tensors[direct]
            continue
        stacked = _FUSED.match(name)
        assert stacked is not None, name
        of = {(int(m[2]), m[3]): t for n, t in tensors.items() if (m := _SINGLE.match(n)) is not None}
        count = 1 + max(i for i, _ in of)
        if stacked[2] == "down_proj":
            out[name] = torch.stack([of[i, "down"] for i in range(count)])
        else:
            out[name] = torch.stack([torch.cat([of[i, "gate"], of[i, "up"]]) for i in range(count)])
    return out
