"""`draftloop export`: a folder that engines serve, all of it or nothing, and what it says to those who serve it."""

from __future__ import annotations

import json
import os
import pickle
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftloop.cli import main
from draftloop.core.errors import EnvironmentFault, InputError
from draftloop.formats import export as room
from draftloop.formats.export import export
from draftloop.formats.history import History, Step, read_history
from draftloop.formats.load import load_drafter
from draftloop.formats.serving import serve_command
from draftloop.formats.zlab import save_drafter
from tests.checkpoints import SPEC, loose, refused, same_bits
from tests.test_drafter_learned_mask import learned
from tests.tiny import tiny_target

FILES = {"config.json", "model.safetensors", "README.md", "serve.json"}


def history(objective: str = "ce") -> History:
    return History(
        command="draftloop train recipes/a.yaml", target="m", hardware="one GPU",
        stages=(Step("sft", "sft", "ce", 10, 12345), Step("last", "overlap", objective, 5, 99)),
        delivered="last", objective=objective, tau=2.345, interval=(2.1, 2.6), sets={"gsm8k": (3.0, (2.9, 3.1)), "one": (2.0, None)},
    )  # fmt: skip


# What is written


def test_an_export_is_whole_and_says_how_to_serve_it(tmp_path):
    made = export(loose(), tmp_path / "deep" / "mine", target_name="Qwen/Qwen3-8B", history=history())
    folder = tmp_path / "deep" / "mine"
    assert made.folder == folder
    assert {path.name for path in folder.iterdir()} == set(made.files) == FILES
    assert [path.name for path in folder.parent.iterdir()] == ["mine"]
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert same_bits(load_drafter(folder), loose().to(torch.bfloat16))
    speculative = {"method": "dflash", "model": str(folder), "num_speculative_tokens": 4}
    vllm, sglang = made.commands["vllm"], made.commands["sglang"]
    assert vllm[:4] == ["vllm", "serve", "Qwen/Qwen3-8B", "--speculative-config"]
    assert json.loads(vllm[4]) == speculative
    assert sglang == [
        "python", "-m", "sglang.launch_server", "--model-path", "Qwen/Qwen3-8B",
        "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(folder),
    ]  # fmt: skip
    facts = json.loads((folder / "serve.json").read_text())
    assert facts["commands"] == made.commands
    assert (facts["target"], facts["form"], facts["num_speculative_tokens"]) == ("Qwen/Qwen3-8B", "zlab", 4)
    assert facts["probabilistic"] is False

    card = (folder / "README.md").read_text()
    for words in (
        shlex.join(vllm), shlex.join(sglang), "base_model: \"Qwen/Qwen3-8B\"", "5 slots", "1, 4, 7", "token 19", "2.35",
        "2.10 to 2.60", "| gsm8k | 3.00 | 2.90 to 3.10 |", "| one | 2.00 | one response |", "| sft | sft | ce | 10 | 12,345 |", "## Licence", "fill this in",
        "draftloop train recipes/a.yaml", "one GPU",
    ):  # fmt: skip
        assert words in card, words


def test_without_a_run_the_card_says_so_and_a_local_target_is_no_hub_id(tmp_path):
    made = export(loose(), tmp_path / "a", target_name=str(tmp_path))
    card = (made.folder / "README.md").read_text()
    assert "exported without its run" in card
    assert "base_model" not in card


def test_the_target_is_the_one_it_was_made_for(tmp_path):
    assert export(loose(), tmp_path / "a").commands["vllm"][2] == SPEC.made_for["target"]
    with pytest.raises(InputError, match="does not say which target") as caught:
        export(loose(replace(SPEC, made_for={})), tmp_path / "b")
    assert caught.value.exit_code == 2
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("objective", ["ce", "forward_kl", "draft_opd", "", "tv", "nla", "e2e_tv", "overlap"])
def test_a_drafter_trained_for_overlap_is_served_by_drawing(tmp_path, objective):
    """vLLM drafts the argmax unless told otherwise; SGLang has no such choice with DFlash, and the export says so."""
    draws = objective in ("tv", "nla", "e2e_tv", "overlap")
    made = export(loose(), tmp_path / "a", history=history(objective))
    assert (json.loads(made.commands["vllm"][-1]).get("draft_sample_method") == "probabilistic") is draws
    assert any("SGLang drafts DFlash's argmax" in note for note in made.notes) is draws
    assert not any("rejection" in word for word in made.commands["sglang"])
    flipped = export(loose(), tmp_path / "b", history=history(objective), probabilistic=not draws)
    assert ("draft_sample_method" in flipped.commands["vllm"][-1]) is not draws


