"""The floors of the house: imports run down only, rooms of one floor know nothing of each other, no circles."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "draftloop"
LONGEST = 400

FLOORS = [
    {"core"},
    {"recipe"},
    {"data", "target", "drafter", "objective"},
    {"decode", "formats"},
    {"supervise"},
    {"learn"},
    {"evaluate"},
    {"train", "engines"},
    {"api"},
    {""},  # draftloop/__init__.py, the names of the API
    {"doctor", "quickstart"},
    {"cli"},
]
FLOOR = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}

# What a room must not know of the world outside, wherever in a file it is imported.
OUTSIDE = {
    "core": {"transformers", "datasets", "accelerate", "pydantic"},
    "recipe": {"torch", "transformers", "datasets", "accelerate"},
    "data": {"transformers", "torch.nn", "accelerate"},
    "drafter": {"transformers", "accelerate"},
    "objective": {"transformers", "accelerate"},
    "decode": {"transformers", "accelerate"},
    "supervise": {"transformers", "accelerate"},
    "learn": {"transformers"},
}
ALLOWED = {"draftloop.drafter.host": {"transformers"}}  # runs a layer of the target's class as a drafter's


def name_of(path: Path, package: Path = PACKAGE) -> str:
    """src/draftloop/core/law.py -> draftloop.core.law; a package is named by its folder."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """draftloop.core.law -> core; draftloop.recipe_file -> recipe; draftloop -> nothing."""
    room = [*module.split("."), ""][1]
    return "recipe" if room.startswith("recipe_") else room


def imports(module: str, source: str, modules: set[str]) -> Iterator[str]:
    """Every module that a source imports, at its top or inside a function, as full a name as is known."""
    is_package = any(other.startswith(module + ".") for other in modules)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in modules or not base.startswith("draftloop") else base


def offences(sources: dict[str, str]) -> list[str]:
    """What is wrong with a set of modules {full name: source}."""
    found, graph = [], {}
    modules = set(sources)
    for module, source in sources.items():
        room = room_of(module)
        if room not in FLOOR:
            found.append(f"{module} is in no room of FLOORS")
            continue
        graph[module] = set()
        for wanted in imports(module, source, modules):
            if not (wanted + ".").startswith("draftloop."):
                taboo = OUTSIDE.get(room, set()) - ALLOWED.get(module, set())
                taboo = [t for t in taboo if (wanted + ".").startswith(t + ".")]
                found += [f"{module} imports {wanted}, of which {room} knows nothing" for _ in taboo]
                continue
            graph[module].add(wanted)
            other = room_of(wanted)
            if other not in FLOOR:
                found.append(f"{module} imports {wanted}, which is in no room of FLOORS")
            elif other != room and FLOOR[other] >= FLOOR[room]:
                way = "beside" if FLOOR[other] == FLOOR[room] else "above"
                found.append(f"{module} imports {wanted}, which stands {way} it")
    return found + [f"circle: {' -> '.join(circle)}" for circle in circles(graph)]


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """One circle for each module from which imports lead back to itself."""
    found = []
    for start in graph:
        paths = [[start]]
        seen = set()
        while paths:
            path = paths.pop()
            for following in graph.get(path[-1], ()):
                if following == start:
                    found.append([*path, start])
                    paths = []
                    break
                if following not in seen:
                    seen.add(following)
                    paths.append([*path, following])
    return found


def real_sources() -> dict[str, str]:
    return {name_of(path): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def test_imports_run_down_only():
    sources = real_sources()
    assert len(sources) > 30
    assert offences(sources) == []


def test_every_room_exists():
    """A floor plan of rooms that are gone would prove nothing."""
    rooms = {room_of(module) for module in real_sources()}
    assert rooms == set(FLOOR)


def test_files_are_short():
    files = [path for folder in ("src", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    long = {str(path.relative_to(ROOT)): n for path in files if (n := len(path.read_text().splitlines())) > LONGEST}
    assert not long


def test_every_module_says_what_it_knows():
    silent = [name for name, source in real_sources().items() if not ast.get_docstring(ast.parse(source))]
    assert not silent


def test_the_command_line_starts_without_torch():
    check = "import sys, draftloop.cli; print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---------------------------------------------------------------- the checker itself


@pytest.mark.parametrize(
    ("module", "source", "says"),
    [
        ("draftloop.core.x", "from draftloop.target.model import Target", "stands above"),
        ("draftloop.core.x", "import draftloop.recipe", "stands above"),
        ("draftloop.core.x", "def f():\n    from draftloop.train import job", "stands above"),
        ("draftloop.core.x", "from ..train import job", "stands above"),
        ("draftloop.core.x", "from .. import train", "stands above"),
        ("draftloop.recipe", "from .train import job", "stands above"),
        ("draftloop.core.x", "if TYPE_CHECKING:\n    from draftloop.learn.update import u", "stands above"),
        ("draftloop.recipe_file", "from draftloop.data.prompts import read", "stands above"),
        ("draftloop.drafter.x", "from draftloop.target.model import Target", "stands beside"),
        ("draftloop.decode.x", "import draftloop.formats.zlab as z", "stands beside"),
        ("draftloop.train.x", "from draftloop import load_target", "stands above"),
        ("draftloop.train.x", "from draftloop import api", "stands above"),
        ("draftloop.cellar.x", "", "in no room"),
        ("draftloop.core.x", "import draftloop.cellar", "in no room"),
        ("draftloop.data.x", "import torch.nn.functional as F", "knows nothing"),
        ("draftloop.data.x", "from torch import nn", "knows nothing"),
        ("draftloop.data.x", "def f():\n    from transformers import AutoTokenizer", "knows nothing"),
        ("draftloop.recipe", "import torch", "knows nothing"),
        ("draftloop.core.x", "from draftloop.core.x import y", "circle"),
    ],
)
def test_a_wrong_import_is_found(module, source, says):
    world = {
        "draftloop": "",
        "draftloop.train": "",
        "draftloop.train.job": "",
        "draftloop.api": "",
        "draftloop.core": "",
    }
    found = offences({**world, module: source})
    assert len(found) == 1, found
    assert says in found[0]


def test_right_imports_are_left_in_peace():
    fine = {
        "draftloop": "def f():\n    from draftloop import api",
        "draftloop.api": "from draftloop.train.job import train\nfrom draftloop.core.law import Law",
        "draftloop.train": "",
        "draftloop.train.job": "from .steps import s\nimport torch, transformers\nfrom draftloop.recipe_file import r",
        "draftloop.train.steps": "from ..core import law",
        "draftloop.recipe_file": "from draftloop.recipe import Recipe\nfrom .recipe_yaml import y",
        "draftloop.recipe": "import pydantic",
        "draftloop.recipe_yaml": "import yaml",
        "draftloop.core": "",
        "draftloop.core.law": "import torch.nn.functional as F\nfrom draftloop.core.errors import E",
        "draftloop.core.errors": "from __future__ import annotations",
        "draftloop.data.x": "import torch\nfrom draftloop.core.draws import bits",
        "draftloop.cli": "from draftloop import api\nfrom draftloop import train\nfrom draftloop import load_target",
    }
    assert offences(fine) == []


def test_a_circle_within_a_room_is_found():
    ring = {f"draftloop.core.{a}": f"from draftloop.core.{b} import x" for a, b in ("ab", "bc", "ca")}
    assert sum("circle" in line for line in offences(ring)) == 3
    ring["draftloop.core.c"] = "def late():\n    from draftloop.core.a import x"
    assert sum("circle" in line for line in offences(ring)) == 3, "a circle that is closed late is one too"
