"""A stage that ends when tau on validation no longer rises: when it does, when it does not, and that a kill changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftloop.core.errors import InputError
from draftloop.core.files import write_text
from draftloop.recipe import StopPart
from draftloop.recipe_file import load_recipe
from draftloop.train import job
from draftloop.train.job import train
from draftloop.train.metrics import read_metrics, same_but_timings
from draftloop.train.stage import StageRun, exhausted
from tests.toy_run import toy as toy

ONE = [
    "stages=[{name: s, method: overlap, steps: 8, evaluations: 8, stop: {patience: 2, rise: 0.05}}]",
    "evaluate={decode_prompts: 0, audit_prompts: 0}",
]


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch):
    monkeypatch.setattr(job, "write_report", lambda folder: write_text(folder / "report.html", "drawn elsewhere"))


@pytest.fixture
def scripted(monkeypatch):
    """Validation finds these, one after the other: of a run that is taken up again, from the look that it is at."""

    def script(taus):
        monkeypatch.setattr(StageRun, "_walk", lambda self: taus[len(self.validation)])

    return script


def run(toy: Path, out: Path, *overrides: str) -> list[str]:
    said: list[str] = []
    train(load_recipe(toy / "recipe.yaml", [*ONE, *overrides]), out=out, quiet=True, say=said.append)
    return said


def stage(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text(encoding="utf-8"))["stages"][-1]


def looks(out: Path) -> list[int]:
    return [row["step"] for row in read_metrics(out) if row["kind"] == "validation"]


# the rule --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("taus", "patience", "rise", "ends"),
    [
        ([2.0], 1, 0.0, False),
        ([2.0, 1.9], 1, 0.0, True),
        ([2.0, 2.0], 1, 0.0, True),  # level is not risen
        ([2.0, 2.1], 1, 0.0, False),
        ([2.0, 2.04, 2.06], 2, 0.05, False),  # creeping adds up
        ([2.0, 2.04, 2.05], 2, 0.05, True),
        ([2.0, 1.5, 1.6], 2, 0.0, True),  # above the one before, not above the best
        ([2.0, 1.5, 2.5, 2.4], 2, 0.0, False),  # a rise begins the wait anew
        ([2.0, 1.0, 1.0, 1.0], None, 0.0, False),
        ([], 1, 0.0, False),
    ],
)
def test_when_a_stage_ends(taus, patience, rise, ends):
    assert exhausted(taus, StopPart(patience=patience, rise=rise)) is ends


@given(taus=st.lists(st.integers(0, 6), min_size=1, max_size=12), patience=st.integers(1, 4))
def test_it_ends_at_the_first_look_that_lies_patience_behind_the_best(taus, patience):
    """Without a least rise, what counts is how long ago the highest tau so far was first seen."""
    for n in range(1, len(taus) + 1):
        seen = taus[:n]
        waited = n - 1 - seen.index(max(seen))
        assert exhausted([float(t) for t in seen], StopPart(patience=patience)) is (waited >= patience)


@pytest.mark.parametrize("wrong", ["patience: 0", "patience: 1.5", "rise: -0.1", "patients: 3"])
def test_a_wrong_cell_is_refused(toy, wrong):
    with pytest.raises(InputError, match="stop"):
        load_recipe(toy / "recipe.yaml", [f"stages.0.stop={{{wrong}}}"])


# in a run --------------------------------------------------------------------------------------------------------------
def test_it_stops_and_keeps_the_best(toy, tmp_path, scripted):
    scripted([1.0, 1.2, 1.5, 1.52, 1.4])
    said = run(toy, tmp_path / "run")
    found = stage(tmp_path / "run")
    assert (found["steps"], found["chosen_step"]) == (
        4,
        3,
    )  # 1.52 is the best drafter, though no rise worth waiting for
    assert [look["step"] for look in found["validation"]] == looks(tmp_path / "run") == [0, 1, 2, 3, 4]
    assert sum(row["kind"] == "train" for row in read_metrics(tmp_path / "run")) == 4
    assert "Stage s ended at step 4 of 8: tau on validation had not risen by more than 0.05 in 2 walks." in said
    kept = load_recipe(tmp_path / "run" / "recipe.yaml").stages[0]
    assert (kept.steps, kept.stop.patience, kept.stop.rise) == (8, 2, 0.05)


def test_it_does_not_stop_while_tau_rises(toy, tmp_path, scripted):
    scripted([1.0, 0.9, 1.1, 1.05, 1.2, 1.1, 1.3, 1.2, 1.4])
    said = run(toy, tmp_path / "run")
    found = stage(tmp_path / "run")
    assert (found["steps"], found["chosen_step"]) == (8, 8)
    assert not any("ended at" in line for line in said)


def test_what_a_stage_begins_with_counts_and_is_no_result_of_it(toy, tmp_path, scripted):
    """A drafter that training only makes worse: the stage ends early, and its result is the best that it made."""
    scripted([3.0, 1.5, 1.6])
    run(toy, tmp_path / "run")
    found = stage(tmp_path / "run")
    assert (found["steps"], found["chosen_step"]) == (2, 2)


def test_without_patience_nothing_is_walked_before_the_first_step(toy, tmp_path, scripted):
    scripted([1.0] * 8)
    run(toy, tmp_path / "run", "stages.0.stop.patience=null")
    assert looks(tmp_path / "run") == [1, 2, 3, 4, 5, 6, 7, 8]


def test_until_it_stops_it_is_the_stage_that_does_not(toy, tmp_path):
    """The patience changes no step: real walks, the same losses."""
    run(toy, tmp_path / "short", "stages.0.stop.rise=9")
    run(toy, tmp_path / "long", "stages.0.stop.patience=null")
    short, long = (
        [(row["step"], row["loss"], row["lr"]) for row in read_metrics(tmp_path / name) if row["kind"] == "train"]
        for name in ("short", "long")
    )
    assert len(short) == 2
    assert long[:2] == short
    assert len(long) == 8


# a kill ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("function", "count"),
    [
        ("draftloop.train.stage.StageRun._update", 1),  # after the first look, before any checkpoint
        ("draftloop.train.stage.StageRun._update", 3),
        ("draftloop.train.stage.StageRun.save", 4),  # right before the checkpoint at which it stops
        ("draftloop.train.job._note_down", 1),  # it has stopped, and its checkpoint is the last
    ],
)
def test_killed_and_resumed_is_never_stopped(toy, tmp_path, scripted, monkeypatch, function, count):
    taus = [1.0, 1.2, 1.5, 1.52, 1.4]
    scripted(taus)
    run(toy, tmp_path / "whole")
    room, _, name = function.rpartition(".")
    owner = StageRun if room.endswith("StageRun") else job
    real, calls = getattr(owner, name), [0]

    def interrupted(*arguments):
        calls[0] += 1
        if calls[0] == count:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(toy, tmp_path / "run")
    run(toy, tmp_path / "run")
    assert same_but_timings(read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "run"))
    assert stage(tmp_path / "run")["steps"] == stage(tmp_path / "whole")["steps"] == 4
    one, other = ((tmp_path / n / "drafter" / "model.safetensors").read_bytes() for n in ("whole", "run"))
    assert one == other
