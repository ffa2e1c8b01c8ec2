"""Bad input, through the command line: exit status 2, one sentence on what, where and what to do, nothing written."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file

from draftloop.cli import main
from draftloop.core.errors import InputError
from draftloop.drafter.build import new_drafter
from draftloop.drafter.families import spec_for
from draftloop.formats.zlab import save_drafter
from draftloop.recipe import DrafterPart
from draftloop.target.load import load_target
from tests.tiny import tiny_model
from tests.toy_run import toy_checkpoint, toy_recipe, toy_tokenizer


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """Target, prompts, a recipe of one step, and a drafter that fits."""
    folder = tmp_path_factory.mktemp("toy")
    recipe = toy_recipe(folder)
    recipe["stages"] = [{"name": "s", "method": "sft", "steps": 1, "evaluations": 1}]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    make_drafter(folder / "target", folder / "drafter")
    return folder


def make_drafter(target: Path, out: Path, **shape) -> Path:
    loaded = load_target(target, dtype="float32", device="cpu")
    part = DrafterPart(block_size=4, layers=1, **{"target_layers": [0, 2], **shape})
    return save_drafter(new_drafter(spec_for(part, loaded), loaded), out)


@pytest.fixture
def refused(capsys, tmp_path):
    """Run the command line and demand exit status 2 and one sentence; gives the sentence."""
    transformers.utils.logging.disable_progress_bar()

    def run(*arguments, status=2):
        capsys.readouterr()
        with pytest.raises(SystemExit) as done:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert done.value.code == status, err
        assert not out, out
        lines = err.strip().splitlines()
        assert len(lines) == 1, err
        assert lines[0].startswith("draftloop: ")
        assert lines[0].endswith((".", "?")), lines[0]
        assert "our fault" not in err
        assert "Error" not in err, err  # no name of an exception
        return lines[0]

    return run


@pytest.fixture
def train(refused, toy, tmp_path):
    """`draftloop train` on the toy recipe with overrides; nothing may be left where the run would have been."""

    def run(*overrides, recipe=None, **options):
        told = refused("train", recipe or toy / "recipe.yaml", *overrides, "--out", tmp_path / "run", **options)
        assert not (tmp_path / "run").exists()
        return told

    return run


def assert_names(sentence: str, *words: object) -> None:
    for word in words:
        assert str(word) in sentence, (word, sentence)


def prompts(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return f"data.train=['{path}']"


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


# target ----------------------------------------------------------------------------------------------------------------
@pytest.fixture
def copy(toy, tmp_path) -> Path:
    """A copy of the target to break."""
    return Path(shutil.copytree(toy / "target", tmp_path / "copy"))


@pytest.fixture
def broken(refused, train, toy, copy):
    """The same sentence from `train` and, but for the drafter, from `audit`."""

    def run():
        told = train(f"target.model={copy}")
        assert refused("audit", toy / "drafter", "--target", copy, "-p", toy / "test.jsonl") == told
        return told

    return run


def test_target_directory_missing(train, tmp_path):
    assert_names(train(f"target.model={tmp_path / 'none'}"), tmp_path / "none", "no such folder", "path")


def test_a_target_without_weights(broken, copy):
    (copy / "model.safetensors").unlink()
    assert_names(broken(), copy, "no safetensors weights")


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_target(broken, copy, keep):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])
    assert_names(broken(), "model.safetensors", "again")


def test_a_pickled_target(broken, copy):
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    torch.save(tensors, copy / "pytorch_model.bin")
    assert_names(broken(), "pickle", "pytorch_model.bin", "safetensors")


def test_a_pickle_by_the_name_of_safetensors(broken, copy):
    (copy / "model.safetensors").write_bytes(pickle.dumps({"a": list(range(100))}))
    assert_names(broken(), "model.safetensors", "pickle")


def test_a_target_with_nan(broken, copy):
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert_names(broken(), "model.layers.2.mlp.up_proj.weight", "NaN")


def test_a_target_that_lacks_a_tensor(broken, copy):
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert_names(broken(), "model.layers.2.mlp.up_proj.weight", "complete")


def test_a_broken_config(broken, copy):
    (copy / "config.json").write_text("{", encoding="utf-8")
    assert_names(broken(), copy)


def test_a_tokenizer_with_more_tokens(broken, copy):
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens([f"<more{i}>" for i in range(40)])
    tokenizer.save_pretrained(copy)
    assert_names(broken(), len(tokenizer), "tokens", "tokenizer that the model was trained with")


def test_a_tokenizer_with_another_end(broken, copy):
    tokenizer = toy_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(copy)
    assert_names(broken(), "ends text with token 0", "tokenizer that the model was trained with")


def test_no_tokenizer(broken, copy):
    for file in copy.glob("*token*"):
        file.unlink()
    assert_names(broken(), "tokenizer", copy)


def test_a_hub_id_that_cannot_be_reached(toy, tmp_path):
    """No network is the machine's fault: exit status 3. In a process of its own, told to be offline."""
    env = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "draftloop.cli", "train", toy / "recipe.yaml", "target.model=some-body/no-such-model",
         "--out", tmp_path / "run"],
        capture_output=True, text=True, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert_names(done.stderr, "some-body/no-such-model", "hub cannot be reached")
    assert not (tmp_path / "run").exists()


