"""From a YAML file and dotted overrides to a checked Recipe, and back; every mistake named with its place and its cure.

Knows the recipe's models (recipe.py), their words (recipe_reference.py) and YAML (recipe_yaml.py); runs nothing and
looks at no other file, so that a path inside a recipe is checked where it is used.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from draftloop.core.errors import InputError
from draftloop.core.files import fingerprint, write_text
from draftloop.recipe import SCHEMA, Part, Recipe
from draftloop.recipe_reference import allowed, item_of, keys, section_of, sections, yaml_word
from draftloop.recipe_yaml import KeyPath, dump, parse

_LAST = 10**9  # overrides come after every line of the file


@dataclass
class _Source:
    """What the user gave: the tree, and for the path of a value where it came from, as (order, words)."""

    name: str
    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, tuple[int, str]] = field(default_factory=dict)

    def origin(self, path: KeyPath) -> tuple[int, str]:
        """Find where the value at `path`, or the nearest thing around it, was given."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return 0, self.name

    def put(self, path: KeyPath, value: Any, origin: tuple[int, str]) -> None:
        """Set the value at a path of existing or new keys (list entries exist already)."""
        here: Any = self.tree
        for depth, key in enumerate(path[:-1]):
            if isinstance(here, dict) and here.get(str(key)) is None:
                here[str(key)] = {}
            here = here[key]
            if not isinstance(here, dict | list):
                raise InputError(f"`{_dotted(path[: depth + 1])}` holds a single value", where=origin[1])
        here[path[-1]] = value
        self.origins = {known: place for known, place in self.origins.items() if known[: len(path)] != path}
        self.origins[path] = origin


