"""`benchmarks/results.py check`: one line and status 0 where nothing is stale, the stale files by name else."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", ["results.py", "check"])
    return importlib.import_module("results")


@pytest.mark.parametrize("stale", [False, True])
def test_a_check_says_what_it_found(results, monkeypatch, capsys, stale):
    """Fails if success is silent, or if it is told where a file is stale."""
    file = ROOT / "LICENSE"
    text = file.read_text(encoding="utf-8")
    monkeypatch.setattr(results, "derive", lambda: {file: text + "more" * stale})
    assert results.main() == int(stale)
    out, err = capsys.readouterr()
    assert out == ("" if stale else "files that are what their raw rows give: 1\n")
    assert ("LICENSE is not what its raw rows give" in err) == stale
