"""What only a CUDA GPU can show: FlexAttention against the dense mask, and decoding and training there."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from draftloop.core.errors import EnvironmentFault
from draftloop.core.flex import block_mask as flex_mask
from draftloop.core.law import Sampling
from draftloop.decode.graph import GraphEngine
from draftloop.decode.loop import decode, engine_of
from draftloop.decode.trace import Generation, Options, Request
from draftloop.drafter import masks
from draftloop.drafter.build import new_drafter
from draftloop.drafter.compiled import compile_layers
from draftloop.drafter.dflash import DFlash
from draftloop.drafter.masks import block_mask
from draftloop.target.load import load_target
from tests.tiny import tiny_model, tiny_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(scope="module")
def pair():
    torch.backends.cuda.matmul.allow_tf32 = False
    target = load_target(tiny_model("qwen3").cuda())
    spec = tiny_spec(target, block=4)
    spec = type(spec)(**{**vars(spec), "head_dim": 16})
    drafter = new_drafter(spec, target)
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.dim() > 1:
                weight.mul_(8)
    return target, drafter


def test_flex_packed_equals_cached_decoding(pair):
    target, drafter = pair
    features = torch.randn(3, 40, len(drafter.spec.target_layers) * target.hidden_size, device="cuda")
    anchor = torch.randint(1, 39, (3, 7), device="cuda")
    tokens = torch.randint(6, 60, (3, 7), device="cuda")
    packed = drafter(features, anchor, tokens)
    for row in range(3):
        for column in range(7):
            at = int(anchor[row, column])
            cache = drafter.new_cache(64)
            drafter.extend(cache, features[row : row + 1, :at], torch.arange(at, device="cuda").unsqueeze(0))
            alone = drafter.begin(cache, anchor[row, column].view(1), tokens[row, column].view(1))
            scale = alone.abs().max()
            assert float(((packed[row, column] - alone[0]).abs().max() / scale).detach()) < 1e-4


def test_flex_gradient_equals_dense_on_cpu(pair):
    target, drafter = pair
    there = DFlash(drafter.spec)
    there.load_state_dict({name: weight.cpu() for name, weight in drafter.state_dict().items()})
    embedding = target.model.get_input_embeddings().weight.detach().cpu()
    there.bind(lambda ids: embedding[ids], target.readout)
    features = torch.randn(2, 30, len(drafter.spec.target_layers) * target.hidden_size)
    anchor, tokens = torch.randint(1, 29, (2, 5)), torch.randint(6, 60, (2, 5))
    assert isinstance(block_mask(anchor, 30, 4), torch.Tensor)
    there(features, anchor, tokens).square().sum().backward()
    drafter.zero_grad()
    drafter(features.cuda(), anchor.cuda(), tokens.cuda()).square().sum().backward()
    for (name, mine), theirs in zip(drafter.named_parameters(), there.parameters(), strict=True):
        # kernels of FlexAttention multiply in tf32, so the direction is compared, not the last digits
        a, b = mine.grad.cpu().flatten().double(), theirs.grad.flatten().double()
        assert float(torch.cosine_similarity(a, b, dim=0)) > 0.999, name
        assert float((a - b).norm() / b.norm()) < 0.05, name


def answers(drafter, rows, context, anchors):
    """Rows of a packed draft of several tiles, and the gradient of a projection."""
    generator = torch.Generator().manual_seed(context)
    features = torch.randn(rows, context, drafter.fc.in_features, generator=generator).cuda()
    anchor = torch.randint(1, context, (rows, anchors), generator=generator).sort(1).values.cuda()
    tokens = torch.randint(6, 60, (rows, anchors), generator=generator).cuda()
    drafter.zero_grad()
    hidden = drafter(features, anchor, tokens)
    hidden.square().sum().backward()
    return hidden.detach(), drafter.layers[0].self_attn.q_proj.weight.grad.clone()


def same(a, b):
    # kernels of FlexAttention multiply in tf32
    return float((a - b).norm() / b.norm()) < 0.05


def test_flex_by_tiles_told_equals_flex_by_tiles_counted(pair, monkeypatch):
    """Fails if a tile is wrongly called empty or full: here some are either."""
    _, drafter = pair
    ours = answers(drafter, 3, 700, 100)
    monkeypatch.setattr(masks, "tiled_mask", lambda see, some, full, q, k: flex_mask(see, len(some), q, k, some.device))
    theirs = answers(drafter, 3, 700, 100)
    assert torch.equal(ours[0], theirs[0])
    assert same(ours[1], theirs[1])


def test_compiled_layers_draft_and_learn_alike(pair):
    """Fails if compiled layers lose attention's gradient, or take a length for a constant."""
    _, drafter = pair
    shapes = ((3, 300, 40), (3, 333, 50), (2, 150, 60))
    plain = [answers(drafter, *shape) for shape in shapes]
    compile_layers(drafter)
    try:
        made = [answers(drafter, *shape) for shape in shapes]
    finally:
        vars(drafter).pop("through")
    for (rows, gradient), (others, other) in zip(plain, made, strict=True):
        assert same(others, rows)
        assert same(other, gradient)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculative_equals_plain_on_cuda(pair, temperature):
    target, drafter = pair
    requests = [Request(tuple(range(6, 9 + i)), key=i) for i in range(9)]
    options = Options(40, Sampling(temperature), batch_size=4)
    plain = decode(target, None, requests, options)
    fast = decode(target, drafter, requests, options)
    assert [made.tokens for made in plain] == [made.tokens for made in fast]


