"""Verifying fewer drafts than were made: exactly lossless while the length looks at earlier tokens, and only then."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from draftloop.core.draws import Purpose
from draftloop.core.errors import DraftloopError
from draftloop.core.law import Law, Readout, Sampling
from draftloop.decode import loop, rules
from draftloop.decode.rules import Coins, Proposal, leading, trusted, verify
from draftloop.decode.trace import Options
from draftloop.drafter.dspark import tokens_before
from draftloop.evaluate.tau import Acceptance, Response, acceptance
from tests import test_decode_lossless as lossless
from tests.stand_ins import ToyDrafter
from tests.test_decode_lossless import law_of, target_law
from tests.toy import Method, Toy, committed_law

pytestmark = pytest.mark.families
TARGET, DRAFT, ACCEPT, RESIDUAL = Purpose.TARGET, Purpose.DRAFT, Purpose.ACCEPT, Purpose.RESIDUAL


@pytest.fixture
def whole(monkeypatch):
    monkeypatch.setattr(rules._ratio, "__defaults__", (1 << 14,))
    monkeypatch.setattr(Law.draw, "__defaults__", (1 << 16,))


# the rule, enumerated -------------------------------------------------------------------------------------------------
def shortened(how):
    """A proposal of which slot k is verified while `how(proposal)[:, :k + 1]` holds."""

    def spoil(proposal: Proposal) -> Proposal:
        return dataclasses.replace(proposal, lengths=leading(how(proposal)))

    return spoil


def by_tokens_before(proposal):
    before = torch.cat([torch.ones_like(proposal.tokens[:, :1]), proposal.tokens[:, :-1]], 1)
    return before != 2


def by_rows(proposal):
    b, k = proposal.tokens.shape
    return (proposal.law.log_probs().exp().amax(-1) < 0.6).view(b, k)


def never(proposal):
    return torch.zeros_like(proposal.tokens, dtype=torch.bool)


def by_the_token_itself(proposal):
    return proposal.tokens != 2


def by_its_own_chance(proposal):
    return proposal.log_q > -1.0


def bonus_of_the_last_slot(rule, proposal, target, coins):
    """The bonus is always drawn from the row behind the last draft, as where all are verified."""
    b, k = proposal.tokens.shape
    verdict = verify(rule, proposal, target, coins)
    last = target.rows(torch.arange(b) * (k + 1) + k).draw(coins.target[:, -1].contiguous())[0]
    return dataclasses.replace(verdict, token=torch.where(verdict.accepted == proposal.lengths, last, verdict.token))


def residual_for_the_bonus(rule, proposal, target, coins):
    """Where the verified drafts end, the token comes from the residual, as if the next draft had been refused."""
    cut = rules.Coins(coins.target, torch.where(proposal.among(), coins.accept, 1.0), coins.residual)
    return verify(rule, dataclasses.replace(proposal, lengths=None), target, cut)


TOYS = [
    Toy(3, 2, [(1, 1, 2), (0, 1, 3), (2, 2, 0)], [(1, 1, 2), (2, 2, 0)], own_prefix=own, seed=seed)
    for own, seed in ((False, 0), (True, 1), (True, 2))
]


@pytest.mark.parametrize("rule", ["match", "ratio"])
@pytest.mark.parametrize("how", [by_tokens_before, by_rows, never], ids=lambda f: f.__name__)
def test_a_length_that_looks_at_earlier_tokens_leaves_the_law_exactly_as_it_is(whole, rule, how):
    for toy in TOYS:
        assert committed_law(toy, Method("short", rule, spoil=shortened(how)), 3) == toy.text_law(3)


@pytest.mark.parametrize("how", [by_the_token_itself, by_its_own_chance], ids=lambda f: f.__name__)
def test_a_length_that_peeks_at_the_token_itself_changes_the_law(whole, how):
    for toy in TOYS:
        law = committed_law(toy, Method("peeking", "ratio", spoil=shortened(how)), 3)
        want = toy.text_law(3)
        assert max(abs(law.get(text, 0) - want.get(text, 0)) for text in {*law, *want}) > 1e-2


@pytest.mark.parametrize("broken", [bonus_of_the_last_slot, residual_for_the_bonus], ids=lambda f: f.__name__)
def test_a_bonus_from_the_wrong_law_is_noticed(whole, broken):
    method = Method("wrong bonus", "ratio", broken, spoil=shortened(by_tokens_before))
    assert sum(committed_law(toy, method, 3) != toy.text_law(3) for toy in TOYS) >= 2


# the loop, enumerated -------------------------------------------------------------------------------------------------
class Confident(ToyDrafter):
    """Sure of a slot unless the token before it is 2 (or, peeking, its own token is)."""

    peeks = False

    def __init__(self, toy):
        super().__init__(toy)
        self.spec = SimpleNamespace(target_layers=(0,), drafted=toy.drafted, confidence=True)

    def confidence(self, rows, anchor, tokens):
        read = tokens if self.peeks else tokens_before(anchor, tokens)
        return torch.where(read == 2, -9.0, 9.0)


class Peeking(Confident):
    peeks = True


AXES = [
    (4, [(TARGET, 0, 1)]),
    (4, [(DRAFT, 1, 2)]),
    (4, [(DRAFT, 1, 3)]),
    (2, [(ACCEPT, 1, 2)]),
    (2, [(ACCEPT, 1, 3)]),
    (4, [(RESIDUAL, 1, 2), (TARGET, 0, 2)]),
    (4, [(RESIDUAL, 1, 3), (TARGET, 0, 3), (RESIDUAL, 2, 3)]),
    (4, [(DRAFT, 2, 3)]),
    (2, [(ACCEPT, 2, 3)]),
]


@pytest.mark.parametrize(("drafter", "sound"), [(Confident, True), (Peeking, False)])
@pytest.mark.parametrize("batch_size", [1 << 16, 700])
def test_the_loop_is_lossless_with_confidence_and_biased_by_peeking(whole, monkeypatch, drafter, sound, batch_size):
    """One batch, where every row is fed the widest one's drafts, and many of other widths."""
    if batch_size == 700 and not sound:
        pytest.skip("once is enough")
    toy = Toy(vocab=3, drafted=2, p_weights=[(1, 1, 2), (2, 2, 0)], q_weights=[(1, 1, 2)], seed=1)
    monkeypatch.setattr(lossless, "ToyDrafter", drafter)
    monkeypatch.setattr(lossless, "Options", partial(Options, confidence=0.5))
    made = lossless.enumerate_loop(monkeypatch, toy, AXES, "ratio", batch_size=batch_size)
    assert {len(step.proposed) for one in made for step in one.steps} == {0, 1, 2}
    if sound:
        assert law_of(made) == target_law(toy)
    else:
        law, want = law_of(made), target_law(toy)
        assert max(abs(law.get(text, 0) - want.get(text, 0)) for text in {*law, *want}) > 1e-2


