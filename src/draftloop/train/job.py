"""A whole run: stages in order, the best drafter chosen on validation and reported on test, the summary written.

Killed at any moment, the same command goes on where it was. Holds no training step and no statistic of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from draftloop.core.errors import InputError
from draftloop.core.files import write_json
from draftloop.core.ranks import together
from draftloop.core.weights import read_tensors, write_tensors
from draftloop.drafter.build import for_decoding
from draftloop.drafter.families import FAMILIES
from draftloop.drafter.spec import has_learned_mask
from draftloop.evaluate.report import write_report
from draftloop.formats.mask_vector import MASK
from draftloop.formats.zlab import save_drafter
from draftloop.recipe import Recipe
from draftloop.recipe_file import dump_recipe
from draftloop.recipe_idle import idle_cells
from draftloop.train.checkpoint import State, load
from draftloop.train.final import conclude
from draftloop.train.halt import Halted
from draftloop.train.material import Material, find_run, gather, run_folder
from draftloop.train.metrics import MetricsLog, SilentLog
from draftloop.train.plan import eager_reason, over_budget, stage_cost
from draftloop.train.progress import cost_sheet
from draftloop.train.stage import StageOutcome, StageRun

Say = Callable[[str], None]


def train(
    recipe: Recipe, *, out: Path | None = None, fresh: bool = False, quiet: bool = False, say: Say = print
) -> Path:
    """Run a recipe to its end and leave a run directory; processes that a launcher started do it together.

    Args:
        recipe: what to do.
        out: run directory; default: the recipe's `out`, else runs/NAME. A run of the same recipe there is gone on with.
        fresh: begin anew in a directory that holds a run.
        quiet: no progress.
        say: where sentences for the user go.

    Returns:
        the run directory: drafter/, summary.json, report.html, metrics.jsonl, raw.jsonl, recipe.yaml.

    Raises:
        InputError: the recipe's inputs cannot be used, or the directory holds another run.
        EnvironmentFault: memory or disk is exhausted, or another of the processes is gone.
        KeyboardInterrupt, SystemExit: Ctrl-C or SIGTERM; while a stage trains, once its step is done and saved.
    """
    if not recipe.stages:
        raise InputError(
            "the recipe has no stages, so there is nothing to train",
            where="stages",
            fix="Add one, e.g. {name: sft, method: sft, steps: 1000}.",
        )
    unbounded = [stage.name for stage in recipe.stages if stage.steps is None and stage.minutes is None]
    if unbounded:
        raise InputError(f"stage {unbounded[0]!r} has no end", where="stages", fix="Give it steps or minutes.")
    double = [stage.name for stage in recipe.stages if stage.steps is not None and stage.minutes is not None]
    if double:
        raise InputError(
            f"stage {double[0]!r} has both steps and minutes",
            where="stages",
            fix="Set one of them to null; in the recipe.yaml of a run, steps are what its minutes came to.",
        )
    folder = run_folder(recipe, out)
    with together(recipe.target.device) as ranks:
        say = say if ranks.first else _silence
        found, complete = ranks.once(lambda: _found(recipe, folder, fresh))
        if complete:
            say(f"The run in {folder} is complete; --fresh would begin it anew.")
            return folder
        began = time.monotonic()
        material = gather(found or recipe, folder, new=found is None, quiet=quiet or not ranks.first, ranks=ranks)
        try:
            _run(material, began, say)
            material.store.close()
        finally:
            material.release()
    return folder


def _silence(text: str) -> None:
    """What a process says that is not the first."""


def _found(recipe: Recipe, folder: Path, fresh: bool) -> tuple[Recipe | None, bool]:
    """The run to go on with, if any, and whether it is complete."""
    found = find_run(recipe, folder, fresh=fresh)
    complete = found is not None and (folder / "summary.json").is_file()
    if complete and not (folder / "report.html").is_file():  # killed between the two
        write_report(folder)
    return found, complete


def _run(material: Material, began: float, say: Say) -> None:
    """All stages, then the end; `began` = monotonic time at which this attempt began."""
    folder = material.folder
    say(_size_up(material))
    if how := _kernels(material):
        say(how)
    drafted, lengths = material.drafter.spec.drafted, [len(trunk) for trunk in material.prepared["train"].trunks]
    for stage in material.recipe.stages:
        for line in [*idle_cells(stage), *over_budget(stage, drafted, lengths)]:
            say(line)
    material.read_ahead()
    trunks = material.prepared["train"].trunks
    mean = sum(map(len, trunks)) / len(trunks)
    sizes = (material.target, material.drafter, len(trunks), mean)
    say(cost_sheet([stage_cost(stage, *sizes) for stage in material.recipe.stages]))
    earlier = _seconds(folder)
    outcomes = _stages(material, say, earlier - began)
    if material.ranks.first:
        _deliver(material, outcomes, began - earlier, say)
    material.ranks.barrier()  # the run directory is complete, whoever looks


def _deliver(material: Material, outcomes: list[StageOutcome], began: float, say: Say) -> None:
    """Save the best drafter, measure it, write the summary and the report; `began` as if there were one attempt."""
    folder = material.folder
    delivered = max(outcomes, key=lambda outcome: outcome.tau)
    served = with_weights(material, delivered.tensors)
    part = next(stage for stage in material.recipe.stages if stage.name == delivered.name)
    extra = {"stage": part.name, "objective": part.objective.kind}
    save_drafter(served, folder / "drafter", dtype=material.target.dtype, extra=extra)
    if has_learned_mask(served.spec):
        say(
            f"The drafter's learned mask vector is in drafter/{MASK}; vLLM and SGLang read one only from"
            " mask_embedding.pt, which `draftloop export` writes."
        )
    conclude(material, outcomes, delivered, time.monotonic() - began, say)
    write_report(folder)


def with_weights(material: Material, tensors: dict[str, Tensor]) -> Any:
    """The run's drafter with these weights, as it is served (a copy in the target's type)."""
    material.drafter.load_state_dict(tensors)
    return for_decoding(material.drafter, material.target)


def _size_up(material: Material) -> str:
    """What the run works on, in a sentence or two."""
    target, spec, parts = material.target, material.drafter.spec, material.prepared
    count = sum(p.numel() for p in material.drafter.parameters())
    lines = [
        f"Target {target.name} ({target.num_layers} layers, {target.dtype}, {target.device});"
        f" {FAMILIES[spec.family].title} drafter of {count / 1e6:.1f} M parameters,"
        f" {spec.layers} layer{'s' * (spec.layers != 1)}, taps {list(spec.target_layers)}, block {spec.block_size}."
    ]
    if material.made_before.get("target_fingerprint", target.fingerprint) != target.fingerprint:
        before = material.made_before
        lines.append(
            f"The drafter was made for {before.get('target')} ({before['target_fingerprint']}); from here on it learns"
            f" {target.name} ({target.fingerprint})."
        )
    if has_learned_mask(spec):
        part = material.recipe.drafter
        chosen = part.init is None and part.mask_token is None
        why = "The target's vocabulary has no unused token, so the" if chosen else "The"
        lines.append(f"{why} drafted slots hold a learned mask vector instead of a token's embedding.")
    told = [
        f"{len(part.trunks)} {name} responses ({sum(trunk.supervised for trunk in part.trunks):,} tokens)"
        for name, part in parts.items()
    ]
    lines.append("; ".join(told) + ".")
    dropped = sum(len(p.too_long) + len(p.too_short) for p in parts.values())
    if dropped:
        lines.append(f"{dropped} prompts were left out (too long, or answered with fewer than two tokens).")
    disk = material.recipe.feature_disk_gb
    if disk:
        lines.append(f"Up to {disk:g} GB of trunk features may lie in features/ until the run is complete.")
    lines.append(f"{material.overlap()}")
    return "\n".join(lines)


def _kernels(material: Material) -> str:
    """How each stage's loss is computed, where there is a choice."""
    lines = []
    for stage in material.recipe.stages:
        reason = eager_reason(stage, material.target, material.drafter)
        if material.target.device.type == "cuda" or reason is None:
            how = (
                "by Triton kernels"
                if reason is None
                else f"in chunks of {stage.objective.chunk} rows, because {reason}"
            )
            lines.append(f"Stage {stage.name}: readout and loss {how}.")
    return "\n".join(lines)