def test_commands_are_shell_safe_and_take_more_arguments(tmp_path):
    command = serve_command("vllm", "a b/c", tmp_path / "it's", SPEC, True, ["--port", "9"])
    assert shlex.split(shlex.join(command)) == command
    assert command[-2:] == ["--port", "9"]
    assert json.loads(command[4])["model"] == str(tmp_path / "it's")
    assert serve_command("sglang", "t", tmp_path, SPEC, extra=["--port", "9"])[-2:] == ["--port", "9"]


# What is refused


@pytest.mark.parametrize("engine", ["sglang", "both"])
def test_what_sglang_cannot_serve_is_refused_and_vllm_named(tmp_path, engine):
    with pytest.raises(InputError, match=r"SGLang does not read the speculators form.*--for vllm"):
        export(loose(), tmp_path / "a", engine=engine, form="speculators")
    drafter = learned(tiny_target("llama"))
    with pytest.raises(InputError, match=r"learned mask vector.*embedding of token.*--for vllm") as caught:
        export(drafter, tmp_path / "a", engine=engine, target_name="x/y")
    assert caught.value.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_nan_is_not_exported(tmp_path):
    drafter = loose()
    with torch.no_grad():
        drafter.norm.weight[0] = float("nan")
    with pytest.raises(InputError, match="NaN"):
        export(drafter, tmp_path / "a")
    assert not list(tmp_path.iterdir())


# What is on disk, when


