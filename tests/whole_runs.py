"""Whole runs on the toy target: how they are made, read and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftloop.core.files import sha256_file, write_text
from draftloop.recipe_file import load_recipe
from draftloop.train import job
from draftloop.train.job import train
from draftloop.train.metrics import read_metrics, same_but_timings, without_timings
from tests.toy_run import toy as toy

ROOT = Path(__file__).parent.parent


def run(recipe: Path, out: Path, overrides=(), **options):
    said: list[str] = []
    train(load_recipe(recipe, overrides), out=out, quiet=True, say=said.append, **options)
    return said


def summary(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text(encoding="utf-8"))


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "raw.jsonl").read_text(encoding="utf-8").splitlines()]


def files(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): sha256_file(p) for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def whole(toy) -> Path:
    """A run that was never stopped."""
    run(toy / "recipe.yaml", toy / "whole")
    return toy / "whole"


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch):
    """Drawing is half of a toy run's time; `whole`, made before this, has the real report."""
    monkeypatch.setattr(job, "write_report", lambda folder: write_text(folder / "report.html", "drawn elsewhere"))


def assert_same_run(a: Path, b: Path) -> None:
    assert same_but_timings(read_metrics(a), read_metrics(b))
    for name in ("drafter/model.safetensors", *(f"stages/{s}.safetensors" for s in ("sft", "opd", "more"))):
        assert sha256_file(a / name) == sha256_file(b / name), name
    mine, theirs = summary(a), summary(b)
    for part in ("stages", "delivered", "gain", "audit", "lossless", "drafter", "data"):
        assert without_timings(mine[part]) == without_timings(theirs[part]), part
    assert [r for r in rows(a) if r["kind"] == "walk"] == [r for r in rows(b) if r["kind"] == "walk"]
    assert (a / "recipe.yaml").read_bytes() == (b / "recipe.yaml").read_bytes()
