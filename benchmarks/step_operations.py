"""What the host begins in one training step, by family, method and phase: torch operations, and the lines behind them.

    python benchmarks/step_operations.py --out results/raw/step-operations.txt

A proxy for a machine without a GPU: where kernels are short, a step is bound by how many are begun. The batch has the
shape of recipes/bundled.yaml (32 answers, 64 anchors each) on a target of two tiny layers, whose operations belong to
`score`; rows and slots are taken at once as on a GPU. Views are left out. The optimiser's loop over parameters is one
operation each here and a few in all on CUDA; masks are dense here, CUDA's are counted beside. `asks` are
operations whose answer the host has to know before it goes on: on a GPU they wait where they read the device, and most
read tensors of the host.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from measure import lessons_of
from phases import PHASES
from profile_step import METHODS, step_of
from run import quick_target
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftloop.core.flex import block_mask, tiled_mask
from draftloop.data.trunk import response_trunk
from draftloop.drafter.build import new_drafter
from draftloop.drafter.families import spec_for
from draftloop.drafter.masks import PackedChains, block_rule, block_tiles
from draftloop.objective import rows
from draftloop.recipe import DrafterPart
from draftloop.supervise import propose, score
from draftloop.train.material import command, versions

SIZES = {"lessons": 32, "anchors": 64, "chunk": 4096, "tokens": 320, "lines": 12}
FAMILIES = ("dflash", "dflash2", "dspark", "eagle3", "mtp")
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if not name.startswith(VIEWS):
            self.operations[self.phase] += 1
            self.lines[self.phase, origin(sys._getframe(1))] += 1
            places = args[1] if name.startswith("index") and isinstance(args[1], list | tuple) else ()
            mask = any(isinstance(one, Tensor) and one.dtype == torch.bool for one in places)
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
            (propose, "_at_once", lambda readout: 2730),
            (score, "slots_at_once", lambda target: 1 << 16),
            (rows, "_CPU_ROWS", 1 << 20),
            (rows, "_spare", lambda device: 1 << 35),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


def drafter_of(family: str, target: Any) -> Any:
    """A drafter of seven drafted tokens."""
    part: dict[str, Any] = {"family": family, "block_size": 7 if family == "dspark" else 8}
    if family.startswith(("dflash", "dspark")):
        part |= {"layers": 2, "mask_token": 5}
    if family == "dflash2":
        part["conv_group_size"] = 8
    if family != "mtp":
        part["target_layers"] = [0, 1]
    return new_drafter(spec_for(DrafterPart(**part), target), target)


def account(target: Any, family: str, trunks: list[Any], method: str, options: argparse.Namespace) -> str:
    """The tables of one family and method."""
    drafter = drafter_of(family, target)
    step = step_of(target, drafter, lessons_of(target, drafter, trunks, method, options.tokens), method, options)
    step()
    with counting() as counts:
        step()
    lines = [
        f"== {family}, {method}: {sum(counts.operations.values())} operations a step, {sum(counts.asks.values())} asks",
        f"{'phase':<18} {'operations':>10} {'asks':>6}",
    ]
    lines += [f"{phase:<18} {counts.operations[phase]:10} {counts.asks[phase]:6}" for phase in PHASES]
    lines += [f"{n:6}  {phase}: {line}" for (phase, line), n in counts.lines.most_common(options.lines)]
    return "\n".join(lines)


def mask(options: argparse.Namespace) -> str:
    """Masks as they are made on CUDA: of packed blocks, beside what FlexAttention would do by itself; of chains."""
    anchor = torch.full((1, options.anchors), options.tokens // 2)
    context, size = options.tokens - 1, 8
    queries = options.anchors * size

    def see(row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return block_rule(anchor, context, size, row, q, k)

    with Counting() as ours:
        tiled_mask(see, *block_tiles(anchor, context, size), queries, context + queries)
    with Counting() as theirs:
        block_mask(see, 1, queries, context + queries, anchor.device)
    chains = PackedChains(anchor, size - 1)
    chains.begin((torch.zeros(1, 1, context, 8),) * 2)
    with Counting() as once:
        chains._numbers(3, torch.float32)
    with Counting() as each:
        chains._tiled(context + options.anchors)
    told, counted, dense, tiled = (sum(one.operations.values()) for one in (ours, theirs, once, each))
    return (
        f"== FlexAttention's mask: {told} operations (told by the anchors), {counted} (every query and key counted)\n"
        f"== chains' mask: {dense} operations a draft; where it is too large, FlexAttention's: {tiled} a slot"
    )


def main() -> None:
    """Print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--out", type=Path, required=True)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = quick_target(  # as good as free to compute
        hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1,
        max_position_embeddings=1024,
    )  # fmt: skip
    texts = torch.randint(0, 64, (options.lessons, options.tokens), generator=torch.Generator().manual_seed(0)).tolist()
    trunks = [response_trunk(tuple(t[:64]), t[64:], f"{i}", "", 0, False) for i, t in enumerate(texts)]
    found = [f"{command()}\n{versions()}", mask(options)]
    print(found[-1])
    for family, method in product(options.families, options.methods):
        with sized_for_a_gpu():
            found.append(account(target, family, trunks, method, options))
        print(found[-1], flush=True)
    options.out.write_text("\n\n".join(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
