"""config.json of a DFlash checkpoint in speculators' form, for vLLM and the speculators package; SGLang reads no such.

Knows JSON and `DFlashSpec`; no weights, no target. The tensors are those of z-lab's form, and so is the meaning of
every key but one: `aux_hidden_state_layer_ids` counts the outputs of the target's layers from 1, because entry 0 of its
hidden states is the embedding. Reading therefore means translating into z-lab's form, and its checks apply.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from draftloop.core.errors import InputError
from draftloop.drafter.spec import DFlashSpec
from draftloop.formats import zlab_config
from draftloop.formats.facts import Facts

ARCHITECTURE = "DFlashSpeculator"
VERSION = "0.9.0"  # of the form that is written
_MEND = "Mend the file, or save or download the checkpoint again."
_TRAINED_WITH = "Keep the one that it was trained with."

# The speculators package writes only what differs from these defaults of its layers' configuration.
_DEFAULTS: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}
_ROPE_THETA = 10000.0


def config_of(spec: DFlashSpec, facts: Facts) -> dict[str, Any]:
    """Describe a drafter as the object of its config.json.

    Args:
        spec: shape, target layers (0-based, the output of that layer) and mask token.
        facts: what it says besides; the form calls the target the verifier.
    """
    ours = zlab_config.own_keys(spec, facts)
    return {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "dtype": facts.kind,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in spec.target_layers],
        "mask_token_id": spec.mask_token_id,
        "block_size": spec.block_size,
        "draft_vocab_size": spec.vocab_size,
        "target_hidden_size": spec.hidden_size,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,  # vLLM takes it for every layer: false would make the whole block causal
        "transformer_layer_config": zlab_config.layer_keys(spec),
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": spec.drafted}],
            "verifier": {"name_or_path": facts.target, "architectures": list(facts.target_architectures)},
        },
        "draftloop": {**ours, "num_target_layers": spec.num_target_layers},  # the form has no key for it
    }


def claims(config: dict[str, Any]) -> bool:
    """Whether a config.json says that it is in speculators' form, of whatever algorithm."""
    return "speculators_model_type" in config or "speculators_config" in config


def spec_of(config: dict[str, Any], where: Path, *, num_target_layers: int | None = None) -> DFlashSpec:
    """Read the spec that a config.json describes.

    `sliding_window_non_causal` speaks of sliding layers, which are refused; on full ones either value is read.

    Args:
        config: the file's object.
        where: the file, for errors.
        num_target_layers: layers of the target at hand, for a file that does not say how many its own has.

    Raises:
        InputError: another algorithm, or a key that is missing, of the wrong kind, in conflict with another, or
            outside what we compute.
    """
    if config.get("speculators_model_type") != "dflash":
        _refuse("the key speculators_model_type is missing or not dflash", where, _MEND)
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        _refuse("the key transformer_layer_config is missing or no object", where, _MEND)
    if config.get("sample_from_anchor"):
        _refuse(
            "sample_from_anchor is true, and a drafter with drafting from the anchor slot is not read yet",
            where,
            "Use a DFlash checkpoint that drafts from its mask slots alone.",
        )
    taps = _taps(config.get("aux_hidden_state_layer_ids"), where)
    for key in ("block_size", "mask_token_id", "draft_vocab_size", "target_hidden_size", "aux_hidden_state_layer_ids"):
        if None not in (config.get(key), inner.get(key)) and inner[key] != config[key]:
            _refuse(f"{key} is {config[key]} at top level and {inner[key]} in transformer_layer_config", where)
    native = inner.get("dflash_config") or {}
    merged = {"mask_token_id": config.get("mask_token_id"), "target_layer_ids": taps}
    if not isinstance(native, dict) or any(native.get(key) not in (None, value) for key, value in merged.items()):
        _refuse("transformer_layer_config.dflash_config is no object, or says another mask or other layers", where)
    facts = config.get("speculators_config") or {}
    if not isinstance(facts, dict) or facts.get("algorithm", "dflash") != "dflash":
        _refuse("speculators_config is no object, or its algorithm is not dflash", where, _MEND)
    _check_proposal(facts, config.get("block_size"), where)
    ours = config.get("draftloop") or {}
    if not isinstance(ours, dict):
        _refuse("the key draftloop is not what draftloop writes", where, _MEND)
    depth = ours.get("num_target_layers")
    if depth is None and num_target_layers is None:
        _refuse("this form does not say how many layers the target has", where, "Load it together with its target.")
    said = any(inner.get(key) for key in ("rope_theta", "rope_parameters", "rope_scaling"))
    spec = zlab_config.spec_of(
        {
            **_DEFAULTS,
            "rope_theta": None if said else _ROPE_THETA,
            **inner,
            "block_size": config.get("block_size"),
            "draft_vocab_size": config.get("draft_vocab_size"),
            "target_hidden_size": config.get("target_hidden_size"),
            "num_target_layers": depth,
            "dflash_config": {**native, **merged},
            "draftloop": ours,
        },
        where,
        num_target_layers=num_target_layers,
    )
    verifier = facts.get("verifier")
    named = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return replace(spec, made_for={"target": named}) if isinstance(named, str) and not ours else spec


def _taps(value: Any, where: Path) -> list[int]:
    """From the form's count (1 = output of the first layer) to ours (0-based)."""
    if not isinstance(value, list) or not value or not all(type(layer) is int for layer in value):
        _refuse("the key aux_hidden_state_layer_ids is missing or no list of layer numbers", where, _MEND)
    if min(value) < 1:
        _refuse(
            f"aux_hidden_state_layer_ids {value} begin at 0, which is the target's embedding here",
            where,
            "If they were counted from 0, add 1 to each.",
        )
    if any(b <= a for a, b in pairwise(value)):
        _refuse(
            f"aux_hidden_state_layer_ids {value} are not strictly ascending",
            where,
            "Engines would read them in another order.",
        )
    return [layer - 1 for layer in value]


def _check_proposal(facts: dict[str, Any], block: Any, where: Path) -> None:
    """A block of B drafts B - 1 tokens, and an engine that believes a larger number reads slots nobody trained."""
    methods = facts.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else {}
    count = first.get("speculative_tokens") if isinstance(first, dict) else None
    if count is not None and type(block) is int and (type(count) is not int or not 1 <= count < block):
        _refuse(
            f"speculative_tokens is {json.dumps(count)}, and a block_size of {block} drafts {block - 1}",
            where,
            _TRAINED_WITH,
        )


def _refuse(what: str, where: Path, fix: str = _TRAINED_WITH) -> NoReturn:
    raise InputError(what, where=str(where), fix=fix)
