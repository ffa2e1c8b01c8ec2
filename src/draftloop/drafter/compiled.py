"""The drafter's layers compiled for training: norms, projections and MLP in few kernels, forward and backward.

One compilation serves all layers and all lengths. Attention on CUDA stays FlexAttention, which is compiled by itself.
Decoding is not touched: its engines compile what they replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from draftloop.core.errors import EnvironmentFault, InputError
from draftloop.core.flex import many_compilations
from draftloop.recipe_families import COMPILED


def compile_layers(drafter: Any, backend: str = "inductor") -> None:
    """Have the packed forward of a block-parallel drafter run its layers compiled, to the same numbers but rounding.

    Args:
        drafter: of DFlash or a family built on it.
        backend: of `torch.compile`.

    Raises:
        InputError: another family, whose layers are called token by token.
    """
    if drafter.spec.family not in COMPILED:
        raise InputError(
            f"the layers of family {drafter.spec.family} are called slot by slot and are not compiled",
            where="compile_drafter",
            fix="Leave it out.",
        )
    many_compilations()
    drafter.__dict__["through"] = torch.compile(drafter.through, dynamic=True, backend=backend)


@contextmanager
def compiling(where: str) -> Iterator[None]:
    """Say in a sentence that a compilation failed; layers compile when they are first called, and once more backwards.

    Raises:
        EnvironmentFault: it did.
    """
    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as error:
        what = next(iter(str(error).strip().splitlines()), "")[:200]
        raise EnvironmentFault(
            f"the drafter cannot be compiled ({type(error).__name__}: {what})",
            where=where,
            fix="Set compile_drafter: false; attention on a GPU is compiled all the same, and needs a C compiler.",
        ) from error
