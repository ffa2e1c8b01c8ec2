"""draftloop trains the draft model behind speculative decoding on its own mistakes and proves decoding lossless.

The typed API; the command line is a thin layer over it. Names are loaded when they are first used, so that
`draftloop --help` does not wait for PyTorch.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

# Before PyTorch is loaded: threads that spin for long while they wait take the cores from whoever has work, which makes
# steps ten times slower on a shared machine; a short spin costs an idle one hardly anything (docs/experiments.md).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from draftloop.api import (
        adapt,
        adapt_recipe,
        audit,
        compare,
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
    "adapt",
    "adapt_recipe",
    "audit",
    "compare",
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


class _Room(ModuleType):
    """A room that has the name of one of the API's functions, and is called as that."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from draftloop import api

        return getattr(api, self.__name__.rpartition(".")[2])(*args, **kwargs)


class _Package(ModuleType):
    """Python binds an imported room (`train`, `evaluate`) here, over the function of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in __all__ and isinstance(value, ModuleType):
            value.__class__ = _Room
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
