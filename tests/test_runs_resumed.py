"""A run that is killed, or for which the disk has no room, ends as if never stopped."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftloop.core.errors import EnvironmentFault, InputError
from draftloop.recipe_file import load_recipe
from draftloop.train import checkpoint
from draftloop.train.material import gather
from draftloop.train.metrics import MetricsLog
from draftloop.train.stage import StageRun
from tests.whole_runs import ROOT, assert_same_run, run
from tests.whole_runs import _no_figures as _no_figures
from tests.whole_runs import toy as toy
from tests.whole_runs import whole as whole

# resume = never stopped ------------------------------------------------------------------------------------------------
STEP = ("draftloop.train.optimiser", "DrafterOptimiser.step")
MOMENTS = {
    "between the two first files": ("draftloop.train.material", "dump_recipe", 1, "before"),
    "while the prompts are answered": ("draftloop.supervise.responses", "_Book.add", 5, "after"),
    "in SFT, before any checkpoint": (*STEP, 4, "before"),
    "half-way through a checkpoint": ("draftloop.train.checkpoint", "_sync", 3, "before"),
    "right after a checkpoint": ("draftloop.train.stage", "save", 1, "after"),
    "in SFT, steps after a checkpoint": (*STEP, 9, "after"),
    "stage done, not yet noted": ("draftloop.train.job", "write_tensors", 1, "after"),
    "in the first rollout": ("draftloop.supervise.rollout", "response_trunk", 4, "after"),
    "second rollout done, not yet saved": ("draftloop.train.stage", "save_rollout", 2, "before"),
    "second rollout saved, no checkpoint": ("draftloop.train.stage", "save_rollout", 2, "after"),
    "in Draft-OPD": (*STEP, 12 + 6, "after"),
    "in the last stage": (*STEP, 12 + 8 + 3, "before"),
    "in the final evaluation": ("draftloop.train.final", "audit", 1, "before"),
    "before the report": ("draftloop.train.job", "write_report", 1, "before"),
}

SLOW = ("in SFT, steps after a checkpoint", "second rollout saved, no checkpoint", "in the last stage")


@pytest.fixture(scope="module")
def killed(request, toy, tmp_path_factory) -> dict[str, Path]:
    """One run for each moment that is tested in this session, killed there with SIGKILL."""
    folder = tmp_path_factory.mktemp("killed")
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    outs = {p["moment"]: folder / str(i) for i, p in enumerate(params) if p.get("moment") in MOMENTS}
    jobs = [{"recipe": str(toy / "recipe.yaml"), "out": str(outs[n]), "moment": MOMENTS[n]} for n in outs]
    (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "tests.killed", str(folder / "jobs.json")],
        cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [-signal.SIGKILL] * len(jobs), done.stderr
    return outs


@pytest.mark.parametrize(
    "moment", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in MOMENTS]
)
def test_killed_and_resumed_is_never_stopped(moment, killed, toy, whole):
    out = killed[moment]
    if moment != "before the report":
        assert not (out / "summary.json").exists()
    run(toy / "recipe.yaml", out)
    assert_same_run(whole, out)
    assert (out / "report.html").is_file()
    left = {p.name for p in out.iterdir()} - {p.name for p in whole.iterdir()}
    assert all(".part" in name for name in left), left  # a kill may leave a hidden rest, never under a final name


def test_a_resumed_run_takes_up_its_checkpoint(killed_late, toy):
    """Not only the same result: the work before the checkpoint is not done again."""
    out, updates = killed_late
    said = run(toy / "recipe.yaml", out)
    assert any("Going on with stage opd at step 4 of 8" in line for line in said)
    assert updates[0] == 4 + 8  # the rest of opd, and `more`


@pytest.fixture
def killed_late(toy, tmp_path, monkeypatch):
    """A run stopped in Draft-OPD after its checkpoint at step 4, and a counter of later updates."""
    update, count = StageRun._update, [0]

    def stopping(self, steps):
        if self.part.name == "opd" and self.step == 6:
            raise KeyboardInterrupt
        return update(self, steps)

    monkeypatch.setattr(StageRun, "_update", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(toy / "recipe.yaml", tmp_path / "run")

    def counting(self, steps):
        count[0] += 1
        return update(self, steps)

    monkeypatch.setattr(StageRun, "_update", counting)
    return tmp_path / "run", count


def test_what_a_lesson_teaches_does_not_depend_on_what_was_read_before(toy, whole):
    """A resumed run computes features for other batches first; each lesson is read alone."""
    material = gather(load_recipe(whole / "recipe.yaml"), whole, new=False, quiet=True)
    asked: list[int] = []
    fill = material.store.fill
    material.store.fill = lambda lessons, *rest: asked.append(sum(x.features is None for x in lessons)) or fill(lessons)
    run = StageRun(material, 0, material.initial, metrics=None)  # type: ignore[arg-type]
    run._gradient(0)
    assert max(asked) == 1


def test_changed_prompts_are_not_resumed_with(killed_late, toy):
    out, _ = killed_late
    before = (toy / "train.jsonl").read_text(encoding="utf-8")
    try:
        (toy / "train.jsonl").write_text(before.replace("cat", "cow"), encoding="utf-8")
        with pytest.raises(InputError, match="another set of prompts"):
            run(toy / "recipe.yaml", out)
    finally:
        (toy / "train.jsonl").write_text(before, encoding="utf-8")


# the disk is full ------------------------------------------------------------------------------------------------------
def fill_the_disk(where: str, patch: pytest.MonkeyPatch) -> None:
    """Let the n-th write of a kind fail as a full disk does."""
    calls = [0]

    def failing(function, at):
        def call(*args, **kwargs):
            calls[0] += 1
            if calls[0] >= at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*args, **kwargs)

        return call

    if where == "checkpoint":  # in the second one
        patch.setattr(checkpoint, "save_file", failing(checkpoint.save_file, 5))
    elif where == "metrics":
        opened = MetricsLog.__init__

        def open_full(self, *args, **kwargs):
            opened(self, *args, **kwargs)
            file = self._file
            full = {"write": failing(file.write, 9), "flush": file.flush, "fileno": file.fileno, "close": file.close}
            self._file = SimpleNamespace(**full)

        patch.setattr(MetricsLog, "__init__", open_full)
    elif where == "answers":
        patch.setattr(os, "fsync", failing(os.fsync, 8))
    else:
        replace = failing(os.replace, 1)
        patch.setattr(os, "replace", lambda a, b: (replace if Path(b).name == where else os.rename)(a, b))


@pytest.mark.parametrize("where", ["checkpoint", "metrics", "answers", "raw.jsonl"])
def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_is_intact(where, toy, whole, tmp_path, monkeypatch):
    out = tmp_path / "run"
    fill_the_disk(where, monkeypatch)
    with pytest.raises(EnvironmentFault, match="the disk is full") as caught:
        run(toy / "recipe.yaml", out)
    monkeypatch.undo()
    assert caught.value.exit_code == 3
    assert str(out) in str(caught.value)
    assert "same command" in str(caught.value)
    kept = list((out / "checkpoints").glob("*")) if (out / "checkpoints").is_dir() else []
    assert len(kept) == (where != "answers")
    assert not (out / "summary.json").exists()
    run(toy / "recipe.yaml", out)
    assert_same_run(whole, out)
