"""What a run works on: target, prompts, trunks, drafter; and where it stands on disk.

Gathers the rooms below for the stages. Trains nothing.
"""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from draftloop.core.errors import InputError
from draftloop.core.files import fingerprint, write_json
from draftloop.core.version import VERSION
from draftloop.data.overlap import Overlap, ngram_overlap
from draftloop.data.prompts import Prompt, read_prompts, split
from draftloop.drafter.build import new_drafter
from draftloop.drafter.spec import spec_for
from draftloop.formats.zlab import load_drafter
from draftloop.recipe import Recipe, TargetPart
from draftloop.recipe_file import dump_recipe, load_recipe, recipe_differences, recipe_fingerprint
from draftloop.supervise.lesson import FeatureStore, Lesson
from draftloop.supervise.responses import Prepared, prepare_trunks
from draftloop.target.load import load_target
from draftloop.target.model import Target
from draftloop.train.progress import Progress

SPLITS = ("train", "validation", "test")


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
    """

    recipe: Recipe
    folder: Path
    target: Any
    drafter: Any
    prompts: dict[str, list[Prompt]]
    prepared: dict[str, Prepared]
    store: FeatureStore
    quiet: bool = False
    lessons: dict[str, list[Lesson]] = field(init=False)

    def __post_init__(self) -> None:
        self.lessons = {name: [Lesson(trunk) for trunk in part.trunks] for name, part in self.prepared.items()}
        # a conversation that carries its answers cannot be walked; the held-out splits are always answered anew
        self.initial = {name: tensor.detach().clone() for name, tensor in self.drafter.state_dict().items()}

    @property
    def precision(self) -> torch.dtype:
        """Compute type of training."""
        return torch.float32 if self.recipe.precision == "float32" else torch.bfloat16

    @property
    def fingerprints(self) -> dict[str, str]:
        """What must be the same when a run is resumed."""
        tokenizer = self.target.tokenizer
        return {
            "target": self.target.fingerprint,
            "tokenizer": fingerprint(tokenizer.get_vocab() if tokenizer is not None else None),
            "chat template": fingerprint(getattr(tokenizer, "chat_template", None)),
        }

    def overlap(self) -> Overlap | None:
        """N-grams that the test prompts share with the training prompts."""
        if not self.prompts["test"]:
            return None
        return ngram_overlap([p.text for p in self.prompts["train"]], [p.text for p in self.prompts["test"]])


def open_run(recipe: Recipe, folder: Path, *, fresh: bool = False) -> Recipe:
    """Make the run directory, or take up the one that is there.

    Returns:
        the recipe to work by: of a run taken up, the one that it resolved (minutes already turned into steps).

    Raises:
        InputError: the directory holds a run of another recipe.
    """
    note, resolved = folder / "run.json", folder / "recipe.yaml"
    given = recipe_fingerprint(recipe)
    if fresh and note.is_file():
        for stale in ("checkpoints", "rollouts", "stages", "drafter", "tensorboard"):
            _remove(folder / stale)
        for name in (
            "run.json",
            "recipe.yaml",
            "stages.json",
            "summary.json",
            "report.html",
            "metrics.jsonl",
            "raw.jsonl",
        ):
            (folder / name).unlink(missing_ok=True)
    if note.is_file() and resolved.is_file():
        try:
            before = json.loads(note.read_text(encoding="utf-8"))
        except ValueError:
            before = {}
        old = load_recipe(resolved)
        if before.get("recipe") != given:
            changed = "; ".join(recipe_differences(old, recipe)[:3])
            raise InputError(
                f"the directory holds a run of another recipe ({changed})",
                where=str(folder),
                fix="Give another --out, or --fresh to begin anew in this one.",
            )
        return old
    if folder.is_dir() and any(folder.iterdir()) and not note.is_file():
        raise InputError("the directory is not empty and holds no run", where=str(folder), fix="Give another --out.")
    dump_recipe(recipe, resolved)
    write_json(
        note, {"schema": 1, "recipe": given, "command": command(), "versions": versions(), "hardware": hardware()}
    )
    return recipe


def gather(recipe: Recipe, folder: Path, *, quiet: bool = False) -> Material:
    """Load the target, read the prompts, have them answered, build the drafter.

    Raises:
        InputError: any of the recipe's inputs cannot be used.
    """
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    prompts = read_splits(recipe)  # before the target: a wrong file name should not cost a model's loading
    target = load_recipe_target(recipe.target)
    if target.tokenizer is None:
        raise InputError(
            "the target has no tokenizer", where=recipe.target.model, fix="Put its tokenizer files into the folder."
        )
    prepared = {
        name: answer_split(recipe, target, prompts[name], name, folder, quiet=quiet) for name in SPLITS if prompts[name]
    }
    if recipe.drafter.init:
        drafter = load_drafter(recipe.drafter.init, target, dtype=torch.float32)
    else:
        drafter = new_drafter(spec_for(recipe.drafter, target), target, recipe.seed)
    store = FeatureStore(target, drafter.spec.target_layers, recipe.feature_memory_gb * 2**30)
    return Material(recipe, folder, target, drafter, prompts, prepared, store, quiet)


def load_recipe_target(part: TargetPart, dtype: str | None = None) -> Target:
    """The target that a recipe names, in its own type or another."""
    return load_target(
        part.model,
        dtype=dtype or part.dtype,
        device=part.device,
        revision=part.revision,
        trust_remote_code=part.trust_remote_code,
    )


def read_splits(recipe: Recipe) -> dict[str, list[Prompt]]:
    """The prompts of every split; held-out ones are split off the training files where none are named.

    Raises:
        InputError: no training file, or one that cannot be read.
    """
    data = recipe.data
    if not data.train:
        raise InputError(
            "no training prompts are named", where="data.train", fix="Set data.train to one or more prompt files."
        )
    base = Path(data.dir).expanduser()
    parts = {name: read_prompts(getattr(data, name), base, data.limit) for name in SPLITS}
    if not (parts["validation"] and parts["test"]):
        shares = {name: 0.1 if not parts[name] else 0 for name in ("validation", "test")}
        train, validation, test = split(parts["train"], seed=recipe.seed, **shares)
        parts = {"train": train, "validation": parts["validation"] or validation, "test": parts["test"] or test}
    return parts


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
    return " ".join(["draftloop" if name in ("draftloop", "__main__.py") else name, *sys.argv[1:]])


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
    import os

    found: dict[str, Any] = {
        "machine": platform.machine(),
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
    return found


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
