"""Parity: our drafter replayed over an engine's text takes the engine's very steps; broken engines are caught."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from draftloop.core.errors import EnvironmentFault, InputError
from draftloop.core.law import Sampling
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options, Request
from draftloop.engines.compare import Answer, engine_response, faults, first_parting, replay
from draftloop.engines.parity import FILE, Book, Question, Setting, compare_with, parity
from draftloop.engines.serve import Engine
from draftloop.engines.verdict import summarise
from draftloop.engines.vllm import Ask, Job, chosen_python, environment, read_rows, run_job
from draftloop.engines.vllm_worker import speculation_of, whole_rows
from draftloop.evaluate.walk import responses_of
from tests.fake_engine import fake_answers
from tests.lessons import DRAFTED, KINDS, LENGTH, prompts, world

SETTING = Setting((0.0, 1.0), LENGTH, batch_size=4)
HEAD = {
    "kind": "run", "engine": {"name": "vllm"}, "draft_sample_method": "greedy", "dtype": "float32",
    "max_new_tokens": LENGTH, "command": "",
}  # fmt: skip


def asked(count=12):
    return [(f"p{i}", ids) for i, ids in enumerate(prompts(*(3 + i % 6 for i in range(count))))]


def judged(folder, target, reference, answers, temperature=0.0):
    book = Book(folder / FILE, HEAD)
    compare_with(target, reference, answers, SETTING, temperature, book)
    return summarise(read_rows(book.path))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["half", "overfit", "patchy"])
def test_the_replay_takes_the_engines_very_steps(kind, temperature, name):
    here = world(kind)
    drafter = here.drafters[name]
    answers = fake_answers(here.target, drafter, asked(), temperature=temperature)
    ended = 0
    for answer in answers:
        found = replay(here.target, drafter, answer, temperature=temperature)
        assert found.differences == ()
        assert found.response == engine_response(answer, DRAFTED)
        assert faults(answer, drafted=DRAFTED, max_new_tokens=LENGTH, eos=here.target.eos_ids) == []
        ended += answer.stopped
    assert ended > 0, "no response ended by end-of-sequence, so its cut was not tried"


def test_engine_responses_count_cut_steps_as_decoding_does():
    here = world("llama")
    for temperature in (0.0, 1.0):
        options = Options(LENGTH, Sampling(temperature), batch_size=1)
        made = decode(
            here.target, here.drafters["overfit"], [Request(ids, i) for i, (_, ids) in enumerate(asked())], options
        )
        ours = responses_of(made, [(name, "toy") for name, _ in asked()], DRAFTED)
        theirs = fake_answers(here.target, here.drafters["overfit"], asked(), temperature=temperature)
        assert [engine_response(answer, DRAFTED) for answer in theirs] == ours
    assert any(step.accepted >= step.committed for one in made for step in one.steps), "no step was cut"


def test_parity_holds_for_an_engine_that_is_right(tmp_path):
    here = world("llama")
    for temperature in (0.0, 1.0):
        answers = fake_answers(here.target, here.drafters["half"], asked(), temperature=temperature, seed=5)
        found = judged(tmp_path / str(temperature), here.target, here.drafters["half"], answers, temperature)
        assert found["passed"], found["sentence"]
        assert found["lawful"]
        part = found["temperatures"][f"{temperature:g}"]
        assert part["replay"]["difference"] == 0
        assert part["steps"]["differ"] == 0
        if temperature:
            assert abs(part["law"]["z"]) < 4
        else:
            assert part["texts"] == {"equal": 12, "at_ties": 0, "differ": 0, "first_difference": None}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_engine_with_layers_off_by_one_is_caught(tmp_path, temperature):
    here = world("llama")
    right = here.drafters["overfit"]
    from draftloop.drafter.dflash import DFlash

    wrong = DFlash(replace(right.spec, target_layers=(1, 3)))
    wrong.load_state_dict(right.state_dict())
    wrong.bind(here.target.embed, here.target.readout)
    answers = fake_answers(here.target, wrong, asked(), temperature=temperature)
    found = judged(tmp_path, here.target, right, answers, temperature)
    assert not found["passed"]
    first = found["temperatures"][f"{temperature:g}"]["steps"]["first_difference"]
    assert first["prompt"] in found["sentence"]
    assert first["drafter_gap"] > 0


def broken(answer: Answer, how: str, eos: int) -> Answer:
    if how == "a token dropped":
        return replace(answer, tokens=answer.tokens[:3] + answer.tokens[4:])
    if how == "a step swallowed":
        return replace(answer, steps=(*answer.steps[:-2], answer.steps[-2] + answer.steps[-1]))
    if how == "decoding on behind the end":
        place = len(answer.tokens) // 2
        return replace(answer, tokens=(*answer.tokens[:place], eos, *answer.tokens[place + 1 :]))
    if how == "stopped short":
        less = (*answer.steps[:-1], *([answer.steps[-1] - 1] if answer.steps[-1] > 1 else []))
        return replace(answer, tokens=answer.tokens[:-1], steps=less, drafts=len(less) - 1)
    if how == "acceptances miscounted":
        return replace(answer, accepted=answer.accepted + DRAFTED + 1)
    return replace(answer, stopped=not answer.stopped)


@pytest.mark.parametrize(
    "how",
    [
        "a token dropped", "a step swallowed", "decoding on behind the end", "stopped short", "acceptances miscounted",
        "a wrong end",
    ],
)  # fmt: skip
def test_an_engine_that_contradicts_itself_is_caught(tmp_path, how):
    here = world("llama")
    answers = fake_answers(here.target, here.drafters["half"], asked())
    spot = next(i for i, a in enumerate(answers) if not a.stopped and len(a.steps) > 3)
    answers[spot] = broken(answers[spot], how, here.target.eos_ids[0])
    found = judged(tmp_path, here.target, here.drafters["half"], answers)
    assert not found["passed"]
    assert found["temperatures"]["0"]["faults"][0]["prompt"] == f"p{spot}"


def test_an_engine_that_samples_another_law_is_called_lossy(tmp_path):
    """At twice the temperature its drafts are still replayed exactly, and its law is wrong."""
    here = world("llama")
    drafter = here.drafters["half"]
    answers = fake_answers(here.target, drafter, asked(30), temperature=2.0)
    found = judged(tmp_path, here.target, drafter, answers, 1.0)
    assert found["temperatures"]["1"]["replay"]["difference"] == 0
    assert not found["lawful"]
    assert "not lossless" in found["sentence"]


def test_a_wrong_greedy_token_is_no_near_tie(tmp_path):
    here = world("llama")
    answers = fake_answers(here.target, here.drafters["half"], asked())
    tokens = list(answers[0].tokens)
    tokens[1] = next(t for t in range(6, 61) if t != tokens[1] and t not in here.target.eos_ids)
    answers[0] = replace(answers[0], tokens=tuple(tokens))
    texts = judged(tmp_path, here.target, here.drafters["half"], answers)["temperatures"]["0"]["texts"]
    assert texts["differ"] == 1
    assert texts["first_difference"]["position"] == 1
    assert texts["first_difference"]["gap"] > 1e-3


def test_rows_are_resumed_and_of_another_run_thrown_away(tmp_path):
    here = world("llama")
    answers = fake_answers(here.target, here.drafters["half"], asked(4))
    judged(tmp_path, here.target, here.drafters["half"], answers)
    whole = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(whole[: len(whole) * 2 // 3])  # killed amid a line
    judged(tmp_path, here.target, here.drafters["half"], answers)
    key = lambda row: (row["kind"], row.get("arm", ""), row.get("id", ""))  # noqa: E731
    assert sorted(read_rows(tmp_path / FILE), key=key) == sorted(map(json.loads, whole.splitlines()), key=key)
    Book(tmp_path / FILE, {**HEAD, "dtype": "bfloat16"})
    assert len(read_rows(tmp_path / FILE)) == 1


def test_with_probabilistic_drafts_only_independent_decoding_is_compared(tmp_path):
    here = world("llama")
    setting = replace(SETTING, draft_sample_method="probabilistic")
    answers = fake_answers(here.target, here.drafters["half"], asked(), temperature=1.0, seed=9)
    book = Book(tmp_path / FILE, {**HEAD, "draft_sample_method": "probabilistic"})
    compare_with(here.target, here.drafters["half"], answers, setting, 1.0, book)
    part = summarise(read_rows(book.path))["temperatures"]["1"]
    assert "replay" not in part
    assert part["law"] is None
    low, high = part["own"]["difference_interval"]
    assert low < high


def test_first_parting():
    assert first_parting([1, 2, 3], [1, 2, 3]) is None
    assert first_parting([1, 2, 3], [1, 9, 3]) == 1
    assert first_parting([1, 2], [1, 2, 3]) == 2
    assert first_parting([], [1]) == 0


# ---------------------------------------------------------------- the child process


STAND_IN = """#!{python}
import json, sys, time
job = json.load(open(sys.argv[2]))
print("loading", flush=True)
if {die}:
    print(json.dumps({{"error": "ValueError: no such drafter"}}), file=sys.stderr, flush=True)
    sys.exit(3)
