"""`evaluate --compare`: drafters side by side. Each row its drafter's own, paired with the first; what is refused."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from rich.console import Console

import draftloop
from draftloop.cli import main
from draftloop.core.errors import InputError
from draftloop.core.files import writing_fault
from draftloop.data.trunk import response_trunk
from draftloop.drafter.build import new_drafter
from draftloop.drafter.families import spec_for
from draftloop.evaluate import compare as room
from draftloop.evaluate.table import comparison_tables
from draftloop.evaluate.tau import acceptance, paired
from draftloop.recipe import DrafterPart
from tests.command_line import called
from tests.toy_run import toy_checkpoint, toy_prompts

SETTINGS = {"max_new_tokens": 16, "decode_prompts": 4}


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A target, prompts of two sets, and drafters `a` (block 4) and `b` (block 6)."""
    folder = tmp_path_factory.mktemp("toy")
    toy_checkpoint(folder / "target")
    toy_prompts(folder / "test.jsonl", 6)
    target = draftloop.load_target(folder / "target", dtype="float32", device="cpu")
    for seed, (name, block) in enumerate((("a", 4), ("b", 6))):
        part = DrafterPart(block_size=block, layers=1, target_layers=[0, 2])
        draftloop.save_drafter(new_drafter(spec_for(part, target), target, seed), folder / name, dtype=torch.float32)
    return folder


