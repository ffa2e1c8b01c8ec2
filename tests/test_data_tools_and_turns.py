from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.data.chat import answer_text, encode_conversation, encode_prompt, encode_turn
from draftloop.data.prompts import Prompt
from draftloop.data.trunk import response_trunk
from tests.data_toys import THINKING, decoded, eos_ids, fresh, refusal, texts, toy_tokenizer

TOOLS = ({"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}},)
CALLING = (
    {"role": "user", "content": "Weather in Bern?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}],
    },
    {"role": "tool", "content": '{"sky": "blue"}'},
    {"role": "assistant", "content": "It is sunny."},
)


def test_tools_reach_the_template_and_calls_are_supervised():
    tokenizer = toy_tokenizer("thinking")
    prompt = Prompt("p", "s", CALLING, tools=TOOLS)
    trunks = encode_conversation(tokenizer, prompt, template_kwargs={}, eos_ids=eos_ids("thinking", tokenizer))
    spoken = "".join(decoded(tokenizer, t.tokens[a:b]) for t in trunks for a, b in t.spans)
    assert '<call>{"name": "weather", "arguments": {"city": "Bern"}}</call><|im_end|>' in spoken
    assert spoken.endswith("It is sunny.<|im_end|>")
    assert "blue" not in spoken
    assert '"parameters"' in decoded(tokenizer, trunks[0].prompt)
    assert "blue" in decoded(tokenizer, trunks[-1].prompt)


@pytest.mark.parametrize(
    ("template", "messages", "tools", "lost"),
    [
        (THINKING.replace("{% if tools %}", "{% if false %}"), CALLING[:1], TOOLS, "the tool definitions"),
        (THINKING.replace("m.tool_calls or []", "[]"), CALLING[:3], TOOLS, "the tool calls of message 2"),
        (THINKING.replace("{{ m.content | tojson }}", "..."), CALLING[:3], TOOLS, "message 3 (from the tool)"),
        (
            THINKING,
            [{"role": "developer", "content": "Be brief."}, *CALLING[:1]],
            None,
            "message 1 (from the developer)",
        ),
    ],
)
def test_templates_that_leave_something_out_are_refused(template, messages, tools, lost):
    error = refusal(lambda: encode_prompt(fresh(template), messages, template_kwargs={}, tools=tools))
    assert lost in error.what
    encode_prompt(toy_tokenizer("thinking"), CALLING[:3], template_kwargs={}, tools=TOOLS)  # nothing lost: no complaint


def test_a_template_that_the_markers_upset_is_believed():
    template = (
        "{% for m in messages %}{% if m.role == 'system' and 'brief' not in m.content %}{{ raise_exception('no') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    tokenizer = fresh(template)
    assert decoded(tokenizer, encode_prompt(tokenizer, messages, template_kwargs={})) == "Be brief.a"


class TestTurns:
    prompt = Prompt("p", "s", ({"role": "user", "content": "Hello"},), turns=("what", "why"), where="f:9")

    @settings(max_examples=60, deadline=None)
    @given(answers=st.lists(texts, max_size=2))
    def test_each_turn_is_prompted_with_its_history(self, answers):
        tokenizer = toy_tokenizer("chatml")
        ids = encode_turn(tokenizer, self.prompt, answers, template_kwargs={})
        asked = ["Hello", "what", "why"][: len(answers) + 1]
        history = "".join(
            f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n{a}<|im_end|>\n"
            for q, a in zip(asked, answers, strict=False)
        )
        assert decoded(tokenizer, ids) == (
            f"<|im_start|>system\nBe helpful.<|im_end|>\n{history}<|im_start|>user\n{asked[-1]}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )

    def test_no_turn_left(self):
        error = refusal(lambda: encode_turn(toy_tokenizer(), self.prompt, ["a", "b", "c"], template_kwargs={}))
        assert "all 3 turns" in error.what
        assert error.where == "f:9"

    def test_history_of_a_thinking_template_loses_the_thinking(self):
        tokenizer = toy_tokenizer("thinking")
        ids = encode_turn(tokenizer, self.prompt, ["<think>\nWell.\n</think>\n\nFine."], template_kwargs={})
        assert "Well" not in decoded(tokenizer, ids)
        assert "assistant\nFine.<|im_end|>" in decoded(tokenizer, ids)

    def test_generated_tokens_are_kept_as_they_were_drawn(self):
        """Two tokens that text would make into one stay two in the trunk, and the text of the answer is the same."""
        tokenizer = toy_tokenizer("chatml")
        newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        drawn = [*newline, *newline, *tokenizer("Fine.", add_special_tokens=False)["input_ids"], end]
        asked = encode_turn(tokenizer, self.prompt, (), template_kwargs={})
        trunk = response_trunk(asked, drawn, "p", "s", 1, True)
        assert list(trunk.tokens) == asked + drawn
        assert trunk.first == len(asked)
        assert answer_text(tokenizer, drawn, {end}) == "\n\nFine."
        assert answer_text(tokenizer, [*drawn, *drawn], {end}) == "\n\nFine."
        assert answer_text(tokenizer, drawn[:-1], {end}) == "\n\nFine."