with open(job["out"], "a") as rows:
    rows.write(json.dumps({{"kind": "engine", "versions": {{"vllm": "0"}}}}) + "\\n")
    for ask in job["requests"][: {most}]:
        row = {{"kind": "row", "name": ask["name"], "tokens": [7] * job["max_new_tokens"], "finish": "length",
               "steps": [1] * job["max_new_tokens"], "seconds": 0.1,
               "counters": {{"drafts": job["max_new_tokens"] - 1, "drafted": 0, "accepted": 0}}}}
        rows.write(json.dumps(row) + "\\n")
        rows.flush()
        time.sleep({pause})
"""

JOB = Job("t", "d", DRAFTED, "greedy", "float32", 3, 64, (2,))
ASKS = [Ask(f"a{i}", (1, 2), 0.0, i) for i in range(4)]


def stand_in(folder: Path, *, die=False, most=99, pause=0) -> Engine:
    """A Python that runs no worker but acts one."""
    script = folder / "python"
    script.write_text(STAND_IN.format(python=sys.executable, die=die, most=most, pause=pause))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return Engine("vllm", script, "0", "cpu", True)


def test_a_job_is_answered_and_resumed(tmp_path):
    seen = []
    with pytest.raises(EnvironmentFault, match="before every prompt was answered"):
        run_job(stand_in(tmp_path, most=2), JOB, ASKS, tmp_path / "out")
    rows = run_job(
        stand_in(tmp_path), JOB, ASKS, tmp_path / "out", advance=lambda done, total: seen.append((done, total))
    )
    assert {row["name"] for row in rows if row["kind"] == "row"} == {"a0", "a1", "a2", "a3"}
    assert seen[-1] == (4, 4)
    again = run_job(stand_in(tmp_path, die=True), JOB, ASKS, tmp_path / "out")  # nothing is left to do
    assert again == rows


def test_a_dying_engine_is_one_sentence_within_seconds(tmp_path):
    began = time.monotonic()
    with pytest.raises(EnvironmentFault, match=r"vLLM ended with status 3 \(ValueError: no such drafter\)"):
        run_job(stand_in(tmp_path, die=True), JOB, ASKS, tmp_path / "out")
    assert time.monotonic() - began < 5


def test_an_interrupt_leaves_no_engine_behind(tmp_path):
    def interrupt(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(stand_in(tmp_path, pause=30), JOB, ASKS, tmp_path / "out", advance=interrupt)
    note = next((tmp_path / "out").glob("*.job.json"))
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert str(note) not in command.read_text()
        except OSError:
            continue


def test_the_whole_command_on_a_stand_in(tmp_path):
    """The stand-in repeats one token, which the target would never say: parity must fail and say where."""
    here = world("llama")
    questions = [Question(name, "toy", ids) for name, ids in asked(3)]
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "config.json").write_text("{}")
    rows = parity(
        here.target, here.drafters["half"], questions, stand_in(tmp_path), target_folder="t",
        served=tmp_path / "served", folder=tmp_path / "out", setting=Setting((0.0,), 6), facts={"command": "c"},
    )  # fmt: skip
    found = summarise(read_rows(rows))
    assert not found["passed"]
    assert found["temperatures"]["0"]["texts"]["differ"] == 3
    assert read_rows(rows)[0]["engine"]["versions"] == {"vllm": "0"}


def test_the_childs_environment_is_not_ours(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    seen = environment(stand_in(tmp_path))
    assert "PYTHONPATH" not in seen
    assert seen["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert seen["OMP_NUM_THREADS"] == "4", "what the user set stays"


def test_the_engines_python_must_be_named(monkeypatch):
    monkeypatch.delenv("DRAFTLOOP_VLLM_PYTHON", raising=False)
    with pytest.raises(InputError, match="--engine-python"):
        chosen_python(None)
    monkeypatch.setenv("DRAFTLOOP_VLLM_PYTHON", "/there/python")
    assert chosen_python(None) == Path("/there/python")


def test_the_worker_drops_half_a_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"kind": "row", "name": "a"}\n{"kind": "ro')
    assert whole_rows(path) == [{"kind": "row", "name": "a"}]
    assert path.read_text() == '{"kind": "row", "name": "a"}\n'


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.skipif(
    not os.environ.get("DRAFTLOOP_VLLM_PYTHON"), reason="DRAFTLOOP_VLLM_PYTHON names no Python with vLLM"
)
def test_vllm_itself(tmp_path):
    """The real engine serves an untrained one-layer drafter, greedily, step by step as we do."""
    from draftloop.drafter.build import for_decoding, new_drafter
    from draftloop.drafter.families import spec_for
    from draftloop.engines.serve import find_engine
    from draftloop.formats.zlab import save_drafter
    from draftloop.recipe import DrafterPart
    from draftloop.target.embedded import embedded_target
    from draftloop.target.load import load_target

    target = load_target("smollm2", dtype="float32")
    drafter = new_drafter(spec_for(DrafterPart(layers=1, block_size=4, target_layers=[5, 20]), target), target)
    save_drafter(drafter, tmp_path / "served", dtype=torch.float32)
    asks = [[1, 4093, 198, 504, 260 + i] for i in range(3)]
    rows = parity(
        target, for_decoding(drafter, target), [Question(str(i), "toy", tuple(ids)) for i, ids in enumerate(asks)],
        find_engine("vllm", Path(os.environ["DRAFTLOOP_VLLM_PYTHON"])), target_folder=str(embedded_target()),
        served=tmp_path / "served", folder=tmp_path / "out", setting=Setting((0.0,), 12), facts={"command": ""},
    )  # fmt: skip
    found = summarise(read_rows(rows))
    assert found["passed"], found["sentence"]


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.skipif(
    not os.environ.get("DRAFTLOOP_VLLM_PYTHON"), reason="DRAFTLOOP_VLLM_PYTHON names no Python with vLLM"
)
def test_vllm_with_its_cpu_faults_mended_serves_the_bundled_drafter(tmp_path):
    """A trained drafter of two layers, greedy and sampled: every step as ours, and the text drawn from the target's law."""
    mended = Path(__file__).parents[1] / "benchmarks" / "vllm_cpu_mended" / "python"
    command = [sys.executable, "-m", "draftloop.cli", "parity", "bundled", "--engine-python", mended, "--count", "6"]
    done = subprocess.run(
        [*map(str, command), "--max-new-tokens", "48", "--out", str(tmp_path), "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["passed"], found["sentence"]
    assert found["engine"]["versions"]["vllm plugin vllm_cpu_mends"] == "2"
    assert found["temperatures"]["0"]["tau_engine"] > 1.3
    assert abs(found["temperatures"]["1"]["law"]["z"]) < 4


def test_a_head_is_served_out_of_the_targets_folder():
    job = asdict(JOB)
    assert speculation_of(job)["model"] == "d"
    assert "model" not in speculation_of({**job, "method": "mtp"})
    assert speculation_of({**job, "method": "ngram", "lookup": (2, 4)})["prompt_lookup_max"] == 4


def test_a_kernel_that_the_engine_lacks_is_said_with_what_to_do(tmp_path):
    engine = stand_in(tmp_path, die=True)
    engine.python.write_text(engine.python.read_text().replace("no such drafter", "CPU GDN attention requires BF16."))
    with pytest.raises(EnvironmentFault, match="--dtype bfloat16"):
        run_job(engine, JOB, ASKS, tmp_path / "out")


def test_asks_are_plain_json():
    assert json.loads(json.dumps(asdict(ASKS[0])))["ids"] == [1, 2]
