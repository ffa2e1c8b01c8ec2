"""Two processes train what one trains; only the first speaks and writes; none is left hanging when another goes.

The tolerance is that of float32 sums in another order: 1e-5 of every loss, 1e-5 in every weight (about 2e-7 was seen).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from draftloop.core.ranks import Ranks, follows, has_the_word, launched, together
from draftloop.core.weights import read_tensors
from draftloop.train.metrics import read_metrics, without_timings
from tests.toy_run import toy_prompts, toy_recipe

pytestmark = pytest.mark.specopd

ROOT = Path(__file__).parent.parent
TOLERANCE = 1e-5
SFT = {"name": "sft", "method": "sft", "steps": 3, "batch_size": 3, "accumulate": 2, "evaluations": 2,
       "optimiser": {"lr": 3e-3}}  # fmt: skip
STAGES = [
    SFT,
    {"name": "opd", "method": "draft-opd", "steps": 4, "evaluations": 2,
     "rollout": {"refresh_every": 2, "batch_size": 6, "temperature": 1.0, "rule": "ratio"}},
    {"name": "own", "proposals": "sampled", "objective": {"kind": "forward_kl"}, "steps": 3, "evaluations": 1,
     "batch_size": 1},  # for the second process there is no lesson at all
    {"name": "mixed", "proposals": {"trunk": 0.5, "sampled": 1.0}, "objective": {"kind": "e2e_tv"}, "steps": 2,
     "evaluations": 1, "batch_size": 3, "branch": {"target_tokens": 160}},  # of both: fewer anchors than 16
]  # fmt: skip
SHORT = f"stages={json.dumps([SFT])}"
JOBS = {
    "one": (1, [], None),
    "two": (2, [], None),
    "parts": (2, [], None),
    "denominators not summed": (2, [SHORT], "denominators not summed"),
    "gradients averaged": (2, [SHORT], "gradients averaged"),
    "the second complains": (2, [SHORT], "the second complains"),
    "the second is killed": (2, [SHORT], "the second is killed"),
    "the second is told to stop": (2, [SHORT], "the second is told to stop"),
    "no such layer": (2, ["drafter.target_layers=[0,9]"], None),
}
SLOW_JOBS = {
    "one, killed": (1, [], "all are killed in the second stage"),
    "one, then two": (2, [], None),
    "two, killed": (2, [], "all are killed in the second stage"),
    "two, then one": (1, [], None),
    "minutes": (2, ["stages=[{name: s, method: sft, minutes: 0.01, evaluations: 2}]"], "clocks differ"),
    "gradients not summed": (2, [SHORT], "gradients not summed"),
    "the second breaks": (2, [SHORT], "the second breaks"),
    "no such key": (2, ["stages.0.stepz=3"], None),
    "no prompt is left": (2, ["data.max_prompt_tokens=1"], None),
}
SAME_PLACE = {"one, then two": "one, killed", "two, then one": "two, killed"}

Ran = tuple[Path, dict[str, list[int]]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Ran:
    """The jobs, done one after the other in one place: the folder, and the exit statuses by name."""
    folder = tmp_path_factory.mktemp("ranks")
    recipe = toy_recipe(folder, stages=STAGES, evaluate={"decode_prompts": 0, "audit_prompts": 0})
    recipe["data"]["response"]["max_new_tokens"] = 10
    toy_prompts(folder / "train.jsonl", 7)
    toy_prompts(folder / "validation.jsonl", 3, 100)
    toy_prompts(folder / "test.jsonl", 2, 200)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return folder, do(folder, JOBS)


@pytest.fixture(scope="module")
def ran_slowly(ran) -> Ran:
    """The same with the slow jobs."""
    folder, codes = ran
    return folder, codes | do(folder, SLOW_JOBS)


def do(folder: Path, wanted: dict[str, tuple[int, list[str], str | None]]) -> dict[str, list[int]]:
    jobs = []
    for name, (world, changes, fault) in wanted.items():
        arguments = [str(folder / "recipe.yaml"), *changes, "--out", str(folder / SAME_PLACE.get(name, name))]
        job = {"world": world, "arguments": arguments, "log": str(folder / name), "fault": fault}
        jobs.append(job | ({"call": "use_every_method"} if name == "parts" else {}))
    (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "tests.ranked", str(folder / "jobs.json")],
        cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(wanted, json.loads(done.stdout.splitlines()[-1]), strict=True))


def said(folder: Path, name: str, rank: int, end: str) -> str:
    return Path(f"{folder / name}.rank{rank}.{end}").read_text(encoding="utf-8")


def differences(a: Path, b: Path) -> set[str]:
    """Names of the numbers in which two runs differ by more than rounding."""
    found = set()
    for mine, theirs in zip(map(without_timings, read_metrics(a)), map(without_timings, read_metrics(b)), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            same = value == theirs[name]
            if isinstance(value, float) and not same:
                same = theirs[name] == pytest.approx(value, rel=TOLERANCE)
            found |= set() if same else {name}
    for file in sorted((b / "stages").glob("*.safetensors")):
        left, right = read_tensors(a / "stages" / file.name), read_tensors(file)
        if not all(torch.allclose(left[name], right[name], rtol=0, atol=TOLERANCE) for name in left):
            found.add("weights")
    return found


def test_two_processes_are_one(ran):
    folder, codes = ran
    assert codes["one"] == [0]
    assert codes["two"] == [0, 0]
    assert differences(folder / "one", folder / "two") == set()
    kinds = [row["kind"] for row in read_metrics(folder / "two")]
    assert (kinds.count("train"), kinds.count("rollout"), kinds.count("validation")) == (12, 2, 6)
    one, two = (json.loads((folder / name / "summary.json").read_text(encoding="utf-8")) for name in ("one", "two"))
    for key in ("stages", "delivered", "gain"):
        assert without_timings(two[key]) == without_timings(one[key]), key
    assert two["hardware"]["processes"] == 2
    assert two["command"].startswith("torchrun --nproc-per-node 2 -m draftloop.cli train")
    left = {
        str(path.relative_to(folder / "two")) for path in (folder / "two").rglob("*") if "tfevents" not in path.name
    }
    assert left == {str(p.relative_to(folder / "one")) for p in (folder / "one").rglob("*") if "tfevents" not in p.name}


def test_the_weights_are_the_same_bits_in_every_process(ran):
    folder, _ = ran
    assert said(folder, "two", 0, "weights") == said(folder, "two", 1, "weights")
    assert len(said(folder, "two", 0, "weights").split()) == 4


def test_only_the_first_speaks(ran):
    folder, _ = ran
    assert "Stage mixed" in said(folder, "two", 0, "out")
    assert "train mixed  2/2 steps" in said(folder, "two", 0, "err")
    assert said(folder, "two", 1, "out") == said(folder, "two", 1, "err") == ""


def wrong_at_first(folder: Path, fault: str) -> set[str]:
    """The numbers of the first update that a fault spoilt."""
    whole, spoilt = read_metrics(folder / "one")[0], read_metrics(folder / fault)[0]
    names = ("loss", "loss_ce", "grad_norm", "labels")
    return {name for name in names if spoilt[name] != pytest.approx(whole[name], rel=TOLERANCE)}


def test_a_broken_sum_is_seen(ran):
    folder, codes = ran
    seen = {"denominators not summed": {"loss", "loss_ce", "grad_norm"}, "gradients averaged": {"grad_norm"}}
    for fault, names in seen.items():
        assert codes[fault] == [0, 0]
        assert wrong_at_first(folder, fault) == names


@pytest.mark.slow
def test_a_missing_sum_is_seen(ran_slowly):
    assert wrong_at_first(ran_slowly[0], "gradients not summed") == {"grad_norm"}


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "resumed"), [("one, killed", "one, then two"), ("two, killed", "two, then one")])
def test_another_number_of_processes_takes_up_a_run(ran_slowly, killed, resumed):
    folder, codes = ran_slowly
    assert -9 in codes[killed]
    assert codes[resumed] == [0] * SLOW_JOBS[resumed][0]
    assert "Going on with stage opd at step 2 of 4" in said(folder, resumed, 0, "out")
    assert differences(folder / "one", folder / killed) == set()


def assert_said_once(folder: Path, name: str, text: str) -> None:
    told = "".join(said(folder, name, rank, "err") for rank in (0, 1))
    assert told.count("draftloop: ") == 1, told
    assert text in told
    assert "Traceback" not in told + said(folder, name, 0, "out") + said(folder, name, 1, "out")


def test_a_process_that_fails_says_so_once_and_ends_the_others(ran):
    folder, codes = ran
    assert_said_once(folder, "the second complains", "draftloop: the second process is not content. Be kind to it.")
    assert codes["the second complains"] == [3, 2]
    assert_said_once(folder, "the second is killed", "draftloop: another process of this run ended without a word")
    assert codes["the second is killed"] == [3, -9]
    assert_said_once(folder, "no such layer", "target_layers")
    assert 2 in codes["no such layer"]
    assert 0 not in codes["no such layer"]


def test_all_stop_after_the_same_step_when_one_is_told_to(ran):
    """Fails if each heeds its own signals alone: the others would wait for the one that went."""
    folder, codes = ran
    assert codes["the second is told to stop"] == [143, 143]
    (state,) = (folder / "the second is told to stop" / "checkpoints").glob("*/state.json")
    assert json.loads(state.read_text(encoding="utf-8"))["step"] == 1
    assert_said_once(folder, "the second is told to stop", "stopped; the same command goes on where it was.")
    assert "step 1 of 3 is saved" in said(folder, "the second is told to stop", 0, "out")


@pytest.mark.slow
def test_other_failures_are_said_once_too(ran_slowly):
    folder, codes = ran_slowly
    assert_said_once(folder, "the second breaks", "draftloop: our fault: KeyError: 'oops'.")
    assert codes["the second breaks"] == [3, 1]
    assert_said_once(folder, "no such key", "stepz")
    assert codes["no such key"] == [2, 2]
    assert_said_once(folder, "no prompt is left", "no prompt is left")
    assert codes["no prompt is left"] == [2, 3]


@pytest.mark.slow
def test_minutes_are_the_steps_of_the_first(ran_slowly):
    folder, codes = ran_slowly
    assert codes["minutes"] == [0, 0]
    assert json.loads((folder / "minutes" / "summary.json").read_text(encoding="utf-8"))["stages"][1]["steps"] == 3


def use_every_method() -> None:
    """In each of two processes: what the methods give."""
    with together("cpu") as ranks:
        assert (ranks.rank, ranks.world) == (int(os.environ["RANK"]), 2)
        assert ranks.merge(ranks.share(range(7))) == list(range(7))
        assert ranks.merge(ranks.share([5])) == [5]
        assert ranks.once(lambda: ranks.rank) == 0
        assert ranks.sum({"a": 1.5} if ranks.first else {"a": 2.0, "b": 1.0}) == {"a": 3.5, "b": 1.0}
        both, one_sided, nobodys, frozen = (torch.nn.Parameter(torch.zeros(2, n)) for n in (1, 2, 3, 4))
        frozen.requires_grad_(False)
        both.grad = torch.full((2, 1), 1.0 + ranks.rank)
        if not ranks.first:
            one_sided.grad = torch.ones(2, 2)
        ranks.sum_gradients([both, one_sided, nobodys, frozen])
        assert both.grad.tolist() == [[3.0], [3.0]]
        assert one_sided.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
        assert nobodys.grad is None
        assert frozen.grad is None
    with together("cpu") as again:  # a program may train twice
        assert again.merge([again.rank]) == [0, 1]


def test_every_method(ran):
    folder, codes = ran
    assert codes["parts"] == [0, 0], said(folder, "parts", 0, "err") + said(folder, "parts", 1, "err")


def test_one_process_needs_nothing(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert launched() == 1
    assert not follows()
    assert has_the_word()
    with together("cpu") as ranks:
        assert ranks == Ranks(0, 1)
        assert ranks.share([1, 2]) == ranks.merge([1, 2]) == [1, 2]
        assert ranks.once(lambda: 3) == 3
        ranks.barrier()
        assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_shares_are_even_and_in_order(world, count):
    parts = [Ranks(rank, world).share(range(count)) for rank in range(world)]
    assert [item for part in parts for item in part] == list(range(count))
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)  # the first has a lesson whenever anybody has
    assert max(sizes) - min(sizes) <= 1
