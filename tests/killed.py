"""Runs that kill themselves at a chosen moment: `python -m tests.killed JOBS.json`, each job in a fork of its own.

A job is {"recipe", "out", "moment": [module, attribute, n, "before" | "after"]}: at the n-th call of the attribute the
process sends itself SIGKILL. Prints the exit statuses as a JSON list.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from pathlib import Path


def arm(module: str, attribute: str, nth: int, when: str) -> None:
    """Lay the trap: replace module.attribute by a copy that kills the process at its n-th call."""
    *owners, name = attribute.split(".")
    holder = importlib.import_module(module)
    for owner in owners:
        holder = getattr(holder, owner)
    whole, calls = getattr(holder, name), 0

    def trap(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == nth and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        out = whole(*args, **kwargs)
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return out

    setattr(holder, name, trap)


def main() -> None:
    import torch

    from draftloop.recipe_file import load_recipe
    from draftloop.train.job import train

    torch.set_num_threads(1)
    for slow in ("transformers.models.llama.modeling_llama", "torch.utils.tensorboard"):
        importlib.import_module(slow)  # before the forks, so that each costs a moment only
    codes = []
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        child = os.fork()
        if child == 0:
            arm(*job["moment"])
            train(load_recipe(Path(job["recipe"])), out=Path(job["out"]), quiet=True, say=lambda text: None)
            os._exit(0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