def test_the_target_is_fed_the_widest_rows_drafts_and_no_more(monkeypatch):
    toy = Toy(vocab=3, drafted=2, p_weights=[(1, 1, 2)], q_weights=[(1, 1, 2)])
    widths = []
    honest = loop._Batch._fit
    monkeypatch.setattr(
        loop._Batch, "_fit", lambda self, p: (widths.append(self.rows), q := honest(self, p), widths.append(q))[1]
    )
    monkeypatch.setattr(lossless, "ToyDrafter", Confident)
    monkeypatch.setattr(lossless, "Options", partial(Options, confidence=0.5))
    lossless.enumerate_loop(monkeypatch, toy, AXES[:2], "match", batch_size=2)
    seen = [(one.tokens.shape[1], int(one.lengths.max())) for one in widths[1::2]]
    assert all(width == longest for width, longest in seen)
    assert {width for width, _ in seen} >= {0, 2}


# the rule of thumb, and the verifier beside the plain one -------------------------------------------------------------
def test_trust_ends_where_the_product_of_confidences_falls_below_the_threshold():
    logit = torch.logit(torch.tensor([[0.9, 0.9, 0.9, 0.9], [0.4, 0.99, 0.99, 0.99], [0.99, 0.3, 0.99, 0.99]]).double())
    for threshold, want in ((0.7, [3, 0, 1]), (0.39, [4, 3, 1]), (0.28, [4, 4, 4]), (1.0, [0, 0, 0])):
        assert trusted(logit, threshold).tolist() == want
    changed = logit.clone()
    changed[:, 2:] = -5.0
    assert (trusted(logit, 0.39).clamp(max=2) == trusted(changed, 0.39).clamp(max=2)).all()


