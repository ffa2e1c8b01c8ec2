"""The study of families: recipes alike but for the drafter, figures from raw rows, the page's commands on a toy."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from draftloop.cli import main
from draftloop.drafter.build import new_drafter
from draftloop.drafter.families import FAMILIES, spec_for
from draftloop.evaluate.tau import Response
from draftloop.formats.zlab import save_drafter
from draftloop.recipe import DrafterPart
from draftloop.recipe_file import load_recipe
from draftloop.target.load import load_target
from tests.test_serve_engine import engine_python
from tests.toy_run import toy_checkpoint, toy_prompts

pytestmark = pytest.mark.families
ROOT = Path(__file__).parents[1]
RECIPES = sorted(ROOT.glob("recipes/families/*.yaml"))
PAGE = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")


@pytest.fixture
def room(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import families
    import families_results

    yield families, families_results
    for name in ("families", "families_results", "bench_results"):
        sys.modules.pop(name, None)


def test_the_recipes_differ_in_the_drafter_alone(room):
    given = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in RECIPES}
    assert set(given) == set(room[0].FAMILIES)
    own = ("name", "out", "drafter")
    (same,) = {json.dumps({k: v for k, v in one.items() if k not in own}, sort_keys=True) for one in given.values()}
    assert json.loads(same)["stages"]
    for name, one in given.items():
        assert (one["name"], one["drafter"]["family"], one["out"]) == (name, name, f"runs/families/{name}")
        if name in FAMILIES:
            assert load_recipe(ROOT / "recipes" / "families" / f"{name}.yaml").drafter.family == name


# figures -------------------------------------------------------------------------------------------------------------
def tally(family, arm, temperature, rule, tokens, steps, group="a", name="p"):
    committed = tuple(tokens // steps + (i < tokens % steps) for i in range(steps))
    counted = Response(name, group, committed, tuple(n - 1 for n in committed), 7).tally
    return {
        "kind": "tally", "family": family, "arm": arm, "temperature": temperature, "rule": rule, **asdict(counted),
    }  # fmt: skip


HEAD = {"kind": "run", "hardware": {"gpu": "X"}, "versions": {"torch": "1", "transformers": "2"}, "command": "c",
        "trained_side_by_side": 5}  # fmt: skip
STAGE = {"name": "sft", "steps": 7, "labels": 70, "seconds": 9.5, "chosen_step": 7, "tau_pooled": 2.0}
ROWS = [
    HEAD,
    {"kind": "greedy", "family": "dflash", "drafted": 7, "parameters": 5_000_000, "bytes": 9, "layers": 2, "command": "t",
     "stages": [{**STAGE, "steps": 0, "labels": 0, "seconds": 0.0}, STAGE]},
    tally("dflash", "trained", 0.0, "match", 30, 15), tally("dflash", "trained", 0.0, "match", 30, 10, "b"),
    tally("dflash", "untrained", 0.0, "match", 30, 30), tally("dflash", "trained", 1.0, "match", 30, 20),
    tally("dflash", "trained", 1.0, "ratio", 30, 12),
    {"kind": "greedy", "family": "ngram", "drafted": 7, "parameters": 0, "name": "ngram:7:2:4"},
    tally("ngram", "trained", 0.0, "match", 30, 25),
    {"kind": "failed", "family": "mtp", "what": "greedy", "why": "no summary"},
    {"kind": "failed", "family": "ngram", "what": "speed", "why": "late"},
    {"kind": "speed", "family": "ngram", "prompts": 4, "plain_tokens_per_s": 100.0, "tokens_per_s": 90.0,
     "ms_per_round": 2.0, "round_cost": 1.3, "speedup": 0.9, "tau_pooled": 1.17},
]  # fmt: skip


def test_figures_come_from_the_raw_rows_and_from_what_of_them_there_is(room, tmp_path):
    raw = tmp_path / "raw.jsonl"
    assert room[1].derive(raw) == {}
    assert room[1].table(raw) == ""
    assert "Not measured yet" in room[1].choice(raw)
    raw.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + '{"kind": "tal', encoding="utf-8")
    (text,) = room[1].derive(raw).values()
    found = json.loads(text)
    dflash, ngram = found["families"]["dflash"], found["families"]["ngram"]
    assert dflash["tau"]["t0"]["tau_pooled"] == 60 / 25
    assert dflash["tau"]["t0"]["sets"]["b"]["tau_pooled"] == 3
    assert (dflash["tau"]["t1_match"]["tau_pooled"], dflash["tau"]["t1_ratio"]["tau_pooled"]) == (1.5, 2.5)
    assert (dflash["tau_untrained"], dflash["seconds_of_training"], dflash["steps"]) == (1.0, 9.5, 7)
    assert ngram["tau_untrained"] == ngram["tau"]["t0"]["tau_pooled"] == 1.2
    assert [one["family"] for one in found["failed"]] == ["mtp"]  # the other was measured in the end
    wide, short = room[1].table(raw), room[1].choice(raw)
    assert "| DFlash | 2.40 |" in wide
    assert "MTP head: greedy failed (no summary)" in wide
    assert "0.90 (SLOWER)" in wide
    assert "0.90 (SLOWER)" in short
    assert "Not measured: EAGLE-3, DSpark, DFlash 2, MTP head." in short


# the page and the measuring command ----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """What the page's commands find: a target, a run, prompts, recipes."""
    folder = tmp_path_factory.mktemp("page")
    toy_checkpoint(folder / "my-model")
    toy_prompts(folder / "heldout.jsonl", 3, 50)
    toy_prompts(folder / "traffic.jsonl", 8)
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    target = load_target(str(folder / "my-model"), dtype="float32", device="cpu")
    part = DrafterPart(block_size=4, layers=1, target_layers=[0, 2])
    for run in ("runs/mine", "runs/families/dflash"):
        save_drafter(new_drafter(spec_for(part, target), target), folder / run / "drafter")
    sure = DrafterPart(family="dspark", block_size=4, layers=1, target_layers=[0, 2])
    save_drafter(new_drafter(spec_for(sure, target), target), folder / "runs/families/dspark/drafter")
    stage = {**STAGE, "name": "untrained", "steps": 0}
    told = {"parameters": 3, "bytes": 1, "block_size": 4, "layers": 1, "target_layers": [0, 2]}
    summary = {"drafter": told, "command": "c", "hardware": {}, "ngram": {"name": "ngram:3:2:4"}}
    summary |= {"delivered": "sft", "stages": [stage]}
    (folder / "runs/families/dflash/summary.json").write_text(json.dumps(summary), encoding="utf-8")
    walked = {"kind": "walk", "id": "a:1", "set": "a", "drafted": 3}
    arms = {"untrained": (1, 1, 1), "sft": (2, 1), "sft-continued": (3,), "ngram": (1, 2)}
    rows = [{**walked, "arm": arm, "committed": n, "accepted": [one - 1 for one in n]} for arm, n in arms.items()]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "runs/families/dflash/raw.jsonl").write_text(text, encoding="utf-8")
    return folder


