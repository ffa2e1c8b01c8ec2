"""What a drafter borrows of its target: embedding and readout, never its own parameters and never saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from draftloop.core.law import Readout


class Borrower(nn.Module):
    """A drafter that is bound to a target before use."""

    def __init__(self) -> None:
        super().__init__()
        self._borrowed: tuple[Callable[[Tensor], Tensor], Readout] | None = None

    @property
    def weight(self) -> Tensor:
        """One of the weights, for type and device."""
        raise NotImplementedError

    def bind(self, embed: Callable[[Tensor], Tensor], readout: Readout) -> Any:
        """Borrow the target's embedding (ids [...] -> [..., H]) and readout."""
        self._borrowed = (embed, readout)
        return self

    @property
    def readout(self) -> Readout:
        """The target's readout, unless the family has its own."""
        assert self._borrowed is not None, "bind the drafter to a target first"
        return self._borrowed[1]

    def _embedded(self, ids: Tensor) -> Tensor:
        """The target's embedding of ids [...], in the drafter's type: [..., H]."""
        assert self._borrowed is not None, "bind the drafter to a target first"
        return self._own(self._borrowed[0](ids))

    def _own(self, x: Tensor) -> Tensor:
        """What comes from the target, in the drafter's type; under autocast, which chooses for itself, as it is."""
        return x if torch.is_autocast_enabled(x.device.type) else x.to(self.weight.dtype)
