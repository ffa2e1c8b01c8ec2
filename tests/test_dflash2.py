"""DFlash 2: packed = sequential, nothing leaks, candidates are the same everywhere, decoding is lossless."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from draftloop.core.errors import InputError
from draftloop.core.law import Law, Readout, Sampling
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options
from draftloop.drafter.build import for_decoding, new_drafter
from draftloop.drafter.dflash2 import GroupedConv, PathDraft
from draftloop.recipe import DrafterPart
from draftloop.supervise.drafting import packed_draft
from tests.dflash2_tiny import fresh_dflash2, tiny_dflash2
from tests.stand_ins import EOS, WAYS, requests_of, with_eos
from tests.tiny import tiny_spec, tiny_target
from tests.toy import MATCH, RATIO, Method, Toy, committed_law, kept

pytestmark = pytest.mark.families

TARGETS = {"llama": tiny_target(), "qwen3": tiny_target("qwen3")}
ANCHORS = torch.tensor([[1, 4, 11, 17], [2, 3, 16, 9]])


@pytest.fixture(params=["llama", "qwen3"])
def target(request):
    return TARGETS[request.param]


def text_of(target, b: int = 2, length: int = 18):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(6, target.vocab_size, (b, length), generator=generator)
    place = torch.arange(length).expand(b, -1)
    return ids, target.extend(target.new_cache(length), ids, place, (0, 2)).features


# the backbone --------------------------------------------------------------------------------------------------------
def test_a_fresh_one_is_a_plain_dflash(target):
    ids, features = text_of(target)
    plain = new_drafter(tiny_spec(target), target, 3)
    drafter = fresh_dflash2(target, 3)
    drafted = torch.randint(0, target.vocab_size, (2, 4, 3))
    rows = drafter.pack(features, ANCHORS, ids).forced(drafted)
    hidden = plain.pack(features, ANCHORS, ids).rows
    assert torch.equal(rows[..., : target.hidden_size], hidden)
    z, cut = plain.readout.logits(hidden), drafter.readout.logits(rows)
    best = z.topk(5).indices
    assert torch.equal(cut.gather(-1, best), z.gather(-1, best))
    assert int((cut > float("-inf")).sum()) == 2 * 4 * 3 * 5


def sequential(target, drafter, ids, features, row: int, anchor: int, tokens=None):
    """One draft from a cache; `tokens` are forced, or else the argmax is drawn."""
    cache = drafter.new_cache(32)
    place = torch.arange(anchor).unsqueeze(0)
    drafter.extend(cache, features[row : row + 1, :anchor], place)
    draft = drafter.draft(cache, torch.tensor([anchor]), ids[row : row + 1, anchor])
    rows, drawn = [], []
    for k in range(draft.drafted):
        previous = None if not k else (drawn[-1] if tokens is None else tokens[k - 1 : k])
        rows.append(draft.step(k, previous))
        drawn.append(drafter.readout.logits(rows[-1]).argmax(-1))
    return torch.cat(rows), torch.cat(drawn)


def far(a, b) -> float:
    return float(((a - b).abs().max() / b.abs().max()).detach())


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("taps", [1, 2, 3])
def test_packed_equals_sequential(target, window, taps):
    drafter = tiny_dflash2(target, sizes={"sliding_window": window, "conv_kernel_size": taps})
    ids, features = text_of(target)
    draft = drafter.pack(features, ANCHORS, ids)
    tokens = torch.randint(0, target.vocab_size, (2, 4, 3), generator=torch.Generator().manual_seed(1))
    forced = draft.forced(tokens)
    with torch.no_grad():
        drawn, _, rows = draft.drawn(chooser(draft, drafter))
    compared = 0
    for row in range(2):
        for n, anchor in enumerate(ANCHORS[row].tolist()):
            alone, _ = sequential(target, drafter, ids, features, row, anchor, tokens[row, n])
            assert far(forced[row, n], alone) < 1e-5
            if at_the_cut(target, rows[row, n]) < 1e-3:
                continue  # rounding may decide who is a candidate
            alone, path = sequential(target, drafter, ids, features, row, anchor)
            assert torch.equal(drawn[row, n], path)
            assert far(rows[row, n], alone) < 1e-5
            compared += 1
    assert compared >= 6


def at_the_cut(target, rows) -> float:
    """How far the last candidate lies above the first that is none, at its closest."""
    best = target.readout.logits(rows[..., : target.hidden_size]).topk(6).values
    return float((best[..., 4] - best[..., 5]).min())


def chooser(draft, drafter):
    def choose(rows, slots):
        tokens = drafter.readout.logits(rows).argmax(-1)
        return tokens, torch.zeros(tokens.shape)

    return choose


def across_the_edge(self, x, delta, base):
    """The convolution over the whole row, as if blocks had no edges."""
    wide = base.unflatten(-1, (-1, self.width)) + delta.unsqueeze(-1)
    x = x.unflatten(-1, (-1, self.width))
    out = wide[..., 0, :, :] * x
    for tap in range(1, self.taps):
        shifted = torch.nn.functional.pad(x[:, :-tap], (0, 0, 0, 0, tap, 0))
        out = out + wide[..., tap, :, :] * shifted
    return out.flatten(-2)


def previous_slot_later(self, tokens):
    """`forced` that gives slot k the token of slot k itself."""
    return self._rows(self._hidden, self._projected, tokens)


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [(GroupedConv, "_convolve", across_the_edge), (PathDraft, "forced", previous_slot_later)],
)
def test_a_broken_one_is_noticed(monkeypatch, owner, name, broken):
    target = TARGETS["llama"]
    drafter = tiny_dflash2(target)
    ids, features = text_of(target)
    monkeypatch.setattr(owner, name, broken)
    tokens = torch.randint(0, target.vocab_size, (2, 4, 3), generator=torch.Generator().manual_seed(1))
    forced = drafter.pack(features, ANCHORS, ids).forced(tokens)
    alone, _ = sequential(target, drafter, ids, features, 0, 4, tokens[0, 1])
    assert far(forced[0, 1], alone) > 1e-3


def test_a_slot_sees_nothing_that_it_must_not():
    target = TARGETS["llama"]
    drafter = tiny_dflash2(target)
    ids, features = text_of(target)
    tokens = torch.randint(0, target.vocab_size, (2, 4, 3))
    rows = drafter.pack(features, ANCHORS, ids).forced(tokens)
    changed, later = tokens.clone(), features.clone()
    changed[:, :, 2] += 1  # the last token is read by nobody
    changed[:, 1:] = 7  # nor are other blocks' tokens
    later[0, 1:] = 9.0  # the first anchor of row 0 stands at 1
    other = drafter.pack(later, ANCHORS, ids).forced(changed)
    assert torch.equal(rows[0, 0], other[0, 0])
    assert far(rows[0, 1], other[0, 1]) > 1e-3
    changed = tokens.clone()
    changed[:, :, 1] = (changed[:, :, 1] + 1) % target.vocab_size
    other = drafter.pack(features, ANCHORS, ids).forced(changed)
    assert torch.equal(rows[:, :, :2], other[:, :, :2])
    assert far(rows[:, :, 2], other[:, :, 2]) > 1e-3


def test_stepping_and_telling_are_the_same_bits_and_blocks_can_be_picked():
    target = TARGETS["llama"]
    drafter = tiny_dflash2(target)
    ids, features = text_of(target)
    cells = (torch.tensor([0, 1, 1]), torch.tensor([2, 0, 3]))
    for precision in (torch.float32, torch.bfloat16):
        draft = packed_draft(drafter, features, ANCHORS, ids, cells, precision)
        tokens, _, rows = draft.drawn(chooser(draft, drafter))
        assert torch.equal(rows, draft.forced(tokens))
        assert rows.requires_grad
        with torch.no_grad():
            same, _, stepped = draft.drawn(chooser(draft, drafter))
        assert torch.equal(tokens, same)
        assert torch.equal(rows, stepped)
    plain = drafter.pack(features, ANCHORS, ids).forced(torch.zeros(2, 4, 3, dtype=torch.int64))
    picked = packed_draft(drafter, features, ANCHORS, ids, cells, torch.float32)
    assert torch.equal(picked.forced(torch.zeros(3, 3, dtype=torch.int64)), plain[cells])


def test_the_candidates_that_were_drawn_among_go_along_with_the_law():
    target = TARGETS["llama"]
    drafter = tiny_dflash2(target)
    ids, features = text_of(target)
    cells = (torch.tensor([0, 1, 1]), torch.tensor([2, 0, 3]))
    draft = packed_draft(drafter, features, ANCHORS, ids, cells, torch.float32)
    tokens, _, rows = draft.drawn(chooser(draft, drafter))
    law = draft.law(rows, slice(0, 3), drafter.readout, Sampling(1.0))
    assert torch.equal(law.candidates.ids, drafter.readout.shortlist(rows.flatten(0, 1)).ids)
    assert bool((law.candidates.ids == tokens.flatten().unsqueeze(1)).any(1).all())
    mine = torch.tensor([False, True, True])
    part = draft.law(rows[:, 1:2], slice(1, 2), drafter.readout, Sampling(1.0), only=mine)
    assert torch.equal(part.candidates.ids, law.candidates.ids.view(3, 3, -1)[mine][:, 1])
    assert torch.equal(part.hidden, rows[mine][:, 1])


# the law of few candidates -------------------------------------------------------------------------------------------
def few(n: int = 9, hidden: int = 6, vocab: int = 40, rank: int = 3, k: int = 5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(n)
    head = Readout(
        torch.randn(vocab, hidden, generator=generator).to(dtype),
        added=torch.randn(vocab, rank, generator=generator).to(dtype),
        candidates=k,
    )
    return torch.randn(n, hidden + rank, generator=generator).to(dtype), head


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_candidates_are_the_largest_base_logits_and_among_equals_the_lower_ids(dtype):
    rows, head = few(dtype=dtype)
    head = replace(head, weight=(head.weight * 2).round() / 2)  # many equal logits, more in bfloat16
    rows[:, :6] = (rows[:, :6] * 2).round() / 2
    rows[0, :6] = 0  # all equal
    base = replace(head, added=None, candidates=0).logits(rows[:, :6])
    found = head.shortlist(rows)
    full = head.uncut.logits(rows)
    cut = head.logits(rows)
    ties = 0
    for i, line in enumerate(base.tolist()):
        order = sorted(range(40), key=lambda v, line=line: (-line[v], v))
        assert found.ids[i].tolist() == sorted(order[:5])
        ties += line[order[4]] == line[order[5]]
        assert (cut[i] > float("-inf")).nonzero().squeeze(1).tolist() == sorted(order[:5])
    assert ties >= 3
    assert found.ids[0].tolist() == [0, 1, 2, 3, 4]
    assert torch.allclose(
        cut.gather(-1, found.ids), full.gather(-1, found.ids), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5
    )


def test_more_candidates_than_tokens_are_all_of_them():
    rows, head = few()
    assert torch.allclose(replace(head, candidates=99).logits(rows), head.uncut.logits(rows), atol=1e-5)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(0.6, 3, 0.8)])
def test_drawing_on_the_points_is_drawing_from_the_law(sampling):
    rows, head = few(200)
    law = Law(rows, head, sampling)
    uniform = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    tokens, scores = law.draw(uniform, chunk=64)
    log_probs = sampling.log_probs(head.logits(rows))
    assert torch.allclose(law.log_probs().exp(), log_probs.exp(), atol=1e-6)
    assert torch.allclose(scores, log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), atol=1e-5)
    known = Law(rows, head, sampling, head.shortlist(rows))
    again = known.rows(slice(50, 150)).draw(uniform[50:150])
    assert torch.equal(again[0], tokens[50:150])
    assert torch.allclose(known.log_probs(), law.log_probs())


class CutToy(Toy):
    """A toy whose drafter has two candidates a slot by its base law, and triples the odds of token 1 behind the cut."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.odds = [Fraction(3 if v == 1 else 1) for v in range(self.vocab)]
        more = torch.tensor([float(x) for x in self.odds], dtype=torch.float64).log()
        self.q_logits = torch.cat([self.q_logits, more.expand_as(self.q_logits)], -1)
        eye = torch.eye(self.vocab, dtype=torch.float64)
        self.draft_readout = Readout(eye, added=eye, candidates=2)

    def q_law(self, anchor, own, k):
        node, column = self.slot(anchor, own, k)
        cut = kept(self.q[node][column], Sampling(1.0, top_k=2))
        odds = [x * o for x, o in zip(cut, self.odds, strict=True)]
        return kept([x / sum(odds) for x in odds], self.drafting)


