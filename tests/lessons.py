"""A small world for the rooms above decoding: a tiny target, its greedy trunks, drafters good and bad, real rollouts.

Built once a session: `world(kind)` and `rolled(kind, drafter)` are shared, so nobody may change what they return.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from draftloop.data.trunk import Trunk, response_trunk
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options, Request
from draftloop.drafter.build import for_decoding
from draftloop.drafter.draft import ParallelDrafter
from draftloop.learn.update import differentiate
from draftloop.recipe import RolloutPart, StagePart
from draftloop.supervise.batch import supervise
from draftloop.supervise.lesson import FeatureStore, Lesson
from draftloop.supervise.rollout import roll_out
from tests.tiny import VOCAB, tiny_drafter, tiny_target

KINDS = ("llama", "qwen3")
DRAFTERS = ("untrained", "half", "overfit", "patchy")
BLOCK, DRAFTED = 5, 4
LENGTH = 22  # of a response, in tokens


class Patchy(ParallelDrafter):
    """A drafter with some slots spoilt, depending on the anchor alone: every acceptance 0..K comes about."""

    def __init__(self, drafter):
        self.inner, self.spec = drafter, drafter.spec

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def _spoil(self, hidden, anchor):
        place = torch.arange(hidden.shape[-2], device=hidden.device)
        bad = (anchor.unsqueeze(-1) * 7 + place * 5 + anchor.unsqueeze(-1) * place) % 11 < 3
        return torch.where(bad.unsqueeze(-1), -hidden, hidden)

    def begin(self, cache, anchor, tokens):
        return self._spoil(self.inner.begin(cache, anchor, tokens), anchor)

    def __call__(self, features, anchor, tokens):
        return self._spoil(self.inner(features, anchor, tokens), anchor)


@dataclass(frozen=True)
class World:
    """Attributes: `target` (with an end-of-sequence that occurs), greedy `trunks`, bound `drafters` by name."""

    target: object
    trunks: tuple[Trunk, ...]
    drafters: dict[str, object]

    def lessons(self) -> list[Lesson]:
        return [Lesson(trunk) for trunk in self.trunks]

    def store(self, budget: float = 1e9) -> FeatureStore:
        return FeatureStore(self.target, self.drafters["untrained"].spec.target_layers, budget)


def prompts(*lengths: int, vocab: int = VOCAB) -> list[tuple[int, ...]]:
    draw = torch.Generator().manual_seed(7)
    return [tuple(torch.randint(6, vocab, (n,), generator=draw).tolist()) for n in lengths]


def greedy_trunks(target, asked, length: int = LENGTH) -> list[Trunk]:
    made = decode(target, None, [Request(ids, i) for i, ids in enumerate(asked)], Options(length))
    return [
        response_trunk(ids, one.tokens, f"p{i}", "ab"[i % 2], 0, one.finished)
        for i, (ids, one) in enumerate(zip(asked, made, strict=True))
    ]


def choose_end(lines) -> int:
    """A token that ends some of these responses somewhere inside, but not all."""
    inside = [{t: line.index(t) for t in line} for line in lines]
    fit = [t for t in range(VOCAB) if 0 < sum(t in places for places in inside) < len(lines)]
    return max(fit, key=lambda t: sum(min(places.get(t, 0), 9) for places in inside))


def train(target, drafter, lessons, part, steps, *, lr=3e-3, precision=torch.float32, seed=0):
    """Plain AdamW over all lessons at once; the losses."""
    store = FeatureStore(target, drafter.spec.target_layers, 1e9)
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=lr, weight_decay=0.0)
    losses = []
    for step in range(steps):
        batch = supervise(
            part, lessons, [step] * len(lessons), target=target, drafter=drafter, store=store, seed=seed,
            need_teacher=part.objective.kind != "ce",
        )  # fmt: skip
        losses.append(differentiate(part.objective, [batch], drafter, target.readout, precision).loss)
        optimiser.step()
        optimiser.zero_grad()
    return losses


def taught(target, trunks, steps: int, start=None):
    """A drafter after SFT on these very trunks, frozen."""
    drafter = tiny_drafter(target, block=BLOCK)
    if start is not None:
        drafter.load_state_dict(start.state_dict())
    train(target, drafter, [Lesson(t) for t in trunks], StagePart(name="sft", method="sft", anchors="all"), steps)
    return for_decoding(drafter, target)


@cache
def world(kind: str) -> World:
    target = tiny_target(kind)
    asked = prompts(3, 9, 5, 4, 7)
    target.eos_ids = ()
    free = greedy_trunks(target, asked)
    target.eos_ids = (choose_end([t.tokens[t.first :] for t in free]),)
    trunks = tuple(greedy_trunks(target, asked))
    assert {t.finished for t in trunks} == {True, False}
    half = taught(target, trunks, 22)
    overfit = taught(target, trunks, 40, half)
    drafters = {
        "untrained": for_decoding(tiny_drafter(target, block=BLOCK), target),
        "half": half,
        "overfit": overfit,
        "patchy": Patchy(overfit),
    }
    return World(target, trunks, drafters)


@cache
def _rolled(kind: str, drafter: str, temperature: float, rule: str) -> tuple[Lesson, ...]:
    here = world(kind)
    part = RolloutPart(temperature=temperature, rule=rule, batch_size=3)
    return tuple(
        roll_out(here.target, here.drafters[drafter], here.trunks, part, max_new_tokens=LENGTH, seed=3, visit=0)
    )


def rolled(kind: str, drafter: str = "patchy", *, temperature: float = 0.0, rule: str = "match") -> list[Lesson]:
    """Lessons of a real recorded rollout (fresh objects around shared tensors)."""
    return [replace(lesson) for lesson in _rolled(kind, drafter, temperature, rule)]


def plain_hidden(target, tokens) -> torch.Tensor:
    """[T, H] by the model itself: no cache, no tree, no mask of ours."""
    with torch.no_grad():
        return target.model.model(input_ids=torch.tensor([list(tokens)])).last_hidden_state[0]


def same_law(target, ours, theirs, rel: float = 1e-5) -> bool:
    """Whether hidden rows give the same logits, up to `rel` of the largest."""
    a, b = target.readout.logits(ours), target.readout.logits(theirs)
    return close(a, b, rel)


def close(a, b, rel: float = 1e-5) -> bool:
    """Whether no entry differs by more than `rel` of the largest."""
    return a.shape == b.shape and bool((a - b).abs().max() <= rel * b.abs().max())


def trunk_of(mask, *, id="m", tokens=None) -> Trunk:
    return Trunk(id, "s", 0, tuple(tokens or range(100, 100 + len(mask))), tuple(mask), True)


def two_turns(here) -> Lesson:
    tokens = here.trunks[1].tokens
    mask = (False, False, *[True] * 6, False, False, *[True] * (len(tokens) - 10))
    return Lesson(Trunk("two", "s", 0, tokens, mask, True))


def stage(**cells) -> StagePart:
    return StagePart(name="s", **cells)


def scored(part, lessons, drafter, here, *, visits=None, seed=0, need_teacher=True):
    return supervise(
        part, lessons, visits or [0] * len(lessons), target=here.target, drafter=drafter, store=here.store(),
        seed=seed, need_teacher=need_teacher,
    )  # fmt: skip


class Counted:
    """A target that counts its forwards."""

    def __init__(self, target):
        self.inner, self.version, self.texts, self.widest = target, 0, 0, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def extend(self, cache, ids, positions, taps=()):
        self.texts += len(ids)
        self.widest = max(self.widest, ids.numel())
        return self.inner.extend(cache, ids, positions, taps)
