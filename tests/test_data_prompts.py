from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.core.errors import InputError
from draftloop.data.prompts import Prompt, read_prompts
from draftloop.data.shapes import ROLES

USER = {"role": "user", "content": "Hi"}
BOT = {"role": "assistant", "content": "Hello"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
RESULT = {"role": "tool", "content": "", "tool_call_id": "c1"}


def written(folder: Path, *rows, name: str = "set.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_row(folder: Path, row) -> Prompt:
    written(folder, row)
    (prompt,) = read_prompts(["set.jsonl"], folder)
    return prompt


def refusal(folder: Path, *rows, name: str = "set.jsonl") -> InputError:
    written(folder, *rows, name=name)
    return file_refusal(folder, name)


def file_refusal(folder: Path, name: str, **kwargs) -> InputError:
    with pytest.raises(InputError) as caught:
        read_prompts([name], folder, **kwargs)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return caught.value


class TestShapes:
    def test_prompt_text(self, tmp_path):
        prompt = read_row(tmp_path, {"prompt": "2 + 2?", "answer": "4", "other": [1]})
        assert prompt == Prompt(
            "set:1", "set", ({"role": "user", "content": "2 + 2?"},), (), f"{tmp_path}/set.jsonl:1", None
        )
        assert not prompt.answered  # `answer` is a reference result, not what an assistant said

    @pytest.mark.parametrize("key", ["response", "completion"])
    def test_prompt_with_answer(self, tmp_path, key):
        for question in ("Hi", [USER]):
            for answer in ("Hello", [BOT]):
                prompt = read_row(tmp_path, {"prompt": question, key: answer})
                assert prompt.messages == (USER, BOT)
                assert prompt.answered
                assert prompt.question == (USER,)

    def test_messages_keep_tool_fields(self, tmp_path):
        messages = [{"role": "system", "content": ""}, USER, CALL, RESULT, {**BOT, "reasoning_content": "hm"}]
        prompt = read_row(tmp_path, {"messages": messages, "tools": [{"name": "f"}]})
        assert prompt.messages == (*messages[:2], {**CALL, "content": ""}, *messages[3:])
        assert prompt.tools == ({"name": "f"},)
        assert read_row(tmp_path, {"messages": [USER], "tools": '[{"name": "f"}]'}).tools == ({"name": "f"},)
        assert read_row(tmp_path, {"messages": [USER], "tools": []}).tools is None

    def test_sharegpt(self, tmp_path):
        talk = [
            ("system", "Be brief."),
            ("human", "Weather?"),
            ("function_call", '{"name": "weather", "arguments": {"city": "Bern"}}'),
            ("observation", "sunny"),
            ("gpt", "Sunny."),
        ]
        prompt = read_row(tmp_path, {"conversations": [{"from": who, "value": text} for who, text in talk]})
        assert [m["role"] for m in prompt.messages] == ["system", "user", "assistant", "tool", "assistant"]
        assert prompt.messages[2]["tool_calls"] == [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
        ]
        assert prompt.messages[4] == {"role": "assistant", "content": "Sunny."}
        assert read_row(tmp_path, {"conversations": [USER, BOT]}).messages == (USER, BOT)

    @pytest.mark.parametrize("text", ["weather(Bern)", "[1]", '{"city": "Bern"}', "[" * 100_000])
    def test_function_call_that_is_no_json_stays_text(self, tmp_path, text):
        talk = [{"from": "human", "value": "Weather?"}, {"from": "function_call", "value": text}]
        assert read_row(tmp_path, {"conversations": talk}).messages[1] == {"role": "assistant", "content": text}

    def test_turns(self, tmp_path):
        prompt = read_row(tmp_path, {"turns": ["one", "two", "three"], "system": "Be brief."})
        assert prompt.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"})
        assert prompt.turns == ("two", "three")
        assert prompt.text == "Be brief.\none\ntwo\nthree"

    def test_text_parts_are_joined(self, tmp_path):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert read_row(tmp_path, {"messages": [{"role": "user", "content": parts}]}).messages[0]["content"] == "ab"

    def test_the_richest_of_several_keys_is_read_and_null_is_absent(self, tmp_path):
        row = {"prompt": "Hi", "messages": [USER, BOT], "turns": None, "conversations": None, "id": None, "tools": None}
        with pytest.warns(UserWarning, match="rows hold messages and prompt; messages is read"):
            assert read_row(tmp_path, row).messages == (USER, BOT)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert read_row(tmp_path, row).messages == (USER, BOT)  # said once of a file
            assert read_row(tmp_path, {"prompt": "Hi", "messages": None}).messages

    @pytest.mark.parametrize("said", list(ROLES))
    def test_every_role_is_known(self, tmp_path, said):
        before = {"system": [], "user": [], "developer": [], "assistant": [USER], "tool": [USER, BOT]}[ROLES[said]]
        after = [USER] if ROLES[said] in ("system", "developer") else []
        talk = [*before, {"role": said, "content": "x"}, *after]
        assert read_row(tmp_path, {"messages": talk}).messages[len(before)]["role"] == ROLES[said]

    def test_ids_and_sets(self, tmp_path):
        rows = [{"prompt": "a", "id": 7, "set": "maths"}, {"prompt": "b", "id": "7"}, {"prompt": "c"}, {"prompt": "d"}]
        written(tmp_path, *rows, {"prompt": "e", "id": "7"}, {"prompt": "f", "id": "7#2"})
        (tmp_path / "b").mkdir()
        shutil.copy(tmp_path / "set.jsonl", tmp_path / "b")
        prompts = read_prompts(["set.jsonl", "b/set.jsonl"], tmp_path)
        ids = [prompt.id for prompt in prompts]
        assert ids[:6] == ["7", "7#2", "set:3", "set:4", "7#3", "7#2#2"]
        assert len(set(ids)) == 12
        assert [prompt.set for prompt in prompts[:2]] == ["maths", "set"]
        written(tmp_path, *({"prompt": "a", "id": name} for name in ("7", "7#2", "7", "7")))
        assert [prompt.id for prompt in read_prompts(["set.jsonl"], tmp_path)] == ["7", "7#2", "7#3", "7#4"]


class TestBadRows:
    @pytest.mark.parametrize(
        ("row", "says"),
        [
            ({"text": "a", "question": "b"}, "none of messages, conversations, turns, prompt; it has question, text"),
            ({}, "no fields at all"),
            ({"prompt": None}, "prompt is null"),
            ({"messages": None, "id": "a"}, "messages is null"),
            ({"prompt": 3}, "prompt is a number, not text"),
            ({"prompt": float("nan")}, "prompt is a number, not text"),
            ({"prompt": True}, "prompt is true/false"),
            ({"prompt": {"a": 1}}, "prompt is an object"),
            ({"prompt": "  \n"}, "prompt is empty"),
            ({"prompt": []}, "prompt is an empty list"),
            ({"prompt": ["a", "b"]}, "list of texts"),
            ({"prompt": "a", "response": " "}, "response is empty"),
            ({"prompt": "a", "response": 1}, "response is a number"),
            ({"prompt": "a", "response": "b", "completion": "c"}, "both a response and a completion"),
            ({"prompt": "a", "system": 3}, "system is a number"),
            (
                {"messages": [{"role": "system", "content": "s"}, USER], "system": "t"},
                "system field and a system message",
            ),
            ({"prompt": "a", "id": []}, "id is a list"),
            ({"prompt": "a", "id": True}, "id is true/false"),
            ({"prompt": "a", "set": ""}, "set is empty"),
            ({"prompt": "a", "tools": "f("}, "tools is text that is not JSON"),
            ({"prompt": "a", "tools": {"name": "f"}}, "tools is an object"),
            ({"prompt": "a", "tools": ["f"]}, "not a list of objects"),
            ({"turns": "a"}, "turns is text"),
            ({"turns": []}, "turns is an empty list"),
            ({"turns": ["a", ""]}, "turn 2 is empty"),
            ({"turns": ["a", {"content": "b"}]}, "turn 2 is an object"),
            ({"messages": "a"}, "messages is text"),
            ({"messages": [USER, "x"]}, "messages[1] is text"),
            ({"messages": [{"content": "a"}]}, "messages[0] has no role"),
            ({"messages": [{"role": "boss", "content": "a"}]}, "unknown role 'boss'"),
            ({"messages": [{"role": 1, "content": "a"}]}, "unknown role 1"),
            ({"messages": [{"role": ["user"], "content": "a"}]}, "unknown role"),
            ({"messages": [{"role": "user"}]}, "messages[0] has no content"),
            ({"messages": [{"role": "user", "content": 5}]}, "a number as its content"),
            ({"messages": [{"role": "user", "content": ""}]}, "the content of messages[0] (user) is empty"),
            ({"messages": [USER, {"role": "assistant", "content": ""}]}, "(assistant) is empty"),
            ({"messages": [{"role": "user", "content": []}]}, "is empty"),
            ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, "part of type 'image'"),
            ({"messages": [{"role": "user", "content": ["a"]}]}, "part of text"),
            ({"messages": [USER, {**CALL, "tool_calls": "f()"}]}, "tool_calls of messages[1]"),
            ({"conversations": [{"from": "human"}]}, "has no value"),
            ({"conversations": [{"from": "alien", "value": "a"}]}, "unknown role 'alien'"),
            ({"messages": [BOT]}, "message 1 is from the assistant and comes first"),
            ({"messages": [USER, USER]}, "message 2 is from the user and comes after one from the user"),
            ({"messages": [USER, BOT, BOT]}, "message 3 is from the assistant"),
            ({"messages": [USER, BOT, {"role": "system", "content": "s"}]}, "message 3 is from the system"),
            ({"messages": [USER, RESULT]}, "message 2 is from the tool"),
            ({"messages": [{"role": "system", "content": "s"}]}, "no user message"),
        ],
    )
    def test_is_named(self, tmp_path, row, says):
        error = refusal(tmp_path, {"prompt": "fine"}, row)
        assert says in error.what
        assert error.where == f"{tmp_path}/set.jsonl:2"
        assert error.fix

    @pytest.mark.parametrize(
        ("line", "says"),
        [
            (b"{'prompt': 'a'}", "line 3 is not JSON"),
            (b'{"prompt": "a"', "line 3 is not JSON"),
            (b"prompt,answer", "line 3 is not JSON"),
            (b"[1]", "line 3 is a list"),
            (b'"a"', "line 3 is text"),
            (b"3", "line 3 is a number"),
            (b"null", "line 3 is null"),
            (b"[" * 100_000, "line 3 is nested too deeply"),
            (b'{"n": ' + b"[" * 90_000 + b"]" * 90_000 + b"}", "line 3 is nested too deeply"),
            (b'{"n": ' + b"9" * 5000 + b"}", "line 3 holds a number of too many digits"),
            (b'{"prompt": "\xff"}', "line 3 is not UTF-8 (byte 13)"),
            (b'{"prompt": "\\ud83d"}', "line 3 holds half of a surrogate pair"),
        ],
    )
    def test_bad_line_is_numbered(self, tmp_path, line, says):
        (tmp_path / "set.jsonl").write_bytes(b'{"prompt": "a"}\r\n\n' + line + b"\n")
        error = file_refusal(tmp_path, "set.jsonl")
        assert says in error.what
        assert error.where.endswith("set.jsonl:3")

    @settings(max_examples=150, deadline=None)
    @given(
        row=st.dictionaries(
            st.sampled_from(
                ["prompt", "messages", "conversations", "turns", "response", "tools", "id", "set", "system"]
            ),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
                lambda inner: (
                    st.lists(inner, max_size=3)
                    | st.dictionaries(
                        st.sampled_from(["role", "content", "from", "value", "tool_calls", "type", "text", "user"]),
                        inner | st.sampled_from(["user", "human", "assistant", "tool", "system", "text"]),
                        max_size=3,
                    )
                ),
                max_leaves=8,
            ),
            max_size=4,
        )
    )
    def test_anything_is_either_read_or_refused(self, tmp_path_factory, row):
        """No row, however odd, ends in anything but a prompt or an InputError."""
        folder = tmp_path_factory.getbasetemp()
        refused = None
        try:
            prompt = read_row(folder, row)
        except InputError as error:
            refused = error
        if refused:
            assert refused.where.endswith(":1")
            return
        assert all(isinstance(m["content"], str) and m["role"] in ROLES.values() for m in prompt.messages)
        assert all(isinstance(turn, str) for turn in prompt.turns)
        assert prompt.text.strip()