WAYS = {
    "greedy": {"sampling": Sampling()},
    "filtered match": {"sampling": Sampling(0.7, 20, 0.9), "rule": "match"},
    "ratio": {"sampling": Sampling(1.0), "rule": "ratio"},
}


@pytest.mark.parametrize("engine", ["graph", "fused"])
@pytest.mark.parametrize("way", WAYS)
def test_graphs_decode_what_the_eager_loop_decodes(pair, way, engine):
    """Nine requests in four rows: rows are refilled; records included."""
    target, drafter = pair
    requests = [Request(tuple(range(6, 9 + i)), key=i) for i in range(9)]
    for used in (None, drafter):
        options = Options(40, batch_size=4, record=True, seed=3, **WAYS[way])
        eager = decode(target, used, requests, replace(options, engine="eager"))
        fast = decode(target, used, requests, replace(options, engine=engine))
        for one, other in zip(eager, fast, strict=True):
            assert (one.tokens, one.finished, len(one.steps)) == (other.tokens, other.finished, len(other.steps))
            assert [(s.anchor, s.proposed, s.accepted) for s in one.steps] == [
                (s.anchor, s.proposed, s.accepted) for s in other.steps
            ]
            for name in ("features", "hidden", "verified"):
                a, b = getattr(one, name), getattr(other, name)
                assert (a is None) == (b is None)
                assert a is None or float((a - b).abs().max()) < 1e-3 * float(a.abs().max())


def test_cuda_decodes_by_graph_unless_told_otherwise(pair):
    target, drafter = pair
    assert engine_of(target, drafter, Options()) == "graph"
    assert engine_of(target, None, Options(engine="eager")) == "eager"


def test_an_engine_gives_its_memory_back(pair):
    target, drafter = pair
    requests = [Request((6, 7, 8), key=i) for i in range(4)]
    options = Options(200, batch_size=4, engine="graph")
    held = []
    for _ in range(4):
        decode(target, drafter, requests, options)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] - held[1] < 1 << 20  # some 17 kB an engine stay with CUDA's own books


def test_a_round_that_cannot_be_captured_is_one_sentence(pair, monkeypatch):
    target, drafter = pair
    honest = type(drafter).begin
    # asking the device for a value cannot be captured
    monkeypatch.setattr(type(drafter), "begin", lambda self, cache, anchor, tokens: (
        anchor.sum().item(), honest(self, cache, anchor, tokens))[1])  # fmt: skip
    with pytest.raises(EnvironmentFault, match=r"cannot be captured as a CUDA graph.*engine eager"):
        decode(target, drafter, [Request((6, 7, 8))], Options(8, engine="graph"))


def test_a_whole_toy_run_on_cuda(tmp_path):
    from draftloop.evaluate.summary import read_summary
    from draftloop.recipe import Recipe
    from draftloop.train.job import train
    from tests.toy_run import toy_recipe

    recipe = toy_recipe(tmp_path)
    recipe["target"]["device"] = "cuda"
    recipe["drafter"]["head_dim"] = 16
    folder = train(Recipe.model_validate(recipe), out=tmp_path / "run", quiet=True, say=lambda text: None)
    assert read_summary(folder).lossless


def test_flash_and_joined_layers_decode_what_the_eager_loop_decodes(pair):
    """Fails on the GPU alone if a graph holds what a round changes: limits, weights, slots."""
    target, drafter = pair
    requests = [Request(tuple(range(6, 9 + i * 7)), key=i) for i in range(8)]
    for used in (None, drafter):
        for way in WAYS.values():
            for rows in (1, 8):
                options = Options(40, batch_size=rows, seed=3, **way)
                compiler = partial(torch.compile, dynamic=False)
                engine = GraphEngine(
                    target, used, options, rows=rows, longest=110, kernel="flash", compiler=compiler, join=True
                )
                assert engine._joined is not None
                made = [Generation(request.ids) for request in requests]
                list(engine.decode(requests, made))
                engine.close()
                eager = decode(target, used, requests, replace(options, engine="eager"))
                assert [one.tokens for one in made] == [one.tokens for one in eager]


def test_a_captured_round_follows_the_weights(pair):
    """Written over, replaced, and pointed elsewhere: fails if joined copies or the graph itself read the old ones."""
    target = load_target(tiny_model("qwen3", seed=5).cuda())
    requests = [Request(tuple(range(6, 12 + i)), key=i) for i in range(6)]
    options = Options(20, batch_size=4)
    compiler = partial(torch.compile, dynamic=False)
    engine = GraphEngine(target, None, options, rows=4, longest=40, kernel="flash", compiler=compiler, join=True)

    def agree():
        made = [Generation(request.ids) for request in requests]
        list(engine.decode(requests, made))
        assert [one.tokens for one in made] == [
            one.tokens for one in decode(target, None, requests, replace(options, engine="eager"))
        ]
        return [one.tokens for one in made]

    texts = [agree()]
    attention, mlp = target._layers[0].self_attn, target._layers[1].mlp
    with torch.no_grad():
        attention.k_proj.weight.mul_(-1.5)
    texts.append(agree())
    mlp.up_proj.weight = torch.nn.Parameter(-mlp.up_proj.weight.detach().clone())
    texts.append(agree())
    attention.o_proj.weight.data = attention.o_proj.weight.detach().flip(0).clone()
    texts.append(agree())
    assert all(a != b for a, b in pairwise(texts))
