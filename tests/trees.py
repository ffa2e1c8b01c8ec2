"""Loud random targets, batches of branches on their trunks, and the plain forwards that are the oracle for both."""

from __future__ import annotations

from functools import cache

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from draftloop.core.blocks import Blocks
from draftloop.core.tree import pack_branches
from draftloop.data.trunk import Trunk
from draftloop.supervise.lesson import FeatureStore, Lesson
from draftloop.target.load import load_target
from tests.tiny import EOS, VOCAB, tiny_model

MASK, WINDOW = 5, 5
MIXED = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
FAMILIES = {
    "full": ("qwen3", {}),
    "full, biased": ("qwen2", {}),
    "mixed": ("qwen3", MIXED),
    "mixed, biased": ("qwen2", MIXED),
    "sliding": ("mistral", {"sliding_window": WINDOW}),
}
WINDOWED = ["mixed", "mixed, biased", "sliding"]
EXACT = 1e-9  # of the largest logit, loud models in float64
quick = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


@cache
def loud(family: str):
    kind, changes = FAMILIES[family]
    return load_target(tiny_model(kind, **changes).double())


def text(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def lesson_of(tokens, name: str = "a") -> Lesson:
    return Lesson(Trunk(name, "", 0, tuple(tokens), (False,) + (True,) * (len(tokens) - 1), False))


def blocks_of(cells, drafted: int) -> Blocks:
    """Blocks from (row, anchor, proposed tokens)."""
    row, anchor = torch.tensor([cell[:2] for cell in cells]).unbind(1)
    valid = torch.arange(drafted) < torch.tensor([len(cell[2]) for cell in cells]).unsqueeze(1)
    tokens = torch.tensor([[*cell[2], *[0] * (drafted - len(cell[2]))] for cell in cells])
    return Blocks(row, anchor, tokens, valid, valid)


def keep(target, lessons, which=None) -> None:
    """Give these lessons their trunk's state."""
    store = FeatureStore(target, (0, 2), 1e9, keep_state=True)
    store.fill([one for i, one in enumerate(lessons) if which is None or which[i]], 64)
    assert not store.left_out


def packed_pair(target, aligned: bool = False):
    """Two trunks in one row and a third in another, branches on all; the tokens of the trunks."""
    trunks = [torch.tensor(text(n, n)) for n in (11, 6, 9)]
    on = torch.tensor([0, 1, 0, 2, 1, 0])
    fork = torch.tensor([3, 5, 10, 0, 2, 3])
    tokens = torch.tensor(text(24, 5)).view(6, 4)
    packed = pack_branches(trunks, [0, 0, 1], on, fork, tokens, torch.tensor([4, 2, 3, 4, 4, 1]), aligned=aligned)
    return packed, trunks, on, fork, tokens


@torch.no_grad()
def plain(target, tokens) -> torch.Tensor:
    """Logits [t, V], by the model's own forward."""
    return target.model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]


def worst(target, lessons, cells, found) -> float:
    """The largest gap of the rows found to plain forwards, as a part of the largest logit."""
    gaps = [0.0]
    for (row, anchor, proposed), rows in zip(cells, found, strict=True):
        k = len(proposed)
        assert not bool(rows[k:].any()), "rows that are not valid are zero"
        assert bool(torch.isfinite(rows).all())
        if k:
            want = plain(target, [*lessons[row].trunk.tokens[: anchor + 1], *proposed[:-1]])[anchor:]
            gaps.append(float((target.readout.logits(rows[:k]) - want).abs().max() / want.abs().max()))
    return max(gaps)


@st.composite
def batches(draw):
    """Trunks, blocks on them (some along the trunk for a while, some with an end or the mask token), and a budget."""
    lessons = [
        lesson_of(draw(st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=16)), f"m{i}")
        for i in range(draw(st.integers(1, 4)))
    ]
    drafted = draw(st.integers(1, 6))
    cells = []
    for _ in range(draw(st.integers(1, 8))):
        row = draw(st.integers(0, len(lessons) - 1))
        tokens = lessons[row].trunk.tokens
        anchor = draw(st.integers(0, len(tokens) - 1))
        along = list(tokens[anchor + 1 :][: draw(st.integers(0, drafted))])
        other = st.one_of(st.integers(0, VOCAB - 1), st.sampled_from([EOS, MASK]))
        proposed = along + draw(st.lists(other, min_size=drafted - len(along), max_size=drafted - len(along)))
        cells.append((row, anchor, proposed[: draw(st.integers(0, drafted))]))
    return lessons, drafted, cells, draw(st.sampled_from([1, 20, 45, 4096]))


def awkward():
    """Anchors at both ends and side by side, twins, an end and the mask token inside, two trunks of unlike length."""
    lessons = [lesson_of(text(19, 1)), lesson_of(text(8, 2), "b")]
    own = lessons[0].trunk.tokens
    cells = [(0, a, text(6, 10 + a)) for a in (0, 1, 8, 9, 10, 17, 18)]
    cells += [(0, 9, cells[3][2]), (0, 4, [own[5], own[6], EOS, 7, MASK, 8]), (0, 5, [*own[6:12]])]
    cells += [(1, a, text(6, 30 + a)) for a in (0, 3, 6, 7)]
    cells += [(1, 2, [EOS, MASK, MASK, EOS, 1, 2]), (1, 5, text(2, 3))]
    return lessons, cells


def keep_layers(target, lesson) -> None:
    ids = torch.tensor([lesson.trunk.tokens])
    held = target.new_cache(ids.shape[1])
    hidden = target.extend(held, ids, torch.arange(ids.shape[1]).unsqueeze(0)).hidden[0]
    lesson.state = held.state(0, hidden, target.version)
