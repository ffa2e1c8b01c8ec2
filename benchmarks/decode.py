"""Decoding on a GPU, plain and speculative, by batch size, temperature and engine; one command, raw rows as they come.

    python benchmarks/decode.py --drafter DIR --prompts FILE ... --out results/raw/decode-h200.jsonl --profile FILE
    python benchmarks/decode.py --quick --device cpu --out FILE    a toy on the CPU: does all of it run?

Correctness first: in float32 (TF32 off), or float64 where a draft is drawn, every engine writes the tokens of the eager
loop. Then each cell: decoding of its prompts after prefill by the clock, and the time of one round alone by CUDA
events. A row is appended as soon as it is measured, so what a kill leaves counts. `results.py` derives
results/decode.json. Judges nothing.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from profile_round import profile_text
from run import quick_target, requests_of

from draftloop.core.draws import key_of
from draftloop.core.errors import DraftloopError, InputError
from draftloop.core.law import Sampling
from draftloop.data.chat import encode_prompt
from draftloop.data.prompts import read_prompts
from draftloop.decode.graph import GraphEngine
from draftloop.decode.loop import Decoder, decode
from draftloop.decode.trace import Generation, Options, Request
from draftloop.drafter.build import for_decoding, new_drafter
from draftloop.drafter.families import spec_for
from draftloop.formats.load import load_drafter
from draftloop.recipe import DrafterPart
from draftloop.target.load import load_target
from draftloop.train.material import command, hardware, versions

Row = dict[str, Any]
WAYS = (("plain", 0.0, "match"), ("speculative", 0.0, "match"), ("speculative", 1.0, "match"),
        ("speculative", 1.0, "ratio"))  # fmt: skip
KERNELS = ("sdpa", "matmul")
TURNS = 50  # rounds of the measurement by events


class Bench:
    """Target, drafter and prompts; measures a cell at a time and writes its row down."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.start = options, time.perf_counter()
        self.target = self.load(None)
        self.requests = self._requests()
        self.drafter = self._drafter(self.target)
        self.cuda = self.target.device.type == "cuda"
        self.compiler = partial(torch.compile, dynamic=False, **({"backend": "eager"} if options.quick else {}))
        # tuned: products with one row become reductions that fuse with their neighbours; tuning them takes long.
        # triton: products of every size may become kernels of their own, which fuse with what follows
        tuned = {"coordinate_descent_tuning": True}
        wanted = {"fused": {}, "joined": {}, "tuned": tuned, "triton": tuned | {"max_autotune": True}}
        self.compilers = {
            name: partial(self.compiler, **({"options": told} if told and not options.quick else {}))
            for name, told in wanted.items()
        }
        self.rows: list[Row] = []

    def load(self, dtype: str | None) -> Any:
        if self.options.quick:
            return quick_target()
        return load_target(self.options.target, dtype=dtype or self.options.dtype, device=self.options.device)

    def _drafter(self, target: Any) -> Any:
        if self.options.drafter:
            return for_decoding(load_drafter(self.options.drafter, target, dtype=torch.float32), target)
        small = target.num_layers < 8  # a toy
        toy: Row = {"target_layers": [0, 2], "mask_token": 5} if small else {"taps": 5}
        part = DrafterPart(block_size=4 if small else 8, layers=2, **toy)
        return for_decoding(new_drafter(spec_for(part, target), target), target)

    def _requests(self) -> list[Request]:
        """The prompts that are short enough, the files taking turns."""
        if self.options.quick:
            return requests_of(self.target, 4)
        files = [read_prompts([name], Path("."), None) for name in self.options.prompts]
        mixed = [one[i] for i in range(max(map(len, files))) for one in files if i < len(one)]
        found = []
        for prompt in mixed[:2000]:
            ids = encode_prompt(self.target.tokenizer, list(prompt.question), template_kwargs={}, tools=prompt.tools)
            if len(ids) <= self.options.max_prompt_tokens:
                found.append(Request(tuple(ids), key_of(prompt.id)))
        if not found:
            raise InputError("no prompt is short enough", fix="Raise --max-prompt-tokens or give other prompts.")
        return found

    def take(self, count: int) -> list[Request]:
        """`count` requests; where there are fewer prompts, several samples of each."""
        n = len(self.requests)
        return [replace(self.requests[i % n], sample=i // n) for i in range(count)]

    def write(self, row: Row) -> None:
        row["at_s"] = round(time.perf_counter() - self.start, 2)
        self.rows.append(row)
        with open(self.options.out, "a", encoding="utf-8") as handle:
            handle.write(json.dumps(row) + "\n")
        told = {key: value for key, value in row.items() if key not in ("responses", "kind")}
        print(row["kind"], " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in told.items()),
              flush=True)  # fmt: skip

    def late(self) -> bool:
        return time.perf_counter() - self.start > self.options.budget

    def settle(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def decoding(self, batch: int, temperature: float, rule: str = "ratio") -> Options:
        return Options(self.options.new_tokens, Sampling(temperature), rule if temperature else "match",
                       batch_size=batch)  # fmt: skip

    def engine(self, batch: int, temperature: float, arm: str, engine: str, kernel: str, requests: Any) -> GraphEngine:
        longest = max(len(request.ids) for request in requests) + self.options.new_tokens
        return GraphEngine(self.target, None if arm == "plain" else self.drafter, self.decoding(batch, temperature),
                           rows=batch, longest=longest, kernel=kernel,
                           compiler=self.compilers.get(engine), join=engine == "joined")  # fmt: skip

    # what is measured ------------------------------------------------------------------------------------------------
    def check(self, engine: str, ways: Sequence[tuple[str, float, str]], kernels: Sequence[str]) -> None:
        """An engine writes what the eager loop writes, refilled rows included; the rule ratio in float64."""
        if self.late():
            return
        precise = self.load("float32")
        drafter = self._drafter(precise)
        asked = self.take(8)
        single, double = (precise, drafter), None
        for arm, temperature, rule in ways:
            if rule == "ratio" and double is None:
                # a draft drawn from 49152 tokens turns on the last digits of float32, and with it the text
                exact = load_target(precise.model.double(), tokenizer=precise.tokenizer)
                double = (exact, self._drafter(exact))
            precise, drafter = single if rule == "match" else double  # type: ignore[misc]
            base = Options(min(48, self.options.new_tokens), Sampling(temperature), rule, batch_size=8)
            used = None if arm == "plain" else drafter
            want = decode(precise, used, asked, replace(base, engine="eager"))
            for kernel in kernels:
                longest = max(len(request.ids) for request in asked) + base.max_new_tokens
                made = GraphEngine(precise, used, base, rows=4, longest=longest, kernel=kernel,
                                   compiler=self.compilers.get(engine), join=engine == "joined")  # fmt: skip
                got = [Generation(request.ids) for request in asked]
                list(made.decode(asked, got))
                made.close()
                same = sum(a.tokens == b.tokens for a, b in zip(want, got, strict=True))
                self.write({"kind": "check", "arm": arm, "temperature": temperature, "rule": rule, "kernel": kernel,
                            "engine": engine, "dtype": str(precise.dtype), "prompts": len(asked), "same": same,
                            "tokens": sum(len(a.tokens) for a in want)})  # fmt: skip

    def cell(self, batch: int, temperature: float, arm: str, engine: str, kernel: str = "sdpa") -> GraphEngine | None:
        """One engine over its prompts, prefill left out; then rounds alone."""
        if self.late():
            return None
        waves = self.options.waves if batch == 1 else 1
        asked = self.take(batch * waves)
        before = time.perf_counter()
        made = self.engine(batch, temperature, arm, engine, kernel, asked)
        self.settle()
        built = time.perf_counter() - before
        list(made.decode(asked[:batch], [Generation(request.ids) for request in asked[:batch]]))  # warm
        timed = self._timed(lambda some, results: made.decode(some, results), asked, batch)
        row = {"kind": "cell", "batch": batch, "temperature": temperature, "arm": arm, "engine": engine,
               "kernel": kernel, "built_s": built, "ms_per_round": self.round_ms(made), **timed}  # fmt: skip
        if self.cuda:
            row["peak_bytes"] = torch.cuda.max_memory_allocated()
        self.write(row)
        return made

    def eager(self, arm: str) -> None:
        if self.late():
            return
        asked = self.take(2)
        options = replace(self.decoding(1, 0.0), engine="eager", max_new_tokens=min(48, self.options.new_tokens))
        decoder = Decoder(self.target, None if arm == "plain" else self.drafter, options, asked)
        decoder.warm_up()
        timed = self._timed(decoder.rounds, asked, 1)
        self.write({"kind": "cell", "batch": 1, "temperature": 0.0, "arm": arm, "engine": "eager", "kernel": "sdpa",
                    "ms_per_round": 1e3 * timed["seconds"] / max(timed["rounds"], 1), **timed})  # fmt: skip

    def _timed(self, run: Callable[..., Iterator[Any]], asked: list[Request], batch: int) -> Row:
        seconds, rounds, tokens, responses = 0.0, 0, 0, []
        for start in range(0, len(asked), batch):
            some = asked[start : start + batch]
            results = [Generation(request.ids) for request in some]
            running = run(some, results)
            next(running)  # prefill and the first token
            self.settle()
            begun = time.perf_counter()
            for _ in running:
                pass
            self.settle()
            seconds += time.perf_counter() - begun
            rounds += max(len(one.steps) for one in results)
            tokens += sum(len(one.tokens) - 1 for one in results)
            responses += [[len(one.tokens) - 1, len(one.steps)] for one in results]
        return {"seconds": seconds, "rounds": rounds, "tokens": tokens, "tokens_per_s": tokens / max(seconds, 1e-9),
                "prompts": len(asked), "new_tokens": self.options.new_tokens, "responses": responses}  # fmt: skip

    def round_ms(self, engine: GraphEngine) -> float:
        """A round by itself, launched without a look at the outcome."""
        turns = TURNS if self.cuda else 2
        engine.rows.at.zero_()
        if not self.cuda:
            begun = time.perf_counter()
            for _ in range(turns):
                engine.turn()
            return 1e3 * (time.perf_counter() - begun) / turns
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times = []
        for _ in range(turns // 10):
            engine.rows.at.zero_()
            first.record()
            for _ in range(10):
                engine.turn()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / 10)
        return sorted(times)[len(times) // 2]

    def generation(self, batch: int, engine: str, kernel: str = "sdpa") -> None:
        """Answering twice as many prompts as there are rows, prefill and refills included."""
        if self.late():
            return
        asked = self.take(2 * batch)
        made = self.engine(batch, 0.0, "plain", engine, kernel, asked)
        results = [Generation(request.ids) for request in asked]
        self.settle()
        begun = time.perf_counter()
        for _ in made.decode(asked, results):
            pass
        self.settle()
        seconds = time.perf_counter() - begun
        tokens = sum(len(one.tokens) for one in results)
        self.write({"kind": "generation", "batch": batch, "temperature": 0.0, "engine": engine, "kernel": kernel,
                    "prompts": len(asked), "new_tokens": self.options.new_tokens, "seconds": seconds, "tokens": tokens,
                    "tokens_per_s": tokens / seconds, "ms_per_round": self.round_ms(made)})  # fmt: skip

    def head(self) -> None:
        spec, options = self.drafter.spec, self.options
        named = [] if options.quick else options.prompts
        digest = {Path(name).name: hashlib.sha256(Path(name).read_bytes()).hexdigest()
                  for name in named if Path(name).is_file()}  # fmt: skip
        told = re.sub(r"(?<=[ =])/\S*/(?=[^/\s])", "", command())  # not the folders of one machine
        self.write({
            "kind": "run", "schema": 1, "command": told, "versions": versions(), "hardware": hardware(),
            "target": {"name": Path(options.target).name, "fingerprint": self.target.fingerprint,
                       "dtype": str(self.target.dtype)},
            "drafter": {"from": options.drafter.name if options.drafter else "untrained", "layers": spec.layers,
                        "block_size": spec.block_size, "target_layers": list(spec.target_layers)},
            "prompts": digest or [Path(name).name for name in named], "usable_prompts": len(self.requests),
        })  # fmt: skip


def measure(bench: Bench) -> None:
    """Every cell, what matters most first: graphs before what has to be compiled for half a minute each."""
    options, both = bench.options, ("plain", "speculative")
    bench.head()
    guarded(bench, lambda: bench.check("graph", WAYS, KERNELS), part="check")
    pictures: list[tuple[str, GraphEngine]] = []

    def cell(batch: int, temperature: float, arm: str, engine: str, kernel: str, picture: bool = False) -> None:
        made = guarded(bench, lambda: bench.cell(batch, temperature, arm, engine, kernel), batch=batch,
                       temperature=temperature, arm=arm, engine=engine, kernel=kernel)  # fmt: skip
        if picture and made is not None and options.profile:
            pictures.append((f"{arm}, batch 1, engine {engine}, kernel {kernel}", made))

    for kernel in KERNELS:
        for arm in both:
            cell(1, 0.0, arm, "graph", kernel, picture=True)
    for arm in both:
        if 1 in options.fused:
            cell(1, 0.0, arm, "fused", "sdpa", picture=True)
    if pictures:
        text = "\n\n".join(profile_text(name, made, bench.target) for name, made in pictures)
        options.profile.write_text(text + "\n", encoding="utf-8")
        pictures.clear()
    for arm in both:
        guarded(bench, lambda arm=arm: bench.eager(arm), batch=1, arm=arm, engine="eager")
    best = fastest(bench.rows)
    for temperature in (0.0, 1.0):
        for batch in options.batches:
            for arm in both:
                if batch > 1 or temperature:
                    cell(batch, temperature, arm, "graph", best)
    if options.generate:
        for kernel in KERNELS:
            guarded(bench, lambda kernel=kernel: bench.generation(options.generate, "graph", kernel), part="generation")
    if 1 in options.fused:
        cell(1, 0.0, "plain", "fused", "matmul")
        cell(1, 0.0, "speculative", "fused", "matmul")
        guarded(bench, lambda: bench.check("fused", WAYS[-1:], ("sdpa",)), part="check of fused")
        if "tuned" in options.variants:
            guarded(bench, lambda: bench.check("tuned", WAYS[:1], ("sdpa",)), part="check of tuned")
        for variant in options.variants:
            for arm in both:
                cell(1, 0.0, arm, variant, "sdpa")
    for temperature in (0.0, 1.0):
        for batch in options.fused:
            for arm in both:
                if batch > 1 or temperature:
                    cell(batch, temperature, arm, "fused", "sdpa")


def guarded(bench: Bench, work: Callable[[], Any], **where: Any) -> Any:
    """What `work` gives; where it fails that is written down, and the others go on."""
    release()
    try:
        return work()
    except Exception as error:
        told = str(error) if isinstance(error, DraftloopError) else f"{type(error).__name__}: {error}"
        bench.write({"kind": "failed", **where, "why": " ".join(told.split())[:400]})
        return None


def fastest(rows: list[Row]) -> str:
    """The kernel whose speculative round is the shorter one at batch 1, without compiling."""
    found = {row["kernel"]: row["ms_per_round"] for row in rows
             if row["kind"] == "cell" and row["engine"] == "graph" and row["arm"] == "speculative"}  # fmt: skip
    return min(found, key=lambda kernel: found[kernel]) if found else "sdpa"


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/decode.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="toy sizes on a random target")
    parser.add_argument("--target", default="smollm2", help="checkpoint folder, hub id or smollm2 (default)")
    parser.add_argument("--dtype", default="auto", help="auto (default, bfloat16), float32 or bfloat16")
    parser.add_argument("--drafter", type=Path, help="drafter folder; default: an untrained one")
    parser.add_argument("--prompts", nargs="+", default=["builtin:test"], help="prompt files")
    parser.add_argument("--max-prompt-tokens", type=int, default=256, help="longer prompts are left out (default 256)")
    parser.add_argument("--new-tokens", type=int, default=128, help="longest answer (default 128)")
    parser.add_argument("--waves", type=int, default=6, help="prompts at batch 1 (default 6)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--fused", type=int, nargs="*", default=[1, 8], help="batch sizes measured compiled as well")
    parser.add_argument("--variants", nargs="*", choices=["tuned", "triton"], default=["tuned"],
                        help="other ways to compile, at batch 1 (default tuned)")  # fmt: skip
    parser.add_argument("--generate", type=int, default=1024, help="rows of plain generation; 0 = none")
    parser.add_argument("--budget", type=float, default=225, help="seconds after which no cell is begun (default 225)")
    parser.add_argument("--device", default="auto", help="auto (default), cpu or cuda")
    parser.add_argument("--profile", type=Path, help="write kernels and gaps of one step and one round to this file")
    parser.add_argument("--out", type=Path, required=True, help="append raw rows to this file; it must not exist yet")
    options = parser.parse_args(arguments)
    if options.out.exists():
        parser.error(f"{options.out} exists; name another file")
    if options.quick:
        options.target, options.new_tokens, options.batches, options.fused = (
            "a random toy",
            6,
            [1, 2],
            options.fused and [1, 2],
        )
        options.generate, options.waves = options.generate and 2, 2
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    try:
        measure(Bench(options))
    except DraftloopError as error:
        print(f"decode: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
