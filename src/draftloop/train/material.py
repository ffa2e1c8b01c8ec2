"""What a run works on: target, prompts, trunks, drafter; and where it stands on disk.

Gathers the rooms below for the stages. Trains nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shlex
import shutil
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from draftloop.core.errors import InputError
from draftloop.core.files import fingerprint, write_json, writing_fault
from draftloop.core.ranks import Ranks, launched
from draftloop.core.version import VERSION
from draftloop.data.overlap import Overlap, ngram_overlap
from draftloop.data.prompts import Prompt
from draftloop.drafter.build import meet_answers, new_drafter
from draftloop.drafter.compiled import compile_layers
from draftloop.drafter.families import spec_for
from draftloop.drafter.mtp import MTPSpec, computed_by
from draftloop.drafter.spec import made_for
from draftloop.formats.load import load_drafter
from draftloop.learn.update import confidence_weight
from draftloop.objective.fused import why_eager
from draftloop.recipe import DrafterPart, Recipe, TargetPart
from draftloop.recipe_file import dump_recipe, load_recipe, recipe_differences, recipe_fingerprint
from draftloop.supervise.disk import files_of
from draftloop.supervise.lesson import FeatureStore, Lesson
from draftloop.supervise.responses import Prepared, prepare_trunks
from draftloop.target.load import load_target
from draftloop.target.model import Target
from draftloop.train.inputs import SPLITS, read_inputs
from draftloop.train.progress import Progress


@dataclass
class Material:
    """Everything a stage may use.

    Attributes:
        recipe: resolved.
        folder: the run directory.
        target: the verifier.
        drafter: in float32, bound; a stage loads its starting weights into it.
        prompts: by split.
        prepared: trunks by split, and what was left out.
        lessons: by split; features are computed when first needed.
        store: where features come from.
        quiet: no progress.
        ranks: the processes that train together; the run directory is the first one's to write.
        made_before: what a drafter that was given says of the target that it was made for; else nothing.
    """

    recipe: Recipe
    folder: Path
    target: Any
    drafter: Any
    prompts: dict[str, list[Prompt]]
    prepared: dict[str, Prepared]
    store: FeatureStore
    quiet: bool = False
    ranks: Ranks = field(default_factory=Ranks)
    made_before: dict[str, Any] = field(default_factory=dict)
    lessons: dict[str, list[Lesson]] = field(init=False)

    def hold(self, lock: ExitStack) -> None:
        """Keep the run directory to ourselves until `release`, or until nobody needs this any more."""
        self._lock = weakref.finalize(self, lock.close)

    def release(self) -> None:
        """Let other processes into the run directory."""
        self._lock()

    def __post_init__(self) -> None:
        self.lessons = {name: [Lesson(trunk) for trunk in part.trunks] for name, part in self.prepared.items()}
        self.initial = {name: tensor.detach().clone() for name, tensor in self.drafter.state_dict().items()}

    @property
    def precision(self) -> torch.dtype:
        """Compute type of training."""
        return torch.float32 if self.recipe.precision == "float32" else torch.bfloat16

    @property
    def begins_as(self) -> str:
        """Name of the drafter that the run begins with: one that was given is not untrained."""
        return "init" if self.recipe.drafter.init else "untrained"

    @property
    def fingerprints(self) -> dict[str, str]:
        """What must be the same when a run is resumed."""
        tokenizer = self.target.tokenizer
        return {
            "target": self.target.fingerprint,
            "tokenizer": fingerprint(tokenizer.get_vocab() if tokenizer is not None else None),
            "chat template": fingerprint(getattr(tokenizer, "chat_template", None)),
            "set of prompts": fingerprint(
                [[[p.id, p.set, p.messages, p.turns, p.tools] for p in self.prompts[name]] for name in SPLITS]
            ),
        }

    def read_ahead(self) -> None:
        """Compute the features of all fixed trunks at once where the budget holds them.

        What does not fit is computed lesson by lesson.
        """
        fixed = any(stage.trunks == "fixed" for stage in self.recipe.stages)
        wanted = [one for name, part in self.lessons.items() if name != "train" or fixed for one in part]
        if not self.store.fits(wanted):
            return
        with Progress("read the trunks", len(wanted), unit="trunks", silent=self.quiet) as progress:
            for done in self.store.read_ahead(wanted):
                progress.update(done)

    def overlap(self) -> Overlap:
        """N-grams that the test prompts share with the training prompts."""
        return ngram_overlap([p.text for p in self.prompts["train"]], [p.text for p in self.prompts["test"]])


def run_folder(recipe: Recipe, out: Path | None) -> Path:
    """The run directory: the one that is asked for, else the recipe's, else runs/NAME."""
    return out or Path(recipe.out or f"runs/{recipe.name}")


