"""config.json of a DSpark checkpoint: DeepSpec's form, which vLLM and SGLang load, and speculators' form, for vLLM.

Knows JSON and `DSparkSpec`; no weights, no target. What DSpark shares with DFlash is read by DFlash's readers; here is
what it adds: the heads, and that the anchor's slot predicts too, so that block_size tokens are drafted. DeepSpec's keys
stand at top level, and what engines look for in `dflash_config` is written there as well.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, get_args

from draftloop.core.errors import InputError
from draftloop.drafter.dspark import RANK, DSparkSpec, Markov
from draftloop.drafter.spec import DFlashSpec
from draftloop.formats import speculators, zlab_config
from draftloop.formats.facts import Facts

ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")  # DeepSpec's and both engines' name, and vLLM's second
SPECULATOR = "DSparkSpeculator"
_ANCHORS = 512  # a training setting of DeepSpec's, without which its class refuses a config
_HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_BORROWED = "Use a checkpoint as `draftloop` or DeepSpec save them."
_MEND = "Mend the file, or save or download the checkpoint again."


def config_of(spec: DSparkSpec, facts: Facts) -> dict[str, Any]:
    """Describe a drafter in DeepSpec's form; as `zlab_config.config_of`."""
    shared = {
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": list(spec.target_layers),
    }
    return {
        "architectures": [ARCHITECTURES[0]],
        "dtype": facts.kind,
        **shared,
        "dflash_config": dict(shared),
        "num_target_layers": spec.num_target_layers,
        "num_anchors": _ANCHORS,
        **_heads(spec),
        **zlab_config.layer_keys(spec),
        "draftloop": zlab_config.own_keys(spec, facts),
    }


def speculators_of(spec: DSparkSpec, facts: Facts) -> dict[str, Any]:
    """Describe a drafter in speculators' form; as `speculators.config_of`."""
    shared = speculators.config_of(spec, facts)
    return {
        **shared,
        "architectures": [SPECULATOR],
        "speculators_model_type": "dspark",
        "sample_from_anchor": True,
        **_heads(spec),
        "speculators_config": {**shared["speculators_config"], "algorithm": "dspark"},
    }


def _heads(spec: DSparkSpec) -> dict[str, Any]:
    return {
        "markov_rank": spec.markov_rank,
        **({"markov_head_type": spec.markov} if spec.markov != "none" else {}),
        "enable_confidence_head": spec.confidence,
        "confidence_head_with_markov": spec.confidence and spec.markov != "none",
    }


def claims(config: dict[str, Any]) -> bool:
    """Whether a config.json says that it is a DSpark in DeepSpec's form."""
    names = config.get("architectures")
    return (
        isinstance(names, list)
        and bool(names)
        and all(name in ARCHITECTURES for name in names)
        and not speculators.claims(config)
    )


def claims_speculators(config: dict[str, Any]) -> bool:
    """Whether a config.json says that it is a DSpark in speculators' form."""
    return config.get("speculators_model_type") == "dspark"


def spec_of(config: dict[str, Any], where: Path, *, num_target_layers: int | None = None) -> DSparkSpec:
    """Read the spec that a config.json in DeepSpec's form describes; arguments and errors as `zlab_config.spec_of`."""
    nested = config.get("dflash_config") or {}
    if not isinstance(nested, dict):
        _refuse("the key dflash_config is no object", where)
    for place in (config, nested):
        _check_anchor(place, where)
    heads = _read_heads({**nested, **config}, where)
    for key in _HEADS:
        if None not in (config.get(key), nested.get(key)) and config[key] != nested[key]:
            _refuse(f"{key} is {config[key]} at top level and {nested[key]} in dflash_config", where)
    plain = {key: value for key, value in nested.items() if key not in (*_HEADS, "sample_from_anchor")}
    said = {key: value for key, value in config.items() if key not in (*_HEADS, "sample_from_anchor")}
    base = zlab_config.spec_of({**said, "dflash_config": plain}, where, num_target_layers=num_target_layers)
    return _with_heads(base, heads, where)


def speculators_spec_of(config: dict[str, Any], where: Path, *, num_target_layers: int | None = None) -> DSparkSpec:
    """Read the spec that a config.json in speculators' form describes; as `speculators.spec_of`."""
    if "sample_from_anchor" not in config:  # speculators takes it for true, vLLM for false
        _refuse("sample_from_anchor is missing, without which nobody knows what a slot predicts", where)
    _check_anchor(config, where)
    heads = _read_heads({"markov_head_type": "vanilla", "markov_rank": RANK, **config}, where)
    facts = config.get("speculators_config") or {}
    if not isinstance(facts, dict) or facts.get("algorithm", "dspark") != "dspark":
        _refuse("speculators_config is no object, or its algorithm is not dspark", where)
    methods, block = facts.get("proposal_methods"), config.get("block_size")
    first = methods[0] if isinstance(methods, list) and methods else {}
    count = first.get("speculative_tokens") if isinstance(first, dict) else None
    if count is not None and type(block) is int and (type(count) is not int or not 1 <= count <= block):
        _refuse(f"speculative_tokens is {json.dumps(count)}, and a block_size of {block} drafts {block}", where)
    said = {key: value for key, value in config.items() if key not in (*_HEADS, "sample_from_anchor")}
    facts = {key: value for key, value in facts.items() if key not in ("algorithm", "proposal_methods")}
    base = speculators.spec_of(
        {**said, "speculators_model_type": "dflash", "speculators_config": facts},
        where,
        num_target_layers=num_target_layers,
    )
    return _with_heads(base, heads, where)


def _check_anchor(config: dict[str, Any], where: Path) -> None:
    """The anchor's slot must predict: in the other layout every slot's meaning is shifted by one."""
    if config.get("sample_from_anchor", True) is not True or config.get("dspark_bonus_anchor", False) is not False:
        _refuse(
            "its anchor slot predicts nothing (sample_from_anchor false or dspark_bonus_anchor true), and such a DSpark"
            " drafter is not read yet",
            where,
            _BORROWED,
        )


def _read_heads(config: dict[str, Any], where: Path) -> dict[str, Any]:
    rank, kind = config.get("markov_rank"), config.get("markov_head_type")
    if type(rank) is not int or rank < 0:
        _refuse(f"markov_rank is {json.dumps(rank)}, not a whole number of at least 0", where)
    if rank and kind not in get_args(Markov)[:-1]:
        _refuse(f"markov_head_type is {json.dumps(kind)}, not vanilla, gated or rnn", where)
    confidence = config.get("enable_confidence_head", False)
    if type(confidence) is not bool:
        _refuse(f"enable_confidence_head is {json.dumps(confidence)}, not true or false", where)
    if confidence and rank and config.get("confidence_head_with_markov", True) is not True:
        _refuse(
            "confidence_head_with_markov is false, and a confidence head that does not look at the token before is not"
            " read yet beside a Markov head",
            where,
            _BORROWED,
        )
    return {"markov": kind if rank else "none", "markov_rank": rank, "confidence": confidence}


def _with_heads(base: DFlashSpec, heads: dict[str, Any], where: Path) -> DSparkSpec:
    try:
        return DSparkSpec(**{field.name: getattr(base, field.name) for field in fields(base)}, **heads)
    except InputError as error:  # the spec knows what is wrong, but not in which file
        raise InputError(error.what, where=error.where or str(where), fix=error.fix) from error


def _refuse(what: str, where: Path, fix: str = _MEND) -> NoReturn:
    raise InputError(what, where=str(where), fix=fix)