@pytest.fixture(scope="module")
def target(toy):
    return draftloop.load_target(toy / "target", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def drafters(toy, target):
    return {name: draftloop.load_drafter(toy / name, target) for name in ("a", "b")}


@pytest.fixture
def call(capsys, monkeypatch, toy, tmp_path):
    """`draftloop evaluate --compare ...` in this process: (status, standard output, standard error)."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    transformers.utils.logging.disable_progress_bar()

    def run(*arguments):
        fixed = ["--target", toy / "target", "--dtype", "float32", "-p", toy / "test.jsonl", "--max-new-tokens", 16]
        return called(capsys, "evaluate", "--compare", *arguments, *fixed)

    return run


def compared(target, drafters, toy, folder, **changes):
    rows = []
    found = draftloop.compare(
        target, drafters, [str(toy / "test.jsonl")], folder=folder, write=rows.append, **{**SETTINGS, **changes}
    )
    return found, rows


# the figures -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_has_the_tau_that_it_has_alone(toy, tmp_path, target, drafters, temperature):
    found, _ = compared(target, drafters, toy, tmp_path, temperatures=[temperature], rule="ratio")
    (contest,) = found.contests
    for name, standing in zip(drafters, contest.standings, strict=True):
        alone = draftloop.evaluate(
            target, drafters[name], [str(toy / "test.jsonl")], folder=tmp_path, how="offline", rule="ratio",
            temperature=temperature, max_new_tokens=16,
        )  # fmt: skip
        assert standing.name == name
        assert standing.acceptance == alone.acceptance


def test_it_is_what_real_decoding_does_at_temperature_0(toy, tmp_path, target, drafters):
    """All prompts decoded: the tau of the walk and that of the decoding are one."""
    found, rows = compared(target, drafters, toy, tmp_path, decode_prompts=6)
    for standing in found.contests[0].standings:
        assert standing.speed["prompts"] == 6
        assert standing.speed["tau_pooled"] == pytest.approx(standing.acceptance.tau_pooled)
        mine = [row for row in rows if row["kind"] == "decode" and row["drafter"] == standing.name]
        steps = [n for row in mine for n in row["committed"]]
        assert sum(steps) / len(steps) == pytest.approx(standing.acceptance.tau_pooled)


def test_plain_decoding_is_one_of_them(toy, tmp_path, target, drafters):
    found, rows = compared(target, {"b": drafters["b"], "none": None}, toy, tmp_path, temperatures=[0.0, 0.8])
    for contest in found.contests:
        b, none = contest.standings
        assert (none.acceptance.tau_pooled, none.acceptance.interval) == (1.0, (1.0, 1.0))
        assert none.speed == contest.plain
        assert none.speed["speedup"] == none.speed["round_cost"] == 1.0
        assert none.gains["all"].difference == pytest.approx(1.0 - b.acceptance.tau_pooled)
    plain = [row for row in rows if row["kind"] == "speed" and row["drafter"] == "none"]
    assert [row["temperature"] for row in plain] == [0.0, 0.8]  # once a temperature


def test_plain_tallies_are_those_of_plain_decoding():
    trunks = [response_trunk([5, 6], [7, 8, 9], "p", "s", 0, True), response_trunk([5], [7], "q", "s", 0, True)]
    rows = room.plain_tallies(trunks)
    assert [(row.tokens, row.steps, row.tau) for row in rows] == [(2, 2.0, 1.0), (0, 0.0, 0.0)]


def test_one_plain_decoding_is_shared_by_all(toy, tmp_path, target, drafters, monkeypatch):
    calls = []
    real = room.speed.compare
    monkeypatch.setattr(room.speed, "compare", lambda *a, **k: calls.append([n for n, _ in a[1]]) or real(*a, **k))
    found, _ = compared(target, {**drafters, "none": None}, toy, tmp_path)
    assert calls == [["a", "b"]]
    for standing in found.contests[0].standings[:2]:
        ratio = standing.speed["tokens_per_s"] / found.contests[0].plain["tokens_per_s"]
        assert standing.speed["speedup"] == pytest.approx(ratio)


def test_differences_are_paired_with_the_first_by_set(toy, tmp_path, target, drafters):
    found, rows = compared(target, drafters, toy, tmp_path, decode_prompts=0)
    first, second = found.contests[0].standings
    assert first.gains == {}
    assert set(second.gains) == {"all", "a", "b"}  # the sets of the prompts, beside all

    def tallies(name, group):
        kept = [row for row in rows if row["drafter"] == name and group in ("all", row["set"])]
        return [room.Tally(**{one.name: row[one.name] for one in fields(room.Tally)}) for row in kept]

    for group, gain in second.gains.items():
        assert gain == paired(tallies("a", group), tallies("b", group))
        assert gain.difference == pytest.approx(
            acceptance(tallies("b", group)).tau_pooled - acceptance(tallies("a", group)).tau_pooled
        )
    assert found.contests[0].plain is None
    assert all(row["kind"] == "offline" for row in rows)


def test_every_row_says_which_drafter_it_is(toy, tmp_path, target, drafters):
    found, rows = compared(target, {**drafters, "none": None}, toy, tmp_path)
    assert {row["drafter"] for row in rows} == {"a", "b", "none"}
    assert all("temperature" in row for row in rows)
    assert all(value is not None for row in rows for value in row.values())  # nothing that says nothing
    told = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert [one["drafter"] for one in told["drafters"]] == ["a", "b", "none"]
    assert [one["drafter"] for one in told["rows"]] == ["a", "b", "none"]
    a, b, none = told["drafters"]
    assert a["parameters"] == b["parameters"] == sum(p.numel() for p in drafters["a"].parameters())
    assert (a["block_size"], b["block_size"], none["block_size"], none["parameters"]) == (4, 6, 1, 0)
    assert len({one["identity"] for one in told["drafters"]}) == 3


def test_a_drafter_without_weights_is_described_too():
    """It may be no module at all; another setting is another drafter."""
    few, many = (
        room.entrant("ngram", SimpleNamespace(spec=SimpleNamespace(block_size=n, drafted=n - 1))) for n in (4, 8)
    )
    assert (few.parameters, few.block_size, few.made_for) == (0, 4, {})
    assert few.identity != many.identity
    room.check_entrants([few, many])


# the command -----------------------------------------------------------------------------------------------------------
def test_a_table_rows_and_a_picture(call, toy, tmp_path):
    out = tmp_path / "rows.jsonl"
    status, told, err = call(toy / "a", toy / "b", "none", "--temperature", 0, "--temperature", 1, "--out", out,
                             "--decode-prompts", 2)  # fmt: skip
    assert status == 0, err
    for word in ("at temperature 0", "at temperature 1", "none (plain)", "parameters", "against", "paired over 6"):
        assert word in told, word
    assert max(len(line) for line in told.splitlines() if not line.startswith("Picture: ")) <= 80
    head, *rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert head["kind"] == "compare"
    assert head["target"]["fingerprint"]
    assert {row["drafter"] for row in rows} == {str(toy / "a"), str(toy / "b"), "none"}
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    status, _, err = call(toy / "a", toy / "b", "--out", out)
    assert status == 2
    assert "not overwritten" in err


@pytest.mark.parametrize(("count", "said"), [(1, "speed of 1 prompt,"), (4, "speed of 4 prompts,")])
def test_speeds_that_cannot_be_believed_are_told(toy, tmp_path, target, drafters, count, said):
    """Few prompts, and a round that costs less than a plain step. Fails if either is printed as if it were sure."""
    found, _ = compared(target, drafters, toy, tmp_path, decode_prompts=count)

    def told(cost):
        for standing in found.contests[0].standings:
            standing.speed["round_cost"] = cost
        console = Console(width=80, file=io.StringIO())
        console.print(comparison_tables(found))
        return " ".join(console.file.getvalue().split())

    sure, unsure = told(1.3), told(0.82)
    assert said in sure
    assert ("Speeds from 1 prompt are noise" in sure) == (count == 1)
    assert ("1.30 " in sure, "measurement noise" in sure) == (True, False)
    assert ("0.82* " in unsure, "cannot be: measurement noise" in unsure) == (True, True)


def test_the_lookup_without_weights_is_compared_by_its_name(call, toy, tmp_path):
    """And with plain decoding as the first, which all are then paired with."""
    status, told, err = call("none", toy / "a", "ngram", "ngram:3:1:2", "--temperature", 0, "--temperature", 1, "--json",
                             "--decode-prompts", 6)  # fmt: skip
    assert status == 0, err
    found = json.loads(told)
    facts = {one["drafter"]: one for one in found["drafters"]}
    assert facts["ngram"]["parameters"] == 0
    assert (facts["ngram"]["block_size"], facts["ngram:3:1:2"]["block_size"]) == (8, 4)
    target = draftloop.load_target(toy / "target", dtype="float32", device="cpu")
    for row in found["rows"]:
        assert (row["drafter"] == "none") == (row["against_first"] == {})
        if row["temperature"] == 0:
            assert row["speed"]["tau_pooled"] == pytest.approx(row["acceptance"]["tau_pooled"]), row["drafter"]
    alone = draftloop.evaluate(
        target, draftloop.load_drafter("ngram", target), [str(toy / "test.jsonl")], folder=tmp_path, max_new_tokens=16
    )
    assert alone.acceptance.tau_pooled == pytest.approx(found["rows"][2]["acceptance"]["tau_pooled"])
    status, _, err = call("ngram", "ngram:7:2:4")
    assert status == 2
    assert "ngram:7:2:4 is the same drafter as ngram" in err


def test_json_and_the_default_picture(call, toy, tmp_path):
    status, told, err = call(toy / "a", "none", "--decode-prompts", 0, "--json")
    assert status == 0, err
    found = json.loads(told)
    assert found["how"] == "compare"
    assert found["picture"] == "runs/evaluate/compare.png"
    assert (tmp_path / "runs/evaluate/compare.png").is_file()
    assert [row["speed"] for row in found["rows"]] == [None, None]
    status, told, _ = call(toy / "a", "none", "--decode-prompts", 0, "--plot", tmp_path / "p" / "q.png")
    assert status == 0
    assert "nothing was decoded for speed" in told
    assert (tmp_path / "p" / "q.png").is_file()


def test_one_drafter_alone_leaves_rows_too(toy, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    with pytest.raises(SystemExit) as done:
        main(["evaluate", str(toy / "a"), "--target", str(toy / "target"), "--dtype", "float32", "-p",
              str(toy / "test.jsonl"), "--max-new-tokens", "16", "--cache", str(tmp_path), "--out", str(out)])  # fmt: skip
    assert not done.value.code, capsys.readouterr().err
    head, *rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert head["kind"] == "evaluate"
    assert [(row["kind"], row["drafter"], row["temperature"]) for row in rows] == [("walk", str(toy / "a"), 0.0)] * 6


def test_where_the_picture_fails_the_rows_are_said_to_be_whole(call, toy, tmp_path, monkeypatch):
    """The same command would be refused for them. Fails if it is what is advised."""
    out, picture = tmp_path / "rows.jsonl", tmp_path / "rows.png"

    def full(*_):
        raise writing_fault(OSError(28, "No space left on device"), picture)

    monkeypatch.setattr("draftloop.evaluate.plot.plot_comparison", full)
    status, _, err = call(toy / "a", "none", "--decode-prompts", 0, "--out", out)
    assert status == 3
    assert f"{picture}: the disk is full. Mend that and name another --out: the rows are whole in {out}" in err
    assert out.is_file()


# what is refused -------------------------------------------------------------------------------------------------------
def test_a_drafter_with_itself_is_refused_and_both_are_named(call, toy, tmp_path, target, drafters):
    shutil.copytree(toy / "a", tmp_path / "copy")
    status, out, err = call(toy / "a", tmp_path / "copy")
    assert status == 2
    assert not out
    assert f"{tmp_path / 'copy'} is the same drafter as {toy / 'a'}" in " ".join(err.split())
    run = tmp_path / "run"
    shutil.copytree(toy / "b", run / "drafter")
    for twice in ((run, run / "drafter"), (toy / "a", toy / ".." / toy.name / "a")):
        status, _, err = call(*twice)
        assert status == 2
        assert f"the same drafter as {twice[0]}" in " ".join(err.split())
    assert "named twice" in call(toy / "a", "none", "none")[2]
    with pytest.raises(InputError, match="the same drafter as a"):
        compared(target, {"a": drafters["a"], "c": drafters["a"]}, toy, tmp_path)


def test_what_cannot_be_compared_is_one_sentence(call, toy, tmp_path):
    bad = {
        "there is no such folder": (toy / "a", tmp_path / "nowhere"),
        "there is no such": (toy / "a", "nowhere"),
        "two drafters or more": (toy / "a",),
        "--compare already": (toy / "a", "none", "--offline"),
        "every draft is verified": (toy / "a", "none", "--confidence", 0.5),
    }
    for words, arguments in bad.items():
        status, out, err = call(*arguments)
        assert (status, out) == (2, ""), err
        assert words in err
        assert len(err.strip().splitlines()) == 1, err


def test_a_drafter_of_another_target_is_named(call, toy, tmp_path):
    toy_checkpoint(tmp_path / "wide", hidden_size=64)
    wide = draftloop.load_target(tmp_path / "wide", dtype="float32", device="cpu")
    part = DrafterPart(block_size=4, layers=1, target_layers=[0, 2])
    draftloop.save_drafter(new_drafter(spec_for(part, wide), wide), tmp_path / "alien", dtype=torch.float32)
    status, _, err = call(toy / "a", tmp_path / "alien")
    assert status == 2
    assert f"{tmp_path / 'alien'}: the drafter was made for a target with hidden size 64, this one has 48" in err


def test_a_stale_drafter_is_said_to_be_one(toy, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    toy_checkpoint(tmp_path / "tuned", seed=7)
    with pytest.raises(SystemExit) as done:
        main(["evaluate", "--compare", str(toy / "a"), "none", "--target", str(tmp_path / "tuned"), "--dtype",
              "float32", "-p", str(toy / "test.jsonl"), "--max-new-tokens", "8", "--cache", str(tmp_path),
              "--decode-prompts", "0"])  # fmt: skip
    assert not done.value.code
    out = capsys.readouterr().out
    assert f"{toy / 'a'} was made for {toy / 'target'}" in out
    assert "draftloop adapt" in out
