"""Checkpoints: bit-exact, complete or absent whenever the process dies, and clear about what does not fit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftloop.core.errors import EnvironmentFault, InputError
from draftloop.train import checkpoint
from draftloop.train.checkpoint import Best, State, load, resolve, save

PRINTS = {"recipe": "aaaa", "target": "bbbb", "tokenizer": "cccc"}


def state_of(step: int, **changes) -> State:
    values = {
        "stage": 1,
        "step": step,
        "drafter": {"w": torch.full((16, 16), float(step)), "half": torch.full((3,), step, dtype=torch.bfloat16)},
        "optimiser": {"exp_avg/w": torch.full((16, 16), float(step)), "step/w": torch.tensor(float(step))},
        "fingerprints": PRINTS,
        "best": Best(step, 1.0 + step / 7, {"w": torch.full((16, 16), float(step))}),
        "labels": 10 * step,
        "seconds": 0.1 * step,
        "extra": {"metrics": step, "deep": [1, {"a": None}]},
    }
    return State(**(values | changes))


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    def bits(tensor: torch.Tensor) -> bytes:  # NaN payloads and signed zeros count too
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return a.keys() == b.keys() and all(
        (a[k].dtype, a[k].shape, bits(a[k])) == (b[k].dtype, b[k].shape, bits(b[k])) for k in a
    )


def assert_same(a: State, b: State) -> None:
    assert (a.stage, a.step, a.labels, a.seconds) == (b.stage, b.step, b.labels, b.seconds)
    assert (a.extra, a.fingerprints) == (b.extra, b.fingerprints)
    assert same_tensors(a.drafter, b.drafter)
    assert same_tensors(a.optimiser, b.optimiser)
    assert (a.best is None) == (b.best is None)
    if a.best and b.best:
        assert (a.best.step, a.best.tau) == (b.best.step, b.best.tau)
        assert same_tensors(a.best.tensors, b.best.tensors)


def assert_whole(state: State) -> None:
    """Every part of a loaded state comes from one and the same save."""
    assert_same(state, state_of(state.step))


# ------------------------------------------------------------------------------------------------------ saving as it is


def test_round_trip_and_one_generation_at_a_time(tmp_path):
    run = tmp_path / "run"
    folder = run / checkpoint.FOLDER
    assert load(folder) is None
    assert resolve(run) is None
    for step in (3, 1, 2):  # the newest counts, not the farthest
        path = save(folder, state_of(step))
        assert resolve(run) == path
        assert os.listdir(folder) == [path.name]
        assert_same(load(folder, PRINTS), state_of(step))
        assert_same(load(path), state_of(step))
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}  # nothing that runs code when read


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bits=st.binary(min_size=8, max_size=8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64]),
    extra=st.dictionaries(st.text(), st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False)),
    tau=st.floats(1, 1e6),
)
def test_every_bit_comes_back(tmp_path, bits, dtype, extra, tau):
    tensor = torch.frombuffer(bytearray(bits), dtype=dtype)
    state = state_of(1, drafter={"any/name é": tensor}, extra=extra, best=Best(0, tau, {}), seconds=tau / 3)
    save(tmp_path / "c", state)
    assert_same(load(tmp_path / "c"), state)


def test_views_shared_memory_and_parameters_are_fine(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    drafter = {"t": base.T, "row": base[1], "same": base, "p": torch.nn.Parameter(base)}
    save(tmp_path / "c", state_of(1, drafter=drafter, best=None, optimiser={}))
    found = load(tmp_path / "c")
    assert found.best is None
    assert found.optimiser == {}
    assert same_tensors(found.drafter, drafter)


# ------------------------------------------------------------------------------------------------ dying while saving it


def survivor(folder: Path) -> int:
    """Return the step of what loads after a kill (0: nothing), having checked all that bears a final name."""
    for path in folder.glob("[0-9]*"):
        assert_whole(load(path))
    found = load(folder, PRINTS)
    if found is None:
        return 0
    assert_whole(found)
    return found.step


_NURSERY = """
import os, sys
from pathlib import Path
from draftloop.train.checkpoint import load, save
from tests.test_train_parts_checkpoint import state_of

for line in sys.stdin:
    folder, fuse = line.split()
    child = os.fork()
    if not child:
        fuse = int(fuse)
        first = (load(Path(folder)) or state_of(0)).step + 1
        if fuse:
            def burn(event, arguments):  # dies right before its n-th touch of the file system
                global fuse
                if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir"):
                    fuse -= 1
                    if not fuse:
                        os.kill(os.getpid(), 9)
            sys.addaudithook(burn)
            save(Path(folder), state_of(first))
            os._exit(0)
        for step in range(first, first + 10**6):
            save(Path(folder), state_of(step))
    print(child, flush=True)
    if int(fuse):
        print(os.waitpid(child, 0)[1], flush=True)
    else:
        sys.stdin.readline()
        os.waitpid(child, 0)
        print("dead", flush=True)
