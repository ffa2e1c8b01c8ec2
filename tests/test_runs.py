"""Whole runs on a toy target: what they leave, what is delivered, what of a run directory is taken up or refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import yaml

from draftloop.core.errors import InputError
from draftloop.core.files import sha256_file
from draftloop.evaluate.tau import Response, acceptance
from draftloop.evaluate.walk import walk
from draftloop.formats.load import load_drafter
from draftloop.recipe_file import load_recipe
from draftloop.train.inputs import read_inputs
from draftloop.train.material import gather
from draftloop.train.metrics import read_metrics, same_but_timings
from draftloop.train.stage import StageRun
from tests.toy_run import toy_prompts
from tests.whole_runs import _no_figures as _no_figures
from tests.whole_runs import assert_same_run, files, rows, run, summary
from tests.whole_runs import toy as toy
from tests.whole_runs import whole as whole


# what a run leaves -----------------------------------------------------------------------------------------------------
def test_a_run_leaves_everything_and_nothing_half_written(whole):
    for name in ("metrics.jsonl", "summary.json", "report.html", "raw.jsonl", "recipe.yaml", "run.json"):
        assert (whole / name).stat().st_size > 0, name
    assert {p.name for p in (whole / "drafter").iterdir()} == {"config.json", "model.safetensors"}
    assert not [p for p in whole.rglob("*") if ".part" in p.name]
    assert any((whole / "tensorboard").iterdir())


def test_the_summary_has_what_is_promised(whole):
    found = summary(whole)
    assert [stage["name"] for stage in found["stages"]] == ["untrained", "sft", "opd", "more"]
    wanted = {"name", "tau_pooled", "tau_mean", "interval", "steps", "labels", "seconds", "per_position", "sets"}
    for stage, steps in zip(found["stages"], (0, 12, 8, 8), strict=True):
        assert wanted <= stage.keys()
        assert stage["steps"] == steps
        assert (stage["labels"] > 0) == (stage["seconds"] > 0) == (steps > 0)
        assert set(stage["sets"]) == {"a", "b"}
        assert stage["interval"][0] <= stage["tau_pooled"] <= stage["interval"][1]
    assert found["lossless"] is True
    assert found["audit"]["prompts"] == 3
    assert found["audit"]["tokens"] > 0
    assert sum(stage["delivered"] for stage in found["stages"]) == 1


def test_every_tau_of_the_summary_is_that_of_the_raw_rows(whole):
    raw = rows(whole)
    for stage in summary(whole)["stages"]:
        mine = [r for r in raw if r["kind"] == "walk" and r["arm"] == stage["name"]]
        assert len(mine) == 6
        steps = [n for row in mine for n in row["committed"]]
        assert stage["tau_pooled"] == pytest.approx(sum(steps) / len(steps))
        means = [sum(row["committed"]) / len(row["committed"]) for row in mine]
        assert stage["tau_mean"] == pytest.approx(sum(means) / len(means))
        again = acceptance([Response(**{k: v for k, v in row.items() if k not in ("kind", "arm")}) for row in mine])
        assert stage["interval"] == pytest.approx(list(again.interval))
        for name, part in stage["sets"].items():
            steps = [n for row in mine if row["set"] == name for n in row["committed"]]
            assert part["tau_pooled"] == pytest.approx(sum(steps) / len(steps))


def test_the_delivered_drafter_gives_the_tau_of_the_summary(whole):
    material = gather(load_recipe(whole / "recipe.yaml"), whole, new=False, quiet=True)
    drafter = load_drafter(whole / "drafter", material.target)
    found = summary(whole)
    told = next(stage for stage in found["stages"] if stage["delivered"])
    assert told["name"] == found["delivered"]
    walked = acceptance(walk(drafter, material.lessons["test"], material.store))
    assert walked.tau_pooled == told["tau_pooled"]
    assert walked.tau_mean == told["tau_mean"]
    assert list(walked.per_position) == told["per_position"]


def test_raw_rows_of_real_decoding_are_those_of_the_table(whole):
    found = summary(whole)["decoding"]
    for arm in found["arms"]:
        mine = [r for r in rows(whole) if r["kind"] == "decode" and r["arm"] == arm["name"]]
        assert len(mine) == found["prompts"] == 2
        steps = [n for row in mine for n in row["committed"]]
        assert arm["tau_pooled"] == pytest.approx(sum(steps) / len(steps))


def test_what_is_delivered_is_the_best_by_validation(toy, tmp_path, monkeypatch):
    """Scripted validation: the second stage's first look is the best of all."""
    taus = iter([1.1, 1.2, 1.7, 1.3, 1.6, 1.5])
    weights = []

    def look(self):
        weights.append({name: tensor.clone() for name, tensor in self.drafter.state_dict().items()})
        return next(taus)

    monkeypatch.setattr(StageRun, "_walk", look)
    run(toy / "recipe.yaml", tmp_path / "run")
    found = summary(tmp_path / "run")
    assert found["delivered"] == "opd"
    assert [stage["chosen_step"] for stage in found["stages"]] == [None, 12, 4, 4]
    assert [round(look["tau_pooled"], 1) for look in found["stages"][2]["validation"]] == [1.7, 1.3]
    delivered = load_drafter(tmp_path / "run" / "drafter").state_dict()
    for name, tensor in weights[2].items():
        assert torch.equal(delivered[name], tensor), name


