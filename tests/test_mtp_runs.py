"""Whole runs of the mtp family on a toy: a graft, and a native head that is trained further; resume; the command line."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from draftloop.formats.export import export
from draftloop.formats.load import load_drafter
from draftloop.formats.mtp import tensors_of
from draftloop.formats.zlab import save_drafter
from draftloop.recipe_file import load_recipe
from draftloop.target.load import load_target
from draftloop.train.job import train
from draftloop.train.metrics import read_metrics, same_but_timings
from tests.hybrid_tiny import hybrid_model
from tests.mtp_tiny import mtp_drafter
from tests.toy_run import toy_recipe, toy_tokenizer

pytestmark = pytest.mark.families

STAGES = [
    {"name": "sft", "method": "sft", "steps": 4, "evaluations": 1, "optimiser": {"lr": 3e-3}},
    {
        "name": "opd", "method": "draft-opd", "steps": 2, "evaluations": 1,
        "rollout": {"refresh_every": 1, "batch_size": 6},
    },
]  # fmt: skip
CHECKS = {"decode_prompts": 1, "audit_prompts": 1}


def prepared(folder: Path, drafter: dict) -> Path:
    recipe = toy_recipe(folder, drafter=drafter, stages=STAGES, evaluate=CHECKS)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("toy"), {"family": "mtp", "block_size": 4})


@pytest.fixture(scope="module")
def whole(toy) -> Path:
    return train(load_recipe(toy / "recipe.yaml"), out=toy / "whole", quiet=True, say=lambda line: None)


def hybrid_checkpoint(folder: Path) -> Path:
    """A Qwen3.5 with a tokenizer, whose checkpoint holds no head."""
    tokenizer = toy_tokenizer()
    eos = tokenizer.eos_token_id
    hybrid_model(
        "qwen3_5", vocab_size=len(tokenizer), eos_token_id=eos, pad_token_id=eos, bos_token_id=None
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def cli(*arguments: object) -> str:
    command = [sys.executable, "-m", "draftloop.cli", *(str(one) for one in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_graft_is_trained_measured_and_delivered(toy, whole):
    summary = json.loads((whole / "summary.json").read_text(encoding="utf-8"))
    assert summary["drafter"]["target_layers"] == [4]
    target = load_target(toy / "target", dtype="float32")
    drafter = load_drafter(whole / "drafter", target)
    assert drafter.spec.family == "mtp"
    assert set(load_file(whole / "drafter/model.safetensors")) >= {"mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"}


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_as_if_never_stopped(toy, whole):
    class Stopped(Exception):
        pass

    def stop(line: str) -> None:
        if "opd" in line and "sft" not in line:
            raise Stopped

    with contextlib.suppress(Stopped):
        train(load_recipe(toy / "recipe.yaml"), out=toy / "again", quiet=True, say=stop)
    train(load_recipe(toy / "recipe.yaml"), out=toy / "again", quiet=True, say=lambda line: None)
    assert same_but_timings(read_metrics(whole / "metrics.jsonl"), read_metrics(toy / "again/metrics.jsonl"))


@pytest.mark.slow
def test_the_command_line_evaluates_and_audits_it(toy, whole):
    told = cli(
        "evaluate", whole, "--target", toy / "target", "--dtype", "float32", "--prompts", toy / "test.jsonl", "--json"
    )
    assert json.loads(told)
    cli("audit", whole, "--target", toy / "target", "--prompts", toy / "test.jsonl")
    served = hybrid_checkpoint(toy / "served")
    drafter = mtp_drafter(load_target(served, dtype="float32"))
    save_drafter(drafter, toy / "drafter")
    told = cli("export", toy / "drafter", "--target", served, "--out", toy / "export", "--for", "vllm", "--json")
    assert json.loads(told)["form"] == "mtp"


def test_a_native_head_is_trained_further_and_exported(tmp_path):
    """The target's own head is where the run begins; what is exported is read in its place."""
    folder = prepared(tmp_path, {"family": "mtp", "init": "native", "block_size": 3})
    target = folder / "target"
    for file in target.glob("*.safetensors"):
        file.unlink()
    begun = mtp_drafter(load_target(hybrid_checkpoint(target), dtype="float32"), 3, loud=1.0)
    stored = load_file(target / "model.safetensors") | tensors_of(begun, torch.float32, target)[0]
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    out = train(load_recipe(folder / "recipe.yaml"), out=folder / "run", quiet=True, say=lambda line: None)
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert "init" in json.dumps(summary)
    made = export(load_drafter(out / "drafter"), folder / "export", engine="vllm", target_name=str(target))
    assert "mtp" in made.commands["vllm"][-1]
    head = load_file(folder / "export/model.safetensors")
    assert {name for name in stored if name.startswith("mtp.")} == set(head)
    reply = load_drafter("native", load_target(target, dtype="float32"), block_size=3)
    assert torch.equal(reply.fc.weight, begun.fc.weight)  # the target's own folder is left alone
