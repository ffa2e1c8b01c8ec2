"""Small tokenizers and chat templates with every habit that the loss mask has to survive. Nothing is downloaded."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from draftloop.core.errors import InputError

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|end|>"]

# Supplies a system message; what follows end-of-sequence is a newline. The {% generation %} block is a second opinion.
CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Thinks: drops the thinking of earlier turns, adds an empty think block where there is none, knows tools.
THINKING = (
    "{% if tools %}<|im_start|>system\nTools:"
    "{% for t in tools %}{{ '\n' }}{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(asked=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set content = m.content %}{% set thought = '' %}"
    "{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.asked and (loop.last or thought) %}"
    "<think>\n{{ thought }}\n</think>\n\n{{ content.lstrip('\n') }}{% else %}{{ content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '\n' }}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<result>{{ m.content | tojson }}</result><|im_end|>\n"
    "{% elif m.role != 'developer' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# No header before an answer and no generation prompt; trims; strict about roles.
INST = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}<s>[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
# Ends a finished conversation with a second end-of-sequence token.
TWO_ENDS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|endoftext|>{% endif %}"
)


@dataclass(frozen=True)
class Toy:
    """A template, and what it is to write for an answer (`written`), its end-of-sequence text included."""

    template: str
    eos: str
    eos_ids: tuple[str, ...]
    system: bool = True

    def written(self, answer: str, thinking: bool | None) -> str:
        if self.template == INST:
            return f" {answer.strip()}{self.eos}"
        if self.template == THINKING:
            bare = answer.lstrip("\n")
            return bare + self.eos if thinking is False else f"<think>\n\n</think>\n\n{bare}{self.eos}"
        return answer + self.eos


TOYS = {
    "chatml": Toy(CHATML, "<|im_end|>", ("<|im_end|>",)),
    "thinking": Toy(THINKING, "<|im_end|>", ("<|im_end|>", "<|endoftext|>")),
    "inst": Toy(INST, "</s>", ("</s>",), system=False),
    "two-ends": Toy(TWO_ENDS, "<|end|>", ("<|end|>", "<|endoftext|>")),
}

_CORPUS = [
    "Explain how bees make honey.\n\nBees collect nectar, and then they dry it.\n\n\n  - nectar\n  - honey\n",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n    # 3\n\t\n",
    "assistant\n\nuser\n\nsystem\nThe answer is 42. \n \n  Because 6 * 7 = 42.\n\n",
    "<think>\n\n</think>\n\nHello! How are you?\n\n<think>\nWell, well.\n</think>\n\nFine.",
    "[INST] Hello [/INST] Hello there [INST] what [/INST]  what?",
]


def _bpe() -> Tokenizer:
    """Byte-level BPE that merges white space greedily: tokens like to span the end of a generation prompt."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    made.train_from_iterator(_CORPUS * 4, trainer)
    return made


def _characters() -> Tokenizer:
    """WordLevel with one word per character."""
    alphabet = sorted({c for text in _CORPUS for c in text} | set(map(chr, range(32, 127))) | set("\n\téß→数🙂"))
    vocab = {c: index for index, c in enumerate(["<unk>", *alphabet])}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return made


def _metaspace() -> Tokenizer:
    """BPE that sets a space before whatever it is given, as SentencePiece does: text cannot be split at will."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    alphabet = [*sorted(set(map(chr, range(32, 127))) | set("\n\téß→数🙂")), "▁"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<unk>"], show_progress=False
    )
    made.train_from_iterator(_CORPUS * 4, trainer)
    return made


BACKENDS = {"bpe": _bpe, "characters": _characters, "metaspace": _metaspace}


@cache
def toy_tokenizer(toy: str = "chatml", backend: str = "bpe") -> PreTrainedTokenizerFast:
    """A Hugging Face tokenizer whose padding token is its end-of-sequence token, as SmolLM2's is."""
    made = BACKENDS[backend]()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    eos = TOYS[toy].eos
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=eos, pad_token=eos, chat_template=TOYS[toy].template
    )


def eos_ids(toy: str, tokenizer: PreTrainedTokenizerFast) -> set[int]:
    return {tokenizer.convert_tokens_to_ids(text) for text in TOYS[toy].eos_ids}


def decoded(tokenizer: PreTrainedTokenizerFast, ids) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def fresh(template: str | None, toy: str = "chatml", backend: str = "bpe") -> PreTrainedTokenizerFast:
    """A tokenizer with another template (the cached ones stay as they are)."""
    tokenizer = deepcopy(toy_tokenizer(toy, backend))
    tokenizer.chat_template = template
    return tokenizer


def refusal(call) -> InputError:
    """The one-sentence InputError that a call ends in."""
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return caught.value


# What people and models write: never blank, never a special token.
texts = st.one_of(
    st.text(alphabet="ab .\n\t<>|[]/→é数🙂", min_size=1, max_size=24),
    st.lists(
        st.sampled_from(
            ["Hello", " there", "\n", "\n\n", "  ", "assistant", "user\n", "42", "    return", ".", "[INST]", "ß"]
        ),
        min_size=1,
        max_size=8,
    ).map("".join),
).filter(lambda text: text.strip() and not any(special in text for special in SPECIALS))
