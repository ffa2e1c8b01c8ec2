"""`draftloop adapt` on a toy: a drafter of one target learns another that was fine-tuned from it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers
import yaml

import draftloop
from draftloop.cli import main
from draftloop.core.errors import InputError
from draftloop.core.files import write_text
from draftloop.drafter.build import new_drafter
from draftloop.drafter.families import spec_for
from draftloop.formats.load import load_drafter
from draftloop.recipe import DrafterPart
from draftloop.recipe_file import load_recipe
from draftloop.supervise.responses import prepare_trunks
from draftloop.train import job
from draftloop.train.adapt import RECIPE, adapt_recipe
from draftloop.train.job import train
from draftloop.train.stage import StageRun
from tests.toy_run import toy_checkpoint, toy_recipe, toy_tokenizer

WORDS = ["cat", "dog", "mat", "one", "two", "three", "sun", "sea", "tree", "bird", "red", "blue"]
SMALL = [
    "stages.adapt.minutes=null", "stages.adapt.steps=60", "stages.adapt.evaluations=4", "stages.adapt.optimiser.lr=1e-2",
    "data.response.max_new_tokens=12", "data.response.batch_size=8", "evaluate={decode_prompts: 2, audit_prompts: 2}",
    "precision=float32", "target.dtype=float32", "target.device=cpu",
]  # fmt: skip


def traffic(path: Path, count: int) -> Path:
    """Rows of every shape that people have, half of them with answers."""
    rows = []
    for i in range(count):
        ask = f"{WORDS[i % 12]} {WORDS[(i * 5 + i // 12) % 12]} {i}?"
        rows.append(
            [
                {"prompt": ask},
                {"conversations": [{"from": "human", "value": ask}, {"from": "gpt", "value": f"sea {i}"}]},
                {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": "red sun"}]},
                {"turns": [ask, "and the mat?"]},
            ][i % 4]
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def fine_tune(model, tokenizer) -> None:
    """Teach it to count, whatever is asked."""
    asks = [[{"role": "user", "content": f"{word} {WORDS[n - 5]} {n}?"}] for n, word in enumerate(WORDS)]
    heads = [tokenizer.apply_chat_template(ask, add_generation_prompt=True, return_dict=False)[-12:] for ask in asks]
    ids = torch.tensor([head + tokenizer.encode("one two three four " * 6)[:24] for head in heads])
    with torch.no_grad():  # the toy's loud random weights learn nothing in seconds
        for weight in model.parameters():
            weight.mul_(0.2 if weight.dim() > 1 else 1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(100):
        model(ids, labels=ids).loss.backward()
        optimiser.step()
        optimiser.zero_grad()


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A target, a drafter trained for it (`run`), the target fine-tuned (`tuned`), and traffic."""
    folder = tmp_path_factory.mktemp("toy")
    recipe = toy_recipe(folder)
    del recipe["stages"][1:]
    recipe["stages"][0]["steps"] = 40
    recipe["evaluate"] = {"decode_prompts": 0, "audit_prompts": 0}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    train(load_recipe(folder / "recipe.yaml"), out=folder / "run", quiet=True, say=lambda text: None)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "target")
    fine_tune(model, toy_tokenizer())
    model.save_pretrained(folder / "tuned")
    toy_tokenizer().save_pretrained(folder / "tuned")
    traffic(folder / "traffic.jsonl", 24)
    return folder


@pytest.fixture
def call(capsys, monkeypatch, toy, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(toy)
    transformers.utils.logging.disable_progress_bar()

    def run(*arguments, small=SMALL):
        capsys.readouterr()
        with pytest.raises(SystemExit) as done:
            main([str(argument) for argument in ("adapt", *arguments, *small)])
        out, err = capsys.readouterr()
        return done.value.code or 0, out, err

    return run


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch):
    """Drawing is half of a toy run's time; the runs of the module's fixtures have the real report."""
    monkeypatch.setattr(job, "write_report", lambda folder: write_text(folder / "report.html", "drawn elsewhere"))


