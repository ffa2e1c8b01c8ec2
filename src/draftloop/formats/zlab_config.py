"""config.json of a DFlash checkpoint in z-lab's form: written from a spec, and read back into one with suspicion.

Knows JSON and `DFlashSpec`; no weights, no target. One file serves z-lab's own class, vLLM and SGLang. What they look
for in different places is written in each: the block size at top level and in `dflash_config`, the rotary base as
`rope_theta` and in `rope_parameters`. Either place is read, and two that disagree are refused. A key that would change
what the drafter computes, in a way that ours does not, is refused too: read as plain DFlash it would draft nonsense
without a word.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from draftloop.core.errors import InputError
from draftloop.core.version import VERSION
from draftloop.drafter.spec import DFlashSpec, DrafterSpec
from draftloop.formats.facts import Facts

ARCHITECTURES = ("DFlashDraftModel", "DFlashQwen3ForCausalLM")  # the published name, and vLLM's for the same
SCHEMA = 1  # of the `draftloop` key
_PUBLISHED = "Use a plain DFlash checkpoint, as `draftloop` saves them."
_TRAINED_WITH = "Keep the one that it was trained with."
_MEND = "Mend the file, or save or download the checkpoint again."

# The values of each key that mean plain DFlash (null always does), and what any other would mean.
_PLAIN: dict[str, tuple[tuple[Any, ...], str]] = {
    "is_causal": ((False,), "causal blocks"),
    "sample_from_anchor": ((False,), "drafting from the anchor slot"),
    "attention_bias": ((False,), "biases in the attention"),
    "add_swa_attention_sink_bias": ((False,), "attention sinks"),
    "hidden_act": (("silu",), "another activation"),
    "is_neox_style": ((True,), "interleaved rotary positions"),
    "partial_rotary_factor": ((1,), "partly rotated heads"),
    "logit_scale": ((1,), "logits that the drafter scales"),
    "projector_type": ((), "a Domino head"),
    "quantization_config": ((), "quantised weights"),
}
_PLAIN_NESTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "causal": ((False,), "causal blocks"),
    "sample_from_anchor": ((False,), "drafting from the anchor slot"),
    "use_swa": ((False,), "sliding-window attention"),
    "attention_sink_bias": ((False,), "attention sinks"),
    "attention_value_scale": ((1,), "scaled attention values"),
    "output_multiplier": ((1,), "logits that the drafter scales"),
    "final_logit_softcapping": ((0,), "logits that the drafter caps"),
    "projector_type": ((), "a Domino head"),
    "conv_kernel_size": ((0,), "the convolutions of DFlash 2"),
    "conv_group_size": ((0,), "the convolutions of DFlash 2"),
    "selector_rank": ((0,), "the selector of DFlash 2"),
    "selector_top_k": ((0,), "the selector of DFlash 2"),
}
_READ_NESTED = {"block_size", "mask_token_id", "target_layer_ids", "num_target_layers"}
_INERT_NESTED = {"mask_token", "swa_window_size"}  # a name for mask_token_id; the window that use_swa would use
_INERT_ROPE = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1}


def config_of(spec: DFlashSpec, facts: Facts) -> dict[str, Any]:
    """Describe a drafter as the object of its config.json.

    Args:
        spec: shape, target layers (0-based, the output of that layer) and mask token.
        facts: what it says besides. A learned mask vector is said under `draftloop` alone, for engines have no key for
            it: what they read as mask_token_id is then a stand-in.
    """
    return {
        "architectures": [ARCHITECTURES[0]],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "dtype": facts.kind,
        "block_size": spec.block_size,
        "dflash_config": {
            "block_size": spec.block_size,
            "mask_token_id": spec.mask_token_id,
            "target_layer_ids": list(spec.target_layers),
        },
        "num_target_layers": spec.num_target_layers,
        **layer_keys(spec),
        "draftloop": own_keys(spec, facts),
    }


def layer_keys(spec: DrafterSpec) -> dict[str, Any]:
    """The keys of a Qwen3 configuration that describe the drafter's layers, the same in every form."""
    return {
        "model_type": "qwen3",
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * spec.layers,
        "max_window_layers": spec.layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,  # the target's business: a drafter neither starts nor ends a text
        "eos_token_id": None,
        "initializer_range": 0.02,
        "use_cache": True,
    }


def own_keys(spec: DFlashSpec, facts: Facts) -> dict[str, Any]:
    """What only we read, for the key `draftloop`."""
    ours = {
        "schema": SCHEMA,
        "version": VERSION,
        "made_for": spec.made_for,
        "mask_token": spec.mask_token_id,
        "target_layers": list(spec.target_layers),
        "weights_sha256": facts.weights,
    }
    if spec.learned_mask:
        ours |= {"learned_mask": True, "mask_sha256": facts.mask}
    return {**ours, "extra": facts.extra} if facts.extra is not None else ours


def claims(config: dict[str, Any]) -> bool:
    """Whether a config.json says that it is a DFlash in z-lab's form."""
    names = config.get("architectures")
    return isinstance(names, list) and bool(names) and all(name in ARCHITECTURES for name in names)


