"""The recipe in words: what each key takes, for error messages and for docs/recipe.md, which this module writes.

    python -m draftloop.recipe_reference > docs/recipe.md

Knows the pydantic models and reads no recipe.
"""

from __future__ import annotations

import sys
import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from draftloop.recipe import Part, Recipe
from draftloop.recipe_methods import METHODS

_PLAIN = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    Any: "anything",
}
_PLURAL = {int: "whole numbers", float: "numbers", str: "texts"}

_HEAD = """\
# The recipe

<!-- Written by `python -m draftloop.recipe_reference > docs/recipe.md`; change src/draftloop/recipe.py instead. -->

A recipe is one YAML file that says everything a run does. Every key has a default, except the name of a stage; a key
that does not exist is an error that names the nearest one that does. Examples to start from:
[recipes/sft.yaml](../recipes/sft.yaml) and [recipes/draft-opd.yaml](../recipes/draft-opd.yaml).

**Overrides.** Any value can be changed on the command line by its dotted path; stages go by number or by name, and
values are YAML:

    stages.0.optimiser.lr=3e-4    stages.sft.steps=100    data.train=[a.jsonl,b.jsonl]    drafter.init=null

An override replaces what stood there, whole: `drafter={layers: 3}` drops every other key that the file gave for
`drafter`. Overrides are laid upon the file in the order given, before any default is filled in.

**YAML.** Scalars follow YAML 1.2: `3e-4` is a number, only `true` and `false` are truth values, dates are text, `inf`
is infinity. A key given twice is an error. `&anchors`, `*aliases` and `<<` work. A section that is left empty has its
defaults.

**Types** are strict: a quoted number is text, and `4.0` is not a whole number.
"""

_METHODS_HEAD = """\
## Methods

`method` fills in the cells of its row; a cell that the recipe gives wins, so that an ablation is one changed line.
Everything a row leaves open has its usual default, and `custom` fills in nothing.
"""


def keys(section: type[Part]) -> dict[str, FieldInfo]:
    """Map the keys of a section, as they stand in the file, to their fields."""
    return {info.alias or name: info for name, info in section.model_fields.items()}


def section_of(annotation: Any) -> type[Part] | None:
    """Return the section that a field holds, or None."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Part) else None


def item_of(annotation: Any) -> Any:
    """Return the type of a list's items (the list may be optional), or None where the field holds no list."""
    for option in _options(annotation):
        if get_origin(option) is list:
            return get_args(option)[0]
    return None


def sections() -> dict[str, type[Part]]:
    """Map every section's dotted path to its model, in the recipe's order; "" is the top, `stages.N` any stage."""
    found: dict[str, type[Part]] = {}

    def walk(path: str, section: type[Part]) -> None:
        found[path] = section
        for key, info in keys(section).items():
            below = f"{path}.{key}".lstrip(".")
            if inner := section_of(info.annotation):
                walk(below, inner)
            elif inner := section_of(item_of(info.annotation)):
                walk(f"{below}.N", inner)

    walk("", Recipe)
    return found


def allowed(info: FieldInfo) -> str:
    """Say what a field takes, as a noun phrase: "a whole number of at least 1, or null"."""
    options = _options(info.annotation)
    bounds = []
    for attribute, relation in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
        bounds += [f"{relation} {getattr(rule, attribute):g}" for rule in info.metadata if hasattr(rule, attribute)]
    patterns = [rule.pattern for rule in info.metadata if getattr(rule, "pattern", None)]
    words = []
    for option in options:
        text = _words(option)
        if option in (int, float) and bounds:
            text += (" of " if bounds[0].startswith("at") else " ") + " and ".join(bounds)
        if option is str and patterns:
            text += f" that matches `{patterns[0]}`"
        words.append(text)
    return ", or ".join(words)


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _words(option: Any) -> str:
    if get_origin(option) is Literal:
        names = [str(name) for name in get_args(option)]
        return ", ".join(names[:-1]) + f" or {names[-1]}" if len(names) > 1 else names[0]
    if get_origin(option) is list:
        return f"a list of {_PLURAL.get(get_args(option)[0], 'sections')}"
    if get_origin(option) is dict:
        return "a mapping"
    return "a section" if section_of(option) else _PLAIN[option]


def yaml_word(value: Any) -> str:
    """Write a short value as YAML would: null, true, .inf, [a, b]."""
    if isinstance(value, list):
        return "[" + ", ".join(yaml_word(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {yaml_word(item)}" for key, item in value.items()) + "}"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value!r}" if isinstance(value, float) else str(value)


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    return f"`{yaml_word(info.get_default(call_default_factory=True, validated_data={}))}`"


def _cell(text: str) -> str:
    """Escape what would end a table cell."""
    return text.replace("|", "\\|")


def _section(path: str, section: type[Part]) -> str:
    lines = [f"## `{path}`" if path else "## Top level", "", " ".join((section.__doc__ or "").split()), ""]
    lines += ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for key, info in keys(section).items():
        below = f"{path}.{key}".lstrip(".")
        if inner := section_of(info.annotation):
            lines.append(f"| `{key}` | a section | | [below](#{_anchor(below)}): {_cell(_first(inner))} |")
        elif inner := section_of(item_of(info.annotation)):
            lines.append(
                f"| `{key}` | a list of sections | `[]` | [below](#{_anchor(below + '.N')}): {_first(inner)} |"
            )
        else:
            meaning = _cell(info.description or "")
            lines.append(f"| `{key}` | {_cell(allowed(info))} | {_default(info)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _anchor(path: str) -> str:
    return path.lower().replace(".", "")


def _first(section: type[Part]) -> str:
    return (section.__doc__ or "").split("\n")[0].rstrip(".")


def _methods() -> str:
    """Render METHODS: one column for each cell that any row fills."""
    flat = {name: _flat(row) for name, row in METHODS.items()}
    columns = list(dict.fromkeys(cell for row in flat.values() for cell in row))
    lines = ["| method | " + " | ".join(f"`{column}`" for column in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, row in flat.items():
        cells = [yaml_word(row[column]) if column in row else "" for column in columns]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return _METHODS_HEAD + "\n" + "\n".join(lines) + "\n"


def _flat(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in row.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


def reference() -> str:
    """Write docs/recipe.md: the head, a table for each section in the recipe's order, the methods beside the stages."""
    parts = [_HEAD]
    for path, section in sections().items():
        parts.append(_section(path, section))
        if path == "stages.N":
            parts.append(_methods())
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(reference())
