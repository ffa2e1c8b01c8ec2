"""Prompts: what is asked, read from people's files, and split into training, validation and test.

Knows file names and ids. Does not know any chat template, tokenizer or model: a prompt is text until `chat.py` has it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from draftloop.core.errors import InputError
from draftloop.data.builtin import PREFIX, builtin_path
from draftloop.data.rows import kind, read_rows
from draftloop.data.shapes import Message, passed_over, shaped

_SPLIT = "split of prompts"  # sets these draws apart from the epochs' under the same purpose


@dataclass(frozen=True)
class Prompt:
    """One row of a prompt file.

    Attributes:
        id: the row's own `id`, or "file stem:line"; unique over what is read together, and the key of every draw
            made for this prompt.
        set: the prompt set's name, for results per set: the row's own `set`, or the file stem.
        messages: chat messages (`role`, `content`, tool fields as given); the last may be an assistant's answer.
        turns: further user turns, each to be asked after the answer to the one before.
        where: "file:line", for messages.
        tools: tool definitions for the chat template, or None.
    """

    id: str
    set: str
    messages: tuple[Message, ...]
    turns: tuple[str, ...] = ()
    where: str = ""
    tools: tuple[dict[str, Any], ...] | None = None

    @property
    def answered(self) -> bool:
        """Whether the last message is an assistant's answer."""
        return bool(self.messages[-1]["role"] == "assistant")

    @property
    def question(self) -> tuple[Message, ...]:
        """The messages that a model is to answer: all but a final answer."""
        return self.messages[:-1] if self.answered else self.messages

    @property
    def text(self) -> str:
        """All that is asked, as one text (what two splits must not share); a final answer is left out."""
        return "\n".join([*(message["content"] for message in self.question), *self.turns])


def read_prompts(files: Sequence[str], base: Path, limit: int | None = None) -> list[Prompt]:
    """Read prompt files, in order.

    Args:
        files: names relative to `base` (absolute ones and ~ work too), or `builtin:train|validation|test`.
        base: the folder that relative names start from.
        limit: read at most this many prompts, taken evenly from the heads of the files; None = all.

    Returns:
        The prompts. Ids are unique: a repeated one gets #2, #3, ... Two separate calls may give the same id.

    Raises:
        InputError: a file is named twice, or it or a row cannot be used (see `read_rows` and `shaped`); names the file
            and the line.
    """
    paths = [builtin_path(name) if name.startswith(PREFIX) else base / Path(name).expanduser() for name in files]
    places = [path.resolve() for path in paths]
    for i, name in enumerate(files):
        if places[i] in places[:i]:
            raise InputError("the prompt file is named twice", where=name, fix="Name it once: each row counts once.")
    read = [list(islice(_file_prompts(path), limit)) for path in paths]
    counts = _even_shares([len(prompts) for prompts in read], limit)
    return _unique([prompt for prompts, count in zip(read, counts, strict=True) for prompt in prompts[:count]])


def _file_prompts(path: Path) -> Iterator[Prompt]:
    for number, row in read_rows(path):
        where = f"{path}:{number}"
        found = shaped(row, where)
        key, others = passed_over(row)
        if others:
            _tell(path, key, *others)
        name = _name(row, "id", f"{path.stem}:{number}", where)
        group = _name(row, "set", path.stem, where)
        yield Prompt(name, group, found.messages, found.turns, where, found.tools)


@cache  # files are read more than once, and of many rows alike the first is enough
def _tell(path: Path, key: str, *others: str) -> None:
    warnings.warn(f"{path}: rows hold {key} and {' and '.join(others)}; {key} is read", stacklevel=1)


def _name(row: dict[str, Any], key: str, default: str, where: str) -> str:
    value = row.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        given = "empty" if isinstance(value, str) else kind(value)
        raise InputError(f"{key} is {given}", where=where, fix=f"Give the row a text as {key}, or none.")
    return str(value)


def _even_shares(sizes: Sequence[int], limit: int | None) -> list[int]:
    """How many to take from heaps of these sizes, so that the sum is `limit` (or all) and no heap is favoured."""
    if limit is None or sum(sizes) <= limit:
        return list(sizes)
    shares, left = [0] * len(sizes), limit
    while left:
        for index, size in enumerate(sizes):
            if left and shares[index] < size:
                shares[index] += 1
                left -= 1
    return shares


def _unique(prompts: Sequence[Prompt]) -> list[Prompt]:
    taken: set[str] = set()
    counts: dict[str, int] = {}
    out = []
    for prompt in prompts:
        name = prompt.id
        while name in taken:
            counts[prompt.id] = counts.get(prompt.id, 1) + 1
            name = f"{prompt.id}#{counts[prompt.id]}"
        taken.add(name)
        out.append(prompt if name == prompt.id else replace(prompt, id=name))
    return out


def split(
    prompts: Sequence[Prompt], *, validation: int | float, test: int | float, seed: int
) -> tuple[list[Prompt], list[Prompt], list[Prompt]]:
    """Split prompts into (training, validation, test), for when no held-out files are given.

    Which part a prompt falls into is drawn from (seed, its id), never from its place in the list. Prompts with the same
    text (but for case and white space) fall into the same part, so a part can come out a little larger than asked.

    Args:
        prompts: as read.
        validation: how many (an int), or which share (a float in [0, 1)); a share above 0 gives at least one.
        test: the same.
        seed: of the recipe.

    Returns:
        Three lists, each in the order of `prompts`.

    Raises:
        InputError: the prompts do not go round: training, or a part that was asked for, would be empty.
    """
    import torch  # here, for it takes long to import and a wrong prompt file should be told at once

    from draftloop.core.draws import Purpose, bits, key_of

    groups: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(" ".join(prompt.text.casefold().split()), []).append(index)
    heads = [min(prompts[index].id for index in members) for members in groups.values()]
    draws = bits(seed, Purpose.ORDER, key_of(_SPLIT), torch.tensor([key_of(head) for head in heads], dtype=torch.int64))
    order = sorted(zip(draws.tolist(), heads, groups.values(), strict=True))
    waiting = [members for _, _, members in reversed(order)]

    part_of = ["train"] * len(prompts)
    for part, size in (("test", test), ("validation", validation)):
        wanted = size if isinstance(size, int) else max(int(size > 0), round(size * len(prompts)))
        while wanted > 0 and waiting:
            members = waiting.pop()
            wanted -= len(members)
            for index in members:
                part_of[index] = part
    if not waiting:
        raise InputError(
            f"{len(groups)} different prompts are too few to hold out {validation} for validation and {test} for test",
            fix="Give more prompts, or name held-out files in data.validation and data.test.",
        )
    parts = ("train", "validation", "test")
    train, held, last = ([p for p, part in zip(prompts, part_of, strict=True) if part == name] for name in parts)
    return train, held, last
