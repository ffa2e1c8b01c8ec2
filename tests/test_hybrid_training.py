"""A whole run on a hybrid target folder: answers, SFT, SpecOPD on branches, evaluation, audit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from draftloop.core.files import write_text
from draftloop.recipe_file import load_recipe
from draftloop.target.load import load_target
from draftloop.train import job
from draftloop.train.job import train
from tests.hybrid_tiny import hybrid_model
from tests.toy_run import toy_recipe, toy_tokenizer

pytestmark = pytest.mark.hybrid


def speaking(kind: str, tokenizer):
    """A hybrid of the tokenizer's vocabulary."""
    eos = tokenizer.eos_token_id
    return hybrid_model(kind, vocab_size=len(tokenizer), eos_token_id=eos, pad_token_id=eos, bos_token_id=None)


def hybrid_checkpoint(folder: Path, kind: str) -> None:
    tokenizer = toy_tokenizer()
    speaking(kind, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


STAGES = [
    {"name": "sft", "method": "sft", "steps": 6, "evaluations": 1, "optimiser": {"lr": 3e-3}},
    {"name": "specopd", "method": "specopd", "start": "sft", "steps": 4, "evaluations": 1, "anchors_per_sequence": 4},
    {
        "name": "opd", "method": "draft-opd", "start": "sft", "steps": 4, "evaluations": 1,
        "rollout": {"refresh_every": 4, "batch_size": 6},
    },
]  # fmt: skip


@pytest.mark.parametrize(("kind", "state"), [("qwen3_next", "recompute"), ("qwen3_5", "keep"), ("qwen4_exp", "keep")])
def test_a_run_from_a_folder_ends_lossless(tmp_path, monkeypatch, kind, state):
    monkeypatch.setattr(job, "write_report", lambda folder: write_text(folder / "report.html", "not drawn"))
    stages = [{**one, **({"branch": {"state": state}} if one["method"] == "specopd" else {})} for one in STAGES]
    recipe = toy_recipe(tmp_path, stages=stages)
    hybrid_checkpoint(tmp_path / "target", kind)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    train(load_recipe(tmp_path / "recipe.yaml", ()), out=tmp_path / "run", quiet=True, say=lambda line: None)
    found = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert [stage["name"] for stage in found["stages"]] == ["untrained", "sft", "specopd", "opd"]
    assert found["lossless"] is True
    assert found["audit"]["tokens"] > 0
    assert all(stage["tau_pooled"] >= 1 for stage in found["stages"])


def test_the_decoder_of_a_model_that_also_sees_is_the_target(tmp_path):
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    tokenizer = toy_tokenizer()
    text = speaking("qwen3_5", tokenizer)
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, patch_size=4)
    torch.manual_seed(0)
    both = Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=text.config.to_dict(), vision_config=vision, attn_implementation="sdpa")
    ).eval()
    both.model.language_model.load_state_dict(text.model.state_dict())
    both.lm_head.load_state_dict(text.lm_head.state_dict())
    target = load_target(both)
    ids = torch.arange(9).unsqueeze(0)
    rows = target.extend(target.new_cache(9), ids, ids)
    want = text(input_ids=ids).logits.detach()
    assert torch.allclose(target.readout.logits(rows.hidden), want, atol=5e-5 * float(want.abs().max()))
    assert target.config.num_hidden_layers == 4
    both.save_pretrained(tmp_path)
    from_folder = load_target(tmp_path, dtype="float32", tokenizer=tokenizer)
    assert torch.equal(from_folder.readout.weight, target.readout.weight)
