"""The fast evaluation: greedy speculative decoding over fixed greedy trunks, without decoding anything.

At temperature 0 the committed text is the target's own greedy text, whatever the drafter proposes; so the rounds can be
walked on trunks written once: draft from every anchor in packed forwards, compare with the trunk, hop. Exact: the
same steps as real decoding in float32. Sampled trunks are for `offline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftloop.core.errors import InputError
from draftloop.core.law import Law, Sampling
from draftloop.data.trunk import Trunk
from draftloop.decode.rules import leading, trusted
from draftloop.decode.trace import Generation
from draftloop.evaluate.tau import Response
from draftloop.supervise.lesson import FeatureStore, Lesson
from draftloop.supervise.propose import greedy_run


@torch.no_grad()
def walk(
    drafter: Any,
    lessons: Sequence[Lesson],
    store: FeatureStore,
    *,
    slots: int = 4096,
    confidence: float | None = None,
    at_most: int | None = None,
) -> list[Response]:
    """The verification steps that greedy decoding with this drafter would take on these trunks.

    Args:
        drafter: bound; usually the copy for decoding, which is what is served.
        lessons: greedy trunks with one response each; features are computed where missing.
        store: where features come from.
        slots: drafted slots (anchors x block) in one forward.
        confidence: as in `Options`.
        at_most: verify only the first so many drafts of each round; what `confidence` has to beat.

    Raises:
        InputError: a trunk has several responses.
    """
    out = []
    most = drafter.spec.drafted if at_most is None else at_most
    per_forward = max(1, slots // drafter.spec.block_size)
    for lesson in lessons:
        begin, last = lesson.trunk.first, len(lesson.trunk) - 1
        anchors = anchors_of(lesson.trunk, store.target.device)
        reads = bool(drafter.spec.target_layers)  # a lookup reads the text alone
        if reads:
            store.fill([lesson])
        runs: list[int] = []
        lengths: list[int] = []
        for part in anchors.split(per_forward) if len(anchors) else ():
            if confidence is None:
                runs += greedy_run(*drafted_rows(drafter, lesson, part), drafter.readout).tolist()
            else:
                kept, verified_here = _shortened(drafter, lesson, part, confidence)
                runs, lengths = runs + kept.tolist(), lengths + verified_here.tolist()
        if reads:
            store.release([lesson])
        committed, accepted, verified = [], [], []
        anchor = begin
        while anchor < last:
            length = min(most, lengths[anchor - begin]) if lengths else most
            run = min(runs[anchor - begin], length)
            verified.append(length)
            gain = min(run + 1, last - anchor)
            committed.append(gain)
            accepted.append(min(run, gain))
            anchor += gain
        name = f"{lesson.trunk.id}#{lesson.trunk.sample}"
        shown = None if confidence is None and at_most is None else tuple(verified)
        out.append(Response(name, lesson.trunk.set, tuple(committed), tuple(accepted), drafter.spec.drafted, shown))
    return out


def _shortened(drafter: Any, lesson: Lesson, anchors: Tensor, confidence: float) -> tuple[Tensor, Tensor]:
    """int64 [N] each: leading drafts that are the trunk's own, and how many would be verified.

    How many depends on drafts that leave the trunk too, so that here the drafter goes its own way.
    """
    text = torch.tensor(lesson.trunk.tokens, device=anchors.device)
    assert lesson.features is not None
    draft = drafter.pack(lesson.features.unsqueeze(0), anchors.unsqueeze(0), text.unsqueeze(0))

    def choose(rows: Tensor, slots: slice) -> tuple[Tensor, Tensor]:
        law = Law(rows.flatten(0, -2), drafter.readout, Sampling())
        tokens, certain = law.draw(rows.new_empty(len(law.hidden)))
        return tokens.view(rows.shape[:-1]), certain.view(rows.shape[:-1])

    tokens, _, rows = draft.drawn(choose)
    place = anchors.unsqueeze(1) + torch.arange(1, drafter.spec.drafted + 1, device=anchors.device)
    own = torch.where(place < len(text), text[place.clamp(max=len(text) - 1)], -1)
    return leading(tokens[0] == own), trusted(drafter.confidence(rows[0], text[anchors], tokens[0]), confidence)


def anchors_of(trunk: Trunk, device: torch.device) -> Tensor:
    """int64 [n]: every position of a response behind which decoding may draft, n = its tokens but the last.

    Raises:
        InputError: the trunk has several responses.
    """
    if len(trunk.spans) != 1:
        raise InputError(
            "a trunk with several responses cannot be walked",
            where=trunk.id,
            fix="Let the target answer the held-out prompts (data.response.regenerate: true).",
        )
    return torch.arange(trunk.first, len(trunk) - 1, device=device)


def drafted_rows(drafter: Any, lesson: Lesson, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """Draft from anchors in one packed forward, each slot given the trunk's own text before it.

    Rows behind the first draft that leaves the trunk are not those of decoding; no round reads them.

    Args:
        drafter: bound.
        lesson: with features, unless the drafter reads none.
        anchors: int64 [N].

    Returns:
        the drafter's hidden rows [N, K, H]; int64 [N, K] the trunk's tokens there, -1 (which no draft equals) behind
        its end.
    """
    tokens = torch.tensor(lesson.trunk.tokens, device=anchors.device)
    features = lesson.features.unsqueeze(0) if lesson.features is not None else None
    assert features is not None or not drafter.spec.target_layers
    draft = drafter.pack(features, anchors.unsqueeze(0), tokens.unsqueeze(0))
    place = anchors.unsqueeze(1) + torch.arange(1, drafter.spec.drafted + 1, device=anchors.device)
    own = tokens[place.clamp(max=len(tokens) - 1)]
    return draft.forced(own.unsqueeze(0))[0], torch.where(place < len(tokens), own, -1)


def responses_of(generations: Sequence[Generation], names: Sequence[tuple[str, str]], drafted: int) -> list[Response]:
    """Verification steps of real decoding, for the same statistics.

    Args:
        generations: results of `decode` with a drafter.
        names: (id, set) of each.
        drafted: K.
    """
    out = []
    for (name, group), made in zip(names, generations, strict=True):
        committed = tuple(step.committed for step in made.steps)
        accepted = tuple(min(step.accepted, step.committed) for step in made.steps)
        lengths = tuple(len(step.proposed) for step in made.steps)
        whole = all(length == drafted for length in lengths)
        out.append(Response(name, group, committed, accepted, drafted, None if whole else lengths))
    return out
