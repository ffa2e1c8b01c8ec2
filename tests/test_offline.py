"""The offline evaluation against the enumerated verifier, and broken on purpose."""

from __future__ import annotations

import math
from collections import defaultdict
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.core.law import Sampling
from draftloop.data.trunk import response_trunk
from draftloop.decode.trace import Options
from draftloop.evaluate import offline as room
from draftloop.evaluate.offline import offline
from draftloop.evaluate.tau import Response
from tests.offline_parts import BROKEN, numbers
from tests.stand_ins import ToyDrafter, ToyTarget
from tests.toy import MATCH, RATIO, Toy, play

pytestmark = pytest.mark.specopd


# the enumerated verifier -----------------------------------------------------------------------------------------------
class Scored(ToyTarget):
    version, hidden_size = 0, 1


def path(toy, node):
    """The texts on the way to a node, the empty one first."""
    out = [node]
    while out[0]:
        out.insert(0, (out[0] - 1) // toy.vocab)
    return out


def enumerated(toy, method, length, eos, start=0):
    """{text: (its probability, [expected steps, expected tokens / steps, survivors, refusals] given it)}, exactly."""
    total = toy.level(start)
    running = {(start, (), ()): Fraction(1)}
    over = defaultdict(list)
    while running:
        after = defaultdict(Fraction)
        for (at, committed, accepted), share in running.items():
            for (end, survived), mass in play(toy, method, at).items():
                line = path(toy, end)[toy.level(at) + 1 :]
                said = [(node - 1) % toy.vocab for node in line]
                stop = min(len(line), length + total - toy.level(at))
                stop = next((i + 1 for i, token in enumerate(said[:stop]) if token in eos), stop)
                node, ended = line[stop - 1], said[stop - 1] in eos or toy.level(line[stop - 1]) == length + total
                key = (node, (*committed, stop), (*accepted, min(survived, stop)))
                if ended:
                    over[node].append((share * mass, Response("x", "s", key[1], key[2], toy.drafted)))
                else:
                    after[key] += share * mass
        running = after
    out = {}
    for node, ways in over.items():
        mass = sum(share for share, _ in ways)
        each = [(share / mass, way.tally) for share, way in ways]
        mean = [
            sum(w * Fraction(t.steps) for w, t in each),
            sum(w * Fraction(t.tokens) / Fraction(t.steps) for w, t in each),
        ]
        for name in ("survivors", "refusals"):
            mean += [sum(w * Fraction(getattr(t, name)[k]) for w, t in each) for k in range(toy.drafted)]
        out[node] = (mass, [float(x) for x in mean])
    return out


def chain_of(toy, rule, node, start=0):
    """[n, K] acceptance probabilities of a text, from the toy's fractions."""
    line = path(toy, node)
    line = line[toy.level(start) :]
    n = len(line) - 1
    log_p, log_q = torch.zeros(n, toy.drafted), torch.full((n, toy.drafted), float("-inf"))
    for a in range(n):
        for k in range(min(toy.drafted, n - a)):
            token = (line[a + k + 1] - 1) % toy.vocab
            p, q = toy.p_law(line[a + k])[token], toy.q_law(line[a], line[a + k], k)
            if rule == "match":
                q = [Fraction(v == max(range(toy.vocab), key=lambda u: (q[u], -u))) for v in range(toy.vocab)]
            log_p[a, k], log_q[a, k] = math.log(p), math.log(q[token]) if q[token] else float("-inf")
    return room.survival(log_p.double(), log_q.double()).numpy()


def toy_of(seed, own_prefix, drafted=2, **changes):
    weights = {"p_weights": [(1, 3), (2, 2)], "q_weights": [(1, 1), (1, 3), (0, 4)]}
    return Toy(vocab=2, drafted=drafted, own_prefix=own_prefix, seed=seed, **{**weights, **changes})


def exact(toy, method, eos, length=3):
    """Whether the chain says of every text what the enumerated verifier does, and the texts have the target's law."""
    found = enumerated(toy, method, length, eos)
    assert sum(mass for mass, _ in found.values()) == 1
    for node, (mass, wanted) in found.items():
        line, law = path(toy, node), Fraction(1)
        for above, below in pairwise(line):
            law *= toy.p_law(above)[(below - 1) % toy.vocab]
        assert mass == law
        tally = room.tally_chain("x", "s", chain_of(toy, method.rule, node))
        assert tally.tokens == toy.level(node)
        if not np.allclose(numbers(tally), wanted, rtol=0, atol=1e-6):
            return False
    return True


@pytest.mark.parametrize("method", [MATCH, RATIO], ids=["match", "ratio"])
@pytest.mark.parametrize("own_prefix", [False, True], ids=["parallel", "own-prefix"])
@pytest.mark.parametrize("eos", [(), (1,)], ids=["no-end", "end"])
@pytest.mark.parametrize(("drafted", "seed"), [(1, 0), (2, 1), (2, 2)])
def test_given_any_text_it_is_the_verifier_s_own_law(method, own_prefix, eos, drafted, seed):
    assert exact(toy_of(seed, own_prefix, drafted), method, eos)


@pytest.mark.parametrize("method", [MATCH, RATIO], ids=["match", "ratio"])
def test_filters_count(method):
    changes = {"p_weights": [(1, 3, 4)], "q_weights": [(1, 1, 2), (2, 1, 1)], "sampling": Sampling(1.0, top_k=2)}
    toy = Toy(vocab=3, drafted=2, seed=4, **changes)
    assert exact(toy, method, (2,), length=2)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_chain_is_found(name, monkeypatch):
    part, wrong = BROKEN[name]
    monkeypatch.setattr(room, part, wrong)
    assert not all(exact(toy_of(seed, False), RATIO, ()) for seed in (1, 2, 3))


@pytest.mark.parametrize("rule", ["match", "ratio"])
@pytest.mark.parametrize("own_prefix", [False, True], ids=["parallel", "own-prefix"])
def test_from_laws_to_tallies(rule, own_prefix):
    """The whole path, hidden rows to tallies, on every text of a toy; the first token is the prefill's."""
    toy = toy_of(5, own_prefix)
    target, drafter = Scored(toy), ToyDrafter(toy)
    for first in toy.text_law(1):
        for node, (_, wanted) in enumerated(toy, MATCH if rule == "match" else RATIO, 2, (), first).items():
            said = [(at - 1) % toy.vocab for at in path(toy, node)[1:]]
            trunk = response_trunk([0], said, "x", "s", 0, False, Sampling(1.0))
            options = Options(3, Sampling(1.0), rule)
            ((tally,),) = offline(target, [drafter], [trunk], options)
            assert numbers(tally) == pytest.approx(wanted, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_chain_is_the_mean_of_its_walks(data):
    """Brute force over every way through a text, for any acceptance probabilities."""
    n, drafted = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    share = st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0])
    keep = np.array(data.draw(st.lists(st.lists(share, min_size=drafted, max_size=drafted), min_size=n, max_size=n)))
    ways = [((), (), 1.0)]
    over = []
    while ways:
        committed, accepted, mass = ways.pop()
        at = sum(committed)
        if at == n:
            over.append((mass, Response("x", "s", committed, accepted, drafted).tally))
            continue
        for run in range(drafted + 1):
            odds = mass * keep[at, :run].prod() * (1.0 if run == drafted else 1 - keep[at, run])
            gain = min(run + 1, n - at)
            if odds:
                ways.append(((*committed, gain), (*accepted, min(run, gain)), odds))
    wanted = sum(mass * np.array(numbers(tally)) for mass, tally in over)
    assert np.allclose(numbers(room.tally_chain("x", "s", keep)), wanted, rtol=0, atol=1e-12)
