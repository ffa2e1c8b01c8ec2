"""The documentation runs: README's Python, its commands, its links; the recipes that ship."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from draftloop.recipe_file import load_recipe

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.smollm2
def test_the_python_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    names: dict = {}
    exec(compile(code.replace("max_new_tokens=64", "max_new_tokens=12"), "README.md", "exec"), names)
    assert names["reply"].text
    assert names["reply"].tau >= 1.0
    assert capsys.readouterr().out.startswith(names["reply"].text)


def test_every_command_of_the_readme_exists(capsys):
    from draftloop.cli import app

    known = {command.callback.__name__ for command in app.registered_commands}
    named = set(re.findall(r"^    draftloop (\w+)", README, re.M))
    assert named
    assert named <= known


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/results.md",
        "docs/experiments.md",
        "docs/decisions.md",
        "docs/engines.md",
        "docs/performance.md",
        "docs/attention.md",
        "docs/drafters.md",
        "docs/adapting.md",
    ],
)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?://)([^)#]+)", text):
        assert (ROOT / page).parent.joinpath(link).exists(), link


def test_the_pictures_of_attention_are_drawn_from_the_masks():
    import runpy

    drawn = runpy.run_path(str(ROOT / "docs" / "attention_pictures.py"))
    text = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    assert drawn["page"](text) == text


@pytest.mark.parametrize("path", sorted([*ROOT.glob("recipes/*.yaml"), *ROOT.glob("src/draftloop/recipes/*.yaml")]))
def test_shipped_recipes_load(path):
    recipe = load_recipe(path)
    assert recipe.stages
    assert all(stage.steps or stage.minutes for stage in recipe.stages)


def test_published_figures_come_from_their_raw_rows():
    import sys

    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import results
    finally:
        sys.path.pop(0)
    for path, text in results.derive().items():
        assert path.read_text(encoding="utf-8") == text, path.name
