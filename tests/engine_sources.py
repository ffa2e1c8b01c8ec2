"""The engines' own parsers and loading loops, out of a few files of an installation or a wheel; no engine is imported.

DRAFTLOOP_VLLM and DRAFTLOOP_SGLANG name a site-packages folder or a wheel file.
"""

from __future__ import annotations

import ast
import io
import logging
import os
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch


def source(variable: str, path: str) -> str:
    """The text of one file of an engine; the test is skipped where the engine is not at hand."""
    place = os.environ.get(variable)
    if not place:
        pytest.skip(f"{variable} names no site-packages folder and no wheel")
    if Path(place).is_dir():
        return (Path(place) / path).read_text(encoding="utf-8")
    with zipfile.ZipFile(place) as wheel:
        return wheel.read(path).decode("utf-8")


def pieces(text: str, names: Iterable[str], **world: Any) -> dict[str, Any]:
    """Execute only these top-level definitions (or `Class.method` as a plain function) of a module."""
    wanted, body = set(names), []
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in wanted:
            body.append(node)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in wanted:
            body.append(node)
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and f"{node.name}.{inner.name}" in wanted:
                    inner.decorator_list = []
                    body.append(inner)
    future = ast.parse("from __future__ import annotations").body
    space: dict[str, Any] = {"__name__": __name__, "Any": Any, **world}
    exec(compile(ast.Module(future + body, []), "engine", "exec"), space)
    return space


def vllm_algorithms() -> dict[str, Any]:
    space: dict[str, Any] = {}
    exec(source("DRAFTLOOP_VLLM", "vllm/transformers_utils/configs/speculators/algos.py"), space)
    return space["SUPPORTED_SPECULATORS_TYPES"]


def vllm_proposal(config: dict[str, Any]) -> dict[str, Any]:
    """vLLM's validation of a speculators config, and what it makes of it: method and num_speculative_tokens."""
    text = source("DRAFTLOOP_VLLM", "vllm/transformers_utils/configs/speculators/base.py")
    names = ["validate_speculators_config", "build_vllm_speculative_config"]
    space = pieces(text, [f"SpeculatorsConfig.{name}" for name in names])
    space[names[0]](None, config)
    return space[names[1]](None, config)


def vllm_taps(config: dict[str, Any]) -> tuple[int, ...]:
    text = source("DRAFTLOOP_VLLM", "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py")
    read = pieces(text, ["get_eagle3_aux_layers_from_config"])["get_eagle3_aux_layers_from_config"]

    class Speculative(SimpleNamespace):
        def __bool__(self) -> bool:
            return True

    return read(Speculative(draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(**config))))


def vllm_causal(config: dict[str, Any]) -> list[bool]:
    text = source("DRAFTLOOP_VLLM", "vllm/model_executor/models/qwen3_dflash.py")
    read = pieces(text, ["_dflash_layer_causal", "_SLIDING_ATTENTION"])["_dflash_layer_causal"]
    return [read(SimpleNamespace(**config), i) for i in range(config["num_hidden_layers"])]


def vllm_loaded(folder: Path, tensors: dict[str, Any], mask_token_id: int) -> dict[str, Any]:
    """What vLLM's DFlash hands to its weight loader, by its own renaming; the mask vector included."""
    text = source("DRAFTLOOP_VLLM", "vllm/model_executor/models/qwen3_dflash.py")
    got: dict[str, Any] = {}

    class Loader:
        def __init__(self, model: Any) -> None: ...

        def load_weights(self, weights: Any, mapper: Any = None) -> None:
            dropped = mapper.kwargs["orig_to_new_substr"] if mapper else {}
            got.update({n: t for n, t in weights if not any(part in n for part in dropped)})
            got["dropped"] = dropped

    def file_bytes(name: str, model: str, revision: Any) -> bytes | None:
        path = Path(model) / name
        return path.read_bytes() if path.exists() else None

    space = pieces(
        text,
        ["DFlashQwen3ForCausalLM.load_weights", "DFlashQwen3ForCausalLM._read_mask_embedding"],
        torch=torch,
        io=io,
        logger=logging.getLogger("engine"),
        AutoWeightsLoader=Loader,
        WeightsMapper=lambda **kwargs: SimpleNamespace(kwargs=kwargs),
        process_eagle_weight=lambda model, name: None,
        get_hf_file_bytes=file_bytes,
    )
    inner = SimpleNamespace(
        use_aux_hidden_state=True,
        has_separate_mask_embedding=False,
        mask_token_id=mask_token_id,
        _build_fused_kv_buffers=lambda: None,
    )
    model = SimpleNamespace(model=inner, draft_model_config=SimpleNamespace(model=str(folder), revision=None))
    model._read_mask_embedding = lambda: space["_read_mask_embedding"](model)
    space["load_weights"](model, tensors.items())
    return got


def sglang_config(config: dict[str, Any]) -> Any:
    """SGLang's DFlashDraftConfig of a config.json."""
    text = source("DRAFTLOOP_SGLANG", "sglang/srt/speculative/dflash_utils.py")
    names = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name.startswith(("_cfg", "_get_", "_parse", "parse_dflash", "is_nemotron", "build_target", "get_dflash_layer"))]  # fmt: skip
    space = pieces(
        text,
        [*names, "DFlashDraftConfig", "DEFAULT_DFLASH_MASK_TOKEN"],
        dataclass=dataclass,
        Integral=Integral,
        Sequence=Sequence,
    )  # fmt: skip
    return space["parse_dflash_draft_config"](draft_hf_config=config)


def sglang_loaded(tensors: dict[str, Any], parameters: Iterable[str]) -> list[tuple[str, Any, Any]]:
    """(parameter, shard, tensor) that SGLang's DFlash fills; what it drops in silence is not there."""
    text = source("DRAFTLOOP_SGLANG", "sglang/srt/models/dflash.py")
    got: list[tuple[str, Any, Any]] = []

    class Parameter:
        def __init__(self, name: str) -> None:
            self.name = name
            self.shape = tensors[name].shape if name in tensors else None

        def weight_loader(self, parameter: Any, tensor: Any, shard: Any = "") -> None:
            got.append((self.name, shard, tensor))

    space = pieces(
        text, ["DFlashDraftModel.load_weights"],
        default_weight_loader=None,
    )  # fmt: skip
    model = SimpleNamespace(
        named_parameters=lambda: [(name, Parameter(name)) for name in parameters],
        projector_type=None,
        is_nemotron_35_draft=False,
        num_context_features=1,
        config=SimpleNamespace(hidden_size=1),
    )
    space["load_weights"](model, tensors.items())
    return got
