"""FlexAttention reads a proposal tree as dense masks do: cell by cell, and row by row through the model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.core.errors import InputError
from draftloop.core.tree import pack_branches
from draftloop.recipe import Recipe
from draftloop.supervise.score import scored_rows
from draftloop.target import flex as tree_flex
from draftloop.target.flex import LONG, chosen
from draftloop.target.load import load_target
from draftloop.train.material import load_recipe_target
from tests.hybrid_tiny import exact_reference, hybrid_model
from tests.test_core_tree import plans
from tests.test_hybrid_families import family_model
from tests.tiny import tiny_model
from tests.toy_run import toy_checkpoint
from tests.trees import EXACT, FAMILIES, MIXED, awkward, blocks_of, keep, worst

pytestmark = [
    pytest.mark.specopd,
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]


def slow_mask(tree, window=None, chunk=None) -> torch.Tensor:
    """[b, N, N], slot by slot: its line back to the root, cut off at the window and where the chunk begins."""
    batch, width = tree.tokens.shape
    out = torch.zeros(batch, width, width, dtype=torch.bool)
    for b in range(batch):
        facts = [
            {name: int(getattr(tree, name)[b, s]) for name in ("trunk", "branch", "position", "fork")}
            for s in range(width)
        ]
        for q, at in enumerate(facts):
            out[b, q, q] = True
            if at["trunk"] < 0:
                continue
            for k, one in enumerate(facts):
                behind = at["position"] - one["position"]
                if one["trunk"] != at["trunk"] or behind < 0 or (window is not None and behind >= window):
                    continue
                if chunk is not None and one["position"] // chunk != at["position"] // chunk:
                    continue
                own = at["branch"] >= 0 and one["branch"] == at["branch"]
                out[b, q, k] |= own or (one["branch"] < 0 and one["position"] <= at["fork"])
    return out


@settings(max_examples=40, deadline=None)
@given(plans(), st.booleans(), st.sampled_from([None, 1, 2, 5]), st.sampled_from([None, 1, 3, 4]), st.data())
def test_masks_are_equal_cell_by_cell(plan, together, window, chunk, data):
    from torch.nn.attention.flex_attention import create_mask

    sizes, width, branches = plan
    row, fork, length = torch.tensor(branches, dtype=torch.int64).reshape(-1, 3).unbind(1)
    rows = [0] * len(sizes) if together else list(range(len(sizes)))
    tokens = torch.zeros(len(branches), width, dtype=torch.int64)
    tree = pack_branches([torch.arange(n) for n in sizes], rows, row, fork, tokens, length).tree
    batch, slots = tree.tokens.shape
    first = data.draw(st.integers(0, slots - 1))
    want = slow_mask(tree, window, chunk)[:, None, first:]
    assert torch.equal(tree.dense_mask(first, window, chunk), want)
    see = tree.mask_mod(first, window, chunk)
    assert torch.equal(create_mask(see, batch, 1, slots - first, slots, device="cpu"), want)


def written_out(block, queries: int, keys: int) -> torch.Tensor:
    """[b, queries, keys]: what a kernel that visits only the listed blocks would see."""
    batch, size = block.shape[0], block.BLOCK_SIZE[0]
    out = torch.zeros(batch, queries, keys, dtype=torch.bool)
    for number, index, full in (
        (block.kv_num_blocks, block.kv_indices, False),
        (block.full_kv_num_blocks, block.full_kv_indices, True),
    ):
        for b in range(batch):
            for i in range(number.shape[2]):
                for j in index[b, 0, i, : int(number[b, 0, i])].tolist():
                    q = torch.arange(i * size, min((i + 1) * size, queries))[:, None]
                    k = torch.arange(j * size, min((j + 1) * size, keys))[None, :]
                    seen = torch.ones(len(q), k.shape[1], dtype=torch.bool)
                    if not full:
                        seen = block.mask_mod(torch.tensor(b), torch.tensor(0), q, k)
                    out[b, q, k] = seen
    return out


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (60, None), (None, 70)])
@pytest.mark.parametrize("aligned", [False, True])
def test_no_block_that_is_seen_is_skipped(window, chunk, aligned):
    trunks = [torch.arange(n) for n in (300, 140, 260)]
    fork = torch.tensor([10, 299, 100, 130, 259, 7])
    on, length = torch.tensor([0, 0, 1, 1, 2, 2]), torch.full((6,), 40)
    packed = pack_branches(trunks, [0, 0, 1], on, fork, torch.zeros(6, 40, dtype=torch.int64), length, aligned=aligned)
    tree, first = packed.tree, packed.first
    block = tree.block_mask(first, window, chunk)
    dense = tree.dense_mask(first, window, chunk)
    assert block.shape == tuple(dense.shape)
    assert torch.equal(written_out(block, *dense.shape[2:]), dense[:, 0])
    assert aligned or block.sparsity() > 10


@pytest.mark.parametrize("kept", [False, True], ids=["recompute", "keep"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_plain_forwards(family, kept):
    kind, changes = FAMILIES[family]
    target = load_target(tiny_model(kind, **changes).double())
    target.tree_attention = "flex"
    lessons, cells = awkward()
    if kept:
        keep(target, lessons)
    read = []
    attend = tree_flex.attend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_flex, "attend", lambda *args, **more: (read.append(args[4]), attend(*args, **more))[1])
        found = scored_rows(target, lessons, blocks_of(cells, 6))
    assert worst(target, lessons, cells, found) < EXACT
    assert read, "it was FlexAttention that read"
    assert target.config._attn_implementation == "sdpa"


def read_by(monkeypatch, target, kept: bool) -> tuple[float, int]:
    """The largest gap to plain forwards, and how often FlexAttention was called."""
    lessons, cells = awkward()
    if kept:
        keep(target, lessons)
    calls = []
    attend = tree_flex.attend
    monkeypatch.setattr(tree_flex, "attend", lambda *args, **more: (calls.append(0), attend(*args, **more))[1])
    with exact_reference(target.model):
        return worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 6))), len(calls)


@pytest.mark.parametrize("kept", [False, True], ids=["recompute", "keep"])
@pytest.mark.parametrize("family", ["chunked and full", "qwen3_5"])
def test_chunks_and_recurrent_layers_beside_it_are_read_alike(monkeypatch, family, kept):
    model = hybrid_model(family) if family == "qwen3_5" else family_model(family)
    target = load_target(model.double())
    target.tree_attention = "flex"
    gap, calls = read_by(monkeypatch, target, kept)
    assert gap < 1e-6  # rotary tables stay float32
    assert calls


@pytest.mark.parametrize("kind", ["indexed", "sinks"])
def test_kinds_that_it_cannot_read_are_dense_and_say_so(monkeypatch, kind):
    model = family_model("gpt-oss, sliding with sinks") if kind == "sinks" else hybrid_model("qwen4_exp")
    target = load_target(model.double())
    target.tree_attention = "flex"
    why = {"indexed": "its indexers select keys", "sinks": "tree attention knows no"}[kind]
    with pytest.raises(InputError, match=rf"{why}.*Set target\.tree_attention to auto or dense"):
        read_by(monkeypatch, target, False)
    again = load_target(model)
    monkeypatch.setattr("draftloop.target.model.chosen", lambda way, *rest: way != "dense")
    with pytest.warns(UserWarning, match=rf"{why}.*read with dense masks"):
        assert read_by(monkeypatch, again, False)[0] < 1e-6
    assert read_by(monkeypatch, again, True) == (pytest.approx(0, abs=1e-6), 0)


def wrong(how: str):
    attend = tree_flex.attend

    def spoilt(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **more):
        if how == "fails":
            raise RuntimeError("no such kernel")
        return attend(module, query, key, value, attention_mask, dropout, scaling * 1.1, **more)

    return spoilt


@pytest.mark.parametrize("how", ["fails", "scales"])
def test_wrong_rows_are_never_used(monkeypatch, how):
    target = load_target(tiny_model("qwen3", **MIXED))
    lessons, cells = awkward()
    blocks = blocks_of(cells, 6)
    monkeypatch.setattr(tree_flex, "attend", wrong(how))
    target.tree_attention = "flex"
    for _ in range(2):  # not only the first time
        with pytest.raises(InputError, match=r"FlexAttention .*\. Set target\.tree_attention to auto or dense"):
            scored_rows(target, lessons, blocks)
    again = load_target(tiny_model("qwen3", **MIXED))
    monkeypatch.setattr("draftloop.target.model.chosen", lambda way, *rest: way != "dense")
    with pytest.warns(UserWarning, match="read with dense masks"):
        found = scored_rows(again, lessons, blocks)
    assert worst(again, lessons, cells, found) < 1e-4
    assert again.tree_attention == "auto"


@pytest.mark.parametrize("asked", [{"softcap": 30.0}, {"dropout": 0.1}, {"position_bias": 1}, {"s_aux": 1}])
def test_what_it_does_not_know_is_refused(asked):
    block = pack_branches([torch.arange(4)], [0], *torch.zeros(2, 0, dtype=torch.int64),
                          torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)).tree.block_mask()  # fmt: skip
    states = torch.randn(1, 2, 4, 8)
    tree_flex.attend(None, states, states, states, block)
    with pytest.raises(ValueError, match="tree attention knows no"):
        tree_flex.attend(None, states, states, states, block, **asked)


def test_when_it_is_chosen(tmp_path):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert chosen("auto", gpu, torch.bfloat16, LONG)
    assert not chosen("auto", gpu, torch.bfloat16, LONG - 1)
    assert not chosen("auto", gpu, torch.float32, LONG)
    assert not chosen("auto", cpu, torch.bfloat16, LONG)
    assert not chosen("dense", gpu, torch.bfloat16, LONG)
    assert chosen("flex", cpu, torch.float32, 1)
    recipe = Recipe.model_validate(
        {"target": {"model": str(toy_checkpoint(tmp_path)), "device": "cpu", "tree_attention": "flex"}}
    )
    assert load_recipe_target(recipe.target).tree_attention == "flex"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["full", "mixed", "sliding"])
def test_logits_are_equal_on_cuda(kind, dtype, monkeypatch):
    """On rows of several thousand slots, whole and on kept states; `auto` takes it by itself in bfloat16."""
    name, changes = FAMILIES[kind]
    changes = {**changes, **({} if kind == "full" else {"sliding_window": 700})}
    size = {"max_position_embeddings": 4096, "head_dim": 64, "hidden_size": 64}
    model = tiny_model(name, **size, **changes)
    for weight in model.parameters():
        weight.data.mul_(0.3 if weight.dim() > 1 else 1)
    target = load_target(model.to("cuda", dtype))
    trunks = [torch.arange(n, device="cuda") * 7 % 61 for n in (2100, 900)]
    on = torch.tensor([0, 0, 1, 0, 1], device="cuda").repeat(60)
    fork = torch.randint(0, 900, (300,), generator=torch.Generator().manual_seed(0)).cuda()
    tokens = torch.randint(0, 61, (300, 7), generator=torch.Generator().manual_seed(1)).cuda()
    packed = pack_branches(trunks, [0, 0], on, fork, tokens, torch.full_like(on, 7), aligned=True)
    states = []
    for trunk in trunks:
        cache, place = target.new_cache(len(trunk)), torch.arange(len(trunk), device="cuda").unsqueeze(0)
        states.append(cache.state(0, target.extend(cache, trunk.unsqueeze(0), place).hidden[0], target.version))
    slots = packed.slot.flatten()
    read = (torch.zeros_like(slots), slots)
    logits = {}
    for way in ("dense", "flex"):
        target.tree_attention = way
        rows = (target.score(packed.tree, read=read).hidden, target.resume(packed, states, read))
        logits[way] = [target.readout.logits(one).float() for one in rows]
    for flexed, dense in zip(logits["flex"], logits["dense"], strict=True):
        gap = float((flexed - dense).abs().max() / dense.abs().max())
        assert gap < (1e-2 if dtype == torch.float32 else 6e-2), gap
        assert float(torch.nn.functional.cosine_similarity(flexed, dense).min()) > 0.99
    target.tree_attention = "auto"
    monkeypatch.setattr("draftloop.target.flex.LONG", 1000)
    assert target._flexes(packed.tree) == (dtype == torch.bfloat16)
