"""Fixed trunks: answered by the target or brought along, resumable, keyed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from draftloop.core.draws import key_of
from draftloop.core.errors import InputError
from draftloop.core.law import Sampling
from draftloop.data.chat import answer_text, encode_conversation, encode_turn
from draftloop.data.prompts import Prompt
from draftloop.decode.loop import decode, rounds
from draftloop.decode.trace import Options, Request
from draftloop.recipe import DataPart
from draftloop.supervise import responses
from draftloop.supervise.responses import prepare_trunks, read_trunks
from draftloop.target.load import load_target
from tests.toy_run import toy_checkpoint

TEXTS = ["cat?", "the dog and the sea", "one two", "red blue red", "a tree"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(str(toy_checkpoint(tmp_path_factory.mktemp("target"), layers=2)), dtype="float32", device="cpu")


@pytest.fixture
def asked(monkeypatch):
    """Every request that was decoded, as (key, sample)."""
    seen = []

    def counting(target, drafter, requests, options, results):
        seen.extend((request.key, request.sample) for request in requests)
        return rounds(target, drafter, requests, options, results)

    monkeypatch.setattr(responses, "rounds", counting)
    return seen


def ask(text, id, *turns, answer=None):
    messages = [{"role": "user", "content": text}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    return Prompt(id, "s", tuple(messages), turns)


PROMPTS = [ask(text, f"p{i}") for i, text in enumerate(TEXTS)]


def part(**response) -> DataPart:
    return DataPart(response={"max_new_tokens": 6, "batch_size": 2, **response})


def keys(*names):
    return [(key_of(name), 0) for name in names]


def test_answers_are_the_targets_own_whatever_the_batch(target, tmp_path):
    made = prepare_trunks(target, PROMPTS, part(), tmp_path / "a.jsonl")
    assert [trunk.id for trunk in made.trunks] == [prompt.id for prompt in PROMPTS]
    assert (made.too_long, made.too_short) == ([], [])
    for prompt, trunk in zip(PROMPTS, made.trunks, strict=True):
        ids = tuple(encode_turn(target.tokenizer, prompt, [], template_kwargs={}))
        (alone,) = decode(target, None, [Request(ids)], Options(6))
        assert trunk.prompt == ids
        assert list(trunk.tokens[trunk.first :]) == alone.tokens
        assert (trunk.finished, trunk.set, trunk.sample) == (alone.finished, "s", 0)


def test_a_second_call_decodes_nothing(target, tmp_path, asked):
    told = []
    first = prepare_trunks(target, PROMPTS, part(), tmp_path / "a.jsonl", advance=lambda *a: told.append(a))
    assert sorted(asked) == sorted(keys("p0", "p1", "p2", "p3", "p4"))
    assert told == [(0, 5), (2, 5), (4, 5), (5, 5)]
    before = (tmp_path / "a.jsonl").read_bytes()
    asked.clear()
    assert prepare_trunks(target, PROMPTS, part(batch_size=5), tmp_path / "a.jsonl") == first
    assert asked == []
    assert (tmp_path / "a.jsonl").read_bytes() == before


@pytest.mark.parametrize("kill", ["header", "behind the header", "first line", "third line", "newline", "zeros"])
def test_killed_at_any_moment_it_goes_on(target, tmp_path, asked, kill):
    path = tmp_path / "a.jsonl"
    whole = prepare_trunks(target, PROMPTS, part(), path)
    before = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(before) if byte == 10]  # of the header, then of each line
    assert len(ends) == 6
    cut, left = {
        "header": (ends[0] // 2, 5),
        "behind the header": (ends[0], 5),
        "first line": (ends[0] + 20, 5),
        "third line": (ends[2] + (ends[3] - ends[2]) // 2, 3),
        "newline": (ends[3] - 1, 2),  # the line is whole, only its newline is missing
        "zeros": (ends[2], 3),
    }[kill]
    path.write_bytes(before[:cut] + bytes(40 if kill == "zeros" else 0))
    asked.clear()
    assert prepare_trunks(target, PROMPTS, part(), path) == whole
    assert asked == keys("p0", "p1", "p2", "p3", "p4")[5 - left :]
    assert path.read_bytes() == before


def test_what_was_answered_before_a_crash_is_kept(target, tmp_path, asked, monkeypatch):
    counting, calls = responses.rounds, []

    def failing(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return counting(*args)

    monkeypatch.setattr(responses, "rounds", failing)
    with pytest.raises(KeyboardInterrupt):
        prepare_trunks(target, PROMPTS, part(), tmp_path / "a.jsonl")
    asked.clear()
    again = prepare_trunks(target, PROMPTS, part(), tmp_path / "a.jsonl")
    assert asked == keys("p2", "p3", "p4")
    assert again == prepare_trunks(target, PROMPTS, part(), tmp_path / "b.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


@pytest.mark.parametrize(
    "damage", ["{", "7", "{}", '{"prompt": "p1", "sample": 0, "asked": "x", "trunks": [{"tokens": 3}]}']
)
def test_a_damaged_line_in_the_midst_costs_its_own_answer_alone(target, tmp_path, asked, damage):
    """Fails if what stands below it is dropped, if nobody hears of it, or if it is an error."""
    path = tmp_path / "a.jsonl"
    whole = prepare_trunks(target, PROMPTS, part(), path)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines[:2], damage, *lines[3:], ""]), encoding="utf-8")
    with pytest.warns(UserWarning, match=r"a\.jsonl:3: this line is damaged and left out; `draftloop prepare` answers"):
        assert read_trunks(path) == [trunk for trunk in whole.trunks if trunk.id != "p1"]
    asked.clear()
    with pytest.warns(UserWarning, match=r"a\.jsonl:3: this line is damaged and dropped, and what it held is answered"):
        assert prepare_trunks(target, PROMPTS, part(), path) == whole
    assert asked == keys("p1")
    assert sorted(path.read_text(encoding="utf-8").splitlines()) == sorted(lines)


def test_several_damaged_lines_are_one_sentence(target, tmp_path, asked):
    path = tmp_path / "a.jsonl"
    prepare_trunks(target, PROMPTS, part(), path)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines[:2], "", "x", lines[3], "y", lines[5], ""]), encoding="utf-8")
    asked.clear()
    with pytest.warns(UserWarning, match=r"a\.jsonl:4: this line is damaged \(and 1 more below\) and dropped"):
        prepare_trunks(target, PROMPTS, part(), path)
    assert asked == keys("p1", "p3")


def test_answers_below_a_damaged_header_are_kept_aside(target, tmp_path, asked):
    """Nobody can tell what they answer, and the header may be mended. Fails if they are lost without a word."""
    path = tmp_path / "a.jsonl"
    whole = prepare_trunks(target, PROMPTS, part(), path)
    before = path.read_bytes()
    path.write_bytes(b"#" + before)
    asked.clear()
    with pytest.warns(UserWarning, match=r"of unknown settings, since its first line is damaged, and are kept as a-"):
        assert prepare_trunks(target, PROMPTS, part(), path) == whole
    assert len(asked) == 5
    (aside,) = tmp_path.glob("a-*.jsonl")
    assert aside.read_bytes() == b"#" + before


@pytest.mark.parametrize("change", ["length", "temperature", "top_p", "seed", "template", "longest", "greedy"])
def test_other_options_begin_a_fresh_file(target, tmp_path, asked, change):
    base, seed, greedy = part(temperature=0.5), 0, False
    prepare_trunks(target, PROMPTS, base, tmp_path / "a.jsonl", seed=seed)
    asked.clear()
    other = {
        "length": part(temperature=0.5, max_new_tokens=5),
        "temperature": part(temperature=0.6),
        "top_p": part(temperature=0.5, top_p=0.9),
        "template": base.model_copy(update={"template_kwargs": {"enable_thinking": False}}),
        "longest": base.model_copy(update={"max_prompt_tokens": 900}),
    }.get(change, base)
    seed, greedy = int(change == "seed"), change == "greedy"
    made = prepare_trunks(target, PROMPTS, other, tmp_path / "a.jsonl", seed=seed, greedy=greedy)
    assert len(asked) == 5
    assert made == prepare_trunks(target, PROMPTS, other, tmp_path / "b.jsonl", seed=seed, greedy=greedy)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_answers_of_other_settings_are_kept_and_taken_up_again(target, tmp_path, asked):
    file = tmp_path / "a.jsonl"
    first = prepare_trunks(target, PROMPTS, part(), file)
    before = file.read_bytes()
    with pytest.warns(
        UserWarning, match=r"max_new_tokens: 6, now 5\) and are kept as a-[0-9a-f]{16}\.jsonl; the prompts"
    ):
        second = prepare_trunks(target, PROMPTS, part(max_new_tokens=5), file)
    (aside,) = tmp_path.glob("a-*.jsonl")
    assert aside.read_bytes() == before
    asked.clear()
    with pytest.warns(UserWarning, match="max_new_tokens: 5, now 6.* are taken up"):
        assert prepare_trunks(target, PROMPTS, part(), file) == first
    with pytest.warns(UserWarning, match="are taken up"):
        assert prepare_trunks(target, PROMPTS, part(max_new_tokens=5), file) == second
    assert not asked, "nothing was answered twice"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_book_from_before_settings_were_written_out_is_continued(target, tmp_path, asked):
    file = tmp_path / "a.jsonl"
    prepare_trunks(target, PROMPTS, part(), file)
    head, *rest = file.read_text(encoding="utf-8").splitlines(keepends=True)
    old = {key: value for key, value in json.loads(head).items() if key != "settings"}
    file.write_text("".join([json.dumps(old) + "\n", *rest]), encoding="utf-8")
    asked.clear()
    prepare_trunks(target, PROMPTS, part(), file)
    assert not asked
    with pytest.warns(UserWarning, match="another response"):
        prepare_trunks(target, PROMPTS, part(max_new_tokens=5), file)


def test_another_question_under_the_same_id_is_asked_anew(target, tmp_path, asked):
    """Ids default to file and line: whoever edits a line must not be given the old answer."""
    prepare_trunks(target, PROMPTS, part(), tmp_path / "a.jsonl")
    asked.clear()
    edited = [*PROMPTS[:3], ask("something else", "p3"), replace(PROMPTS[4], turns=("and?",))]
    made = prepare_trunks(target, edited, part(), tmp_path / "a.jsonl")
    assert [key for key, _ in asked] == [key_of("p3"), key_of("p4"), key_of("p4/turn2")]
    assert made == prepare_trunks(target, edited, part(), tmp_path / "b.jsonl")
    asked.clear()
    assert prepare_trunks(target, edited, part(), tmp_path / "a.jsonl") == made
    assert asked == []


def test_ids_may_hold_any_character(target, tmp_path, asked):
    """U+2028, U+0085 and their like are no line ends in JSON lines."""
    odd = [ask(text, f"p{i}{c}x") for i, (text, c) in enumerate(zip(TEXTS, "\u2028\u0085\u2029\x1c\n", strict=True))]
    made = prepare_trunks(target, odd, part(), tmp_path / "a.jsonl")
    asked.clear()
    assert prepare_trunks(target, odd, part(), tmp_path / "a.jsonl") == made
    assert asked == []


def test_a_lost_prompt_and_a_new_one(target, tmp_path, asked):
    prepare_trunks(target, PROMPTS[:3], part(), tmp_path / "a.jsonl")
    asked.clear()
    made = prepare_trunks(target, PROMPTS[1:], part(), tmp_path / "a.jsonl")
    assert asked == keys("p3", "p4")
    assert [trunk.id for trunk in made.trunks] == ["p1", "p2", "p3", "p4"]


def test_turns_are_asked_after_the_answers_given(target, tmp_path, asked):
    prompts = [ask("cat?", "a", "and dog?", "why?"), PROMPTS[1], ask("sun", "b", "sea")]
    made = prepare_trunks(target, prompts, part(batch_size=3), tmp_path / "a.jsonl")
    assert [trunk.id for trunk in made.trunks] == ["a", "a/turn2", "a/turn3", "p1", "b", "b/turn2"]
    for prompt in prompts:
        said = []
        for trunk in [t for t in made.trunks if t.id.split("/")[0] == prompt.id]:
            ids = tuple(encode_turn(target.tokenizer, prompt, said, template_kwargs={}))
            assert trunk.prompt == ids
            (alone,) = decode(target, None, [Request(ids)], Options(6))
            assert list(trunk.tokens[trunk.first :]) == alone.tokens
            said.append(answer_text(target.tokenizer, alone.tokens, target.eos_ids))
        assert len(said) == len(prompt.turns) + 1
    lines = (tmp_path / "a.jsonl").read_text(encoding="utf-8").split("\n")[1:-1]
    assert [len(json.loads(line)["trunks"]) for line in lines] == [3, 1, 2]
    asked.clear()
    assert prepare_trunks(target, prompts, part(), tmp_path / "a.jsonl") == made
    assert asked == []


def test_a_conversation_that_grows_too_long_stops_there(target, tmp_path):
    prompt = ask("cat?", "a", "x " * 80)
    longest = len(encode_turn(target.tokenizer, prompt, [], template_kwargs={}))
    data = part().model_copy(update={"max_prompt_tokens": longest + 20})
    made = prepare_trunks(target, [prompt, PROMPTS[0]], data, tmp_path / "a.jsonl")
    assert [trunk.id for trunk in made.trunks] == ["a", "p0"]
    assert made.too_long == []


def test_samples_differ_and_are_keyed(target, tmp_path, asked):
    data = part(temperature=1.0, samples=3)
    told = []
    made = prepare_trunks(target, PROMPTS, data, tmp_path / "a.jsonl", advance=lambda *a: told.append(a))
    assert [(t.id, t.sample) for t in made.trunks] == [(f"p{i}", s) for i in range(5) for s in range(3)]
    assert told[-1] == (15, 15)
    for i in range(5):
        assert len({trunk.tokens for trunk in made.trunks[3 * i : 3 * i + 3]}) == 3
    few = prepare_trunks(target, PROMPTS[3:], data, tmp_path / "b.jsonl")  # other batches, same draws
    assert few.trunks == made.trunks[9:]
    ids = tuple(encode_turn(target.tokenizer, PROMPTS[2], [], template_kwargs={}))
    (alone,) = decode(target, None, [Request(ids, key_of("p2"), 1)], Options(6, Sampling(1.0)))
    assert list(made.trunks[7].tokens[made.trunks[7].first :]) == alone.tokens
    other = prepare_trunks(target, PROMPTS, data, tmp_path / "c.jsonl", seed=1)
    assert other.trunks != made.trunks


def test_answers_are_drawn_as_asked(target, tmp_path):
    made = prepare_trunks(target, PROMPTS, part(temperature=0.9, top_k=9, top_p=0.6), tmp_path / "a.jsonl", seed=2)
    options = Options(6, Sampling(0.9, 9, 0.6), seed=2)
    for prompt, trunk in zip(PROMPTS, made.trunks, strict=True):
        (alone,) = decode(target, None, [Request(trunk.prompt, key_of(prompt.id))], options)
        assert list(trunk.tokens[trunk.first :]) == alone.tokens


def test_held_out_prompts_are_answered_greedily_once(target, tmp_path, asked):
    made = prepare_trunks(target, PROMPTS, part(temperature=1.0, samples=3), tmp_path / "a.jsonl", greedy=True)
    assert made == prepare_trunks(target, PROMPTS, part(), tmp_path / "b.jsonl")


def test_too_long_prompts_are_left_out_and_counted_once(target, tmp_path, asked):
    prompts = [PROMPTS[0], ask("tree " * 60, "long"), PROMPTS[2], ask("sea " * 60, "longer", "more?")]
    data = part(temperature=1.0, samples=2).model_copy(update={"max_prompt_tokens": 60})
    made = prepare_trunks(target, prompts, data, tmp_path / "a.jsonl")
    assert made.too_long == ["long", "longer"]
    assert [trunk.id for trunk in made.trunks] == ["p0", "p0", "p2", "p2"]
    assert {key for key, _ in asked} == {key_of("p0"), key_of("p2")}
    asked.clear()
    assert prepare_trunks(target, prompts, data, tmp_path / "a.jsonl") == made  # nor asked again
    assert asked == []


def test_nothing_left_is_the_users_to_mend(target, tmp_path):
    tight = part().model_copy(update={"max_prompt_tokens": 3})
    with pytest.raises(InputError, match="5 longer than 3 tokens") as caught:
        prepare_trunks(target, PROMPTS, tight, tmp_path / "a.jsonl")
    assert "max_prompt_tokens" in caught.value.fix
    assert caught.value.exit_code == 2


def test_responses_too_short_for_an_anchor(target, tmp_path):
    first = prepare_trunks(target, PROMPTS, part(), tmp_path / "a.jsonl").trunks
    opening = first[0].tokens[first[0].first]
    ends, target.eos_ids = target.eos_ids, (opening,)
    try:
        made = prepare_trunks(target, PROMPTS, part(max_new_tokens=5), tmp_path / "b.jsonl")
        assert "p0" in made.too_short
        assert made.too_long == []
        assert len(made.trunks) + len(made.too_short) == 5
        short = [p for p in PROMPTS if p.id in made.too_short]
        with pytest.raises(InputError, match="too short") as caught:
            prepare_trunks(target, short, part(max_new_tokens=5), tmp_path / "c.jsonl")
        assert "max_prompt_tokens" not in caught.value.fix  # it would not help
        tight = part(max_new_tokens=5).model_copy(update={"max_prompt_tokens": 60})
        with pytest.raises(InputError, match="1 longer than 60 tokens, 1 with .*too short"):
            prepare_trunks(target, [short[0], ask("tree " * 60, "long")], tight, tmp_path / "d.jsonl")
    finally:
        target.eos_ids = ends


def test_an_answer_that_ends_at_once_is_followed_by_the_next_turn(target, tmp_path):
    first = prepare_trunks(target, PROMPTS, part(), tmp_path / "a.jsonl").trunks[0]
    ends, target.eos_ids = target.eos_ids, (first.tokens[first.first],)
    try:
        made = prepare_trunks(target, [ask("cat?", "p0", "dog?")], part(max_new_tokens=7), tmp_path / "b.jsonl")
    finally:
        target.eos_ids = ends
    assert made.too_short[0] == "p0"
    assert len(made.trunks) + len(made.too_short) == 2


def test_given_answers_are_taken_where_they_are_not_to_be_regenerated(target, tmp_path, asked):
    given = [ask("cat?", "g0", answer="a cat sat"), PROMPTS[1], ask("two?", "g1", answer="one two three " * 20)]
    data = part(regenerate=False, max_new_tokens=8).model_copy(update={"max_prompt_tokens": 60})
    told = []
    made = prepare_trunks(target, given, data, tmp_path / "a.jsonl", advance=lambda *a: told.append(a))
    assert asked == keys("p1")
    assert told == [(2, 3), (3, 3)]
    (whole,) = encode_conversation(target.tokenizer, given[0], template_kwargs={}, eos_ids=target.eos_ids)
    assert made.trunks[0] == whole
    assert made.trunks[1].id == "p1"
    assert made.too_long == ["g1"]  # longer than prompt and answer together may be
    asked.clear()
    assert prepare_trunks(target, given, data, tmp_path / "a.jsonl") == made
    assert asked == []
    anew = prepare_trunks(target, given[:1], part(), tmp_path / "b.jsonl")
    assert asked == keys("g0")
    assert anew.trunks[0].prompt == whole.prompt
    assert anew.trunks[0].tokens != whole.tokens


def test_a_file_of_answers_is_read_by_whoever_wants_them(target, tmp_path):
    path = tmp_path / "train.jsonl"
    prepared = prepare_trunks(target, PROMPTS, part(), path)
    assert read_trunks(path) == prepared.trunks
    path.write_text(path.read_text(encoding="utf-8")[:-9], encoding="utf-8")  # it is still being written
    assert read_trunks(path) == prepared.trunks[:-1]
    with pytest.raises(InputError, match="there is no file of answers"):
        read_trunks(tmp_path / "other.jsonl")
    for text in ("", '{"prompt": "cat?"}\n', "[1]\n", "none\n"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match="this is no file of answers"):
            read_trunks(path)
