"""Linear layers joined into one product: the same tokens, and never a weight that is stale."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from draftloop.core.errors import InputError
from draftloop.core.law import Sampling
from draftloop.decode.graph import GraphEngine
from draftloop.decode.loop import decode
from draftloop.decode.trace import Generation, Options
from draftloop.target import joined
from draftloop.target.joined import Joined, joined_bytes
from draftloop.target.load import load_target
from tests.stand_ins import EOS, requests_of, with_eos
from tests.test_decode_graph import Counting, agree
from tests.tiny import tiny_drafter, tiny_model, tiny_target


def engine_options() -> Options:
    return Options(max_new_tokens=8, sampling=Sampling(1.0), rule="ratio", batch_size=3)


def engine_of(target, drafter=None, counting=None, **more):
    options = engine_options()
    compiler = partial(torch.compile, dynamic=False, backend=counting or Counting())
    return GraphEngine(target, drafter, options, rows=3, longest=40, kernel="matmul", compiler=compiler, **more)


def decoded(engine, asked):
    made = [Generation(request.ids) for request in asked]
    list(engine.decode(asked, made))
    return made


def asked_of(target):
    return requests_of([1, 4, 9, 12, 7], target.vocab_size, seed=6)


class Products:
    """A compiler's backend that counts the matrix products of each graph."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def __call__(self, module, inputs):
        self.found.append(sum("linear" in str(node.target) for node in module.graph.nodes))
        return module.forward


@pytest.mark.parametrize(
    ("kind", "products"),
    # queries, keys and values of all are joined; phi has neither gate nor up
    [("llama", 4), ("qwen2", 4), ("qwen3", 4), ("mistral", 4), ("phi", 4)],
)
def test_a_layer_has_fewer_products_and_the_tokens_stay(kind, products):
    """Fails if a part takes another's columns or forgets the bias, or if layers are compiled one by one."""
    target = with_eos(tiny_target(kind), *EOS)
    counting = Products()
    engine = engine_of(target, counting=counting)
    assert max(counting.found) == products
    # a layer, rotary positions, the last norm, the hash of draws, three functions of what is counted after them
    assert len(counting.found) == 7 + (kind == "phi")  # and its dropout
    agree(decode(target, None, asked_of(target), engine.options), decoded(engine, asked_of(target)))
    assert engine_of(target, join=False)._joined is None


def test_speculation_with_joined_layers():
    target = with_eos(tiny_target(), *EOS)
    drafter = tiny_drafter(target, block=4)
    engine = engine_of(target, drafter)
    assert len(engine._joined) == 2 * target.num_layers
    agree(decode(target, drafter, asked_of(target), engine.options), decoded(engine, asked_of(target)))


def scaled(target) -> None:
    with torch.no_grad():
        for layer in target._layers:
            layer.self_attn.k_proj.weight.mul_(-1.5)
            layer.mlp.up_proj.weight.add_(0.1)


def replaced(target) -> None:
    for layer in target._layers:
        layer.self_attn.v_proj.weight = nn.Parameter(-layer.self_attn.v_proj.weight.detach().clone())


def pointed_elsewhere(target) -> None:
    for layer in target._layers:
        layer.mlp.gate_proj.weight.data = layer.mlp.gate_proj.weight.detach().flip(0).clone()


def other_module(target) -> None:
    for layer in target._layers:
        new = nn.Linear(48, 24, bias=False)
        layer.self_attn.k_proj = new.requires_grad_(False)


def loaded(target) -> None:
    state = {name: weight.flip(0).clone() for name, weight in target.model.state_dict().items() if "_proj" in name}
    target.model.load_state_dict(state, strict=False)


@pytest.mark.parametrize("head", [lambda old: old, lambda old: nn.Linear(old.in_features, old.out_features)])
def test_a_head_that_was_given_another_weight_is_read(head):
    """Eagerly and by a held engine. Fails if the readout keeps the parameter that it was made with."""
    target = with_eos(load_target(tiny_model()), *EOS)
    asked = asked_of(target)
    engine = engine_of(target)
    before = decode(target, None, asked, engine.options)
    target.model.lm_head = head(target.model.lm_head).requires_grad_(False)
    target.model.lm_head.weight = nn.Parameter(-target.model.lm_head.weight.detach().clone(), requires_grad=False)
    now = decode(target, None, asked, engine.options)
    assert [made.tokens for made in now] != [made.tokens for made in before]
    agree(decode(with_eos(load_target(target.model), *EOS), None, asked, engine.options), now)
    agree(now, decoded(engine, asked))


@pytest.mark.parametrize("change", [scaled, replaced, pointed_elsewhere, other_module, loaded])
def test_no_weight_is_ever_stale(change, monkeypatch):
    """However weights change between two calls, the next call decodes as the eager loop does; without `refresh` not."""
    target = with_eos(load_target(tiny_model()), *EOS)
    asked = asked_of(target)
    engine = engine_of(target)
    before = decoded(engine, asked)
    change(target)
    target.touch()
    now = decode(target, None, asked, engine.options)
    assert [made.tokens for made in now] != [made.tokens for made in before]
    agree(now, decoded(engine, asked))
    monkeypatch.setattr(Joined, "refresh", lambda self: None)
    change(target)
    with pytest.raises(AssertionError):
        agree(decode(target, None, asked, engine.options), decoded(engine, asked))


