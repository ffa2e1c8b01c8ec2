"""Fixed trunks: the target answers prompts (or prompts bring their answers), written down as it goes.

The file is one header line and one answered prompt a line; killed at any moment, the next call goes on from the last
whole line. Knows no drafter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftloop.core.draws import key_of
from draftloop.core.errors import InputError
from draftloop.core.files import fingerprint, write_text, writing_fault
from draftloop.core.law import Sampling
from draftloop.data.chat import answer_text, encode_conversation, encode_turn
from draftloop.data.prompts import Prompt
from draftloop.data.trunk import Trunk, response_trunk, turn_id
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options, Request
from draftloop.recipe import DataPart

SCHEMA = 2


@dataclass(frozen=True)
class Prepared:
    """Trunks of one split.

    Attributes:
        trunks: in the order of the prompts.
        too_long: ids of prompts that were left out because they are longer than `max_prompt_tokens`.
        too_short: ids whose response has fewer than two tokens, so that no block fits.
    """

    trunks: list[Trunk]
    too_long: list[str]
    too_short: list[str]


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
            changed under their id.
        seed: of the keyed draws.
        greedy: answer at temperature 0 with one sample, whatever `data.response` says (held-out splits).
        advance: called with (responses done, responses in all).

    Raises:
        InputError: nothing is left to train on, or the template cannot render a prompt.
    """
    answers = data.response.model_copy(update={"temperature": 0.0, "samples": 1}) if greedy else data.response
    header = {
        "schema": SCHEMA,
        "target": f"{target.fingerprint} in {target.dtype}",
        "template": fingerprint(getattr(target.tokenizer, "chat_template", None), data.template_kwargs),
        "response": fingerprint(answers.model_dump(exclude={"batch_size"}), data.max_prompt_tokens, seed),
    }
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
            taken.append((prompt, 0, [t for t in found if len(t) <= longest]))
    book.add(taken)
    total = len(given) + len(asked) * answers.samples
    work = [(p, s) for p in asked for s in range(answers.samples) if not book.has(p, s)]
    advance(total - len(work), total)
    sampling = Sampling(answers.temperature, answers.top_k, answers.top_p)
    options = Options(answers.max_new_tokens, sampling, seed=seed, batch_size=answers.batch_size)
    for start in range(0, len(work), answers.batch_size):
        _answer(target, work[start : start + answers.batch_size], data, options, book)
        advance(total - len(work) + min(start + answers.batch_size, len(work)), total)
    trunks: list[Trunk] = []
    too_long: list[str] = []
    too_short: list[str] = []
    for prompt in prompts:
        mine = [t for s in range(1 if book.given(prompt) else answers.samples) for t in book.get(prompt, s)]
        if not mine:
            too_long.append(prompt.id)
        for trunk in mine:
            if any(a and b for a, b in zip(trunk.mask, trunk.mask[1:], strict=False)):
                trunks.append(trunk)
            else:
                too_short.append(trunk.id)
    if not trunks:
        raise _nothing_left(path, data, len(too_long), len(too_short))
    return Prepared(trunks, too_long, too_short)


def _nothing_left(path: Path, data: DataPart, long: int, short: int) -> InputError:
    reasons, fixes = [], ["give other prompts."]
    if short:
        reasons.append(f"{short} with a response too short for an anchor")
    if long:
        reasons.insert(0, f"{long} longer than {data.max_prompt_tokens} tokens")
        fixes.insert(0, "raise data.max_prompt_tokens")
    fix = " or ".join(fixes)
    return InputError(f"no prompt is left ({', '.join(reasons)})", where=str(path), fix=fix[0].upper() + fix[1:])


def _answer(target: Any, work: list[tuple[Prompt, int]], data: DataPart, options: Options, book: _Book) -> None:
    """All turns of a batch of prompts, turn by turn; a prompt that grows too long stops there."""
    made: dict[int, list[Trunk]] = {i: [] for i in range(len(work))}
    said: dict[int, list[str]] = {i: [] for i in range(len(work))}
    turn = 0
    while True:
        asking: list[tuple[int, list[int]]] = []
        for i, (prompt, _) in enumerate(work):
            if turn <= len(prompt.turns) and len(said[i]) == turn:
                ids = encode_turn(target.tokenizer, prompt, said[i], template_kwargs=data.template_kwargs)
                if len(ids) <= data.max_prompt_tokens:
                    asking.append((i, ids))
        if not asking:
            break
        requests = [Request(tuple(ids), key_of(turn_id(work[i][0].id, turn)), work[i][1]) for i, ids in asking]
        for (i, ids), made_now in zip(asking, decode(target, None, requests, options), strict=True):
            prompt, sample = work[i]
            name = turn_id(prompt.id, turn)
            made[i].append(response_trunk(ids, made_now.tokens, name, prompt.set, sample, made_now.finished))
            said[i].append(answer_text(target.tokenizer, made_now.tokens, target.eos_ids))
        turn += 1
    book.add([(prompt, sample, made[i]) for i, (prompt, sample) in enumerate(work)])


class _Book:
    """The file of trunks: whole lines only, appended and synced batch by batch."""

    def __init__(self, path: Path, header: dict[str, Any], regenerate: bool) -> None:
        self.path, self.regenerate = path, regenerate
        self._trunks: dict[tuple[str, int, str], list[Trunk]] = {}
        lines = _whole_lines(path)
        if lines and json.loads(lines[0]) == header:
            for number, line in enumerate(lines[1:], start=2):
                row = json.loads(line)
                trunks = [Trunk.from_json(t, f"{path}:{number}") for t in row["trunks"]]
                self._trunks[(row["prompt"], row["sample"], row["asked"])] = trunks
        else:
            lines = [json.dumps(header)]
        write_text(path, "".join(line + "\n" for line in lines))

    def given(self, prompt: Prompt) -> bool:
        """Whether the answer that the prompt carries is taken."""
        return prompt.answered and not self.regenerate

    def _key(self, prompt: Prompt, sample: int) -> tuple[str, int, str]:
        # an id is often no more than file and line: the text says whether it is still the same prompt
        text = prompt.messages if self.given(prompt) else prompt.question
        return prompt.id, sample, fingerprint(text, prompt.turns, prompt.tools)

    def has(self, prompt: Prompt, sample: int) -> bool:
        return self._key(prompt, sample) in self._trunks

    def get(self, prompt: Prompt, sample: int) -> list[Trunk]:
        return self._trunks.get(self._key(prompt, sample), [])

    def add(self, answered: Sequence[tuple[Prompt, int, list[Trunk]]]) -> None:
        lines = []
        for prompt, sample, trunks in answered:
            key = self._key(prompt, sample)
            self._trunks[key] = trunks
            row = {"prompt": key[0], "sample": key[1], "asked": key[2], "trunks": [trunk.to_json() for trunk in trunks]}
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        try:
            with open(self.path, "a", encoding="utf-8") as handle:
                handle.writelines(lines)
                handle.flush()
                os.fsync(handle.fileno())
        except OSError as error:
            raise writing_fault(error, self.path) from error


def _whole_lines(path: Path) -> list[str]:
    """The complete, readable lines of a file; a last one cut by a kill is dropped."""
    if not path.is_file():
        return []
    lines = []
    # not splitlines: a prompt's id may hold U+2028 and the like, which JSON writes as they are
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            json.loads(line)
        except ValueError:
            break
        lines.append(line)
    return lines
