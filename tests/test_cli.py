"""The command line: every command on a toy checkpoint, what is printed where, and the exit status."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from functools import partial

import pytest
import transformers
import yaml

from draftloop.cli import main
from draftloop.core.errors import DraftloopError, EnvironmentFault, InputError
from draftloop.data.trunk import Trunk
from tests.command_line import called
from tests.toy_run import toy as toy

COMMANDS = ["train", "quickstart", "prepare", "evaluate", "audit", "doctor"]
SHORT = [
    "stages.0.optimiser.decay_share=0.5",
    "stages.0.steps=2",
    "stages.0.evaluations=1",
    "stages.1.steps=1",
    "stages.2.steps=1",
]


@pytest.fixture(scope="module")
def trained(toy):
    """What `draftloop train` printed, and its run directory."""
    done = subprocess.run(
        [sys.executable, "-m", "draftloop.cli", "train", str(toy / "recipe.yaml"), *SHORT, "--out", str(toy / "run")],
        capture_output=True, text=True, check=False, cwd=toy, env={**os.environ, "COLUMNS": "120"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done, toy / "run"


@pytest.fixture
def call(capsys, monkeypatch):
    """Run the command line in this process: (status, standard output, standard error)."""
    monkeypatch.setenv("COLUMNS", "120")
    transformers.utils.logging.disable_progress_bar()  # as the command line does where it is the first to import it
    return partial(called, capsys)


def assert_one_sentence(err: str) -> None:
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("draftloop: ")
    assert "Traceback" not in err


# help ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help(call, command):
    status, out, err = call(*command, "--help")
    assert status == 0
    assert "Usage" in out
    assert not err
    for name in COMMANDS if not command else []:
        assert name in out


def test_help_does_not_wait_for_torch():
    code = "import sys, draftloop.cli as c\ntry: c.main(['train', '--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments", [["train"], ["train", "r.yaml", "--what"], ["nothing"], ["evaluate", "d", "--rule", "x"]]
)
def test_a_wrong_command_line_is_status_2(call, arguments):
    status, out, err = call(*arguments)
    assert status == 2
    assert not out
    assert "Traceback" not in err


# train -----------------------------------------------------------------------------------------------------------------
def test_train_prints_the_account(trained):
    done, out = trained
    idle = "Stage sft: optimiser.decay_share has no effect on schedule cosine."
    for word in ("Stage sft: validation tau", idle, "tau", "per verification", "Lossless:", str(out / "report.html")):
        assert word in done.stdout.replace("\n", ""), word
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
    assert "train sft  2/2 steps" in done.stderr  # progress


def test_train_json_is_the_summary_and_nothing_else(call, toy, trained):
    status, out, err = call("train", toy / "recipe.yaml", *SHORT, "--out", trained[1], "--json")
    assert status == 0
    assert json.loads(out) == json.loads((trained[1] / "summary.json").read_text(encoding="utf-8"))
    assert "complete" in err


def test_a_new_run_in_json(toy, tmp_path):
    one = "stages=[{name: s, method: sft, steps: 1, evaluations: 1}]"
    done = subprocess.run(
        [sys.executable, "-m", "draftloop.cli", "train", toy / "recipe.yaml", one, "evaluate.decode_prompts=0",
         "evaluate.audit_prompts=0", "--out", tmp_path / "run", "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [stage["name"] for stage in found["stages"]] == ["untrained", "s"]
    assert found["lossless"] is None
    assert found["decoding"] is None


def test_stopped_by_hand_it_says_that_it_goes_on(toy, tmp_path):
    out = tmp_path / "run"
    long = ["stages.0.steps=100000", "stages.0.checkpoint_every=5", "stages.0.evaluations=1"]
    going = subprocess.Popen(
        [sys.executable, "-m", "draftloop.cli", "train", toy / "recipe.yaml", *long, "--out", out],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore Ctrl-C
    )  # fmt: skip
    patience = time.monotonic() + 120
    while not (out / "checkpoints").is_dir() and time.monotonic() < patience and going.poll() is None:
        time.sleep(0.05)
    going.send_signal(signal.SIGINT)
    told, err = going.communicate(timeout=60)
    assert going.returncode == 130, err
    assert "stopping after this step" in err
    assert re.search(r"Stage sft: step \d+ of 100000 is saved, and the same command goes on there\.", told)
    assert err.strip().splitlines()[-1] == "draftloop: stopped; the same command goes on where it was."
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("flags", "name", "stages"),
    [
        ((), "quickstart", ["specopd", "sft-continued"]),
        (("--from-scratch",), "quickstart-from-scratch", ["sft", "draft-opd", "specopd", "sft-continued"]),
    ],
)
def test_quickstart_is_a_recipe_that_takes_overrides(call, toy, tmp_path, flags, name, stages):
    """The packaged recipes, every stage of them, cut down to the toy."""
    given = yaml.safe_load((toy / "recipe.yaml").read_text(encoding="utf-8"))
    cut = [f"{part}={json.dumps(given[part])}" for part in ("target", "drafter", "precision")]
    cut += [f"data={json.dumps(given['data'])}", "evaluate.audit_prompts=2", "evaluate.decode_prompts=0"]
    cut += [f"stages.{stage}.{end}" for stage in stages for end in ("steps=2", "minutes=null")]
    status, out, err = call("quickstart", *flags, *cut, "--out", tmp_path / "run", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["name"] == name
    assert [stage["name"] for stage in found["stages"]] == ["untrained", *stages]
    assert found["stages"][-1]["start"] == ("sft" if flags else "init")
    assert all(stage["split"]["blocks"] > 0 for stage in found["stages"] if stage["name"] == "draft-opd")
    assert found["lossless"] is True


def test_a_run_that_begins_with_a_drafter_does_not_call_it_untrained(call, toy, trained, tmp_path):
    init = f'drafter={{"init": "{trained[1] / "drafter"}"}}'
    status, out, err = call("train", toy / "recipe.yaml", *SHORT, init, "--out", tmp_path / "run", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["stages"][0]["name"] == "init"
    assert "untrained" not in (tmp_path / "run" / "raw.jsonl").read_text(encoding="utf-8")


# prepare ---------------------------------------------------------------------------------------------------------------
def test_prepare_shows_sequences_and_train_takes_up_the_answers(call, toy, tmp_path):
    out = tmp_path / "run"
    status, told, err = call("prepare", toy / "recipe.yaml", *SHORT, "--out", out, "--show", 2)
    assert status == 0
    assert told.count(">>>") == 2
    assert told.count("<<<") == 2
    assert "train: 12 responses" in told
    assert "test: 6 responses" in told
    assert "Traceback" not in err
    before = (out / "trunks" / "train.jsonl").read_bytes()
    status, facts, err = call("prepare", toy / "recipe.yaml", *SHORT, "--out", out, "--json")
    assert status == 0
    assert not err
    found = json.loads(facts)
    assert found["train"]["responses"] == 12
    trunks = [Trunk.from_json(json.loads(line)["trunks"][0], "") for line in before.decode().split("\n")[1:-1]]
    assert found["train"]["supervised"] == sum(trunk.supervised for trunk in trunks)
    assert found["train"]["tokens"] == sum(map(len, trunks))
    assert (out / "trunks" / "train.jsonl").read_bytes() == before


# evaluate --------------------------------------------------------------------------------------------------------------
def test_evaluate_walks(call, toy, trained, tmp_path):
    arguments = ["evaluate", trained[1], "--target", toy / "target", "--dtype", "float32", "-p", toy / "test.jsonl",
                 "--max-new-tokens", 16, "--cache", tmp_path]  # fmt: skip
    status, out, err = call(*arguments, "--json")
    assert status == 0
    assert not err
    found = json.loads(out)
    summary = json.loads((trained[1] / "summary.json").read_text(encoding="utf-8"))
    delivered = next(stage for stage in summary["stages"] if stage["delivered"])
    assert found["how"] == "walk"
    assert found["speed"] is None
    assert found["acceptance"]["tau_pooled"] == delivered["tau_pooled"]
    assert found["acceptance"]["sets"].keys() == {"a", "b"}
    status, out, err = call(*arguments)
    assert status == 0
    assert f"{delivered['tau_pooled']:.2f}" in out
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "how", [[], ["--temperature", 0.7], ["--temperature", 1, "--rule", "ratio", "--batch-size", 4]]
)
def test_evaluate_decodes(call, toy, trained, tmp_path, how):
    arguments = ["evaluate", trained[1] / "drafter", "--target", toy / "target", "--dtype", "float32", "-p",
                 toy / "test.jsonl", "--max-new-tokens", 16, "--limit", 4, "--decode", *how]  # fmt: skip
    status, out, err = call(*arguments, "--json")
    assert status == 0
    assert not err
    found = json.loads(out)
    assert found["how"] == "decode"
    assert found["speed"]["prompts"] == 4
    assert found["speed"]["plain"]["tokens_per_s"] > 0
    assert found["acceptance"]["responses"] == 4
    if not how:  # the same drafter on the same prompts: walked and decoded agree
        walked = json.loads(call(*[a for a in arguments if a != "--decode"], "--cache", tmp_path, "--json")[1])
        assert walked["acceptance"]["tau_pooled"] == found["acceptance"]["tau_pooled"]
        status, out, err = call(*arguments)
        assert status == 0
        assert "tokens/s" in out
        assert "pays above tau" in out.replace("\n", " ")


def test_evaluate_walks_at_temperature_0_only(call, toy, trained):
    status, out, err = call("evaluate", trained[1], "--target", toy / "target", "--temperature", 1)
    assert status == 2
    assert not out
    assert_one_sentence(err)
    assert "--decode" in err


# audit -----------------------------------------------------------------------------------------------------------------
def test_audit(call, toy, trained):
    arguments = ["audit", trained[1], "--target", toy / "target", "-p", toy / "test.jsonl", "--count", 3,
                 "--max-new-tokens", 8]  # fmt: skip
    status, out, err = call(*arguments)
    assert status == 0
    assert out.startswith("lossless: 3 prompts, ")
    assert "Traceback" not in err
    status, out, err = call(*arguments, "--json")
    assert status == 0
    assert not err
    assert json.loads(out)["equal"] is True
    assert json.loads(out)["dtype"] == "float32"


def test_an_audit_that_fails_is_status_1(call, toy, trained, monkeypatch):
    from dataclasses import replace

    from draftloop.evaluate import audit as room

    whole = room.audit
    monkeypatch.setattr(room, "audit", lambda *a, **k: replace(whole(*a, **k), equal=False))
    status, out, _ = call("audit", trained[1], "--target", toy / "target", "-p", toy / "test.jsonl", "--count", 1)
    assert status == 1
    assert out.startswith("NOT LOSSLESS")


# doctor ----------------------------------------------------------------------------------------------------------------
def test_doctor(call, monkeypatch):
    status, out, err = call("doctor", "--json")
    assert status in (0, 3)
    assert not err
    assert isinstance(json.loads(out), list)
    import draftloop.doctor

    monkeypatch.setattr(draftloop.doctor, "healthy", lambda findings: False)
    assert call("doctor")[0] == 3


# exit status -----------------------------------------------------------------------------------------------------------
class OutOfMemoryError(RuntimeError):
    """By this name torch reports it, on every device."""


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (InputError("line 3 is not JSON", where="p.jsonl", fix="Mend it."), 2, "p.jsonl: line 3 is not JSON. Mend it."),
        (EnvironmentFault("the disk is full", where="/x"), 3, "/x: the disk is full."),
        (DraftloopError("this should not be"), 1, "this should not be."),
        (MemoryError(), 3, "out of memory"),
        (OutOfMemoryError("CUDA out of memory.\nTried to allocate"), 3, "out of memory"),
        (OSError(28, "No space left on device"), 3, "the disk is full"),
        (OSError(28, "No space left on device", "a/b"), 3, "a/b: the disk is full. Free some space"),
        (ValueError("two\nlines"), 1, "our fault: ValueError: two lines."),
        (KeyError("x"), 1, "our fault: KeyError: 'x'."),
        (AssertionError(), 1, "our fault: AssertionError"),
    ],
)
def test_every_error_is_one_sentence(call, monkeypatch, error, status, words):
    def fail():
        raise error

    monkeypatch.setattr("draftloop.doctor.diagnose", fail)
    found, out, err = call("doctor")
    assert found == status
    assert not out
    assert_one_sentence(err)
    assert words in err


@pytest.mark.parametrize("level", [["--log-level", "debug"], ["--log-level=debug"]])
def test_debug_shows_where(monkeypatch, level):
    def fail():
        raise ValueError("here")

    monkeypatch.setattr("draftloop.doctor.diagnose", fail)
    with pytest.raises(ValueError, match="here"):
        main([*level, "doctor"])


def test_warnings_are_a_line(call, monkeypatch):
    monkeypatch.setattr(
        "draftloop.doctor.diagnose", lambda: warnings.warn("made for\nanother target", stacklevel=2) or []
    )
    _, _, err = call("doctor", "--json")
    assert err == "draftloop: warning: made for another target\n"


def test_the_target_of_a_recipe_may_begin_with_a_tilde(call, toy, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(toy))
    status, out, err = call(
        "prepare", toy / "recipe.yaml", "target.model=~/target", "--out", tmp_path / "run", "--show", 1
    )
    assert status == 0, err
    assert ">>>" in out
