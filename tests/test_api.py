"""The typed API on a toy target: load, generate, stream, prepare, evaluate, audit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import draftloop
from draftloop import api
from draftloop.core.errors import InputError
from draftloop.data.prompts import read_prompts
from draftloop.drafter.build import new_drafter
from draftloop.drafter.families import spec_for
from draftloop.recipe import DrafterPart
from tests.toy_run import toy as toy
from tests.toy_run import toy_checkpoint, toy_prompts, toy_tokenizer

ASKS = ["the cat", "one two three?", "the mat sat on the cat, and so on and on"]


@pytest.fixture(scope="module")
def target(toy):
    return draftloop.load_target(toy / "target", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def drafter(target, toy):
    made = new_drafter(spec_for(DrafterPart(block_size=4, layers=1, target_layers=[0, 2]), target), target)
    draftloop.save_drafter(made, toy / "drafter", dtype=torch.float32)
    return draftloop.load_drafter(toy / "drafter", target)


def texts(replies) -> list[tuple[str, tuple[int, ...], bool]]:
    return [(reply.text, reply.tokens, reply.finished) for reply in replies]


# loading ---------------------------------------------------------------------------------------------------------------
def test_the_package_is_imported_without_torch():
    """And `train` and `evaluate` are functions, though rooms have these names: whatever was imported before."""
    code = """
import sys, draftloop
assert not {"torch", "transformers", "pydantic"} & set(sys.modules)
import draftloop.evaluate.tau
for name in draftloop.__all__ * 2:
    assert callable(getattr(draftloop, name)), name
assert draftloop.evaluate.tau.acceptance
from draftloop import evaluate, train
for function, word in ((evaluate, "target"), (train, "recipe")):
    try:
        function()
    except TypeError as error:
        assert word in str(error), error
try:
    draftloop.nothing
except AttributeError:
    sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr


def test_every_public_name_is_there():
    for name in draftloop.__all__:
        assert getattr(api, name).__doc__
        assert callable(getattr(draftloop, name))
    assert set(draftloop.__all__) <= set(api.__all__)


def test_a_live_module_is_the_target_of_its_folder(target, toy):
    model = AutoModelForCausalLM.from_pretrained(toy / "target", dtype=torch.float32, attn_implementation="sdpa")
    live = draftloop.load_target(model, tokenizer=toy_tokenizer())
    assert live.model is model
    assert live.fingerprint == target.fingerprint
    assert texts(draftloop.generate(live, ASKS, max_new_tokens=8)) == texts(
        draftloop.generate(target, ASKS, max_new_tokens=8)
    )
    bare = draftloop.load_target(model)
    with pytest.raises(InputError, match="no tokenizer"):
        draftloop.generate(bare, ASKS)


def test_saved_and_loaded_a_drafter_is_the_same(drafter, target, toy):
    again = draftloop.load_drafter(str(toy / "drafter"), target)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


# generating ------------------------------------------------------------------------------------------------------------
def test_generate_is_the_model_s_own_greedy_text(target):
    replies = draftloop.generate(target, ASKS, max_new_tokens=12)
    for ask, reply in zip(ASKS, replies, strict=True):
        ids = target.tokenizer.apply_chat_template(
            [{"role": "user", "content": ask}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        own = target.model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
        assert list(reply.tokens) == own
        cut = [token for token in own if token not in target.eos_ids]
        assert reply.text == target.tokenizer.decode(cut, skip_special_tokens=True)
        assert reply.finished == (own[-1] in target.eos_ids)
        assert len(reply.tokens) <= 12


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 20, "top_p": 0.9}])
def test_with_and_without_a_drafter_it_is_the_same_text(target, drafter, options):
    """Greedy, and by `match` at any temperature; whatever the batch."""
    plain = draftloop.generate(target, ASKS, max_new_tokens=24, seed=5, **options)
    for batch in (1, 16):
        drafted = draftloop.generate(
            target, ASKS, drafter=drafter, max_new_tokens=24, seed=5, batch_size=batch, **options
        )
        assert texts(drafted) == texts(plain)
        for reply in drafted:
            steps = reply.trace.steps
            assert reply.tau == pytest.approx(sum(step.committed for step in steps) / len(steps))
            assert sum(step.committed for step in steps) == len(reply.tokens) - 1


