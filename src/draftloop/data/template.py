"""Running a chat template: messages to text, text to token ids, and the proof that nothing said was left out.

Knows chat templates and tokenizers (one is passed in). Does not know answers, masks or models.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jinja2 import TemplateError

from draftloop.core.errors import InputError
from draftloop.data.shapes import Message

_OURS = (  # arguments of apply_chat_template that are no business of a recipe's template_kwargs
    "conversation", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "sanitize_control_tokens",
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)  # fmt: skip
# A template is a program of the target's author: it may fail in any of the ways that Python expressions do.
_TEMPLATE_FAULTS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: Any

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Messages to text (tokenize=False)."""

    def __call__(self, text: Any, **kwargs: Any) -> Any:
        """Text to a BatchEncoding."""

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        """Token ids to text."""


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    template_kwargs: Mapping[str, Any],
    tools: Sequence[dict[str, Any]] | None,
    *,
    prompting: bool,
) -> str:
    """Run the chat template on the messages.

    Args:
        tokenizer: with a chat template.
        messages: chat messages.
        template_kwargs: passed to the template.
        tools: tool definitions for the template.
        prompting: end with the generation prompt, the beginning of an answer.

    Raises:
        InputError: no chat template, a reserved name in `template_kwargs`, or the template fails or refuses.
    """
    if not tokenizer.chat_template:
        raise InputError(
            "the target's tokenizer has no chat template",
            fix="Use an instruction-tuned target, or put a chat_template.jinja into its directory.",
        )
    if reserved := sorted(set(template_kwargs) & set(_OURS)):
        raise InputError(f"{reserved[0]} is set by draftloop", where="data.template_kwargs", fix="Take it out.")
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) if tools else None,
            add_generation_prompt=prompting,
            tokenize=False,
            **template_kwargs,
        )
    except _TEMPLATE_FAULTS as error:
        reason = (str(error) or type(error).__name__).strip().split("\n")[0].rstrip(".")
        raise InputError(
            f"the chat template does not take the conversation ({reason})",
            fix="Change the messages, or data.template_kwargs, to what the target's template accepts.",
        ) from error
    return str(text)


def token_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenise a text that already holds its special tokens; none is added, nothing is cut off."""
    return [int(token) for token in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


def check_heard(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    template_kwargs: Mapping[str, Any],
    tools: Sequence[dict[str, Any]] | None,
) -> None:
    """Refuse a template that drops system or tool messages, tool calls or tool definitions without a word.

    Each such text is replaced by a marker of its own, and the rendering must hold all of them. (The texts themselves
    cannot be looked for, because templates quote and trim them.) A template that takes the messages but not the markers
    cannot be examined so, and is believed.

    Raises:
        InputError: something would be left out.
    """
    prompting = messages[-1]["role"] != "assistant"
    marked, markers = [], {}
    for index, message in enumerate(messages):
        copy = dict(message)
        if message["role"] not in ("user", "assistant"):
            copy["content"] = f"zq{index}qz"
            markers[copy["content"]] = f"message {index + 1} (from the {message['role']})"
        if message.get("tool_calls"):
            copy["tool_calls"], names = _renamed(message["tool_calls"], index)
            markers |= dict.fromkeys(names, f"the tool calls of message {index + 1}")
        marked.append(copy)
    lost = ""
    if markers:
        with contextlib.suppress(InputError):
            text = render(tokenizer, marked, template_kwargs, tools, prompting=prompting)
            lost = next((name for marker, name in markers.items() if marker not in text), "")
    if tools and not lost:
        with contextlib.suppress(InputError):
            texts = [
                render(tokenizer, messages, template_kwargs, given, prompting=prompting) for given in (tools, None)
            ]
            lost = "the tool definitions" if texts[0] == texts[1] else ""
    if lost:
        raise InputError(f"the chat template leaves out {lost}", fix="Use a target that knows them, or take them out.")


def _renamed(calls: Sequence[dict[str, Any]], index: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Copy tool calls with markers as function names, and the markers."""
    copies: list[dict[str, Any]] = json.loads(json.dumps(calls))
    names = [f"zq{index}x{at}qz" for at in range(len(copies))]
    for copy, name in zip(copies, names, strict=True):
        function = copy["function"] if isinstance(copy.get("function"), dict) else copy
        function["name"] = name
    return copies, names
