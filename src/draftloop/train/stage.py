"""One stage of a run: updates, validation walks, checkpoints, and exact resume.

A stage is a row of the method table; nothing here asks which. All choices are functions of (seed, stage, step), so a
run that was killed and taken up again goes the very same way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from draftloop.core.draws import Purpose, key_of, permutation
from draftloop.core.errors import EnvironmentFault, InputError
from draftloop.core.products import training_products
from draftloop.drafter.build import for_decoding
from draftloop.drafter.compiled import compiling
from draftloop.evaluate.tau import acceptance
from draftloop.evaluate.walk import walk
from draftloop.learn.update import Learnt, confidence_weight, differentiate
from draftloop.objective.terms import needs_teacher
from draftloop.recipe import StagePart, StopPart
from draftloop.supervise.batch import Scored, supervise
from draftloop.supervise.lesson import Lesson
from draftloop.supervise.rollout import load_rollout, roll_out, save_rollout
from draftloop.train.checkpoint import Best, State, save
from draftloop.train.expect import EVERY, Expected
from draftloop.train.halt import Halted, heeding
from draftloop.train.material import Material
from draftloop.train.metrics import MetricsLog
from draftloop.train.optimiser import DrafterOptimiser
from draftloop.train.progress import Progress
from draftloop.train.schedule import learning_rate_factor

_WARM_UPS = 3
_MEASURED = 0.03  # of a stage's minutes may go into learning what a step costs


@dataclass
class StageOutcome:
    """What a stage leaves: its best drafter by validation and the account of how it got there.

    Attributes:
        steps: those made, which `stop` may have cut short.
        tensors: the drafter's parameters.
        chosen_step: the step they come from.
        tau: their acceptance length on the validation trunks.
        splits: per position [accepted, first rejected, later rejected, blocks without rejection], over the stage.
    """

    name: str
    steps: int
    labels: int
    seconds: float
    chosen_step: int
    tau: float
    tensors: dict[str, Tensor]
    validation: list[dict[str, float]] = field(default_factory=list)
    splits: list[list[int]] = field(default_factory=list)


class StageRun:
    """Trains one stage.

    Args:
        material: target, lessons, drafter.
        index: which stage of the recipe.
        start: the drafter's weights at the beginning.
        metrics: where numbers go.
    """

    def __init__(self, material: Material, index: int, start: dict[str, Tensor], metrics: MetricsLog) -> None:
        self.material, self.index, self.metrics = material, index, metrics
        self.ranks = material.ranks
        self.part: StagePart = material.recipe.stages[index]
        self.drafter = material.drafter
        self.drafter.load_state_dict(start)
        self.drafter.train().requires_grad_(True)
        self.optimiser = DrafterOptimiser(self.drafter.named_parameters(), self.part.optimiser)
        self.key = key_of(self.part.name)
        self.step, self.labels, self.seconds = 0, 0, 0.0
        self.best: Best | None = None
        self.validation: list[dict[str, float]] = []
        self.splits = [[0] * self.drafter.spec.drafted for _ in range(4)]
        self.lessons: list[Lesson] = material.lessons["train"] if self.part.trunks == "fixed" else []
        self.rollouts = material.folder / "rollouts"
        self.rolled = -1  # which rollout the lessons are
        self.parts = 1  # and of how many processes
        self.expected = Expected(self.part, self.ranks)

    def resume(self, state: State) -> None:
        """Go on from a checkpoint of this stage."""
        self.drafter.load_state_dict(state.drafter)
        self.optimiser.load(state.optimiser)
        self.step, self.labels, self.seconds, self.best = state.step, state.labels, state.seconds, state.best
        self.validation, self.splits = state.extra["validation"], state.extra["splits"]
        self.expected.resume(state.extra.get("expected", []), self.material.target.device)
        if state.extra["rolled"] >= 0:
            self.rolled, self.parts = state.extra["rolled"], state.extra["parts"]
            self.lessons = [one for file in self._rollout_files() for one in self._read(file)]

    @property
    def stopped(self) -> bool:
        """Whether tau on validation has not risen for as many walks as `stop` has patience."""
        return exhausted([point["tau_pooled"] for point in self.validation], self.part.stop)

    def run(self) -> StageOutcome:
        """Train until the last step, or until `stop` ends the stage.

        Raises:
            EnvironmentFault: out of memory, or the disk is full; the last checkpoint is intact.
            Halted: by Ctrl-C or SIGTERM to any of the processes; the last whole step is saved.
            InputError: nothing to learn from, or the loss is no longer finite.
        """
        steps = self.part.steps
        assert steps is not None, "minutes are turned into steps before a stage starts"
        looks = {max(1, round(steps * (i + 1) / self.part.evaluations)) for i in range(self.part.evaluations)}
        keep = self.part.checkpoint_every
        if self.part.stop.patience is not None and not self.validation:
            self._look(self._walk())  # what the stage begins with: the first to compare with, and no result of it
        shown = Progress(f"train {self.part.name}", steps, done=self.step, silent=self.material.quiet)
        with shown as progress, heeding(speak=self.ranks.first) as halt:
            while self.step < steps and not self.stopped:
                began = time.perf_counter()
                if self._refresh():
                    self.save()
                learnt, norm, factor = self._update(steps)
                self.step += 1
                self.labels += learnt.labels
                self.seconds += time.perf_counter() - began
                self.metrics.write(
                    "train",
                    stage=self.part.name,
                    step=self.step,
                    loss=learnt.loss,
                    **{f"loss_{name}": value for name, value in learnt.terms.items()},
                    lr=self.part.optimiser.lr * factor,
                    grad_norm=norm,
                    labels=self.labels,
                    seconds=self.seconds,
                )
                if self.step % EVERY == 0:
                    self.expected.write(self.metrics, self.step)
                tau = self._validate() if self.step in looks else None
                if saved := (self.step % keep == 0) if keep else tau is not None:
                    self.save()
                progress.update(self.step, loss=learnt.loss, tau=tau)
                if asked := max(self.ranks.merge([halt.asked])):
                    if not saved:
                        self.save(midway=True)
                    self.ranks.barrier()  # a launcher ends the others as soon as one has gone
                    raise Halted(asked)
        assert self.best is not None
        return StageOutcome(
            self.part.name,
            self.step,
            self.labels,
            self.seconds,
            self.best.step,
            self.best.tau,
            self.best.tensors,
            self.validation,
            self.splits,
        )

    def measure(self, minutes: float) -> int:
        """Turn a time budget into steps, from the measured cost of a step, a validation walk and a rollout.

        Nothing is updated, and every draw is keyed, so the steps that follow are those of a run with fixed steps.
        """
        began = time.perf_counter()
        rolled = self._refresh()
        rollout = time.perf_counter() - began if rolled else 0.0
        each = self._step_seconds(_MEASURED * minutes * 60)
        look = min(_seconds(self._walk) for _ in range(2))
        for parameter in self.drafter.parameters():
            parameter.grad = None
        self.expected = Expected(self.part, self.ranks)
        looks = self.part.evaluations + (self.part.stop.patience is not None)
        budget = minutes * 60 - looks * look
        each *= 1.08  # the optimiser's own share is not measured
        steps = int(budget / each)
        if rolled:  # n steps need ceil(n / refresh_every) rollouts
            every = self.part.rollout.refresh_every
            within = max((n for n in range(steps) if n * each + -(-n // every) * rollout <= budget), default=1)
            # half the time goes into steps, whatever a rollout costs: a stage of rollouts alone would teach nothing
            steps = max(within, int(budget / 2 / each))
        return self.ranks.once(lambda: max(self.part.evaluations, steps))  # the first one's, for clocks differ

    def _step_seconds(self, budget: float) -> float:
        """The usual cost of a step: of those timed the later half, for the first ones allocate and compile."""
        for step in range(_WARM_UPS):
            self._gradient(step)
        costs: list[float] = []
        began = time.perf_counter()
        while len(costs) < 5 or self.ranks.once(lambda: len(costs) < 60 and time.perf_counter() - began < budget):
            costs.append(_seconds(partial(self._gradient, _WARM_UPS + len(costs))))
        return statistics.median(costs[len(costs) // 2 :])

    def _update(self, steps: int) -> tuple[Learnt, float, float]:
        learnt = self._gradient(self.step)
        factor = learning_rate_factor(self.part.optimiser, self.step, steps)
        norm = self.optimiser.step(learnt.loss, factor, self.step + 1)
        for split in learnt.splits:
            counts = (split.accepted, split.first_rejected, split.later_rejected, split.unrejected_blocks)
            for mine, more in zip(self.splits, counts, strict=True):
                mine[:] = [a + b for a, b in zip(mine, more.tolist(), strict=True)]
        return learnt, norm, factor

    def _gradient(self, step: int) -> Learnt:
        try:
            with compiling(f"stage {self.part.name}"), training_products(self.material.precision):
                parts = [self._batch(step, i) for i in range(self.part.accumulate)]
                batches = [batch for batch in parts if batch is not None]
                learnt = differentiate(
                    self.part.objective,
                    batches,
                    self.drafter,
                    self.material.target.readout,
                    self.material.precision,
                    self.ranks,
                )
            self.expected.add(batches, learnt)
            return learnt
        except torch.OutOfMemoryError as error:
            raise EnvironmentFault(
                "out of memory in training",
                where=f"stage {self.part.name}",
                fix="Lower batch_size, anchors_per_sequence or objective.chunk, and resume with the same command.",
            ) from error

    def _batch(self, step: int, micro: int) -> Scored | None:
        """The micro-batch that step and place name: epochs are keyed permutations of the lessons, end to end.

        With several processes its share, or None where there are fewer lessons than processes.
        """
        size, count = self.part.batch_size, len(self.lessons)
        since = step
        if self.part.trunks == "rollout":
            since = step % self.part.rollout.refresh_every
        first = (since * self.part.accumulate + micro) * size
        places = range(first, first + size)
        orders = {e: self._order(step, e, count) for e in {p // count for p in places}}
        picked = list(dict.fromkeys(int(orders[p // count][p % count]) for p in places))  # a lesson once a batch
        lessons = [self.lessons[i] for i in self.ranks.share(picked)]
        if not lessons:
            return None
        for lesson in lessons:  # each alone: in a shared forward its rows would depend on what else was missing yet,
            self.material.store.fill([lesson])  # which after a resume is something else
        return supervise(
            self.part,
            lessons,
            [step * self.part.accumulate + micro] * len(lessons),
            target=self.material.target,
            drafter=self.drafter,
            store=self.material.store,
            seed=self.material.recipe.seed ^ self.key,
            need_teacher=needs_teacher(self.part.objective, confidence_weight(self.part.objective, self.drafter)),
            precision=self.material.precision,
            together=[self.lessons[i] for i in picked],
        )

    def _order(self, step: int, epoch: int, count: int) -> Tensor:
        refresh = step // self.part.rollout.refresh_every if self.part.trunks == "rollout" else 0
        return permutation(self.material.recipe.seed, Purpose.ORDER, count, self.key, refresh, epoch)

    def _refresh(self) -> bool:
        """Roll trunks out anew when it is time; whether that was done."""
        part = self.part.rollout
        count = self.step // part.refresh_every
        if self.part.trunks != "rollout" or count == self.rolled:
            return False
        pool = self.material.prepared["train"].trunks
        size = min(part.prompts or len(pool), len(pool))
        order = permutation(self.material.recipe.seed, Purpose.ORDER, len(pool), self.key, count, -1)
        began = time.perf_counter()
        made = roll_out(
            self.material.target,
            for_decoding(self.drafter, self.material.target),
            [pool[i] for i in order[:size].tolist()],
            part,
            max_new_tokens=part.max_new_tokens or self.material.recipe.data.response.max_new_tokens,
            seed=self.material.recipe.seed,
            visit=count,
            ranks=self.ranks,
        )
        self.rolled, self.parts = count, self.ranks.world
        files = self._rollout_files()
        save_rollout(files[self.ranks.rank], made)
        self.ranks.barrier()
        parts = [made if i == self.ranks.rank else self._read(file) for i, file in enumerate(files)]
        self.lessons = [lesson for part in parts for lesson in part]
        steps = [step for lesson in self.lessons for step in lesson.steps]
        self.metrics.write(
            "rollout",
            stage=self.part.name,
            step=self.step,
            responses=len(self.lessons),
            verifications=len(steps),
            tau_pooled=sum(step.committed for step in steps) / len(steps),
            seconds=time.perf_counter() - began,
        )
        return True

    def _rollout_files(self) -> list[Path]:
        """Where the present rollout is: a file of each process that took part, which need not be as many as now."""
        name = f"{self.part.name}-{self.rolled:04d}"
        if self.parts == 1:
            return [self.rollouts / f"{name}.safetensors"]
        return [self.rollouts / f"{name}.rank{rank}of{self.parts}.safetensors" for rank in range(self.parts)]

    def _read(self, file: Path) -> list[Lesson]:
        return load_rollout(file, self.material.target.device)

    def _walk(self) -> float:
        lessons = self.material.lessons.get("validation")
        if not lessons:
            raise InputError(
                "there are no validation prompts",
                where="data.validation",
                fix="Give some, or more training prompts to split them from.",
            )
        served = for_decoding(self.drafter, self.material.target)
        return acceptance(self.ranks.merge(walk(served, self.ranks.share(lessons), self.material.store))).tau_pooled

    def _look(self, tau: float) -> None:
        self.validation.append({"step": self.step, "tau_pooled": tau, "seconds": self.seconds})
        self.metrics.write("validation", stage=self.part.name, step=self.step, tau_pooled=tau, seconds=self.seconds)

    def _validate(self) -> float:
        tau = self._walk()
        self._look(tau)
        if self.best is None or tau > self.best.tau:
            tensors = {name: tensor.detach().cpu().clone() for name, tensor in self.drafter.state_dict().items()}
            self.best = Best(self.step, tau, tensors)
        return tau

    def save(self, *, midway: bool = False) -> None:
        """Write a checkpoint; then let go of rollouts that it does not need. The first process does.

        Args:
            midway: at a step at which a run that is not stopped saves nothing, so that metrics must not show it.
        """
        if not midway:
            self.expected.write(self.metrics, self.step)
        expected = self.expected.pending()
        if not self.ranks.first:
            return
        state = State(
            self.index,
            self.step,
            {name: tensor.detach() for name, tensor in self.drafter.state_dict().items()},
            self.optimiser.tensors(),
            self.material.fingerprints,
            self.best,
            self.labels,
            self.seconds,
            {
                "validation": self.validation,
                "splits": self.splits,
                "rolled": self.rolled,
                "parts": self.parts,
                "metrics": self.metrics.position(),
                "expected": expected,
            },
        )
        save(self.material.folder / "checkpoints", state)
        needed = self._rollout_files()
        for file in self.rollouts.glob("*.safetensors"):
            if file not in needed:
                file.unlink(missing_ok=True)


def exhausted(taus: Sequence[float], stop: StopPart) -> bool:
    """Whether a stage ends, by what its validation walks found.

    Args:
        taus: of the walks in order, the one before the first step included.
        stop: the stage's patience, and how much a rise is.
    """
    if stop.patience is None or not taus:
        return False
    highest, waited = taus[0], 0
    for tau in taus[1:]:
        better = tau > highest + stop.rise
        highest, waited = (tau, 0) if better else (highest, waited + 1)
    return waited >= stop.patience


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
