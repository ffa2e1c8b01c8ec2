"""DSpark: packed = cached = the definition; no token is seen too early; the engines and the rules stay lossless."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from draftloop.core.errors import InputError
from draftloop.core.law import Law, Sampling
from draftloop.decode.graph import GraphEngine
from draftloop.decode.loop import decode
from draftloop.decode.trace import Generation, Options
from draftloop.drafter import dspark
from draftloop.drafter.build import for_decoding
from draftloop.drafter.dspark import MarkovDraft
from draftloop.evaluate.walk import responses_of, walk
from draftloop.supervise.drafting import packed_draft
from draftloop.supervise.lesson import FeatureStore, Lesson
from tests.dspark_tiny import HEADS, dspark_shape, tiny_dspark
from tests.lessons import greedy_trunks, prompts
from tests.packed import gap
from tests.stand_ins import EOS, WAYS, requests_of, with_eos
from tests.test_decode_graph import Counting, Watching, agree
from tests.tiny import VOCAB, tiny_drafter, tiny_target

pytestmark = pytest.mark.families
CLOSE = 1e-5


@pytest.fixture(scope="module")
def owner():
    return tiny_target()


def texts(drafter, lengths, seed=5):
    draw = torch.Generator().manual_seed(seed)
    width = len(drafter.spec.target_layers) * drafter.spec.hidden_size
    features = torch.randn(len(lengths), max(lengths), width, generator=draw).to(drafter.fc.weight.dtype)
    tokens = torch.randint(0, VOCAB, (len(lengths), max(lengths) + 1), generator=draw)
    drafts = torch.randint(0, VOCAB, (len(lengths), 4, drafter.spec.drafted), generator=draw)
    return features, tokens, drafts


def argmax(drafter):
    def choose(rows, slots):
        law = Law(rows.flatten(0, -2), drafter.readout, Sampling())
        tokens, scores = law.draw(rows.new_empty(len(law.hidden)))
        return tokens.view(rows.shape[:-1]), scores.view(rows.shape[:-1])

    return choose


ANCHORS = torch.tensor([[3, 8, 3, 0], [1, 7, 5, 7]])


@torch.no_grad()
def worst(drafter) -> float:
    """The largest gap between many anchors at once and each alone from a cache: told its tokens, and drawing them."""
    features, tokens, drafts = texts(drafter, [9, 8])
    packed = drafter.pack(features, ANCHORS, tokens)
    forced, (drawn, _, rows) = packed.forced(drafts), packed.drawn(argmax(drafter))
    out = 0.0
    for i, line in enumerate(ANCHORS.tolist()):
        for j, a in enumerate(line):
            cache = drafter.new_cache(max(a, 1))
            drafter.extend(cache, features[i : i + 1, : max(a, 1)], torch.arange(max(a, 1)).unsqueeze(0))
            alone = drafter.draft(cache, torch.tensor([a]), tokens[i : i + 1, a])
            mine, _, own = alone.drawn(argmax(drafter))
            assert torch.equal(mine[0], drawn[i, j])
            stepped = torch.stack(
                [alone.step(k, drafts[i : i + 1, j, k - 1] if k else None) for k in range(drafter.spec.drafted)], 1
            )
            for got, want in ((forced[i, j], stepped[0]), (rows[i, j], own[0])):
                out = max(out, gap(drafter.readout.logits(got), drafter.readout.logits(want)))
            sure = drafter.confidence(stepped, tokens[i : i + 1, a], drafts[i : i + 1, j])
            out = max(out, gap(drafter.confidence(forced, tokens.gather(1, ANCHORS), drafts)[i, j], sure[0]))
    return out


@pytest.mark.parametrize("markov", HEADS)
def test_packed_is_sequential(owner, markov):
    drafter = tiny_dspark(owner, markov)
    assert drafter.spec.drafted == drafter.spec.block_size == 4
    assert worst(drafter) < CLOSE


@pytest.mark.parametrize("way", ["the token itself", "always the anchor", "a state that goes on", "slot 0 left out"])
def test_a_wrong_variant_is_noticed(owner, monkeypatch, way):
    drafter = tiny_dspark(owner, "rnn" if way == "a state that goes on" else "vanilla")
    if way == "the token itself":
        monkeypatch.setattr(dspark, "tokens_before", lambda anchor, tokens: tokens)
    elif way == "always the anchor":
        monkeypatch.setattr(dspark, "tokens_before", lambda a, t: a.unsqueeze(-1).expand_as(t))
    elif way == "a state that goes on":
        honest = MarkovDraft.step

        def step(self, slot, previous):
            if previous is None and self._state is not None:
                return self._head(self._hidden[..., slot, :], self._anchor, self._state)[0]
            return honest(self, slot, previous)

        monkeypatch.setattr(MarkovDraft, "step", step)
    else:
        inner = type(drafter).forward
        monkeypatch.setattr(type(drafter), "forward", lambda self, f, a, t: inner(self, f, a, t).roll(1, 2))
    with pytest.raises(AssertionError):
        assert worst(drafter) < 1e-3


@pytest.mark.parametrize("markov", HEADS)
def test_it_is_dspark_as_defined(owner, markov):
    """The heads written out slot by slot in float64, over the hidden rows of the backbone."""
    drafter = tiny_dspark(owner, markov)
    features, tokens, drafts = texts(drafter, [7])
    anchor = torch.tensor([[6]])
    hidden = drafter(features, anchor, tokens[:, 6:7])[0, 0].double()
    w = {name: value.detach().double() for name, value in drafter.state_dict().items()}
    before = [int(tokens[0, 6]), *drafts[0, 0, :-1].tolist()]
    state = torch.zeros(drafter.spec.markov_rank).double()
    logits, sure = [], []
    for h, token in zip(hidden, before, strict=True):
        bias, e = torch.zeros(VOCAB).double(), torch.zeros(0).double()
        if markov != "none":
            e = w["markov_head.markov_w1.weight"][token]
            w2 = w["markov_head.markov_w2.weight"]
        if markov == "vanilla":
            bias = w2 @ e
        if markov == "gated":
            gate = w["markov_head.gate_proj.weight"] @ torch.cat([h, e]) + w["markov_head.gate_proj.bias"]
            bias = w2 @ (torch.sigmoid(gate) * e)
        if markov == "rnn":
            z = w["markov_head.joint_proj.weight"] @ torch.cat([state, e, h]) + w["markov_head.joint_proj.bias"]
            g, c, o = z.chunk(3)
            state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
            bias = w2 @ torch.tanh(o)
        logits.append(owner.readout.weight.double() @ h + bias)
        sure.append(w["confidence_head.proj.weight"][0] @ torch.cat([h, e]) + w["confidence_head.proj.bias"][0])
    rows = drafter.pack(features, anchor, tokens).forced(drafts[:, :1])
    assert gap(drafter.readout.logits(rows)[0, 0].double(), torch.stack(logits)) < CLOSE
    assert gap(drafter.confidence(rows, tokens[:, 6:7], drafts[:, :1])[0, 0].double(), torch.stack(sure)) < CLOSE


def test_the_backbone_is_dflashs_with_the_anchors_slot_kept(owner):
    plain, drafter = tiny_drafter(owner), tiny_dspark(owner)
    drafter.load_state_dict(plain.state_dict(), strict=False)
    features, tokens, _ = texts(drafter, [9, 8])
    given = tokens.gather(1, ANCHORS)
    assert torch.equal(drafter(features, ANCHORS, given)[:, :, 1:], plain(features, ANCHORS, given))


@pytest.mark.parametrize("markov", HEADS)
def test_no_token_is_seen_too_early(owner, markov):
    """Draft k changes rows and confidences behind it and none up to it."""
    drafter = tiny_dspark(owner, markov)
    features, tokens, drafts = texts(drafter, [9, 8])
    draft, given = drafter.pack(features, ANCHORS, tokens), tokens.gather(1, ANCHORS)
    rows = draft.forced(drafts)
    sure = drafter.confidence(rows, given, drafts)
    for k in range(drafter.spec.drafted):
        other = drafts.clone()
        other[..., k] = (other[..., k] + 1) % VOCAB
        changed = draft.forced(other)
        told = drafter.confidence(changed, given, other)
        assert torch.equal(changed[..., : k + 1, :], rows[..., : k + 1, :])
        assert torch.equal(told[..., : k + 1], sure[..., : k + 1])
        if k + 1 < drafter.spec.drafted and markov != "none":
            assert (changed[..., k + 1, :] != rows[..., k + 1, :]).any()
            assert (told[..., k + 1] != sure[..., k + 1]).all()


@pytest.mark.parametrize("markov", ["gated", "rnn"])
def test_real_cells_of_a_grid_are_those_of_the_grid(owner, markov):
    drafter = tiny_dspark(owner, markov)
    features, tokens, drafts = texts(drafter, [9, 8])
    cells = torch.tensor([0, 0, 1]), torch.tensor([0, 2, 1])
    whole = drafter.pack(features, ANCHORS, tokens).forced(drafts)
    for precision in (torch.float32, torch.bfloat16):
        some = packed_draft(drafter, features, ANCHORS, tokens, cells, precision)
        told = some.forced(drafts[cells])
        rows = torch.stack([some.step(k, drafts[cells][:, k - 1] if k else None) for k in range(4)], 1)
        assert gap(told.float(), rows.float()) < (1e-6 if precision == torch.float32 else 2e-2)
        assert gap(told.float(), whole[cells]) < (1e-6 if precision == torch.float32 else 1e-1)


@pytest.mark.parametrize("markov", HEADS)
def test_gradients_reach_every_parameter(owner, markov):
    drafter = tiny_dspark(owner, markov)
    features, tokens, drafts = texts(drafter, [9, 8])
    rows = drafter.pack(features, ANCHORS, tokens).forced(drafts)
    sure = drafter.confidence(rows, tokens.gather(1, ANCHORS), drafts)
    (drafter.readout.logits(rows).log_softmax(-1)[..., 7].mean() + sure.sigmoid().mean()).backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 1e-8, name


# decoding ------------------------------------------------------------------------------------------------------------
LEVELS = (None, 0.2)


@pytest.mark.parametrize("confidence", LEVELS)
@pytest.mark.parametrize("way", ["greedy", "filtered ratio", "match"])
@pytest.mark.parametrize("markov", ["vanilla", "rnn"])
def test_both_engines_decode_alike_and_match_plain_decoding(markov, way, confidence):
    target = with_eos(tiny_target(), *EOS)
    drafter = for_decoding(tiny_dspark(target, markov), target)
    asked = requests_of([1, 2, 5, 8, 8, 14, 23], target.vocab_size, seed=4)
    options = Options(max_new_tokens=12, seed=9, batch_size=3, record=True, confidence=confidence, **WAYS[way])
    eager = decode(target, drafter, asked, replace(options, engine="eager"))
    graph = decode(target, drafter, asked, replace(options, engine="graph"))
    steps = [step for made in eager for step in made.steps]
    if confidence is not None:
        assert {len(step.proposed) for step in steps} >= {0, 1, 2, 4}
        assert all(step.accepted <= len(step.proposed) == len(step.log_q) for step in steps)
        for made in (*eager, *graph):  # what stands behind the verified tokens is void
            for step, rows in zip(made.steps, made.verified if made.steps else (), strict=True):
                rows[len(step.proposed) + 1 :] = 0
    agree(eager, graph)
    if way != "filtered ratio":
        plain = decode(target, None, asked, options)
        assert [made.tokens for made in eager] == [made.tokens for made in plain]


def test_a_rows_text_does_not_depend_on_its_batch():
    target = with_eos(tiny_target(), *EOS)
    drafter = for_decoding(tiny_dspark(target), target)
    asked = requests_of([2, 5, 9, 12], target.vocab_size, seed=4)
    options = Options(12, Sampling(1.0), "ratio", seed=3, confidence=0.3)
    one, all_ = (decode(target, drafter, asked, replace(options, batch_size=n)) for n in (1, 4))
    assert [(made.tokens, [len(s.proposed) for s in made.steps]) for made in one] == [
        (made.tokens, [len(s.proposed) for s in made.steps]) for made in all_
    ]


@pytest.mark.parametrize("confidence", [None, 0.5, 0.15])
def test_a_walk_takes_the_steps_of_real_decoding(owner, confidence):
    target = with_eos(owner)
    trunks = greedy_trunks(target, prompts(3, 9, 5), 18)
    drafter = for_decoding(tiny_dspark(target), target)
    store = FeatureStore(target, drafter.spec.target_layers, 1e9)
    walked = walk(drafter, [Lesson(trunk) for trunk in trunks], store, confidence=confidence)
    requests = [replace(requests_of([1], VOCAB)[0], ids=trunk.prompt) for trunk in trunks]
    made = decode(target, drafter, requests, Options(18, confidence=confidence))
    names = [(f"{trunk.id}#0", trunk.set) for trunk in trunks]
    assert [replace(one, lengths=one.lengths or None) for one in walked] == responses_of(made, names, 4)


def test_confidence_without_a_head_is_refused(owner):
    for drafter in (tiny_drafter(owner), tiny_dspark(owner, confidence=False)):
        with pytest.raises(InputError, match="the drafter has no confidence head"):
            decode(owner, drafter, requests_of([3], VOCAB), Options(4, confidence=0.5))
    with pytest.raises(InputError, match=r"not in \(0, 1\]"):
        Options(4, confidence=0.0)


def test_a_head_and_its_rank_must_agree(owner):
    shape = dspark_shape(owner)
    with pytest.raises(InputError, match="has no rank 0"):
        replace(shape, markov_rank=0)
    with pytest.raises(InputError, match="Markov head none has no rank 6"):
        replace(shape, markov="none")


@pytest.mark.parametrize("markov", HEADS)
@pytest.mark.parametrize("way", ["greedy", "match", "ratio"])
def test_a_round_asks_the_device_for_nothing(markov, way):
    target = with_eos(tiny_target(), *EOS)
    options = Options(8, record=True, confidence=0.3, **WAYS[way])
    engine = GraphEngine(target, for_decoding(tiny_dspark(target, markov), target), options, rows=3, longest=40)
    engine.turn()
    engine.rows.at.zero_()
    with Watching() as watching:
        engine.turn()
    assert watching.seen == []


def test_a_compiled_round_drafts_the_same():
    target = with_eos(tiny_target(), *EOS)
    drafter = for_decoding(tiny_dspark(target, "gated"), target)
    asked = requests_of([1, 5, 8, 14], target.vocab_size, seed=4)
    options = Options(8, Sampling(1.0), "ratio", batch_size=4, confidence=0.3)
    compiler = partial(torch.compile, dynamic=False, backend=Counting())
    engine = GraphEngine(target, drafter, options, rows=4, longest=40, compiler=compiler)
    made = [Generation(request.ids) for request in asked]
    list(engine.decode(asked, made))
    agree(decode(target, drafter, asked, options), made)
