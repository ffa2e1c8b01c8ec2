from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.core.errors import InputError
from draftloop.data.chat import encode_conversation, encode_prompt, encode_turn
from draftloop.data.prompts import Prompt
from tests.data_toys import TOYS, decoded, eos_ids, fresh, refusal, texts, toy_tokenizer

FAST = settings(max_examples=60, deadline=None)

conversations = st.builds(
    lambda system, pairs: (system, pairs),
    st.none() | texts,
    st.lists(st.tuples(texts, texts), min_size=1, max_size=4),
)


def chat(system, pairs, *, role_system: bool = True) -> Prompt:
    messages = [{"role": "system", "content": system}] if system and role_system else []
    for question, answer in pairs:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Prompt("p", "s", tuple(messages), where="file.jsonl:3")


def reply_indices(prompt: Prompt) -> list[int]:
    return [index for index, message in enumerate(prompt.messages) if message["role"] == "assistant"]


@pytest.mark.parametrize("backend", ["bpe", "characters"])
@pytest.mark.parametrize(
    ("toy", "kwargs"),
    [
        ("chatml", {}),
        ("inst", {}),
        ("two-ends", {}),
        ("thinking", {}),
        ("thinking", {"enable_thinking": True}),
        ("thinking", {"enable_thinking": False}),
    ],
)
@FAST
@given(conversation=conversations)
def test_supervised_is_exactly_the_answers_and_their_end(toy, kwargs, backend, conversation):
    tokenizer, kind = toy_tokenizer(toy, backend), TOYS[toy]
    prompt = chat(*conversation, role_system=kind.system)
    trunks = encode_conversation(tokenizer, prompt, template_kwargs=kwargs, eos_ids=eos_ids(toy, tokenizer))

    answers = [prompt.messages[index]["content"] for index in reply_indices(prompt)]
    spans = [(trunk, span) for trunk in trunks for span in trunk.spans]
    assert [decoded(tokenizer, trunk.tokens[a:b]) for trunk, (a, b) in spans] == [
        kind.written(answer, kwargs.get("enable_thinking")) for answer in answers
    ]
    for (trunk, (start, end)), index in zip(spans, reply_indices(prompt), strict=True):
        # what stands before each answer is, token for token, what an engine would have been given
        asked = encode_prompt(tokenizer, prompt.messages[:index], template_kwargs=kwargs)
        assert list(trunk.tokens[:start]) == asked
        assert trunk.tokens[end - 1] == tokenizer.convert_tokens_to_ids(kind.eos)
        assert not set(trunk.tokens[start : end - 1]) & eos_ids(toy, tokenizer)
    for trunk in trunks:
        assert trunk.finished
        assert trunk.mask[-1]  # nothing trails behind the last end-of-sequence
        assert trunk.first >= 1
    assert len({trunk.id for trunk in trunks}) == len(trunks)


@FAST
@given(conversation=conversations)
def test_mask_agrees_with_the_templates_own_generation_blocks(conversation):
    """A second opinion from transformers, which maps characters to tokens."""
    tokenizer = toy_tokenizer("chatml", "characters")
    prompt = chat(*conversation)
    (trunk,) = encode_conversation(tokenizer, prompt, template_kwargs={}, eos_ids=eos_ids("chatml", tokenizer))
    theirs = tokenizer.apply_chat_template(list(prompt.messages), return_dict=True, return_assistant_tokens_mask=True)
    size = len(trunk)
    assert list(trunk.tokens) == theirs["input_ids"][:size]
    assert [int(flag) for flag in trunk.mask] == theirs["assistant_masks"][:size]
    assert not any(theirs["assistant_masks"][size:])
    assert decoded(tokenizer, theirs["input_ids"][size:]) == "\n"


@FAST
@given(conversation=conversations)
def test_prompt_ids_are_what_transformers_gives(conversation):
    for toy in ("chatml", "thinking"):
        tokenizer = toy_tokenizer(toy, "bpe")
        messages = chat(*conversation).messages[:-1]
        theirs = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)["input_ids"]
        assert encode_prompt(tokenizer, messages, template_kwargs={}) == theirs


def test_whole_conversation_stays_one_trunk_where_it_can():
    tokenizer = toy_tokenizer("chatml")
    prompt = chat(None, [("Hello", "Hello there."), ("what", "42")])
    (trunk,) = encode_conversation(tokenizer, prompt, template_kwargs={}, eos_ids=eos_ids("chatml", tokenizer))
    assert decoded(tokenizer, trunk.tokens) == (
        "<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        "Hello there.<|im_end|>\n<|im_start|>user\nwhat<|im_end|>\n<|im_start|>assistant\n42<|im_end|>"
    )
    assert trunk.id == "p"


