"""A running server as the source of responses: its tokens are ours, or they are refused."""

from __future__ import annotations

import json
import time

import pytest

from draftloop.core.errors import EnvironmentFault, InputError
from draftloop.data.prompts import Prompt
from draftloop.recipe import DataPart, ResponsePart
from draftloop.supervise.answers import ServerSource
from draftloop.supervise.responses import prepare_trunks
from draftloop.target import server as server_module
from draftloop.target.load import load_target
from draftloop.target.server import Server
from tests.fake_server import MODEL, Fake, serving
from tests.toy_run import toy_checkpoint


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(str(toy_checkpoint(tmp_path_factory.mktemp("target"), layers=2)), dtype="float32", device="cpu")


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    monkeypatch.setattr(server_module.time, "sleep", lambda seconds, real=time.sleep: real(min(seconds, 0.01)))


def ask(text, id, *turns):
    return Prompt(id, "s", ({"role": "user", "content": text},), turns)


PROMPTS = [ask(text, f"p{i}") for i, text in enumerate(["cat?", "the dog and the sea", "one two", "a tree"])]
PROMPTS.append(ask("red?", "talk", "blue?", "why?"))


def part(url=None, **response) -> DataPart:
    return DataPart(response={"max_new_tokens": 6, "server": url, **response})


@pytest.fixture
def ours(target, tmp_path):
    return prepare_trunks(target, PROMPTS, part(), tmp_path / "ours.jsonl")


def test_greedy_answers_are_those_of_our_own_target_in_every_turn(target, tmp_path, ours):
    fake = Fake(target)
    with serving(fake) as url:
        made = prepare_trunks(target, PROMPTS, part(url), tmp_path / "a.jsonl")
        assert made == ours
        bodies = [body for _, body in fake.seen]
        assert all(isinstance(token, int) for body in bodies for token in body["prompt"])
        assert all(body["stop_token_ids"] == list(target.eos_ids) and body["model"] == MODEL for body in bodies)
        assert all(body["repetition_penalty"] == 1 and body["top_k"] == -1 for body in bodies)
        asked = len(fake.seen)
        assert prepare_trunks(target, PROMPTS, part(url), tmp_path / "a.jsonl") == ours
        assert len(fake.seen) == asked  # all were in the book
    assert prepare_trunks(target, PROMPTS, part("http://127.0.0.1:9/v1"), tmp_path / "a.jsonl") == ours  # it may move


def test_end_of_sequence_is_part_of_the_answer(target, tmp_path, ours):
    first = ours.trunks[0]
    ends, target.eos_ids = target.eos_ids, (first.tokens[first.first + 2],)
    try:
        want = prepare_trunks(target, PROMPTS, part(), tmp_path / "a.jsonl")
        assert any(trunk.finished for trunk in want.trunks)
        with serving(Fake(target)) as url:
            assert prepare_trunks(target, PROMPTS, part(url), tmp_path / "b.jsonl") == want

        def cut(reply):  # a server that leaves the end-of-sequence token out
            choice = reply["choices"][0]
            if choice["finish_reason"] == "stop":
                choice["token_ids"].pop()

        with serving(Fake(target, change=cut)) as url:
            assert prepare_trunks(target, PROMPTS, part(url), tmp_path / "c.jsonl") == want
    finally:
        target.eos_ids = ends


def test_samples_have_seeds_of_their_own_and_held_out_splits_are_greedy(target, tmp_path, ours):
    fake = Fake(target)
    with serving(fake) as url:
        data = part(url, temperature=0.8, top_k=20, top_p=0.9, samples=3)
        made = prepare_trunks(target, PROMPTS[:2], data, tmp_path / "a.jsonl")
        sampled = [body for _, body in fake.seen if body["temperature"] > 0]
        assert len({body["seed"] for body in sampled}) == len(sampled) == 6
        assert {(body["top_k"], body["top_p"]) for body in sampled} == {(20, 0.9)}
        assert [(t.id, t.sample) for t in made.trunks] == [(f"p{i}", s) for i in range(2) for s in range(3)]
        again = prepare_trunks(target, PROMPTS[:2], data, tmp_path / "b.jsonl")
        assert again == made
        held = prepare_trunks(target, PROMPTS, data, tmp_path / "c.jsonl", greedy=True)
        assert [t.tokens for t in held.trunks] == [t.tokens for t in ours.trunks]


def source(target, answers=None, url="http://127.0.0.1:9/v1"):
    made = ServerSource.__new__(ServerSource)
    made.server, made.target, made.answers = Server(url), target, answers or ResponsePart(server=url)
    made.seed, made.model = 0, MODEL
    return made


