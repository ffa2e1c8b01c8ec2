"""What tests of bad input share: a toy to break, and the demand for one sentence and exit status 2."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import transformers
import yaml

from draftloop.cli import main
from draftloop.drafter.build import new_drafter
from draftloop.drafter.families import spec_for
from draftloop.formats.zlab import save_drafter
from draftloop.recipe import DrafterPart
from draftloop.target.load import load_target
from tests.toy_run import toy_recipe


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """Target, prompts, a recipe of one step, and a drafter that fits."""
    folder = tmp_path_factory.mktemp("toy")
    recipe = toy_recipe(folder)
    recipe["stages"] = [{"name": "s", "method": "sft", "steps": 1, "evaluations": 1}]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    make_drafter(folder / "target", folder / "drafter")
    return folder


def make_drafter(target: Path, out: Path, **shape) -> Path:
    loaded = load_target(target, dtype="float32", device="cpu")
    part = DrafterPart(block_size=4, layers=1, **{"target_layers": [0, 2], **shape})
    return save_drafter(new_drafter(spec_for(part, loaded), loaded), out)


@pytest.fixture
def refused(capsys, tmp_path):
    """Run the command line and demand exit status 2 and one sentence; gives the sentence."""
    transformers.utils.logging.disable_progress_bar()

    def run(*arguments, status=2):
        capsys.readouterr()
        with pytest.raises(SystemExit) as done:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert done.value.code == status, err
        assert not out, out
        lines = err.strip().splitlines()
        assert len(lines) == 1, err
        assert lines[0].startswith("draftloop: ")
        assert lines[0].endswith((".", "?")), lines[0]
        assert "our fault" not in err
        assert "Error" not in err, err  # no name of an exception
        return lines[0]

    return run


@pytest.fixture
def train(refused, toy, tmp_path):
    """`draftloop train` on the toy recipe with overrides; nothing may be left where the run would have been."""

    def run(*overrides, recipe=None, **options):
        told = refused("train", recipe or toy / "recipe.yaml", *overrides, "--out", tmp_path / "run", **options)
        assert not (tmp_path / "run").exists()
        return told

    return run


def assert_names(sentence: str, *words: object) -> None:
    for word in words:
        assert str(word) in sentence, (word, sentence)


def prompts(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return f"data.train=['{path}']"


@pytest.fixture
def copy(toy, tmp_path) -> Path:
    """A copy of the target to break."""
    return Path(shutil.copytree(toy / "target", tmp_path / "copy"))