class TestBadFiles:
    def test_missing(self, tmp_path):
        written(tmp_path, {"prompt": "a"}, name="train.jsonl")
        error = file_refusal(tmp_path, "trian.jsonl")
        assert error.fix == "Did you mean train.jsonl?"
        assert error.where == str(tmp_path / "trian.jsonl")
        assert "data.dir" in file_refusal(tmp_path / "nowhere", "x.jsonl").fix

    def test_directory(self, tmp_path):
        written(tmp_path, {"prompt": "a"}, name="train.jsonl")
        error = file_refusal(tmp_path, ".")
        assert "directory" in error.what
        assert "train.jsonl" in error.what

    @pytest.mark.parametrize("content", [b"", b"\n \n\r\n", b"\xef\xbb\xbf"])
    def test_empty(self, tmp_path, content):
        (tmp_path / "set.jsonl").write_bytes(content)
        assert "no prompts" in file_refusal(tmp_path, "set.jsonl").what

    @pytest.mark.parametrize("text", ['[{"prompt": "a"}, {"prompt": "b"}]', '[\n  {"prompt": "a"}\n]', "[]"])
    def test_json_array(self, tmp_path, text):
        (tmp_path / "set.json").write_text(text)
        error = file_refusal(tmp_path, "set.json")
        assert "array" in error.what
        assert "jq" in error.fix
        assert "jsonl" in error.fix

    def test_json_suffix_is_fine_for_json_lines(self, tmp_path):
        written(tmp_path, {"prompt": "a"}, {"prompt": "b"}, name="set.json")
        assert len(read_prompts(["set.json"], tmp_path)) == 2

    def test_unreadable(self, tmp_path, monkeypatch):
        written(tmp_path, {"prompt": "a"})

        def refuse(*args, **kwargs):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("builtins.open", refuse)
        assert "Permission denied" in file_refusal(tmp_path, "set.jsonl").what

    def test_unknown_builtin(self, tmp_path):
        assert "builtin:train" in file_refusal(tmp_path, "builtin:training").fix