def reply(text="", ids=None, reason="length", count=None, **choice):
    found = {"text": text, "finish_reason": reason, **choice}
    if ids is not None:
        found["token_ids"] = ids
    return {"choices": [found], "usage": {} if count is None else {"completion_tokens": count}}


def test_text_is_taken_only_where_its_tokens_are_certain(target):
    tokenizer, eos = target.tokenizer, target.eos_ids[0]
    prompt = tokenizer("one two")["input_ids"]
    tokens = tokenizer(" three four")["input_ids"]
    read = source(target).read
    assert read(prompt, reply(" three four", count=len(tokens))).tokens == tuple(tokens)
    # the model wrote the same text in more tokens than the tokenizer would: which ones is not known
    assert "by the server's count" in read(prompt, reply(" three four", count=len(tokens) + 1)).refused
    assert "counted no tokens" in read(prompt, reply(" three four")).refused
    whole = read(prompt, reply(" three four", reason="stop", count=len(tokens) + 1))
    assert whole.tokens == (*tokens, eos)
    assert whole.finished
    told = read(prompt, reply(" three four<|im_end|>", reason="stop", count=len(tokens) + 1))
    assert told == whole


def test_text_that_merges_with_its_prompt_is_refused(target):
    tokenizer = target.tokenizer
    prompt, whole = tokenizer("th")["input_ids"], tokenizer("the")["input_ids"]
    assert whole[: len(prompt)] != prompt  # the toy tokenizer has a token that spans the boundary
    assert "decode to" in source(target).read(prompt, reply("e", count=1)).refused


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (dict(ids=[4, 5], reason="abort"), "abort"),
        (dict(ids=[4, 5], count=3), "2 tokens by our tokenizer and 3"),
        (dict(ids=[4, 10**6]), "does not have"),
        (dict(ids=[]), "empty"),
    ],
)
def test_odd_answers_are_refused(target, broken, why):
    assert why in source(target).read([4, 5], reply(**broken)).refused


def test_going_on_after_the_end_is_refused_and_an_unnamed_end_too(target):
    eos = target.eos_ids[0]
    assert "goes on" in source(target).read([4], reply(ids=[4, eos, 5])).refused
    ends, target.eos_ids = target.eos_ids, (eos, 9)
    try:
        assert "does not say which" in source(target).read([4], reply(ids=[4, 5], reason="stop")).refused
        assert source(target).read([4], reply(ids=[4, 5], reason="stop", stop_reason=9)).tokens == (4, 5, 9)
        assert source(target).read([4], reply(ids=[4, 5], reason="stop", matched_stop=9)).tokens == (4, 5, 9)
    finally:
        target.eos_ids = ends


def test_a_refused_answer_is_left_out_counted_and_not_asked_again(target, tmp_path, ours):
    def spoil(found):
        choice = found["choices"][0]
        if choice["prompt_token_ids"] == list(ours.trunks[1].prompt) and len(choice["token_ids"]) > 5:
            found["usage"]["completion_tokens"] += 1

    fake = Fake(target, change=spoil)
    with serving(fake) as url:
        with pytest.warns(UserWarning, match="1 prompts have an answer that was refused .p1: it has 6 tokens"):
            made = prepare_trunks(target, PROMPTS, part(url), tmp_path / "a.jsonl")
        assert made.refused == ["p1"]
        assert made.too_long == []
        assert made.trunks == [trunk for trunk in ours.trunks if trunk.id != "p1"]
        asked = len(fake.seen)
        with pytest.warns(UserWarning, match="refused"):
            assert prepare_trunks(target, PROMPTS, part(url), tmp_path / "a.jsonl") == made
        assert len(fake.seen) == asked


def test_a_server_that_changes_the_prompt_is_refused(target, tmp_path):
    def bos(found):
        found["choices"][0]["prompt_token_ids"].insert(0, 1)

    with serving(Fake(target, change=bos)) as url, pytest.raises(InputError, match="answered another prompt") as caught:
        prepare_trunks(target, PROMPTS, part(url), tmp_path / "a.jsonl")
    assert url in str(caught.value)


def test_another_model_is_refused(target, tmp_path_factory, tmp_path):
    other = load_target(
        str(toy_checkpoint(tmp_path_factory.mktemp("other"), layers=2, seed=5)), dtype="float32", device="cpu"
    )
    with serving(Fake(other)) as url, pytest.raises(InputError, match="is not our target"):
        prepare_trunks(target, PROMPTS, part(url), tmp_path / "a.jsonl")


