"""An engine's steps against our drafter's, on the engine's own text.

With greedy drafts a drafted token survives if and only if it is the token that was committed there, at any temperature:
what replaces a rejected draft d is drawn from max(0, p - 1[d]), which gives d no mass (Leviathan et al. 2211.17192). So
how much of each draft the engine accepted is a function of its text and of the drafter, and our drafter, walked over
that text (`replay`), must accept the same, step by step. No draws need to agree for it.

Knows laws, texts and counts; starts no engine and reads no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from draftloop.core.law import Sampling
from draftloop.data.trunk import Trunk, response_trunk
from draftloop.decode.rules import leading
from draftloop.evaluate.tau import Response
from draftloop.evaluate.walk import drafted_rows, walk
from draftloop.supervise.lesson import FeatureStore, Lesson

# Logits closer than this share of the largest may change places by rounding. In float32 it was never needed (2,900
# verifications of vLLM, no near-tie). The bfloat16 value, two units in the last place, is reckoned, not measured.
TIE = {torch.float64: 1e-9, torch.float32: 5e-5, torch.bfloat16: 2.0**-6}


@dataclass(frozen=True)
class Answer:
    """What an engine committed for one prompt.

    Attributes:
        id: of the prompt.
        set: its prompt set.
        prompt: its tokens.
        tokens: of the response, end-of-sequence included.
        steps: tokens committed by each engine step, the prefill's one token first.
        drafts: the engine's own count of verifications.
        accepted: its own count of accepted drafts, those behind a cut included.
        stopped: it says that the response ended by end-of-sequence.
        seconds: wall-clock.
    """

    id: str
    set: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    steps: tuple[int, ...]
    drafts: int
    accepted: int
    stopped: bool
    seconds: float = 0.0

    @property
    def trunk(self) -> Trunk:
        """Prompt and response as one text."""
        return response_trunk(self.prompt, self.tokens, self.id, self.set, 0, self.stopped)


def faults(answer: Answer, *, drafted: int, max_new_tokens: int, eos: Sequence[int], always: bool = True) -> list[str]:
    """What contradicts itself in an engine's account of one response; each a clause.

    Args:
        answer: the account.
        drafted: K.
        max_new_tokens: length limit.
        eos: tokens that end a response.
        always: whether every step drafts; n-gram lookup often finds nothing.
    """
    found = []
    tokens, steps = answer.tokens, answer.steps
    if sum(steps) != len(tokens):
        found.append(f"its steps commit {sum(steps)} tokens, its text has {len(tokens)}")
    if not steps or steps[0] != 1:
        found.append(f"its prefill commits {steps[0] if steps else 0} tokens, not one")
    if any(not 1 <= n <= drafted + 1 for n in steps[1:]):
        found.append(f"a step commits more than the {drafted} drafts and one token, or none")
    if answer.drafts != len(steps) - 1 if always else answer.drafts > len(steps) - 1:
        found.append(f"it counts {answer.drafts} verifications and took {len(steps) - 1} steps behind the prefill")
    ends = [place for place, token in enumerate(tokens) if token in eos]
    if ends and ends[0] != len(tokens) - 1:
        found.append(f"its text goes on for {len(tokens) - 1 - ends[0]} tokens behind end-of-sequence")
    if not ends and len(tokens) != max_new_tokens:
        found.append(f"its text ends at {len(tokens)} tokens without end-of-sequence, the limit being {max_new_tokens}")
    if not ends and answer.stopped:
        found.append("it says that end-of-sequence was reached, which its text does not hold")
    rest = answer.accepted - sum(n - 1 for n in steps[1:-1])
    if len(steps) > 1 and not steps[-1] - 1 <= rest <= drafted:
        found.append(f"it counts {answer.accepted} accepted drafts, which its steps contradict")
    return found


def engine_response(answer: Answer, drafted: int) -> Response:
    """The engine's verify steps, counted as ours are: a last step that was cut commits drafts only.

    Whether the last token of the last step was a draft is not in the text; the engine's count of accepted drafts says.
    """
    committed = answer.steps[1:]
    accepted = [n - 1 for n in committed]
    if committed:
        rest = answer.accepted - sum(accepted[:-1])
        accepted[-1] = min(max(rest, committed[-1] - 1), committed[-1], drafted)
    return Response(answer.id, answer.set, tuple(committed), tuple(accepted), drafted)


@dataclass(frozen=True)
class StepDifference:
    """A verification at which our drafter would have fared otherwise than the engine's.

    Attributes:
        prompt: id.
        step: index of the verification, from 0.
        position: index in the response of the first token on which the two drafts differ.
        engine: drafts that the engine accepted.
        ours: drafts that ours would have had accepted.
        drafted: what our drafter drafts there.
        committed: the token that stands there.
        drafter_gap: how far our drafter's logit of the other choice (the committed token, or, if ours drafted that,
            the runner-up) lies below its largest.
        target_gap: between the target's two largest logits there.
        tie: the drafter's gap is within rounding (`TIE`).
    """

    prompt: str
    step: int
    position: int
    engine: int
    ours: int
    drafted: int
    committed: int
    drafter_gap: float
    target_gap: float
    tie: bool

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Replay:
    """Our drafter over one engine text.

    Attributes:
        response: the steps that our decoding would have taken under the engine's draws.
        differences: engine steps at which our drafter accepts another number of drafts.
        law_sum: sum over the response of log p(token) + entropy of p; its mean is 0 if the tokens were drawn from p,
            the target's law at `temperature`. None at temperature 0.
        law_variance: of that sum, under p.
        off_law: at temperature 0, (position, gap) of every token that is not the target's argmax.
    """

    response: Response
    differences: tuple[StepDifference, ...]
    law_sum: float | None
    law_variance: float | None
    off_law: tuple[tuple[int, float], ...]


@torch.no_grad()
def replay(target: Any, drafter: Any, answer: Answer, *, temperature: float, lesson: Lesson | None = None) -> Replay:
    """Walk our drafter over an engine's text.

    Args:
        target: a `Target`.
        drafter: bound, in the target's type (`for_decoding`).
        answer: of the engine, with greedy drafts.
        temperature: that the engine sampled with.
        lesson: of the answer's trunk, with features of the drafter's layers; None = they are computed.
    """
    store = FeatureStore(target, drafter.spec.target_layers, float("inf"))
    lesson = lesson or Lesson(answer.trunk)
    response = walk(drafter, [lesson], store)[0]
    store.fill([lesson])
    assert lesson.hidden is not None
    rows = lesson.hidden[lesson.trunk.first - 1 :]  # one for each response token
    text = torch.tensor(answer.tokens, device=rows.device)
    law_sum: float | None = None
    law_variance: float | None = None
    off_law: tuple[tuple[int, float], ...] = ()
    if temperature:
        law_sum, law_variance = _law_score(target.readout, rows, text, temperature)
    else:
        off_law = tuple(_off_argmax(target.readout, rows, text))
    renamed = Response(answer.id, answer.set, response.committed, response.accepted, response.drafted)
    return Replay(renamed, tuple(_differences(target, drafter, lesson, answer)), law_sum, law_variance, off_law)


def _differences(target: Any, drafter: Any, lesson: Lesson, answer: Answer) -> list[StepDifference]:
    """Compare every engine step from the engine's own anchor, so that one difference does not shift the next."""
    theirs = engine_response(answer, drafter.spec.drafted)
    if not theirs.committed or sum(answer.steps) != len(answer.tokens):
        return []  # the latter is a fault, and then no step has a place
    first, last = lesson.trunk.first, len(lesson.trunk) - 1
    places = [first]
    for n in theirs.committed[:-1]:
        places.append(places[-1] + n)
    anchors = torch.tensor(places, device=target.device)
    hidden, after = drafted_rows(drafter, lesson, anchors)
    out = []
    for i, (place, engine) in enumerate(zip(places, theirs.accepted, strict=True)):
        logits = drafter.readout.logits(hidden[i])
        choice = logits.argmax(-1)
        run = min(int(leading((choice == after[i]).unsqueeze(0))[0]), last - place)
        if run == engine:
            continue
        filled = run == engine + 1 and place + run == last and int(after[i, engine]) == getattr(drafter, "filler", None)
        if filled:  # n-gram lookup proposed nothing there, which at the text's end looks like an accepted draft
            continue
        slot = min(run, engine)
        at = place + 1 + slot
        token = int(after[i, slot])
        top = logits[slot].topk(2).values
        gap = float(top[0] - (top[1] if int(choice[slot]) == token else logits[slot, token]))
        assert lesson.hidden is not None
        best = target.readout.logits(lesson.hidden[at - 1 : at])[0].topk(2).values
        out.append(
            StepDifference(
                answer.id, i, at - first, engine, run, int(choice[slot]), token, gap, float(best[0] - best[1]),
                gap <= tie_gap(target.dtype, float(top[0])),
            )
        )  # fmt: skip
    return out


