"""The prompts that draftloop ships: short questions on maths, code and everyday matters, in three disjoint files.

Knows where they lie. Does not know how a prompt file is read.
"""

from __future__ import annotations

from pathlib import Path

from draftloop.core.errors import InputError

PREFIX = "builtin:"
SPLITS = ("train", "validation", "test")


def builtin_path(name: str) -> Path:
    """Find the shipped prompt file called `name` ("builtin:train", "builtin:validation" or "builtin:test").

    Raises:
        InputError: no such name.
    """
    split = name.removeprefix(PREFIX)
    if split not in SPLITS:
        raise InputError(
            f"{name} is none of the shipped prompt files",
            fix=f"They are {', '.join(PREFIX + known for known in SPLITS)}.",
        )
    return Path(__file__).parent / "prompts" / f"{split}.jsonl"
