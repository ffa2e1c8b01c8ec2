"""The packed layout: every slot holds what it should, and sees its ancestors and nothing else."""

from __future__ import annotations

from dataclasses import fields

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from draftloop.core.blocks import Blocks
from draftloop.core.tree import Tree, hang_branches


@st.composite
def plans(draw, max_trunks: int = 3):
    """Trunk lengths, and for each branch its row, fork and length; at least one trunk."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=max_trunks))
    width = draw(st.integers(1, 4))
    branch = st.integers(0, len(sizes) - 1).flatmap(
        lambda row: st.tuples(st.just(row), st.integers(-1, sizes[row] - 1), st.integers(0, width))
    )
    return sizes, width, draw(st.lists(branch, max_size=7))


def lay(sizes, width, branches):
    trunks = [torch.arange(n) + 100 * (i + 1) for i, n in enumerate(sizes)]
    row, fork, length = torch.tensor(branches, dtype=torch.int64).reshape(-1, 3).unbind(1)
    tokens = 1000 * (1 + torch.arange(len(branches)))[:, None] + torch.arange(width)
    return *hang_branches(trunks, row, fork, tokens, length), trunks, tokens


def ancestors(tree: Tree, slot: torch.Tensor, sizes, branches) -> torch.Tensor:
    """Who may see whom, from the plan alone: walk each branch back to the root."""
    see = torch.eye(tree.tokens.shape[1], dtype=torch.bool).repeat(len(sizes), 1, 1)
    for row, size in enumerate(sizes):
        for t in range(size):
            for earlier in range(t):
                see[row, t, earlier] = True
    for number, (row, fork, length) in enumerate(branches):
        path = list(range(fork + 1))
        for step in range(length):
            here = int(slot[number, step])
            for parent in path:
                see[row, here, parent] = True
            path.append(here)
    return see


@settings(max_examples=150, deadline=None)
@given(plans())
def test_layout(plan):
    sizes, width, branches = plan
    tree, slot, trunks, tokens = lay(*plan)
    used = [[*range(n)] for n in sizes]
    for row, trunk in enumerate(trunks):
        n = sizes[row]
        assert torch.equal(tree.tokens[row, :n], trunk)
        assert tree.position[row, :n].tolist() == tree.fork[row, :n].tolist() == list(range(n))
        assert bool((tree.branch[row, :n] == -1).all())
    assert slot.shape == tokens.shape
    for number, (row, fork, length) in enumerate(branches):
        assert slot[number, length:].tolist() == [-1] * (width - length)
        for step in range(length):
            here = int(slot[number, step])
            used[row].append(here)
            assert tree.tokens[row, here] == tokens[number, step]
            assert tree.position[row, here] == fork + 1 + step
            assert tree.fork[row, here] == fork
            assert tree.branch[row, here] == number
    assert tree.tokens.shape == (len(sizes), max(len(row) for row in used)), "no wider than needed"
    for row, slots in enumerate(used):
        assert sorted(slots) == list(range(len(slots))), "no hole, no slot twice"
        assert bool((tree.trunk[row, : len(slots)] == 0).all())
        assert bool((tree.trunk[row, len(slots) :] == -1).all())
    for field in fields(tree):
        assert getattr(tree, field.name).dtype == torch.int64


@settings(max_examples=150, deadline=None)
@given(plans())
def test_dense_mask_is_brute_force(plan):
    sizes, _, branches = plan
    tree, slot, *_ = lay(*plan)
    mask = tree.dense_mask()
    assert mask.dtype == torch.bool
    assert torch.equal(mask.squeeze(1), ancestors(tree, slot, sizes, branches))


@settings(max_examples=12, deadline=None)
@given(plans())
def test_mask_mod_is_the_dense_mask(plan):
    tree, *_ = lay(*plan)
    b, n = tree.tokens.shape
    assert torch.equal(create_mask(tree.mask_mod(), b, 1, n, n, device="cpu"), tree.dense_mask())


@settings(max_examples=60, deadline=None)
@given(plans(max_trunks=4), st.randoms(use_true_random=False))
def test_several_trunks_share_a_row(plan, chance):
    """All rows of a tree laid side by side in one, slots shuffled: each trunk's slots see what they saw alone."""
    tree, *_ = lay(*plan)
    b, n = tree.tokens.shape
    apart = torch.block_diag(*tree.dense_mask().squeeze(1)).bool()
    mixed = list(range(b * n))
    chance.shuffle(mixed)
    number = torch.arange(b)[:, None].expand(b, n)
    trunk = torch.where(tree.trunk < 0, -1, number)
    packed = Tree(
        **{
            f.name: (trunk if f.name == "trunk" else getattr(tree, f.name)).reshape(1, -1)[:, mixed]
            for f in fields(tree)
        }
    )
    assert torch.equal(packed.dense_mask()[0, 0], apart[mixed][:, mixed])


def test_the_same_branch_number_on_two_trunks_is_not_the_same_branch():
    one = torch.ones(1, 2, dtype=torch.int64)
    tree = Tree(0 * one, 3 * one, torch.tensor([[0, 1]]), 0 * one, 2 * one)
    assert torch.equal(tree.dense_mask()[0, 0], torch.eye(2, dtype=torch.bool))


def test_padding_sees_only_itself_and_is_seen_by_nobody():
    tree, *_ = lay([2, 6], 2, [(0, 0, 1)])
    mask = tree.dense_mask()[0, 0]
    pad = tree.trunk[0] < 0
    assert pad.sum() == 3
    assert torch.equal(mask[pad], torch.eye(6, dtype=torch.bool)[pad])
    assert not bool(mask[~pad][:, pad].any())


def test_two_branches_of_one_fork_do_not_see_each_other():
    tree, slot, *_ = lay([4], 3, [(0, 1, 3), (0, 1, 3)])
    mask = tree.dense_mask()[0, 0]
    assert not bool(mask[slot[0]][:, slot[1]].any())
    assert not bool(mask[slot[1]][:, slot[0]].any())
    assert bool(mask[slot[0]][:, :2].all())
    assert not bool(mask[slot[0]][:, 2:4].any())
    assert torch.equal(mask[slot[0]][:, slot[0]], torch.ones(3, 3).tril().bool())


def test_without_branches_the_tree_is_the_padded_batch():
    tree, slot, trunks, _ = lay([3, 5], 4, [])
    assert slot.shape == (0, 4)
    assert tree.tokens.tolist() == [[100, 101, 102, 0, 0], trunks[1].tolist()]
    assert torch.equal(tree.dense_mask()[1, 0], torch.ones(5, 5).tril().bool())


def test_order_of_the_branches_is_kept_within_a_row():
    _, slot, *_ = lay([3, 2], 2, [(1, 0, 2), (0, 2, 1), (1, 1, 0), (1, -1, 1), (0, 0, 2)])
    assert slot.tolist() == [[2, 3], [3, -1], [-1, -1], [4, -1], [4, 5]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.sampled_from("ar."), min_size=4, max_size=4), min_size=1, max_size=4))
def test_blocks_know_their_first_rejected_position(rows):
    """a = accepted, r = rejected, . = not there."""
    valid = torch.tensor([[c != "." for c in row] for row in rows])
    accepted = torch.tensor([[c == "a" for c in row] for row in rows])
    zero = torch.zeros(len(rows), dtype=torch.int64)
    blocks = Blocks(zero, zero, valid.long(), valid, accepted)
    want = [[j == row.index("r") if "r" in row else False for j in range(4)] for row in rows]
    assert blocks.first_rejected.tolist() == want
    assert blocks.position.tolist() == [[1, 2, 3, 4]]