def find_run(recipe: Recipe, folder: Path, *, fresh: bool = False) -> Recipe | None:
    """Look whether a run of this recipe is to be gone on with; writes nothing.

    Returns:
        the recipe that it resolved (minutes already turned into steps), or None where a run is to begin: in a new
        directory, with `fresh`, or where one of another recipe has not begun to train.

    Raises:
        InputError: the directory holds a run of another recipe, or something else.
    """
    note, resolved = folder / "run.json", folder / "recipe.yaml"
    if not note.is_file():
        # a first write that was killed leaves a hidden part
        if folder.is_dir() and any(not path.name.endswith(".part") for path in folder.iterdir()):
            raise InputError(
                "the directory is not empty and holds no run", where=str(folder), fix="Give another --out."
            )
        return None
    if fresh or not resolved.is_file():
        return None
    begun = any((folder / name).exists() for name in ("checkpoints", "stages.json", "summary.json"))
    try:
        before = json.loads(note.read_text(encoding="utf-8")).get("recipe")
    except (ValueError, AttributeError) as error:
        if begun:
            raise InputError(
                "the note that says which recipe this run is of is damaged",
                where=str(note),
                fix="Put it back from a copy, give another --out, or --fresh to begin anew in this one.",
            ) from error
        before = None
    old = load_recipe(resolved)
    if before == recipe_fingerprint(recipe):
        return old
    if not begun:
        return None
    changed = _changes(old, recipe)
    shown = changed[:3] + ([f"and {len(changed) - 3} more"] if len(changed) > 3 else [])
    raise InputError(
        f"the directory holds a run of another recipe ({'; '.join(shown)})",
        where=str(folder),
        fix="Give another --out, or --fresh to begin anew in this one.",
    )


@contextmanager
def alone(folder: Path) -> Iterator[ExitStack]:
    """Hold a run directory (made where missing) against other processes, until the stack that is yielded closes.

    Raises:
        InputError: another process holds it.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY)
        except OSError as error:
            raise writing_fault(error, folder) from error
        stack.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            fix = "Wait for it, stop it, or give another --out."
            raise InputError("another process works in this directory", where=str(folder), fix=fix) from error
        yield stack


def begin_run(recipe: Recipe, folder: Path) -> None:
    """Make the run directory, without what an earlier run left there but for the target's answers."""
    (folder / "recipe.yaml").unlink(missing_ok=True)  # first: without it nobody takes up what is half removed
    for stale in ("checkpoints", "rollouts", "stages", "drafter", "tensorboard", "features"):
        shutil.rmtree(folder / stale, ignore_errors=True)
    for name in ("stages.json", "summary.json", "report.html", "metrics.jsonl", "raw.jsonl"):
        (folder / name).unlink(missing_ok=True)
    note = {"schema": 1, "recipe": recipe_fingerprint(recipe), "command": command()}
    write_json(folder / "run.json", {**note, "versions": versions(), "hardware": hardware()})
    dump_recipe(recipe, folder / "recipe.yaml")


def _changes(old: Recipe, new: Recipe) -> list[str]:
    """Differences of two recipes, without the steps that minutes were turned into."""
    new = new.model_copy(deep=True)
    for before, now in zip(old.stages, new.stages, strict=False):
        if now.steps is None and now.minutes is not None and now.minutes == before.minutes:
            now.steps = before.steps
    return recipe_differences(old, new)


def gather(recipe: Recipe, folder: Path, *, new: bool, quiet: bool = False, ranks: Ranks | None = None) -> Material:
    """Load the target, read the prompts, build the drafter, have the prompts answered.

    Args:
        recipe: resolved.
        folder: the run directory; nothing is written there before all inputs are known to be usable.
        new: begin the run.
        quiet: no progress.
        ranks: the processes that train together; the first holds the directory and has the prompts answered.

    Raises:
        InputError: any of the recipe's inputs cannot be used.
    """
    ranks = ranks or Ranks()
    prompts = read_inputs(recipe, folder)
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    target = load_recipe_target(recipe.target)
    drafter, before = load_recipe_drafter(recipe, target)
    if recipe.compile_drafter:
        compile_layers(drafter)
    for stage in recipe.stages:  # refuses kernels that cannot be had here, and a weight for a head that is not there
        why_eager(stage.objective.kernel, [drafter.readout, target.readout], target.device)
        confidence_weight(stage.objective, drafter)
    with alone(folder) if ranks.first else ExitStack() as lock:
        if new and ranks.first:
            begin_run(recipe, folder)
        prepared = ranks.once(
            lambda: {name: answer_split(recipe, target, prompts[name], name, folder, quiet=quiet) for name in SPLITS}
        )
        if not recipe.drafter.init:
            meet_answers(drafter, (trunk.answered for trunk in prepared["train"].trunks), target)
        keep = any(stage.branch.state == "keep" for stage in recipe.stages)
        store = FeatureStore(
            target,
            drafter.spec.target_layers,
            recipe.feature_memory_gb * 2**30,
            keep_state=keep,
            files=files_of(folder / "features", recipe.feature_disk_gb * 2**30, ranks.rank, ranks.world),
        )
        material = Material(recipe, folder, target, drafter, prompts, prepared, store, quiet, ranks, before)
        material.hold(lock.pop_all())
    return material


