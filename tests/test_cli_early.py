"""What the command line says before a model is loaded: wrong paths, and options that have no effect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import yaml

import draftloop
from draftloop.drafter.build import new_drafter
from draftloop.drafter.families import spec_for
from draftloop.recipe import DrafterPart
from tests.command_line import called
from tests.toy_run import toy_recipe


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A recipe, its target and prompts, and a drafter."""
    folder = tmp_path_factory.mktemp("toy")
    recipe = toy_recipe(folder)
    recipe["stages"] = [{"name": "s", "method": "sft", "steps": 1}]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    target = draftloop.load_target(folder / "target", dtype="float32", device="cpu")
    part = DrafterPart(block_size=4, layers=1, target_layers=[0, 2])
    draftloop.save_drafter(new_drafter(spec_for(part, target), target, 0), folder / "drafter", dtype=torch.float32)
    return folder


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    """Run a command: (status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    return partial(called, capsys)


@pytest.fixture
def no_target(monkeypatch):
    """Any loading of a target, or look for an engine, is a failure: without the early checks these tests fail."""

    def fail(*_, **__):
        raise AssertionError("it came to loading")

    for place in ("draftloop.api.load_target", "draftloop.target.load.load_target", "draftloop.engines.serve.find_engine",
                  "draftloop.train.material.load_target"):  # fmt: skip
        monkeypatch.setattr(place, fail)


def commands(toy, *, prompts=None, drafter=None, out=None):
    """Each command that loads a target, with one thing wrong."""
    prompts, drafter = prompts or toy / "test.jsonl", drafter or toy / "drafter"
    target = ["-t", toy / "target", "-p", prompts]
    rows = ["--out", out / "rows.jsonl"] if out else []
    run = ["--out", out / "run"] if out else []
    adapt = ["adapt", "-t", toy / "target", "-d", drafter, "-p", prompts, *run]
    trained = [f"data.train=['{prompts}']", f"drafter={{init: '{drafter}'}}"]
    yield ["evaluate", drafter, *target, *rows]
    yield ["evaluate", "--compare", drafter, "none", *target, *rows]
    yield ["parity", drafter, *target, *run]
    yield adapt
    yield [*adapt, "--dry-run"]
    yield ["train", toy / "recipe.yaml", *trained, *run]
    if not out:
        yield ["audit", drafter, *target]


def test_a_missing_prompt_file_is_told_first(call, toy, no_target, tmp_path):
    for command in commands(toy, prompts=tmp_path / "none.jsonl"):
        status, _, err = call(*command)
        assert status == 2, (command, err)
        assert "none.jsonl: there is no such prompt file" in err, command
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("there", [False, True])
def test_a_missing_drafter_is_told_first(call, toy, no_target, tmp_path, there):
    wrong = tmp_path / "wrong"
    if there:
        wrong.mkdir()
    for command in commands(toy, drafter=wrong):
        status, _, err = call(*command)
        assert status == 2, (command, err)
        assert str(wrong) in err, command
    assert [path.name for path in tmp_path.iterdir()] == ["wrong"] * there


def test_where_nothing_can_be_written_is_told_first(call, toy, no_target, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for command in commands(toy, out=tmp_path / "file"):
        status, _, err = call(*command)
        assert status == 2, (command, err)
        assert f"{tmp_path / 'file'}: this is a file, not a folder" in err, command


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="a folder in which the root user cannot write either")
def test_where_even_root_cannot_write_is_told_first(call, toy, no_target):
    """Fails if permissions are asked instead of the system."""
    status, _, err = call("evaluate", toy / "drafter", "-t", toy / "target", "-o", "/proc/there/rows.jsonl")
    assert (status, "/proc: cannot write" in err) == (3, True), err


def test_a_name_or_a_number_that_cannot_be_meant_is_told_first(call, toy, no_target, tmp_path):
    for words, given in {
        "none: this stands for plain decoding": ["none"],
        "--top-p: 0 is not above 0 and at most 1": [toy / "drafter", "--top-p", 0],
        "--top-p: 1.5 is not": [toy / "drafter", "--compare", "none", "--top-p", 1.5],
        "--confidence: nan is not above 0": [toy / "drafter", "--confidence", "nan"],
        "--confidence: 2 is not": [toy / "drafter", "--confidence", 2],
        f"{tmp_path}: this is a folder": [toy / "drafter", "--out", tmp_path],
    }.items():
        status, _, err = call("evaluate", "-t", toy / "target", "-p", toy / "test.jsonl", *given)
        assert (status, words in err) == (2, True), err


def test_plain_decoding_in_a_drafters_place_is_told_with_a_fix_that_there_is(call, toy, no_target):
    """Fails if a command advises an option that only another one has."""
    for command in commands(toy, drafter="none"):
        if command[0] in ("audit", "evaluate") and "--compare" not in command:
            status, _, err = call(*command)
            assert status == 2
            assert "Name a drafter folder or a run directory; none is for `draftloop evaluate --compare` alone." in err


def test_a_wrong_prompt_file_costs_no_import_of_torch():
    """Fails if the API, or torch, is imported before the files are looked at."""
    script = (
        "import sys; from draftloop.cli import main\n"
        "try: main(['evaluate', 'bundled', *sys.argv[1:], '-p', 'nowhere.jsonl'])\n"
        "except SystemExit as done: assert done.code == 2\n"
        "assert 'torch' not in sys.modules"
    )
    for more in ([], ["--compare", "none"]):
        done = subprocess.run([sys.executable, "-c", script, *more], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "there is no such prompt file" in done.stderr


@pytest.mark.parametrize(
    ("options", "note"),
    [
        (["--rule", "ratio"], "--rule has no effect at temperature 0"),
        (["--offline", "--top-k", 5, "--top-p", 0.9], "--top-k and --top-p have no effect at temperature 0"),
        (["--batch-size", 1], "--batch-size has no effect where nothing is decoded for real"),
        (["--decode-prompts", 4], "--decode-prompts has no effect without --compare"),
        (["--decode", "--cache", "x"], "--cache has no effect with --decode, which keeps no answers"),
        (["--compare", "none", "--rule", "match"], "--rule has no effect at temperature 0"),
        (["--engine", "eager"], "--engine has no effect where nothing is decoded but answers that are not kept yet"),
        (["--compare", "none", "--decode-prompts", 0, "--engine", "graph"],
         "--engine has no effect where nothing is decoded but answers that are not kept yet"),
        (["--decode", "--engine", "graph"], ""),
        (["--offline", "--temperature", 1, "--rule", "ratio", "--top-k", 5], ""),
        (["--decode", "--batch-size", 2], ""),
        (["--compare", "none", "--temperature", 0, "--temperature", 1, "--rule", "ratio", "--batch-size", 2], ""),
    ],
)  # fmt: skip
def test_options_without_effect_are_named(call, toy, monkeypatch, options, note):
    monkeypatch.setattr("draftloop.api.load_target", lambda *_, **__: sys.exit(0))  # far enough
    status, out, err = call("evaluate", toy / "drafter", "-t", toy / "target", "-p", toy / "test.jsonl", *options)
    assert (status, out) == (0, "")
    assert err == (f"note: {note}.\n" if note else "")


def test_a_note_leaves_json_alone(call, toy, tmp_path):
    given = ["prepare", toy / "recipe.yaml", "--out", tmp_path / "run", "--json"]
    status, out, err = call(*given, "--show", 2)
    assert status == 0
    assert json.loads(out)
    assert "note: --show has no effect with --json." in err.splitlines()
    assert "note" not in call(*given)[2]


def test_a_fresh_dry_run_looks_past_another_run(call, toy, tmp_path):
    """As the run itself would; without `fresh` it refuses the folder."""
    given = [toy / "recipe.yaml", "--out", tmp_path / "run"]
    assert call("train", *given, "evaluate.decode_prompts=0", "evaluate.audit_prompts=0")[0] == 0
    adapt = ["adapt", "-t", toy / "target", "-d", toy / "drafter", "-p", toy / "train.jsonl", "--out", tmp_path / "run",
             "--dry-run", "data.response.max_new_tokens=8", "target.device=cpu", "target.dtype=float32",
             "data.max_prompt_tokens=64"]  # fmt: skip
    status, _, err = call(*adapt)
    assert (status, "another recipe" in err) == (2, True)
    status, out, err = call(*adapt, "--fresh")
    assert status == 0, err
    assert "The run would lie" in out
