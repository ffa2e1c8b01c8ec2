"""The proposal tree: packed scoring of branches is what a plain forward of each text by itself gives, however packed.

The oracle is the unmodified model's own forward of trunk prefix + branch, without cache, mask or tree of ours. Loud
random models in float64 show a wrong edge many orders above rounding; quiet ones in float32 hold the tight limits.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftloop.core.blocks import Blocks
from draftloop.core.tree import pack_branches, share_rows
from draftloop.data.trunk import Trunk
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options, Request
from draftloop.drafter.build import for_decoding
from draftloop.supervise.lesson import FeatureStore, Lesson
from draftloop.supervise.score import scored_rows
from draftloop.target import attention
from draftloop.target.cache import TrunkState
from draftloop.target.load import load_target
from tests.test_core_tree import plans
from tests.tiny import EOS, VOCAB, tiny_drafter, tiny_model

pytestmark = pytest.mark.specopd

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


@pytest.fixture(params=FAMILIES)
def target(request):
    return loud(request.param)


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


# ------------------------------------------------------------------------------------------------ what is scored


@pytest.mark.parametrize("way", ["recompute", "keep", "some kept"])
@quick
@given(batch=batches())
def test_packed_rows_equal_plain_forwards(target, way, batch):
    lessons, drafted, cells, budget = batch
    lessons = [Lesson(one.trunk) for one in lessons]
    if way != "recompute":
        keep(target, lessons, [way == "keep" or i % 2 for i in range(len(lessons))])
    found = scored_rows(target, lessons, blocks_of(cells, drafted), budget)
    assert worst(target, lessons, cells, found) < EXACT


def awkward():
    """Anchors at both ends and side by side, twins, an end and the mask token inside, two trunks of unlike length."""
    lessons = [lesson_of(text(19, 1)), lesson_of(text(8, 2), "b")]
    own = lessons[0].trunk.tokens
    cells = [(0, a, text(6, 10 + a)) for a in (0, 1, 8, 9, 10, 17, 18)]
    cells += [(0, 9, cells[3][2]), (0, 4, [own[5], own[6], EOS, 7, MASK, 8]), (0, 5, [*own[6:12]])]
    cells += [(1, a, text(6, 30 + a)) for a in (0, 3, 6, 7)]
    cells += [(1, 2, [EOS, MASK, MASK, EOS, 1, 2]), (1, 5, text(2, 3))]
    return lessons, cells


@pytest.mark.parametrize("kept", [False, True], ids=["recompute", "keep"])
def test_the_awkward_places(target, kept):
    lessons, cells = awkward()
    if kept:
        keep(target, lessons)
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 6))) < EXACT


LIMITS = {torch.float32: 10 * 2.1e-7 / 0.6, torch.float64: 10 * 1.7e-16 / 0.6}  # of the largest logit


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_alone_is_left(family, dtype):
    kind, changes = FAMILIES[family]
    torch.manual_seed(0)
    model = tiny_model(kind, **changes)
    for weight in model.parameters():
        weight.data.mul_(0.2 if weight.dim() > 1 else 1)
    target = load_target(model.to(dtype))
    lessons, cells = awkward()
    blocks = blocks_of(cells, 6)
    again = scored_rows(target, lessons, blocks)
    assert worst(target, lessons, cells, again) < LIMITS[dtype]
    keep(target, lessons)
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks)) < LIMITS[dtype]


@pytest.mark.parametrize("kept", [False, True], ids=["recompute", "keep"])
def test_the_order_of_branches_does_not_matter(target, kept):
    lessons, cells = awkward()
    if kept:
        keep(target, lessons)
    order = torch.randperm(len(cells), generator=torch.Generator().manual_seed(0))
    straight = scored_rows(target, lessons, blocks_of(cells, 6))
    mixed = scored_rows(target, lessons, blocks_of([cells[i] for i in order], 6), 60)
    assert torch.allclose(mixed, straight[order], atol=1e-10)


def test_a_batch_without_branches_feeds_no_branch_and_with_states_nothing(target, monkeypatch):
    lessons, _ = awkward()
    own = lessons[0].trunk.tokens
    cells = [(0, 3, list(own[4:8])), (0, 7, [1]), (1, 2, [])]
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 4))) < EXACT
    keep(target, lessons)
    monkeypatch.setattr(target, "_forward", None)
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 4))) < EXACT


# ------------------------------------------------------------------------------------------------ how it is packed


def packed_pair(target, aligned: bool = False):
    """Two trunks in one row and a third in another, branches on all; the tokens of the trunks."""
    trunks = [torch.tensor(text(n, n)) for n in (11, 6, 9)]
    on = torch.tensor([0, 1, 0, 2, 1, 0])
    fork = torch.tensor([3, 5, 10, 0, 2, 3])
    tokens = torch.tensor(text(24, 5)).view(6, 4)
    packed = pack_branches(trunks, [0, 0, 1], on, fork, tokens, torch.tensor([4, 2, 3, 4, 4, 1]), aligned=aligned)
    return packed, trunks, on, fork, tokens


@quick
@given(data=st.data())
def test_nothing_leaks_within_a_row(target, data):
    """A changed token changes the slots below it and no bit of any other, in a row of several trunks."""
    packed, *_ = packed_pair(target)
    tree = packed.tree
    row = data.draw(st.integers(0, 1))
    slot = data.draw(st.integers(0, tree.tokens.shape[1] - 1))
    tokens = tree.tokens.clone()
    tokens[row, slot] = (tokens[row, slot] + 1) % VOCAB
    before = target.score(tree).hidden
    after = target.score(dataclasses.replace(tree, tokens=tokens)).hidden
    below = torch.zeros_like(tree.tokens, dtype=torch.bool)
    below[row] = tree.dense_mask()[row, 0, :, slot]
    changed = (before != after).any(-1)
    assert bool(torch.isfinite(before).all())
    assert not bool((changed & ~below).any())
    assert bool(changed[row, slot])


@quick
@given(data=st.data())
def test_nothing_leaks_from_kept_trunks(target, data):
    """Nor does a change of what was kept: other trunks, and the own one behind the fork."""
    packed, trunks, on, fork, _ = packed_pair(target, aligned=True)
    lessons = [lesson_of(one.tolist()) for one in trunks]
    keep(target, lessons)
    states = [one.state for one in lessons]
    branch = data.draw(st.integers(0, 5))
    slots = packed.slot[branch][packed.slot[branch] >= 0]
    read = (packed.row[on[branch]].expand_as(slots), slots)
    before = target.resume(packed, states, read)
    own = int(on[branch])
    place = data.draw(st.sampled_from([(i, t) for i, one in enumerate(trunks) for t in range(len(one))]))
    layers = [(k.clone(), v.clone()) for k, v in states[place[0]].layers]
    for part in layers[data.draw(st.integers(0, 3))]:
        part[:, place[1]] += 1
    states[place[0]] = dataclasses.replace(states[place[0]], layers=tuple(layers))
    changed = bool((target.resume(packed, states, read) != before).any())
    if place[0] != own or place[1] > int(fork[branch]):
        assert not changed
    elif place[1] > int(fork[branch]) - WINDOW + 2:
        assert changed, "what a branch does see must matter"


@quick
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), budget=st.integers(1, 150))
def test_rows_are_shared_within_the_budget(sizes, budget):
    forwards = share_rows(sizes, budget)
    assert sorted(piece for rows in forwards for row in rows for piece in row) == list(range(len(sizes)))
    for rows in forwards:
        wide = max(sum(sizes[piece] for piece in row) for row in rows)
        assert wide == max(sizes[piece] for row in rows for piece in row), "no row is wider than its longest piece"
        assert len(rows) * wide <= budget or len(rows) == 1
    assert share_rows([], budget) == []


def test_short_trunks_share_rows_and_forwards(monkeypatch):
    target = loud("full")
    lessons = [lesson_of(text(n, n), str(n)) for n in (60, 9, 12, 7, 20, 11, 8, 15, 10, 6)]
    cells = [(i, a, text(4, 9 * i + a)) for i, one in enumerate(lessons) for a in range(0, len(one.trunk), 6)]
    trees = []
    score = target.score
    monkeypatch.setattr(target, "score", lambda tree, **more: (trees.append(tree), score(tree, **more))[1])
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 4))) < EXACT
    (tree,) = trees
    assert len(tree.tokens) < len(lessons) / 2
    assert float((tree.trunk < 0).float().mean()) < 0.25, "little padding"
    trees.clear()
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 4), 50)) < EXACT
    assert all(tree.tokens.numel() <= 63 for tree in trees), "the longest trunk with one branch"


@pytest.mark.parametrize("kept", [False, True], ids=["recompute", "keep"])
def test_the_final_norm_sees_only_what_is_read(kept):
    target = loud("mixed")
    lessons, cells = awkward()
    if kept:
        keep(target, lessons)
    seen = []
    handle = target.model.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[:2]))
    found = scored_rows(target, lessons, blocks_of(cells, 6))
    handle.remove()
    rows = int(found.any(-1).sum())
    assert len(seen) == 1
    assert seen[0][0] == 1
    assert seen[0][1] == rows if not kept else 0 < seen[0][1] < rows - len(cells)


def test_models_that_look_at_the_shape_behind_their_layers_are_read_too():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=4, n_positions=64, eos_token_id=EOS,
                        bos_token_id=1, attn_implementation="sdpa")  # fmt: skip
    target = load_target(GPT2LMHeadModel(config).double().eval())
    assert not target._reads_early
    lessons, cells = awkward()
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 6))) < EXACT
    for one in lessons:
        keep_layers(target, one)
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 6))) < EXACT


def keep_layers(target, lesson) -> None:
    ids = torch.tensor([lesson.trunk.tokens])
    held = target.new_cache(ids.shape[1])
    hidden = target.extend(held, ids, torch.arange(ids.shape[1]).unsqueeze(0)).hidden[0]
    lesson.state = held.state(0, hidden, target.version)


@settings(max_examples=60, deadline=None)
@given(plans(), st.booleans())
def test_the_chain_of_ancestors_is_the_mask(plan, together):
    sizes, width, branches = plan
    trunks = [torch.arange(n) for n in sizes]
    row, fork, length = torch.tensor(branches, dtype=torch.int64).reshape(-1, 3).unbind(1)
    tokens = torch.zeros(len(branches), width, dtype=torch.int64)
    rows = [0] * len(sizes) if together else list(range(len(sizes)))
    tree = pack_branches(trunks, rows, row, fork, tokens, length).tree
    chain = tree.ancestors(16)
    for b, slot in ((b, slot) for b in range(len(chain)) for slot in range(chain.shape[1])):
        line = [one for one in chain[b, slot].tolist() if one >= 0]
        assert line[0] == slot
        assert set(line) == set(tree.dense_mask()[b, 0, slot].nonzero().flatten().tolist())
        where = tree.position[b, line].tolist()
        assert where == list(range(where[0], where[0] - len(where), -1))


# ------------------------------------------------------------------------------------------------ wrong masks


@dataclasses.dataclass(frozen=True)
class Leaky(attention.SoftmaxAttention):
    """The right family with one thing wrong."""

    way: str

    def tree_masks(self, tree, first=0):
        return spoilt(self.way, super().tree_masks(tree), tree, first)


def spoilt(way: str, right, tree, first: int):
    masks = right if isinstance(right, dict) else {"": right}
    q = {name: getattr(tree, name)[:, None, :, None] for name in ("trunk", "branch", "position", "fork")}
    k = {name: getattr(tree, name)[:, None, None, :] for name in ("trunk", "branch", "position", "fork")}
    slots = torch.arange(tree.tokens.shape[1])
    earlier = k["position"] <= q["position"]
    same = (q["trunk"] == k["trunk"]) & (q["trunk"] >= 0)
    out = {}
    for name, mask in masks.items():
        if way == "sibling":
            mask = mask | (same & (q["branch"] >= 0) & (k["branch"] >= 0) & earlier)
        elif way == "later trunk":
            mask = mask | (same & (q["branch"] >= 0) & (k["branch"] < 0) & (k["position"] == q["fork"] + 1))
        elif way == "other trunk":
            mask = mask | ((q["trunk"] >= 0) & (k["trunk"] >= 0) & (k["branch"] < 0) & earlier)
        elif way == "window by slot" and name != "full_attention":
            mask = tree.dense_mask() & (slots[:, None] - slots < WINDOW)
        elif way == "window one wider" and name != "full_attention":
            apart = tree.position.unsqueeze(-1) - tree.position.unsqueeze(-2)
            mask = tree.dense_mask() & (apart <= WINDOW).unsqueeze(1)
        elif way == "no window" and name != "full_attention":
            mask = tree.dense_mask()
        out[name] = mask[:, :, first:]
    return out if isinstance(right, dict) else out[""]


WAYS = [(way, family) for way in ("sibling", "later trunk", "other trunk") for family in FAMILIES] + [
    (way, family) for way in ("window by slot", "window one wider", "no window") for family in WINDOWED
]


@pytest.mark.parametrize("kept", [False, True], ids=["recompute", "keep"])
@pytest.mark.parametrize(("way", "family"), WAYS)
def test_a_leaking_mask_is_noticed(monkeypatch, way, family, kept):
    target = loud(family)
    # the two short trunks share a row as wide as the long one
    lessons = [lesson_of(text(24, 1)), lesson_of(text(9, 2), "b"), lesson_of(text(8, 3), "c")]
    cells = [(i, a, text(4, 7 * i + a)) for i in range(3) for a in (2, 6)]
    cells.append((0, 6, text(4, 77)))
    if kept:
        keep(target, lessons)
    right = scored_rows(target, lessons, blocks_of(cells, 4))
    assert worst(target, lessons, cells, right) < EXACT
    monkeypatch.setattr(target, "family", Leaky(target.family.config, target.family.kinds, way))
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 4))) > 1e-4


# ------------------------------------------------------------------------------------------------ trunk states


@pytest.mark.parametrize("family", ["full", "mixed"])
@quick
@given(part=st.floats(0, 1.3), batch=batches())
def test_a_store_keeps_states_within_its_budget_and_the_rows_stay_the_same(family, part, batch):
    target = loud(family)
    lessons, drafted, cells, budget = batch
    lessons = [Lesson(one.trunk) for one in lessons]
    blocks = blocks_of(cells, drafted)
    want = scored_rows(target, lessons, blocks)
    a_token = 8 * (4 * 2 * 2 * target.config.head_dim + 48)
    a_text = 8 * 48 * 2
    whole = sum(a_token * len(one.trunk) + a_text * (len(one.trunk) - 1) for one in lessons)
    store = FeatureStore(target, (0, 2), part * whole, keep_state=True)
    for _ in range(3):
        store.fill(lessons, 40)
        states = [one.state.nbytes for one in lessons if one.state is not None]
        assert sum(states) <= store.budget
        assert torch.allclose(scored_rows(target, lessons, blocks, budget), want, atol=1e-9)
        store.release(lessons)
        assert sum(one.nbytes for one in lessons) <= store.budget
    if part >= 1:
        assert all(one.state is not None for one in lessons)
        assert sum(one.nbytes for one in lessons) == whole
        assert store.left_out == 0
    if part == 0:
        assert not any(one.state for one in lessons)
        assert store.left_out == 3 * len(lessons)


def test_features_stay_before_states_do():
    target = loud("full")
    one, two = lesson_of(text(20, 1)), lesson_of(text(20, 2), "b")
    probe = FeatureStore(target, (0, 2), 1e9, keep_state=True)
    probe.fill([one])
    whole, rows = one.nbytes, one.features.nbytes + one.hidden.nbytes
    one.forget()
    store = FeatureStore(target, (0, 2), whole + rows, keep_state=True)
    for lesson in (one, two):
        store.fill([lesson])
        store.release([lesson])
    assert one.state is not None
    assert two.state is None
    assert two.features is not None


def test_states_of_other_weights_do_not_count():
    target = load_target(tiny_model("qwen3").double())
    lessons, cells = awkward()
    store = FeatureStore(target, (0, 2), 1e9, keep_state=True)
    store.fill(lessons)
    old = lessons[0].state
    assert isinstance(old, TrunkState)
    with torch.no_grad():
        target.model.model.layers[1].self_attn.v_proj.weight.mul_(1.5)
    target.touch()
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 6))) < EXACT
    store.fill(lessons)
    assert lessons[0].state.version == target.version != old.version
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks_of(cells, 6))) < EXACT


def test_without_keep_state_nothing_changes():
    target = loud("full")
    one = lesson_of(text(20, 1))
    store = FeatureStore(target, (0, 2), 1e9)
    store.fill([one])
    assert one.state is None
    kept = Lesson(one.trunk)
    keep(target, [kept])
    assert torch.allclose(kept.features, one.features, atol=1e-10)
    assert torch.allclose(kept.hidden, one.hidden, atol=1e-10)
    assert kept.hidden.shape == one.hidden.shape


# ------------------------------------------------------------------------------------------------ windows elsewhere


@pytest.mark.parametrize("family", WINDOWED)
def test_texts_longer_than_the_window_decode_as_the_model_itself_does(family):
    target = loud(family)
    assert target.context_limit == 256
    prompt = text(9, 4)
    want = list(prompt)
    for _ in range(14):
        want.append(int(plain(target, want)[-1].argmax()))
        if want[-1] in target.eos_ids:
            break
    for drafter in (None, for_decoding(tiny_drafter(target).double(), target)):
        asked = [Request(tuple(prompt), 0), Request(tuple(text(4, 8)), 1)]
        made = decode(target, drafter, asked, Options(14, batch_size=2))
        assert list(made[0].tokens) == want[9:]


@pytest.mark.parametrize("family", WINDOWED)
def test_the_configuration_is_as_it_was(family):
    assert loud(family).config.sliding_window == WINDOW


def test_layers_with_rotations_of_their_own():
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=64, eos_token_id=EOS, pad_token_id=0,
        sliding_window=4, layer_types=["sliding_attention", "full_attention"] * 2, attn_implementation="sdpa",
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.3)
    target = load_target(model.double())
    lessons, cells = awkward()
    blocks = blocks_of(cells, 6)
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks)) < 1e-5  # it rotates in float32
    for one in lessons:
        keep_layers(target, one)
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks)) < 1e-5


def test_a_window_that_a_model_counts_otherwise_is_refused(monkeypatch):
    """If our rule were off by one, loading would say so, however long the real window is."""
    family = attention.SoftmaxAttention
    right = family._by_kind
    monkeypatch.setattr(family, "_by_kind", lambda self, seen, query, key: right(self, seen, query - 1, key))
    for kind, changes in (("mistral", {"sliding_window": 100}), ("qwen3", {**MIXED, "sliding_window": 100})):
        with pytest.raises(Exception, match="tree mask or readout does not agree"):
            load_target(tiny_model(kind, **changes))


@pytest.mark.smollm2
def test_on_the_embedded_target():
    target = load_target("smollm2", dtype="float32")
    lessons = [lesson_of([i * 37 % 4000 + 20 for i in range(n)], str(n)) for n in (40, 22)]
    cells = [(i, a, [(a * 91 + j * 57) % 3000 for j in range(7)]) for i, one in enumerate(lessons)
             for a in (0, 12, len(one.trunk) - 1)]  # fmt: skip
    blocks = blocks_of(cells, 7)
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks)) < 1e-4
    keep(target, lessons)
    assert worst(target, lessons, cells, scored_rows(target, lessons, blocks)) < 1e-4
