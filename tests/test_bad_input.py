"""Bad prompts, recipes, machines and files of a run, through the command line: exit status 2, one sentence on what, where and
what to do, nothing written."""

from __future__ import annotations

import json

import pytest

from draftloop.cli import main
from tests.bad_input import assert_names, prompts
from tests.bad_input import copy as copy
from tests.bad_input import refused as refused
from tests.bad_input import toy as toy
from tests.bad_input import train as train
from tests.toy_run import toy_tokenizer


# prompts ---------------------------------------------------------------------------------------------------------------
def test_missing_prompt_file(train, tmp_path):
    assert_names(train("data.train=[nowhere.jsonl]"), "nowhere.jsonl", "no such prompt file")


def test_no_prompt_file(train):
    assert_names(train("data.train=[]"), "data.train")


@pytest.mark.parametrize("text", ["", "\n\n", "\ufeff"])
def test_empty_prompt_file(train, tmp_path, text):
    assert_names(train(prompts(tmp_path / "p.jsonl", text)), "p.jsonl", "no prompts")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"\n', 3, "JSON"),
        ('{"prompt": "a"}\n\nhello\n', 3, "JSON"),
        ('{"prompt": "a"}\n["b"]\n', 2, ""),
        ('{"prompt": "a"}\n{"question": "b"}\n', 2, "prompt"),
        ('{"prompt": 3}\n', 1, "prompt"),
        ('{"prompt": ""}\n', 1, "empty"),
        ('{"messages": []}\n', 1, "messages"),
        ('{"messages": [{"role": "king", "content": "a"}]}\n', 1, "king"),
    ],
)
def test_a_bad_line_is_named_by_number(train, tmp_path, text, line, words):
    assert_names(train(prompts(tmp_path / "p.jsonl", text)), f"p.jsonl:{line}", words)


def test_a_prompt_file_that_is_no_text(train, tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "\xff\xfe"}\n')
    assert_names(train(f"data.train=['{tmp_path / 'p.jsonl'}']"), "p.jsonl", "UTF-8")


def test_too_few_prompts_to_hold_some_out(train, tmp_path):
    two = prompts(tmp_path / "p.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n')
    assert_names(train(two, "data.validation=[]", "data.test=[]"), "too few", "data.validation")


def test_prompts_that_do_not_fit_into_the_target(refused, toy, tmp_path):
    many = prompts(tmp_path / "p.jsonl", json.dumps({"prompt": "word " * 500}) + "\n")
    told = refused("prepare", toy / "recipe.yaml", many, "data.max_prompt_tokens=5000", "--json", "--out",
                   tmp_path / "run")  # fmt: skip
    assert_names(told, "longer than the target's 256", "max_prompt_tokens")


def test_anchors_on_a_response_too_short(refused, toy, copy, tmp_path):
    """A target that ends at once leaves no anchor that another supervised token follows."""
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    ends = [token for token in range(config["vocab_size"]) if token != toy_tokenizer().convert_tokens_to_ids("<mask>")]
    (copy / "config.json").write_text(json.dumps({**config, "eos_token_id": ends}), encoding="utf-8")
    command = ["train", toy / "recipe.yaml", f"target.model={copy}", "--json", "--out", tmp_path / "run"]
    assert_names(refused(*command), "12 with a response too short for an anchor", "other prompts")


# recipe ----------------------------------------------------------------------------------------------------------------
def test_recipe_missing(train, tmp_path):
    assert_names(train(recipe=tmp_path / "none.yaml"), "none.yaml", "no such recipe", "Check the path")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stages.0.optimizer.lr=1", ["stages.0.optimizer", "stages.0.optimiser"]),
        ("targt.model=x", ["targt", "`target`"]),
        ("drafter.blocksize=4", ["drafter.blocksize", "`drafter.block_size`"]),
        ("drafter.block_size=1", ["drafter.block_size", "1", "2"]),
        ("stages.0.steps=yes", ["stages.0.steps"]),
        ("stages.0.steps=2.5", ["stages.0.steps", "2.5"]),
        ("stages.0.steps=0", ["stages.0.steps", "0"]),
        ("stages.0.optimiser.lr=fast", ["stages.0.optimiser.lr", "fast"]),
        ("stages.0.optimiser.lr=.nan", ["stages.0.optimiser.lr"]),
        ("stages.0.minutes=2", ["'s'", "both steps and minutes", "Set one of them to null"]),
        ("stages.0.steps=null", ["'s'", "no end", "steps or minutes"]),
        ("stages=[]", ["no stages"]),
        ("stages.0.objective.kind=draft_opd", ["draft_opd", "proposals: sampled, recorded or redraft"]),
        ("stages.0.proposals=recorded", ["recorded", "anchors: rollout"]),
        ("stages.0.start=sfd", ["sfd", "no earlier stage"]),
        ("schema=2", ["schema 2"]),
        ("drafter.target_layers=[2,0]", ["[2, 0]", "ascending", "0 to 3"]),
        ("drafter.target_layers=[0,4]", ["[0, 4]", "0 to 3"]),
        ("drafter.mask_token=<none>", ["<none>"]),
        ("drafter.heads=5", ["5"]),
        ("target.device=warp", ["warp", "cpu"]),
        ("nonsense", ["nonsense", "dotted.path=value"]),
    ],
)
def test_a_wrong_value(train, override, words):
    assert_names(train(override), *words)


