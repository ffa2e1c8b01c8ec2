"""The small hybrid target is made from answers, is a target, and its results are derived from rows."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from draftloop.core.errors import InputError
from draftloop.data.prompts import read_prompts
from draftloop.data.trunk import Trunk
from draftloop.recipe import DataPart
from draftloop.supervise.responses import prepare_trunks
from draftloop.target.load import load_target
from tests.toy_run import toy_checkpoint, toy_prompts, toy_tokenizer

pytestmark = pytest.mark.hybrid

FOLDER = str(Path(__file__).parents[1] / "benchmarks")
NAMES = ("small_hybrid", "small_hybrid_results", "run_rows")


@pytest.fixture
def maker(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import small_hybrid

    yield small_hybrid
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """A run directory in which a toy target has answered some prompts; its tokenizer is in `target`."""
    folder = tmp_path_factory.mktemp("answers")
    target = load_target(str(toy_checkpoint(folder / "target")), dtype="float32", device="cpu")
    prompts = read_prompts([str(toy_prompts(folder / "train.jsonl", 120))], folder)
    data = DataPart(response={"max_new_tokens": 12, "batch_size": 60})
    (folder / "trunks").mkdir()
    prepare_trunks(target, prompts, data, folder / "trunks" / "train.jsonl")
    return folder


def text(name: str, length: int) -> Trunk:
    tokens = tuple((7 * i + length) % 200 for i in range(length))
    return Trunk(name, "", 0, tokens, (False,) * 3 + (True,) * (length - 3), True)


def test_a_target_is_made_that_can_be_trained_for(maker, answers, tmp_path, capsys):
    out, rows = tmp_path / "made", tmp_path / "hybrid-target-toy.jsonl"
    arguments = [
        "--answers", answers, "--out", out, "--rows", rows, "--size", "tiny", "--minutes", "0.06", "--tokens", "4096",
        "--lr", "5e-3", "--epochs", "8", "--tokenizer", answers / "target", "--device", "cpu",
    ]  # fmt: skip
    assert maker.main([str(one) for one in arguments]) == 0, capsys.readouterr().err
    target = load_target(out, dtype="float32")
    assert target.tokenizer.chat_template == toy_tokenizer().chat_template
    assert [kind == "full_attention" for kind in target.config.layer_types] == [False, False, False, True]
    import small_hybrid_results

    (found,) = small_hybrid_results.summaries(tmp_path).values()
    made = found["target"]
    assert made["fingerprint"] == target.fingerprint
    assert made["parameters"] == sum(p.numel() for p in target.model.parameters())
    assert made["train"]["texts"] + made["held_out"]["texts"] == 120
    looks = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()][1 : 1 + maker.LOOKS]
    assert looks[-1]["held_out"] < looks[0]["held_out"] < math.log(300)
    kept = min(looks, key=lambda look: look["held_out"])
    assert made["loss"]["answers"] == pytest.approx(kept["held_out"], abs=0.03)  # bfloat16
    page = small_hybrid_results.table(tmp_path)
    assert f"{made['steps']} steps (weights of step {kept['step']})" in page
    assert maker.main(["--answers", str(answers), "--out", str(out)]) == 2  # what stands there is not written over
    assert "not empty" in capsys.readouterr().err


def test_loss_is_that_of_each_text_alone(maker):
    """Texts beside it, and what fills it up, change nothing."""
    model = maker.new_model("tiny", toy_tokenizer(), 0).eval()
    trunks = [text(f"p{n}", n) for n in (9, 70, 40, 5)]
    batches = list(maker.batched(trunks, 2 * 128))
    assert [len(batch.ids) for batch in batches] == [2, 2]
    got = torch.cat([maker.losses(model, batch) for batch in batches])
    want = []
    for trunk in trunks:
        ids = torch.tensor([trunk.tokens])
        want.append(cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="none"))
    assert torch.allclose(got, torch.cat(want), atol=2e-4)
    answer = torch.cat([batch.answer for batch in batches])
    assert answer.tolist() == [flag for trunk in trunks for flag in trunk.mask[1:]]


def test_an_epoch_visits_every_text_once(maker):
    trunks = [text(f"p{n}", 5 + n % 60) for n in range(100)]
    first, again, second = (maker.epoch_of(trunks, 1024, 0, epoch) for epoch in (0, 0, 1))
    assert sum(len(b.ids) for b in first) == sum(len(b.ids) for b in second) == 100
    assert sum(len(b.wanted) for b in first) == sum(len(t) - 1 for t in trunks)
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(first, again, strict=True))
    assert not all(a.ids.shape == b.ids.shape and torch.equal(a.ids, b.ids) for a, b in zip(first, second, strict=True))
    assert all(b.ids.numel() <= 1024 for b in first)


def test_samples_and_turns_of_a_prompt_are_held_out_together(maker, monkeypatch):
    trunks = [text(name, 9) for n in range(300) for name in (f"p{n}", f"p{n}", f"p{n}/turn2")]
    monkeypatch.setattr(maker, "read_trunks", lambda path: trunks)
    train, held = maker.split_texts([Path("x")], 512)
    assert len(train) + len(held) == 900
    assert len(held) % 3 == 0
    assert held
    assert not {t.id.split("/")[0] for t in train} & {t.id.split("/")[0] for t in held}
    with pytest.raises(InputError, match="too few"):
        maker.split_texts([Path("x")], 8)


def test_drafters_of_another_target_are_no_result(maker, tmp_path):
    import small_hybrid_results

    assert small_hybrid_results.summaries(tmp_path) == {}
    assert small_hybrid_results.table(tmp_path) == ""
    walk = {"kind": "walk", "id": "p", "set": "s", "drafted": 3}
    stages = [("untrained", None, [1, 1]), ("sft", "previous", [2, 1]), ("specopd", "sft", [3, 3])]
    head = {
        "kind": "run", "command": "draftloop train", "versions": {"torch": "1", "transformers": "2"},
        "hardware": {"gpu": "X"}, "seconds": 60.0, "delivered": "specopd", "target": {"fingerprint": "a"}, "audit": None,
    }  # fmt: skip
    rows = [head]
    for name, start, committed in stages:
        rows.append({"kind": "stage", "name": name, "start": start, "steps": 1, "labels": 1, "seconds": 1.0})
        rows.append({**walk, "arm": name, "committed": committed, "accepted": [n - 1 for n in committed]})
    raw = tmp_path / "hybrid-drafter-x.jsonl"
    raw.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (found,) = small_hybrid_results.summaries(tmp_path).values()
    assert [arm["acceptance"]["tau_pooled"] for arm in found["drafter"]["arms"]] == [1.0, 1.5, 3.0]
    assert found["drafter"]["arms"][2]["over"]["sft"]["ratio"] == 2.0
    assert "| specopd (delivered) | 3.000 |  | 2.000 |  | 3.00 |" in (small_hybrid_results.table(tmp_path))
    looks = [{"kind": "look", "step": 1, "held_out": 2.0}]
    made = {"kind": "small-hybrid", "fingerprint": "b", "steps": 1}
    raw.with_name("hybrid-target-x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [made, *looks]))
    with pytest.raises(ValueError, match="of the target a"):
        small_hybrid_results.summaries(tmp_path)
