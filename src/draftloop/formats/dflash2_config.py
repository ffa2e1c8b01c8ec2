"""config.json of a DFlash 2 checkpoint in z-lab's and in speculators' form: what it says beyond DFlash's own.

Knows JSON and `DFlash2Spec`; no weights, no target. Both forms are DFlash's with another architecture and four more
keys, in `dflash_config` and at top level. Reading takes these out and hands on what is left, so all checks of DFlash
apply. Layers may be sliding, all alike, where the file says that they are not causal; ours attend fully.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from draftloop.core.errors import InputError
from draftloop.drafter.dflash2 import DFlash2Spec
from draftloop.drafter.spec import DFlashSpec
from draftloop.formats import speculators, zlab_config
from draftloop.formats.facts import Facts

ARCHITECTURE = "DFlash2DraftModel"
ALGORITHM = "dflash2"
_SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_LOGITS = ("output_multiplier", "final_logit_softcapping")
_TRAINED_WITH = "Keep the one that it was trained with."
_COMPLETE = "Use a complete DFlash 2 checkpoint, as `draftloop` saves them."


def zlab_of(spec: DFlash2Spec, facts: Facts) -> dict[str, Any]:
    """Describe a drafter in z-lab's form; as `zlab_config.config_of`."""
    config = zlab_config.config_of(spec, facts)
    config.pop("auto_map")  # which names a class without convolutions
    nested = {**config["dflash_config"], **{key: getattr(spec, key) for key in _SIZES}}
    if spec.output_multiplier != 1.0:
        nested["output_multiplier"] = spec.output_multiplier
    if spec.final_logit_softcapping is not None:
        nested["final_logit_softcapping"] = spec.final_logit_softcapping
    return {
        **config,
        "architectures": [ARCHITECTURE],
        "is_causal": False,  # engines take sliding layers for causal ones where nothing is said
        "dflash_config": nested,
        **_attention(spec),
    }


def speculators_of(spec: DFlash2Spec, facts: Facts) -> dict[str, Any]:
    """Describe a drafter in speculators' form; as `speculators.config_of`.

    Raises:
        InputError: the drafter scales or caps its logits, for which the form has no key.
    """
    if spec.output_multiplier != 1.0 or spec.final_logit_softcapping is not None:
        raise InputError(
            "the drafter scales or caps its logits, which the speculators form cannot say",
            where="--form",
            fix="Export in z-lab's form (--form zlab).",
        )
    config = speculators.config_of(spec, facts)
    inner = {**config["transformer_layer_config"], **_attention(spec)}
    return {
        **config,
        "architectures": [ARCHITECTURE],
        "speculators_model_type": ALGORITHM,
        **{key: getattr(spec, key) for key in _SIZES},
        "transformer_layer_config": inner,
        "speculators_config": {**config["speculators_config"], "algorithm": ALGORITHM},
    }


def claims_zlab(config: dict[str, Any]) -> bool:
    """Whether a config.json says that it is a DFlash 2 in z-lab's form."""
    names = config.get("architectures")
    return isinstance(names, list) and bool(names) and all(name == ARCHITECTURE for name in names)


def claims_speculators(config: dict[str, Any]) -> bool:
    """Whether a config.json says that it is a DFlash 2 in speculators' form."""
    names = config.get("architectures")
    said = isinstance(names, list) and any(ALGORITHM in str(name).lower() for name in names)
    return speculators.claims(config) and (said or config.get("speculators_model_type") == ALGORITHM)


def spec_of_zlab(config: dict[str, Any], where: Path, *, num_target_layers: int | None = None) -> DFlash2Spec:
    """Read the spec that a config.json in z-lab's form describes; as `zlab_config.spec_of`."""
    nested = config.get("dflash_config")
    if not isinstance(nested, dict):
        _refuse("the key dflash_config is missing or no object", where, _COMPLETE)
    plain, window = _full_layers(config, nested, where)
    rest = {key: value for key, value in nested.items() if key not in (*_SIZES, *_LOGITS, "swa_window_size")}
    plain = {**plain, "architectures": [zlab_config.ARCHITECTURES[0]], "dflash_config": rest}
    base = zlab_config.spec_of(plain, where, num_target_layers=num_target_layers)
    multiplier, cap = (_number(nested.get(key), key, where) for key in _LOGITS)
    return _spec(base, nested, where, window, multiplier or 1.0, cap or None)


