"""Loss and gradient of every objective from hidden rows: Triton kernels, eager chunks, and all logits at once.

`python benchmarks/fused.py --out results/raw/fused-h200.jsonl` appends a raw row for each way, objective and shape, and
prints them as ratios to the chunks of the same run. The ways take turns. Needs a CUDA GPU; `--quick` runs toy sizes
anywhere (without Triton the eager ways alone). Compiling is left out of the times and told beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from measure import Row, watched
from torch import Tensor

from draftloop.core.blocks import Blocks
from draftloop.core.law import Readout
from draftloop.objective.fused import why_eager
from draftloop.objective.rows import Kernel, Overlap, overlap_rows, row_values
from draftloop.objective.terms import denominators, loss, terms
from draftloop.recipe import ObjectivePart
from draftloop.train.material import command, hardware, versions

OBJECTIVES = {
    "ce": ObjectivePart(kind="ce"),
    "forward_kl": ObjectivePart(kind="forward_kl"),
    "reverse_kl": ObjectivePart(kind="reverse_kl"),
    "tv": ObjectivePart(kind="tv", ce_weight=0.0),
    "e2e_tv": ObjectivePart(kind="e2e_tv", ce_weight=0.0),
    "draft_opd": ObjectivePart(kind="draft_opd"),
}
SHAPES = {  # name: blocks, drafted, vocabulary, hidden
    "smollm2-135m": (2048, 7, 49152, 576),
    "qwen3-8b": (512, 8, 151936, 4096),
}
TOY = {"toy": (5, 4, 37, 20)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="toy sizes, on a CPU too")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--repeats", type=int, default=3, help="measured turns (default 3)")
    parser.add_argument("--seconds", type=float, default=60, help="begin nothing new after that long (default 60)")
    parser.add_argument("--out", type=Path, help="append raw rows to this file, as JSON lines")
    options = parser.parse_args()
    if not options.quick and not torch.cuda.is_available():
        parser.error("needs a CUDA GPU; --quick runs toy sizes without one")
    began = time.monotonic()
    for shape, sizes in (TOY if options.quick else {name: SHAPES[name] for name in options.shapes}).items():
        work = Work(*sizes)
        for name in options.objectives:
            if time.monotonic() - began > options.seconds:
                print(f"left out after {options.seconds:g} s: {shape} {name}")
                continue
            rows = measure(work, OBJECTIVES[name], options.repeats)
            for row in rows:
                row |= {"schema": 1, "part": "fused", "shape": shape, "objective": name}
                tell(row)
            if options.out:
                about = {"command": command(), "versions": versions(), "hardware": hardware()}
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with options.out.open("a", encoding="utf-8") as out:
                    out.writelines(json.dumps({**row, **about}) + "\n" for row in rows)


class Work:
    """Random rows of blocks and a random head; half of the blocks have a rejection in the middle."""

    def __init__(self, count: int, width: int, vocabulary: int, hidden: int) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, generator=generator)

        rows = count * width
        self.device, self.shape = device, (rows, vocabulary, hidden)
        self.head = Readout((normal(vocabulary, hidden) * (2 / hidden**0.5)).to(dtype))
        teacher = normal(rows, hidden)
        self.student = (teacher + 0.5 * normal(rows, hidden)).to(dtype).requires_grad_()
        self.teacher = teacher.to(dtype)
        self.labels = torch.randint(0, vocabulary, (rows,), device=device, generator=generator)
        place = torch.arange(count, device=device)
        valid = torch.ones(count, width, dtype=torch.bool, device=device)
        accepted = valid.clone()
        accepted[::2, width // 2 :] = False
        self.blocks = Blocks(place * 0, place, self.labels.view(count, width), valid, accepted)

    def step(self, objective: ObjectivePart, kernel: Kernel, chunk: int) -> Tensor:
        """The loss, its gradient left in the rows."""

        def values(kind: Any, index: Tensor) -> Tensor | Overlap:
            student, options = self.student[index], {"chunk": chunk, "kernel": kernel}
            teacher, labels = self.teacher[index], self.labels[index]
            if kind == "overlap":
                return overlap_rows(student, self.head, teacher=teacher, teacher_readout=self.head, tokens=labels,
                                    **options)  # fmt: skip
            return row_values(kind, student, self.head, teacher=teacher, labels=labels, **options)

        self.student.grad = None
        asked = terms(objective, self.blocks)
        total, _ = loss(asked, denominators([asked]), values)
        total.backward()
        return total.detach()


def measure(work: Work, objective: ObjectivePart, repeats: int) -> list[Row]:
    rows = work.shape[0]
    ways: dict[str, tuple[Kernel, int]] = {"chunks of 512": ("eager", 512), "chunks of 4096": ("eager", 4096)}
    ways["all logits"] = ("eager", rows)
    if work.device.type == "cuda" or why_eager_here(work) is None:
        ways["triton"] = ("triton", 512)
    found: dict[str, dict[str, Any]] = {way: {"seconds": []} for way in ways}
    for turn in range(repeats + 1):
        for way, (kernel, chunk) in ways.items():

            def once(kernel: Kernel = kernel, chunk: int = chunk) -> Tensor:
                return work.step(objective, kernel, chunk)

            seconds, peak, value = watched(once, work.device)
            told = found[way]
            if turn == 0:  # the first turn compiles and allocates
                told["first_seconds"] = seconds
                continue
            assert work.student.grad is not None
            told["seconds"].append(seconds)
            told |= {"peak_bytes": peak, "loss": float(value)}
            if turn == repeats:
                told["gradient"] = work.student.grad.float()
    gradients = {way: told.pop("gradient") for way, told in found.items()}
    middle = {way: statistics.median(told["seconds"]) for way, told in found.items()}
    base = "chunks of 512"
    length, peak = gradients[base].norm(), found[base]["peak_bytes"]
    out: list[Row] = []
    for way, told in found.items():
        out.append({
            "way": way, "rows": rows, "vocabulary": work.shape[1], "hidden": work.shape[2],
            "ms": 1e3 * middle[way], "to_chunks": middle[way] / middle[base],
            "peak_to_chunks": told["peak_bytes"] / peak if peak else None,
            "gradient_gap": float((gradients[way] - gradients[base]).norm() / length), **told,
        })  # fmt: skip
    return out


def why_eager_here(work: Work) -> str | None:
    """Why the kernels cannot run in this toy run; Triton's interpreter may."""
    from draftloop.core.errors import InputError

    try:
        return why_eager("triton", [work.head], work.device)
    except InputError as error:
        return str(error)


def tell(row: Row) -> None:
    peak = f"  {row['peak_bytes'] / 2**20:8.0f} MiB ({row['peak_to_chunks']:.2f})" if row["peak_to_chunks"] else ""
    print(
        f"{row['shape']:<13} {row['objective']:<11} {row['way']:<15} {row['ms']:9.2f} ms ({row['to_chunks']:.2f}){peak}"
        f"  loss {row['loss']:.5f}  gradient gap {row['gradient_gap']:.1e}  first {row['first_seconds']:.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
