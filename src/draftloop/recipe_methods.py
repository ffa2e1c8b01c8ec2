"""The usual rows of the method table: the cells of a stage that the name of a method fills.

Knows the cells' names and values, and nothing of how a stage is checked (recipe.py).
"""

from __future__ import annotations

from typing import Any

_FIXED = {"trunks": "fixed", "anchors": "random", "proposals": "trunk"}
_CAREFUL = {"optimiser": {"lr": 3e-4}}  # for drafters that have had a warm-up
METHODS: dict[str, dict[str, Any]] = {
    "sft": {**_FIXED, "objective": {"kind": "ce"}},
    "off-policy-kl": {**_FIXED, "objective": {"kind": "forward_kl"}},
    "overlap": {**_FIXED, "objective": {"kind": "e2e_tv"}, **_CAREFUL},
    "specopd": {**_FIXED, "proposals": "sampled", "objective": {"kind": "e2e_tv"}, **_CAREFUL},
    "draft-opd": {
        "trunks": "rollout",
        "anchors": "rollout",
        "proposals": "recorded",
        "objective": {"kind": "draft_opd"},
        **_CAREFUL,
    },
    "custom": {},
}


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `over` laid upon it, section by section."""
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if both else value
    return out
