"""Rolled-out trunks: the current drafter decodes speculatively, and every verification is recorded.

A rollout can be written to disk and read back bit for bit, so that a resumed run learns from the very same blocks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from draftloop.core.draws import key_of
from draftloop.core.errors import InputError
from draftloop.core.law import Sampling
from draftloop.core.ranks import Ranks
from draftloop.core.weights import read_tensors, write_tensors
from draftloop.data.trunk import Trunk, response_trunk
from draftloop.decode.loop import Decoder, decode
from draftloop.decode.trace import Options, Request, Step
from draftloop.recipe import RolloutPart
from draftloop.supervise.lesson import Lesson, rolled_out

SCHEMA = "1"
_ROWS = ("features", "hidden", "verified")


def requests_of(prompts: Sequence[Trunk], visit: int) -> list[Request]:
    """What is asked of a decoder; `visit` is the sample number of every request."""
    # several answers to one prompt are several prompts here: else they would be rolled out as one and the same text
    return [Request(trunk.prompt, key_of(f"{trunk.id}#{trunk.sample}"), visit) for trunk in prompts]


def options_of(part: RolloutPart, max_new_tokens: int, seed: int) -> Options:
    """How rollouts are decoded."""
    law = Sampling(part.temperature)
    return Options(max_new_tokens, law, part.rule, seed=seed, batch_size=part.batch_size, record=True)


def roll_out(
    target: Any,
    drafter: Any,
    prompts: Sequence[Trunk],
    part: RolloutPart,
    *,
    max_new_tokens: int,
    seed: int,
    visit: int,
    ranks: Ranks | None = None,
    decoder: Decoder | None = None,
) -> list[Lesson]:
    """Decode the prompts of fixed trunks anew with the current drafter.

    Args:
        target: a `Target`.
        drafter: a copy for decoding.
        prompts: trunks whose prompts are used.
        part: temperature, rule, batch size, whether the target's rows are kept.
        max_new_tokens: length limit.
        seed: of the keyed draws.
        visit: how many rollouts came before; the sample number of every request.
        ranks: the processes that share the prompts.
        decoder: one of this target, drafter and `options_of`, with room for these prompts, so that nothing is built
            again; default: one for this call.

    Returns:
        one lesson a prompt of this process's share; responses without a verification are left out.

    Raises:
        InputError: no response of any process was long enough for a block.
    """
    ranks = ranks or Ranks()
    mine = ranks.share(prompts)
    requests, options = requests_of(mine, visit), options_of(part, max_new_tokens, seed)
    results = decode(target, drafter, requests, options) if decoder is None else decoder.decode(requests)
    lessons = []
    for trunk, made in zip(mine, results, strict=True):
        if not made.steps:
            continue
        text = response_trunk(trunk.prompt, made.tokens, trunk.id, trunk.set, visit, made.finished, options.sampling)
        lesson = rolled_out(text, made)
        if part.teacher == "recompute":
            lesson.verified = None
        lessons.append(lesson)
    if not any(ranks.merge([bool(lessons)])):
        raise InputError(
            "no rolled-out response was long enough for a block",
            fix="Raise rollout.max_new_tokens or give other prompts.",
        )
    return lessons


def save_rollout(path: Path, lessons: Sequence[Lesson]) -> None:
    """Write a rollout to one safetensors file (atomic).

    Tokens and steps are tensors too, for the format allows no more than 100 MB of header.
    """
    tensors: dict[str, Tensor] = {}
    rows = []
    for i, lesson in enumerate(lessons):
        for name in _ROWS:
            tensor = getattr(lesson, name)
            if tensor is not None:
                tensors[f"{i}.{name}"] = tensor
        row = lesson.trunk.to_json()
        steps = [(step.anchor, step.accepted, step.committed, *step.proposed) for step in lesson.steps]
        tensors[f"{i}.tokens"] = torch.tensor(row.pop("tokens"), dtype=torch.int64)
        tensors[f"{i}.steps"] = torch.tensor(steps, dtype=torch.int64)
        tensors[f"{i}.log_q"] = torch.tensor([step.log_q for step in lesson.steps], dtype=torch.float64)
        rows.append(row)
    write_tensors(path, tensors, {"schema": SCHEMA, "lessons": json.dumps(rows)})


def load_rollout(path: Path, device: torch.device) -> list[Lesson]:
    """Read a rollout back.

    Raises:
        InputError: the file is missing, broken or no rollout.
    """
    tensors = read_tensors(path)
    with safe_open(path, framework="pt") as handle:
        written = handle.metadata() or {}
    if written.get("schema") != SCHEMA or "lessons" not in written:
        raise InputError(
            f"the file holds no rollout of schema {SCHEMA}", where=str(path), fix="Begin the run anew (--fresh)."
        )
    lessons = []
    for i, row in enumerate(json.loads(written["lessons"])):
        trunk = Trunk.from_json({**row, "tokens": tensors[f"{i}.tokens"].tolist()}, str(path))
        steps = tuple(
            Step(anchor, tuple(proposed), tuple(log_q), accepted, committed)
            for (anchor, accepted, committed, *proposed), log_q in zip(
                tensors[f"{i}.steps"].tolist(), tensors[f"{i}.log_q"].tolist(), strict=True
            )
        )
        parts: dict[str, Any] = {name: tensors[f"{i}.{name}"].to(device) for name in _ROWS if f"{i}.{name}" in tensors}
        lessons.append(Lesson(trunk, steps=steps, **parts))
    return lessons