def spec_of_speculators(config: dict[str, Any], where: Path, *, num_target_layers: int | None = None) -> DFlash2Spec:
    """Read the spec that a config.json in speculators' form describes; as `speculators.spec_of`."""
    if config.get("speculators_model_type") != ALGORITHM:
        said = json.dumps(config.get("speculators_model_type"))
        _refuse(f"the architecture is a DFlash 2's and speculators_model_type is {said}", where, _COMPLETE)
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        _refuse("the key transformer_layer_config is missing or no object", where, _COMPLETE)
    symmetric = config.get("sliding_window_non_causal")  # absent counts as true in vLLM
    plain, window = _full_layers({**inner, "is_causal": symmetric is False}, {}, where)
    plain = {**plain, "is_causal": inner.get("is_causal")}
    facts = config.get("speculators_config") or {}
    if not isinstance(facts, dict) or facts.get("algorithm", ALGORITHM) != ALGORITHM:
        _refuse(f"speculators_config is no object, or its algorithm is not {ALGORITHM}", where, _COMPLETE)
    translated = {
        **{key: value for key, value in config.items() if key not in _SIZES},
        "architectures": [speculators.ARCHITECTURE],
        "speculators_model_type": "dflash",
        "transformer_layer_config": plain,
        "speculators_config": {**facts, "algorithm": "dflash"},
    }
    base = speculators.spec_of(translated, where, num_target_layers=num_target_layers)
    return _spec(base, config, where, window)


def _attention(spec: DFlash2Spec) -> dict[str, Any]:
    if spec.sliding_window is None:
        return {}
    return {
        "layer_types": ["sliding_attention"] * spec.layers,
        "sliding_window": spec.sliding_window,
        "use_sliding_window": True,
    }


def _full_layers(config: dict[str, Any], nested: dict[str, Any], where: Path) -> tuple[dict[str, Any], int | None]:
    """The config as if its layers attended fully, and the window that they have in truth."""
    types = config.get("layer_types")
    kinds = set(types) if isinstance(types, list) and all(isinstance(kind, str) for kind in types) else set()
    sliding = "sliding_attention" in kinds or (types is None and bool(config.get("use_sliding_window")))
    if not sliding:
        return config, None
    if len(kinds) > 1:
        _refuse(
            "layer_types holds sliding and full layers, and only layers of one kind are read yet",
            where,
            "Use a checkpoint whose layers are all alike.",
        )
    causal = config.get("is_causal") if config.get("is_causal") is not None else nested.get("causal")
    if causal is not False:
        _refuse(
            "the layers are sliding and the file does not say that they are not causal, and causal blocks are not read",
            where,
            "If it was trained with symmetric attention, set is_causal to false.",
        )
    windows = {key: found for key in ("sliding_window", "swa_window_size")
               if (found := (nested if key == "swa_window_size" else config).get(key)) is not None}  # fmt: skip
    if len(set(map(json.dumps, windows.values()))) != 1:
        _refuse("sliding_window is missing, or said twice and differently", where, _TRAINED_WITH)
    window = next(iter(windows.values()))
    if type(window) is not int or window < 1:
        _refuse(f"sliding_window is {json.dumps(window)}, not a whole number of at least 1", where, _TRAINED_WITH)
    full = ["full_attention"] * len(types) if isinstance(types, list) else None
    return {**config, "layer_types": full, "sliding_window": None, "use_sliding_window": False}, window


def _spec(
    base: DFlashSpec,
    values: dict[str, Any],
    where: Path,
    window: int | None,
    multiplier: float = 1.0,
    cap: float | None = None,
) -> DFlash2Spec:
    sizes: dict[str, Any] = {}
    for key in _SIZES:
        value = values.get(key)
        if type(value) is not int or value < 1:
            said = "missing" if value is None else f"{json.dumps(value)}, not a whole number of at least 1"
            _refuse(f"the key {key} is {said}, and DFlash 2 has both convolutions and a selector", where, _COMPLETE)
        sizes[key] = value
    try:
        return DFlash2Spec(
            **{field.name: getattr(base, field.name) for field in fields(base)},
            **sizes,
            sliding_window=window,
            output_multiplier=multiplier,
            final_logit_softcapping=cap,
        )
    except InputError as error:  # the spec knows what is wrong, but not in which file
        raise InputError(error.what, where=str(where), fix=error.fix) from error


def _number(value: Any, key: str, where: Path) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        _refuse(f"dflash_config.{key} is {json.dumps(value)}, not a number of at least 0", where, _TRAINED_WITH)
    return float(value)


def _refuse(what: str, where: Path, fix: str) -> NoReturn:
    raise InputError(what, where=str(where), fix=fix)
