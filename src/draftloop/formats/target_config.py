"""Whether a target's folder can be what a drafter was made for, by its config.json alone: engines load it, not we."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from draftloop.drafter.spec import DrafterSpec, check_fits


def check_target_folder(spec: DrafterSpec, target: str) -> None:
    """Refuse a target whose config.json names another hidden size, vocabulary or number of layers.

    Args:
        spec: of the drafter.
        target: a checkpoint folder; a hub id is not asked, nor is what a config.json leaves out.

    Raises:
        InputError: they do not fit.
    """
    try:
        told = json.loads((Path(target) / "config.json").read_text(encoding="utf-8"))
        text = told.get("text_config") or told
    except (OSError, ValueError, AttributeError):
        return

    def of(key: str, ours: int) -> int:
        value = text.get(key)
        return value if isinstance(value, int) else ours

    shape = SimpleNamespace(
        hidden_size=of("hidden_size", spec.hidden_size),
        vocab_size=of("vocab_size", spec.vocab_size),
        num_layers=of("num_hidden_layers", spec.num_target_layers),
    )
    check_fits(spec, shape, target)
