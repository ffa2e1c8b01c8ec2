"""draftloop trains the draft model behind speculative decoding on its own mistakes and proves decoding lossless.

The typed API; the command line is a thin layer over it. Names are loaded when they are first used, so that
`draftloop --help` does not wait for PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftloop.api import (
        audit,
        evaluate,
        generate,
        generate_stream,
        load_drafter,
        load_recipe,
        load_target,
        prepare,
        save_drafter,
        train,
    )

__all__ = [
    "audit",
    "evaluate",
    "generate",
    "generate_stream",
    "load_drafter",
    "load_recipe",
    "load_target",
    "prepare",
    "save_drafter",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from draftloop import api

        return getattr(api, name)
    raise AttributeError(f"module 'draftloop' has no attribute {name!r}")
