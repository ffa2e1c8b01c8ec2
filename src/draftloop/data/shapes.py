"""Rows to conversations: the shapes that people's prompt files have, checked and brought into one.

Knows `messages`, `conversations`, `turns` and `prompt` rows. Does not know files, chat templates, tokenizers or models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftloop.core.errors import InputError
from draftloop.data.rows import kind

Message = dict[str, Any]

KEYS = ("messages", "conversations", "turns", "prompt")  # of several in one row, the first is read (and that is said)
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
}
_MAY_FOLLOW = {
    "": {"system", "developer", "user"},
    "system": {"user"},
    "developer": {"user"},
    "user": {"assistant"},
    "assistant": {"user", "tool"},
    "tool": {"tool", "assistant"},
}


@dataclass(frozen=True)
class Shaped:
    """What a row asks.

    Attributes:
        messages: chat messages (`role`, `content`, tool fields as given); the last may be an assistant's answer.
        turns: further user turns, asked one by one after each answer.
        tools: tool definitions for the chat template, or None.
    """

    messages: tuple[Message, ...]
    turns: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None


def shaped(row: dict[str, Any], where: str) -> Shaped:
    """Read a row of any accepted shape.

    - `messages`: a list of {role, content}; an assistant may call (`tool_calls`), a tool answer.
    - `conversations`: the same, or {from, value} with human, gpt, system, tool, function_call, observation.
    - `turns`: a list of user turns, the first of which is the prompt.
    - `prompt`: a text or a list of messages; `response` or `completion` (a text or a list of messages) is its answer.
      `answer` is not read: prompt files use it for the reference result that a solution is scored against.

    `system` (a text) goes before a conversation that has no system message; `tools` (a list, or the same as JSON text)
    goes to the chat template. Every other field is left alone.

    Args:
        row: the row.
        where: file and line, for messages.

    Raises:
        InputError: none of the keys, a wrong type, an empty text, an unknown role, or roles out of order.
    """
    key = next((key for key in KEYS if row.get(key) is not None), None)
    if key is None:
        if empty := [key for key in KEYS if key in row]:
            raise InputError(f"{empty[0]} is null", where=where, fix="Fill it in or take the row out.")
        found = ", ".join(sorted(map(str, row))[:12]) or "no fields at all"
        raise InputError(
            f"the row has none of {', '.join(KEYS)}; it has {found}",
            where=where,
            fix="Rename the field that holds the prompt to `prompt`.",
        )
    turns: tuple[str, ...] = ()
    value = row[key]
    if key == "turns":
        first, *rest = _turns(value, where)
        messages, turns = [{"role": "user", "content": first}], tuple(rest)
    elif key == "prompt" and isinstance(value, str):
        messages = [{"role": "user", "content": _filled(value, "prompt", where)}]
    elif key == "prompt" and not isinstance(value, list):
        raise InputError(f"prompt is {kind(value)}, not text", where=where, fix='Write {"prompt": "..."}.')
    else:
        messages = _messages(value, key, where)
    if key == "prompt":
        messages += _answer(row, where)
    if row.get("system"):
        messages = _with_system(messages, row["system"], where)
    _check_order(messages, where)
    return Shaped(tuple(messages), turns, _tools(row.get("tools"), where))


def passed_over(row: dict[str, Any]) -> tuple[str, list[str]]:
    """The key that is read of a row, and those that hold something and are not (`prompt` beside `messages`)."""
    given = [key for key in KEYS if row.get(key) is not None]
    return given[0], given[1:]


def _turns(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not value:
        given = "an empty list" if value == [] else kind(value)
        raise InputError(f"turns is {given}, not a list of texts", where=where, fix='Write {"turns": ["..."]}.')
    return [_filled(turn, f"turn {index}", where) for index, turn in enumerate(value, start=1)]


def _filled(value: Any, name: str, where: str) -> str:
    """Return `value` if it is a text with something in it."""
    if not isinstance(value, str):
        raise InputError(f"{name} is {kind(value)}, not text", where=where, fix="Write it as a JSON string.")
    if not value.strip():
        raise InputError(f"{name} is empty", where=where, fix="Fill it in or take the row out.")
    return value


def _answer(row: dict[str, Any], where: str) -> list[Message]:
    given = [key for key in ("response", "completion") if row.get(key) is not None]
    if not given:
        return []
    if len(given) > 1:
        raise InputError(
            "the row has both a response and a completion", where=where, fix="Keep the one that answers the prompt."
        )
    value = row[given[0]]
    if isinstance(value, str):
        return [{"role": "assistant", "content": _filled(value, given[0], where)}]
    return _messages(value, given[0], where)


def _with_system(messages: list[Message], text: Any, where: str) -> list[Message]:
    if messages[0]["role"] in ("system", "developer"):
        raise InputError("the row has a system field and a system message", where=where, fix="Keep one of them.")
    return [{"role": "system", "content": _filled(text, "system", where)}, *messages]


def _messages(value: Any, key: str, where: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        given = "an empty list" if value == [] else kind(value)
        raise InputError(
            f"{key} is {given}, not a list of messages", where=where, fix='Write [{"role": "user", "content": "..."}].'
        )
    if all(isinstance(item, str) for item in value):
        raise InputError(
            f"{key} is a list of texts, not of messages", where=where, fix="Name a list of user turns `turns`."
        )
    return [_message(item, f"{key}[{index}]", where) for index, item in enumerate(value)]


def _message(item: Any, name: str, where: str) -> Message:
    if not isinstance(item, dict):
        raise InputError(
            f"{name} is {kind(item)}, not an object", where=where, fix='Write {"role": ..., "content": ...}.'
        )
    role_key, content_key = ("from", "value") if "from" in item and "role" not in item else ("role", "content")
    said = item.get(role_key)
    if not isinstance(said, str) or said not in ROLES:
        given = f"has the unknown role {said!r}" if said is not None else f"has no {role_key}"
        raise InputError(f"{name} {given}", where=where, fix=f"Roles are {', '.join(ROLES)}.")
    role = ROLES[said]
    rest = {k: v for k, v in item.items() if k not in (role_key, content_key) and v is not None}
    calls = rest.get("tool_calls")
    if calls is not None and (not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls)):
        raise InputError(
            f"tool_calls of {name} is not a list of objects", where=where, fix="Write the calls as OpenAI does."
        )
    content = item.get(content_key)
    if isinstance(content, list):
        content = _joined_parts(content, name, where)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        given = f"has no {content_key}" if content is None else f"has {kind(content)} as its {content_key}, not text"
        raise InputError(f"{name} {given}", where=where, fix=f"Give it a {content_key}.")
    if role in ("user", "assistant") and not calls:  # an empty system or tool message says something: nothing
        _filled(content, f"the {content_key} of {name} ({said})", where)
    if said == "function_call" and (parsed := _function_calls(content)):
        return {"role": role, "content": "", "tool_calls": parsed, **rest}
    return {"role": role, "content": content, **rest}


def _joined_parts(parts: Sequence[Any], name: str, where: str) -> str:
    """Text parts as one text; draftloop has nothing to do with pictures and sounds."""
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            what = f"type {part.get('type')!r}" if isinstance(part, dict) else kind(part)
            raise InputError(f"{name} has a content part of {what}", where=where, fix="Only text parts can be used.")
        texts.append(text)
    return "".join(texts)


def _function_calls(text: str) -> list[dict[str, Any]]:
    """Read ShareGPT's function_call as tool calls; [] when it is no JSON of named calls (it then stays a text)."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = value if isinstance(value, list) else [value]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        return []
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
        for call in calls
    ]


def _tools(value: Any, where: str) -> tuple[dict[str, Any], ...] | None:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InputError(
                "tools is text that is not JSON", where=where, fix="Write a list of tool objects."
            ) from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise InputError(
            f"tools is {kind(value)}, not a list of objects", where=where, fix="Write a list of tool objects."
        )
    return tuple(value)


def _check_order(messages: Sequence[Message], where: str) -> None:
    before = ""
    for index, message in enumerate(messages):
        role = message["role"]
        if role not in _MAY_FOLLOW[before]:
            place = f"after one from the {before}" if before else "first"
            raise InputError(
                f"roles are out of order: message {index + 1} is from the {role} and comes {place}",
                where=where,
                fix="A conversation runs: system (if any), user, assistant, user, ...; tools answer assistants.",
            )
        before = role
    if before in ("system", "developer"):
        raise InputError("the conversation has no user message", where=where, fix="Add the message to be answered.")