def test_a_server_that_dies_midway_is_said_at_once_and_finished_answers_stay(target, tmp_path, ours):
    fake = Fake(target, dies_after=3)  # the comparison with our target, and two answers
    with serving(fake) as url:
        start = time.monotonic()
        with pytest.raises(EnvironmentFault, match="does not answer") as caught:
            prepare_trunks(target, PROMPTS, part(url, server_concurrency=1), tmp_path / "a.jsonl")
        assert time.monotonic() - start < 5
        assert url in str(caught.value)
        assert "kept" in caught.value.fix
        assert len((tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()) == 3
        fake.dies_after = None
        fake.seen.clear()
        assert prepare_trunks(target, PROMPTS, part(url), tmp_path / "a.jsonl") == ours
        assert len(fake.seen) == 1 + 2 + 3  # the comparison, two prompts, three turns


def test_a_server_that_hangs_is_found_by_the_heartbeat(target, tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "_SILENCE_S", 0.05)
    monkeypatch.setattr(server_module, "_QUICK_S", 0.2)
    fake = Fake(target)
    answering = fake.answer

    def hang(body):
        if len(fake.seen) > 1:
            fake.dies_after = 0
            time.sleep(0.01)
            server_module.threading.Event().wait(3)
        return answering(body)

    fake.answer = hang
    with serving(fake) as url:
        start = time.monotonic()
        with pytest.raises(EnvironmentFault, match="does not answer"):
            prepare_trunks(target, PROMPTS, part(url), tmp_path / "a.jsonl")
        assert time.monotonic() - start < 2.5


def test_a_busy_server_is_asked_again_and_no_more_requests_than_allowed(target, tmp_path, ours):
    fake = Fake(target, busy=1)
    with serving(fake) as url:
        assert prepare_trunks(target, PROMPTS, part(url, server_concurrency=2), tmp_path / "a.jsonl") == ours
    assert fake.most_under_way <= 2
    fake = Fake(target, busy=10**6)
    with serving(fake) as url, pytest.raises(EnvironmentFault, match="429: busy"):
        prepare_trunks(target, PROMPTS, part(url), tmp_path / "b.jsonl")


def test_the_key_comes_from_the_environment_and_is_stored_nowhere(target, tmp_path, ours, monkeypatch):
    monkeypatch.delenv("TOY_KEY", raising=False)
    with serving(Fake(target, key="s3cret")) as url:
        with pytest.raises(InputError, match="not set"):
            prepare_trunks(target, PROMPTS, part(url, server_key_env="TOY_KEY"), tmp_path / "a.jsonl")
        with pytest.raises(InputError, match="refuses the key"):
            prepare_trunks(target, PROMPTS, part(url), tmp_path / "a.jsonl")
        monkeypatch.setenv("TOY_KEY", "s3cret")
        data = part(url, server_key_env="TOY_KEY")
        assert prepare_trunks(target, PROMPTS, data, tmp_path / "a.jsonl") == ours
    assert "s3cret" not in (tmp_path / "a.jsonl").read_text(encoding="utf-8") + json.dumps(data.model_dump())


def test_the_model_must_be_served_and_named_where_there_are_several(target, tmp_path):
    with serving(Fake(target, models=("a", "b"))) as url:
        with pytest.raises(InputError, match="serves 2 models") as caught:
            prepare_trunks(target, PROMPTS, part(url), tmp_path / "a.jsonl")
        assert "a, b" in caught.value.fix
        with pytest.raises(InputError, match="does not serve c"):
            prepare_trunks(target, PROMPTS, part(url, server_model="c"), tmp_path / "a.jsonl")
    with pytest.raises(InputError, match="not the URL"):
        Server("localhost:8000")
    with pytest.raises(ValueError, match="without server"):
        ResponsePart(server_model="a")


def test_old_books_are_still_read(target, tmp_path):
    """A recipe without a server answers as before: the options that it does not use are no part of the header."""
    prepare_trunks(target, PROMPTS, part(), tmp_path / "a.jsonl")
    header = json.loads((tmp_path / "a.jsonl").read_text(encoding="utf-8").split("\n")[0])
    prepare_trunks(target, PROMPTS, part(server_concurrency=3), tmp_path / "a.jsonl")
    assert "by" not in header
    assert json.loads((tmp_path / "a.jsonl").read_text(encoding="utf-8").split("\n")[0]) == header