GIVEN = ("-t", "tuned", "-d", "run", "-p", "traffic.jsonl")


@pytest.fixture(scope="module")
def adapted(toy):
    """What `draftloop adapt` left, without drawing it twice."""
    recipe = adapt_recipe(str(toy / "tuned"), str(toy / "run/drafter"), [str(toy / "traffic.jsonl")], overrides=SMALL)
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = draftloop.adapt(recipe, out=toy / "adapted", quiet=True, say=said.append)
    return found, said


# the recipe ------------------------------------------------------------------------------------------------------------
def test_it_is_one_packaged_recipe_with_the_users_facts_filled_in():
    plain = load_recipe(RECIPE)
    recipe = adapt_recipe("./a: b", "runs/x", ["t.jsonl", "u#.parquet"], minutes=2.5, limit=7, keep_answers=True)
    assert (recipe.target.model, recipe.drafter.init) == ("./a: b", "runs/x")
    assert recipe.data.train == ["t.jsonl", "u#.parquet"]
    assert (recipe.data.limit, recipe.data.response.regenerate) == (7, False)
    (stage,) = recipe.stages
    assert stage.minutes == 2.5
    assert stage.stop == plain.stages[0].stop
    assert stage.stop.patience is not None
    assert recipe.data.validation == recipe.data.test == []  # split off
    changed = adapt_recipe("t", "d", ["p"], overrides=["stages.adapt.method=specopd", "stages.adapt.stop.patience=5"])
    assert (changed.stages[0].proposals, changed.stages[0].stop.patience) == ("sampled", 5)


@pytest.mark.parametrize(
    "override",
    ["stages=[]", "stages.adapt.stop.patience=null", "drafter.init=null",
     "stages=[{name: a, method: sft, steps: 1}, {name: b, method: sft, steps: 1}]"],
)  # fmt: skip
def test_another_pipeline_is_refused(override):
    with pytest.raises(InputError, match="adapting is one stage"):
        adapt_recipe("t", "d", ["p"], overrides=[override])


def test_at_most_so_many_prompts_are_held_out(toy):
    from draftloop.train.inputs import read_splits

    sizes = {}
    for most in (1, 2, 200):
        recipe = adapt_recipe("t", "d", [str(toy / "traffic.jsonl")], overrides=[f"data.held_out={most}"])
        sizes[most] = [len(part) for part in read_splits(recipe).values()]
    assert sizes == {1: [22, 1, 1], 2: [20, 2, 2], 200: [20, 2, 2]}  # a tenth of 24, at most


