"""docs/recipe.md says what the models say."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftloop.recipe import Recipe
from draftloop.recipe_methods import METHODS
from draftloop.recipe_reference import allowed, item_of, keys, reference, section_of, sections

DOCS = Path(__file__).parents[1] / "docs" / "recipe.md"


def test_the_page_is_up_to_date():
    fix = "run: python -m draftloop.recipe_reference > docs/recipe.md"
    assert DOCS.read_text(encoding="utf-8") == reference(), fix


@pytest.mark.parametrize("path", sections())
def test_every_key_has_a_sentence(path):
    for key, info in keys(sections()[path]).items():
        if not section_of(info.annotation) and not section_of(item_of(info.annotation)):
            assert info.description, f"{path}.{key}"
        assert f"| `{key}` |" in reference()


def test_sections_stand_in_the_recipes_order():
    page = reference()
    places = [page.index(f"## `{path}`\n") for path in sections() if path]
    assert places == sorted(places)
    assert len(places) >= 8
    tops = [path for path in sections() if path and "." not in path.replace(".N", "")]
    order = [key + ".N" if item_of(info.annotation) else key for key, info in keys(Recipe).items()]
    assert tops == [key for key in order if key in sections()]


def test_every_method_has_its_row():
    page = reference()
    assert "| `draft-opd` | rollout | rollout | recorded | draft_opd | 0.0003 |" in page
    assert all(f"| `{name}` |" in page for name in METHODS)


def test_links_lead_to_headings():
    page = reference()
    anchors = {line[3:].strip("`").lower().replace(".", "") for line in page.splitlines() if line.startswith("## ")}
    links = [part.split(")")[0] for part in page.split("](#")[1:]]
    assert links
    assert set(links) <= anchors


@pytest.mark.parametrize(
    ("path", "key", "words"),
    [
        ("stages.N.optimiser", "beta1", "a number of at least 0 and below 1"),
        ("stages.N.objective", "gamma", "a number above 0 and at most 1"),
        ("drafter", "mask_token", "a whole number, or text, or null"),
        ("drafter", "target_layers", "a list of whole numbers, or null"),
        ("target", "dtype", "auto, float32 or bfloat16"),
        ("target", "trust_remote_code", "true or false"),
        ("data", "template_kwargs", "a mapping"),
        ("stages.N", "name", "text that matches `^[A-Za-z0-9_.-]+$`"),
    ],
)
def test_words_for_what_a_key_takes(path, key, words):
    assert allowed(keys(sections()[path])[key]) == words