def tie_gap(dtype: torch.dtype, largest: float) -> float:
    """How close to the largest logit another must lie for rounding to put it first."""
    return TIE[dtype] * max(abs(largest), 1.0)


def _law_score(readout: Any, rows: Tensor, tokens: Tensor, temperature: float) -> tuple[float, float]:
    """Sum of log p(token) + entropy, and its variance sum Var_p(log p): a martingale if the tokens follow p."""
    total, variance = 0.0, 0.0
    for part, mine in zip(rows.split(256), tokens.split(256), strict=True):
        log_p = Sampling(temperature).log_probs(readout.logits(part)).double()
        p = log_p.exp()
        mean = (p * log_p).sum(-1)
        total += float((log_p.gather(-1, mine.unsqueeze(-1)).squeeze(-1) - mean).sum())
        variance += float(((p * log_p.square()).sum(-1) - mean.square()).sum())
    return total, variance


def _off_argmax(readout: Any, rows: Tensor, tokens: Tensor) -> list[tuple[int, float]]:
    """(position, gap) of the tokens that are not the largest logit."""
    out = []
    for start in range(0, len(tokens), 256):
        logits = readout.logits(rows[start : start + 256])
        mine = logits.gather(-1, tokens[start : start + 256].unsqueeze(-1)).squeeze(-1)
        best = logits.amax(-1)
        for i in (logits.argmax(-1) != tokens[start : start + 256]).nonzero().flatten().tolist():
            out.append((start + i, float(best[i] - mine[i])))
    return out


