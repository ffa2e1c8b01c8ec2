"""What is done otherwise on CUDA, forced on the CPU: the oracle is the model's own forward, or the CPU's own way.

Masks given as numbers and rows of whole grains, rounds of fixed shape (which `auto` decodes by on a GPU), tiled masks.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from draftloop.core import tree as tree_module
from draftloop.core.law import Sampling
from draftloop.decode.graph import GraphEngine, unsupported
from draftloop.decode.trace import Generation, Options
from draftloop.drafter.masks import tiled_block_mask
from draftloop.supervise.score import scored_rows
from draftloop.target.load import load_target
from draftloop.target.model import Target
from tests.conftest import KINDS
from tests.dflash2_tiny import tiny_dflash2
from tests.dspark_tiny import tiny_dspark
from tests.hybrid_tiny import exact_reference, hybrid_model
from tests.stand_ins import EOS, requests_of, with_eos
from tests.test_hybrid_families import FAMILIES, family_model
from tests.test_target import worst_row
from tests.test_target_flex import written_out
from tests.tiny import tiny_drafter, tiny_model, tiny_target
from tests.trees import FAMILIES as WINDOWS
from tests.trees import awkward, blocks_of, keep, packed_pair, plain, worst

EXACT = 1e-6  # of the largest logit, float64; rotary tables and norms of some stay float32
HYBRID = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "qwen4_exp without n-grams"]
SOFTMAX = [*KINDS, *WINDOWS, *FAMILIES]


def model_of(kind: str):
    if kind in FAMILIES:
        return family_model(kind)
    if kind in WINDOWS:
        name, changes = WINDOWS[kind]
        return tiny_model(name, **changes)
    return hybrid_model(kind) if kind in HYBRID else tiny_model(kind)


@cache
def exact(kind: str) -> Target:
    return load_target(model_of(kind).double())


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Masks are numbers where CUDA's would be, and rows of a tree are whole grains."""
    adds, whole = Target._adds_masks, tree_module._whole

    def there(self):
        return adds(SimpleNamespace(config=self.config, family=self.family, device=torch.device("cuda")))

    monkeypatch.setattr(Target, "_adds_masks", there)
    monkeypatch.setattr(tree_module, "_whole", lambda size, grain: whole(size, tree_module._GRAIN))


@pytest.mark.parametrize("kept", [False, True], ids=["recompute", "keep"])
@pytest.mark.parametrize("kind", SOFTMAX + HYBRID)
def test_trees_are_read_by_the_models_law(as_on_cuda, kind, kept):
    target = exact(kind)
    lessons, cells = awkward()
    with exact_reference(target.model) if kind in HYBRID else nullcontext():
        if kept:
            keep(target, lessons)
        assert worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 6))) < EXACT


@pytest.mark.parametrize("kind", SOFTMAX + HYBRID)
def test_texts_are_read_by_the_models_law(as_on_cuda, kind):
    target = exact(kind)
    with exact_reference(target.model) if kind in HYBRID else nullcontext():
        assert worst_row(target, (3, [(4, [3, 0, 2]), (1, [0, 1, 1]), (9, [2, 2, 2])]), 0) < EXACT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", SOFTMAX + HYBRID[:1])
def test_numbers_of_16_bits_hide_what_booleans_hide(monkeypatch, kind, dtype):
    """All slots of a tree, padding too; fails if the lowest number is not low enough, or makes no number of a row."""
    target = load_target(model_of(kind).to(dtype))
    numbers = []
    adds = Target._adds_masks
    for on_cuda in (False, True):
        device = torch.device("cuda" if on_cuda else "cpu")
        monkeypatch.setattr(
            Target,
            "_adds_masks",
            lambda self, device=device: adds(SimpleNamespace(config=self.config, family=self.family, device=device)),
        )
        numbers.append(target.score(packed_pair(target)[0].tree).hidden.float())
    assert bool(numbers[1].isfinite().all())
    assert torch.allclose(*numbers, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kernel", ["sdpa", "matmul"])
@pytest.mark.parametrize("kind", SOFTMAX)
def test_rounds_of_fixed_shape_decode_by_the_models_law(as_on_cuda, kind, kernel):
    """`auto` takes them on a GPU, and no probe has compared them. Rows recorded on the way are those of plain forwards."""
    target = with_eos(exact(kind), *EOS)
    drafter = tiny_drafter(target, block=4).double()
    if "code of its own" in unsupported(target, drafter):
        pytest.skip("decoded eagerly on a GPU too")
    assert not unsupported(target, drafter)
    options = Options(max_new_tokens=12, batch_size=2, record=True, sampling=Sampling(1.0), rule="ratio")
    engine = GraphEngine(target, drafter, options, rows=2, longest=25, kernel=kernel)
    made = [Generation(request.ids) for request in requests_of([1, 6, 13], target.vocab_size, seed=3)]
    list(engine.decode(requests_of([1, 6, 13], target.vocab_size, seed=3), made))
    for one in made:
        want = plain(target, [*one.prompt, *one.tokens][:-1])
        assert float((target.readout.logits(one.hidden) - want).abs().max() / want.abs().max()) < EXACT


@pytest.mark.parametrize("make", ["plain", "causal", "window", "dspark"])
def test_drafters_see_the_same_through_tiles(monkeypatch, make):
    """As a kernel would that visits the listed tiles alone: several of context and of blocks, padding, anchors alike.

    Fails if a window is counted too long in tiles that pass for full, or if the rule is another mask's.
    """
    target = tiny_target("llama")
    drafter = {
        "plain": lambda: tiny_drafter(target),
        "causal": lambda: tiny_drafter(target),
        "window": lambda: tiny_dflash2(target, sizes={"sliding_window": 200}),
        "dspark": lambda: tiny_dspark(target),
    }[make]()
    drafter.causal = make == "causal"
    made = torch.Generator().manual_seed(0)
    features = torch.randn(2, 420, 2 * target.hidden_size, generator=made)
    anchor = torch.stack([torch.randint(*span, (70,), generator=made) for span in ((400, 421), (1, 421))])
    anchor[1, 50:] = 0
    tokens = torch.randint(6, target.vocab_size, (2, 70), generator=made)
    read = []

    def tiled(anchor, context, size, *rest):
        read.append(tiled_block_mask(anchor, context, size, *rest))
        queries = anchor.shape[1] * size
        return written_out(read[-1], queries, context + queries).unsqueeze(1)

    with torch.no_grad():
        dense = drafter(features, anchor, tokens)
        monkeypatch.setattr("draftloop.drafter.dflash.block_mask", tiled)
        found = drafter(features, anchor, tokens)
    assert bool(read[0].full_kv_num_blocks.any())
    assert float((found - dense).abs().max() / dense.abs().max()) < 1e-5
