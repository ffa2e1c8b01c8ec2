"""How each family's checkpoints are written: which tensors, and config.json in each form. `load.READERS` reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftloop.core.errors import InputError
from draftloop.drafter.spec import DrafterSpec
from draftloop.formats import dflash2_config, dspark, eagle3, eagle3_tensors, mtp, speculators, zlab_config
from draftloop.formats.facts import Facts
from draftloop.formats.tensors import tensors_of


@dataclass(frozen=True)
class Writer:
    """How a family is written.

    Attributes:
        tensors: (drafter, dtype, folder for errors) -> published tensors by name, and the learned mask vector or None.
        configs: (spec, facts) -> config.json, for each form; the first is what `save_drafter` writes.
        method: what vLLM calls the family (`speculative_config.method`).
        renamed: for a form that names tensors otherwise, how a name begins there and in `tensors`.
    """

    tensors: Callable[[Any, torch.dtype, Path], tuple[dict[str, Tensor], Tensor | None]]
    configs: dict[str, Callable[[Any, Facts], dict[str, Any]]]
    method: str
    renamed: dict[str, tuple[str, str]] = field(default_factory=dict)

    def named(self, form: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as the form names them."""
        theirs, ours = self.renamed.get(form, ("", ""))
        return {theirs + n.removeprefix(ours) if n.startswith(ours) else n: t for n, t in tensors.items()}


WRITERS: dict[str, Writer] = {
    "dflash": Writer(tensors_of, {"zlab": zlab_config.config_of, "speculators": speculators.config_of}, "dflash"),
    "eagle3": Writer(
        eagle3_tensors.tensors_of,
        {eagle3.FORM: eagle3.config_of, "speculators": eagle3.speculators_of},
        "eagle3",
        {eagle3.FORM: eagle3_tensors.OLD},
    ),
    "mtp": Writer(mtp.tensors_of, {"mtp": mtp.config_of}, "mtp"),
    "dspark": Writer(tensors_of, {"deepspec": dspark.config_of, "speculators": dspark.speculators_of}, "dspark"),
    "dflash2": Writer(
        tensors_of, {"zlab": dflash2_config.zlab_of, "speculators": dflash2_config.speculators_of}, "dflash"
    ),
}


def writer_of(spec: DrafterSpec, form: str | None = None) -> tuple[Writer, str]:
    """Who writes this family, and the form: its first one where none is named.

    Raises:
        InputError: the family cannot be written, or has no such form.
    """
    writer = WRITERS.get(spec.family)
    if writer is None:
        raise InputError(
            f"a drafter of family {spec.family} has no checkpoint form", fix=f"Use one of {', '.join(WRITERS)}."
        )
    form = form or next(iter(writer.configs))
    if form not in writer.configs:
        raise InputError(
            f"a drafter of family {spec.family} has no form {form!r}",
            where="--form",
            fix=f"Use {' or '.join(writer.configs)}.",
        )
    return writer, form