def first_parting(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Where two responses first differ (an end counts); None where they are the same."""
    for place, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return place
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def answers_of(
    rows: Sequence[Mapping[str, Any]], asked: Mapping[str, tuple[str, str, tuple[int, ...]]]
) -> list[Answer]:
    """The worker's rows as answers.

    Args:
        rows: of one temperature, each named as it was asked.
        asked: name -> (prompt id, set, prompt tokens).
    """
    return [
        Answer(
            *asked[row["name"]], tuple(row["tokens"]), tuple(row["steps"]), row["counters"]["drafts"],
            row["counters"]["accepted"], row["finish"] == "stop", row["seconds"],
        )
        for row in rows
        if row.get("kind") == "row" and row["name"] in asked
    ]  # fmt: skip


def recorded_answers(
    rows: Sequence[Mapping[str, Any]], prompts: Mapping[tuple[str, str], tuple[int, ...]], temperature: float
) -> list[Answer]:
    """The engine's answers as the rows of `parity.jsonl` keep them, for a diagnosis.

    Args:
        rows: of the file.
        prompts: (set, id) -> tokens; answers to others are left out.
        temperature: of the answers wanted.
    """
    return [
        Answer(
            row["id"],
            row["set"],
            prompts[row["set"], row["id"]],
            tuple(row["tokens"]),
            (1, *row["committed"]),
            len(row["committed"]),
            sum(row["accepted"]),
            False,
        )
        for row in rows
        if row.get("arm") == "engine"
        and row["temperature"] == temperature
        and not row["faults"]
        and (row["set"], row["id"]) in prompts
    ]
