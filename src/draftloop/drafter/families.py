"""The families of drafters: one row each. A new one plugs in here, and in `formats` with how it is read and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from draftloop.drafter.dflash import DFlash
from draftloop.drafter.dflash2 import DFlash2, dflash2_spec
from draftloop.drafter.dspark import DSpark, dspark_spec
from draftloop.drafter.eagle3 import Eagle3, eagle3_spec
from draftloop.drafter.mtp import MTP, mtp_spec
from draftloop.drafter.spec import DrafterSpec, dflash_spec
from draftloop.recipe import DrafterPart


@dataclass(frozen=True)
class Family:
    """What makes a family.

    Attributes:
        title: its name in sentences.
        spec_for: the shape that a recipe's drafter section means for a target; an `InputError` where it means none.
        build: spec -> an empty drafter (see `decode.trace.Drafts` for what it must offer).
    """

    title: str
    spec_for: Callable[[DrafterPart, Any], DrafterSpec]
    build: Callable[[Any], Any]


FAMILIES: dict[str, Family] = {
    "dflash": Family("DFlash", dflash_spec, DFlash),
    "eagle3": Family("EAGLE-3", eagle3_spec, Eagle3),
    "mtp": Family("multi-token-prediction", mtp_spec, MTP),
    "dspark": Family("DSpark", dspark_spec, DSpark),
    "dflash2": Family("DFlash 2", dflash2_spec, DFlash2),
}


def spec_for(part: DrafterPart, target: Any) -> DrafterSpec:
    """The shape that a recipe's drafter section means for a target.

    Raises:
        InputError: the section asks for something that the target does not have.
    """
    return FAMILIES[part.family].spec_for(part, target)
