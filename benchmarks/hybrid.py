"""What it costs to score branches through Gated DeltaNet, by snapshot spacing and trunk length.

    python benchmarks/hybrid.py --out results/raw/hybrid-NAME.jsonl    # then: python benchmarks/results.py derive

Random weights. Part `layer`: one Gated DeltaNet layer over trunk and branches, for each spacing C, against the same
layer run over each branch's prefix and branch. Part `model`: a whole forward, trunk fed again (`packed`) or kept
(`kept`), against a plain forward of each prefix + branch (`replayed`). Replays of a few branches are measured, spread
evenly over the trunk, and scaled to all: the row says how many. The sizes: `tiny` for a CPU; `4b`: the shapes of a
Qwen3.5-class model of four billion parameters, in bfloat16, with a vocabulary of 32,768. Ends early, saying so, when
`--seconds` are over.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from hybrid_results import show
from measure import watched

from draftloop.core.tree import Packed, pack_branches
from draftloop.target.hybrid import HybridAttention
from draftloop.target.load import load_target
from draftloop.target.model import Target
from draftloop.train.material import command, hardware, versions

Row = dict[str, Any]
SIZES: dict[str, dict[str, Any]] = {
    "tiny": dict(  # noqa: C408
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
        linear_value_head_dim=32,
    ),
    "4b": dict(  # noqa: C408
        vocab_size=32768, hidden_size=2560, intermediate_size=9216, num_hidden_layers=32, num_attention_heads=16,
        num_key_value_heads=4, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32,
        linear_key_head_dim=128, linear_value_head_dim=128,
    ),
}  # fmt: skip


def random_target(size: str, device: str) -> Target:
    """A random Qwen3.5 of that size: three layers of Gated DeltaNet, one of attention, and so on."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    layers = SIZES[size]["num_hidden_layers"]
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    config = Qwen3_5TextConfig(
        **SIZES[size], layer_types=kinds, max_position_embeddings=1 << 17, attn_implementation="sdpa",
        eos_token_id=None, pad_token_id=None, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    was = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if size == "4b" else torch.float32)
    try:
        with torch.device(device):
            model = Qwen3_5ForCausalLM(config)
    finally:
        torch.set_default_dtype(was)
    return load_target(model.eval())


def hung(target: Target, length: int, branches: int, width: int, aligned: bool) -> Packed:
    """A random trunk and random branches of `width` - 1 fed tokens, spread evenly over it."""
    draw = torch.Generator().manual_seed(length)
    trunk = torch.randint(0, target.vocab_size, (length,), generator=draw)
    tokens = torch.randint(0, target.vocab_size, (branches, width - 1), generator=draw)
    fork = torch.linspace(0, length - 2, branches).long()
    full = torch.full((branches,), width - 1)
    tokens, none = tokens.to(target.device), torch.zeros(branches, dtype=torch.int64)
    return pack_branches([trunk], [0], none, fork, tokens, full, aligned=aligned)


def some(branches: int, count: int) -> list[int]:
    """Which branches are replayed: in the middle of `count` equal parts of them, so that their mean stands for all."""
    return [int((i + 0.5) * branches / count) for i in range(count)]


def of_layer(target: Target, options: argparse.Namespace, length: int) -> Iterator[Row]:
    """One layer by spacing, and its replay."""
    family = target.family
    assert isinstance(family, HybridAttention)
    module = family.mixers[0].module
    packed = hung(target, length, options.branches, options.width, False)
    hidden = torch.randn(1, packed.tree.tokens.shape[1], target.hidden_size, device=target.device, dtype=target.dtype)
    for spacing in options.spacings:
        if spacing <= length:
            with family.spaced(spacing).mixing(packed.tree):
                yield timed(
                    {"part": "layer", "way": "packed", "spacing": spacing}, lambda: module(hidden), target, options
                )
    texts = list(prefixes(packed, options))

    def replayed() -> None:
        for row in texts:
            module(hidden[:, row])

    share = options.branches / len(texts)
    yield timed({"part": "layer", "way": "replayed", "measured": len(texts)}, replayed, target, options, share)


def prefixes(packed: Packed, options: argparse.Namespace) -> Iterator[torch.Tensor]:
    """The slots of trunk prefix + branch, of the branches that are replayed."""
    slots, lines = packed.tree.lines().trunk_slot[0], packed.tree.lines()
    for branch in some(options.branches, min(options.branches, options.replays)):
        yield torch.cat([slots[: int(lines.fork[branch]) + 1], lines.slot[branch]])


