"""Layers compiled for training: the same losses and gradients, whatever the lengths, and a sentence where it fails."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.utils import counters

from draftloop.core.errors import EnvironmentFault, InputError
from draftloop.drafter.build import for_decoding, new_drafter
from draftloop.drafter.compiled import compile_layers, compiling
from draftloop.drafter.families import spec_for
from draftloop.recipe import DrafterPart
from tests.tiny import tiny_target

SHAPES = ((6, 26, 5), (6, 21, 5), (3, 30, 7), (2, 33, 9))  # rows, context, anchors; sizes alike would share a symbol


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def drafter_of(target, family):
    part = DrafterPart(family=family, block_size=4, layers=2, target_layers=[0, 2], mask_token=5)
    return new_drafter(spec_for(part, target), target).requires_grad_(True)


def answered(drafter, shape, precision=torch.float32):
    """Rows of a packed forward, and the gradient of every parameter."""
    b, context, n = shape
    generator = torch.Generator().manual_seed(sum(shape))
    features = torch.randn(b, context, 2 * drafter.spec.hidden_size, generator=generator)
    anchor = torch.randint(1, context, (b, n), generator=generator)
    tokens = torch.randint(0, 8, (b, n), generator=generator)
    drafter.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        rows = drafter(features, anchor, tokens)
    rows.float().square().sum().backward()
    return rows.detach(), {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["dflash", pytest.param("dflash2", marks=pytest.mark.slow)])
def test_rows_and_gradients_are_the_same_and_lengths_do_not_compile_anew(target, family):
    """Fails if the context's turn is mistaken for the block's in `through`, or if shapes are not dynamic."""
    torch._dynamo.reset()
    plain = drafter_of(target, family)
    made = copy.deepcopy(plain)
    compile_layers(made, backend="aot_eager")
    graphs = []
    for shape in SHAPES:
        (rows, gradients), (others, other_gradients) = answered(plain, shape), answered(made, shape)
        assert torch.allclose(rows, others, atol=1e-5)
        assert gradients.keys() == other_gradients.keys()
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, other_gradients[name], atol=1e-4, rtol=1e-4), name
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0, "nothing was compiled"
    assert graphs[-1] == graphs[0], "a length compiled anew"


def test_what_is_served_is_not_compiled(target):
    made = drafter_of(target, "dflash")
    compile_layers(made, backend="aot_eager")
    assert "through" in vars(made)
    assert "through" not in vars(for_decoding(made, target))


def test_a_compiler_that_fails_is_said_in_a_sentence(target):
    def broken(graph, inputs):
        raise RuntimeError("no C compiler")

    torch._dynamo.reset()
    made = drafter_of(target, "dflash")
    compile_layers(made, backend=broken)
    said = "stage a: the drafter cannot be compiled .*compile_drafter: false"
    with pytest.raises(EnvironmentFault, match=said), compiling("stage a"):
        answered(made, SHAPES[0])


def test_families_that_are_stepped_are_refused(target):
    part = DrafterPart(family="eagle3", target_layers=[0, 2])
    with pytest.raises(InputError, match="slot by slot"):
        compile_layers(new_drafter(spec_for(part, target), target))
