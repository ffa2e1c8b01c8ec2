"""config.json of an EAGLE-3 checkpoint: the form that vLLM and SGLang load, and speculators' for vLLM.

Knows JSON and `Eagle3Spec`; no weights, no target. Which target layers are read stands there twice, counted
differently: the top-level `eagle_aux_hidden_state_layer_ids` counts outputs from 1 (vLLM), the one in `eagle_config`
from 0 (SGLang). Each engine believes its own; two that disagree are refused, and so is whatever would change what the
drafter computes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from draftloop.core.errors import InputError
from draftloop.core.version import VERSION
from draftloop.drafter.eagle3 import Eagle3Spec, default_taps
from draftloop.formats.facts import Facts
from draftloop.formats.speculators import VERSION as SPECULATORS
from draftloop.formats.zlab_config import (
    SCHEMA,
    check_attention,
    check_plain,
    count,
    layer_keys,
    made_for,
    positive,
    rope_base,
    target_layers,
)

FORM = "eagle3"
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")  # the published name, and vLLM's for the same
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_DRAFTED = 7  # tokens a draft, where a published checkpoint does not say
_MEND = "Mend the file, or save or download the checkpoint again."
_PUBLISHED = "Use a plain EAGLE-3 checkpoint of one Llama layer."
_TRAINED_WITH = "Keep the one that it was trained with."

# The values of each key that mean plain EAGLE-3 (null always does), and what any other would mean.
_PLAIN: dict[str, tuple[tuple[Any, ...], str]] = {
    "attention_bias": ((False,), "biases in the attention"),
    "mlp_bias": ((False,), "biases in the MLP"),
    "bias": ((False,), "a bias on its features"),
    "hidden_act": (("silu",), "another activation"),
    "tie_word_embeddings": ((False,), "a readout tied to an embedding"),
    "norm_before_fc": ((False,), "a norm before its projection of features"),
    "fc_norm": ((False,), "norms before its projection of features"),
    "norm_output": ((False,), "normed states"),
    "logit_scale": ((1,), "logits that the drafter scales"),
    "partial_rotary_factor": ((1,), "partly rotated heads"),
    "parallel_drafting": ((False,), "slots drafted in parallel"),
    "num_hidden_layers": ((1,), "more than one layer"),
    "quantization_config": ((), "quantised weights"),
}


def config_of(spec: Eagle3Spec, facts: Facts) -> dict[str, Any]:
    """Describe a drafter as the object of the config.json that both engines read."""
    return {
        "architectures": [ARCHITECTURES[0]],
        "dtype": facts.kind,
        **llama_keys(spec),
        "draft_vocab_size": spec.draft_vocab,  # null: the target's readout
        "target_hidden_size": spec.hidden_size,
        "norm_before_residual": spec.norm_before_residual,
        _LAYERS: [layer + 1 for layer in spec.target_layers],
        "eagle_config": {_LAYERS: list(spec.target_layers), "use_aux_hidden_state": True},
        "draftloop": own_keys(spec, facts),
    }


def speculators_of(spec: Eagle3Spec, facts: Facts) -> dict[str, Any]:
    """The same in speculators' form, which says for each choice whether it was made: absent ones mean another thing."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS,
        "dtype": facts.kind,
        "draft_vocab_size": spec.draft_vocab or spec.vocab_size,
        "target_hidden_size": spec.hidden_size,
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        _LAYERS: [layer + 1 for layer in spec.target_layers],
        "transformer_layer_config": llama_keys(spec),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": spec.drafted}],
            "verifier": {"name_or_path": facts.target, "architectures": list(facts.target_architectures)},
        },
        "draftloop": own_keys(spec, facts),
    }


def llama_keys(spec: Eagle3Spec) -> dict[str, Any]:
    """The keys of a Llama configuration that describe the layer."""
    keys = {**layer_keys(spec), "model_type": "llama", "mlp_bias": False}
    return {key: value for key, value in keys.items() if key not in ("max_window_layers", "layer_types")}


def own_keys(spec: Eagle3Spec, facts: Facts) -> dict[str, Any]:
    """What only we read, for the key `draftloop`."""
    ours = {
        "schema": SCHEMA,
        "version": VERSION,
        "made_for": spec.made_for,
        "block_size": spec.block_size,
        "num_target_layers": spec.num_target_layers,
        "draft_vocab": spec.draft_vocab,
        "weights_sha256": facts.weights,
    }
    return {**ours, "extra": facts.extra} if facts.extra is not None else ours


def claims(config: dict[str, Any]) -> bool:
    """Whether a config.json says that it is in the engines' form."""
    names = config.get("architectures")
    return isinstance(names, list) and bool(names) and all(name in ARCHITECTURES for name in names)


def claims_speculators(config: dict[str, Any]) -> bool:
    """Whether it says that it is an EAGLE-3 in speculators' form."""
    return config.get("speculators_model_type") == "eagle3"


