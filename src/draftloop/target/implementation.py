"""Which attention a Hugging Face model runs, changed for a while without touching the model's code.

Knows transformers' registry of attention implementations. The implementations themselves are in `flex` and `fixed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def attending_by(name: str, configs: Iterable[Any]) -> Iterator[None]:
    """Let every layer that reads one of these configs attend by a registered implementation."""
    before = [(config, config._attn_implementation) for config in {id(one): one for one in configs}.values()]
    try:
        for config, _ in before:
            config._attn_implementation = name
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation
