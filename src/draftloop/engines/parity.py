"""Parity: whether an engine, given an export of our drafter, accepts what our own decoding accepts.

Has the engine answer the prompts at batch 1 (`vllm`), walks our drafter over its very text (`compare.replay`), decodes
the same prompts ourselves, and writes one raw row a prompt, temperature and arm. What the rows say is in `verdict`.
With probabilistic drafts the engine's acceptances depend on its own draws, so there is no replay: only independent
decoding is compared.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from draftloop.core.draws import key_of
from draftloop.core.errors import DraftloopError
from draftloop.core.files import write_text, writing_fault
from draftloop.core.law import Sampling
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options, Request
from draftloop.drafter.ngram import NgramSpec
from draftloop.engines.compare import Answer, answers_of, engine_response, faults, first_parting, replay, tie_gap
from draftloop.engines.serve import Engine
from draftloop.engines.vllm import Ask, Job, read_rows, run_job, weights_of
from draftloop.evaluate.tau import Response
from draftloop.evaluate.walk import responses_of
from draftloop.formats.writers import writer_of
from draftloop.supervise.lesson import FeatureStore, Lesson

SCHEMA = 1
FILE = "parity.jsonl"
_SEEDS = 1 << 31  # the engine's seeds are 32-bit

Say = Callable[[int, int], None]


@dataclass(frozen=True)
class Question:
    """One prompt.

    Attributes:
        id: unique within its set.
        set: prompt set.
        ids: its tokens, as the target's chat template renders it.
    """

    id: str
    set: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Setting:
    """How both sides decode.

    Attributes:
        temperatures: each is compared by itself.
        max_new_tokens: length limit.
        draft_sample_method: the engine's; greedy allows the replay.
        seed: of our draws, and with the prompt's id of the engine's.
        batch_size: of our own decoding; the engine answers one prompt at a time.
    """

    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_new_tokens: int = 96
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    seed: int = 0
    batch_size: int = 8


def parity(
    target: Any,
    drafter: Any,
    questions: Sequence[Question],
    engine: Engine,
    *,
    target_folder: str,
    served: Path,
    folder: Path,
    setting: Setting,
    facts: Mapping[str, Any],
    advance: Callable[[str], AbstractContextManager[Say]] = lambda what: nullcontext(lambda done, total: None),
) -> Path:
    """Answer, replay and decode; resumable.

    Args:
        target: a `Target`, in the type that the engine is to serve in.
        drafter: bound, in the same type: what the engine is supposed to serve.
        questions: prompts.
        engine: from `find_engine`.
        target_folder: what the engine loads the target from.
        served: the drafter's folder as the engine reads it; the name of an n-gram lookup.
        folder: for raw rows and the engine's files.
        setting: how both sides decode.
        facts: for the head of the rows: command, versions, hardware.
        advance: given the name of a phase, a context whose value is called with (done, in all).

    Returns:
        the file of raw rows.

    Raises:
        InputError: a prompt does not fit.
        EnvironmentFault: the engine failed.
    """
    longest = max(len(question.ids) for question in questions) + setting.max_new_tokens
    longest += 3 * drafter.spec.block_size  # vLLM stops drafting where two more blocks might not fit
    target.check_length(longest)
    job = Job(
        target_folder,
        str(served.resolve()),
        drafter.spec.drafted,
        setting.draft_sample_method,
        str(target.dtype).removeprefix("torch."),
        setting.max_new_tokens,
        longest,
        tuple(target.eos_ids),
        **_method(drafter.spec),
    )
    asks = {
        (t, q.id, q.set): Ask(f"{q.set}/{q.id}@{t:g}", q.ids, t, key_of(f"{setting.seed}/{q.id}") % _SEEDS)
        for t in setting.temperatures
        for q in questions
    }
    with advance("the engine answers") as say:
        found = run_job(engine, job, list(asks.values()), folder, advance=say)
    named = {ask.name: (id, group, ask.ids) for (_, id, group), ask in asks.items()}
    heads = [row for row in found if row["kind"] == "engine"]
    head = {
        "kind": "run",
        "schema": SCHEMA,
        "target": f"{target.name} ({target.fingerprint})",
        "drafter": weights_of(served) or str(served),
        "dtype": job.dtype,
        "drafted": job.num_speculative_tokens,
        "max_new_tokens": setting.max_new_tokens,
        "draft_sample_method": setting.draft_sample_method,
        "seed": setting.seed,
        "engine": {"name": engine.name, "device": engine.device, "versions": heads[-1]["versions"] if heads else {}},
        **facts,
    }
    book = Book(folder / FILE, head)
    with advance("our drafter on the engine's text, then our own decoding") as say:
        finished = 0

        def done(n: int) -> None:
            nonlocal finished
            finished += n
            say(finished, 2 * len(asks))

        for t in setting.temperatures:
            names = {ask.name for (at, _, _), ask in asks.items() if at == t}
            answers = answers_of([row for row in found if row.get("name") in names], named)
            compare_with(target, drafter, answers, setting, t, book, done)
    return book.path


def _method(spec: Any) -> dict[str, Any]:
    """How a `Job` names the family."""
    if isinstance(spec, NgramSpec):
        return {"method": "ngram", "lookup": (spec.shortest, spec.longest)}
    return {"method": writer_of(spec)[0].method}


def compare_with(
    target: Any,
    drafter: Any,
    answers: Sequence[Answer],
    setting: Setting,
    temperature: float,
    book: Book,
    done: Callable[[int], None] = lambda n: None,
) -> None:
    """Write the rows of every arm at one temperature; the engine is not needed any more.

    Args:
        target: a `Target`.
        drafter: bound, in the target's type.
        answers: of the engine at that temperature.
        setting: as given to the engine.
        temperature: one of the setting's.
        book: where rows go; those that it has are not made again.
        done: called with how many answers more were walked or decoded.
    """
    drafted = drafter.spec.drafted
    for answer in answers:
        if not book.has("engine", temperature, answer):
            wrong = faults(
                answer,
                drafted=drafted,
                max_new_tokens=setting.max_new_tokens,
                eos=target.eos_ids,
                always=not isinstance(drafter.spec, NgramSpec),
            )
            if setting.draft_sample_method == "greedy" and not book.has("replay", temperature, answer):
                found = replay(target, drafter, answer, temperature=temperature)
                book.add(
                    "replay",
                    temperature,
                    found.response,
                    differences=[one.to_json() for one in found.differences],
                    law=None if found.law_sum is None else [found.law_sum, found.law_variance],
                    off_law=[list(pair) for pair in found.off_law],
                )
            book.add(
                "engine",
                temperature,
                _counted(answer, drafted),
                tokens=list(answer.tokens),
                seconds=answer.seconds,
                faults=wrong,
            )
        done(1)
    left = [answer for answer in answers if not book.has("own", temperature, answer)]
    done(len(answers) - len(left))
    for start in range(0, len(left), setting.batch_size):
        part = left[start : start + setting.batch_size]
        options = Options(
            setting.max_new_tokens,
            Sampling(temperature),
            "match" if setting.draft_sample_method == "greedy" else "ratio",
            seed=setting.seed,
            batch_size=setting.batch_size,
        )
        made = decode(target, drafter, [Request(answer.prompt, key_of(answer.id)) for answer in part], options)
        responses = responses_of(made, [(answer.id, answer.set) for answer in part], drafted)
        for answer, one, response in zip(part, made, responses, strict=True):
            parting = None if temperature else _parting(target, answer, one.tokens)
            book.add("own", temperature, response, tokens=list(one.tokens), parting=parting)
        done(len(part))


def _counted(answer: Answer, drafted: int) -> Response:
    """The engine's steps; those that make no sense, which are faults, are left out of tau."""
    try:
        return engine_response(answer, drafted)
    except DraftloopError:
        return Response(answer.id, answer.set, (), (), drafted)


