"""AdamW over the drafter's trainable parameters: float32 master weights, clipping, a halt before the first bad update.

Knows parameters by name and nothing of the drafter, the loss or the loop. Its whole state goes in and out as named
tensors, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from draftloop.core.errors import InputError
from draftloop.recipe import OptimiserPart

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # torch's names for AdamW's state of one parameter
_EARLY = 10  # up to here a learning rate has seldom done its harm yet


class NotFinite(InputError):
    """The loss or a gradient is NaN or infinite. The weights are those of the step before. Exit status 2."""


class DrafterOptimiser:
    """AdamW (Loshchilov & Hutter, "Decoupled weight decay regularization", 2019) with the recipe's settings.

    Parameters of half precision have float32 masters, which are updated and then rounded into them; others are their
    own masters. Parameters with one dimension or none (biases, norms) have no weight decay.

    Args:
        parameters: (name, parameter) pairs; those that need no gradient are left out.
        part: the stage's optimiser section.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], part: OptimiserPart) -> None:
        self._part = part
        self._parameters = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self._masters = {
            name: nn.Parameter(parameter.detach().float()) if parameter.dtype.itemsize < 4 else parameter
            for name, parameter in self._parameters.items()
        }
        matrices = [master for master in self._masters.values() if master.dim() > 1]
        vectors = [master for master in self._masters.values() if master.dim() <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            groups, lr=part.lr, betas=(part.beta1, part.beta2), weight_decay=part.weight_decay
        )

    def step(self, loss: Tensor | float, factor: float, step: int) -> float:
        """Clip the gradients that `backward` left, update the weights and clear the gradients.

        Args:
            loss: what was differentiated, one number.
            factor: learning rate as a share of the recipe's (schedule.py).
            step: number of this update, for the error message.

        Returns:
            The gradient's 2-norm before clipping.

        Raises:
            NotFinite: the loss or the norm is NaN or infinite; gradients are cleared, weights and moments untouched.
        """
        for name, master in self._masters.items():
            source = self._parameters[name]
            if master is not source:
                master.grad = None if source.grad is None else source.grad.to(master.dtype)
        gradients = {name: master.grad for name, master in self._masters.items() if master.grad is not None}
        norm = torch.nn.utils.get_total_norm(gradients.values())
        size, value = float(norm), float(loss.detach() if isinstance(loss, Tensor) else loss)
        if not (math.isfinite(value) and math.isfinite(size)):
            error = _not_finite(value, size, gradients, step)
            self._clear()
            raise error
        torch.nn.utils.clip_grads_with_norm_(self._masters.values(), self._part.clip, norm)
        for group in self._adamw.param_groups:
            group["lr"] = self._part.lr * factor
        self._adamw.step()
        with torch.no_grad():
            for name, master in self._masters.items():
                if master is not self._parameters[name]:
                    self._parameters[name].copy_(master)
        self._clear()
        return size

    def _clear(self) -> None:
        for parameter in (*self._parameters.values(), *self._masters.values()):
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the state as named tensors (not copies): exp_avg/NAME, exp_avg_sq/NAME, step/NAME, master/NAME.

        A parameter that was never updated has no moments; only parameters of half precision have a master.
        """
        out: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            out |= {f"{key}/{name}": value for key, value in self._adamw.state.get(master, {}).items()}
            if master is not self._parameters[name]:
                out[f"master/{name}"] = master.detach()
        return out

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up the state that `tensors` gave; half-precision parameters become their rounded masters.

        Args:
            tensors: names and shapes of this optimiser's own parameters, on any device.

        Raises:
            InputError: the state belongs to other parameters; nothing is changed then.
        """
        self._check(tensors)
        self._adamw.state.clear()
        with torch.no_grad():
            for name, master in self._masters.items():
                if f"master/{name}" in tensors:
                    master.copy_(tensors[f"master/{name}"])
                    self._parameters[name].copy_(master)
                found = {key: tensors[f"{key}/{name}"] for key in _MOMENTS if f"{key}/{name}" in tensors}
                if found:  # AdamW keeps its step counts on the CPU
                    self._adamw.state[master] = {
                        key: value.clone() if key == "step" else value.to(master.device, copy=True)
                        for key, value in found.items()
                    }

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        masters = {f"master/{name}" for name, master in self._masters.items() if master is not self._parameters[name]}
        known = {f"{key}/{name}" for key in _MOMENTS for name in self._masters} | masters
        wrong = sorted((tensors.keys() - known) | (masters - tensors.keys()))
        for name, master in self._masters.items():
            present = [key for key in _MOMENTS if f"{key}/{name}" in tensors]
            if present and len(present) < len(_MOMENTS):
                wrong.append(f"{present[0]}/{name}")
            for key in ("exp_avg", "exp_avg_sq", "master"):
                if f"{key}/{name}" in tensors and tensors[f"{key}/{name}"].shape != master.shape:
                    wrong.append(f"{key}/{name}")
        if wrong:
            raise InputError(
                f"the optimiser's state is that of another drafter (see {wrong[0]!r})",
                where="checkpoint",
                fix="Resume with the recipe that the run began with.",
            )


def _not_finite(loss: float, norm: float, gradients: Mapping[str, Tensor], step: int) -> NotFinite:
    """Name the step, what is not finite and the likely cause."""
    if not math.isfinite(loss):
        what = f"the loss is {loss}"
    else:
        first = next((name for name, grad in gradients.items() if not bool(grad.isfinite().all())), None)
        what = f"the gradient norm is {norm}" + (f" (first in {first!r})" if first else "")
    if step < _EARLY:
        fix = (
            "So early the numbers themselves overflow, in the target's features or in the loss: "
            "set `precision: float32` and `target.dtype: float32` to see whether it is the precision."
        )
    else:
        fix = "The learning rate is probably too high: lower the stage's `optimiser.lr` or `optimiser.clip` and resume."
    return NotFinite(f"{what}, so nothing was updated", where=f"step {step}", fix=fix)