def test_a_wrong_key_in_the_file_is_named_by_line(train, toy, tmp_path):
    text = (toy / "recipe.yaml").read_text(encoding="utf-8").replace("block_size:", "block_sise:")
    (tmp_path / "r.yaml").write_text(text, encoding="utf-8")
    line = next(i for i, row in enumerate(text.splitlines(), start=1) if "block_sise" in row)
    assert_names(train(recipe=tmp_path / "r.yaml"), f"r.yaml:{line}", "`drafter.block_size`")


@pytest.mark.parametrize("text", ["", "- a\n", "name: [\n", "name: a\nname: b\n", "\tname: a\n"])
def test_a_recipe_that_is_none(train, tmp_path, text):
    (tmp_path / "r.yaml").write_text(text, encoding="utf-8")
    assert_names(train(recipe=tmp_path / "r.yaml"), "r.yaml")


# the machine ------------------------------------------------------------------------------------------------------------
def test_kernels_that_this_machine_cannot_run(train, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert_names(train("stages.0.objective.kernel=triton"), "objective.kernel", "CUDA GPU", "auto")


# files of a run --------------------------------------------------------------------------------------------------------
def test_evaluate_names_a_missing_prompt_file(refused, toy, tmp_path):
    told = refused("evaluate", toy / "drafter", "--target", toy / "target", "--dtype", "float32", "-p",
                   tmp_path / "n.jsonl", "--cache", tmp_path / "c")  # fmt: skip
    assert_names(told, "n.jsonl")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("how", [[], ["--offline"], ["--decode"]])
def test_evaluate_names_the_prompt_that_is_too_long(refused, toy, tmp_path, how):
    """The user's file and options, before anything is answered. Fails if the cache's file or a recipe's key is named."""
    (tmp_path / "p.jsonl").write_text(
        json.dumps({"prompt": "short"}) + "\n" + json.dumps({"prompt": "long " * 300}) + "\n", encoding="utf-8"
    )
    command = ["evaluate", toy / "drafter", "--target", toy / "target", "--dtype", "float32", "-p", tmp_path / "p.jsonl",
               *(how if "--decode" in how else [*how, "--cache", tmp_path / "c"])]  # fmt: skip
    told = refused(*command, "--max-new-tokens", 16)
    assert_names(told, "p.jsonl:2", "do not fit into the target's context of 256")
    assert "data." not in told
    told = refused(*command, "--max-new-tokens", 99999999)
    assert_names(told, "max_new_tokens", "99999999 new tokens do not fit")
    assert not (tmp_path / "c").exists()


def test_a_damaged_checkpoint(capsys, toy, tmp_path):
    command = ["train", toy / "recipe.yaml", "evaluate.decode_prompts=0", "evaluate.audit_prompts=0", "--out",
               tmp_path / "run", "--json"]  # fmt: skip
    main_quietly(command)
    for name in ("summary.json", "stages.json"):
        (tmp_path / "run" / name).unlink()
    file = next((tmp_path / "run" / "checkpoints").rglob("optimiser.safetensors"))
    file.write_bytes(file.read_bytes()[:100])
    capsys.readouterr()
    with pytest.raises(SystemExit) as done:
        main([str(word) for word in command])
    assert done.value.code == 2
    assert_names(capsys.readouterr().err.splitlines()[-1], file, "checkpoint", "begin a new run")


def main_quietly(command) -> None:
    with pytest.raises(SystemExit) as done:
        main([str(word) for word in command])
    assert not done.value.code