def forgets_the_cut(proposal):
    return replace(proposal, law=replace(proposal.law, readout=proposal.law.readout.uncut, candidates=None))


@pytest.mark.parametrize("own_prefix", [False, True])
def test_verification_is_lossless_enumerated(own_prefix):
    toy = CutToy(3, 2, [(1, 1, 2), (0, 1, 3)], [(1, 1, 1), (1, 1, 0)], own_prefix=own_prefix, seed=2)
    for method in (MATCH, RATIO):
        assert committed_law(toy, method, 3) == toy.text_law(3)
    broken = Method("residual of the uncut law", "ratio", spoil=forgets_the_cut)
    law, right = committed_law(toy, broken, 3), toy.text_law(3)
    assert max(abs(law.get(t, Fraction(0)) - right.get(t, Fraction(0))) for t in {*law, *right}) > Fraction(1, 100)


# decoding ------------------------------------------------------------------------------------------------------------
def test_it_decodes_the_targets_text_and_both_engines_agree():
    target = with_eos(TARGETS["llama"], *EOS)
    drafter = for_decoding(tiny_dflash2(target), target)
    asked = requests_of([1, 3, 5, 8, 9, 13], target.vocab_size, seed=4)
    for way in ("greedy", "match", "ratio", "filtered ratio"):
        options = Options(max_new_tokens=10, seed=9, batch_size=4, **WAYS[way])
        eager = decode(target, drafter, asked, replace(options, engine="eager"))
        fixed = decode(target, drafter, asked, replace(options, engine="graph"))
        assert [g.tokens for g in eager] == [g.tokens for g in fixed]
        assert [g.steps for g in map(without_scores, eager)] == [g.steps for g in map(without_scores, fixed)]
        if way in ("greedy", "match"):
            plain = decode(target, None, asked, options)
            assert [g.tokens for g in eager] == [g.tokens for g in plain]


def without_scores(generation):
    return replace(generation, steps=[replace(step, log_q=()) for step in generation.steps])


# the recipe ----------------------------------------------------------------------------------------------------------
def test_its_keys_are_for_it_alone():
    assert DrafterPart(family="dflash2", selector_top_k=8).selector_top_k == 8
    for key in ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size"):
        with pytest.raises(ValueError, match=f"{key} means nothing for family dflash; it is for dflash2"):
            DrafterPart(**{key: 4})


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"conv_group_size": 7}, "groups of 7"),
        ({"conv_kernel_size": 5}, "longer than the block"),
        ({"selector_top_k": 10**6}, "more than the"),
        ({"selector_rank": 0}, "not a size"),
        ({"sliding_window": 3}, "shorter than the block"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes, words):
    with pytest.raises(InputError, match=words):
        fresh_dflash2(TARGETS["llama"], sizes=sizes)
