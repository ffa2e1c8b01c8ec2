"""Runs of several processes on one machine: `python -m tests.ranked JOBS.json`, each process a fork of its own.

A job is {"world", "arguments", "log", "fault"}: every process gets the variables that torchrun sets and goes through
the command line; what it prints is left in LOG.rankR.out and .err, and of every stage the weights that it ended with, as
a fingerprint, in LOG.rankR.weights. A fault spoils all processes or one. Prints the exit statuses as JSON, a list a job.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed import TCPStore

from draftloop.core.errors import InputError
from draftloop.core.ranks import Ranks


def before_update(n: int, ranks: str, what: Callable[[], None]) -> None:
    """Let something happen to some of the processes before their n-th update."""
    from draftloop.train.optimiser import DrafterOptimiser

    whole, calls = DrafterOptimiser.step, [0]

    def trap(self, *arguments):
        calls[0] += 1
        if calls[0] == n and os.environ.get("RANK", "0") in ranks:
            what()
        return whole(self, *arguments)

    DrafterOptimiser.step = trap


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def complain() -> None:
    raise InputError("the second process is not content", fix="Be kind to it.")


def blunder() -> None:
    raise KeyError("oops")


def average() -> None:
    whole = Ranks.sum_gradients

    def averaged(self, parameters) -> None:
        kept = list(parameters)
        whole(self, kept)
        for one in kept:
            if one.grad is not None:
                one.grad /= self.world

    Ranks.sum_gradients = averaged


def other_clocks() -> None:
    from draftloop.train import stage

    def seconds(work) -> float:
        work()
        return 0.1 if os.environ.get("RANK", "0") == "0" else 0.01

    stage._seconds = seconds


FAULTS = {
    "denominators not summed": lambda: setattr(Ranks, "sum", lambda self, numbers: dict(numbers)),
    "gradients not summed": lambda: setattr(Ranks, "sum_gradients", lambda self, parameters: None),
    "gradients averaged": average,
    "the second is killed": lambda: before_update(2, "1", kill),
    "the second complains": lambda: before_update(2, "1", complain),
    "the second is told to stop": lambda: before_update(1, "1", lambda: os.kill(os.getpid(), signal.SIGTERM)),
    "the second breaks": lambda: before_update(2, "1", blunder),
    "all are killed in the second stage": lambda: before_update(6, "01", kill),
    "clocks differ": other_clocks,
}


def tell_weights(path: Path) -> None:
    """Have the weights at the end of every stage noted down."""
    from draftloop.core.files import fingerprint
    from draftloop.train.stage import StageRun

    whole = StageRun.run

    def telling(self):
        outcome = whole(self)
        with path.open("a") as file:
            print(fingerprint([tensor.tolist() for tensor in self.drafter.state_dict().values()]), file=file)
        return outcome

    StageRun.run = telling


def process(job: dict, rank: int, port: int) -> None:
    """The whole life of one process."""
    for end, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{job['log']}.rank{rank}.{end}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if job["world"] > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["world"]),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        }  # fmt: skip
    tell_weights(Path(f"{job['log']}.rank{rank}.weights"))
    if job.get("fault"):
        FAULTS[job["fault"]]()
    code = 1
    try:
        if "call" in job:
            getattr(importlib.import_module("tests.test_ranks"), job["call"])()
        else:
            from draftloop.cli import main

            sys.argv = ["draftloop", "train", *job["arguments"]]
            main(sys.argv[1:])
        code = 0
    except SystemExit as done:
        code = int(done.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    from draftloop.core.files import write_text
    from draftloop.train import job

    torch.set_num_threads(1)
    for slow in ("transformers.models.llama.modeling_llama", "torch.utils.tensorboard"):
        importlib.import_module(slow)  # before the forks, so that each costs a moment only
    job.write_report = lambda folder: write_text(folder / "report.html", "not drawn")
    codes = []
    for one in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the launcher's, as torchrun's
        children = []
        for rank in range(one["world"]):
            child = os.fork()
            if child == 0:
                process(one, rank, store.port)
            children.append(child)
        codes.append([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
