"""Toy texts with exact laws: after each text over V tokens the target has a law p, the drafter a law q, in fractions.

`committed_law` feeds the real verifier a grid of uniforms so fine that each outcome's share of the unit cube is hit
exactly: the law of the committed text comes out as fractions and must *equal* the target's, with no tolerance.
A text is a node of a tree: 0 is the empty text, node * V + 1 + token its continuation.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch

from draftloop.core.draws import Purpose
from draftloop.core.law import Law, Readout, Sampling
from draftloop.decode.rules import Coins, Proposal, Rule, verify

NOTHING = -1e4  # logit of a token without mass: its probability underflows to 0, and 0 * logit stays finite


def as_is(proposal):
    return proposal


@dataclass(frozen=True)
class Method:
    """One way to play a round: the real one, or one that is broken in exactly one part."""

    name: str
    rule: Rule
    verify: Callable = verify
    spoil: Callable[[Proposal], Proposal] = as_is
    share: dict[Purpose, Purpose] = field(default_factory=dict)  # purpose -> the purpose whose uniforms it steals
    fine: int = 1  # a finer grid, for faults that move a boundary by less than a cell


MATCH, RATIO = Method("match", "match"), Method("ratio", "ratio")


def kept(weights: Sequence[Fraction], sampling: Sampling) -> list[Fraction]:
    """Temperature 0, top-k and top-p by hand (temperatures > 0 are built into the logits)."""
    order = sorted(range(len(weights)), key=lambda v: (-weights[v], v))
    if sampling.greedy:
        order = order[:1]
    if sampling.top_k:
        order = order[: sampling.top_k]
    mass, stay, total = Fraction(0), [], sum(weights[v] for v in order)
    for v in order:
        if mass / total < Fraction(str(sampling.top_p)):
            stay.append(v)
        mass += weights[v]
    total = sum(weights[v] for v in stay)
    return [weights[v] / total if v in stay else Fraction(0) for v in range(len(weights))]


@dataclass
class Toy:
    """p after each text, q for each slot of each block.

    Args:
        p_weights, q_weights: the integer weights that a law's tokens take, in random order.
        own_prefix: q of a slot depends on the drafts before it; else only on the anchor's text (DFlash).
        support: the drafter's reduced vocabulary.
    """

    vocab: int
    drafted: int
    p_weights: Sequence[Sequence[int]]
    q_weights: Sequence[Sequence[int]]
    own_prefix: bool = False
    sampling: Sampling = field(default_factory=lambda: Sampling(1.0))
    drafting: Sampling = field(default_factory=lambda: Sampling(1.0))
    support: tuple[int, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.depth = self.drafted + 2  # blocks begun within the first three tokens
        self.nodes = sum(self.vocab**d for d in range(self.depth + 1))
        self.p = [kept(self._shuffled(draw, self.p_weights), Sampling(1.0)) for _ in range(self.nodes)]
        self.q = [[kept(self._draft(draw), Sampling(1.0)) for _ in range(self.drafted)] for _ in range(self.nodes)]
        self.p_logits = self._logits(self.p, self.sampling)
        self.q_logits = self._logits(self.q, self.drafting)
        eye = torch.eye(self.vocab, dtype=torch.float64)
        self.readout = Readout(eye)
        self.draft_readout = self.readout
        if self.support is not None:
            at = torch.tensor(self.support)
            self.draft_readout = Readout(eye[at], support=at, vocab_size=self.vocab)

    def _shuffled(self, draw: random.Random, choices: Sequence[Sequence[int]]) -> list[Fraction]:
        weights = [*draw.choice(choices)]
        draw.shuffle(weights)
        return [Fraction(w) for w in weights]

    def _draft(self, draw: random.Random) -> list[Fraction]:
        weights = self._shuffled(draw, self.q_weights)
        if self.support is None:
            return weights
        return [weights[self.support.index(v)] if v in self.support else Fraction(0) for v in range(self.vocab)]

    @staticmethod
    def _logits(laws, sampling: Sampling) -> torch.Tensor:
        return torch.tensor(laws, dtype=torch.float64).log().clamp(min=NOTHING) * (sampling.temperature or 1.0)

    def child(self, node, token):
        return node * self.vocab + 1 + token

    def level(self, node: int) -> int:
        return 0 if node == 0 else 1 + self.level((node - 1) // self.vocab)

    def cut(self, node: int, length: int) -> int:
        while self.level(node) > length:
            node = (node - 1) // self.vocab
        return node

    def p_law(self, node: int) -> list[Fraction]:
        return kept(self.p[node], self.sampling)

    def slot(self, anchor, own, k: int):
        """Where q's row for slot k (from 0) stands in the table."""
        return (own, 0) if self.own_prefix else (anchor, k)

    def q_law(self, anchor: int, own: int, k: int) -> list[Fraction]:
        node, column = self.slot(anchor, own, k)
        return kept(self.q[node][column], self.drafting)

    def text_law(self, length: int) -> dict[int, Fraction]:
        """The target's own law of texts of `length` tokens."""
        law = {0: Fraction(1)}
        for _ in range(length):
            law = {self.child(n, v): m * x for n, m in law.items() for v, x in enumerate(self.p_law(n)) if x}
        return law

    def blocks(self, anchor: int):
        """Every (slot, text before it) of a block begun at `anchor`."""
        layer = [anchor]
        for k in range(self.drafted):
            yield from ((k, own) for own in layer)
            layer = [self.child(own, v) for own in layer for v in range(self.vocab)]

    def grids(self, anchor: int, common: bool) -> tuple[int, int, int, int]:
        """Cells that (draft, accept, last, target) uniforms need so that every boundary lies on the grid."""
        draft, accept, last, target = 1, 1, 1, 1
        for k, own in self.blocks(anchor):
            p, q = self.p_law(own), self.q_law(anchor, own, k)
            draft = math.lcm(draft, *(x.denominator for x in q))
            accept = math.lcm(accept, *((a / b).denominator for a, b in zip(p, q, strict=True) if 0 < a < b))
            left = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
            last = math.lcm(last, *((x / (sum(left) or 1)).denominator for x in left))
            for law in (p, *(self.p_law(self.child(own, v)) for v in range(self.vocab))):
                target = math.lcm(target, *(x.denominator for x in law))
        last = math.lcm(last, target)
        both = math.lcm(draft, accept, last)
        return (both, both, both, both) if common else (draft, accept, last, target)