@pytest.mark.parametrize("step", ["write_tensors", "write_json", "write_text", "_move"])
@pytest.mark.parametrize("before", [False, True])
def test_a_stopped_export_leaves_what_was_there(tmp_path, monkeypatch, step, before):
    if before:
        export(loose(seed=3), tmp_path / "a", dtype=torch.float32)

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(room, step, fail)
    with pytest.raises(KeyboardInterrupt):
        export(loose(), tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == (["a"] if before else [])
    if before:
        assert same_bits(load_drafter(tmp_path / "a"), loose(seed=3))


def test_a_move_that_fails_puts_the_old_export_back(tmp_path, monkeypatch):
    export(loose(seed=3), tmp_path / "a", dtype=torch.float32)

    def rename(source, target, real=os.rename):
        if str(source).endswith(".part"):
            raise PermissionError(13, "no")
        real(source, target)

    monkeypatch.setattr(room, "exchange", lambda one, other: False)  # as on file systems that cannot
    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(EnvironmentFault, match="cannot write"):
        export(loose(), tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert same_bits(load_drafter(tmp_path / "a"), loose(seed=3))


def test_an_earlier_export_is_replaced_whole(tmp_path):
    drafter = learned(tiny_target("llama"))
    export(drafter, tmp_path / "a", engine="vllm", target_name="x/y")
    assert (tmp_path / "a" / "mask_embedding.pt").exists()
    export(loose(), tmp_path / "a", dtype=torch.float32)
    assert {path.name for path in (tmp_path / "a").iterdir()} == FILES
    assert same_bits(load_drafter(tmp_path / "a"), loose())
    (tmp_path / "b").mkdir()
    export(loose(), tmp_path / "b")  # an empty folder may be filled
    assert oct((tmp_path / "b").stat().st_mode & 0o777) == oct(0o777 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_nothing_else_is_overwritten(tmp_path):
    for name, make in {
        "drafter": lambda at: save_drafter(loose(), at),
        "notes": lambda at: (at.mkdir(), (at / "x.txt").write_text("mine")),
        "false": lambda at: (at.mkdir(), (at / "serve.json").write_text("[1]")),
    }.items():
        make(tmp_path / name)
        kept = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        with pytest.raises(InputError, match="no export of ours"):
            export(loose(seed=5), tmp_path / name)
        assert {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} == kept
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="a file, not a folder"):
        export(loose(), tmp_path / "file")
    export(loose(), tmp_path / "mine")
    (tmp_path / "mine" / "LICENSE").write_text("x")
    with pytest.raises(InputError, match=r"LICENSE.*would be lost"):
        export(loose(), tmp_path / "mine")


# The learned mask vector, read back


@pytest.fixture
def masked(tmp_path) -> Path:
    return export(learned(tiny_target("llama")), tmp_path / "m", engine="vllm", target_name="x/y", dtype=torch.float32).folder  # fmt: skip


def unpair(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.pop("draftloop")
    (folder / "config.json").write_text(json.dumps(config))


def test_a_published_mask_vector_is_read_by_its_file_alone(masked):
    unpair(masked)
    loaded = load_drafter(masked)
    assert loaded.spec.learned_mask
    assert torch.equal(loaded.mask_embedding, learned(tiny_target("llama")).mask_embedding)
    token = loaded.spec.mask_token_id
    torch.save({"embedding": torch.ones(1, 48).half(), "mask_token_id": token}, masked / "mask_embedding.pt")
    assert torch.equal(load_drafter(masked, dtype=torch.float32).mask_embedding, torch.ones(48))


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("draftloop-bomb",)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_mask_file_that_is_more_or_less_than_that_is_refused(masked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = masked / "mask_embedding.pt"
    token = load_drafter(masked).spec.mask_token_id
    torch.save({"embedding": torch.zeros(48), "mask_token_id": token}, file)
    refused(masked, "two different saves")
    unpair(masked)
    for state, words in [
        (
            {"embedding": torch.zeros(48), "mask_token_id": token + 1},
            [f"is {token + 1} in mask_embedding.pt and {token} in"],
        ),
        ({"embedding": torch.zeros(47), "mask_token_id": token}, ["shape [47]", "[48]"]),
        ({"embedding": torch.zeros(3, 48), "mask_token_id": token}, ["shape [3, 48]"]),
        ({"embedding": torch.full((48,), float("nan")), "mask_token_id": token}, ["NaN"]),
        ({"embedding": torch.zeros(48, dtype=torch.int8), "mask_token_id": token}, ["quantised"]),
        ({"embedding": torch.zeros(48), "mask_token_id": token, "per_position": True}, ["each position"]),
        ({"mask_token_id": token}, ["no object with a tensor"]),
        (torch.zeros(48), ["no object with a tensor"]),
    ]:
        torch.save(state, file)
        refused(masked, "mask_embedding.pt", *words)
    for content in (b"", b"\x80\x04.", b"PK\x03\x04rubbish", pickle.dumps(Bomb()), b"text"):
        file.write_bytes(content)
        refused(masked, "mask_embedding.pt")
    torch.save({"embedding": Bomb()}, file)
    refused(masked, "could run code")
    assert not list(tmp_path.glob("*bomb"))


def test_two_mask_files_are_refused(masked):
    (masked / "mask_embedding.safetensors").write_bytes(b"")
    refused(masked, "mask_embedding")


# The command


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "run"
    save_drafter(loose(), folder / "drafter", dtype=torch.float32)
    part = {"tau_pooled": 2.0, "interval": [1.9, 2.1], "sets": {"a": {"tau_pooled": 2.5, "interval": [2.4, 2.6]}}}
    cells = {"trunks": "fixed", "anchors": "random", "proposals": "sampled", "objective": "e2e_tv"}
    stages = [
        {"name": "untrained", "method": None, "cells": None, "steps": 0, "labels": 0, **part},
        {"name": "tv", "method": "overlap", "cells": cells, "steps": 7, "labels": 70, **part},
    ]
    summary = {
        "command": "draftloop train r.yaml", "target": {"name": "m"}, "delivered": "tv", "stages": stages,
        "hardware": {"gpu": None, "cpu_cores": 2},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def called(*arguments: str) -> int:
    with pytest.raises(SystemExit) as done:
        main(["export", *arguments])
    return int(done.value.code or 0)


def test_the_command_exports_a_run(run, capsys):
    assert called(str(run), "--for", "vllm", "--target", "Qwen/Q") == 0
    out = capsys.readouterr().out
    assert str(run / "export-vllm") in out
    assert "vllm serve Qwen/Q --speculative-config" in out
    assert '"draft_sample_method":"probabilistic"' in out
    assert "| a | 2.50 | 2.40 to 2.60 |" in (run / "export-vllm" / "README.md").read_text()
    assert same_bits(load_drafter(run / "export-vllm"), loose().to(torch.bfloat16))


def test_an_unfinished_run_is_exported_with_a_warning(run, capsys):
    """One that was stopped while its drafter was measured; a whole run, and a folder that is none, go without."""
    save_drafter(loose(), run / "drafter", extra={"stage": "tv"})
    (run / "run.json").write_text("{}")
    assert called(str(run), "--for", "vllm", "--target", "Qwen/Q") == 0
    assert "unfinished" not in capsys.readouterr().err
    (run / "summary.json").unlink()
    for folder in (run, run / "drafter"):
        assert called(str(folder), "--for", "vllm", "--target", "Qwen/Q") == 0
        lines = capsys.readouterr().err.strip().splitlines()
        assert len([line for line in lines if "this run is unfinished" in line]) == 1, lines
        assert "its drafter is that of stage tv, and was not measured or audited" in lines[0]
    (run / "run.json").unlink()
    assert called(str(run), "--for", "vllm", "--target", "Qwen/Q") == 0
    assert "unfinished" not in capsys.readouterr().err


def test_the_command_speaks_json_and_takes_a_drafter_folder(run, tmp_path, capsys):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    arguments = (
        "--for",
        "vllm",
        "--form",
        "speculators",
        "-o",
        str(tmp_path / "o"),
        "-t",
        str(tmp_path / "t"),
        "--json",
    )
    assert called(str(run / "drafter"), *arguments) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["folder"], said["form"]) == (str(tmp_path / "o"), "speculators")
    assert said["commands"].keys() == {"vllm"}
    verifier = json.loads((tmp_path / "o" / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": str(tmp_path / "t"), "architectures": ["Qwen3ForCausalLM"]}


def test_what_a_drafter_was_trained_on_goes_with_it(tmp_path, capsys):
    """Without its run too, and from one export to the next, in either form."""
    save_drafter(loose(), tmp_path / "d", extra={"objective": "e2e_tv"})
    for source, form, out in (("d", "zlab", "e"), ("e", "zlab", "f"), ("d", "speculators", "g")):
        arguments = ("--for", "vllm", "--form", form, "-t", "org/model", "-o", str(tmp_path / out))
        assert called(str(tmp_path / source), *arguments) == 0
        assert '"draft_sample_method":"probabilistic"' in capsys.readouterr().out
    save_drafter(loose(), tmp_path / "other", extra={"objective": "ce"})
    assert called(str(tmp_path / "other"), "--for", "vllm", "-t", "org/model", "-o", str(tmp_path / "h")) == 0
    assert "draft_sample_method" not in capsys.readouterr().out


def test_the_command_names_what_is_wrong(run, tmp_path, capsys):
    assert called(str(run), "--form", "speculators", "--target", "a/b") == 2
    assert "SGLang does not read the speculators form" in capsys.readouterr().err
    assert called(str(tmp_path / "nowhere")) == 2
    (run / "summary.json").write_text("{}")
    assert called(str(run), "--target", "a/b") == 2
    err = capsys.readouterr().err
    assert "summary.json: it is not a summary that draftloop wrote" in err
    assert read_history(tmp_path) is None