def _parting(target: Any, answer: Answer, ours: Sequence[int]) -> dict[str, Any] | None:
    """Where our greedy text leaves the engine's, and by how little the target decided there."""
    place = first_parting(ours, answer.tokens)
    if place is None:
        return None
    if place >= min(len(ours), len(answer.tokens)):
        return {"position": place, "ours": None, "engine": None, "gap": None, "tie": False}
    store = FeatureStore(target, (0,), 0)
    lesson = Lesson(answer.trunk)
    store.fill([lesson])
    assert lesson.hidden is not None
    at = lesson.trunk.first - 1 + place
    logits = target.readout.logits(lesson.hidden[at : at + 1])[0]
    a, b = ours[place], answer.tokens[place]
    largest = float(logits.max())
    gap = largest - float(torch.minimum(logits[a], logits[b]))
    return {"position": place, "ours": a, "engine": b, "gap": gap, "tie": gap <= tie_gap(target.dtype, largest)}


class Book:
    """The raw rows, appended as they are made; a run with the same head goes on where it was."""

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self.path = path
        rows = read_rows(path)
        same = rows and {**rows[0], "command": ""} == {**json.loads(json.dumps(head)), "command": ""}
        kept = rows if same else [dict(head)]
        self._have = {(row["arm"], row["temperature"], row["set"], row["id"]) for row in kept if "arm" in row}
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))

    def has(self, arm: str, temperature: float, answer: Answer) -> bool:
        """Whether a row is there."""
        return (arm, temperature, answer.set, answer.id) in self._have

    def add(self, arm: str, temperature: float, response: Response, **more: Any) -> None:
        """Append a row."""
        row = {
            "kind": "answer",
            "arm": arm,
            "temperature": temperature,
            "id": response.id,
            "set": response.set,
            "drafted": response.drafted,
            "committed": list(response.committed),
            "accepted": list(response.accepted),
            **more,
        }
        try:
            with open(self.path, "a", encoding="utf-8") as handle:
                handle.write(json.dumps(row) + "\n")
                handle.flush()
                os.fsync(handle.fileno())
        except OSError as error:
            raise writing_fault(error, self.path) from error
        self._have.add((arm, temperature, response.set, response.id))
