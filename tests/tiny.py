"""Tiny random targets and drafters, float32, on the CPU, seconds to build."""

from __future__ import annotations

import torch

from draftloop.drafter.build import new_drafter
from draftloop.drafter.spec import DFlashSpec
from draftloop.target.load import load_target

VOCAB = 61
EOS = 3


def tiny_model(
    kind: str = "llama", *, layers: int = 4, vocab: int = VOCAB, seed: int = 0, sharp: float = 3.0, **changes
):
    """A random causal LM whose laws are neither flat nor one-hot."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        PhiConfig,
        PhiForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    classes = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
        "phi": (PhiConfig, PhiForCausalLM),
    }
    config_class, model_class = classes[kind]
    settings = dict(
        vocab_size=vocab, hidden_size=48, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=EOS, bos_token_id=1, pad_token_id=0,
        attn_implementation="sdpa",
    )  # fmt: skip
    if kind == "qwen3":
        settings["head_dim"] = 16
    torch.manual_seed(seed)
    model = model_class(config_class(**{**settings, **changes})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.35 if "lm_head" not in name else 0.12 * sharp)
    return model


def tiny_target(kind: str = "llama", **changes):
    return load_target(tiny_model(kind, **changes))


def tiny_spec(target, *, block: int = 4, layers: int = 2, target_layers=(0, 2), mask: int = 5) -> DFlashSpec:
    return DFlashSpec(
        hidden_size=target.hidden_size, layers=layers, heads=4, kv_heads=2, head_dim=12, intermediate_size=64,
        vocab_size=target.vocab_size, num_target_layers=target.num_layers, target_layers=tuple(target_layers),
        block_size=block, mask_token_id=mask,
    )  # fmt: skip


def tiny_drafter(target, seed: int = 0, **changes):
    drafter = new_drafter(tiny_spec(target, **changes), target, seed)
    with torch.no_grad():  # louder than a fresh one, so that contracts are tested where they could break
        for weight in drafter.parameters():
            if weight.dim() > 1:
                weight.mul_(8)
    return drafter