def test_the_seed_and_the_place_in_the_list_decide_a_sample(target, drafter):
    def sample(asks, **more):
        return [reply.text for reply in draftloop.generate(target, asks, max_new_tokens=12, temperature=1.5, **more)]

    assert sample(ASKS, seed=1) == sample(ASKS, seed=1)
    assert sample(ASKS, seed=1) != sample(ASKS, seed=2)
    assert sample(ASKS[1:], seed=1) == sample(ASKS, seed=1)[1:]
    four = sample([ASKS[0]] * 4, drafter=drafter, rule="ratio")
    assert len(set(four)) == 4  # the same prompt again is another sample
    assert sample([ASKS[0]], drafter=drafter, rule="ratio") == four[:1]


def test_messages_and_template_arguments(target):
    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the cat"}]
    with_system, without = draftloop.generate(target, [asked, "the cat"], max_new_tokens=4)
    assert "be brief" in target.tokenizer.decode(list(with_system.trace.prompt))
    assert "be brief" not in target.tokenizer.decode(list(without.trace.prompt))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "at least 1"),
        ({"max_new_tokens": 500}, "longer than the target's 256"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"rule": "guess"}, "no verification rule 'guess'"),
    ],
)
def test_options_out_of_range(target, options, words):
    with pytest.raises(InputError, match=words):
        draftloop.generate(target, ASKS, **options)
    with pytest.raises(InputError, match=words):
        list(draftloop.generate_stream(target, ASKS, **options))


def test_no_prompts_no_replies(target, drafter):
    assert draftloop.generate(target, [], drafter=drafter) == []
    assert list(draftloop.generate_stream(target, [])) == []


# streaming -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "rule": "ratio", "batch_size": 2}])
def test_pieces_join_to_the_text(target, drafter, options):
    replies = draftloop.generate(target, ASKS, drafter=drafter, max_new_tokens=24, **options)
    pieces = list(draftloop.generate_stream(target, ASKS, drafter=drafter, max_new_tokens=24, **options))
    for i, reply in enumerate(replies):
        mine = [piece for piece in pieces if piece.index == i]
        assert "".join(piece.text for piece in mine) == reply.text
        assert tuple(token for piece in mine for token in piece.tokens) == reply.tokens
        assert [piece.done for piece in mine] == [False] * (len(mine) - 1) + [True]


def test_the_defaults_of_a_stream_are_those_of_generate(target):
    ask = ["the cat sat"]
    joined = "".join(piece.text for piece in draftloop.generate_stream(target, ask, max_new_tokens=200))
    assert joined == draftloop.generate(target, ask, max_new_tokens=200)[0].text


class Scripted:
    """`rounds` that commits given tokens, one a round."""

    def __init__(self, tokens):
        self.tokens = tokens

    def __call__(self, target, drafter, requests, options, results):
        from draftloop.decode.loop import Commit

        for i, token in enumerate(self.tokens):
            results[0].tokens.append(token)
            yield [Commit(0, (token,), i == len(self.tokens) - 1)]


@pytest.mark.parametrize("text", ["naïve €5 – 日本語 🦜🦜 ok", "é", "🦜", "a\u200db ﷽"])
def test_a_character_of_several_tokens_is_never_broken(target, monkeypatch, text):
    """The toy tokenizer writes a byte a token here."""
    ids = target.tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text)
    monkeypatch.setattr(api, "rounds", Scripted([*ids, target.eos_ids[0]]))
    pieces = list(draftloop.generate_stream(target, ["x"]))
    assert "".join(piece.text for piece in pieces) == text
    assert not any("\ufffd" in piece.text for piece in pieces)
    assert len([piece for piece in pieces if piece.text]) >= len(set(text)) - 3  # shown as soon as it is whole


def test_bytes_that_are_no_text_come_out_in_the_end(target, monkeypatch):
    broken = target.tokenizer.encode("🦜", add_special_tokens=False)[:2]
    letter = target.tokenizer.encode("a", add_special_tokens=False)
    for ids in (broken, [*broken, *letter], [*letter, *broken]):
        monkeypatch.setattr(api, "rounds", Scripted(ids))
        joined = "".join(piece.text for piece in draftloop.generate_stream(target, ["x"]))
        assert joined == target.tokenizer.decode(ids)