def test_a_stage_begins_where_it_says(toy, whole, tmp_path):
    """`more` starts from sft, not from opd before it: its result is that of a run without opd."""
    recipe = yaml.safe_load((toy / "recipe.yaml").read_text(encoding="utf-8"))
    del recipe["stages"][1]
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    run(tmp_path / "short.yaml", tmp_path / "run")
    for stage in ("sft", "more"):
        name = f"stages/{stage}.safetensors"
        assert sha256_file(tmp_path / "run" / name) == sha256_file(whole / name), stage


def test_same_seed_same_run_and_another_seed_another(toy, whole, tmp_path):
    run(toy / "recipe.yaml", tmp_path / "again")
    assert_same_run(whole, tmp_path / "again")
    run(toy / "recipe.yaml", tmp_path / "other", ["seed=1", "stages.sft.steps=2", "stages.sft.evaluations=1"])
    first, other = read_metrics(whole)[0], read_metrics(tmp_path / "other")[0]
    assert first["loss"] != other["loss"]


# the run directory -----------------------------------------------------------------------------------------------------
def test_a_finished_run_says_so_and_is_left_alone(toy, whole):
    before = files(whole)
    said = run(toy / "recipe.yaml", whole)
    assert len(said) == 1
    assert "complete" in said[0]
    assert "--fresh" in said[0]
    assert files(whole) == before


def test_another_recipe_in_the_same_directory_is_refused(toy, whole):
    before = files(whole)
    with pytest.raises(InputError, match=r"another recipe \(`stages.0.optimiser.lr`: 0.003, now 0.5\)") as caught:
        run(toy / "recipe.yaml", whole, ["stages.sft.optimiser.lr=0.5"])
    assert "--fresh" in str(caught.value)
    assert files(whole) == before


