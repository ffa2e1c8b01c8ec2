"""Ways to decode with compiled layers, side by side: which attention kernel, and layers joined or not.

    python benchmarks/decode_compare.py --drafter DIR --prompts FILE ... --out results/raw/decode-joined-h200.jsonl
    python benchmarks/decode_compare.py --quick --device cpu --ways fused:sdpa joined:matmul --out FILE    on the CPU

Takes the options of `decode.py` and writes its rows: first the checks against the eager loop, then cell by cell each
way, so that what is compared was measured a minute apart. `results.py` derives results/decode.json. Judges nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

import torch
from decode import WAYS, Bench, guarded, parse
from profile_round import profile_text

from draftloop.core.errors import DraftloopError


def compare(bench: Bench, ways: Sequence[str]) -> None:
    """Checks, then every batch size and temperature; at batch 1 and T = 0 a profile, where one is asked for."""
    options, pictures = bench.options, []
    bench.head()
    named = [(engine, kernel) for engine, _, kernel in (way.partition(":") for way in ways)]
    for engine, kernel in named:
        # flash has no float64, which the rule ratio is checked in
        checked = [way for way in WAYS if kernel != "flash" or way[2] == "match"]
        guarded(bench, partial(bench.check, engine, checked, (kernel,)), part=f"check of {engine}:{kernel}")
    for temperature in (0.0, 1.0):
        for batch in options.batches:
            for arm in ("speculative", "plain"):
                for engine, kernel in named:
                    where = {"batch": batch, "temperature": temperature, "arm": arm, "engine": engine, "kernel": kernel}
                    made = guarded(bench, partial(bench.cell, **where), **where)
                    if made is None:
                        continue
                    if options.profile and batch == 1 and not temperature:
                        name = f"{arm}, batch 1, engine {engine}, kernel {kernel}"
                        pictures.append(profile_text(name, made, bench.target))
                        options.profile.write_text("\n\n".join(pictures) + "\n", encoding="utf-8")
                    made.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/decode_compare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", default=["fused:matmul", "fused:flash", "joined:flash"],
                        metavar="ENGINE:KERNEL", help="fused, joined or tuned : sdpa, matmul or flash")  # fmt: skip
    own, rest = parser.parse_known_args(arguments)
    options = parse(rest)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    try:
        compare(Bench(options), own.ways)
    except DraftloopError as error:
        print(f"decode_compare: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
