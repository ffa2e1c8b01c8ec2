"""Fixed trunks: the target answers prompts, here or on a server (or they bring their answers), written down as it goes.

The file is one header line and one answered prompt a line; killed at any moment, the next call goes on from the last
whole line. Knows no drafter.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftloop.core.draws import key_of
from draftloop.core.errors import InputError
from draftloop.core.files import fingerprint, write_text, writing_fault
from draftloop.core.law import Sampling
from draftloop.data.chat import encode_conversation
from draftloop.data.prompts import Prompt
from draftloop.data.trunk import Trunk
from draftloop.decode.loop import engine_of, rounds
from draftloop.decode.trace import Generation, Options, Request
from draftloop.recipe import DataPart
from draftloop.supervise.dialogue import Dialogue

SCHEMA = 2
_TOLD = "settings"  # of a header: for people, its fingerprints decide
_HOW = {"batch_size", "server", "server_model", "server_concurrency", "server_key_env"}  # not what is answered


@dataclass(frozen=True)
class Prepared:
    """Trunks of one split.

    Attributes:
        trunks: in the order of the prompts.
        too_long: ids of prompts that were left out because they are longer than `max_prompt_tokens`.
        too_short: ids whose response has fewer than two tokens, so that no block fits.
        refused: ids of prompts with an answer whose tokens could not be confirmed (answers of a server).
    """

    trunks: list[Trunk]
    too_long: list[str]
    too_short: list[str]
    refused: list[str] = field(default_factory=list)


def prepare_trunks(
    target: Any,
    prompts: Sequence[Prompt],
    data: DataPart,
    path: Path,
    *,
    seed: int = 0,
    greedy: bool = False,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Prepared:
    """Answer the prompts (or take the answers they carry) and write the trunks to `path`.

    Args:
        target: a `Target` with a tokenizer.
        prompts: of one split.
        data: template arguments, limits, response options.
        path: JSON lines; an existing file of the same target and options is continued, but for prompts whose text has
            changed under their id. One of others is kept beside it, and taken up when they return.
        seed: of the keyed draws.
        greedy: answer at temperature 0 with one sample, whatever `data.response` says (held-out splits).
        advance: called with (responses done, responses in all).

    Warns:
        UserWarning: the file holds answers of another target or of other options.

    Raises:
        InputError: nothing is left to train on, the template cannot render a prompt, or the server is not the target's.
        EnvironmentFault: the server that answers is gone; the answers so far are kept.
    """
    answers = data.response.model_copy(update={"temperature": 0.0, "samples": 1}) if greedy else data.response
    header = {
        "schema": SCHEMA,
        "target": f"{target.fingerprint} in {target.dtype}",
        "template": fingerprint(getattr(target.tokenizer, "chat_template", None), data.template_kwargs),
        "response": fingerprint(answers.model_dump(exclude=_HOW), data.max_prompt_tokens, seed),
    }
    if answers.server is not None:
        header["by"] = "a server"  # which one does not matter: it is the same target, and may move
    settings = {**answers.model_dump(exclude=_HOW), "max_prompt_tokens": data.max_prompt_tokens, "seed": seed}
    header[_TOLD] = {**settings, "template_kwargs": data.template_kwargs}
    book = _Book(path, header, answers.regenerate)
    given = [p for p in prompts if book.given(p)]
    asked = [p for p in prompts if not book.given(p)]
    taken = []
    for prompt in given:
        if not book.has(prompt, 0):
            found = encode_conversation(
                target.tokenizer, prompt, template_kwargs=data.template_kwargs, eos_ids=target.eos_ids
            )
            longest = data.max_prompt_tokens + answers.max_new_tokens
            taken.append(Dialogue(prompt, 0, [t for t in found if len(t) <= longest]))
    book.add(taken)
    total = len(given) + len(asked) * answers.samples
    sampling = Sampling(answers.temperature, answers.top_k, answers.top_p)
    work = [Dialogue(p, s, drawn=sampling) for p in asked for s in range(answers.samples) if not book.has(p, s)]
    left = len(work)
    advance(total - left, total)

    def keep(answered: Sequence[Dialogue]) -> None:
        nonlocal left
        book.add(answered)
        left -= len(answered)
        advance(total - left, total)

    if answers.server is not None:
        if work:
            from draftloop.supervise.answers import answer_by_server  # brings an HTTP client, seldom needed

            answer_by_server(target, work, data, answers, seed, lambda dialogue: keep([dialogue]))
    else:
        options = Options(answers.max_new_tokens, sampling, seed=seed, batch_size=answers.batch_size)
        # rows that end are refilled where the engine can, so it gets all the work; else a batch at a time
        size = answers.batch_size if engine_of(target, None, options) == "eager" else max(len(work), 1)
        for start in range(0, len(work), size):
            _answer(target, work[start : start + size], data, options, keep)
    return _prepared(prompts, data, answers.samples, book)


def read_trunks(path: Path) -> list[Trunk]:
    """The trunks of a file that `prepare_trunks` wrote, as far as it is written; nothing is locked.

    Raises:
        InputError: there is no such file, or it is of another kind.
    """
    fix = "Give trunks/train.jsonl of a run directory; `draftloop prepare` writes it."
    if not path.is_file():
        raise InputError("there is no file of answers", where=str(path), fix=fix)
    lines = _lines(path)
    head = _parsed(lines[0]) if lines else None
    if not isinstance(head, dict) or head.get("schema") != SCHEMA or "response" not in head:
        raise InputError("this is no file of answers", where=str(path), fix=fix)
    answers = _answers(path, lines, "left out; `draftloop prepare` answers anew what it held")
    return [trunk for one in answers for trunk in one.kept.trunks]


def _prepared(prompts: Sequence[Prompt], data: DataPart, samples: int, book: _Book) -> Prepared:
    """What the book holds for the prompts, in their order."""
    trunks: list[Trunk] = []
    too_long: list[str] = []
    too_short: list[str] = []
    refused: dict[str, str] = {}
    for prompt in prompts:
        answers = [book.get(prompt, s) for s in range(1 if book.given(prompt) else samples)]
        mine = [trunk for answer in answers for trunk in answer.trunks]
        if why := next((answer.refused for answer in answers if answer.refused), ""):
            refused[prompt.id] = why
        elif not mine:
            too_long.append(prompt.id)
        for trunk in mine:
            if any(a and b for a, b in zip(trunk.mask, trunk.mask[1:], strict=False)):
                trunks.append(trunk)
            else:
                too_short.append(trunk.id)
    if not trunks:
        raise _nothing_left(book.path, data, len(too_long), len(too_short), len(refused))
    if refused:
        first, why = next(iter(refused.items()))
        warnings.warn(f"{len(refused)} prompts have an answer that was refused ({first}: {why}).", stacklevel=3)
    return Prepared(trunks, too_long, too_short, list(refused))


def _nothing_left(path: Path, data: DataPart, long: int, short: int, refused: int) -> InputError:
    reasons, fixes = [], ["give other prompts."]
    if refused:
        reasons.append(f"{refused} with tokens that could not be confirmed")
        fixes.insert(0, "use a server that returns token ids")
    if short:
        reasons.append(f"{short} with a response too short for an anchor")
    if long:
        reasons.insert(0, f"{long} longer than {data.max_prompt_tokens} tokens")
        fixes.insert(0, "raise data.max_prompt_tokens")
    fix = " or ".join(fixes)
    return InputError(f"no prompt is left ({', '.join(reasons)})", where=str(path), fix=fix[0].upper() + fix[1:])


def _answer(
    target: Any,
    work: Sequence[Dialogue],
    data: DataPart,
    options: Options,
    keep: Callable[[Sequence[Dialogue]], None],
) -> None:
    """All turns of these prompts by our own target, turn by turn; what is answered is kept a batch at a time."""
    place = {id(one): i for i, one in enumerate(work)}
    ready: list[Dialogue] = []
    left = list(work)
    while left:
        asking: list[tuple[Dialogue, list[int]]] = []
        for one in left:
            ids = one.ask(target, data)
            if ids is None:
                ready.append(one)
            else:
                asking.append((one, ids))
        requests = [Request(tuple(ids), key_of(one.name), one.sample) for one, ids in asking]
        results = [Generation(request.ids) for request in requests]
        left = []
        for commits in rounds(target, None, requests, options, results):
            for commit in commits:
                if commit.done:
                    one, ids = asking[commit.index]
                    one.take(target, ids, results[commit.index].tokens, results[commit.index].finished)
                    (left if one.open else ready).append(one)
            if len(ready) >= options.batch_size:
                keep(sorted(ready, key=lambda one: place[id(one)]))
                ready = []
        left.sort(key=lambda one: place[id(one)])
    if ready:
        keep(sorted(ready, key=lambda one: place[id(one)]))


@dataclass(frozen=True)
class Kept:
    """What the book holds of one answered prompt: its trunks, and why one more was refused."""

    trunks: list[Trunk]
    refused: str = ""


class _Book:
    """The file of trunks: whole lines only, appended and synced batch by batch.

    Warns:
        UserWarning: a line in its midst is damaged, or the header is. What the others hold is kept.
    """

    def __init__(self, path: Path, header: dict[str, Any], regenerate: bool) -> None:
        self.path, self.regenerate = path, regenerate
        self._kept: dict[tuple[str, int, str], Kept] = {}
        lines = _lines(path)
        if lines and _identity(_parsed(lines[0])) != _identity(header):
            lines = _exchange(path, lines, header)
        answers = _answers(path, lines, "dropped, and what it held is answered anew")
        self._kept |= {one.key: one.kept for one in answers}
        whole = [lines[0] if lines else json.dumps(header), *(one.line for one in answers)]
        write_text(path, "".join(line + "\n" for line in whole))

    def given(self, prompt: Prompt) -> bool:
        """Whether the answer that the prompt carries is taken."""
        return prompt.answered and not self.regenerate

    def _key(self, prompt: Prompt, sample: int) -> tuple[str, int, str]:
        # an id is often no more than file and line: the text says whether it is still the same prompt
        text = prompt.messages if self.given(prompt) else prompt.question
        return prompt.id, sample, fingerprint(text, prompt.turns, prompt.tools)

    def has(self, prompt: Prompt, sample: int) -> bool:
        return self._key(prompt, sample) in self._kept

    def get(self, prompt: Prompt, sample: int) -> Kept:
        return self._kept.get(self._key(prompt, sample), Kept([]))

    def add(self, answered: Sequence[Dialogue]) -> None:
        lines = []
        for one in answered:
            key = self._key(one.prompt, one.sample)
            self._kept[key] = Kept(one.trunks, one.refused)
            trunks = [trunk.to_json() for trunk in one.trunks]
            row = {"prompt": key[0], "sample": key[1], "asked": key[2], "trunks": trunks}
            if one.refused:
                row["refused"] = one.refused
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        try:
            with open(self.path, "a", encoding="utf-8") as handle:
                handle.writelines(lines)
                handle.flush()
                os.fsync(handle.fileno())
        except OSError as error:
            raise writing_fault(error, self.path) from error


@dataclass(frozen=True)
class _Answer:
    """A line below the header: as it stands there, whose answer it is, and the answer."""

    line: str
    key: tuple[str, int, str]
    kept: Kept


def _answers(path: Path, lines: list[str], fate: str) -> list[_Answer]:
    """What stands below the header of a file; damaged lines are named with their `fate`, in one warning."""
    found, damaged = [], []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            key = str(row["prompt"]), int(row["sample"]), str(row["asked"])
            trunks = [Trunk.from_json(trunk, f"{path}:{number}") for trunk in row["trunks"]]
            found.append(_Answer(line, key, Kept(trunks, str(row.get("refused", "")))))
        except (AttributeError, KeyError, TypeError, ValueError, InputError):
            damaged.append(number)
    if damaged:
        more = f" (and {len(damaged) - 1} more below)" if damaged[1:] else ""
        warnings.warn(f"{path}:{damaged[0]}: this line is damaged{more} and {fate}.", stacklevel=4)
    return found


def _parsed(line: str) -> Any:
    """What a line says; None where it is damaged."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _identity(header: Any) -> dict[str, Any]:
    """What must be the same for a file to be continued."""
    return {key: value for key, value in header.items() if key != _TOLD} if isinstance(header, dict) else {}


