"""What a Python program calls: load, generate, prepare, train, evaluate, audit.

Puts the rooms together; does no work of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from draftloop.core.draws import key_of
from draftloop.core.errors import InputError
from draftloop.core.files import check_writable
from draftloop.core.law import Sampling
from draftloop.data.chat import answer_text, encode_prompt
from draftloop.data.prompts import Prompt, read_prompts
from draftloop.decode.loop import check_confidence, decode, rounds
from draftloop.decode.trace import Generation, Options, Request
from draftloop.drafter.build import for_decoding
from draftloop.evaluate import audit as _audit
from draftloop.evaluate import speed as _speed
from draftloop.evaluate.answers import check_lengths, evaluation_trunks
from draftloop.evaluate.compare import compare
from draftloop.evaluate.offline import offline
from draftloop.evaluate.tau import Acceptance, Paired, Response, Tally, acceptance, paired
from draftloop.evaluate.walk import responses_of, walk
from draftloop.formats.load import load_drafter
from draftloop.formats.zlab import save_drafter
from draftloop.recipe import Recipe
from draftloop.recipe_file import load_recipe
from draftloop.supervise.lesson import FeatureStore, Lesson
from draftloop.supervise.responses import Prepared
from draftloop.target.load import load_target
from draftloop.target.model import Target
from draftloop.train.adapt import adapt, adapt_recipe
from draftloop.train.inputs import SPLITS, read_splits
from draftloop.train.job import train
from draftloop.train.material import alone, answer_split, begin_run, find_run, load_recipe_target, run_folder

Ask = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Reply:
    """One answer.

    Attributes:
        text: decoded, special tokens left out.
        tokens: end-of-sequence included.
        finished: ended by end-of-sequence, not by the length limit.
        tau: tokens committed per target verification; None without one.
        trace: everything that was recorded.
    """

    text: str
    tokens: tuple[int, ...]
    finished: bool
    tau: float | None
    trace: Generation


@dataclass(frozen=True)
class Piece:
    """What one prompt gained in one round of a streamed generation."""

    index: int
    text: str
    tokens: tuple[int, ...]
    done: bool


@dataclass(frozen=True)
class Evaluation:
    """Acceptance on prompts and, where decoding was real, its speed.

    Attributes:
        acceptance: tau in both definitions, by set and position.
        how: `walk` (fixed greedy trunks), `offline` (fixed trunks at any temperature) or `decode`.
        speed: plain and speculative tokens per second, round cost; None where nothing was decoded.
        against: the further drafters of an offline evaluation: acceptance, and how it differs from the first one's.
        rows: of each drafter, what was counted (or, offline, is expected) of every response, as JSON objects.
    """

    acceptance: Acceptance
    how: Literal["walk", "offline", "decode"]
    speed: dict[str, Any] | None
    against: tuple[tuple[Acceptance, Paired], ...] = ()
    rows: tuple[list[dict[str, Any]], ...] = ()


def generate(
    target: Target,
    prompts: Sequence[Ask],
    *,
    drafter: Any | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    rule: Literal["match", "ratio"] = "match",
    seed: int = 0,
    batch_size: int = 16,
    confidence: float | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[Reply]:
    """Answer prompts, speculatively if a drafter is given; losslessly either way.

    Args:
        target: from `load_target`.
        prompts: each a user's message, or chat messages.
        drafter: from `load_drafter`; None = plain decoding.
        max_new_tokens: length limit.
        temperature: 0 = greedy.
        top_k: 0 = all.
        top_p: 1 = all.
        rule: how drafts are verified at a temperature above 0.
        seed: of the keyed draws; the same seed gives the same answers in any batch (float32).
        batch_size: prompts decoded together.
        confidence: verify drafts only while the product of the drafter's confidences is at least this; None = all.
        template_kwargs: passed to the chat template.

    Raises:
        InputError: an option is out of range, or a prompt cannot be rendered or does not fit.
    """
    requests = _requests(target, prompts, template_kwargs or {})
    sampling = Sampling(temperature, top_k, top_p)
    options = Options(max_new_tokens, sampling, rule, seed=seed, batch_size=batch_size, confidence=confidence)
    return [_reply(target, made) for made in decode(target, _served(drafter, target), requests, options)]


def generate_stream(
    target: Target, prompts: Sequence[Ask], *, drafter: Any | None = None, **options: Any
) -> Iterator[Piece]:
    """As `generate`, but yield each prompt's new text after every round, as it is committed.

    Args:
        target: from `load_target`.
        prompts: each a user's message, or chat messages.
        drafter: from `load_drafter`, or None.
        options: as `generate`'s.
    """
    sampling = Sampling(options.pop("temperature", 0.0), options.pop("top_k", 0), options.pop("top_p", 1.0))
    requests = _requests(target, prompts, options.pop("template_kwargs", None) or {})
    results = [Generation(request.ids) for request in requests]
    shown = [""] * len(requests)
    chosen = Options(sampling=sampling, **options)
    for commits in rounds(target, _served(drafter, target), requests, chosen, results):
        for commit in commits:
            text = answer_text(target.tokenizer, results[commit.index].tokens, target.eos_ids)
            if not commit.done and text.endswith("\ufffd"):
                text = shown[commit.index]  # half a character: wait for the rest
            yield Piece(commit.index, text[len(shown[commit.index]) :], commit.tokens, commit.done)
            shown[commit.index] = text


def prepare(recipe: Recipe, *, out: Path | None = None, quiet: bool = False) -> dict[str, Prepared]:
    """Read a recipe's prompts and have the target answer them; resumable, and `train` takes up the result.

    Args:
        recipe: as for `train`.
        out: run directory; default: the recipe's.
        quiet: no progress.

    Returns:
        trunks by split.

    Raises:
        InputError: the prompts or the target cannot be used.
    """
    folder = run_folder(recipe, out)
    found = find_run(recipe, folder)
    prompts = read_splits(recipe)
    check_writable(folder)
    target = load_recipe_target(recipe.target)
    with alone(folder):
        if found is None:
            begin_run(recipe, folder)
        return {name: answer_split(recipe, target, prompts[name], name, folder, quiet=quiet) for name in SPLITS}


def evaluate(
    target: Target,
    drafter: Any,
    prompts: Sequence[str],
    *,
    folder: Path,
    how: Literal["walk", "offline", "decode"] = "walk",
    against: Sequence[Any] = (),
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    rule: Literal["match", "ratio"] = "match",
    batch_size: int = 1,
    confidence: float | None = None,
    limit: int | None = None,
    seed: int = 0,
    template_kwargs: Mapping[str, Any] | None = None,
    advance: Any = lambda done, total: None,
) -> Evaluation:
    """Measure a drafter's acceptance on prompt files.

    Args:
        target: from `load_target`.
        drafter: from `load_drafter`, bound to the target.
        prompts: prompt files (or `builtin:test`).
        folder: where the target's answers are kept, so that the next drafter is evaluated in seconds.
        how: `walk` walks fixed greedy trunks (temperature 0, exact, fast); `offline` averages over what decoding would
            do on answers drawn once at the temperature (exact given the answers, fast); `decode` decodes for real and
            is timed.
        against: further drafters, compared with the first on the same answers (`offline` only).
        max_new_tokens: length limit.
        temperature: of the target; a walk's is 0.
        top_k: 0 = all.
        top_p: 1 = all.
        rule: how drafts are verified at a temperature above 0.
        batch_size: of real decoding.
        confidence: as `generate`'s; not offline.
        limit: use at most this many prompts.
        seed: of the keyed draws.
        template_kwargs: passed to the chat template.
        advance: called with (done, in all).

    Raises:
        InputError: a walk at a temperature above 0, `confidence` offline or without a confidence head, drafters to
            compare without `offline`, or prompts that cannot be used.
    """
    if against and how != "offline":
        raise InputError("several drafters are compared offline only", fix='Use how="offline" (--offline).')
    sampling = Sampling(temperature, top_k, top_p)
    if how == "walk" and not sampling.greedy:
        raise InputError(
            "a walk is exact at temperature 0 only",
            fix="Evaluate offline (--offline) or decode for real (--decode) at other temperatures.",
        )
    if confidence is not None and how == "offline":
        raise InputError("confidence is not for offline", fix="Walk, or decode for real (--decode).")
    options = Options(max_new_tokens, sampling, rule, seed=seed, batch_size=batch_size, confidence=confidence)
    check_confidence(drafter, options)
    read = read_prompts(list(prompts), Path("."), limit)
    served = for_decoding(drafter, target)
    if how != "decode":
        trunks = evaluation_trunks(
            target,
            read,
            prompts,
            folder,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            template_kwargs=template_kwargs,
            advance=advance,
        )
        if how == "walk":
            store = FeatureStore(target, served.spec.target_layers, 0)
            walked = walk(served, [Lesson(t) for t in trunks], store, confidence=confidence)
            return Evaluation(acceptance(walked), "walk", None, rows=(_rows("walk", walked),))
        arms = [served, *(for_decoding(other, target) for other in against)]
        found = offline(target, arms, trunks, options)
        compared = tuple((acceptance(other), paired(found[0], other)) for other in found[1:])
        return Evaluation(
            acceptance(found[0]), "offline", None, compared, tuple(_rows("offline", one) for one in found)
        )
    check_lengths(target, read, max_new_tokens, template_kwargs or {})
    requests = _requests(target, [list(p.question) for p in read], template_kwargs or {}, read)
    named = [(p.id, p.set, request) for p, request in zip(read, requests, strict=True)]
    plain, timed = _speed.compare(target, [("drafter", served)], named, options, advance=advance)
    speed = {
        "batch_size": batch_size,
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": len(named),
        "max_new_tokens": max_new_tokens,
        "plain": {"tokens_per_s": plain.tokens_per_s, "ms_per_token": plain.ms_per_round},
        "arms": [timed[0].to_json()],
    }
    return Evaluation(timed[0].acceptance, "decode", speed, rows=(_rows("decode", timed[0].responses),))


def audit(
    target: Target,
    drafter: Any,
    prompts: Sequence[Ask],
    *,
    max_new_tokens: int = 64,
    batch_size: int = 8,
    confidence: float | None = None,
) -> _audit.Audit:
    """Compare greedy speculative decoding with plain decoding, token for token.

    Args:
        target: loaded with dtype float32 (in bfloat16, rounding decides ties by the shape of the batch).
        drafter: from `load_drafter`, bound to the target.
        prompts: each a user's message, or chat messages.
        max_new_tokens: length limit.
        batch_size: prompts decoded together.
        confidence: as `generate`'s.

    Raises:
        InputError: the target is not float32, or the drafter has no confidence to go by.
    """
    if target.dtype not in (torch.float32, torch.float64):
        raise InputError("the audit needs the target in float32", where=target.name, fix="Load it with dtype float32.")
    requests = [(f"prompt {i + 1}", request) for i, request in enumerate(_requests(target, prompts, {}))]
    served = for_decoding(drafter, target)
    arms = [("drafter", served)]
    return _audit.audit(
        target, arms, requests, max_new_tokens=max_new_tokens, batch_size=batch_size, confidence=confidence
    )


def _requests(
    target: Target, prompts: Sequence[Ask], template_kwargs: Mapping[str, Any], named: Sequence[Prompt] | None = None
) -> list[Request]:
    if isinstance(target, str):
        raise InputError("the target is a name, not a loaded target", fix="Load it first: load_target(...).")
    if target.tokenizer is None:
        raise InputError("the target has no tokenizer", where=target.name, fix="Pass one to load_target.")
    if isinstance(prompts, str) or any(isinstance(ask, Mapping) for ask in prompts):
        raise InputError("prompts is one prompt, not a list of them", fix="Write [prompt].")
    out = []
    asked: Counter[str] = Counter()  # a prompt given twice wants two samples, not one sample twice
    for i, ask in enumerate(prompts):
        messages = [{"role": "user", "content": ask}] if isinstance(ask, str) else [dict(m) for m in ask]
        tools = named[i].tools if named else None
        ids = encode_prompt(target.tokenizer, messages, template_kwargs=template_kwargs, tools=tools)
        name = named[i].id if named else str(ask)
        out.append(Request(tuple(ids), key_of(name), asked[name]))
        asked[name] += 1
    return out


def _rows(kind: str, responses: Sequence[Response | Tally]) -> list[dict[str, Any]]:
    return [{"kind": kind, **one.to_json()} for one in responses]


def _served(drafter: Any | None, target: Target) -> Any | None:
    return for_decoding(drafter, target) if drafter is not None else None


def _reply(target: Target, made: Generation) -> Reply:
    text = answer_text(target.tokenizer, made.tokens, target.eos_ids)
    steps = responses_of([made], [("", "")], max((len(s.proposed) for s in made.steps), default=0))[0].committed
    return Reply(text, tuple(made.tokens), made.finished, sum(steps) / len(steps) if steps else None, made)


__all__ = [
    "Evaluation",
    "Piece",
    "Reply",
    "adapt",
    "adapt_recipe",
    "audit",
    "compare",
    "evaluate",
    "generate",
    "generate_stream",
    "load_drafter",
    "load_recipe",
    "load_target",
    "prepare",
    "save_drafter",
    "train",
]