def test_an_eager_live_module():
    with pytest.raises(InputError, match="attends by `eager`.*sdpa"):
        load_target(tiny_model(attn_implementation="eager"))


# drafter ---------------------------------------------------------------------------------------------------------------
@pytest.fixture
def foreign(refused, train, toy, tmp_path):
    """The sentences with which `audit`, `evaluate` and `train` refuse a drafter; they are one."""

    def run(drafter: Path):
        rest = ["--target", toy / "target", "-p", toy / "test.jsonl"]
        told = refused("audit", drafter, *rest)
        assert refused("evaluate", drafter, *rest, "--cache", tmp_path / "cache") == told
        assert not (tmp_path / "cache").exists()
        assert train(f"drafter.init='{drafter}'") == told
        return told

    return run


@pytest.mark.parametrize(
    ("changes", "shape", "words"),
    [
        ({"num_hidden_layers": 6}, {}, ["6", "4"]),
        ({"num_hidden_layers": 6}, {"target_layers": [0, 5]}, ["6", "4"]),
        ({"hidden_size": 64}, {}, ["64", "48"]),
        ({"vocab_size": 400}, {}, ["400"]),
    ],
)
def test_a_drafter_for_another_target(foreign, tmp_path, changes, shape, words):
    toy_checkpoint_with(tmp_path / "other", **changes)
    told = foreign(make_drafter(tmp_path / "other", tmp_path / "drafter", **shape))
    assert_names(told, tmp_path / "drafter", *words)


def toy_checkpoint_with(folder: Path, vocab_size: int | None = None, **changes) -> None:
    if vocab_size is None:
        toy_checkpoint(folder, **changes)
        return
    tokenizer = toy_tokenizer()
    eos = tokenizer.eos_token_id
    tiny_model(vocab=vocab_size, eos_token_id=eos, pad_token_id=eos, bos_token_id=None).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture
def draft(toy, tmp_path) -> Path:
    """A copy of the drafter to break."""
    return Path(shutil.copytree(toy / "drafter", tmp_path / "draft"))


def test_drafter_missing(foreign, tmp_path):
    assert_names(foreign(tmp_path / "none"), tmp_path / "none", "no such folder")


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
def test_a_truncated_drafter(foreign, draft, keep):
    file = draft / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])
    assert_names(foreign(draft), "model.safetensors", "again")


def test_a_pickled_drafter(foreign, draft):
    torch.save(load_file(draft / "model.safetensors"), draft / "pytorch_model.bin")
    (draft / "model.safetensors").unlink()
    assert_names(foreign(draft), "pickle")


def test_a_drafter_with_nan(foreign, draft):
    tensors = load_file(draft / "model.safetensors")
    tensors["fc.weight"][0, 0] = float("inf")
    save_file(tensors, draft / "model.safetensors")
    assert_names(foreign(draft), "fc.weight", "infinity")


def test_a_target_given_as_drafter(foreign, toy):
    assert_names(foreign(toy / "target"), toy / "target")


def test_an_unfinished_run_given_as_drafter(foreign, tmp_path):
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "run.json").write_text("{}")
    told = foreign(tmp_path / "unfinished")
    assert_names(told, "delivered no drafter yet", f"draftloop train RECIPE --out {tmp_path / 'unfinished'}")


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
