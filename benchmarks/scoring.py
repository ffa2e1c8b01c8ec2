"""Scoring branches: all of a trunk's branches in one packed forward, against one forward for each branch.

Four ways to the same rows, measured in turn: packed, with the trunk fed again or its state kept; and branch by branch,
with the prefix fed again or kept in a cache. Keeping is counted without the forward that made the state, in both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from draftloop.core.blocks import Blocks
from draftloop.data.trunk import response_trunk
from draftloop.supervise.lesson import FeatureStore, Lesson
from draftloop.supervise.score import scored_rows
from draftloop.target.load import load_target

WAYS = ("(1) packed, recompute", "(2) packed, keep", "(3) single, recompute", "(4) single, keep")
Row = dict[str, Any]


def random_qwen3(positions: int, quick: bool) -> Any:
    """A random Qwen3 of six small layers (or a toy)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3} if quick else {
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}  # fmt: skip
    config = Qwen3Config(
        vocab_size=1024, num_attention_heads=4, num_key_value_heads=2, head_dim=size["hidden_size"] // 4,
        max_position_embeddings=positions, eos_token_id=None, attn_implementation="sdpa", **size,
    )  # fmt: skip
    return load_target(Qwen3ForCausalLM(config).eval())


@torch.no_grad()
def scoring(target: Any, name: str, tokens: Sequence[int], *, branches: int, width: int, repeats: int) -> list[Row]:
    """Time of each way to the rows of `branches` random branches of `width` tokens, spread over one trunk.

    Args:
        target: a `Target`.
        name: of the target, for the table.
        tokens: the trunk.
        branches: how many anchors.
        width: proposed tokens a branch; all but the last are fed.
        repeats: turns measured, after one to warm up; the fastest counts, for other work on the machine only adds time.
    """
    trunk = response_trunk(tuple(tokens[:1]), tuple(tokens[1:]), "bench", "", 0, False)
    bare, kept = Lesson(trunk), Lesson(trunk)
    FeatureStore(target, (0,), float("inf"), keep_state=True).fill([kept])
    assert kept.state is not None
    anchors = torch.linspace(0, len(tokens) - 2, branches).long()
    drawn = torch.randint(0, target.vocab_size, (branches, width), generator=torch.Generator().manual_seed(0))
    follow = torch.tensor([*tokens, *[0] * width])[anchors + 1]
    drawn[:, 0] = torch.where(drawn[:, 0] == follow, (follow + 1) % target.vocab_size, drawn[:, 0])  # hang all at once
    anchors, drawn = anchors.to(target.device), drawn.to(target.device)
    valid = torch.ones_like(drawn, dtype=torch.bool)
    blocks = Blocks(torch.zeros_like(anchors), anchors, drawn, valid, valid)
    ids = torch.tensor(tokens, device=target.device).unsqueeze(0)
    cache = target.new_cache(len(tokens) + width)

    def fill() -> None:
        target.extend(cache, ids, torch.arange(len(tokens), device=target.device).unsqueeze(0))

    def single_keep() -> torch.Tensor:
        rows = []
        for i in reversed(range(branches)):  # from the back: a branch overwrites only what no later one sees
            place = int(anchors[i]) + torch.arange(1, width, device=target.device)
            cache.span = 0  # show attention no more than it needs
            rows.append(target.extend(cache, drawn[i : i + 1, :-1], place.unsqueeze(0)).hidden[0])
        rows = torch.stack(rows[::-1])
        return torch.cat([kept.state.hidden[anchors].unsqueeze(1), rows], 1)  # type: ignore[union-attr]

    def single_recompute() -> torch.Tensor:
        rows = []
        for i in range(branches):
            text = torch.cat([ids[:, : int(anchors[i]) + 1], drawn[i : i + 1, :-1]], 1)
            place = torch.arange(text.shape[1], device=target.device).unsqueeze(0)
            rows.append(target.extend(target.new_cache(text.shape[1]), text, place).hidden[0, -width:])
        return torch.stack(rows)

    work = {
        "(1) packed, recompute": lambda: scored_rows(target, [bare], blocks),
        "(2) packed, keep": lambda: scored_rows(target, [kept], blocks),
        "(3) single, recompute": single_recompute,
        "(4) single, keep": single_keep,
    }
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    found = {}
    for turn in range(repeats + 1):
        for way in WAYS:
            fill()
            begin = _now(target.device)
            found[way] = work[way]()
            seconds[way] += [_now(target.device) - begin] if turn else []
    base = target.readout.logits(found["(3) single, recompute"].flatten(0, 1))
    rows = []
    for way in WAYS:
        logits = target.readout.logits(found[way].flatten(0, 1))
        gap = float((logits - base).abs().max() / base.abs().max())
        rows.append({"part": "score", "target": name, "text": len(tokens), "branches": branches, "width": width,
                     "way": way, "ms": 1e3 * min(seconds[way]), "gap": gap, "seconds": seconds[way]})  # fmt: skip
    for row in rows:
        row["to_packed"] = row["ms"] / rows[0]["ms"]
        row["to_packed_keep"] = row["ms"] / rows[1]["ms"]
    return rows


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
