"""Ctrl-C and SIGTERM in training: the last whole step is saved, and the run that goes on from it was never stopped."""

from __future__ import annotations

import json
import os
import signal

import pytest

from draftloop.core.files import sha256_file
from draftloop.train.halt import Halted, heeding
from draftloop.train.metrics import read_metrics, same_but_timings
from draftloop.train.optimiser import DrafterOptimiser
from draftloop.train.stage import StageRun
from tests.whole_runs import _no_figures as _no_figures
from tests.whole_runs import run
from tests.whole_runs import toy as toy

# what an overlap sums up for its metrics must survive; a rollout belongs to the step that begins with it
STAGES = [
    {"name": "own", "method": "overlap", "proposals": "sampled", "steps": 6, "evaluations": 2},
    {"name": "opd", "method": "draft-opd", "steps": 5, "evaluations": 1, "rollout": {"refresh_every": 3}},
]
SHORT = [f"stages={json.dumps(STAGES)}", "evaluate={decode_prompts: 0, audit_prompts: 0}"]


@pytest.fixture(autouse=True)
def usual():
    """A process that was begun in the background, as in CI, ignores Ctrl-C; here nobody has changed anything."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def undisturbed(toy):
    run(toy / "recipe.yaml", toy / "undisturbed", SHORT)
    return toy / "undisturbed"


@pytest.fixture
def signalled(monkeypatch):
    """Have this process sent signals during the n-th optimiser step or rollout of a run."""

    def at(n, *numbers, owner=DrafterOptimiser, name="step"):
        whole, calls = getattr(owner, name), [0]

        def trap(self, *arguments):
            calls[0] += 1
            if calls[0] == n:
                for number in numbers:
                    os.kill(os.getpid(), number)
            return whole(self, *arguments)

        monkeypatch.setattr(owner, name, trap)

    return at


@pytest.mark.parametrize(
    ("n", "name", "step"),
    [
        (2, "step", "step 2 of 6"),  # between two checkpoints
        (3, "step", "step 3 of 6"),  # at one
        (6, "step", "step 6 of 6"),  # at the stage's end
        (10, "_refresh", "step 4 of 5"),  # where a rollout is made, the second of its stage
    ],
)
def test_a_stage_stops_after_the_step_and_goes_on_there(toy, undisturbed, tmp_path, signalled, capfd, n, name, step):
    """Fails if the signal is obeyed in the middle of the step, if metrics show the save, or if their sums are lost."""
    signalled(n, signal.SIGINT, owner=DrafterOptimiser if name == "step" else StageRun, name=name)
    with pytest.raises(KeyboardInterrupt):
        run(toy / "recipe.yaml", tmp_path / "run", SHORT)
    assert "stopping after this step" in capfd.readouterr().err
    said = run(toy / "recipe.yaml", tmp_path / "run", SHORT)
    assert any(f"at {step}" in line for line in said), said
    assert same_but_timings(read_metrics(undisturbed), read_metrics(tmp_path / "run"))
    for file in ("drafter/model.safetensors", "stages/own.safetensors", "stages/opd.safetensors"):
        assert sha256_file(undisturbed / file) == sha256_file(tmp_path / "run" / file), file


def test_a_second_ctrl_c_stops_at_once(toy, tmp_path, signalled):
    signalled(2, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(toy / "recipe.yaml", tmp_path / "run", SHORT)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_scheduler_is_obeyed_likewise(toy, tmp_path, signalled):
    """Some send SIGTERM more than once."""
    signalled(2, signal.SIGTERM, signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        run(toy / "recipe.yaml", tmp_path / "run", SHORT)
    assert caught.value.code == 143
    (state,) = (tmp_path / "run" / "checkpoints").glob("*/state.json")
    assert json.loads(state.read_text(encoding="utf-8"))["step"] == 2


def test_signals_that_others_have_are_left_alone(capfd):
    heard = []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        with heeding(speak=True) as halt:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
        assert halt.asked == 0
        assert heard == [1]
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
    assert not capfd.readouterr().err


def test_afterwards_signals_are_obeyed_as_before():
    with heeding(speak=False) as halt:
        os.kill(os.getpid(), signal.SIGINT)
        assert halt.asked == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert isinstance(Halted(signal.SIGINT).ending, KeyboardInterrupt)
