"""Keys of the drafter section that mean something for some families only. Knows names alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# key of `drafter` -> the families that it is for; such keys default to null, so that what was given is seen
FAMILY_KEYS: dict[str, tuple[str, ...]] = {
    "selector_rank": ("dflash2",),
    "selector_top_k": ("dflash2",),
    "conv_kernel_size": ("dflash2",),
    "conv_group_size": ("dflash2",),
}


def why_strange(family: str, given: Mapping[str, Any]) -> str | None:
    """Which of these keys means nothing for a family, as a sentence; None where all do.

    Args:
        family: as `drafter.family` spells it.
        given: the drafter section; null = not given.
    """
    for key, families in FAMILY_KEYS.items():
        if given.get(key) is not None and family not in families:
            return f"{key} means nothing for family {family}; it is for {' and '.join(families)}"
    return None
