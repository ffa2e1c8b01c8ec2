"""Why a drafter is accepted less than it should be: one counterfactual at a time, and which one explains it.

Two questions, the same counterfactuals (`variants`). `diagnose`: which change of a checkpoint's facts raises its tau on
fixed greedy texts; needs no engine, so it works on anybody's checkpoint. `explain`: with which change does our drafter
accept, step by step, what an engine accepted; so it finds what the engine does, right or wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftloop.core.law import Readout, Sampling
from draftloop.data.trunk import Trunk, response_trunk
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options, Request
from draftloop.engines.compare import Answer, engine_response, replay
from draftloop.engines.variants import Read, Variant, read_as_is, variants
from draftloop.evaluate.tau import Paired, Response, acceptance, paired
from draftloop.evaluate.walk import walk
from draftloop.supervise.lesson import FeatureStore, Lesson

Say = Callable[[int, int], None]
_SEEK = "Look for that in the folder that it was given, or in how it reads it."


@dataclass(frozen=True)
class Finding:
    """One counterfactual's outcome.

    Attributes:
        name: what was changed.
        fix: what to do if it is the cause.
        tau: pooled, under it.
        against: paired with the checkpoint as read (or, in `explain`, with the engine).
        differ: verifications that part from the engine's, near-ties aside; None without an engine.
    """

    name: str
    fix: str
    tau: float
    against: Paired
    differ: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        gain = {"difference": self.against.difference, "interval": list(self.against.difference_interval)}
        return {"name": self.name, "fix": self.fix, "tau": self.tau, **gain, "differ": self.differ}


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        tau: of the checkpoint as it reads (of the engine, in `explain`).
        differ: in `explain`, verifications that part from the engine's as the drafter is.
        steps: verifications compared.
        findings: every counterfactual, best first.
        cause: the one that explains it, or None.
    """

    tau: float
    differ: int | None
    steps: int
    findings: tuple[Finding, ...]
    cause: Finding | None

    @property
    def sentence(self) -> str:
        """What to tell the user."""
        if self.cause is not None and self.differ is not None:
            return (
                f"The engine drafts with {self.cause.name}: so changed, our drafter differs from it in"
                f" {self.cause.differ} of {self.steps} verifications instead of {self.differ}. {self.cause.fix}"
            )
        if self.cause is not None:
            low, high = self.cause.against.difference_interval
            return (
                f"The checkpoint is wrong about one fact: with {self.cause.name}, tau is {self.cause.tau:.2f} instead"
                f" of {self.tau:.2f} ({self.cause.against.difference:+.2f} [{low:+.2f}, {high:+.2f}]). {self.cause.fix}"
            )
        what = "explains what the engine accepts" if self.differ is not None else "raises tau"
        return f"None of {len(self.findings)} counterfactuals {what}."

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "tau": self.tau,
            "differ": self.differ,
            "steps": self.steps,
            "findings": [finding.to_json() for finding in self.findings],
            "cause": self.cause.to_json() if self.cause else None,
            "sentence": self.sentence,
        }


def greedy_texts(
    target: Any, asked: Sequence[tuple[str, str, tuple[int, ...]]], max_new_tokens: int, batch_size: int = 8
) -> list[Trunk]:
    """The target's own greedy answers, on which drafters are compared.

    Args:
        target: a `Target`.
        asked: (id, set, prompt tokens).
        max_new_tokens: length limit.
        batch_size: prompts answered together.
    """
    options = Options(max_new_tokens, Sampling(), batch_size=batch_size)
    made = decode(target, None, [Request(ids) for _, _, ids in asked], options)
    pairs = zip(asked, made, strict=True)
    return [response_trunk(ids, one.tokens, id, group, 0, one.finished) for (id, group, ids), one in pairs]