def _stages(material: Material, say: Say, clock: float) -> list[StageOutcome]:
    """Run or take up every stage; `clock` + monotonic time = seconds that the run has taken."""
    folder, recipe = material.folder, material.recipe
    done: list[StageOutcome] = _finished(folder)
    for one in done:
        say(f"Stage {one.name} was finished before: validation tau {one.tau:.3f} at step {one.chosen_step}.")
    state: State | None = load(folder / "checkpoints", material.fingerprints)
    position = int(_account(folder)["metrics"])
    here = state if state is not None and state.stage == len(done) else None
    first = material.ranks.first
    metrics = MetricsLog(folder, keep=here.extra["metrics"] if here else position) if first else SilentLog()
    with metrics:
        for index in range(len(done), len(recipe.stages)):
            part = recipe.stages[index]
            run = StageRun(material, index, _start(material, done, part.start), metrics)
            if here is not None:
                run.resume(here)
                say(f"Going on with stage {part.name} at step {run.step} of {part.steps}.")
                here = None
            elif part.steps is None:
                assert part.minutes is not None
                part.steps = run.measure(part.minutes)
                if first:
                    dump_recipe(recipe, folder / "recipe.yaml")
                say(f"Stage {part.name}: {part.minutes:g} minutes are {part.steps} steps here.")
            try:
                outcome = run.run()
            except Halted as halted:
                say(f"Stage {part.name}: step {run.step} of {part.steps} is saved, and the same command goes on there.")
                raise halted.ending from None
            done.append(outcome)
            if first:
                _note_down(folder, done, metrics.position(), clock + time.monotonic())
            say(
                f"Stage {part.name}: validation tau {outcome.tau:.3f} at step {outcome.chosen_step} of {outcome.steps}."
            )
            if run.stopped:
                say(
                    f"Stage {part.name} ended at step {outcome.steps} of {part.steps}: tau on validation had not risen"
                    f" by more than {part.stop.rise:g} in {part.stop.patience} walks."
                )
    return done