# the run ---------------------------------------------------------------------------------------------------------------
def test_it_brings_the_drafter_back(toy, adapted):
    found, _ = adapted
    before, after = found.summary.stages
    assert (before.name, after.name) == ("init", "adapt")
    assert after.tau_pooled > before.tau_pooled
    assert found.better
    assert found.summary.gain.ratio == pytest.approx(after.tau_pooled / before.tau_pooled)
    assert found.summary.lossless is True
    assert after.validation[0].step == 0
    data = found.summary.data
    assert (data.train.prompts, data.validation.prompts, data.test.prompts) == (20, 2, 2)
    tuned = draftloop.load_target(toy / "tuned", dtype="float32", device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafter = load_drafter(found.folder / "drafter", tuned)  # made for this target now, so nobody warns
    assert drafter.spec.made_for["target_fingerprint"] == tuned.fingerprint
    with pytest.warns(UserWarning, match="the drafter was made for"):
        load_drafter(toy / "run" / "drafter", tuned)


def test_that_the_drafter_was_made_for_another_target_is_one_line(toy, adapted):
    _, said = adapted
    lines = [line for text in said for line in text.splitlines() if "made for" in line]
    target, tuned = (
        draftloop.load_target(toy / n, dtype="float32", device="cpu").fingerprint for n in ("target", "tuned")
    )
    assert len(lines) == 1
    assert target in lines[0]
    assert tuned in lines[0]


def test_the_command_tells_what_it_brought_and_exports_both_forms(call, toy, adapted):
    """The run is there already, so that the command only tells and exports."""
    status, out, err = call(*GIVEN, "--out", "adapted", small=())
    assert status == 2  # another recipe: the toy's settings are missing
    assert "another recipe" in err
    given = [str(toy / "tuned"), "-d", toy / "run", "-p", toy / "traffic.jsonl", "--out", toy / "adapted"]
    status, out, err = call("-t", *given)
    assert status == 0, err
    for word in ("Acceptance length", "It cost ", "of training (60 steps", "Lossless:", "vllm serve", "sglang"):
        assert word in out, word
    for name, form in (("export-both", "zlab"), ("export-vllm-speculators", "speculators")):
        told = json.loads((toy / "adapted" / name / "serve.json").read_text(encoding="utf-8"))
        assert (told["form"], told["target"]) == (form, str(toy / "tuned"))
    status, out, err = call("-t", *given, "--json")
    found = json.loads(out)
    assert found["better"] is True
    assert [one["form"] for one in found["exports"]] == ["zlab", "speculators"]
    assert found["summary"]["stages"][1]["name"] == "adapt"


def test_what_brings_nothing_is_not_exported(call, toy, tmp_path, monkeypatch):
    taus = iter([2.0, 1.5, 1.6, 1.4])
    monkeypatch.setattr(StageRun, "_walk", lambda self: next(taus))
    status, out, err = call(*GIVEN, "--out", tmp_path / "run")
    assert status == 0, err
    assert "brought nothing on the validation prompts" in out
    assert "ended at step 45 of 60" in out
    assert not list((tmp_path / "run").glob("export*"))


def test_stopped_and_called_again_it_goes_on(call, toy, tmp_path, monkeypatch, adapted):
    update, left = StageRun._update, [20]

    def interrupted(self, steps):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return update(self, steps)

    with monkeypatch.context() as patch:
        patch.setattr(StageRun, "_update", interrupted)
        assert call(*GIVEN, "--out", tmp_path / "run")[0] == 130
    status, out, err = call(*GIVEN, "--out", tmp_path / "run")
    assert status == 0, err
    assert "Going on with stage adapt at step 15 of 60" in out
    one, other = ((f / "drafter/model.safetensors").read_bytes() for f in (tmp_path / "run", toy / "adapted"))
    assert one == other
    (tmp_path / "run" / "summary.json").unlink()  # as if killed while it was being measured
    status, out, err = call(*GIVEN, "--out", tmp_path / "run")
    assert status == 0, err
    assert "Stage adapt was finished before: validation tau" in out


def test_answers_in_the_traffic_are_trained_on_where_they_are_kept(call, toy, tmp_path, monkeypatch):
    kept = {}

    def spy(target, prompts, data, path, **rest):
        made = prepare_trunks(target, prompts, data, path, **rest)
        kept[path.stem] = [target.tokenizer.decode(list(trunk.tokens)) for trunk in made.trunks]
        return made

    monkeypatch.setattr("draftloop.train.material.prepare_trunks", spy)
    one = ["stages.adapt.steps=1", "stages.adapt.evaluations=1", "evaluate={decode_prompts: 0, audit_prompts: 0}"]
    assert call(*GIVEN, "--out", tmp_path / "kept", "--keep-answers", *SMALL, *one, small=())[0] == 0
    assert sum("red sun" in text for text in kept["train"]) > 2
    assert not any("red sun" in text for text in kept["validation"] + kept["test"])
    assert call(*GIVEN, "--out", tmp_path / "anew", *SMALL, *one, small=())[0] == 0
    assert not any("red sun" in text for text in kept["train"])


# the dry run -----------------------------------------------------------------------------------------------------------
def test_a_dry_run_says_what_it_would_do_and_writes_nothing(call, toy, tmp_path):
    status, out, err = call(*GIVEN, "--out", tmp_path / "run", "--dry-run")
    assert status == 0, err
    assert "would learn tuned by overlap" in out
    assert "Prompts: 20 train, 2 validation, 2 test" in out
    row = next(line for line in out.splitlines() if line.startswith("answer the prompts"))
    # a round is a turn, and each fourth prompt has two of them, at most 12 tokens each
    turns = 24 + 6
    assert row.split()[4] == str(turns * 12)
    assert not (tmp_path / "run").exists()
    told = json.loads(call(*GIVEN, "--out", tmp_path / "run", "--dry-run", "--json")[1])
    assert told["prompts"] == {"train": 20, "validation": 2, "test": 2}
    assert told["costs"][0]["tokens"] == turns * 12
    assert told["costs"][1]["steps"] == 60
    assert [cost["bound"] for cost in told["costs"]] == [True, True, False]
    timed = call(*GIVEN, "--out", tmp_path / "run", "--dry-run", "--json", "--minutes", "5", small=SMALL[2:])[1]
    assert json.loads(timed)["costs"][1]["steps"] is None  # minutes are steps only once a step was timed
    assert "at least" not in out  # before a sum that holds a bound
    assert (
        call(*GIVEN, "--out", tmp_path / "run", "--dry-run", "--minutes", "5", small=SMALL[2:])[1].count("5 min") >= 2
    )


# what is refused -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "words"), [({"hidden_size": 64}, "hidden size 48, this one has 64"), ({"layers": 5}, "layers 4")]
)
def test_a_target_of_another_shape_is_refused(call, toy, tmp_path, changes, words):
    toy_checkpoint(tmp_path / "alien", **changes)
    for more in ((), ("--dry-run",)):
        given = ("-t", tmp_path / "alien", "-d", "run", "-p", "traffic.jsonl", "--out", tmp_path / "run")
        status, _, err = call(*given, *more)
        assert status == 2
        assert words in err
        assert len(err.strip().splitlines()) == 1, err
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-t", "tuned", "-d", "nowhere", "-p", "traffic.jsonl"), "there is no such folder"),
        (("-t", "tuned", "-d", "run", "-p", "nothing.jsonl"), "nothing.jsonl"),
        (("-t", "./gone", "-d", "run", "-p", "traffic.jsonl"), "gone"),
    ],
)
def test_what_is_not_there_is_one_sentence(call, tmp_path, arguments, words):
    status, out, err = call(*arguments, "--out", tmp_path / "run")
    assert status in (2, 3)
    assert not out
    assert words in err
    assert err.startswith("draftloop: ")


