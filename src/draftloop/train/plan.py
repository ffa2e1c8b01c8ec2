"""What a run will cost, before it begins: said by every run, and by a dry run, which measures a little.

Knows what a stage holds in memory and puts on the disk. Trains nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftloop.core.draws import key_of
from draftloop.core.law import Sampling
from draftloop.data.chat import encode_turn
from draftloop.data.prompts import Prompt
from draftloop.decode.loop import Decoder
from draftloop.decode.trace import Generation, Options, Request
from draftloop.objective.fused import why_eager
from draftloop.objective.rows import rows_at_once
from draftloop.recipe import Recipe, StagePart
from draftloop.train.inputs import SPLITS, read_inputs
from draftloop.train.material import find_run, load_recipe_drafter, load_recipe_target, run_folder
from draftloop.train.progress import Cost, cost_sheet

_ROUNDS = 8  # decoded to learn what a token costs
_WIDE = 7  # tensors of rows x vocabulary at the peak of a loss and its gradient, by benchmarks/fused.py (ce alone: 3)


def stage_cost(stage: StagePart, target: Any, drafter: Any, trunks: int, mean: float) -> Cost:
    """What a stage will cost, as far as it is known before it runs.

    Args:
        stage: its row of the recipe.
        target: a `Target`.
        drafter: bound.
        trunks: training trunks.
        mean: their mean length in tokens.
    """
    tokens: int | None = None
    anew = {"redraft", "sampled"} | ({"recorded"} if stage.rollout.teacher == "recompute" else set())
    scored = set(stage.mixture) & anew
    if stage.steps is not None:
        tokens = 0
        if stage.trunks == "rollout":
            size = min(stage.rollout.prompts or trunks, trunks)
            tokens += round(-(-stage.steps // stage.rollout.refresh_every) * size * mean)
        branches = stage.anchors_per_sequence * max(0, drafter.spec.drafted - 1)
        tokens += len(scored) * round(stage.steps * stage.accumulate * stage.batch_size * (mean + branches))
    elif stage.trunks == "fixed" and not scored:
        tokens = 0
    weights = sum(p.numel() for p in drafter.parameters()) * 4
    rows = loss_rows(stage, target, drafter, mean)
    return Cost(
        stage.name,
        stage.steps,
        tokens,
        disk_bytes=weights * 5,  # a checkpoint: weights, two moments, the best ones; and the stage's result
        memory_bytes=weights * 5 + rows * target.vocab_size * 4 * _WIDE,
        seconds=stage.minutes * 60 if stage.minutes else None,
        bound=stage.stop.patience is not None,  # it may end before
    )


def loss_rows(stage: StagePart, target: Any, drafter: Any, mean: float) -> int:
    """Rows whose logits a stage's loss holds at a time: a chunk's, but no more than a batch has; 0 where kernels do it.

    Args:
        stage: its row of the recipe.
        target: a `Target`.
        drafter: bound.
        mean: tokens of a training trunk, which has no more anchors than that.
    """
    if eager_reason(stage, target, drafter) is None:
        return 0
    anchors = math.ceil(mean)
    if stage.anchors != "all":
        anchors = min(anchors, stage.anchors_per_sequence)
    batch = stage.batch_size * anchors * drafter.spec.drafted
    return min(rows_at_once(stage.objective.chunk, target.device), batch)


def over_budget(stage: StagePart, drafted: int, lengths: Sequence[int]) -> list[str]:
    """Say that a stage's budget of target tokens will be exceeded, since every sequence keeps one anchor at least.

    Args:
        stage: its row of the recipe.
        drafted: K.
        lengths: of the training trunks, in tokens.
    """
    budget = stage.branch.target_tokens
    if budget is None or stage.trunks != "fixed" or not {"sampled", "redraft"} & set(stage.mixture):
        return []
    most = sum(length + max(1, drafted - 1) for length in sorted(lengths)[-stage.batch_size :])
    if most <= budget:
        return []
    return [
        f"Stage {stage.name}: a forward may take {most} target tokens, more than branch.target_tokens ({budget}):"
        f" {stage.batch_size} sequences have so many with an anchor each. A smaller batch_size would need fewer."
    ]


def eager_reason(stage: StagePart, target: Any, drafter: Any) -> str | None:
    """Why a stage's loss is computed in chunks; None where kernels do it."""
    return why_eager(stage.objective.kernel, [drafter.readout, target.readout], target.device)


