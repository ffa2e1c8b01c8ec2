"""The benchmarks: `make bench`, or `python benchmarks/run.py --help`.

(a) plain and speculative decoding side by side; (b) training step time and peak memory by `objective.chunk`; (c) packed
drafting from N anchors against N single cached drafts; (d) packed scoring of branches against one forward for each;
(e) the E2E-TV loss, chunked against eager. Prints tables; `--out` writes the raw rows. Judges nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from losses import losses
from measure import Row, decoding, drafting, training
from rich.console import Console
from rich.table import Table
from scoring import random_qwen3, scoring

from draftloop.core.draws import key_of
from draftloop.core.errors import DraftloopError
from draftloop.core.files import write_json
from draftloop.data.chat import encode_prompt
from draftloop.data.prompts import read_prompts
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options, Request
from draftloop.drafter.build import new_drafter
from draftloop.drafter.families import spec_for
from draftloop.formats.load import load_drafter
from draftloop.recipe import DrafterPart
from draftloop.target.load import load_target
from draftloop.train.material import command, hardware, versions

PARTS = ("decode", "train", "draft", "score", "loss")
COLUMNS: dict[str, tuple[tuple[str, str, str], ...]] = {  # of a table: title, key of the row, format
    "decode": (("batch", "batch_size", "d"), ("arm", "arm", "s"), ("tokens/s", "tokens_per_s", ".1f"),
               ("ms/round", "ms_per_round", ".2f"), ("round cost", "round_cost", ".2f"), ("tau", "tau", ".2f"),
               ("against plain", "speedup", ".2f")),
    "train": (("objective", "objective", "s"), ("chunk", "chunk", "d"), ("labels", "labels", "d"),
              ("ms/step", "ms_per_step", ".1f"), ("to chunk 512", "ratio_to_512", ".2f"),
              ("peak MiB", "peak_mib", ".0f")),
    "draft": (("anchors", "anchors", "d"), ("packed ms", "packed_ms", ".2f"), ("single ms", "single_ms", ".2f"),
              ("single/packed", "ratio", ".1f")),
    "score": (("target", "target", "s"), ("trunk", "text", "d"), ("branches", "branches", "d"),
              ("way", "way", "s"), ("ms", "ms", ".1f"), ("to 1", "to_packed", ".2f"),
              ("to 2", "to_packed_keep", ".2f"), ("gap", "gap", ".0e")),
    "loss": (("rows", "rows", "d"), ("way", "way", "s"), ("ms", "ms", ".1f"), ("to chunked", "to_chunked", ".2f"),
             ("peak MiB", "peak_mib", ".0f"), ("gradient gap", "gap", ".0e")),
}  # fmt: skip
TITLES = {
    "decode": "Decoding, greedy, prefill left out; round cost = the tau above which speculation pays",
    "train": "Training step; peak = memory above where it stood before the step",
    "draft": "Drafting from N anchors of one text",
    "score": "Scoring branches of 8 tokens on one trunk; to 1 = times the first way; gap to (3), of the logits",
    "loss": "E2E-TV and its gradient from hidden rows, whole vocabulary; eager = plain autograd on all logits",
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        target = quick_target() if options.quick else load_target(options.target, device=options.device)
        if options.drafter:
            drafter = load_drafter(options.drafter, target, dtype=torch.float32)
        else:
            toy: dict[str, Any] = {"target_layers": [0, 2], "mask_token": 5}
            part = DrafterPart(block_size=8, layers=2, **(toy if options.quick else {"taps": 3}))
            drafter = new_drafter(spec_for(part, target), target)
        rows = measure(options, target, drafter)
        show(rows, options, target)
        if options.out:
            write_json(options.out, account(options, target, drafter, rows))
            print(f"raw rows: {options.out}")
    except DraftloopError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/run.py", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="toy sizes on a random target: does it run at all?")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--target", default="smollm2", help="checkpoint folder, hub id or smollm2 (default)")
    parser.add_argument("--drafter", type=Path, help="drafter folder; default: an untrained one of two layers, block 8")
    parser.add_argument("--device", default="auto", help="auto (default), cpu or cuda")
    parser.add_argument("--threads", type=int, help="CPU threads; default: all cores")
    parser.add_argument("--prompts", type=int, default=8, help="prompts decoded and trained on (default 8)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="longest answer (default 64)")
    parser.add_argument("--repeats", type=int, default=5, help="measured turns of (b), (c) and (d) (default 5)")
    parser.add_argument("--out", type=Path, help="write raw rows, command, versions and hardware to this JSON file")
    options = parser.parse_args(arguments)
    for name in ("prompts", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.max_new_tokens < 2:
        parser.error("--max-new-tokens must be at least 2")
    if options.quick:
        options.target, options.prompts, options.max_new_tokens, options.repeats = "a random toy", 2, 8, 1
    return options


def quick_target(**sizes: int) -> Any:
    """A random Llama of four layers, or of other sizes; it has no tokenizer and needs none here."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    usual = dict(  # noqa: C408
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    config = LlamaConfig(**{**usual, **sizes}, eos_token_id=None, attn_implementation="sdpa")
    return load_target(LlamaForCausalLM(config))