def test_a_drafter_without_weights_is_refused(call, tmp_path):
    for more in ((), ("--dry-run",)):
        status, out, err = call("-t", "tuned", "-d", "ngram", "-p", "traffic.jsonl", "--out", tmp_path / "run", *more)
        assert (status, out) == (2, "")
        assert "ngram is a lookup without weights, so it cannot learn a target" in err
        assert not (tmp_path / "run").exists()


def test_a_learned_mask_is_exported_for_the_engine_that_reads_one(call, toy, tmp_path, monkeypatch):
    target = draftloop.load_target(toy / "target", dtype="float32", device="cpu")
    part = DrafterPart(block_size=4, layers=1, target_layers=[0, 2], mask_token="learned")
    draftloop.save_drafter(new_drafter(spec_for(part, target), target), tmp_path / "learned", dtype=torch.float32)
    taus = iter([1.0, 1.1])
    monkeypatch.setattr(StageRun, "_walk", lambda self: next(taus))
    one = ["stages.adapt.steps=1", "stages.adapt.evaluations=1", "evaluate={decode_prompts: 0, audit_prompts: 0}"]
    status, out, err = call("-t", "tuned", "-d", tmp_path / "learned", "-p", "traffic.jsonl", "--out",
                            tmp_path / "run", *SMALL, *one, small=())  # fmt: skip
    assert status == 0, err
    assert (tmp_path / "run" / "export-vllm" / "mask_embedding.pt").is_file()
    assert "SGLang" in out