def speculators_spec_of(config: dict[str, Any], where: Path, *, num_target_layers: int | None = None) -> Eagle3Spec:
    """Read the spec out of speculators' form, by way of the other; as `spec_of`."""
    inner, facts = config.get("transformer_layer_config"), config.get("speculators_config") or {}
    if not isinstance(inner, dict) or not isinstance(facts, dict):
        _refuse("transformer_layer_config or speculators_config is missing or no object", where, _MEND)
    methods = facts.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    outer = ("draft_vocab_size", "target_hidden_size", "norm_before_fc", "fc_norm", "norm_output", _LAYERS, "draftloop")
    said = {key: config[key] for key in outer if config.get(key) is not None}
    beside = config.get("norm_before_residual", True)  # absent means true in vLLM
    merged = {**inner, **said, "norm_before_residual": beside}
    spec = spec_of(merged, where, num_target_layers=num_target_layers, drafted=first.get("speculative_tokens"))
    verifier = facts.get("verifier")
    named = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return replace(spec, made_for={"target": named}) if isinstance(named, str) and "draftloop" not in config else spec


def spec_of(
    config: dict[str, Any], where: Path, *, num_target_layers: int | None = None, drafted: Any = None
) -> Eagle3Spec:
    """Read the spec that a config.json describes.

    Args:
        config: the file's object.
        where: the file, for errors.
        num_target_layers: layers of the target at hand, for a file that does not say how many its own has.
        drafted: tokens a draft, where another part of the file says it.

    Raises:
        InputError: a layer that we do not compute, or a key that is missing, of the wrong kind, in conflict with
            another, or impossible.
    """
    if config.get("model_type") != "llama":
        _refuse(f"model_type is {config.get('model_type')!r}, and only llama is read yet", where, _PUBLISHED)
    check_plain(config, _PLAIN, "", where)
    check_attention(config, 1, where)
    ours = config.get("draftloop") or {}
    known = made_for(config, where)  # refuses what we did not write
    hidden, vocab, heads = (
        count(config.get(k), k, where) for k in ("hidden_size", "vocab_size", "num_attention_heads")
    )
    if config.get("target_hidden_size") not in (None, hidden):
        _refuse("target_hidden_size differs from hidden_size, and such a drafter is not read yet", where, _PUBLISHED)
    depth = ours.get("num_target_layers")
    depth = count(num_target_layers if depth is None else depth, "num_target_layers", where)
    wanted = config.get("draft_vocab_size")
    own = None if wanted is None else count(wanted, "draft_vocab_size", where)
    if "draft_vocab" in ours:  # speculators' form has no word for a borrowed readout
        own = ours["draft_vocab"]
    beside = config.get("norm_before_residual") or False
    if type(beside) is not bool:
        _refuse(f"norm_before_residual is {json.dumps(beside)}, not true or false", where, _MEND)
    block = ours.get("block_size")
    block = count((drafted or _DRAFTED) + 1 if block is None else block, "block_size", where)
    try:
        return Eagle3Spec(
            hidden_size=hidden,
            layers=1,
            heads=heads,
            kv_heads=count(config.get("num_key_value_heads", heads), "num_key_value_heads", where),
            head_dim=count(config.get("head_dim") or hidden // heads, "head_dim", where),
            intermediate_size=count(config.get("intermediate_size"), "intermediate_size", where),
            vocab_size=vocab,
            num_target_layers=depth,
            target_layers=_taps(config, depth, where),
            block_size=block,
            rope_theta=rope_base(config, where),
            norm_eps=positive(config.get("rms_norm_eps"), "rms_norm_eps", where),
            max_positions=count(config.get("max_position_embeddings"), "max_position_embeddings", where),
            made_for=known,
            draft_vocab=own,
            norm_before_residual=beside,
        )
    except InputError as error:  # the spec knows what is wrong, but not in which file
        raise InputError(error.what, where=error.where or str(where), fix=error.fix) from error


def _taps(config: dict[str, Any], depth: int, where: Path) -> tuple[int, ...]:
    """0-based layers, from whichever place says them; none means the engines' default."""
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, dict):
        _refuse("the key eagle_config is no object", where, _MEND)
    if nested.get("use_aux_hidden_state") is False:
        _refuse("use_aux_hidden_state is false, and a drafter of one feature is not read yet", where, _PUBLISHED)
    outer, inner = config.get(_LAYERS), nested.get(_LAYERS)
    if outer is None and inner is None:
        return default_taps(depth, 3)
    if outer is not None:
        ids = [layer - 1 if type(layer) is int else layer for layer in outer] if isinstance(outer, list) else outer
        taps = target_layers(ids, depth, where)
        if inner is not None and inner != list(taps):
            _refuse(
                f"{_LAYERS} is {outer}, counted from 1, and in eagle_config {inner}, counted from 0", where,
                "They name different layers: keep those that it was trained with.",
            )  # fmt: skip
        return taps
    usual = default_taps(depth, 3)
    if inner not in (list(usual), [layer + 1 for layer in usual]):
        _refuse(
            f"only eagle_config says {_LAYERS} ({inner}), which engines count from 0 or from 1", where,
            f"Add the top-level {_LAYERS}, counted from 1.",
        )  # fmt: skip
    return usual


def _refuse(what: str, where: Path, fix: str) -> NoReturn:
    raise InputError(what, where=str(where), fix=fix)