def of_model(target: Target, options: argparse.Namespace, length: int) -> Iterator[Row]:
    """A whole forward by packing, and its replay."""
    packed = hung(target, length, options.branches, options.width, True)
    slots = packed.slot.flatten()
    read = (torch.zeros_like(slots), slots)
    wanted = {}

    def score() -> None:
        wanted["packed"] = target.score(packed.tree, read=read).hidden

    assert isinstance(target.family, HybridAttention)
    row = {"part": "model", "way": "packed", "spacing": target.family.spacing}
    yield timed(row, score, target, options)
    texts = [packed.tree.tokens[:, row] for row in prefixes(packed, options)]
    base = target.model.get_decoder()  # type: ignore[operator]
    ends: list[torch.Tensor] = []

    def replayed() -> None:
        ends.clear()
        for text in texts:
            ends.append(base(input_ids=text, use_cache=False).last_hidden_state[0, 1 - options.width :])

    share = options.branches / len(texts)
    row = {"part": "model", "way": "replayed", "measured": len(texts)}
    replay = timed(row, replayed, target, options, share)
    rows = wanted["packed"].view(options.branches, options.width - 1, -1)[some(options.branches, len(texts))]
    want = target.readout.logits(torch.stack(ends).flatten(0, 1))
    got = target.readout.logits(rows.flatten(0, 1))
    yield {**replay, "gap": float((got - want).abs().max() / want.abs().max())}
    if length <= options.longest_kept:
        cache = target.new_cache(length)
        place = torch.arange(length, device=target.device).unsqueeze(0)
        state = cache.state(0, target.extend(cache, packed.tree.tokens[:, :length], place).hidden[0], target.version)
        del cache
        row = {"part": "model", "way": "kept", "spacing": target.family.spacing, "state_bytes": state.nbytes}
        yield timed(row, lambda: target.resume(packed, [state], read), target, options)


def timed(row: Row, work: Callable[[], Any], target: Target, options: argparse.Namespace, share: float = 1.0) -> Row:
    """Run it once to warm up, then `repeats` times; seconds are scaled by `share`, memory is not."""

    def step() -> int:
        work()
        return 0

    with torch.no_grad():
        step()
        turns = [watched(step, target.device) for _ in range(options.repeats)]
    peaks = [peak for _, peak, _ in turns if peak is not None]
    return {
        "spacing": None, "measured": options.branches, **row, "seconds": [share * seconds for seconds, _, _ in turns],
        "peak_bytes": max(peaks) if peaks else None,
    }  # fmt: skip


def main() -> int:
    """Measure, print the tables, write the rows."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--size", choices=tuple(SIZES), help="default: 4b on a GPU, tiny on a CPU")
    parser.add_argument(
        "--lengths", type=int, nargs="+", help="trunk tokens (default: 2048 8192 32768; a CPU: 256 1024)"
    )
    parser.add_argument(
        "--spacings", type=int, nargs="+", default=[16, 64, 128, 256, 1024], help="snapshots, tokens apart"
    )
    parser.add_argument("--branches", type=int, default=64)
    parser.add_argument("--width", type=int, default=16, help="proposed tokens a branch; all but the last are fed")
    parser.add_argument("--replays", type=int, default=4, help="how many branches are really replayed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--longest-kept", type=int, default=8192, help="longest trunk whose whole state is kept")
    parser.add_argument("--seconds", type=float, default=110.0, help="begin nothing new after this long")
    parser.add_argument("--out", type=Path, help="write raw rows as JSON lines")
    options = parser.parse_args()
    size = options.size or ("4b" if options.device.startswith("cuda") else "tiny")
    lengths = options.lengths or ([2048, 8192, 32768] if size == "4b" else [256, 1024])
    begin = time.perf_counter()
    target = random_target(size, options.device)
    head = {
        "kind": "hybrid", "command": command(), "versions": versions(), "hardware": hardware(), "size": size,
        "shapes": SIZES[size], "dtype": str(target.dtype).removeprefix("torch."), "branches": options.branches,
        "width": options.width,
        "parameters": sum(p.numel() for p in target.model.parameters()),
    }  # fmt: skip
    rows: list[Row] = [head]
    for length in lengths:
        for part in (of_layer, of_model):
            if time.perf_counter() - begin > options.seconds:
                print(f"out of time: no {part.__name__} at {length}", file=sys.stderr)
                continue
            try:
                rows += [{"kind": "time", "length": length, **row} for row in part(target, options, length)]
            except torch.OutOfMemoryError:
                print(f"out of memory: {part.__name__} at {length}", file=sys.stderr)
            if options.out is not None:  # what was measured is not lost if what follows fails
                options.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(show(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