def test_token_that_spans_the_boundary_is_split_as_an_engine_would():
    tokenizer = toy_tokenizer("chatml")
    newlines = tokenizer("\n\n", add_special_tokens=False)["input_ids"]
    assert len(newlines) == 1  # the case can arise with this tokenizer
    prompt = chat(None, [("Hello", "\n Hello"), ("what", "42")])
    first, second = encode_conversation(tokenizer, prompt, template_kwargs={}, eos_ids=eos_ids("chatml", tokenizer))
    assert newlines[0] not in first.tokens
    assert decoded(tokenizer, first.tokens[first.first :]) == "\n Hello<|im_end|>"
    assert newlines[0] in second.tokens  # as history it is text like any other
    assert decoded(tokenizer, second.tokens[second.first :]) == "42<|im_end|>"


def test_earlier_thinking_is_seen_only_in_its_own_turn():
    tokenizer = toy_tokenizer("thinking")
    pairs = [("Hello", "<think>\nWell, well.\n</think>\n\nFine."), ("what", "<think>\n6 * 7\n</think>\n\n42")]
    trunks = encode_conversation(
        tokenizer, chat(None, pairs), template_kwargs={}, eos_ids=eos_ids("thinking", tokenizer)
    )
    assert [trunk.id for trunk in trunks] == ["p", "p/turn2"]
    first, second = (decoded(tokenizer, trunk.tokens) for trunk in trunks)
    assert first.endswith("assistant\n<think>\nWell, well.\n</think>\n\nFine.<|im_end|>")
    assert "Well" not in second
    assert "assistant\nFine.<|im_end|>" in second
    assert [decoded(tokenizer, trunk.tokens[trunk.first :]) for trunk in trunks] == [
        answer + "<|im_end|>" for _, answer in pairs
    ]


def test_thinking_off_moves_the_empty_block_into_the_prompt():
    tokenizer = toy_tokenizer("thinking")
    prompt = chat(None, [("Hello", "Fine.")])
    ends = eos_ids("thinking", tokenizer)
    (on,) = encode_conversation(tokenizer, prompt, template_kwargs={"enable_thinking": True}, eos_ids=ends)
    (off,) = encode_conversation(tokenizer, prompt, template_kwargs={"enable_thinking": False}, eos_ids=ends)
    assert decoded(tokenizer, on.tokens) == decoded(tokenizer, off.tokens)
    assert decoded(tokenizer, off.prompt).endswith("assistant\n<think>\n\n</think>\n\n")
    assert decoded(tokenizer, on.prompt).endswith("assistant\n")
    off_ids, on_ids = (
        encode_prompt(tokenizer, prompt.question, template_kwargs={"enable_thinking": flag}) for flag in (False, True)
    )
    assert (list(off.prompt), list(on.prompt)) == (off_ids, on_ids)


def conversation_refusal(tokenizer, prompt, kwargs=None, ends=(2,)) -> InputError:
    return refusal(lambda: encode_conversation(tokenizer, prompt, template_kwargs=kwargs or {}, eos_ids=ends))


def test_thinking_in_the_data_contradicts_thinking_off():
    tokenizer = toy_tokenizer("thinking")
    prompt = chat(None, [("Hello", "<think>\nWell.\n</think>\n\nFine.")])
    error = conversation_refusal(tokenizer, prompt, {"enable_thinking": False}, eos_ids("thinking", tokenizer))
    assert "message 2" in str(error)
    assert "generation prompt" in str(error)
    assert "regenerate" in error.fix
    assert error.where == "file.jsonl:3"


def test_no_chat_template():
    error = refusal(lambda: encode_prompt(fresh(None), [{"role": "user", "content": "a"}], template_kwargs={}))
    assert "no chat template" in error.what
    assert "chat_template.jinja" in error.fix


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('Roles must alternate!\nsecond line') }}",
        "{% for m in messages %}",
        "{{ messages[7].content }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content + 3 }}",
    ],
)
def test_template_errors_are_one_sentence(template):
    tokenizer = fresh(template)
    error = refusal(lambda: encode_prompt(tokenizer, [{"role": "user", "content": "a"}], template_kwargs={}))
    assert "chat template does not take" in error.what
    prompt = chat(None, [("a", "b")])
    assert conversation_refusal(tokenizer, prompt).where == "file.jsonl:3"
    turn = refusal(lambda: encode_turn(tokenizer, Prompt("p", "s", prompt.question), (), template_kwargs={}))
    assert turn.where == "p"


@pytest.mark.parametrize("name", ["add_generation_prompt", "tokenize", "truncation", "tools", "return_tensors"])
def test_reserved_template_kwargs(name):
    messages = [{"role": "user", "content": "a"}]
    error = refusal(lambda: encode_prompt(toy_tokenizer(), messages, template_kwargs={name: True}))
    assert name in error.what
    assert error.where == "data.template_kwargs"


