"""The drafter that comes with the project: whole, small enough, what its card says, and of use to the real target."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftloop.core.errors import InputError
from draftloop.core.law import Sampling
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options, Request
from draftloop.drafter.build import for_decoding
from draftloop.engines.serve import Engine
from draftloop.formats.bundled_drafter import named_folder
from draftloop.formats.load import load_drafter
from draftloop.target.load import load_target
from tests.tiny import tiny_model


def test_it_is_whole_small_and_what_its_card_says():
    drafter = load_drafter("bundled")
    card = (named_folder("bundled") / "README.md").read_text(encoding="utf-8")
    assert f"| Parameters | {sum(p.numel() for p in drafter.parameters()):,} (bfloat16)" in card
    assert f"| Target layers read | {', '.join(map(str, drafter.spec.target_layers))} " in card
    assert f"drafts {drafter.spec.drafted} tokens at a time" in card
    assert sum(file.stat().st_size for file in named_folder("bundled").iterdir()) <= 16_000_000


def test_a_folder_of_that_name_is_the_users(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bundled").mkdir()
    with pytest.raises(InputError, match=r"config\.json"):
        load_drafter("bundled")


def test_another_target_is_refused():
    with pytest.raises(InputError, match="hidden size|layers|vocabulary"):
        load_drafter("bundled", load_target(tiny_model("llama")))


@pytest.mark.smollm2
def test_it_drafts_for_the_real_target_without_changing_it():
    target = load_target("smollm2", dtype="float32")
    drafter = for_decoding(load_drafter("bundled", target), target)
    text = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Tom has 3 boxes with 12 eggs each. He eats 4 eggs. How many eggs are left?"}],
        add_generation_prompt=True, return_dict=False,
    )  # fmt: skip
    options = Options(40, Sampling(0.0))
    drafted = decode(target, drafter, [Request(tuple(text))], options)[0]
    plain = decode(target, None, [Request(tuple(text))], options)[0]
    assert drafted.tokens == plain.tokens
    assert len(drafted.tokens) / len(drafted.steps) > 2


def test_whoever_serves_it_on_a_cpu_is_warned():
    """vLLM's CPU path breaks the target's law above temperature 0: found by parity, said wherever it matters."""
    (said,) = Engine("vllm", Path("python"), "0.32.0", "cpu", True).cautions
    assert "does not follow the target's law" in said
    assert not Engine("vllm", Path("python"), "0.32.0", "cuda", True).cautions
    assert not Engine("sglang", Path("python"), "0.5.23", "cpu", True).cautions