"""


@pytest.fixture(scope="module")
def nursery():
    """A process that has imported everything, and forks savers on demand."""
    process = subprocess.Popen(
        [sys.executable, "-c", _NURSERY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["src", "."])},
    )
    yield process
    process.stdin.close()
    process.wait(timeout=30)


def test_kill_9_at_random_moments(tmp_path, nursery):
    folder = tmp_path / "c"
    random_ = random.Random(0)
    begin = time.monotonic()
    save(tmp_path / "timed", state_of(1))
    span = time.monotonic() - begin
    steps, torn = [0], 0
    for round_ in range(300):  # rounds until enough has happened, however busy the machine
        if round_ >= 40 and steps[-1] > 5 and torn > 2:
            break
        nursery.stdin.write(f"{folder} 0\n")
        child = int(nursery.stdout.readline())
        time.sleep(random_.uniform(0.0, 4 * span))
        os.kill(child, signal.SIGKILL)
        nursery.stdin.write("killed\n")
        assert nursery.stdout.readline() == "dead\n"
        torn += folder.is_dir() and len(os.listdir(folder)) > 1
        steps.append(survivor(folder))
    assert steps == sorted(steps)  # nothing saved is ever lost
    assert steps[-1] > 5  # the savers did save
    assert torn > 2  # and some died in the middle
    save(folder, state_of(10**6))
    assert len(os.listdir(folder)) == 1


@pytest.mark.parametrize("already", [False, True])
def test_kill_9_before_every_touch_of_the_file_system(tmp_path, nursery, already):
    outcomes = []
    for fuse in range(1, 200):
        folder = tmp_path / str(fuse)
        if already:
            save(folder, state_of(4))
        nursery.stdin.write(f"{folder} {fuse}\n")
        nursery.stdout.readline()
        status = int(nursery.stdout.readline())
        outcomes.append(survivor(folder))
        path = save(folder, state_of(9))  # the next save goes through and cleans up
        assert os.listdir(folder) == [path.name]
        assert_whole(load(folder))
        shutil.rmtree(folder)
        if status == 0:
            break
    old, new = (4, 5) if already else (0, 1)
    assert status == 0
    assert set(outcomes) == {old, new}
    assert outcomes == sorted(outcomes)  # once visible, it stays
    assert outcomes.count(old) >= 5


def test_a_full_disk_leaves_the_old_one(tmp_path, monkeypatch):
    folder = tmp_path / "c"
    save(folder, state_of(1))

    def full(tensors, path):
        Path(path).write_bytes(b"half")
        raise checkpoint.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(EnvironmentFault, match="disk is full"):
        save(folder, state_of(2))
    assert len(os.listdir(folder)) == 1
    assert_same(load(folder), state_of(1))


def test_extra_that_is_no_json_leaves_the_old_one(tmp_path):
    folder = tmp_path / "c"
    save(folder, state_of(1))
    with pytest.raises((TypeError, ValueError)):
        save(folder, state_of(2, extra={"x": float("nan")}))
    assert len(os.listdir(folder)) == 1
    assert_same(load(folder), state_of(1))


# ---------------------------------------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize("name", ["drafter", "optimiser", "best"])
@pytest.mark.parametrize("how", ["short", "empty", "long", "missing", "noise"])
def test_damaged_tensors_are_named(tmp_path, name, how):
    path = save(tmp_path / "c", state_of(1)) / f"{name}.safetensors"
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes({"short": data[:-7], "empty": b"", "long": data + b"x", "noise": b"\xff" * len(data)}[how])
    with pytest.raises(InputError, match="part of a checkpoint") as caught:
        load(tmp_path / "c")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": 1}', '{"schema": 1, "fingerprints": 3}'])
def test_damaged_scalars_are_named(tmp_path, text):
    path = save(tmp_path / "c", state_of(1)) / "state.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load(tmp_path / "c", PRINTS)
    assert str(path) in str(caught.value)


def test_another_schema(tmp_path):
    path = save(tmp_path / "c", state_of(1)) / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 2}))
    with pytest.raises(InputError, match="schema 2 is not 1"):
        load(tmp_path / "c")


def test_fingerprints_that_differ_are_named(tmp_path):
    save(tmp_path / "c", state_of(1))
    with pytest.raises(InputError, match="another recipe \\(aaaa, now zzzz\\)\\.") as caught:
        load(tmp_path / "c", PRINTS | {"recipe": "zzzz"})
    assert "target" not in str(caught.value)
    with pytest.raises(InputError, match=r"target .* and tokenizer"):
        load(tmp_path / "c", {"recipe": "aaaa", "target": "x"})
    assert load(tmp_path / "c") is not None
