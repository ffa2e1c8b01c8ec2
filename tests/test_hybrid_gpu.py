"""Hybrid targets on a CUDA GPU: trees, kept trunks and decoding, in float32 and in bfloat16."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from draftloop.decode.loop import decode
from draftloop.decode.trace import Options
from draftloop.supervise.score import scored_rows
from draftloop.target.load import load_target
from tests.hybrid_tiny import hybrid_model
from tests.stand_ins import replies, requests_of
from tests.test_hybrid_decoding import by_the_model
from tests.tiny import VOCAB, tiny_drafter
from tests.trees import awkward, blocks_of, keep

pytestmark = [
    pytest.mark.hybrid,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
KINDS = ["qwen3_next", "qwen3_5", "qwen4_exp"]


@torch.no_grad()
def log_probs(target, lessons, cells, kept: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the rows found and of plain forwards, [rows, V] each."""
    blocks = blocks_of(cells, 6)
    there = {f.name: getattr(blocks, f.name) for f in dataclasses.fields(blocks)}
    blocks = type(blocks)(**{k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in there.items()})
    if kept:
        keep(target, lessons)
    found, got, want = scored_rows(target, lessons, blocks), [], []
    for (row, anchor, proposed), rows in zip(cells, found, strict=True):
        ids = torch.tensor([[*lessons[row].trunk.tokens[: anchor + 1], *proposed[:-1]]], device="cuda")
        want.append(target.model(input_ids=ids, use_cache=False).logits[0, anchor:].float().log_softmax(-1))
        got.append(target.readout.logits(rows[: len(proposed)]).float().log_softmax(-1))
    return torch.cat(got), torch.cat(want)


@pytest.mark.parametrize("kept", [False, True], ids=["recompute", "keep"])
@pytest.mark.parametrize("kind", KINDS)
def test_trees_equal_plain_forwards(kind, kept):
    torch.backends.cuda.matmul.allow_tf32 = False
    target = load_target(hybrid_model(kind).cuda())
    got, want = log_probs(target, *awkward(), kept)
    assert float((got - want).abs().max()) < 1e-3

    low = load_target(hybrid_model(kind).cuda().bfloat16())
    rounded, plain = log_probs(low, *awkward(), kept)
    spread = float((plain - want).abs().mean())  # what bfloat16 does to the model's own forward
    assert float((rounded - want).abs().mean()) <= 2 * spread


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_is_lossless(kind):
    torch.backends.cuda.matmul.allow_tf32 = False
    target = load_target(hybrid_model(kind).cuda())
    requests = requests_of((1, 3, 8, 13), VOCAB)
    options = Options(max_new_tokens=16, batch_size=4)
    drafter = tiny_drafter(target, block=4)
    want = [by_the_model(target, one, 16, target.eos_ids) for one in requests]
    assert replies(decode(target, None, requests, options)) == want
    assert replies(decode(target, drafter, requests, options)) == want