def propose(toy: Toy, anchor: torch.Tensor, uniform: torch.Tensor, rule: Rule) -> Proposal:
    """Draft slot by slot, as a drafter would."""
    sampling = Sampling() if rule == "match" else toy.drafting
    own, tokens, scores, rows = anchor, [], [], []
    for k in range(toy.drafted):
        node, column = toy.slot(anchor, own, k)
        rows.append(toy.q_logits[node, column])
        token, log_q = Law(rows[-1], toy.draft_readout, sampling).draw(uniform[:, k])
        tokens.append(token)
        scores.append(log_q)
        own = toy.child(own, token)
    law = Law(torch.stack(rows, 1).flatten(0, 1), toy.draft_readout, sampling)
    return Proposal(torch.stack(tokens, 1), torch.stack(scores, 1), law)


def cells(*sizes: int) -> torch.Tensor:
    """Midpoints of a grid over the unit cube; float64 [prod(sizes), len(sizes)]."""
    axes = [(torch.arange(size, dtype=torch.float64) + 0.5) / size for size in sizes]
    return torch.cartesian_prod(*axes).view(-1, len(sizes))


def play(toy: Toy, method: Method, start: int) -> dict[tuple[int, int], Fraction]:
    """One round from the text `start`: {(text after it, accepted drafts): probability}, exactly."""
    drafted = toy.drafted
    draft, accept, last, target = toy.grids(start, bool(method.share))
    if method.rule == "match":
        grid = cells(*[target] * (drafted + 1), *[target] * (method.verify is not verify))
        u = {Purpose.TARGET: grid[:, : drafted + 1], Purpose.RESIDUAL: grid[:, -1:].expand(-1, drafted)}
        u[Purpose.DRAFT] = u[Purpose.ACCEPT] = torch.full_like(grid[:, :drafted], float("nan"))  # nothing may read them
    else:
        grid = cells(*[draft] * drafted, *[accept * method.fine] * drafted, last * method.fine)
        u = {Purpose.DRAFT: grid[:, :drafted], Purpose.ACCEPT: grid[:, drafted : 2 * drafted]}
        u[Purpose.RESIDUAL] = grid[:, -1:].expand(-1, drafted)  # correction and bonus exclude each other: one axis
        u[Purpose.TARGET] = grid[:, -1:].expand(-1, drafted + 1)
    u |= {thief: u[owner] for thief, owner in method.share.items()}
    anchor = torch.full((len(grid),), start)
    proposal = method.spoil(propose(toy, anchor, u[Purpose.DRAFT], method.rule))
    path = [anchor]
    for k in range(drafted):
        path.append(toy.child(path[-1], proposal.tokens[:, k]))
    hidden = toy.p_logits[torch.stack(path, 1)].flatten(0, 1)
    coins = Coins(u[Purpose.TARGET], u[Purpose.ACCEPT], u[Purpose.RESIDUAL])
    verdict = method.verify(method.rule, proposal, Law(hidden, toy.readout, toy.sampling), coins)
    end = toy.child(torch.stack(path, 1).gather(1, verdict.accepted.unsqueeze(1)).squeeze(1), verdict.token)
    seen, count = (end * (drafted + 1) + verdict.accepted).unique(return_counts=True)
    shares = zip(seen.tolist(), count.tolist(), strict=True)
    return {divmod(code, drafted + 1): Fraction(n, len(grid)) for code, n in shares}


def committed_law(toy: Toy, method: Method, length: int) -> dict[int, Fraction]:
    """The law of the first `length` committed tokens, round after round."""
    law: dict[int, Fraction] = defaultdict(Fraction)
    running = {0: Fraction(1)}
    while running:
        after: dict[int, Fraction] = defaultdict(Fraction)
        for start, share in running.items():
            for (end, _), mass in play(toy, method, start).items():
                (law if toy.level(end) >= length else after)[toy.cut(end, length)] += share * mass
        running = after
    return dict(law)


def expected_accepted(toy: Toy, rule: Rule, anchor: int = 0) -> Fraction:
    """Brute force: the sum over k of the mass of draft runs that survive up to k."""
    total = Fraction(0)
    for drafts in itertools.chain(*(itertools.product(range(toy.vocab), repeat=k + 1) for k in range(toy.drafted))):
        own, mass = anchor, Fraction(1)
        for k, d in enumerate(drafts):
            p, q = toy.p_law(own), toy.q_law(anchor, own, k)
            if rule == "match":
                mass *= p[d] * (d == max(range(toy.vocab), key=lambda v: (q[v], -v)))
            else:
                mass *= min(p[d], q[d])
            own = toy.child(own, d)
        total += mass
    return total
