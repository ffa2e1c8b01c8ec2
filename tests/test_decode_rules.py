"""Verification is lossless: the real `verify` enumerated exactly on toy laws; what is broken does not pass."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.core.law import Law, Readout, Sampling
from draftloop.decode import rules
from draftloop.decode.rules import Coins, Proposal, leading, verify
from tests.broken import FILTER_BROKEN, MATCH_BROKEN, RATIO_BROKEN, by_hand, miscounted
from tests.toy import MATCH, RATIO, Method, Toy, committed_law, expected_accepted, play

HALVES = [(2, 1, 1), (2, 2, 0), (4, 0, 0)]  # weights in quarters whose ratios need few cells
QUARTERS = [(1, 1, 2), (0, 1, 3), (2, 2, 0), (4, 0, 0)]
WIDE = [(6, 3, 2, 1)]


def setup(vocab, drafted, p_weights, q_weights, **more):
    return {"vocab": vocab, "drafted": drafted, "p_weights": p_weights, "q_weights": q_weights, **more}


TOYS = {
    "K=1 V=3": setup(3, 1, QUARTERS, QUARTERS),
    "K=1 V=4": setup(4, 1, [(1, 2, 3, 0), (1, 1, 2, 2)], [(2, 2, 1, 1), (3, 2, 1, 0)]),
    "K=2 V=3": setup(3, 2, QUARTERS, QUARTERS),
    "K=2 V=4": setup(4, 2, [(2, 1, 1, 0), (1, 1, 1, 1)], [(2, 1, 1, 0), (2, 2, 0, 0)]),
    "K=3 V=3": setup(3, 3, [(1, 1, 2), (0, 1, 3), (4, 0, 0)], HALVES),
    "sharp and flat": setup(3, 1, [(10, 1, 1), (0, 0, 1)], [(1, 1, 1)]),
    "reduced draft vocabulary": setup(4, 2, [(2, 1, 1, 0), (1, 1, 1, 1)], [(1, 1), (1, 3)], support=(3, 1)),
    "temperature": setup(3, 2, QUARTERS, HALVES, sampling=Sampling(0.6), drafting=Sampling(1.7)),
    "top-k on p": setup(4, 1, WIDE, [(2, 1, 1, 0)], sampling=Sampling(0.8, top_k=2)),
    "top-p on p": setup(4, 1, WIDE, [(1, 1, 1, 1)], sampling=Sampling(1.0, top_p=0.7)),
    "top-k and top-p on p": setup(4, 2, WIDE, [(1, 1, 1, 0)], sampling=Sampling(1.0, 3, 0.6)),
    "top-k on q": setup(4, 2, [(2, 1, 1, 2)], [(4, 2, 1, 1)], drafting=Sampling(1.0, top_k=2)),
    "top-p on q, top-k on p": setup(
        4, 1, WIDE, WIDE, sampling=Sampling(1.3, top_k=2), drafting=Sampling(0.7, top_p=0.7)
    ),
    "greedy drafts under ratio": setup(3, 2, QUARTERS, QUARTERS, drafting=Sampling(0.0)),
}


@pytest.fixture
def whole(monkeypatch):
    """Few large chunks, one thread: thousands of cells at a time (that chunks change nothing has a test of its own)."""
    monkeypatch.setattr(rules._ratio, "__defaults__", (1 << 14,))
    monkeypatch.setattr(Law.draw, "__defaults__", (1 << 16,))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def toy(name: str, seed: int = 0, own_prefix: bool = False, **changes) -> Toy:
    return Toy(**{**TOYS[name], "own_prefix": own_prefix, "seed": seed, **changes})


def distance(one: dict[int, Fraction], other: dict[int, Fraction]) -> float:
    """Total variation."""
    return float(sum(abs(one.get(n, Fraction(0)) - other.get(n, Fraction(0))) for n in {*one, *other})) / 2


@pytest.mark.parametrize("own_prefix", [False, True], ids=["parallel q", "q of its own prefix"])
@pytest.mark.parametrize("method", [MATCH, RATIO], ids=lambda m: m.name)
@pytest.mark.parametrize("name", TOYS)
def test_the_committed_text_has_exactly_the_targets_law(whole, name, method, own_prefix):
    """Three tokens, round after round; and as many drafts survive as brute force says."""
    for seed in range(2):
        game = toy(name, seed, own_prefix)
        assert committed_law(game, method, 3) == game.text_law(3)
        accepted = sum(r * mass for (_, r), mass in play(game, method, 0).items())
        assert accepted == expected_accepted(game, method.rule)


def test_the_bound_of_chunks_is_no_boundary():
    """More rows than one chunk of the ratio rule, every row another law."""
    torch.manual_seed(0)
    b, k, v = 101, 3, 7
    p, q = torch.randn(b, k + 1, v, dtype=torch.float64), torch.randn(b, k, v, dtype=torch.float64)
    readout = Readout(torch.eye(v, dtype=torch.float64))
    u = torch.rand(b, 4 * k + 1, dtype=torch.float64)
    law = Law(q.flatten(0, 1), readout, Sampling(1.0))
    tokens, log_q = law.draw(u[:, :k].flatten())
    proposal = Proposal(tokens.view(b, k), log_q.view(b, k), law)
    coins = Coins(u[:, k : 2 * k + 1], u[:, 2 * k + 1 : 3 * k + 1], u[:, 3 * k + 1 :])
    whole = verify("ratio", proposal, Law(p.flatten(0, 1), readout, Sampling(1.0)), coins)
    assert len(set(whole.accepted.tolist())) == k + 1
    for i in range(b):
        alone = verify(
            "ratio",
            Proposal(proposal.tokens[i : i + 1], proposal.log_q[i : i + 1], Law(q[i], readout, Sampling(1.0))),
            Law(p[i], readout, Sampling(1.0)),
            Coins(coins.target[i : i + 1], coins.accept[i : i + 1], coins.residual[i : i + 1]),
        )
        assert (alone.accepted.item(), alone.token.item()) == (whole.accepted[i].item(), whole.token[i].item())


@pytest.mark.parametrize("rule", ["match", "ratio"])
def test_a_drafter_that_gives_no_numbers_costs_speed_and_nothing_else(rule):
    """Every token is drawn from p, with any u. Fails if a residual that is no number is drawn from."""
    n, v = 400, 5
    p = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0], dtype=torch.float64).log()
    readout = Readout(torch.eye(v, dtype=torch.float64))
    q = Law(torch.full((n, v), math.nan, dtype=torch.float64), readout, Sampling(1.0))
    u = ((torch.arange(n) + 0.5) / n).double().unsqueeze(1)
    tokens, log_q = q.draw(u[:, 0])
    target = Law(p.clamp(min=-1e9).expand(2 * n, v), readout, Sampling(1.0))
    verdict = verify(rule, Proposal(tokens.unsqueeze(1), log_q.unsqueeze(1), q), target, Coins(u.expand(n, 2), u, u))
    assert verdict.accepted.tolist() == [0] * n
    assert torch.bincount(verdict.token, minlength=v).tolist() == [160, 120, 80, 40, 0]


@pytest.mark.parametrize("rule", ["match", "ratio"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_without_drafts_every_rule_draws_the_same_token(rule, temperature):
    law = Law(torch.randn(5, 4, dtype=torch.float64), Readout(torch.eye(4, dtype=torch.float64)), Sampling(temperature))
    none = torch.zeros(5, 0, dtype=torch.int64)
    u = torch.rand(5, 1, dtype=torch.float64)
    coins = Coins(u, u[:, :0], u[:, :0])
    verdict = verify(rule, Proposal(none, none.float(), law.rows(slice(0, 0))), law, coins)
    assert verdict.accepted.tolist() == [0] * 5
    assert torch.equal(verdict.token, law.draw(u[:, 0])[0])


@pytest.mark.parametrize("rule", ["match", "ratio"])
def test_greedy_verification_is_a_comparison_with_the_argmax(rule):
    p = torch.tensor([[0.0, 3, 1], [2, 0, 1], [0, 1, 5]], dtype=torch.float64).repeat(4, 1)
    drafts = torch.tensor([[1, 0], [1, 1], [0, 0], [2, 2]])
    readout = Readout(torch.eye(3, dtype=torch.float64))
    law = Law(torch.zeros(8, 3, dtype=torch.float64), readout, Sampling())
    unread = torch.full((4, 3), float("nan"), dtype=torch.float64)
    coins = Coins(unread, unread[:, 1:], unread[:, 1:])
    verdict = verify(rule, Proposal(drafts, torch.zeros(4, 2), law), Law(p, readout, Sampling()), coins)
    assert verdict.accepted.tolist() == [2, 1, 0, 0]
    assert verdict.token.tolist() == [2, 0, 1, 1]


def test_leading_counts_what_stands_before_the_first_failure():
    run = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 1], [0, 0, 0]]).bool()
    assert leading(run).tolist() == [3, 1, 0, 0]
    assert leading(run[:, :0]).tolist() == [0] * 4


# real-valued laws: the thresholds of the real code, and the tree that follows from them -------------------------------
LOGITS = st.lists(st.floats(-4, 4), min_size=64, max_size=64)


def softmax(row):
    top = max(row)
    weights = [math.exp(x - top) for x in row]
    return [w / sum(weights) for w in weights]


@given(LOGITS, st.integers(1, 3))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_real_valued_laws_by_their_thresholds(numbers, drafted):
    """`verify` flips its verdict exactly at u = p/q, the residual at its cumulative sums; summed up, that is p."""
    vocab, eps = 3, 1e-6
    readout = Readout(torch.eye(vocab, dtype=torch.float64))
    nodes = sum(vocab**d for d in range(drafted + 1))
    rows = [[numbers[(5 * n + 7 * v + 3 * n * v) % 64] for v in range(vocab)] for n in range(nodes + drafted)]
    p, q = [softmax(row) for row in rows[:nodes]], [softmax(row) for row in rows[nodes:]]
    law_q = torch.tensor(rows[nodes:], dtype=torch.float64)
    cases, wanted = [], []  # one row of `verify` each: (drafts, accept coins, last uniform), (accepted, token)
    texts: dict[tuple[int, ...], float] = defaultdict(float)
    for drafts in itertools.product(range(vocab), repeat=drafted):
        own, mass = 0, math.prod(q[k][d] for k, d in enumerate(drafts))
        for k, d in enumerate(drafts):
            ratio = p[own][d] / q[k][d]
            left = [max(a - b, 0.0) for a, b in zip(p[own], q[k], strict=True)]
            if ratio < 1 - 1e-13:
                sure = [0.0] * k + [ratio + eps] + [0.0] * (drafted - k - 1)
                for token, low, high in steps(left):
                    if high - low > 3 * eps and sum(left) > 3 * eps:  # as float32 scores can resolve it
                        cases += [(drafts, sure, low + eps), (drafts, sure, high - eps)]
                        wanted += [(k, token)] * 2
                    texts[(*drafts[:k], token)] += mass * (1 - ratio) * (high - low)
                mass *= ratio
            coin = [0.0] * k + [min(ratio, 1) - eps] + [1.0] * (drafted - k - 1)
            cases.append((drafts, [max(c, 0.0) for c in coin], 0.5))
            wanted.append((k + 1, None))
            own = own * vocab + 1 + d
        for token, low, high in steps(p[own]):
            if high - low > 3 * eps:
                cases += [(drafts, [0.0] * drafted, low + eps), (drafts, [0.0] * drafted, high - eps)]
                wanted += [(drafted, token)] * 2
            texts[(*drafts, token)] += mass * (high - low)
    outcome = run(cases, rows[:nodes], law_q, readout)
    for case, (accepted, token), got in zip(cases, wanted, outcome, strict=True):
        assert got[0] == accepted or (token is None and got[0] > accepted), (case, accepted, got)
        assert token is None or got[1] == token, (case, token, got)
    assert abs(sum(texts.values()) - 1) < 1e-12
    for first in range(vocab):
        assert abs(sum(m for t, m in texts.items() if t[0] == first) - p[0][first]) < 1e-12
        for second in range(vocab):  # texts of one token go on by the target's own law
            mass = sum(m for t, m in texts.items() if t[:2] == (first, second)) + texts[(first,)] * p[1 + first][second]
            assert abs(mass - p[0][first] * p[1 + first][second]) < 1e-12


def steps(weights):
    """(token, cumulative share before it, and after it)."""
    total, low = sum(weights), 0.0
    for token, weight in enumerate(weights):
        yield token, low / total, (low + weight) / total
        low += weight


def run(cases, p_rows, law_q, readout):
    vocab, drafted = law_q.shape[1], law_q.shape[0]
    drafts = torch.tensor([c[0] for c in cases])
    path = [torch.zeros(len(cases), dtype=torch.int64)]
    for k in range(drafted):
        path.append(path[-1] * vocab + 1 + drafts[:, k])
    hidden = torch.tensor(p_rows, dtype=torch.float64)[torch.stack(path, 1)].flatten(0, 1)
    law = Law(law_q.repeat(len(cases), 1), readout, Sampling(1.0))
    log_q = law.log_probs().gather(-1, drafts.view(-1, 1)).view_as(drafts).float()
    last = torch.tensor([c[2] for c in cases], dtype=torch.float64).unsqueeze(1)
    coins = Coins(
        last.expand(-1, drafted + 1), torch.tensor([c[1] for c in cases], dtype=torch.float64), last.expand(-1, drafted)
    )
    verdict = verify("ratio", Proposal(drafts, log_q, law), Law(hidden, readout, Sampling(1.0)), coins)
    return list(zip(verdict.accepted.tolist(), verdict.token.tolist(), strict=True))


# what is broken must be caught ---------------------------------------------------------------------------------------
RICH = {"p_weights": [(1, 1, 2), (0, 1, 3)], "q_weights": [(2, 1, 1), (2, 2, 0), (4, 0, 0)]}


def caught(method: Method, drafted: int, **changes) -> bool:
    """Whether one of a few toys shows it, on grids on which the sound rule is exact."""
    for seed in range(4):
        game = Toy(**{**dict(vocab=3, drafted=drafted, seed=seed, **RICH), **changes})
        sound = Method("sound", method.rule, by_hand if method.rule == "ratio" else verify, fine=method.fine)
        assert committed_law(game, sound, 3) == game.text_law(3)
        if distance(committed_law(game, method, 3), game.text_law(3)) > 1e-2:
            return True
    return False


@pytest.mark.parametrize("method", RATIO_BROKEN + MATCH_BROKEN, ids=lambda m: f"{m.rule}: {m.name}")
def test_a_broken_rule_is_caught(whole, method):
    if method.fine > 1:
        assert caught(method, **TOYS["K=1 V=4"])
    else:
        assert caught(method, 1 if method.share else 2)


@pytest.mark.parametrize("method", FILTER_BROKEN, ids=lambda m: m.name)
@pytest.mark.parametrize("name", ["top-k on p", "top-p on p"])
def test_forgotten_filters_are_caught(whole, name, method):
    assert caught(method, **TOYS[name])


@pytest.mark.parametrize("rule", ["match", "ratio"])
@pytest.mark.parametrize("by", [1, -1])
def test_a_wrong_count_is_caught_by_the_accepted_length_too(whole, rule, by):
    game = Toy(vocab=3, drafted=2, **RICH, seed=1)
    outcomes = play(game, Method("miscounted", rule, miscounted(by)), 0)
    assert sum(r * mass for (_, r), mass in outcomes.items()) != expected_accepted(game, rule)