class TestReading:
    def test_byte_order_mark_blank_lines_and_odd_separators(self, tmp_path):
        text = '\ufeff{"prompt": "a\u2028b"}\r\n\r\n{"prompt": "c"}'
        (tmp_path / "set.jsonl").write_bytes(text.encode())
        prompts = read_prompts(["set.jsonl"], tmp_path)
        assert [(prompt.text, prompt.id) for prompt in prompts] == [("a\u2028b", "set:1"), ("c", "set:3")]

    def test_paths(self, tmp_path, monkeypatch):
        path = written(tmp_path, {"prompt": "a"})
        monkeypatch.setenv("HOME", str(tmp_path))
        for name in (str(path), "~/set.jsonl", "../" + tmp_path.name + "/set.jsonl"):
            assert len(read_prompts([name], tmp_path)) == 1
        assert read_prompts([], tmp_path) == []

    def test_limit_is_taken_evenly(self, tmp_path):
        for name, size in (("a", 2), ("b", 9), ("c", 9)):
            written(tmp_path, *({"prompt": f"{name}{i}"} for i in range(size)), name=f"{name}.jsonl")
        files = ["a.jsonl", "b.jsonl", "c.jsonl"]

        def taken(limit):
            return [prompt.text for prompt in read_prompts(files, tmp_path, limit)]

        assert taken(1) == ["a0"]
        assert taken(4) == ["a0", "a1", "b0", "c0"]
        assert taken(9) == ["a0", "a1", "b0", "b1", "b2", "b3", "c0", "c1", "c2"]
        assert len(taken(20)) == len(taken(100)) == len(taken(None)) == 20

    def test_lines_beyond_the_limit_are_not_read(self, tmp_path):
        (tmp_path / "set.jsonl").write_text('{"prompt": "a"}\nbroken\n')
        assert len(read_prompts(["set.jsonl"], tmp_path, 1)) == 1

    @pytest.mark.parametrize("name", ["set.parquet", "set.bin"])
    def test_parquet(self, tmp_path, name):
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = [
            {"messages": [USER, {**BOT, "tool_calls": None}], "prompt": None, "id": "x", "n": 1},
            {"messages": None, "prompt": "Hi", "id": None, "n": 2},
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
        first, second = read_prompts([name], tmp_path)
        assert first.messages == (USER, BOT)
        assert (first.id, second.id) == ("x", "set:2")
        assert second.messages == (USER,)

    def test_parquet_does_not_invent_arguments(self, tmp_path):
        """Parquet gives every tool call the arguments of all the others, as nulls."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        calls = [[{"function": {"name": "f", "arguments": arguments}}] for arguments in ({"city": "Bern"}, {"day": 1})]
        rows = [{"messages": [USER, {"role": "assistant", "content": "", "tool_calls": call}]} for call in calls]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "set.parquet")
        read = read_prompts(["set.parquet"], tmp_path)
        assert [prompt.messages[1]["tool_calls"] for prompt in read] == calls

    def test_bad_parquet(self, tmp_path):
        import pyarrow as pa
        import pyarrow.parquet as pq

        (tmp_path / "set.parquet").write_bytes(b"PAR1 nothing PAR1")
        assert "Parquet" in file_refusal(tmp_path, "set.parquet").what
        pq.write_table(pa.Table.from_pylist([{"prompt": "a"}, {"prompt": " "}]), tmp_path / "set.parquet")
        assert file_refusal(tmp_path, "set.parquet").where.endswith("set.parquet:2")
        pq.write_table(pa.Table.from_pylist([], schema=pa.schema([("prompt", pa.string())])), tmp_path / "set.parquet")
        assert "no prompts" in file_refusal(tmp_path, "set.parquet").what

    def test_a_parquet_file_that_is_cut_off_or_none(self, tmp_path):
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = tmp_path / "set.parquet"
        pq.write_table(pa.Table.from_pylist([{"prompt": "a"}]), path)
        whole = path.read_bytes()
        for content, words in ((whole[:-9], "damaged or cut off"), (whole[4:], "neither Parquet nor JSON lines")):
            path.write_bytes(content)
            told = file_refusal(tmp_path, "set.parquet")
            assert words in told.what
            assert told.where == str(path)
            assert told.fix.startswith("Download or write the file again")
        path.write_text('\n {"prompt": "a"}\n')  # misnamed, but clear
        assert len(read_prompts(["set.parquet"], tmp_path)) == 1

    @pytest.mark.parametrize("again", ["a.jsonl", "./a.jsonl", "link.jsonl"])
    def test_a_file_named_twice(self, tmp_path, again):
        (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
        (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
        with pytest.raises(InputError, match="named twice"):
            read_prompts(["a.jsonl", again], tmp_path)

    def test_parquet_reads_like_json_lines(self, tmp_path):
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = [{"turns": ["a", "b"], "set": "s"}, {"turns": ["c"], "set": "t"}]
        written(tmp_path, *rows, name="set.jsonl")
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "set.parquet")
        one, other = (read_prompts([f"set.{kind}"], tmp_path) for kind in ("jsonl", "parquet"))
        assert [(p.id, p.set, p.messages, p.turns) for p in one] == [(p.id, p.set, p.messages, p.turns) for p in other]
