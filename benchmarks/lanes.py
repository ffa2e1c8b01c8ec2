"""Run a list of measurements, each alone on a GPU, as many side by side as there are GPUs.

    python benchmarks/lanes.py benchmarks/h200.yaml             all that is not done yet
    python benchmarks/lanes.py benchmarks/h200.yaml speed       that one, and what it needs

A list says of each measurement its command (a shell's, from the folder that you stand in, its name in DRAFTLOOP_TASK),
what it `needs` to have ended well, what it only waits for (`after`), and the most minutes that it may take. Logs, and
what ended well, are kept in --state: after a kill the same command goes on. With --minutes nothing is begun that might
not end in time.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml


@dataclass(frozen=True)
class Task:
    """One measurement.

    Attributes:
        minutes: the most that it may take.
        needs: names of those that must have ended well before.
        after: names of those that must have ended, well or not, if they are run at all.
    """

    name: str
    run: str
    minutes: float
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass
class Board:
    """Who does what. States: waiting, on LANE, done, failed (...), left (...)."""

    tasks: list[Task]
    folder: Path
    end: float
    state: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.folder.mkdir(parents=True, exist_ok=True)
        for task in self.tasks:
            done = (self.folder / f"{task.name}.done").is_file()
            self.state[task.name] = "done" if done else "waiting"

    def next(self, lane: str) -> Task | None:
        """The first that can begin, taken for this lane."""
        with self.lock:
            for task in self.tasks:
                if self.state[task.name] != "waiting":
                    continue
                missing = [name for name in task.needs if self._over(name) and self.state[name] != "done"]
                if missing:
                    self.state[task.name] = f"left (for want of {missing[0]})"
                elif time.monotonic() + 60 * task.minutes > self.end:
                    self.state[task.name] = "left (for want of time)"
                elif all(self._over(name) for name in (*task.needs, *task.after) if name in self.state):
                    self.state[task.name] = f"on {lane}"
                    return task
            return None

    def over(self) -> bool:
        """Whether nothing waits any more."""
        with self.lock:
            return "waiting" not in self.state.values()

    def _over(self, name: str) -> bool:
        return self.state[name] != "waiting" and not self.state[name].startswith("on ")


def work(board: Board, lane: str) -> None:
    """Take one measurement after another, until none waits."""
    seen = {"CUDA_VISIBLE_DEVICES": lane} if lane.isdigit() else {}
    here = str(Path(sys.executable).parent)
    environment = {**os.environ, **seen, "PATH": f"{here}{os.pathsep}{os.environ.get('PATH', '')}"}
    while not board.over():
        task = board.next(lane)
        if task is None:
            time.sleep(0.2)
            continue
        began = time.monotonic()
        print(f"{task.name}: begins on {lane}", flush=True)
        with open(board.folder / f"{task.name}.log", "w", encoding="utf-8") as log:
            outcome = finished(task, log, environment)
        took = time.monotonic() - began
        if outcome == "done":
            (board.folder / f"{task.name}.done").write_text(f"{took:.1f} s\n", encoding="utf-8")
        with board.lock:
            board.state[task.name] = outcome
        print(f"{task.name}: {outcome} after {took:.0f} s", flush=True)


def finished(task: Task, log: object, environment: dict[str, str]) -> str:
    """Let it run; a measurement that takes too long is ended with all that it began."""
    process = subprocess.Popen(
        ["bash", "-ec", task.run],
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**environment, "DRAFTLOOP_TASK": task.name},
        start_new_session=True,
    )  # type: ignore[call-overload]
    try:
        code = process.wait(60 * task.minutes)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return f"failed (over {task.minutes:g} minutes)"
    return "done" if code == 0 else f"failed (exit status {code})"


def read(path: Path) -> list[Task]:
    """The list.

    Raises:
        ValueError: a measurement lacks something, or speaks of one that is not there before it.
    """
    tasks: list[Task] = []
    for name, said in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        unknown = set(said) - {"run", "minutes", "needs", "after"}
        if unknown or not {"run", "minutes"} <= set(said):
            raise ValueError(f"{path}: {name} has run and minutes, perhaps needs and after, and nothing else")
        others = {key: tuple(said.get(key, ())) for key in ("needs", "after")}
        strange = [one for one in (*others["needs"], *others["after"]) if one not in {task.name for task in tasks}]
        if strange:
            raise ValueError(f"{path}: {name} speaks of {strange[0]}, which does not stand above it")
        tasks.append(Task(name, said["run"], float(said["minutes"]), **others))
    return tasks


def chosen(tasks: list[Task], names: Sequence[str]) -> list[Task]:
    """Those of these names, and all that they need.

    Raises:
        ValueError: there is none of that name.
    """
    by_name = {task.name: task for task in tasks}
    wanted: set[str] = set()
    left = list(names) or list(by_name)
    while left:
        name = left.pop()
        if name not in by_name:
            raise ValueError(f"there is no measurement {name}; there are {', '.join(by_name)}")
        if name not in wanted:
            wanted.add(name)
            left += by_name[name].needs
    return [task for task in tasks if task.name in wanted]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 unless all are done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path, help="YAML: name -> run, minutes, needs, after")
    parser.add_argument("names", nargs="*", help="which ones, with what they need (default: all)")
    parser.add_argument("--lanes", type=int, help="measurements side by side (default: one a GPU)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="in all; default: as long as it takes")
    parser.add_argument("--state", type=Path, default=Path("runs/lanes"), help="logs, and what is done")
    options = parser.parse_args(arguments)
    try:
        tasks = chosen(read(options.list), options.names)
    except (OSError, ValueError, AttributeError, TypeError, yaml.YAMLError) as error:
        print(f"lanes: {error}", file=sys.stderr)
        return 2
    board = Board(tasks, options.state, time.monotonic() + 60 * options.minutes)
    count = options.lanes or torch.cuda.device_count() or 1
    names = [str(n) for n in range(count)] if torch.cuda.is_available() else [f"lane {n}" for n in range(count)]
    lanes = [threading.Thread(target=work, args=(board, name)) for name in names]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    print("\n".join(f"{name}: {state}" for name, state in board.state.items()))
    return 0 if set(board.state.values()) <= {"done"} else 1


if __name__ == "__main__":
    sys.exit(main())