def patched(target) -> None:
    layer = target._layers[1]
    layer.forward = lambda *args, **kwargs: -1.5 * type(layer).forward(layer, *args, **kwargs)


def norm_patched(target) -> None:
    norm = target._base.norm
    norm.forward = lambda x: -type(norm).forward(norm, x)


def hooked(target) -> None:
    target._layers[1].mlp.down_proj.register_forward_hook(lambda module, inputs, output: -3 * output)


class Adapted(nn.Linear):
    """A layer that an adapter wrapped."""

    def forward(self, x):
        return -2 * super().forward(x)


def adapted(target) -> None:
    for layer in target._layers:
        old = layer.mlp.down_proj
        layer.mlp.down_proj = Adapted(old.in_features, old.out_features, bias=False)
        layer.mlp.down_proj.weight = old.weight


@pytest.mark.parametrize("when", ["before", "between two calls", "between two engines"])
@pytest.mark.parametrize("change", [patched, norm_patched, hooked, adapted])
def test_what_others_do_to_a_layer_counts_and_stays(change, when):
    """Fails if a compiled layer takes the place of a patched one, its end takes the patch away, or a hook is not seen."""
    target = with_eos(load_target(tiny_model()), *EOS)
    asked = asked_of(target)
    engine = engine_of(target) if when != "before" else None
    before = decode(target, None, asked, engine_options())
    if engine is not None:
        agree(before, decoded(engine, asked))
        recorded = engine._recorded()
        assert recorded == engine._recorded()
    change(target)
    patches = [vars(one).get("forward") for one in target.model.modules()]
    if engine is not None:
        assert recorded != engine._recorded()  # so a CUDA graph is captured anew
    now = decode(target, None, asked, engine_options())
    assert [made.tokens for made in now] != [made.tokens for made in before]
    agree(now, decoded(engine if when == "between two calls" else engine_of(target), asked))
    assert [vars(one).get("forward") for one in target.model.modules()] == patches


def test_the_model_stays_as_it_was(tmp_path):
    target = with_eos(tiny_target(), *EOS)
    before = {name: (id(weight), weight.data_ptr()) for name, weight in target.model.named_parameters()}
    print_before = target.fingerprint
    engine = engine_of(target)
    decoded(engine, asked_of(target))
    after = {name: (id(weight), weight.data_ptr()) for name, weight in target.model.named_parameters()}
    assert after == before
    assert all(type(layer.self_attn.q_proj) is nn.Linear for layer in target._layers)
    assert target.fingerprint == print_before
    target.model.save_pretrained(tmp_path)
    assert copy.deepcopy(target.model) is not target.model


def test_a_forward_that_fails_leaves_the_model_whole():
    target = tiny_target()
    both = Joined(target._layers)

    def half() -> None:
        with both.in_place():
            target._layers[0].self_attn.q_proj(torch.ones(1, 48))
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        half()
    assert type(target._layers[0].self_attn.q_proj) is nn.Linear
    assert both._products[0].x is None


def test_parts_that_are_given_different_inputs_compute_for_themselves():
    target = tiny_target("qwen2")
    attention = target._layers[0].self_attn
    one, two = torch.randn(2, 3, 48)
    want = attention.q_proj(one), attention.k_proj(two), attention.k_proj(one), attention.v_proj(two)
    with Joined(target._layers).in_place():
        got = attention.q_proj(one), attention.k_proj(two), attention.k_proj(one), attention.v_proj(two)
    for a, b in zip(want, got, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_what_is_more_than_a_linear_layer_is_left_alone():
    """Hooks, adapters, other types, experts: fails if one of them is joined."""
    layers = tiny_target(layers=4)._layers
    layers[0].self_attn.k_proj.register_forward_hook(lambda module, inputs, output: output)
    layers[1].self_attn.q_proj = type("Adapted", (nn.Linear,), {})(48, 48, bias=False)
    layers[2].self_attn.v_proj.bfloat16()
    layers[3].self_attn.experts = nn.ModuleList([copy.deepcopy(layers[3].mlp)])
    found = Joined(layers)
    assert len(found) == 5  # four mlps and the last attention
    whole = joined_bytes(layers)
    assert whole == 4 * (4 * 2 * 64 * 48 + 48 * (48 + 24 + 24))
    layers[3].self_attn.v_proj.bfloat16()
    with pytest.raises(InputError, match=r"v_proj has another shape or type.*engine anew"):
        found.refresh()


def test_large_models_are_not_copied(monkeypatch):
    target = tiny_target()
    assert target.join() is not None
    monkeypatch.setattr("draftloop.target.model.AT_MOST", joined_bytes(target._layers) - 1)
    assert target.join() is None
    assert joined.AT_MOST == 1 << 30
