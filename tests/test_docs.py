"""The documentation runs: README's Python, its commands, its links; the recipes that ship."""

from __future__ import annotations

import re
import shlex
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


PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
COMMAND = re.compile(r"^(?:# )? {4,}(draftloop [a-z](?:.*\\\n)*.*)$", re.M)


def commands():
    """Every command line of the pages, of the recipes' comments and of `--help`, with the file it stands in."""
    sources = [*(ROOT / page for page in PAGES), *ROOT.glob("recipes/**/*.yaml"), *ROOT.glob("src/draftloop/recipes/*")]
    for path in sorted([*sources, *ROOT.glob("src/draftloop/cli/*.py")]):
        for line in COMMAND.findall(path.read_text(encoding="utf-8")):
            words = shlex.split(line.replace("\\\n", " "), comments=True)
            yield pytest.param(words, id=f"{path.name}: {' '.join(words[:4])}")


@pytest.mark.parametrize("words", list(commands()))
def test_every_command_that_is_named_would_run(words, monkeypatch):
    """Options exist and take such values, and a recipe takes such overrides; nothing is run.

    An option misspelt on any page fails this, as does an override of a key that a recipe does not have.
    """
    from typer.main import get_command

    from draftloop.cli import app

    monkeypatch.chdir(ROOT)
    command = get_command(app).commands[words[1]]
    given = command.make_context(words[1], words[2:]).params
    if words[1] in ("train", "prepare"):
        assert load_recipe(Path(given["recipe"]), given["overrides"] or []).stages


def test_the_readme_names_commands_and_helps_have_examples():
    ids = [one.id for one in commands()]
    assert sum(name.startswith("README.md: draftloop") for name in ids) >= 9
    assert sum(name.split(":")[0].endswith(".py") for name in ids) >= 6


@pytest.mark.parametrize("page", PAGES)
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
