"""Handing a drafter to an engine: what is told of the target, of folders and flags, and who may write where."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from functools import partial

import pytest
import torch

from draftloop.cli import main
from draftloop.core import files
from draftloop.core.errors import InputError
from draftloop.drafter.build import new_drafter
from draftloop.drafter.families import spec_for
from draftloop.formats import export as room
from draftloop.formats.export import export
from draftloop.formats.load import load_drafter
from draftloop.formats.zlab import save_drafter
from draftloop.recipe import DrafterPart, Recipe
from draftloop.target.load import load_target
from draftloop.train.material import alone, command, load_recipe_drafter
from tests.command_line import called
from tests.test_serve_engine import engine_python
from tests.toy_run import toy_checkpoint, toy_prompts


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a target, another of the same shape, and a run whose drafter was made for the first."""
    folder = tmp_path_factory.mktemp("place")
    target = load_target(str(toy_checkpoint(folder / "target")), dtype="float32", device="cpu")
    toy_checkpoint(folder / "other", seed=1)
    drafter = new_drafter(spec_for(DrafterPart(block_size=4, layers=1, target_layers=[0, 2]), target), target)
    save_drafter(drafter, folder / "run" / "drafter")
    return folder


@pytest.fixture
def call(capsys, monkeypatch, place):
    """Run the command line in the place: (status, standard output, standard error)."""
    monkeypatch.chdir(place)

    return partial(called, capsys)


# export ---------------------------------------------------------------------------------------------------------------


def test_a_relative_target_is_written_whole_and_the_right_one_is_not_remarked_on(call, place, tmp_path):
    status, out, err = call("export", "run", "--for", "vllm", "-t", "target", "-o", tmp_path / "a")
    assert status == 0, err
    assert f"vllm serve {place / 'target'} " in out
    assert json.loads((tmp_path / "a" / "serve.json").read_text())["target"] == str(place / "target")
    assert "Note" not in out


def test_another_target_is_remarked_on(call, place, tmp_path):
    status, out, _ = call("export", "run", "--for", "vllm", "-t", "./other", "-o", tmp_path / "a")
    assert status == 0
    assert "is not the one that the drafter was trained for" in out
    status, out, _ = call("export", "run", "--for", "vllm", "-t", "./other", "-o", tmp_path / "b", "--json")
    assert "is not the one that the drafter was trained for" in json.loads(out)["notes"][-1]


def test_what_cannot_be_compared_is_said(call, tmp_path, monkeypatch):
    _, out, _ = call("export", "run", "--for", "vllm", "-t", "org/model", "-o", tmp_path / "a")
    assert "org/model is no folder here, so it is taken as a hub id" in out
    real = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 1 if name == "SC_AVPHYS_PAGES" else real(name))
    _, out, _ = call("export", "run", "--for", "vllm", "-t", "target", "-o", tmp_path / "b")
    assert "too large for the memory that is free here" in out


def test_a_target_that_only_the_engine_can_read_is_exported_for(call, tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "config.json").write_text('{"architectures": ["NeverHeardOfForCausalLM"]}')
    status, out, _ = call("export", "run", "--for", "vllm", "-t", tmp_path / "t", "-o", tmp_path / "a")
    assert status == 0
    assert "were not compared" in out


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "a/b/c", "~/nowhere-at-all", "run"])
def test_a_target_that_is_not_there_is_refused(call, tmp_path, name):
    status, _, err = call("export", "run", "--for", "vllm", "-t", name, "-o", tmp_path / "a")
    assert status == 2
    words = "no config.json" if name == "run" else "no such target folder"
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "a").exists()


def test_each_form_has_a_folder_of_its_own(call, place):
    for form in ("zlab", "speculators"):
        assert call("export", "run", "--for", "vllm", "--form", form, "-t", "target")[0] == 0
    for name, form in (("export-vllm", "zlab"), ("export-vllm-speculators", "speculators")):
        assert json.loads((place / "run" / name / "serve.json").read_text())["form"] == form


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def exchangeable(folder) -> bool:
    one, two = folder / ".one", folder / ".two"
    one.mkdir()
    two.mkdir()
    (one / "x").touch()
    done = files.exchange(one, two)
    assert (two / "x").exists() is done
    return done


def test_an_earlier_export_is_replaced_in_one_step(place, tmp_path, monkeypatch):
    if not exchangeable(tmp_path):
        pytest.skip("this file system cannot exchange two folders")
    drafter = load_drafter(place / "run" / "drafter")
    export(drafter, tmp_path / "a", target_name="x/y")
    monkeypatch.setattr(os, "rename", None)  # so nothing is moved aside, at any moment
    with torch.no_grad():
        drafter.fc.weight.mul_(2)
    export(drafter, tmp_path / "a", target_name="x/y")
    assert same(load_drafter(tmp_path / "a"), drafter)
    assert {path.name for path in tmp_path.iterdir()} == {"a", ".one", ".two"}


