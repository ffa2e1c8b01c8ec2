"""Tiny random targets with a multi-token-prediction head of their own in their checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draftloop.drafter.build import new_drafter
from draftloop.drafter.families import spec_for
from draftloop.formats.mtp import tensors_of
from draftloop.recipe import DrafterPart
from draftloop.target.load import load_target
from tests.hybrid_tiny import hybrid_model
from tests.tiny import EOS, VOCAB, tiny_target

NATIVE = ("qwen3_5", "qwen3_next", "qwen3_5_moe", "deepseek_v3", "glm4_moe")


def owner_model(kind: str, *, seed: int = 0):
    """A model of a class whose checkpoints may hold a head."""
    if kind.startswith("qwen"):
        return hybrid_model(kind, seed=seed)
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM

    common = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1, max_position_embeddings=256, eos_token_id=EOS, bos_token_id=1, pad_token_id=0,
        attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(seed)
    if kind == "deepseek_v3":
        latent = dict(q_lora_rank=12, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12)
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**common, **latent, num_key_value_heads=4))
    else:
        model = Glm4MoeForCausalLM(Glm4MoeConfig(**common, num_key_value_heads=2, head_dim=8, use_qk_norm=True))
    model.config._experts_implementation = "eager"
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
    return model.eval()


def mtp_drafter(target, seed: int = 0, block: int = 5, loud: float = 8.0):
    """A module whose every part matters: loud matrices, norms that are not generic."""
    drafter = new_drafter(spec_for(DrafterPart(family="mtp", block_size=block), target), target, seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.dim() > 1:
                weight.mul_(loud)
            else:
                weight.add_(0.3 * torch.randn(weight.shape, generator=draw))
    return drafter


def mtp_target(kind: str = "llama", **changes):
    """A target to graft onto."""
    return tiny_target(kind, **changes) if kind in ("llama", "qwen3", "qwen2", "mistral", "phi") else native_live(kind)


def native_live(kind: str):
    """A target of a class with heads, in memory."""
    return load_target(owner_model(kind))


def native_target(folder: Path):
    """The target of such a folder, which knows where it came from."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    model.config._experts_implementation = "eager"
    return load_target(model)


def native_folder(kind: str, folder: Path, seed: int = 0) -> Path:
    """A checkpoint folder of such a target with a random head in it."""
    model = owner_model(kind, seed=seed)
    model.save_pretrained(folder)
    drafter = mtp_drafter(load_target(model), seed + 1)
    head = tensors_of(drafter, torch.float32, folder)[0]
    file = folder / "model.safetensors"
    save_file({**load_file(file), **head}, file, metadata={"format": "pt"})
    return folder