def test_header_without_generation_prompt_is_refused():
    """Such a template would have the header supervised as if the target had written it."""
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    tokenizer = fresh(template)
    error = conversation_refusal(tokenizer, chat(None, [("a", "b")]), ends=eos_ids("chatml", tokenizer))
    assert "generation prompt" in error.what


def test_template_without_end_of_sequence_is_refused():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = fresh(template)
    ends = eos_ids("chatml", tokenizer)
    assert "end-of-sequence" in conversation_refusal(tokenizer, chat(None, [("a", "b")]), ends=ends).what
    wrong = {tokenizer.convert_tokens_to_ids("</s>")}  # the target's configuration names another token
    error = conversation_refusal(toy_tokenizer(), chat(None, [("a", "b")]), ends=wrong)
    assert str(*wrong) in error.what
    assert "it has none" in conversation_refusal(toy_tokenizer(), chat(None, [("a", "b")]), ends=()).what


def test_answer_that_holds_end_of_sequence_is_refused():
    tokenizer = toy_tokenizer()
    prompt = chat(None, [("a", "b<|im_end|>c")])
    error = conversation_refusal(tokenizer, prompt, ends=eos_ids("chatml", tokenizer))
    assert "message 2 holds an end-of-sequence token" in error.what


def test_conversation_without_answer_is_refused():
    prompt = Prompt("p", "s", ({"role": "user", "content": "a"},), where="f:1")
    assert "no answer" in conversation_refusal(toy_tokenizer(), prompt).what


def test_question_after_the_last_answer_is_left_out():
    tokenizer = toy_tokenizer()
    answered = chat(None, [("Hello", "Fine."), ("what", "42")])
    open_ended = Prompt("p", "s", answered.messages[:-1])
    ends = eos_ids("chatml", tokenizer)
    (trunk,) = encode_conversation(tokenizer, open_ended, template_kwargs={}, eos_ids=ends)
    assert decoded(tokenizer, trunk.tokens).endswith("Fine.<|im_end|>")
    assert len(trunk.spans) == 1


def test_prefix_space_tokenizer_is_never_split_wrongly():
    """SentencePiece-like: an answer tokenised alone would gain a space; it is then refused, or taken from the whole."""
    tokenizer = toy_tokenizer("inst", "metaspace")
    ends = eos_ids("inst", tokenizer)
    (trunk,) = encode_conversation(
        tokenizer, chat(None, [("Hello", "Fine."), ("what", "42")]), template_kwargs={}, eos_ids=ends
    )
    whole = tokenizer("<s>[INST] Hello [/INST] Fine.</s><s>[INST] what [/INST] 42</s>", add_special_tokens=False)
    assert list(trunk.tokens) == whole["input_ids"]
    # "Hello" is one token, and neither "o" nor "▁o" continues "Hell" to the same text
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}Hell{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    spanning = fresh(template, "inst", "metaspace")
    assert "▁Hello" in spanning.get_vocab()
    error = conversation_refusal(spanning, chat(None, [("q", "o")]), ends=ends)
    assert "cannot split message 2" in error.what


@pytest.fixture(scope="module")
def smollm2():
    from transformers import AutoTokenizer

    from draftloop.target.embedded import embedded_target

    return AutoTokenizer.from_pretrained(embedded_target())


@pytest.mark.smollm2
class TestSmolLM2:
    def test_pad_is_end_of_sequence(self, smollm2):
        tokenizer = smollm2
        assert tokenizer.pad_token_id == tokenizer.eos_token_id  # why the mask never comes from token values

    @FAST
    @given(conversation=conversations)
    def test_supervised_is_exactly_the_answers_and_their_end(self, smollm2, conversation):
        tokenizer = smollm2
        prompt = chat(*conversation)
        trunks = encode_conversation(
            tokenizer, prompt, template_kwargs={}, eos_ids={tokenizer.convert_tokens_to_ids("<|im_end|>")}
        )
        spans = [(trunk, span) for trunk in trunks for span in trunk.spans]
        assert [decoded(tokenizer, trunk.tokens[a:b]) for trunk, (a, b) in spans] == [
            prompt.messages[index]["content"] + "<|im_end|>" for index in reply_indices(prompt)
        ]
        for (trunk, (start, _)), index in zip(spans, reply_indices(prompt), strict=True):
            asked = tokenizer.apply_chat_template(list(prompt.messages[:index]), add_generation_prompt=True)
            assert list(trunk.tokens[:start]) == asked["input_ids"]
            assert not trunk.mask[start - 1]