def test_where_folders_cannot_be_exchanged_the_old_one_is_moved_aside(place, tmp_path, monkeypatch):
    monkeypatch.setattr(room, "exchange", lambda one, other: False)
    drafter = load_drafter(place / "run" / "drafter")
    export(drafter, tmp_path / "a", target_name="x/y")
    with torch.no_grad():
        drafter.fc.weight.mul_(2)
    export(drafter, tmp_path / "a", target_name="x/y")
    assert same(load_drafter(tmp_path / "a"), drafter)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


# serve ----------------------------------------------------------------------------------------------------------------


def test_help_names_no_path_of_this_machine(call):
    _, out, _ = call("serve", "--help")
    assert sys.executable not in re.sub(r"[\s│]", "", out)
    assert os.path.dirname(sys.executable) not in re.sub(r"[\s│]", "", out)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("plain", [[], ["--plain"]], ids=["drafting", "plain"])
def test_the_users_flags_win_and_stand_once(call, tmp_path, engine, plain):
    python = engine_python(tmp_path / "python", device="cuda")
    status, out, err = call(
        "serve", "run", "--engine", engine, "--engine-python", python, "-t", "target", "--dry-run", *plain,
        "--port", 8123, "--trust-remote-code", "--", "--port", "9", "--host=0.0.0.0", "--trust-remote-code",
    )  # fmt: skip
    assert status == 0, err
    words = shlex.split(out.strip().splitlines()[-1])
    assert words[-4:] == ["--port", "9", "--host=0.0.0.0", "--trust-remote-code"]
    assert [words.count(flag) for flag in ("--port", "--host", "--trust-remote-code", "8123")] == [1, 0, 1, 0]
    assert ("--model-path" in words) == (engine == "sglang")


# parity ---------------------------------------------------------------------------------------------------------------


def test_a_folder_of_rows_belongs_to_one_process(call, place, tmp_path):
    python = engine_python(tmp_path / "python")
    toy_prompts(tmp_path / "some.jsonl", 2)
    arguments = ("parity", "run", "-t", "target", "--engine-python", python, "-p", tmp_path / "some.jsonl")
    with alone(tmp_path / "rows"):
        status, _, err = call(*arguments, "--max-new-tokens", 4, "-o", tmp_path / "rows")
    assert status == 2, err
    assert "another process works in this directory" in err
    assert not list((tmp_path / "rows").iterdir())


# what is written down -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", ["1", "2"])
def test_a_recorded_command_can_be_typed_again(monkeypatch, world):
    given = ["train", "my recipe.yaml", 'data.train=["a b.jsonl", "c.jsonl"]', "--out", "it's"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/draftloop", *given])
    monkeypatch.setenv("WORLD_SIZE", world)
    words = shlex.split(command())
    assert words[-len(given) :] == given
    assert words[0] == ("draftloop" if world == "1" else "torchrun")


def test_a_target_of_another_shape_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    """By its config.json: the engine loads it, not we."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"hidden_size": 64, "vocab_size": 49152, "num_hidden_layers": 30}')
    with pytest.raises(SystemExit) as done:
        main(["export", "bundled", "--target", "other"])
    assert done.value.code == 2
    assert "hidden size 576, this one has 64" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


# a given drafter and a named family -------------------------------------------------------------------------------------


def test_a_drafter_of_another_family_than_the_recipe_names_is_refused(place):
    target = load_target(str(place / "target"), dtype="float32", device="cpu")
    given = str(place / "run" / "drafter")
    for family in ("dflash", "eagle3"):
        recipe = Recipe.model_validate({"drafter": {"init": given, "family": family}})
        if family == "dflash":
            assert load_recipe_drafter(recipe, target)[0].spec.family == "dflash"
            continue
        with pytest.raises(InputError, match=r"is a drafter of family dflash, and the recipe wants eagle3"):
            load_recipe_drafter(recipe, target)


def test_cells_that_a_given_drafter_overrules_are_told(place):
    target = load_target(str(place / "target"), dtype="float32", device="cpu")
    given = {"init": str(place / "run" / "drafter")}
    own = load_recipe_drafter(Recipe.model_validate({"drafter": given}), target)[0].spec
    asked = {**given, "layers": own.layers + 1, "taps": len(own.target_layers)}
    with pytest.warns(UserWarning, match=f"its own shape: layers is {own.layers}, not {own.layers + 1}$"):
        load_recipe_drafter(Recipe.model_validate({"drafter": asked}), target)