def dry_run(
    recipe: Recipe, out: Path | None, say: Callable[[str], None] = print, *, fresh: bool = False
) -> dict[str, Any]:
    """Say what a run of this recipe would do and cost; loads its models, decodes a few tokens, writes nothing.

    Args:
        recipe: as for `train`.
        out: as for `train`.
        say: where sentences go.
        fresh: as for `train`.

    Returns:
        the same as JSON values: folder, begun, prompts by split, costs.

    Raises:
        InputError: any of the recipe's inputs cannot be used, or the directory holds another run.
    """
    folder = run_folder(recipe, out)
    found = find_run(recipe, folder, fresh=fresh)
    prompts = read_inputs(recipe, folder)
    target = load_recipe_target(recipe.target)
    drafter, _ = load_recipe_drafter(recipe, target)
    say(f"{'A run is there, and would be gone on with' if found else 'The run would lie'} in {folder}.")
    counts = {name: len(prompts[name]) for name in SPLITS}
    listed = ", ".join(f"{n} {name}" for name, n in counts.items())
    say(f"Prompts: {listed}; those of validation and test take no part in training.")
    response = recipe.data.response
    longest = {"train": response.max_new_tokens}
    held_out = recipe.evaluate.max_new_tokens or response.max_new_tokens
    longest |= {"validation": held_out, "test": held_out}
    answers, mean = _answers(recipe, target, prompts, longest)
    trunks = sum(response.samples if not _given(recipe, p) else 1 for p in prompts["train"])
    stages = [stage_cost(s, target, drafter, trunks, mean) for s in (found or recipe).stages]
    ends = recipe.evaluate.decode_prompts * 3 + recipe.evaluate.audit_prompts * 3
    costs = [answers, *stages, Cost("measure and audit", tokens=ends * held_out)]
    say(cost_sheet(costs))
    say("Answers seldom reach their greatest length: tokens and time of the first row are the most that they can be.")
    return {"folder": str(folder), "begun": found is not None, "prompts": counts, "costs": [asdict(c) for c in costs]}


def _given(recipe: Recipe, prompt: Prompt) -> bool:
    return prompt.answered and not recipe.data.response.regenerate


def _answers(
    recipe: Recipe, target: Any, prompts: dict[str, list[Prompt]], longest: dict[str, int]
) -> tuple[Cost, float]:
    """What answering will cost at most, and how long a training trunk then is on average."""
    response = recipe.data.response
    each = {"train": response.samples, "validation": 1, "test": 1}
    tokens, rounds = 0, 0
    sample: list[Prompt] = []
    for name in SPLITS:
        asked = [p for p in prompts[name] if name != "train" or not _given(recipe, p)]
        turns = sum((1 + len(p.turns)) * each[name] for p in asked)
        tokens += turns * longest[name]
        rounds += -(-turns // response.batch_size) * longest[name]
        sample += asked[: response.batch_size - len(sample)]
    requests = []
    for prompt in sample:
        ids = encode_turn(target.tokenizer, prompt, [], template_kwargs=recipe.data.template_kwargs)
        if len(ids) <= recipe.data.max_prompt_tokens:  # longer ones are left out
            requests.append(Request(tuple(ids), key_of(prompt.id)))
    mean = sum(len(request.ids) for request in requests) / max(1, len(requests))
    seconds = rounds * _round(target, requests, response.batch_size) if response.server is None else None
    return Cost("answer the prompts", tokens=tokens, seconds=seconds, bound=True), mean + longest["train"]


def _round(target: Any, requests: list[Request], batch: int) -> float:
    """Seconds of one round of plain decoding, a batch of these prompts at a time."""
    if not requests:
        return 0.0
    decoder = Decoder(target, None, Options(_ROUNDS, Sampling(), batch_size=batch), requests)
    try:
        decoder.warm_up()
        made = [Generation(request.ids) for request in requests]
        running = decoder.rounds(requests, made)
        next(running)  # the prompts themselves
        began = time.perf_counter()
        for _ in running:
            pass
        return (time.perf_counter() - began) / max(1, *(len(one.tokens) - 1 for one in made))
    finally:
        decoder.close()
