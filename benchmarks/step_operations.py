"""What the host does in one training step, by method and phase: torch operations, and which lines begin them.

    python benchmarks/step_operations.py --out results/raw/step-operations.txt

A proxy for a machine without a GPU. The batch has the shape of recipes/bundled.yaml (32 answers, 64 anchors each), on a
target so small that its mathematics costs nothing: what is counted, and what the clock shows, is the host's work, which
bounds a step where kernels are short. Masks are dense here; FlexAttention's are counted beside. `asks` are operations
whose answer has to be known before the host goes on, which on a GPU wait for all work before them where they read the
device; the many that read the host's own tensors wait for nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from measure import lessons_of
from phases import PHASES, watching
from profile_step import METHODS, step_of
from torch.utils._python_dispatch import TorchDispatchMode

from draftloop.data.trunk import response_trunk
from draftloop.drafter.build import new_drafter
from draftloop.drafter.families import spec_for
from draftloop.objective import rows
from draftloop.recipe import DrafterPart
from draftloop.supervise import propose, score
from draftloop.target.load import load_target
from draftloop.train.material import command, versions

SIZES = {"lessons": 32, "anchors": 64, "chunk": 4096, "tokens": 320, "turns": 5, "lines": 25}
SOURCE = str(Path(__file__).resolve().parent.parent / "src" / "draftloop")
VIEWS = ("view", "slice", "select", "expand", "transpose", "unsqueeze", "squeeze", "t.", "permute", "detach", "split",
         "alias", "as_strided", "unbind", "_unsafe_view", "lift_fresh")  # fmt: skip


class Counting(TorchDispatchMode):
    """Counts operations that compute, those that ask, and where they come from."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "outside"
        self.operations: Counter[str] = Counter()
        self.asks: Counter[str] = Counter()
        self.lines: Counter[tuple[str, str]] = Counter()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if not name.startswith(VIEWS):
            self.operations[self.phase] += 1
            self.lines[self.phase, origin(sys._getframe(1))] += 1
            self.names[name] += 1
            places = args[1] if name.startswith("index") and isinstance(args[1], list | tuple) else ()
            mask = any(isinstance(one, torch.Tensor) and one.dtype == torch.bool for one in places)
            if mask or name.startswith(("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique")):
                self.asks[self.phase] += 1
        return func(*args, **(kwargs or {}))


def origin(frame: FrameType | None) -> str:
    """The nearest line of the package that an operation was called from."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(SOURCE):
            return f"{frame.f_code.co_filename.removeprefix(SOURCE + '/')}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


@contextmanager
def counting() -> Iterator[Counting]:
    """A `Counting` that knows which phase is running."""
    counts = Counting()
    running = ["outside"]

    def wrapped(phase: str, honest: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            running.append(phase)
            counts.phase = phase
            try:
                return honest(*args, **kwargs)
            finally:
                running.pop()
                counts.phase = running[-1]

        return call

    with ExitStack() as stack:
        for phase, places in PHASES.items():
            for owner, name in places:
                stack.enter_context(patch.object(owner, name, wrapped(phase, getattr(owner, name))))
        stack.enter_context(counts)
        yield counts


@contextmanager
def sized_for_a_gpu() -> Iterator[None]:
    """As many rows and slots at once as an H200 takes with a vocabulary of 49152, so that loops turn as often."""
    with ExitStack() as stack:
        for owner, name, value in (
            (propose, "_at_once", lambda readout: 1365),
            (score, "_at_once", lambda target: 1 << 16),
            (rows, "_CPU_ROWS", 1 << 20),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


def tiny(length: int) -> Any:
    """A random Llama of two layers, as good as free to compute."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=1024, eos_token_id=None, attn_implementation="sdpa",
    )  # fmt: skip
    return load_target(LlamaForCausalLM(config))


def account(target: Any, drafter: Any, trunks: list[Any], method: str, options: argparse.Namespace) -> str:
    """One method's tables."""
    step = step_of(target, drafter, lessons_of(target, drafter, trunks, method, options.tokens), method, options)
    step()
    with counting() as counts:
        step()
    walls = []
    by_phase: Counter[str] = Counter()
    for _ in range(options.turns):
        begun = time.perf_counter()
        with watching(lambda: None) as seconds:
            step()
        walls.append(1e3 * (time.perf_counter() - begun))
        by_phase.update({phase: 1e3 * took / options.turns for phase, took in seconds.items()})
    lines = [
        f"== {method}: {sum(counts.operations.values())} operations a step, {sum(counts.asks.values())} asks,"
        f" {statistics.median(walls):.1f} ms",
        f"{'phase':<18} {'operations':>10} {'asks':>6} {'ms':>8}",
    ]
    lines += [f"{p:<18} {counts.operations[p]:10} {counts.asks[p]:6} {by_phase[p]:8.2f}" for p in PHASES]
    lines += [f"{n:6}  {phase}: {line}" for (phase, line), n in counts.lines.most_common(options.lines)]
    return "\n".join(lines)


def main() -> None:
    """Print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--out", type=Path, required=True)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = tiny(options.tokens)
    drafter = new_drafter(
        spec_for(DrafterPart(block_size=8, layers=2, target_layers=[0, 1], mask_token=5), target), target
    )
    texts = torch.randint(0, 64, (options.lessons, options.tokens), generator=torch.Generator().manual_seed(0)).tolist()
    trunks = [response_trunk(tuple(t[:64]), t[64:], f"{i}", "", 0, False) for i, t in enumerate(texts)]
    found = [f"{command()}\n{versions()}"]
    for method in options.methods:
        with sized_for_a_gpu():
            found.append(account(target, drafter, trunks, method, options))
        print(found[-1], flush=True)
    options.out.write_text("\n\n".join(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
