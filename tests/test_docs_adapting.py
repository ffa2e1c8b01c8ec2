"""docs/adapting.md runs: every command, and its Python, on a toy in the folders that the page names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
import transformers

import draftloop
from draftloop.cli import main
from draftloop.core.files import write_text
from draftloop.drafter.build import new_drafter
from draftloop.drafter.families import spec_for
from draftloop.recipe import DrafterPart
from draftloop.train import job
from tests.test_adapt import SMALL, traffic
from tests.toy_run import toy_checkpoint, toy_prompts

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "adapting.md").read_text(encoding="utf-8")
FEW = ["stages.adapt.steps=2", "stages.adapt.evaluations=1", "evaluate.decode_prompts=0", "evaluate.audit_prompts=0"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """What the page names: a target, a run's drafter, traffic, held-out prompts, and a folder called `bundled`."""
    monkeypatch.chdir(tmp_path)
    toy_checkpoint(tmp_path / "my-fine-tune")
    target = draftloop.load_target("my-fine-tune", dtype="float32", device="cpu")
    part = DrafterPart(block_size=4, layers=1, target_layers=[0, 2])
    for seed, folder in enumerate((tmp_path / "runs/mine/drafter", tmp_path / "bundled")):
        draftloop.save_drafter(new_drafter(spec_for(part, target), target, seed), folder, dtype=torch.float32)

    traffic(tmp_path / "traffic.jsonl", 24)
    toy_prompts(tmp_path / "heldout.jsonl", 4)
    monkeypatch.setattr(job, "write_report", lambda folder: write_text(folder / "report.html", "drawn elsewhere"))
    transformers.utils.logging.disable_progress_bar()
    return tmp_path


def test_every_command_runs(place, capsys):
    commands = re.findall(r"^    (draftloop .*)$", PAGE, re.M)
    assert [shlex.split(line)[1] for line in commands] == ["evaluate", "adapt", "adapt"]
    for line in commands:
        _, command, *arguments = shlex.split(line)
        small = [*SMALL, *FEW] if command == "adapt" else ["--max-new-tokens", "8", "--decode-prompts", "1"]
        with pytest.raises(SystemExit) as done:
            main([command, *arguments, *small])
        assert not done.value.code, (line, capsys.readouterr().err)
    assert (place / "compared" / "rows.jsonl").is_file()
    assert (place / "compared" / "rows.png").is_file()
    assert (place / "runs" / "adapted" / "summary.json").is_file()


def test_its_python_runs(place, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    real = draftloop.adapt_recipe
    monkeypatch.setattr(
        draftloop.api, "adapt_recipe", lambda *a, **k: real(*a, **{**k, "minutes": None}, overrides=[*SMALL, *FEW])
    )
    exec(compile(code, "adapting.md", "exec"), {})
    assert re.search(r"^\d\.\d+ (True|False)$", capsys.readouterr().out, re.M)


def test_what_it_says_of_the_recipe_is_so():
    from draftloop.recipe_file import load_recipe
    from draftloop.train.adapt import RECIPE

    recipe = load_recipe(RECIPE)
    (stage,) = recipe.stages
    assert f"at most {recipe.data.held_out} prompts" in PAGE
    assert (stage.objective.kind, stage.start) == ("e2e_tv", "init")
    assert set(stage.mixture) == {"trunk"}
    assert stage.stop.patience == stage.evaluations / 4