def diagnose(
    folder: Path,
    target: Any,
    texts: Sequence[Trunk],
    *,
    bare_texts: Sequence[Trunk] = (),
    advance: Say = lambda done, total: None,
) -> Diagnosis:
    """Try every counterfactual on a checkpoint.

    Args:
        folder: the checkpoint, ours or not.
        target: a `Target`.
        texts: of `greedy_texts`, prompted through the chat template.
        bare_texts: the same prompts without the template, to see whether the drafter was trained so.
        advance: called with (counterfactuals done, in all).

    Raises:
        InputError: the checkpoint cannot be read.
    """
    read = read_as_is(folder, target)
    desk = _Desk(target, texts)
    before = desk.walk(read.drafter)
    tau = acceptance(before).tau_pooled
    tried = [variant for variant in variants(read, target) if not variant.of_engine]
    findings = []
    for n, variant in enumerate(tried):
        findings.append(_finding(variant, before, desk.walk(variant.make())))
        advance(n + 1, len(tried) + bool(bare_texts))
    if bare_texts:
        plain = Variant("prompts without the chat template", "Train on rendered prompts.", lambda: read.drafter)
        findings.append(_finding(plain, before, _Desk(target, bare_texts).walk(read.drafter)))
        advance(len(tried) + 1, len(tried) + 1)
    findings.sort(key=lambda finding: -finding.tau)
    better = [finding for finding in findings if finding.against.difference_interval[0] > 0]
    steps = sum(len(one.committed) for one in before)
    return Diagnosis(tau, None, steps, tuple(findings), better[0] if better else None)


def explain(
    target: Any,
    drafter: Any,
    answers: Sequence[Answer],
    *,
    temperature: float = 0.0,
    head: Any | None = None,
    advance: Say = lambda done, total: None,
) -> Diagnosis:
    """Find the change under which our drafter does what an engine did.

    Args:
        target: a `Target`.
        drafter: what the engine was supposed to serve, bound, in the target's type.
        answers: the engine's, with greedy drafts.
        temperature: they were sampled with.
        head: the readout weight that the served folder brings along, or None.
        advance: called with (counterfactuals done, in all).
    """
    usable = [answer for answer in answers if len(answer.steps) > 1]
    engine = [engine_response(answer, drafter.spec.drafted) for answer in usable]
    read = Read(drafter, None, bool(getattr(drafter, "causal", False)))
    tried = [Variant("nothing changed", "", lambda: drafter), *variants(read, target)]
    if head is not None:
        tried.append(_own_head(drafter, target, Readout(head.to(target.device, target.dtype))))
    desk = _Desk(target, [answer.trunk for answer in usable])
    findings = []
    for n, variant in enumerate(tried):
        changed = variant.make()
        pairs = zip(usable, desk.lessons(changed), strict=True)
        walks = [replay(target, changed, answer, temperature=temperature, lesson=one) for answer, one in pairs]
        differ = sum(not one.tie for walked in walks for one in walked.differences)
        responses = [walked.response for walked in walks]
        pair = paired(engine, responses)
        fix = variant.fix if variant.of_engine else _SEEK
        findings.append(Finding(variant.name, fix, acceptance(responses).tau_pooled, pair, differ))
        advance(n + 1, len(tried))
    as_is, *others = findings
    others.sort(key=lambda finding: (finding.differ or 0, -finding.tau))
    steps = sum(len(one.committed) for one in engine)
    # a wrong fact moves a tenth of the verifications or more; the right one leaves next to none
    found = others and as_is.differ and (others[0].differ or 0) <= 0.1 * as_is.differ
    tau = acceptance(engine).tau_pooled
    return Diagnosis(tau, as_is.differ, steps, tuple(others), others[0] if found else None)


def _own_head(drafter: Any, target: Any, readout: Any) -> Variant:
    def make() -> Any:
        twin = copy.copy(drafter)
        return twin.bind(target.embed, readout)

    return Variant("the lm_head of the served folder", "Leave lm_head.weight out of the file.", make)


class _Desk:
    """The texts with their features, computed once for each choice of layers: most counterfactuals share them."""

    def __init__(self, target: Any, texts: Sequence[Trunk]) -> None:
        self._target, self._texts = target, texts
        self._made: dict[tuple[int, ...], tuple[FeatureStore, list[Lesson]]] = {}

    def _of(self, drafter: Any) -> tuple[FeatureStore, list[Lesson]]:
        taps = drafter.spec.target_layers
        if taps not in self._made:
            store, lessons = FeatureStore(self._target, taps, float("inf")), [Lesson(text) for text in self._texts]
            store.fill(lessons)
            self._made[taps] = store, lessons
        return self._made[taps]

    def lessons(self, drafter: Any) -> list[Lesson]:
        """With features of the drafter's layers."""
        return self._of(drafter)[1]

    def walk(self, drafter: Any) -> list[Response]:
        store, lessons = self._of(drafter)
        return walk(drafter, lessons, store)


def _finding(variant: Variant, before: Sequence[Response], after: Sequence[Response]) -> Finding:
    return Finding(variant.name, variant.fix, acceptance(after).tau_pooled, paired(before, after))