def load_recipe_target(part: TargetPart, dtype: str | None = None) -> Target:
    """The target that a recipe names, in its own type or another.

    Raises:
        InputError: it cannot be used, or has no tokenizer.
    """
    target = load_target(
        part.model,
        dtype=dtype or part.dtype,
        device=part.device,
        revision=part.revision,
        trust_remote_code=part.trust_remote_code,
    )
    if target.tokenizer is None:
        raise InputError(
            "the target has no tokenizer", where=part.model, fix="Put its tokenizer files into the folder."
        )
    target.tree_attention = part.tree_attention
    target.engine = part.engine
    return target


def load_recipe_drafter(recipe: Recipe, target: Target) -> tuple[Any, dict[str, Any]]:
    """The drafter that a run begins with, in float32; and whom one that was given says that it was made for.

    Raises:
        InputError: it cannot be used.
    """
    if not recipe.drafter.init:
        return new_drafter(spec_for(recipe.drafter, target), target, recipe.seed), {}
    size = recipe.drafter.block_size
    drafter = load_drafter(recipe.drafter.init, target, dtype=torch.float32, block_size=size, to_train=True)
    family = recipe.drafter.family
    if family not in (DrafterPart().family, drafter.spec.family):  # the default says nothing of what is wanted
        raise InputError(
            f"{recipe.drafter.init} is a drafter of family {drafter.spec.family}, and the recipe wants {family}",
            where="drafter.family",
            fix=f"Leave out drafter.init for a new {family} drafter, or set drafter.family to {drafter.spec.family}.",
        )
    _note_shape(recipe.drafter, drafter.spec)
    before = drafter.spec.made_for
    if (engine := recipe.drafter.served_by) is not None:
        if not isinstance(drafter.spec, MTPSpec):
            what = f"served_by is for mtp, and {recipe.drafter.init} is a drafter of family {drafter.spec.family}"
            raise InputError(what, where="drafter.served_by", fix="Leave it out.")
        drafter.spec = computed_by(drafter.spec, engine)
    drafter.spec = replace(drafter.spec, made_for=made_for(target))
    return drafter, before


def _note_shape(part: DrafterPart, spec: Any) -> None:
    """Say which cells have no effect because the drafter that is begun with has another shape."""
    own = {name: getattr(spec, name) for name in ("block_size", "layers", "heads", "kv_heads", "head_dim",
                                                  "intermediate_size")}  # fmt: skip
    own |= {"target_layers": list(spec.target_layers), "taps": len(spec.target_layers)}
    idle = [f"{name} is {value}, not {given}" for name, value in own.items()
            if (given := getattr(part, name)) not in (None, value, DrafterPart.model_fields[name].default)]  # fmt: skip
    if idle:
        warnings.warn(f"drafter.init: {part.init} keeps its own shape: {', '.join(idle)}", stacklevel=2)


def answer_split(
    recipe: Recipe, target: Any, prompts: list[Prompt], name: str, folder: Path, *, quiet: bool
) -> Prepared:
    """Trunks of one split. Held-out splits are answered greedily, which the fast evaluation needs."""
    data = recipe.data
    if name != "train":
        response = data.response.model_copy(
            update={
                "regenerate": True,
                "max_new_tokens": recipe.evaluate.max_new_tokens or data.response.max_new_tokens,
            }
        )
        data = data.model_copy(update={"response": response})
    with Progress(f"answer the {name} prompts", len(prompts), unit="responses", silent=quiet) as progress:
        return prepare_trunks(
            target,
            prompts,
            data,
            folder / "trunks" / f"{name}.jsonl",
            seed=recipe.seed,
            greedy=name != "train",
            advance=lambda done, total: progress.update(done),
        )


def command() -> str:
    """The command line of this process, as a user would type it."""
    name = Path(sys.argv[0]).name
    ours = name in ("draftloop", "__main__.py")
    if ours and launched() > 1:
        return f"torchrun --nproc-per-node {launched()} -m draftloop.cli {shlex.join(sys.argv[1:])}".rstrip()
    return shlex.join(["draftloop" if ours else name, *sys.argv[1:]])


def versions() -> dict[str, str]:
    """Exact versions of what computes."""
    found = {"python": platform.python_version(), "draftloop": VERSION}
    for package in ("torch", "transformers", "tokenizers", "safetensors", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def hardware() -> dict[str, Any]:
    """The machine, as far as it bears on speed."""
    found: dict[str, Any] = {
        "machine": platform.machine(),
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if launched() > 1:
        found["processes"] = launched()
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
    return found