def read_config(path: Path) -> dict[str, Any]:
    """Read the object in a config.json.

    Raises:
        InputError: the file cannot be read, or holds no JSON object.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        _refuse(f"the file cannot be read ({error.strerror})", path, "Check its permissions.")
    except (ValueError, RecursionError):
        _refuse("the file is not JSON", path, _MEND)
    if not isinstance(config, dict):
        _refuse("the file holds no JSON object", path, _MEND)
    return config


def spec_of(config: dict[str, Any], where: Path, *, num_target_layers: int | None = None) -> DFlashSpec:
    """Read the spec that a config.json describes.

    Args:
        config: the file's object.
        where: the file, for errors.
        num_target_layers: layers of the target at hand, for a file that does not say how many its own has.

    Raises:
        InputError: attention that we do not compute, or a key that is missing, of the wrong
            kind, in conflict with another, or impossible.
    """
    nested = config.get("dflash_config")
    if config.get("model_type") != "qwen3":
        _refuse(f"model_type is {config.get('model_type')!r}, and only qwen3 is read yet", where, _PUBLISHED)
    if not isinstance(nested, dict):
        _refuse("the key dflash_config is missing or no object", where, _MEND)
    if None not in (config.get("is_causal"), nested.get("causal")) and config["is_causal"] != nested["causal"]:
        _refuse(
            f"is_causal is {json.dumps(config['is_causal'])} at top level and dflash_config.causal is"
            f" {json.dumps(nested['causal'])}",
            where,
            _TRAINED_WITH,
        )
    check_plain(config, _PLAIN, "", where)
    check_plain(nested, _PLAIN_NESTED, "dflash_config.", where)
    for key in sorted(set(nested) - set(_PLAIN_NESTED) - _READ_NESTED - _INERT_NESTED):
        if nested[key] is not None and nested[key] is not False:
            _refuse(f"the key dflash_config.{key} is unknown and may change what is drafted", where, _PUBLISHED)
    layers, hidden, vocab = (count(config.get(k), k, where) for k in ("num_hidden_layers", "hidden_size", "vocab_size"))
    check_attention(config, layers, where)
    for key, size, meaning in (
        ("draft_vocab_size", vocab, "a reduced vocabulary"),
        ("target_hidden_size", hidden, "a target of another width"),
    ):
        if config.get(key) not in (None, size):
            _refuse(f"{key} is {config[key]}, and a drafter with {meaning} is not read yet", where, _PUBLISHED)
    depth = _either(config, nested, "num_target_layers", where)
    depth = count(num_target_layers if depth is None else depth, "num_target_layers", where)
    mask = _either(config, nested, "mask_token_id", where)
    taps = target_layers(_either(config, nested, "target_layer_ids", where), depth, where)
    counted = config.get("eagle_aux_hidden_state_layer_ids")  # vLLM would believe this one: it counts from 1
    if counted is not None and counted != [layer + 1 for layer in taps]:
        _refuse(
            f"eagle_aux_hidden_state_layer_ids {counted} are not one more than each of target_layer_ids {list(taps)}",
            where,
            _TRAINED_WITH,
        )
    try:
        spec = DFlashSpec(
            hidden_size=hidden,
            layers=layers,
            heads=count(config.get("num_attention_heads"), "num_attention_heads", where),
            kv_heads=count(config.get("num_key_value_heads"), "num_key_value_heads", where),
            head_dim=count(config.get("head_dim"), "head_dim", where),
            intermediate_size=count(config.get("intermediate_size"), "intermediate_size", where),
            vocab_size=vocab,
            num_target_layers=depth,
            target_layers=taps,
            block_size=count(_either(config, nested, "block_size", where), "block_size", where),
            mask_token_id=count(mask, "mask_token_id", where, least=0),
            rope_theta=rope_base(config, where),
            norm_eps=positive(config.get("rms_norm_eps"), "rms_norm_eps", where),
            max_positions=count(config.get("max_position_embeddings"), "max_position_embeddings", where),
            made_for=made_for(config, where),
            learned_mask=_learned_mask(config, where),
        )
    except InputError as error:  # the spec knows what is wrong, but not in which file
        raise InputError(error.what, where=error.where or str(where), fix=error.fix) from error
    _check_own(config, "mask_token", mask, where)
    _check_own(config, "target_layers", list(taps), where)
    return spec


def check_plain(
    values: dict[str, Any], plain: dict[str, tuple[tuple[Any, ...], str]], prefix: str, where: Path
) -> None:
    """Refuse a key whose value changes what is computed; `plain` says which do not, and what others mean."""
    for key, (harmless, meaning) in plain.items():
        value = values.get(key)
        if value is not None and value not in harmless:
            shown = "set" if isinstance(value, (dict, list)) else json.dumps(value)
            _refuse(f"{prefix}{key} is {shown}, and a drafter with {meaning} is not read yet", where, _PUBLISHED)


def check_attention(config: dict[str, Any], layers: int, where: Path) -> None:
    """Every layer must attend fully; without `layer_types`, transformers lets the sliding window decide."""
    types = config.get("layer_types")
    if types is None:
        if config.get("use_sliding_window") and config.get("sliding_window") is not None:
            _refuse("use_sliding_window is true, and sliding-window attention is not read yet", where, _PUBLISHED)
        return
    if not isinstance(types, list) or len(types) != layers:
        _refuse(f"layer_types does not name one kind for each of the {layers} layers", where, _MEND)
    others = sorted({str(kind) for kind in types} - {"full_attention"})
    if others:
        _refuse(f"layer_types holds {others[0]}, and only full_attention is read yet", where, _PUBLISHED)


def rope_base(config: dict[str, Any], where: Path) -> float:
    """Read the base of plain rotary positions from whichever of its places is filled."""
    found = {"rope_theta": config.get("rope_theta")}
    for group in ("rope_parameters", "rope_scaling"):
        inner = config.get(group) or {}
        if not isinstance(inner, dict):
            _refuse(f"the key {group} is no object", where, _MEND)
        for key, value in inner.items():
            if key != "rope_theta" and value is not None and value != _INERT_ROPE.get(key):
                _refuse(f"{group}.{key} is set, and only plain rotary positions are read yet", where, _PUBLISHED)
        found[f"{group}.rope_theta"] = inner.get("rope_theta")
    bases = {key: positive(value, key, where) for key, value in found.items() if value is not None}
    if not bases:
        _refuse("the key rope_theta is missing", where, _MEND)
    if len(set(bases.values())) > 1:
        said = " and ".join(f"{key} {value:g}" for key, value in bases.items())
        _refuse(f"the rotary base is said twice, differently ({said})", where, _TRAINED_WITH)
    return next(iter(bases.values()))


def target_layers(value: Any, depth: int, where: Path) -> tuple[int, ...]:
    """Strictly ascending, for engines sort the layers that they tap and so permute `fc` in silence."""
    if not isinstance(value, list) or not value or not all(type(layer) is int for layer in value):
        _refuse("the key target_layer_ids is missing or no list of layer numbers", where, _MEND)
    if any(not 0 <= layer < depth for layer in value):
        _refuse(f"target layers {value} do not all exist", where, f"The target has layers 0 to {depth - 1}.")
    if any(b <= a for a, b in pairwise(value)):
        _refuse(f"target layers {value} are not strictly ascending", where, "Engines would read them in another order.")
    return tuple(value)


def made_for(config: dict[str, Any], where: Path) -> dict[str, Any]:
    """Read what the drafter was trained for, where we saved it; nothing for published checkpoints."""
    ours = config.get("draftloop") or {}
    made_for = ours.get("made_for") or {} if isinstance(ours, dict) else None
    if not isinstance(ours, dict) or not isinstance(made_for, dict):
        _refuse("the key draftloop is not what draftloop writes", where, _MEND)
    schema = ours.get("schema", SCHEMA)
    if schema != SCHEMA:
        _refuse(f"the key draftloop has schema {schema}, this version reads {SCHEMA}", where, "Update draftloop.")
    return made_for


def _check_own(config: dict[str, Any], key: str, read: Any, where: Path) -> None:
    """Refuse a key of ours that says other than those that engines read; published checkpoints have none."""
    noted = (config.get("draftloop") or {}).get(key)
    if noted is not None and noted != read:
        _refuse(
            f"draftloop.{key} is {json.dumps(noted)}, and what engines read there is {json.dumps(read)}",
            where,
            _TRAINED_WITH,
        )


def _learned_mask(config: dict[str, Any], where: Path) -> bool:
    """Read whether the drafted slots hold a learned vector; published checkpoints do not say it here."""
    learned = (config.get("draftloop") or {}).get("learned_mask", False)
    if type(learned) is not bool:
        _refuse(f"draftloop.learned_mask is {json.dumps(learned)}, not true or false", where, _MEND)
    return learned


def _either(config: dict[str, Any], nested: dict[str, Any], key: str, where: Path) -> Any:
    """Read a value from the top level or from `dflash_config`; None where it is in neither."""
    outer, inner = config.get(key), nested.get(key)
    if outer is not None and inner is not None and outer != inner:
        _refuse(f"{key} is {outer} at top level and {inner} in dflash_config", where, _TRAINED_WITH)
    return inner if outer is None else outer


def count(value: Any, key: str, where: Path, least: int = 1) -> int:
    """A whole number of at least `least`."""
    if value is None:
        _refuse(f"the key {key} is missing", where, _MEND)
    if type(value) is not int or value < least:
        _refuse(f"{key} is {json.dumps(value)}, not a whole number of at least {least}", where, _MEND)
    return value


def positive(value: Any, key: str, where: Path) -> float:
    """A positive number."""
    if value is None:
        _refuse(f"the key {key} is missing", where, _MEND)
    if type(value) not in (int, float) or not 0 < value <= 1e300 or math.isnan(value):
        _refuse(f"{key} is {json.dumps(value)}, not a positive number", where, _MEND)
    return float(value)


def _refuse(what: str, where: Path, fix: str) -> NoReturn:
    raise InputError(what, where=str(where), fix=fix)
