"""Keys of the drafter section that mean something for some families only. Knows names alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# key of `drafter` -> the families that it is for; such keys default to null, so that what was given is seen
FAMILY_KEYS: dict[str, tuple[str, ...]] = {
    "mask_token": ("dflash", "dspark", "dflash2"),
    "draft_vocab": ("eagle3",),
    "served_by": ("mtp",),
    # mtp is one layer of the target's own shape behind its last
    **dict.fromkeys(
        ("layers", "target_layers", "taps", "intermediate_size", "heads", "kv_heads", "head_dim"),
        ("dflash", "dspark", "dflash2", "eagle3"),
    ),
    **dict.fromkeys(("markov", "markov_rank", "confidence"), ("dspark",)),
    **dict.fromkeys(("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size"), ("dflash2",)),
}


# families whose layers `compile_drafter` compiles: they draft a whole block in one forward
COMPILED = ("dflash", "dspark", "dflash2")


def why_strange(family: str, given: Mapping[str, Any]) -> str | None:
    """Which of these keys means nothing for a family, as a sentence; None where all do.

    Args:
        family: as `drafter.family` spells it.
        given: the drafter section; null = not given.
    """
    for key, families in FAMILY_KEYS.items():
        if given.get(key) is not None and family not in families:
            return f"{key} means nothing for family {family}; it is for {' and '.join(families)}"
    if given.get("markov") == "none" and given.get("markov_rank") is not None:
        return "markov_rank means nothing without a Markov head (markov: none)"
    return None
