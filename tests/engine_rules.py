"""What the loaders of vLLM, SGLang, z-lab's class and the speculators package do with a DFlash checkpoint, as facts.

Tables of names and places, read by a few lines of code. `tests/engine_sources.py` holds them against the loaders
themselves, where those are at hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

# Where each reader looks for a fact, first place first; `add` turns what stands there into our unit.
# taps: index into the target's hidden states (0 = embedding, so layer k's output is k + 1). drafted: K.
PLACES: dict[tuple[str, str], dict[str, list[tuple[str, int]]]] = {
    ("vllm", "zlab"): {
        "taps": [("eagle_aux_hidden_state_layer_ids", 0), ("dflash_config.target_layer_ids", 1)],
        "mask": [("dflash_config.mask_token_id", 0), ("mask_token_id", 0)],
        "causal": [("is_causal", 0), ("dflash_config.causal", 0)],
    },
    ("vllm", "speculators"): {
        "taps": [("aux_hidden_state_layer_ids", 0)],
        "mask": [("mask_token_id", 0)],
        "drafted": [("speculators_config.proposal_methods.0.speculative_tokens", 0)],
        "bidirectional": [("sliding_window_non_causal", 0)],
    },
    ("sglang", "zlab"): {
        "taps": [("dflash_config.target_layer_ids", 1), ("target_layer_ids", 1)],
        "mask": [("dflash_config.mask_token_id", 0), ("mask_token_id", 0)],
        "drafted": [("dflash_config.block_size", -1), ("block_size", -1)],
        "causal": [("is_causal", 0)],
    },
    ("zlab", "zlab"): {
        "taps": [("dflash_config.target_layer_ids", 1), ("target_layer_ids", 1)],
        "mask": [("dflash_config.mask_token_id", 0), ("mask_token_id", 0)],
        "drafted": [("dflash_config.block_size", -1), ("block_size", -1)],
        "causal": [("is_causal", 0)],
    },
    ("speculators", "speculators"): {
        "taps": [("aux_hidden_state_layer_ids", 0)],
        "mask": [("mask_token_id", 0)],
        "drafted": [("block_size", -1)],
    },
}

LAYER_KEYS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "rms_norm_eps", "max_position_embeddings", "model_type", "hidden_act", "attention_bias",
)  # fmt: skip
REQUIRED = {
    "zlab": ("architectures", "num_target_layers", *LAYER_KEYS),
    "speculators": (
        "architectures", "speculators_model_type", "speculators_version", "draft_vocab_size", "block_size",
        "speculators_config.algorithm", "speculators_config.default_proposal_method",
        "speculators_config.proposal_methods.0.proposal_type", "speculators_config.verifier.name_or_path",
        "speculators_config.verifier.architectures", *(f"transformer_layer_config.{key}" for key in LAYER_KEYS),
    ),
}  # fmt: skip
EXACT = {
    "zlab": {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"},
    "speculators": {"speculators_model_type": "dflash", "sample_from_anchor": False, "architectures": ["DFlashSpeculator"]},
}  # fmt: skip

# Parameters of the served model, and the stored parts that fill each; N stands for every layer.
FUSED = {
    "layers.N.self_attn.qkv_proj.weight": ("q_proj", "k_proj", "v_proj"),
    "layers.N.mlp.gate_up_proj.weight": ("gate_proj", "up_proj"),
}
PLAIN = (
    "layers.N.self_attn.o_proj.weight", "layers.N.self_attn.q_norm.weight", "layers.N.self_attn.k_norm.weight",
    "layers.N.mlp.down_proj.weight", "layers.N.input_layernorm.weight", "layers.N.post_attention_layernorm.weight",
    "fc.weight", "hidden_norm.weight", "norm.weight",
)  # fmt: skip
SHARED = ("embed_tokens", "lm_head")  # the target's; a stored copy is taken instead, by vLLM at least


def parameters(layers: int) -> set[tuple[str, str]]:
    """(parameter, part) of the served model, without vLLM's `model.`; part is "" where it is filled by one tensor."""
    found: set[tuple[str, str]] = set()
    for template, parts in [*FUSED.items(), *((name, ("",)) for name in PLAIN)]:
        for i in range(layers if ".N." in template else 1):
            found |= {(template.replace(".N.", f".{i}."), part) for part in parts}
    return found


def landing(name: str) -> tuple[str, str]:
    """Where a stored tensor goes: (parameter, part)."""
    bare = name.removeprefix("model.")
    for template, parts in FUSED.items():
        fused = template.split(".")[-2]
        for part in parts:
            if f".{part}." in bare:
                return bare.replace(part, fused), part
    return bare, ""


def at(config: Any, path: str) -> Any:
    """The value at a dotted path; None where there is none."""
    for key in path.split("."):
        if isinstance(config, list):
            config = config[int(key)] if int(key) < len(config) else None
        else:
            config = config.get(key) if isinstance(config, dict) else None
    return config


def said(config: dict[str, Any], reader: str, form: str, fact: str) -> Any:
    """What a reader takes a fact to be; None where it looks nowhere or finds nothing."""
    for path, add in PLACES[reader, form].get(fact, []):
        value = at(config, path)
        if value is not None and add:
            return [v + add for v in value] if isinstance(value, list) else value + add
        if value is not None:
            return value
    return None


def complaints(folder: Path, reader: str, form: str, spec: Any) -> list[str]:
    """Everything that this reader would load otherwise than the spec means; empty for a right export."""
    config = json.loads((folder / "config.json").read_text())
    names = sorted(load_file(folder / "model.safetensors"))
    out = [f"{key} is missing" for key in REQUIRED[form] if at(config, key) is None]
    out += [f"{key} is not {value}" for key, value in EXACT[form].items() if config.get(key) != value]
    expected = {"taps": [k + 1 for k in spec.target_layers], "mask": spec.mask_token_id, "drafted": spec.drafted}
    for fact, value in expected.items():
        if fact in PLACES[reader, form] and said(config, reader, form, fact) != value:
            out.append(f"{fact}: {said(config, reader, form, fact)}, not {value}")
        places = [path for path, _ in PLACES[reader, form].get(fact, [])]
        if (
            len(
                {
                    json.dumps(at(config, path))
                    for path in places
                    if at(config, path) is not None and "eagle" not in path
                }
            )
            > 1
        ):
            out.append(f"{fact} is said twice, differently")
    if said(config, reader, form, "causal") or said(config, reader, form, "bidirectional") is False:
        out.append("the block would be causal")
    layer_config = config if form == "zlab" else config.get("transformer_layer_config", {})
    if layer_config.get("layer_types") != ["full_attention"] * spec.layers:
        out.append("layer_types are not full attention")
    landed = [landing(name) for name in names]
    out += [f"{name} is a copy of the target's" for name in names if any(part in name for part in SHARED)]
    out += [f"{name} begins with model." for name in names if name.startswith("model.")]
    out += [f"{place} is filled twice" for place in set(landed) if landed.count(place) > 1]
    out += [f"{place} stays empty" for place in sorted(parameters(spec.layers) - set(landed))]
    out += [
        f"{place} is unknown"
        for place in sorted(set(landed) - parameters(spec.layers))
        if place[0].split(".")[0] not in SHARED
    ]
    return out