# prepare, evaluate, audit ----------------------------------------------------------------------------------------------
def test_prepare(toy, tmp_path, target):
    recipe = draftloop.load_recipe(toy / "recipe.yaml")
    parts = draftloop.prepare(recipe, out=tmp_path / "run", quiet=True)
    assert {name: len(part.trunks) for name, part in parts.items()} == {"train": 12, "validation": 4, "test": 6}
    again = draftloop.prepare(recipe, out=tmp_path / "run", quiet=True)
    assert again == parts
    trunk = parts["test"].trunks[0]
    asked = read_prompts([str(toy / "test.jsonl")], Path("."), None)[0]
    assert draftloop.generate(target, [asked.text], max_new_tokens=16)[0].tokens == trunk.tokens[trunk.first :]


def test_bad_input_leaves_nothing(toy, tmp_path):
    recipe = draftloop.load_recipe(toy / "recipe.yaml", ["data.test=[none.jsonl]"])
    with pytest.raises(InputError, match=r"none\.jsonl"):
        draftloop.prepare(recipe, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_evaluate_walked_and_decoded_agree(toy, tmp_path, target, drafter):
    files = [str(toy / "test.jsonl"), str(toy / "validation.jsonl")]
    walked = draftloop.evaluate(target, drafter, files, folder=tmp_path, max_new_tokens=16)
    decoded = draftloop.evaluate(target, drafter, files, folder=tmp_path, how="decode", max_new_tokens=16, batch_size=4)
    assert walked.acceptance == decoded.acceptance
    assert walked.acceptance.responses == 10
    assert (walked.speed, walked.how, decoded.how) == (None, "walk", "decode")
    arm = decoded.speed["arms"][0]
    assert arm["break_even_tau"] == arm["round_cost"]
    assert arm["speedup"] == pytest.approx(arm["tokens_per_s"] / decoded.speed["plain"]["tokens_per_s"])
    assert (
        draftloop.evaluate(target, drafter, files, folder=tmp_path, max_new_tokens=16, limit=4).acceptance.responses
        == 4
    )
    with pytest.raises(InputError, match="temperature 0 only"):
        draftloop.evaluate(target, drafter, files, folder=tmp_path, temperature=0.5)


def test_the_second_evaluation_answers_nothing_anew(toy, tmp_path, target, drafter, monkeypatch):
    files = [str(toy / "test.jsonl")]
    first = draftloop.evaluate(target, drafter, files, folder=tmp_path, max_new_tokens=16)
    monkeypatch.setattr("draftloop.supervise.responses.rounds", lambda *a: pytest.fail("answered again"))
    assert draftloop.evaluate(target, drafter, files, folder=tmp_path, max_new_tokens=16) == first


def test_files_of_one_name_do_not_mix(tmp_path, target, drafter):
    folders = [tmp_path / "one", tmp_path / "two"]
    for n, folder in enumerate(folders):
        folder.mkdir()
        toy_prompts(folder / "p.jsonl", 3, 50 * n)
    alone = [
        draftloop.evaluate(target, drafter, [str(f / "p.jsonl")], folder=tmp_path / f"c{n}", max_new_tokens=8)
        for n, f in enumerate(folders)
    ]
    shared = [
        draftloop.evaluate(target, drafter, [str(f / "p.jsonl")], folder=tmp_path / "c", max_new_tokens=8)
        for f in folders
    ]
    assert shared == alone


def test_audit(toy, target, drafter):
    found = draftloop.audit(target, drafter, [*ASKS, [{"role": "user", "content": "x"}]], max_new_tokens=16)
    assert found.equal
    assert found.prompts == 4
    half = draftloop.load_target(toy / "target", dtype="bfloat16", device="cpu")
    with pytest.raises(InputError, match="float32"):
        draftloop.audit(half, draftloop.load_drafter(toy / "drafter"), ASKS)


def test_a_checkpoint_of_another_kind(tmp_path):
    loaded = draftloop.load_target(toy_checkpoint(tmp_path / "q", "qwen3"), dtype="float32", device="cpu")
    assert draftloop.generate(loaded, ["the cat"], max_new_tokens=4)[0].tokens


def test_names_and_single_prompts_are_told_from_what_they_stand_for(target):
    with pytest.raises(InputError, match=r"one prompt, not a list.*\[prompt\]"):
        draftloop.generate(target, "the cat")
    with pytest.raises(InputError, match="one prompt, not a list"):
        draftloop.generate(target, [{"role": "user", "content": "the cat"}])
    with pytest.raises(InputError, match=r"a name, not a loaded target.*load_target"):
        draftloop.generate("smollm2", ["the cat"])
    with pytest.raises(InputError, match=r"a name, not a loaded target.*load_target"):
        draftloop.load_drafter("bundled", "smollm2")