def test_the_commands_of_the_page_run(place, monkeypatch, tmp_path):
    monkeypatch.chdir(place)
    python = engine_python(tmp_path / "python", device="cuda")
    commands = re.findall(r"^    draftloop (.*)$", PAGE, re.M)
    assert len(commands) == 5
    for line in commands:
        words = shlex.split(line.replace("/opt/vllm/bin/python", str(python)))
        if words[0] == "train":  # the same in seconds
            words[words.index("runs/mine")] = "runs/other"
            words += ["target.device=cpu", "data.response.max_new_tokens=8", "drafter.target_layers=[0,2]"]
            words += ["drafter.block_size=3", "drafter.layers=1", "stages.0.steps=1", "stages.0.evaluations=1"]
            words += ["evaluate.decode_prompts=0", "evaluate.audit_prompts=0"]
        elif words[0] == "evaluate":
            words += ["--max-new-tokens", "8", "--dtype", "float32"]
        with pytest.raises(SystemExit) as done:
            main(words)
        assert done.value.code in (0, None), line
    told = json.loads((place / "runs/other/summary.json").read_text(encoding="utf-8"))["ngram"]
    assert told["name"] == "ngram:2:2:4"
    assert told["tau_pooled"] >= 1


def test_families_are_measured_each_for_itself(room, place, monkeypatch, tmp_path):
    monkeypatch.chdir(place)
    out = tmp_path / "rows.jsonl"
    given = [
        "--families",
        "dflash",
        "mtp",
        "ngram",
        "--prompts",
        "heldout.jsonl",
        "--out",
        str(out),
        "--target",
        "my-model",
    ]
    given += ["--device", "cpu", "--max-new-tokens", "8", "--decode-prompts", "1"]
    for what in ("greedy", "sampled", "speed"):
        with pytest.raises(SystemExit) as done:
            room[0].main([what, *given])
        assert done.value.code == 1  # there is no run of mtp
    with pytest.raises(SystemExit) as done:
        room[0].main(["confidence", *given])
    assert done.value.code == 0
    before = out.read_text(encoding="utf-8")
    found = room[1].summarise(room[1].read(out))
    assert set(found["families"]) == {"dflash", "dspark", "ngram"}
    less = found["families"]["dspark"]["verifying_less"]
    assert [(cell["way"], cell["value"]) for cell in less[:4]] == [("first", n) for n in (1, 2, 3, 4)]
    assert [cell["verified"] for cell in less[:4]] == [1, 2, 3, 4]  # its anchor slot drafts too
    assert all(one["verified"] >= other["verified"] for one, other in pairwise(less[4:]))
    assert "| 0.9 |" in room[1].table(out)
    assert (
        found["families"]["dflash"]["tau"]["t0"]["tau_pooled"]
        == found["families"]["ngram"]["tau"]["t0"]["tau_pooled"]
        == 1.5
    )
    assert found["families"]["dflash"]["tau_untrained"] == 1
    for name in ("dflash", "ngram"):
        assert set(found["families"][name]["tau"]) == {"t0", "t1_match", "t1_ratio"}
        assert found["families"][name]["speed"]["tokens_per_s"] > 0
    assert {(one["family"], one["what"]) for one in found["failed"]} == {
        ("mtp", what) for what in ("greedy", "sampled", "speed")
    }
    with pytest.raises(SystemExit):  # what is there is not measured again
        room[0].main(["sampled", *given])
    assert [json.loads(line)["kind"] for line in out.read_text(encoding="utf-8")[len(before) :].splitlines()] == [
        "failed"
    ]


def test_evaluate_tells_tau_at_temperature_1_by_either_rule(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    taus = {}
    for name in ("runs/mine", "ngram"):
        for rule in ("match", "ratio"):
            words = [
                "evaluate",
                name,
                "--offline",
                "--temperature",
                "1",
                "--rule",
                rule,
                "--json",
                "--target",
                "my-model",
            ]
            with pytest.raises(SystemExit) as done:
                main([*words, "--prompts", "heldout.jsonl", "--max-new-tokens", "8", "--dtype", "float32"])
            assert done.value.code in (0, None)
            taus[name, rule] = json.loads(capsys.readouterr().out)["acceptance"]["tau_pooled"]
    assert taus["ngram", "match"] == pytest.approx(taus["ngram", "ratio"])
    assert taus["runs/mine", "match"] != taus["runs/mine", "ratio"]


def test_audit_takes_the_lookup(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    with pytest.raises(SystemExit) as done:
        main(["audit", "ngram:3:1:2", "--target", "my-model", "--prompts", "heldout.jsonl", "--max-new-tokens", "12"])
    assert done.value.code in (0, None)
    assert capsys.readouterr().out.startswith("lossless:")
