"""Diagnosis: a checkpoint that is wrong about one fact is told which; a right one is left in peace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftloop.core.errors import InputError
from draftloop.core.weights import read_tensors, write_tensors
from draftloop.drafter.build import for_decoding
from draftloop.drafter.dflash import DFlash
from draftloop.drafter.mtp import computed_by
from draftloop.engines.diagnose import diagnose, explain, greedy_texts
from draftloop.engines.variants import FirstKeyNorm, read_as_is, variants
from draftloop.formats.zlab import save_drafter
from draftloop.recipe import StagePart
from draftloop.supervise.lesson import Lesson
from tests.fake_engine import fake_answers
from tests.lessons import LENGTH, greedy_trunks, prompts, train, world
from tests.mtp_tiny import mtp_drafter, mtp_target
from tests.test_parity import asked


def exported(folder: Path, wrong) -> Path:
    """The overfit drafter's checkpoint with one thing spoilt."""
    save_drafter(world("llama").drafters["overfit"], folder, dtype=torch.float32)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.pop("draftloop")
    wrong(config, folder)
    file.write_text(json.dumps(config))
    return folder


def layers(config, folder):
    config["dflash_config"]["target_layer_ids"] = [1, 3]


def theta(config, folder):
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 20.0


def mask(config, folder):
    config["dflash_config"]["mask_token_id"] = 6


def causal(config, folder):
    config["is_causal"] = True


def head(config, folder):
    tensors = read_tensors(folder / "model.safetensors")
    noise = torch.randn(world("llama").target.readout.weight.shape, generator=torch.Generator().manual_seed(1))
    write_tensors(folder / "model.safetensors", {**tensors, "lm_head.weight": noise})


WRONG = {
    "target layers -1": layers,
    "rope_theta 10000, the target's": theta,
    "mask token 5": mask,
    "the target's head": head,
}


@pytest.mark.parametrize("cause", WRONG)
def test_the_one_wrong_fact_is_named(tmp_path, cause):
    here = world("llama")
    found = diagnose(exported(tmp_path / "wrong", WRONG[cause]), here.target, here.trunks)
    assert found.cause is not None, [(one.name, one.tau) for one in found.findings]
    assert found.cause.name == cause, [(one.name, one.tau) for one in found.findings]
    assert found.cause.name in found.sentence
    assert found.cause.tau > found.tau


def test_a_right_checkpoint_is_left_in_peace(tmp_path):
    here = world("llama")
    found = diagnose(exported(tmp_path / "right", lambda config, folder: None), here.target, here.trunks)
    assert found.cause is None
    assert found.sentence.startswith("None of")
    assert len(found.findings) >= 6


def changed(kind=DFlash, **changes):
    from dataclasses import replace

    right = world("llama").drafters["overfit"]
    drafter = kind(replace(right.spec, **changes))
    drafter.load_state_dict(right.state_dict())
    return drafter.eval().requires_grad_(False).bind(right._borrowed[0], right.readout)


@pytest.mark.parametrize(
    ("cause", "make"),
    [
        ("target layers +1", lambda: changed(target_layers=(1, 3))),
        ("mask token 6", lambda: changed(mask_token_id=6)),
        ("rope_theta 1e+06", lambda: changed(rope_theta=1e6)),
        ("causal blocks", lambda: with_causal(changed())),
    ],
)
def test_what_an_engine_does_is_explained(cause, make):
    here = world("llama")
    answers = fake_answers(here.target, make(), asked(), temperature=0.0, length=LENGTH)
    found = explain(here.target, here.drafters["overfit"], answers)
    assert found.cause is not None, found.to_json()
    assert found.cause.name == cause
    assert found.cause.differ == 0
    assert found.differ > 0


def with_causal(drafter):
    drafter.causal = True
    return drafter


def test_an_engine_that_norms_all_context_keys_by_one_row_is_explained():
    here = world("llama")
    right = changed()
    with torch.no_grad():
        right.layers[1].self_attn.k_norm.weight.mul_(torch.linspace(-2, 2, 12))
    wrong = FirstKeyNorm(right.spec)
    wrong.load_state_dict(right.state_dict())
    wrong.eval().requires_grad_(False).bind(right._borrowed[0], right.readout)
    found = explain(here.target, right, fake_answers(here.target, wrong, asked()))
    assert found.cause is not None
    assert found.cause.name == "layer 0's key norm in every layer's context"
    assert found.cause.differ == 0


def test_an_engine_that_is_right_needs_no_explanation():
    here = world("llama")
    found = explain(here.target, here.drafters["overfit"], fake_answers(here.target, here.drafters["overfit"], asked()))
    assert found.differ == 0
    assert found.cause is None


def test_a_causal_block_decodes_as_it_walks():
    """The flag means the same in the packed and in the cached path."""
    here = world("llama")
    drafter = with_causal(changed())
    answers = fake_answers(here.target, drafter, asked(6))
    found = explain(here.target, drafter, answers)
    assert found.differ == 0
    assert "bidirectional blocks" in {one.name for one in found.findings}


def test_a_checkpoint_is_taken_at_its_word(tmp_path):
    here = world("llama")
    read = read_as_is(exported(tmp_path / "a", causal), here.target)
    assert read.causal
    assert read.drafter.causal
    read = read_as_is(exported(tmp_path / "b", head), here.target)
    assert read.head is not None
    assert torch.equal(read.drafter.readout.weight, read.head)
    names = [variant.name for variant in variants(read, here.target)]
    assert len(set(names)) == len(names)


def test_a_folder_of_something_else_is_refused(tmp_path):
    here = world("llama")
    folder = exported(tmp_path / "a", causal)
    write_tensors(folder / "model.safetensors", {"nonsense": torch.zeros(2)})
    with pytest.raises(InputError, match="not those of a DFlash drafter"):
        read_as_is(folder, here.target)


def test_greedy_texts_are_the_targets_own():
    here = world("llama")
    texts = greedy_texts(here.target, [(t.id, t.set, t.prompt) for t in here.trunks], LENGTH)
    assert [text.tokens for text in texts] == [trunk.tokens for trunk in here.trunks]


@pytest.mark.families
def test_how_an_engine_computes_a_multi_token_prediction_head_is_named():
    """A head that hands on its rows otherwise and leaves out an embedding: exactly that counterfactual explains it."""
    target = mtp_target("glm4_moe")
    trunks = greedy_trunks(target, prompts(3, 6, 4, 5, 7, 8))
    drafter = mtp_drafter(target, block=4, loud=1.0)
    part = StagePart(name="sft", method="sft", anchors="all")
    train(target, drafter, [Lesson(one) for one in trunks], part, 40)
    ours = for_decoding(drafter, target)
    theirs = for_decoding(drafter, target)
    theirs.spec = computed_by(drafter.spec, "vllm")
    some = [(f"p{i}", trunk.prompt) for i, trunk in enumerate(trunks)]
    answers = fake_answers(target, theirs, some)
    found = explain(target, ours, answers)
    assert found.differ > 0
    assert found.cause.name == "rows handed on before the head's norm and the first position without its embedding"
    assert "drafter.served_by: vllm" in found.sentence
    right = explain(target, theirs, answers)
    assert right.differ == 0
    assert right.cause is None
