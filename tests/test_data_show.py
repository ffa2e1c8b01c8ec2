from __future__ import annotations

import io

from rich.console import Console

from draftloop.data.chat import encode_conversation
from draftloop.data.prompts import Prompt
from draftloop.data.show import CLOSE, OPEN, show, warnings
from draftloop.data.trunk import response_trunk
from tests.data_toys import decoded, eos_ids, toy_tokenizer


def trunk_of(*texts: str, id: str = "p"):
    roles = ("user", "assistant")
    messages = tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(texts))
    tokenizer = toy_tokenizer()
    (trunk,) = encode_conversation(
        tokenizer, Prompt(id, "s", messages), template_kwargs={}, eos_ids=eos_ids("chatml", tokenizer)
    )
    return trunk


def printed(trunks, n: int = 10, *, colour: bool = False) -> str:
    out = io.StringIO()
    Console(file=out, width=4000, force_terminal=colour, no_color=not colour).print(
        show(trunks, toy_tokenizer(), n), soft_wrap=True
    )
    return out.getvalue()


def test_supervised_text_is_marked_without_colour():
    text = printed([trunk_of("Hello", "Fine.", "what", "[bold]42[/bold]")])
    assert text.count(OPEN) == text.count(CLOSE) == 2
    assert f"{OPEN}Fine.<|im_end|>{CLOSE}" in text
    assert f"{OPEN}[bold]42[/bold]<|im_end|>{CLOSE}" in text  # rich markup in data is data
    assert "\x1b" not in text


def test_shown_text_is_the_trunk_and_nothing_else():
    trunk = trunk_of("Hello é→数🙂", "Fine.\n\n  数🙂")
    text = printed([trunk])
    body = text.split("\n", 1)[1].split("\n\n1 trunks")[0]
    assert body.replace(OPEN, "").replace(CLOSE, "") == decoded(toy_tokenizer(), trunk.tokens)


def test_supervised_text_is_coloured():
    text = printed([trunk_of("Hello", "Fine.")], colour=True)
    green = text.split("\x1b[1;32m")[1].split("\x1b[0m")[0]
    assert green == f"{OPEN}Fine.<|im_end|>{CLOSE}"


def test_counts_are_over_all_trunks():
    trunks = [trunk_of("Hello", "Fine.", id=f"p{i}") for i in range(3)]
    text = printed(trunks, 2)
    assert "p0 (s, sample 0)" in text
    assert "p1" in text
    assert "p2" not in text
    supervised, total = sum(t.supervised for t in trunks), sum(map(len, trunks))
    assert f"3 trunks (3 s): {supervised} of {total} tokens supervised ({supervised / total:.0%})" in text


def test_control_characters_cannot_steer_the_terminal():
    text = printed([trunk_of("Hello", "a\x1b[31mb\rc\x07d\te")])
    assert "\x1b" not in text
    assert "\r" not in text
    assert "\x07" not in text
    assert "a\\x1b[31mb\\rc\\x07d" in text


def test_long_runs_lose_their_middle():
    text = printed([trunk_of("Hello", "begin" + "x" * 9000 + "end")])
    assert f"{OPEN}beginx" in text
    assert f"end<|im_end|>{CLOSE}" in text
    assert "characters ...]" in text
    assert len(text) < 3000


def test_warnings():
    fine = response_trunk([1, 2], [3, 4], "a", "s", 0, True)
    cut = response_trunk([1, 2], [3, 5], "b", "s", 0, False)
    bare = response_trunk([1, 2], [4], "c", "s", 0, True)
    assert warnings([fine]) == []
    assert warnings([]) == ["there are no trunks"]
    lines = warnings([fine, cut, bare, fine])
    assert [line.split(" of 4")[0] for line in lines] == ["1", "1", "1"]
    assert "cut off" in lines[0]
    assert "single supervised token" in lines[1]
    assert "repeat" in lines[2]
    assert "warning: there are no trunks" in printed([])
