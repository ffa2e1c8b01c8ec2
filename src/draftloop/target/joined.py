"""Linear layers that read the same input, computed as one matrix product while layers run compiled.

With few rows a product costs its launch, however many columns it has, so queries, keys and values are computed by one,
and so are gate and up. The model is not changed: the joined weights are a copy, taken anew whenever decoding begins
(`refresh`), so nothing can go stale that a trainer, a loader or another engine does to the model's own. That costs
memory, and is done for small models alone, where launches are the bound. Knows no cache and no loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftloop.core.errors import InputError

_READ_THE_SAME = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
AT_MOST = 1 << 30  # bytes of the copies; reading more takes longer than the launches that are saved


class _Product:
    """The joined weights, and during a forward the product that not all parts have taken yet.

    Attributes:
        weight: [sum of outputs, inputs].
        bias: [sum of outputs] or None.
        parts: how many layers are joined.
        x, y: the input that was multiplied and what came of it; None between forwards.
        left: how many parts have not taken theirs.
    """

    def __init__(self, linears: list[nn.Linear]) -> None:
        wide = sum(one.out_features for one in linears)
        self.weight = linears[0].weight.detach().new_empty(wide, linears[0].in_features)
        self.bias = None if linears[0].bias is None else linears[0].bias.detach().new_empty(wide)
        self.parts = len(linears)
        self.x: Tensor | None = None
        self.y: Tensor | None = None
        self.left = 0


class _Part(nn.Module):
    """Stands in the place of one of the linear layers."""

    def __init__(self, product: _Product, first: int, last: int) -> None:
        super().__init__()
        self.product, self.first, self.last = product, first, last

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]; the first part of those given the same tensor multiplies for all."""
        product = self.product
        if product.x is not x:
            product.x, product.y = x, F.linear(x, product.weight, product.bias)
            product.left = product.parts
        y = product.y
        assert y is not None
        product.left -= 1
        if not product.left:  # else a compiler would hand them out of the layer
            product.x = product.y = None
        return y[..., self.first : self.last].contiguous()  # no copy once it is compiled: what follows reads through it


class Joined:
    """All that can be joined in some decoder layers.

    Args:
        layers: of the target.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._places = list(_places(layers))
        self._products: list[_Product] = []
        self._parts: list[tuple[_Part, ...]] = []
        for owner, names in self._places:
            linears = [getattr(owner, name) for name in names]
            product, parts, first = _Product(linears), [], 0
            for one in linears:
                parts.append(_Part(product, first, first + one.out_features))
                first += one.out_features
            self._products.append(product)
            self._parts.append(tuple(parts))
        self.refresh()

    def __len__(self) -> int:
        """How many products there are."""
        return len(self._products)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the layers' weights as they are now, in a launch or two; the copies keep their place in memory.

        Raises:
            InputError: a layer is no longer what it was when it was joined.
        """
        to: list[Tensor] = []
        new: list[Tensor] = []
        for (owner, names), product, parts in zip(self._places, self._products, self._parts, strict=True):
            for name, part in zip(names, parts, strict=True):
                one: Any = getattr(owner, name, None)
                for mine, theirs in ((product.weight, "weight"), (product.bias, "bias")):
                    source = getattr(one, theirs, None)
                    if (source is None) != (mine is None) or not _plain(one):
                        raise _changed(name)
                    if mine is None or source is None:
                        continue
                    place, source = mine[part.first : part.last], source.detach()
                    if (place.shape, place.dtype, place.device) != (source.shape, source.dtype, source.device):
                        raise _changed(name)
                    to.append(place)
                    new.append(source)
        if to:
            torch._foreach_copy_(to, new)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the layers compute by the joined weights for a while."""
        own = [{name: owner._modules[name] for name in names} for owner, names in self._places]
        try:
            for (owner, names), parts in zip(self._places, self._parts, strict=True):
                owner._modules.update(zip(names, parts, strict=True))
            yield
        finally:
            for (owner, _), modules in zip(self._places, own, strict=True):
                owner._modules.update(modules)
            for product in self._products:  # after a forward that failed halfway
                product.x = product.y = None


def joined_bytes(layers: Iterable[nn.Module]) -> int:
    """What the copies of a `Joined` of these layers weigh."""
    return sum(getattr(owner, name).weight.nbytes for owner, names in _places(layers) for name in names)


def _places(layers: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """Modules and the names of their linear layers that can be joined."""
    for layer in layers:
        for path, module in layer.named_modules():
            if any(part.isdigit() for part in path.split(".")):
                continue  # experts, of which a token visits a few
            for names in _READ_THE_SAME:
                linears: list[Any] = [module._modules.get(name) for name in names]
                if all(_plain(one) for one in linears) and len({_kind(one) for one in linears}) == 1:
                    yield module, names


def _plain(module: Any) -> bool:
    """Whether it is a linear layer and nothing more: not quantised, adapted, hooked or patched."""
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)
        and not (module._forward_hooks or module._forward_pre_hooks)
        and type(module.weight) in (nn.Parameter, Tensor)
        and not module.weight.is_meta
    )


def _kind(linear: nn.Linear) -> tuple[Any, ...]:
    """What layers must have in common to be one product."""
    return linear.in_features, linear.bias is None, linear.weight.dtype, linear.weight.device


def _changed(name: str) -> InputError:
    return InputError(
        f"the target's {name} has another shape or type than when the engine was built",
        fix="Build the engine anew after the model was changed.",
    )