def _exchange(path: Path, lines: list[str], new: dict[str, Any]) -> list[str]:
    """Move a file of other answers aside, and the one that was put aside for these in its place; its lines."""
    old, answered = _parsed(lines[0]), len(lines) > 1
    aside, before = (path.with_name(f"{path.stem}-{fingerprint(_identity(one))}.jsonl") for one in (old, new))
    try:
        if answered:
            os.replace(path, aside)
        else:
            path.unlink()
        if before.exists():
            os.replace(before, path)
    except OSError as error:
        raise writing_fault(error, path) from error
    lines = _lines(path)
    if not answered:
        return lines
    why = "of unknown settings, since its first line is damaged,"
    if isinstance(old, dict):
        why = f"of other settings ({'; '.join(_differences(old, new))})"
    warnings.warn(
        f"{path}: its answers are {why} and are kept as {aside.name};"
        + (" those given before with the present ones are taken up." if lines else " the prompts are answered anew."),
        stacklevel=5,
    )
    return lines


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What two headers differ in, for people."""
    before, now = old.get(_TOLD) or {}, new[_TOLD]
    said = [f"{key}: {before[key]}, now {now[key]}" for key in now if key in before and before[key] != now[key]]
    if old.get("target") != new["target"]:
        said.append(f"target: {old.get('target')}, now {new['target']}")
    return said or [f"another {key}" for key in _identity(new) if old.get(key) != new[key]]


def _lines(path: Path) -> list[str]:
    """The lines of a file; a last one cut by a kill is dropped."""
    if not path.is_file():
        return []
    # not splitlines: a prompt's id may hold U+2028 and the like, which JSON writes as they are
    *lines, last = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return lines if _parsed(last) is None else [*lines, last]