def requests_of(target: Any, count: int) -> list[Request]:
    if target.tokenizer is None:
        return [Request(tuple((i * 13 + j * 7) % 64 for j in range(6 + i)), i) for i in range(count)]
    prompts = read_prompts(["builtin:test"], Path("."), count)
    ids = [encode_prompt(target.tokenizer, list(p.question), template_kwargs={}, tools=p.tools) for p in prompts]
    return [Request(tuple(line), key_of(p.id)) for line, p in zip(ids, prompts, strict=True)]


def measure(options: argparse.Namespace, target: Any, drafter: Any) -> list[Row]:
    requests = requests_of(target, options.prompts)
    longest = options.max_new_tokens
    rows: list[Row] = []
    if "decode" in options.parts:
        sizes = (1, 2) if options.quick else (1, 8)
        rows += decoding(target, drafter, requests, max_new_tokens=longest, batch_sizes=sizes)
    if "train" in options.parts:
        precision = torch.float32 if options.quick else torch.bfloat16
        rows += training(target, drafter, requests, max_new_tokens=longest, anchors=4 if options.quick else 64,
                         repeats=options.repeats, precision=precision)  # fmt: skip
    if "draft" in options.parts:
        length, counts = (32, (4, 8)) if options.quick else (512, (16, 64, 256))
        rows += drafting(target, drafter, length=length, counts=counts, repeats=options.repeats)
    if "score" in options.parts:
        branches = 4 if options.quick else 32
        for length in (24,) if options.quick else (512, 1024):
            text = [(i * 7919 + 13) % 1024 for i in range(length)]
            rows += scoring(random_qwen3(2 * length, options.quick), "random Qwen3", text,
                            branches=branches, width=8, repeats=options.repeats)  # fmt: skip
        asked, answer = requests[0], 250 - len(requests[0].ids) if not options.quick else longest
        (made,) = decode(target, None, [asked], Options(max(longest, answer)))
        rows += scoring(target, str(options.target), [*asked.ids, *made.tokens], branches=branches, width=8,
                        repeats=options.repeats)  # fmt: skip
    if "loss" in options.parts:
        rows += losses(target, counts=(4,) if options.quick else (16, 64), width=8, repeats=options.repeats)
    return rows


def show(rows: list[Row], options: argparse.Namespace, target: Any) -> None:
    console = Console()
    dtype = str(target.dtype).removeprefix("torch.")
    console.print(f"{options.target}, {dtype}, {target.device}, {torch.get_num_threads()} CPU threads", highlight=False)
    for part in PARTS:
        mine = [row for row in rows if row["part"] == part]
        if not mine:
            continue
        table = Table(title=TITLES[part], title_justify="left")
        for title, _, form in COLUMNS[part]:
            table.add_column(title, justify="left" if form == "s" else "right")
        for row in mine:
            peak = row.get("peak_bytes")
            told = {**row, "peak_mib": None if peak is None else peak / 2**20}
            cells = [(told.get(key), form) for _, key, form in COLUMNS[part]]
            table.add_row(*("" if value is None else format(value, form) for value, form in cells))
        console.print(table)


def account(options: argparse.Namespace, target: Any, drafter: Any, rows: list[Row]) -> dict[str, Any]:
    spec = drafter.spec
    return {
        "schema": 1,
        "command": command(),
        "versions": versions(),
        "hardware": hardware(),
        "target": {"name": options.target, "fingerprint": target.fingerprint, "dtype": str(target.dtype)},
        "drafter": {
            "from": str(options.drafter) if options.drafter else "untrained",
            "block_size": spec.block_size,
            "layers": spec.layers,
            "target_layers": list(spec.target_layers),
        },
        "rows": rows,
    }


if __name__ == "__main__":
    main()
