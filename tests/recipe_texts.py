"""A small recipe as text, and reading it with overrides."""

from __future__ import annotations

from pathlib import Path

from draftloop.recipe import Recipe
from draftloop.recipe_file import load_recipe

BASE = """\
name: x
data:
  train: [a.jsonl]
drafter:
stages:
  - name: sft
    method: sft
    steps: 100
  - {name: v1.5, method: draft-opd, steps: 5}
"""


def load(tmp_path: Path, text: str, *overrides: str) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path, overrides)
