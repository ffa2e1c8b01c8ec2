"""The tiles of the drafter's mask, told by its anchors, against FlexAttention's own count of every query and key."""

from __future__ import annotations

import pytest
import torch

from draftloop.core.flex import block_mask, flex, tiled_mask
from draftloop.drafter.masks import block_rule, block_tiles, chain_rule, chain_tiles

LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
         "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")  # fmt: skip


def both(context, size, count, causal=False, window=None):
    """Our mask and FlexAttention's, of rows of random anchors with padding and of rows whose anchors are alike."""
    generator = torch.Generator().manual_seed(context + size)
    anchor = torch.randint(1, context + 1, (6, count), generator=generator)
    anchor[0, count // 2 :] = 0
    edges = (0, 0, 0) if window is None else (window + 126, window + 120, window + 121)  # where a tile just counts
    for row, at in enumerate((context, *edges), start=2):
        anchor[row] = min(at, context)

    def see(row, head, q, k):
        return block_rule(anchor, context, size, row, q, k, causal, window)

    queries, keys = count * size, context + count * size
    tiles = block_tiles(anchor, context, size, causal, window)
    return tiles, tiled_mask(see, *tiles, queries, keys), block_mask(see, 6, queries, keys, anchor.device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("context", "size", "count"), [(319, 8, 64), (256, 8, 16), (300, 7, 40), (40, 5, 3), (1, 2, 90)]
)
def test_the_tiles_are_those_that_counting_finds(context, size, count, causal):
    """Fails if a tile's blocks are counted one too few or many, or a tile beyond the end passes for full."""
    _, ours, theirs = both(context, size, count, causal)
    for name in LISTS:
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.seq_lengths == theirs.seq_lengths
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE


@pytest.mark.parametrize("window", [9, 60, 200, 1000])
def test_a_window_leaves_no_tile_out_and_fills_none_too_many(window):
    """Fails if the window is one longer in full tiles, or one shorter in those that hold anything."""
    (some, full), ours, theirs = both(650, 8, 64, window=window)
    dense = theirs.to_dense().bool().squeeze(1)  # tiles that hold anything
    assert bool((some | ~dense).all())
    exact = torch.zeros_like(full)
    for row, tiles in enumerate(theirs.full_kv_num_blocks.squeeze(1).tolist()):
        for tile, number in enumerate(tiles):
            exact[row, tile, theirs.full_kv_indices[row, 0, tile, :number].long()] = True
    assert torch.equal(full, exact)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(6, 1, n, 8, generator=generator) for n in (512, 1162, 1162))
    assert torch.allclose(flex(query, key, value, ours), flex(query, key, value, theirs), atol=1e-6)


@pytest.mark.parametrize(("context", "count", "slots"), [(319, 200, 3), (256, 256, 2), (40, 5, 7), (300, 300, 2)])
def test_the_tiles_of_chains_are_those_that_counting_finds(context, count, slots):
    """Fails if slot 0 of the context counts, or if a slot's chains are looked for at those of another slot."""
    generator = torch.Generator().manual_seed(context)
    anchor = torch.randint(1, context + 1, (4, count), generator=generator)
    anchor[1], anchor[2], anchor[3, count // 2 :] = context, 1, 0
    owner = torch.cat([anchor.new_full((context,), -1), torch.arange(count).repeat(slots)])

    def see(row, head, q, k):
        return chain_rule(anchor, owner, row, q, k)

    keys = context + count * slots
    ours = tiled_mask(see, *chain_tiles(anchor, context, slots), count, keys)
    theirs = block_mask(see, 4, count, keys, anchor.device)
    for name in LISTS:
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
