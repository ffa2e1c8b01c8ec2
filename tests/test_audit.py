"""The lossless audit: no drafter fails it, every broken decoder does, near-ties are counted and nothing else is."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from draftloop.decode import round as one_round
from draftloop.decode.loop import decode
from draftloop.decode.rules import Verdict, verify
from draftloop.decode.trace import Options, Request
from draftloop.evaluate import audit as room
from draftloop.evaluate.audit import GAP, Difference, audit
from draftloop.target.load import load_target
from tests.lessons import DRAFTERS, KINDS, LENGTH, Patchy, plain_hidden, prompts, world
from tests.tiny import tiny_drafter, tiny_model


def asked(here):
    return [(trunk.id, Request(trunk.prompt)) for trunk in here.trunks]


def gaps_of(target, prompt, response):
    """Top-2 differences by the model itself."""
    rows = plain_hidden(target, [*prompt, *response][:-1])[len(prompt) - 1 :]
    top = target.readout.logits(rows).topk(2).values
    return (top[:, 0] - top[:, 1]).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_no_drafter_changes_a_token(kind):
    here, told = world(kind), []
    arms = [(name, here.drafters[name]) for name in DRAFTERS]
    found = audit(
        here.target, arms, asked(here), max_new_tokens=LENGTH, batch_size=2, advance=lambda *a: told.append(a)
    )
    assert told == [(n, 5) for n in range(1, 6)]
    assert found.equal
    tokens = sum(len(trunk) - trunk.first for trunk in here.trunks)
    assert (found.dtype, found.prompts, found.tokens, found.gap) == ("float32", 5, tokens, GAP)
    gaps = [g for t in here.trunks for g in gaps_of(here.target, t.prompt, t.tokens[t.first :])]
    assert len(gaps) == tokens
    assert found.near_ties == sum(gap < GAP for gap in gaps)
    for arm, (name, drafter) in zip(found.arms, arms, strict=True):
        made = decode(here.target, drafter, [request for _, request in asked(here)], Options(LENGTH))
        steps = [step for one in made for step in one.steps]
        assert (arm.name, arm.equal, arm.first_difference, arm.at_ties) == (name, True, None, 0)
        assert (arm.tokens, arm.steps) == (tokens, len(steps))
        # a step commits the drafts it accepted (as far as they were not cut off) and at most one token more
        ended = sum(step.committed <= step.accepted for step in steps)
        assert arm.accepted == tokens - len(made) - (len(steps) - ended)
    assert asdict(found)["arms"][0]["name"] == "untrained"


def too_many(rule, proposal, target, coins):
    """One draft more than was right is accepted."""
    right = verify(rule, proposal, target, coins)
    return Verdict((right.accepted + 1).clamp(max=proposal.tokens.shape[1]), right.token)


def never_corrects(rule, proposal, target, coins):
    """The first draft is always accepted."""
    right = verify(rule, proposal, target, coins)
    return Verdict(right.accepted.clamp(min=min(1, proposal.tokens.shape[1])), right.token)


def other_correction(rule, proposal, target, coins):
    """Correction or bonus is the next token id."""
    right = verify(rule, proposal, target, coins)
    return Verdict(right.accepted, (right.token + int(proposal.tokens.shape[1] > 0)) % 61)


@pytest.mark.parametrize("broken", [too_many, never_corrects, other_correction])
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_verifier_is_caught(kind, broken, monkeypatch):
    here = world(kind)
    wanted = [list(trunk.tokens[trunk.first :]) for trunk in here.trunks]
    monkeypatch.setattr(one_round, "verify", broken)
    got = decode(here.target, here.drafters["half"], [request for _, request in asked(here)], Options(LENGTH))
    found = audit(here.target, [("half", here.drafters["half"])], asked(here), max_new_tokens=LENGTH)
    (arm,) = found.arms
    assert not found.equal
    assert not arm.equal
    parted = [i for i, (a, b) in enumerate(zip(wanted, got, strict=True)) if a != b.tokens]
    assert parted
    at, said = parted[0], got[parted[0]].tokens
    place = next(i for i, (a, b) in enumerate(zip(wanted[at], said, strict=False)) if a != b)
    row = plain_hidden(here.target, [*here.trunks[at].prompt, *wanted[at][:place]])[-1]
    logits = here.target.readout.logits(row)
    assert arm.first_difference == Difference(
        f"p{at}",
        place,
        wanted[at][place],
        said[place],
        pytest.approx(float(logits.max() - logits[said[place]]), rel=1e-3),
    )
    assert logits.argmax() == wanted[at][place]
    assert arm.at_ties == 0


def test_one_broken_arm_does_not_taint_the_others(monkeypatch):
    here = world("llama")
    spoilt = here.drafters["half"]

    def spoiling(target, drafter, requests, options):
        made = decode(target, drafter, requests, options)
        if drafter is spoilt:
            made[2].tokens[1] = (made[2].tokens[1] + 1) % 61
        return made

    monkeypatch.setattr(room, "decode", spoiling)
    arms = [("good", here.drafters["overfit"]), ("bad", spoilt), ("new", here.drafters["untrained"])]
    found = audit(here.target, arms, asked(here), max_new_tokens=LENGTH)
    assert [arm.equal for arm in found.arms] == [True, False, True]
    assert not found.equal
    assert (found.arms[1].first_difference.prompt, found.arms[1].first_difference.position) == ("p2", 1)


@pytest.mark.parametrize("how", ["cut", "longer", "unfinished"])
def test_an_end_in_another_place_is_no_near_tie(how, monkeypatch):
    here = world("llama")
    at = next(i for i, trunk in enumerate(here.trunks) if trunk.finished)

    def ending(target, drafter, requests, options):
        made = decode(target, drafter, requests, options)
        if drafter is not None and how == "cut":
            made[at].tokens.pop()
        if drafter is not None and how == "longer":
            made[at].tokens.append(9)
        if drafter is not None and how == "unfinished":
            made[at].finished = False
        return made

    monkeypatch.setattr(room, "decode", ending)
    found = audit(here.target, [("half", here.drafters["half"])], asked(here), max_new_tokens=LENGTH)
    length = len(here.trunks[at]) - here.trunks[at].first
    (end,) = here.target.eos_ids
    place, plain, got = {"cut": (length - 1, end, -1), "longer": (length, -1, 9), "unfinished": (length, -1, -1)}[how]
    assert not found.equal
    assert found.arms[0].first_difference == Difference(f"p{at}", place, plain, got, None)
    assert found.arms[0].at_ties == 0


# near-ties -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=KINDS)
def twins(request):
    """A target that answers the first of `asks` with `a`, whose row in the readout `b` has too."""
    model = tiny_model(request.param)
    asks = [(f"q{i}", Request(ids)) for i, ids in enumerate(prompts(3, 5, 4))]
    free = decode(load_target(model), None, [r for _, r in asks], Options(12))
    said = [token for one in free for token in one.tokens]
    a = free[0].tokens[0]
    b = next(token for token in range(60, 0, -1) if token not in said and token != 5)
    with torch.no_grad():
        model.lm_head.weight[b] = model.lm_head.weight[a]
    target = load_target(model)
    target.eos_ids = ()
    return target, tiny_drafter(target), asks, a, b


def test_ties_are_counted(twins):
    target, drafter, asks, a, b = twins
    plain = decode(target, None, [request for _, request in asks], Options(12))
    said = [token for one in plain for token in one.tokens]
    found = audit(target, [("d", drafter), ("spoilt", Patchy(drafter))], asks, max_new_tokens=12)
    assert found.equal
    tied = said.count(a) + said.count(b)
    assert plain[0].tokens[0] in (a, b)
    assert tied > 0
    others = [
        gap
        for (_, request), one in zip(asks, plain, strict=True)
        for token, gap in zip(one.tokens, gaps_of(target, request.ids, one.tokens), strict=True)
        if token not in (a, b)
    ]
    assert found.near_ties == tied + sum(gap < GAP for gap in others)


def test_a_tie_does_not_hide_the_difference_after_it(twins, monkeypatch):
    target, drafter, asks, a, b = twins

    def spoiling(target, drafter, requests, options):
        made = decode(target, None, requests, options)
        if drafter is not None:
            made[0].tokens[0] = b if made[0].tokens[0] == a else a
            made[2].tokens[3] = next(t for t in range(61) if t not in (a, b, made[2].tokens[3]))
        return made

    monkeypatch.setattr(room, "decode", spoiling)
    (arm,) = audit(target, [("d", drafter)], asks, max_new_tokens=12).arms
    assert (arm.equal, arm.at_ties) == (False, 1)
    assert (arm.first_difference.prompt, arm.first_difference.position) == ("q2", 3)


@pytest.mark.parametrize("what", ["twin", "stranger"])
def test_only_a_tied_token_is_excused(twins, what, monkeypatch):
    """A near-tie excuses the two that tie; it excuses no third token."""
    target, drafter, asks, a, b = twins

    def swapping(target, drafter, requests, options):
        made = decode(target, None, requests, options)  # plain: rounding alone may part real speculation at a tie
        one = next(one for one in made if a in one.tokens or b in one.tokens)
        place = next(i for i, token in enumerate(one.tokens) if token in (a, b))
        if drafter is not None:
            other = b if one.tokens[place] == a else a
            one.tokens[place] = other if what == "twin" else next(t for t in range(61) if t not in (a, b))
        return made

    monkeypatch.setattr(room, "decode", swapping)
    found = audit(target, [("d", drafter)], asks, max_new_tokens=12)
    (arm,) = found.arms
    assert found.equal == arm.equal == (what == "twin")
    assert arm.at_ties == (what == "twin")
    if what == "twin":
        assert arm.first_difference is None
    else:
        assert arm.first_difference.gap > GAP
        assert {arm.first_difference.plain} <= {a, b}
