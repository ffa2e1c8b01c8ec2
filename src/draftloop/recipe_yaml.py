"""YAML as recipes use it: the scalars of YAML 1.2, no key twice, and the line that every value stands on.

Knows the syntax and nothing of recipes. YAML 1.1, which PyYAML reads by default, takes 3e-4 for text, `no` for false,
1:30 for ninety and 2024-07-26 for a date object; here they are a number, text, text and text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from draftloop.core.errors import InputError

KeyPath = tuple[str | int, ...]
_TAG = "tag:yaml.org,2002:"
_RESOLVERS = (
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?[0-9]+", [*"-+0123456789"]),
    # a bare `inf` too, for nobody remembers the dot
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", [*"-+.0123456789"]),
    ("float", r"[-+]?\.?(inf|Inf|INF)|\.(nan|NaN|NAN)", [*"-+.iI"]),
    ("merge", r"<<", ["<"]),
)
_SCALARS: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": int,
    "float": lambda text: float(re.sub(r"\.(?=[a-z])", "", text.lower())),  # ".inf" -> "inf"
    "str": str,
}


class _Loader(yaml.SafeLoader):
    """PyYAML's parser with the implicit types above."""


class _Dumper(yaml.SafeDumper):
    """Quotes whatever either YAML 1.1 or 1.2 would read as something else than text; writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Put text with line breaks or invisible characters in double quotes; PyYAML's single quotes lose some of them."""
    return dumper.represent_scalar(_TAG + "str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _text)
_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})$"), _first)


_LARGEST = 20_000  # values


@dataclass
class Document:
    """A parsed YAML text.

    Attributes:
        tree: plain dicts, lists and scalars; None for an empty text.
        lines: for the path of every value, the line (from 1) that it stands on.
    """

    tree: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)


def parse(text: str, where: str) -> Document:
    """Read one YAML document.

    Args:
        text: the YAML.
        where: what to call it in errors.

    Raises:
        InputError: a syntax error, a key given twice, a tag or a key that is no text, or an alias inside itself.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
        document = Document()
        document.tree = None if node is None else _build(node, (), document.lines, (), where)
        return document
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        parts = " ".join(part for part in (error.context, error.problem) if part)
        raise InputError(
            f"this is not valid YAML ({parts})", where=place, fix="Check the indentation, colons and quotes there."
        ) from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"this is not valid YAML ({reason})", where=where, fix="Give a YAML text file.") from error
    except RecursionError as error:
        raise InputError("this YAML is nested too deeply", where=where, fix="Give a recipe.") from error


def _build(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], above: tuple[yaml.Node, ...], where: str) -> Any:
    """Turn a node into plain Python; `above` are the nodes that hold it."""
    place = f"{where}:{node.start_mark.line + 1}"
    if len(lines) > _LARGEST:  # a few aliases of aliases can stand for billions of values
        raise InputError("this is too large for a recipe", where=where, fix="Write the values out.")
    if any(node is outer for outer in above):
        raise InputError("this alias stands inside what it names", where=place, fix="Write the value out.")
    above = (*above, node)
    if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
        items = []
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
            items.append(_build(item, (*path, index), lines, above, where))
        return items
    if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
        return _mapping(node, path, lines, above, where)
    make = _SCALARS.get(node.tag.removeprefix(_TAG)) if isinstance(node, yaml.ScalarNode) else None
    if make is None:
        raise InputError(f"tag {node.tag!r} means nothing here", where=place, fix="Give plain values.")
    try:
        return make(node.value)
    except ValueError as error:  # an explicit tag that does not fit, or thousands of digits
        raise InputError(f"{node.value[:40]!r} is no {node.tag.removeprefix(_TAG)}", where=place) from error


def _mapping(
    node: yaml.MappingNode, path: KeyPath, lines: dict[KeyPath, int], above: tuple[yaml.Node, ...], where: str
) -> dict[str, Any]:
    """Turn a mapping into a dict; `<<` lays its own keys over those that it names."""
    inherited: dict[str, Any] = {}
    own: dict[str, Any] = {}
    merges = [value for key, value in node.value if key.tag == _TAG + "merge"]
    for source in [item for value in merges for item in (value.value if value.tag == _TAG + "seq" else [value])]:
        if not isinstance(source, yaml.MappingNode):
            place = f"{where}:{source.start_mark.line + 1}"
            raise InputError("`<<` takes a mapping", where=place, fix="Name an anchored section, as in `<<: *base`.")
        inherited = {**_build(source, path, lines, above, where), **inherited}
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.tag == _TAG + "merge":
            continue
        if not isinstance(key, yaml.ScalarNode):
            raise InputError("a key must be a single word", where=f"{where}:{line}", fix="Quote it if it is text.")
        name = key.value
        if name in seen:
            full = ".".join(str(part) for part in (*path, name))
            raise InputError(
                f"key `{full}` is given twice (first on line {seen[name]})",
                where=f"{where}:{line}",
                fix="Keep one of the two.",
            )
        seen[name] = lines[(*path, name)] = line
        own[name] = _build(value, (*path, name), lines, above, where)
    return {**inherited, **own}


def dump(tree: Any) -> str:
    """Write plain dicts, lists and scalars so that `parse` gives them back, equal and in the same order."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=110)
