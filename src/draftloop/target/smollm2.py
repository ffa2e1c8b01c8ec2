"""SmolLM2-135M-Instruct from its GGUF file to a Hugging Face checkpoint, and the proof that the result works.

Knows the GGUF layout of a Llama and this model's tokenizer; writes the same bytes whatever the version of transformers,
which takes no part in the conversion. Does not know where the file came from nor where the checkpoint goes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftloop.core.errors import EnvironmentFault
from draftloop.core.files import write_json, write_text

WEIGHTS = "model.safetensors"

_CONFIG_KEYS = (
    "attention.head_count",
    "attention.head_count_kv",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "vocab_size",
)

_OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_BLOCK_NAMES = {  # GGUF's name inside a block -> that of transformers
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf: Path, made: Path) -> None:
    """Write config, generation config, weights (bfloat16), tokenizer and chat template into the folder `made`."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    _write_weights(reader, made / WEIGHTS)
    _write_tokenizer(reader, made)
    meta = {key: reader.fields[f"llama.{key}"].contents() for key in _CONFIG_KEYS}
    rope_theta = float(meta["rope.freq_base"])
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "head_dim": int(meta["rope.dimension_count"]),
        "hidden_act": "silu",
        "hidden_size": int(meta["embedding_length"]),
        "initializer_range": 0.041666666666666664,
        "intermediate_size": int(meta["feed_forward_length"]),
        "max_position_embeddings": int(meta["context_length"]),
        "mlp_bias": False,
        "num_attention_heads": int(meta["attention.head_count"]),
        "num_hidden_layers": int(meta["block_count"]),
        "num_key_value_heads": int(meta["attention.head_count_kv"]),
        "pad_token_id": 2,
        "rms_norm_eps": 1e-05,  # stored as the nearest float32
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "rope_theta": rope_theta,  # the older place, which other engines still read
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": int(meta["vocab_size"]),
    }
    write_json(made / "config.json", config)
    write_json(made / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})


def _write_weights(reader: Any, path: Path) -> None:
    """Dequantise every tensor to float32, undo GGUF's order of rotary rows, round to bfloat16, save."""
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name.startswith("blk."):
            _, layer, kind, suffix = tensor.name.split(".")
            if kind in heads:
                # GGUF interleaves the two halves of each head, [heads, half, 2, hidden]; transformers keeps them apart
                count = int(reader.fields[heads[kind]].contents())
                value = value.view(count, -1, 2, value.shape[1]).transpose(1, 2).reshape(value.shape)
            name = f"model.layers.{layer}.{_BLOCK_NAMES[kind]}.{suffix}"
        else:
            name = _OUTER_NAMES[tensor.name]
        state[name] = value.to(torch.bfloat16).contiguous()
    save_file(state, path, metadata={"format": "pt"})


def _write_tokenizer(reader: Any, made: Path) -> None:
    """Make a byte-level BPE of GGUF's lists; digits are split off first, which GGUF says only by the name "smollm"."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    pairs = [tuple(pair.split(" ")) for pair in reader.fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(made / "tokenizer.json"))
    settings = {
        "add_prefix_space": False,
        "bos_token": tokens[1],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[2],
        "model_max_length": 8192,
        "pad_token": tokens[2],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[0],
    }
    write_json(made / "tokenizer_config.json", settings)
    template = reader.fields["tokenizer.chat_template"].contents()
    write_text(made / "chat_template.jinja", template)


def prove(made: Path) -> None:
    """Load what was written as any user of it would, and ask it a question: a wrong layout cannot answer.

    Raises:
        EnvironmentFault: the tokenizer changes a text, the template does not open a turn, or the answer is wrong.
    """
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        reason = _failing(made)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
    finally:
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    if reason:
        raise EnvironmentFault(
            f"the converted default target does not work with the installed packages ({reason})",
            where=str(made.parent.parent),
            fix="Install the versions in constraints.txt.",
        )


def _failing(made: Path) -> str:
    """Say what the checkpoint in `made` gets wrong, as a clause; empty if nothing."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made)
    text = "def f(x):\n    return 2024 + x  # naïve, 東京 🙂\n"
    if tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) != text:
        return "its tokenizer changes a text"
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    if not isinstance(prompt, str) or not prompt.endswith("<|im_start|>assistant\n"):
        return "its chat template does not open a turn"
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False).input_ids])  # [1, prompt]
    model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.bfloat16)
    reply = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    return "" if "Paris" in tokenizer.decode(reply[0, ids.shape[1] :]) else "its answers make no sense"