@pytest.mark.parametrize("rule", ["match", "ratio"])
def test_narrow_and_wide_proposals_have_the_same_verdict(rule):
    """What stands behind a row's length, there or not, decides nothing."""
    draw = torch.Generator().manual_seed(0)
    b, k, v = 64, 4, 7
    readout, sampling = Readout(torch.eye(v, dtype=torch.float64)), Sampling(1.0)
    q, p = (torch.randn(b, n, v, generator=draw, dtype=torch.float64) for n in (k, k + 1))
    law = Law(q.flatten(0, 1), readout, sampling)
    tokens, log_q = law.draw(torch.rand(b * k, generator=draw, dtype=torch.float64))
    lengths = torch.randint(0, 3, (b,), generator=draw)
    coins = [torch.rand(b, n, generator=draw, dtype=torch.float64) for n in (k + 1, k, k)]
    wide = Proposal(tokens.view(b, k), log_q.view(b, k), law, lengths)
    verdict = verify(rule, wide, Law(p.flatten(0, 1), readout, sampling), Coins(*coins))
    cut = Coins(coins[0][:, :3], coins[1][:, :2], coins[2][:, :2])
    narrow = verify(rule, wide.narrowed(2), Law(p[:, :3].flatten(0, 1), readout, sampling), cut)
    assert torch.equal(narrow.accepted, verdict.accepted)
    assert torch.equal(narrow.token, verdict.token)
    assert (verdict.accepted <= lengths).all()
    assert {0, 1, 2} <= set(verdict.accepted.tolist())
    for row in range(b):  # alone, with exactly its own drafts
        n = int(lengths[row])
        own = Proposal(
            wide.tokens[row : row + 1, :n], wide.log_q[row : row + 1, :n], Law(q[row, :n], readout, sampling)
        )
        alone = Coins(*(c[row : row + 1, : n + (i == 0)] for i, c in enumerate(coins)))
        mine = verify(rule, own, Law(p[row, : n + 1], readout, sampling), alone)
        assert (int(mine.accepted), int(mine.token)) == (int(verdict.accepted[row]), int(verdict.token[row]))


# statistics -----------------------------------------------------------------------------------------------------------
def test_drafts_that_were_not_verified_are_neither_accepted_nor_refused():
    """Four steps of K = 3: all kept; refused at 2; two verified and kept; none verified."""
    one = Response("a", "s", (4, 2, 3, 1), (3, 1, 2, 0), 3, (3, 3, 2, 0))
    assert one.tally.survivors == (3.0, 2.0, 1.0)
    assert one.tally.refusals == (0.0, 1.0, 0.0)
    found = acceptance([one])
    assert found.conditional == (1.0, 2 / 3, 1.0)
    assert (found.tau_pooled, found.verified) == (2.5, 2.0)
    assert found.saved(3) == pytest.approx((3 - 2) / 2.5)  # one fewer a step, two and a half tokens a step
    careless = dataclasses.replace(one, lengths=None)
    assert careless.tally.refusals != one.tally.refusals
    assert Acceptance.from_json(found.to_json()) == found
    old = found.to_json()
    del old["verified"]
    assert Acceptance.from_json(old).saved(3) is None


@pytest.mark.parametrize("lengths", [(3,), (2, 3, 3, 3), (3, 3, 3, 4)])
def test_lengths_that_contradict_the_counts_are_refused(lengths):
    with pytest.raises(DraftloopError, match="than it verified"):
        Response("a", "s", (4, 2, 3, 1), (3, 1, 2, 0), 3, lengths)
