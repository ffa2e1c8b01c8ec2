"""Chat: messages to token ids through the target's chat template, with the loss mask on the assistant's tokens.

Knows turns and their answers; how a template is run is in `template.py`. Does not know where messages come from, nor
any model.

The mask comes from prefix difference: what the template renders for messages[:i] with a generation prompt must be how
it begins once message i, the answer, is there; the answer is the rest, up to its end-of-sequence token. It never comes
from token values: padding and end-of-sequence are often the same token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from draftloop.core.errors import InputError
from draftloop.data.prompts import Prompt
from draftloop.data.shapes import Message
from draftloop.data.template import Tokenizer, check_heard, render, token_ids
from draftloop.data.trunk import Trunk, turn_id

_REGENERATE = "Set data.response.regenerate: true, so that the target writes the answers itself."


def encode_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    template_kwargs: Mapping[str, Any],
    tools: Sequence[dict[str, Any]] | None = None,
) -> list[int]:
    """Token ids that the target is prompted with: the messages and the template's generation prompt.

    Args:
        tokenizer: the target's, with a chat template.
        messages: chat messages, the last one not an assistant's.
        template_kwargs: passed to the template, e.g. {"enable_thinking": False}.
        tools: tool definitions for the template.

    Raises:
        InputError: there is no chat template, or it refuses the messages.
    """
    text = render(tokenizer, messages, template_kwargs, tools, prompting=True)
    check_heard(tokenizer, messages, template_kwargs, tools)
    return token_ids(tokenizer, text)


def encode_turn(
    tokenizer: Tokenizer, prompt: Prompt, answers: Sequence[str], *, template_kwargs: Mapping[str, Any]
) -> list[int]:
    """Token ids that the target is prompted with for the next turn of a prompt.

    The answers so far go through the template as history, as an engine would have it; the trunk of a turn that was
    generated is made of the generated tokens (`response_trunk`), never of this.

    Args:
        tokenizer: the target's.
        prompt: with `turns`.
        answers: generated answers so far (see `answer_text`), one for each turn asked; none = the first turn.
        template_kwargs: passed to the template.

    Raises:
        InputError: there is no turn left to ask, or as in `encode_prompt`.
    """
    if len(answers) > len(prompt.turns):
        raise InputError(f"all {len(prompt.turns) + 1} turns have been answered", where=prompt.where or prompt.id)
    messages = list(prompt.question)
    for answer, turn in zip(answers, prompt.turns, strict=False):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    with _at(prompt):
        return encode_prompt(tokenizer, messages, template_kwargs=template_kwargs, tools=prompt.tools)


def answer_text(tokenizer: Tokenizer, response_ids: Sequence[int], eos_ids: Collection[int]) -> str:
    """Decode a generated answer, up to its end-of-sequence token, special tokens left out."""
    end = next((at for at, token in enumerate(response_ids) if token in eos_ids), len(response_ids))
    return str(tokenizer.decode(list(response_ids[:end]), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def encode_conversation(
    tokenizer: Tokenizer, prompt: Prompt, *, template_kwargs: Mapping[str, Any], eos_ids: Collection[int]
) -> list[Trunk]:
    """Trunks of a conversation that carries its answers, for training without regenerating them.

    One trunk with every answer supervised, where each answer stands in the whole conversation just as it stood when it
    was given. Where it does not (templates that strip earlier thinking, tokens that merge over a boundary), one trunk
    for each answer instead, behind the prompt as an engine would have seen it. Trunks end with their last answer.

    Args:
        tokenizer: the target's.
        prompt: with at least one assistant message.
        template_kwargs: passed to the template.
        eos_ids: the target's end-of-sequence tokens; the first one after an answer is supervised, what the template
            puts behind it is not. What the template writes between its generation prompt and the answer (an empty
            think block) is supervised: the target would have to write it.

    Raises:
        InputError: no answer, an answer that cannot be told from its prompt, or a template without end-of-sequence.
    """
    replies = [index for index, message in enumerate(prompt.messages) if message["role"] == "assistant"]
    if not replies:
        raise InputError("the prompt carries no answer", where=prompt.where or prompt.id, fix=_REGENERATE)
    with _at(prompt):
        text = render(tokenizer, prompt.messages, template_kwargs, prompt.tools, prompting=not prompt.answered)
        check_heard(tokenizer, prompt.messages, template_kwargs, prompt.tools)
        pairs = [_turn(tokenizer, prompt, index, template_kwargs, eos_ids) for index in replies]
    whole = token_ids(tokenizer, text)
    mask = [False] * len(whole)
    for asked, answer in pairs:
        start, end = len(asked), len(asked) + len(answer)
        if whole[:end] != asked + answer:
            return [
                Trunk(turn_id(prompt.id, turn), prompt.set, 0, (*q, *a), (False,) * len(q) + (True,) * len(a), True)
                for turn, (q, a) in enumerate(pairs)
            ]
        mask[start:end] = [True] * (end - start)
    end = len(pairs[-1][0]) + len(pairs[-1][1])
    return [Trunk(prompt.id, prompt.set, 0, tuple(whole[:end]), tuple(mask[:end]), True)]


@contextlib.contextmanager
def _at(prompt: Prompt) -> Iterator[None]:
    """Add the prompt's file and line to an error raised where only its messages were known."""
    try:
        yield
    except InputError as error:
        raise InputError(error.what, where=error.where or prompt.where or prompt.id, fix=error.fix) from error


def _turn(
    tokenizer: Tokenizer,
    prompt: Prompt,
    index: int,
    template_kwargs: Mapping[str, Any],
    eos_ids: Collection[int],
) -> tuple[list[int], list[int]]:
    """Return the tokens before message `index`, as an engine would see them, and its own, end-of-sequence included."""
    history, message = prompt.messages[:index], prompt.messages[index]
    if any(token in eos_ids for token in token_ids(tokenizer, message["content"])):
        raise InputError(
            f"the answer in message {index + 1} holds an end-of-sequence token", fix="Take it out of the text."
        )
    before = render(tokenizer, history, template_kwargs, prompt.tools, prompting=True)
    after = render(tokenizer, (*history, message), template_kwargs, prompt.tools, prompting=False)
    rest = after.removeprefix(before)
    headless = not message.get("tool_calls") and not rest.strip().startswith(message["content"].strip())
    if headless:  # something stands before the answer: fine (an empty think block), unless it is the answer's header
        headless = before == render(tokenizer, history, template_kwargs, prompt.tools, prompting=False)
    if rest == after or headless:
        raise InputError(
            f"the chat template writes message {index + 1} in a way that does not continue its own generation prompt, "
            "so the answer's tokens cannot be told from the prompt's",
            fix=_REGENERATE,
        )
    asked, both = token_ids(tokenizer, before), token_ids(tokenizer, after)
    answer = both[len(asked) :]
    if both[: len(asked)] != asked:  # a token spans the boundary; an engine that continues `asked` cannot produce it
        answer = token_ids(tokenizer, rest)
        if _text(tokenizer, asked + answer) != _text(tokenizer, both):
            raise InputError(
                f"the tokenizer cannot split message {index + 1} where the generation prompt ends", fix=_REGENERATE
            )
    end = next((at for at, token in enumerate(answer) if token in eos_ids), None)
    if end is None:
        raise InputError(
            f"the chat template ends message {index + 1} with none of the target's end-of-sequence tokens "
            f"({', '.join(map(str, sorted(eos_ids))) or 'it has none'})",
            fix="Check eos_token_id in the target's generation_config.json.",
        )
    return asked, answer[: end + 1]


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