def test_a_damaged_note_of_a_run_is_no_other_recipe(toy, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text("{x")
    before = files(tmp_path / "run")
    with pytest.raises(InputError, match=r"run\.json: the note that says .* is damaged"):
        run(toy / "recipe.yaml", tmp_path / "run")
    assert files(tmp_path / "run") == before


def test_fresh_begins_anew(toy, tmp_path):
    short = [f"stages.{s}.{k}" for s, k in (("sft", "steps=2"), ("opd", "steps=1"), ("more", "steps=1"))]
    run(toy / "recipe.yaml", tmp_path / "run", short)
    (tmp_path / "run" / "rollouts" / "left.safetensors").write_bytes(b"x")
    run(toy / "recipe.yaml", tmp_path / "run", [*short, "seed=3"], fresh=True)
    run(toy / "recipe.yaml", tmp_path / "new", [*short, "seed=3"])
    assert_same_run(tmp_path / "run", tmp_path / "new")
    assert not list((tmp_path / "run" / "rollouts").iterdir())


def test_fresh_with_bad_input_keeps_the_old_run(toy, whole):
    before = files(whole)
    with pytest.raises(InputError, match="missing.jsonl"):
        run(toy / "recipe.yaml", whole, ["data.train=[missing.jsonl]"], fresh=True)
    assert files(whole) == before


def test_a_directory_of_other_things_is_refused(toy, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="not empty and holds no run"):
        run(toy / "recipe.yaml", tmp_path, fresh=True)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_bad_input_leaves_no_directory_and_the_mended_recipe_runs(toy, tmp_path):
    out = tmp_path / "run"
    for wrong in ("data.test=[missing.jsonl]", "target.model=./nowhere", "drafter.target_layers=[0,9]"):
        with pytest.raises(InputError):
            run(toy / "recipe.yaml", out, [wrong])
        assert not out.exists(), wrong
    # found out only when the answers are there: nothing is trained yet, so another recipe may take the directory
    with pytest.raises(InputError, match="no prompt is left"):
        run(toy / "recipe.yaml", out, ["data.max_prompt_tokens=1"])
    run(toy / "recipe.yaml", out, ["stages=[{name: s, method: sft, steps: 1, evaluations: 1}]"])
    assert summary(out)["stages"][1]["steps"] == 1


def test_minutes_become_steps_once(toy, tmp_path, monkeypatch):
    budget = ["stages.0.steps=null", "stages.0.minutes=0.001", "stages.1.steps=null", "stages.1.minutes=0.001"]
    out = tmp_path / "run"
    measured = []
    measure = StageRun.measure
    monkeypatch.setattr(StageRun, "measure", lambda self, m: measured.append(measure(self, m)) or measured[-1] + 1)
    update, stop = StageRun._update, [3]

    def interrupted(self, steps):
        stop[0] -= 1
        if stop[0] == 0 and self.part.name == "sft":
            raise KeyboardInterrupt
        return update(self, steps)

    monkeypatch.setattr(StageRun, "_update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(toy / "recipe.yaml", out, budget)
    kept = load_recipe(out / "recipe.yaml")
    assert kept.stages[0].steps == measured[0] + 1
    assert kept.stages[0].minutes == 0.001
    assert kept.stages[1].steps is None
    run(toy / "recipe.yaml", out, budget)
    assert len(measured) == 2  # once a stage
    steps = [stage["steps"] for stage in summary(out)["stages"]]
    assert steps[1:] == [measured[0] + 1, measured[1] + 1, 8]
    # measuring changed nothing: a run with these steps written down is the same
    fixed = [f"stages.0.steps={steps[1]}", f"stages.1.steps={steps[2]}"]
    run(toy / "recipe.yaml", tmp_path / "fixed", fixed)
    assert same_but_timings(read_metrics(out), read_metrics(tmp_path / "fixed"))
    with pytest.raises(InputError) as caught:
        run(toy / "recipe.yaml", out, [*budget, "stages.0.optimiser.lr=0.1"])
    assert "steps" not in caught.value.what


def test_held_out_prompts_are_split_off(toy, tmp_path):
    prompts = toy_prompts(tmp_path / "all.jsonl", 12)
    one = "stages=[{name: s, method: sft, steps: 1, evaluations: 1}]"
    run(toy / "recipe.yaml", tmp_path / "run", [f"data.train=['{prompts}']", "data.validation=[]", "data.test=[]", one])
    data = summary(tmp_path / "run")["data"]
    assert [data[name]["prompts"] for name in ("train", "validation", "test")] == [10, 1, 1]


def test_a_recipe_without_stages_or_end_is_refused(toy, tmp_path):
    with pytest.raises(InputError, match="no stages"):
        run(toy / "recipe.yaml", tmp_path / "run", ["stages=[]"])
    with pytest.raises(InputError, match="'sft' has no end"):
        run(toy / "recipe.yaml", tmp_path / "run", ["stages.sft.steps=null"])
    assert not (tmp_path / "run").exists()


def test_more_threads_than_the_machine_can_use_are_refused(toy, tmp_path, monkeypatch):
    """Past what the system allows PyTorch crashes without a word."""
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    with pytest.raises(InputError, match=r"threads: 13 threads are more than 4 a core \(3 here\)"):
        run(toy / "recipe.yaml", tmp_path / "run", ["threads=13"])
    assert not (tmp_path / "run").exists()
    read_inputs(load_recipe(toy / "recipe.yaml", ["threads=12"]), tmp_path / "run")


def test_the_recipe_in_the_run_directory_is_the_whole_recipe(toy, whole):
    assert load_recipe(whole / "recipe.yaml") == load_recipe(toy / "recipe.yaml")
    note = json.loads((whole / "run.json").read_text(encoding="utf-8"))
    assert torch.__version__.startswith(note["versions"]["torch"].split("+")[0])
    assert note["hardware"]["cpu_cores"] >= 1


def test_two_processes_do_not_share_a_run_directory(tmp_path):
    from draftloop.train.material import alone

    with (
        alone(tmp_path / "run"),
        pytest.raises(InputError, match="another process works in this directory"),
        alone(tmp_path / "run"),
    ):
        pass
    with alone(tmp_path / "run"):  # free again
        pass