def load_recipe(path: Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, lay the overrides upon it in order, and check the whole.

    Args:
        path: a YAML file, or None for defaults alone.
        overrides: `dotted.path=value`, the value in YAML. Entries of `stages` go by number or by name.

    Raises:
        InputError: the first thing that is wrong, where it stands and what is allowed there.
    """
    source = _Source("the defaults") if path is None else _read(path)
    for position, text in enumerate(overrides):
        _override(source, text, _LAST + position)
    schema = source.tree.get("schema", SCHEMA)
    if type(schema) is not int or schema != SCHEMA:
        raise InputError(
            f"schema {yaml_word(schema)} is not {SCHEMA}, the one that this version reads",
            where=source.origin(("schema",))[1],
            fix=f"Use the draftloop that it was written for, or bring it to schema {SCHEMA}.",
        )
    _check_keys(source, source.tree, Recipe, ())
    try:
        return Recipe.model_validate(source.tree)
    except ValidationError as error:
        details = min(error.errors(), key=lambda item: source.origin(_path_of(item)))
        raise _complaint(details, source) from error


def dump_recipe(recipe: Recipe, path: Path) -> None:
    """Write the resolved recipe, every default included, in one piece; `load_recipe` gives back an equal one.

    Raises:
        EnvironmentFault: the file cannot be written.
    """
    write_text(path, "# A resolved recipe: every default is written out.\n" + dump(resolved(recipe)))


def resolved(part: Part) -> dict[str, Any]:
    """Return a section as plain values under the keys of the file, in the order of recipe.py."""

    def plain(value: Any) -> Any:
        if isinstance(value, Part):
            return resolved(value)
        return [plain(item) for item in value] if isinstance(value, list) else value

    names = type(part).model_fields
    return {info.alias or name: plain(getattr(part, name)) for name, info in names.items()}


def recipe_fingerprint(recipe: Recipe) -> str:
    """Name all that decides a run's result (16 hex digits); `out`, which only says where it lies, is left out."""
    return fingerprint({key: value for key, value in resolved(recipe).items() if key != "out"})


def recipe_differences(old: Recipe, new: Recipe) -> list[str]:
    """Say in which values two recipes differ, `out` aside: "`stages.0.optimiser.lr`: 0.001, now 0.0003"."""
    before, after = _leaves(resolved(old), ()), _leaves(resolved(new), ())
    paths = [path for path in {**before, **after} if path != ("out",) and before.get(path, "-") != after.get(path, "-")]
    return [f"`{_dotted(path)}`: {before.get(path, 'absent')}, now {after.get(path, 'absent')}" for path in paths]


def _leaves(value: Any, path: KeyPath) -> dict[KeyPath, str]:
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {leaf: word for key, item in items for leaf, word in _leaves(item, (*path, key)).items()}
    return {path: yaml_word(value)}


def _dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


def _read(path: Path) -> _Source:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise InputError("there is no such recipe", where=str(path), fix="Check the path.") from error
    except IsADirectoryError as error:
        raise InputError("this is a directory", where=str(path), fix="Give a recipe's YAML file.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"byte {error.start} is not UTF-8", where=str(path), fix="Give a YAML text file.") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"this recipe cannot be read ({reason})", where=str(path), fix="Check the path.") from error
    document = parse(text, str(path))
    if not isinstance(document.tree, dict):
        what = "this recipe is empty" if document.tree is None else "this is no mapping of keys to values"
        raise InputError(what, where=str(path), fix="A recipe begins with keys such as `target:` and `stages:`.")
    return _Source(
        str(path), document.tree, {where: (line, f"{path}:{line}") for where, line in document.lines.items()}
    )


def _override(source: _Source, text: str, order: int) -> None:
    """Lay one `dotted.path=value` upon the tree."""
    where = f"override {text!r}"
    name, equals, value = text.partition("=")
    words = tuple(name.strip().split("."))
    if not equals or not all(words):
        raise InputError("this is no override", where=where, fix="Write `dotted.path=value`, as in stages.0.steps=100.")
    path = _resolve(source.tree, Recipe, None, words, (), where)
    source.put(path, parse(value, where).tree, (order, where))


def _resolve(
    node: Any, annotation: Any, info: FieldInfo | None, rest: tuple[str, ...], path: KeyPath, where: str
) -> KeyPath:
    """Turn the words of an override into keys and list positions, checking each against the models and the tree."""
    if not rest:
        return path
    if section := section_of(annotation):
        if rest[0] not in keys(section):
            raise _unknown_key(section, path, rest[0], where)
        below = keys(section)[rest[0]]
        child = node.get(rest[0]) if isinstance(node, dict) else None
        return _resolve(child, below.annotation, below, rest[1:], (*path, rest[0]), where)
    if item := item_of(annotation):
        items = node if isinstance(node, list) else []
        index, used = _entry(items, rest, path, where)
        return _resolve(items[index], item, info, rest[used:], (*path, index), where)
    if get_origin(annotation) is dict:
        return (*path, *rest)
    takes = f"It takes {allowed(info)}." if info and not _is_item(path) else "Drop what follows it."
    raise InputError(f"`{_dotted(path)}` holds a single value, nothing lies below it", where=where, fix=takes)


def _is_item(path: KeyPath) -> bool:
    """Whether a path ends at an entry of a list."""
    return isinstance(path[-1], int)


def _entry(items: list[Any], rest: tuple[str, ...], path: KeyPath, where: str) -> tuple[int, int]:
    """Find a list entry by number or, for stages, by name (which may hold dots): (index, how many words it took)."""
    if rest[0].isdecimal() and int(rest[0]) < len(items):
        return int(rest[0]), 1
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    for used in range(len(rest), 0, -1):
        if ".".join(rest[:used]) in names:
            return names.index(".".join(rest[:used])), used
    known = ", ".join(f"{index} ({name})" if name else str(index) for index, name in enumerate(names))
    raise InputError(
        f"`{_dotted(path)}` has no entry {rest[0]!r}",
        where=where,
        fix=f"It has {known}." if items else "The recipe gives it no entries; set the whole list.",
    )


def _check_keys(source: _Source, node: Any, section: type[Part], path: KeyPath) -> None:
    """Refuse unknown keys and give empty sections (`target:` with nothing below) their defaults."""
    if not isinstance(node, dict):
        return  # its type is wrong, which validation says
    for key, value in node.items():
        here: KeyPath = (*path, key)
        if key not in keys(section):
            raise _unknown_key(section, path, key, source.origin(here)[1])
        annotation = keys(section)[key].annotation
        if inner := section_of(annotation):
            if value is None:
                node[key] = {}
            _check_keys(source, value, inner, here)
        elif (inner := section_of(item_of(annotation))) and isinstance(value, list):
            for index, item in enumerate(value):
                _check_keys(source, item, inner, (*here, index))


def _unknown_key(section: type[Part], path: KeyPath, key: str, where: str) -> InputError:
    """Name the nearest valid key: in this section, else where the very same key belongs, else anywhere."""
    stage = next((str(part) for part in path if isinstance(part, int)), "N")
    inside = _dotted(path)
    known = {name.replace(".N", f".{stage}"): list(keys(part)) for name, part in sections().items()}
    homes = [name for name, names in known.items() if key in names]
    homes = [name for name in homes if name.startswith(inside)] or homes  # a section below this one is meant first
    near = difflib.get_close_matches(key, keys(section), n=1, cutoff=0.6)
    hints = [f"Did you mean `{_join(inside, near[0])}`?"] if near else []
    if homes:
        places = [f"in `{name}`" if name else "at the top level" for name in homes]
        hints.append(f"`{key}` belongs {' or '.join(places)}.")
    if not hints:
        far = difflib.get_close_matches(key, sorted({name for names in known.values() for name in names}), 1, 0.75)
        places = [f"`{_join(home, far[0])}`" for home, names in known.items() if far and far[0] in names]
        hints = [f"Did you mean {' or '.join(places)}?" if far else f"It may hold {', '.join(keys(section))}."]
    return InputError(f"there is no key `{_join(inside, key)}`", where=where, fix=" ".join(hints))


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _path_of(details: ErrorDetails) -> KeyPath:
    """Cut pydantic's location down to what the file has: no names of union members, no [key]."""
    path: KeyPath = ()
    annotation: Any = Recipe
    for part in details["loc"]:
        if (section := section_of(annotation)) and part in keys(section):
            annotation = keys(section)[str(part)].annotation
        elif item_of(annotation) and isinstance(part, int):
            annotation = item_of(annotation)
        else:
            break
        path = (*path, part)
    return path


def _complaint(details: ErrorDetails, source: _Source) -> InputError:
    """Turn one of pydantic's errors into one sentence of ours."""
    path = _path_of(details)
    where = source.origin(path)[1]
    if details["type"] == "value_error":
        message = str(details["ctx"]["error"])
        return InputError(f"`{_dotted(path)}`: {message}" if path else message, where=where)
    section, info = _field_at(path)
    if details["type"] == "missing":
        return InputError(f"`{_dotted(path[:-1])}` has no `{path[-1]}`", where=where, fix=f"Give {allowed(info)}.")
    value = details["input"]
    fix = "It takes a section (a mapping of keys to values)."
    if section is None:
        holder = f"`{_dotted(path[:-1])}`" if _is_item(path) else "It"
        fix = f"{holder} takes {allowed(info)}."
        if "text" in fix and isinstance(value, int | float):
            fix += " Quote what is meant as text."
    return InputError(f"`{_dotted(path)}` cannot be {_shown(value)}", where=where, fix=fix)


def _field_at(path: KeyPath) -> tuple[type[Part] | None, FieldInfo]:
    """Return the field that a path lies in, and its section if it is one."""
    annotation: Any = Recipe
    info = FieldInfo(annotation=Recipe)
    for part in path:
        if section := section_of(annotation):
            info = keys(section)[str(part)]
            annotation = info.annotation
        else:
            annotation = item_of(annotation)
    return section_of(annotation), info


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = repr(value) if isinstance(value, str) else yaml_word(value)
    return text if len(text) <= 60 else text[:57] + "..."