def _note_down(folder: Path, done: list[StageOutcome], position: int, seconds: float) -> None:
    """Write what the stage that is just done leaves: its weights, and the account of all that are."""
    write_tensors(folder / "stages" / f"{done[-1].name}.safetensors", done[-1].tensors)
    record = [{k: v for k, v in asdict(one).items() if k != "tensors"} for one in done]
    write_json(folder / "stages.json", {"schema": 1, "metrics": position, "seconds": seconds, "stages": record})


def _account(folder: Path) -> dict[str, Any]:
    """What stages.json tells of the stages that are done."""
    path = folder / "stages.json"
    none: dict[str, Any] = {"metrics": 0, "seconds": 0.0, "stages": []}
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else none


def _seconds(folder: Path) -> float:
    return float(_account(folder)["seconds"])


def _finished(folder: Path) -> list[StageOutcome]:
    return [
        StageOutcome(**one, tensors=read_tensors(folder / "stages" / f"{one['name']}.safetensors"))
        for one in _account(folder)["stages"]
    ]


def _start(material: Material, done: list[StageOutcome], name: str) -> dict[str, Tensor]:
    """The weights that a stage begins with."""
    if name == "init" or (name == "previous" and not done):
        return material.initial
    return done[-1].tensors if name == "previous" else next(one.tensors for one in done if one.name == name)
