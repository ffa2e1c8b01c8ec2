"""Make a tiny target of a class that brings a multi-token-prediction head, with a random head in its checkpoint.

    python benchmarks/mtp_targets.py CLASS OUT

CLASS is one of glm4_moe, deepseek_v3, qwen3_next, qwen3_5, qwen3_5_moe. Shapes are small, but such as vLLM's CPU
kernels take: heads of 32, DeepSeek's latent of 512 + 64, Gated DeltaNet's heads of 128. Tokenizer, vocabulary and chat
template are the embedded target's. The random model then learns for a minute or two to answer the packaged training
prompts by themselves, so that its greedy text is not the same few tokens over and over, and a head that learns its
answers has something to foresee. It is
of no use but for parity (docs/engines.md), and no figure about speed or quality comes from it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy, pad

from draftloop.core.weights import read_tensors, write_tensors
from draftloop.data.chat import encode_prompt
from draftloop.data.prompts import read_prompts
from draftloop.drafter.build import new_drafter
from draftloop.drafter.families import spec_for
from draftloop.formats.mtp import tensors_of
from draftloop.formats.mtp_names import depth_key
from draftloop.recipe import DrafterPart
from draftloop.target.load import load_target, load_tokenizer

COMMON = dict(  # noqa: C408
    hidden_size=128, intermediate_size=256, num_attention_heads=4, max_position_embeddings=2048,
    tie_word_embeddings=False, attn_implementation="sdpa",
)  # fmt: skip
ROUTED = dict(  # noqa: C408
    n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=64, n_group=1, topk_group=1,
    first_k_dense_replace=1, num_hidden_layers=3,
)  # fmt: skip
HYBRID = dict(  # noqa: C408
    num_hidden_layers=4, num_key_value_heads=2, head_dim=32, linear_num_key_heads=1, linear_num_value_heads=2,
    linear_key_head_dim=128, linear_value_head_dim=128, layer_types=["linear_attention"] * 3 + ["full_attention"],
)  # fmt: skip
EXPERTS = dict(  # noqa: C408
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64,
    decoder_sparse_step=1, norm_topk_prob=True,
)  # fmt: skip
LATENT = dict(  # noqa: C408
    q_lora_rank=64, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32, num_key_value_heads=4,
    topk_method="noaux_tc", scoring_func="sigmoid",  # which released checkpoints say, and vLLM goes by
)  # fmt: skip
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe": ("Glm4Moe", ROUTED | {"num_key_value_heads": 2, "head_dim": 32, "use_qk_norm": True}),
    "deepseek_v3": ("DeepseekV3", ROUTED | LATENT),
    "qwen3_next": ("Qwen3Next", HYBRID | EXPERTS),
    "qwen3_5": ("Qwen3_5", HYBRID),
    "qwen3_5_moe": ("Qwen3_5Moe", HYBRID | EXPERTS),
}


def new_model(kind: str, tokenizer: Any, seed: int) -> Any:
    """A random model in float32; its matrices are louder than transformers makes them, so that every layer matters."""
    import transformers

    name, shape = CLASSES[kind]
    config = getattr(transformers, f"{name}{'Text' if kind.startswith('qwen3_5') else ''}Config")(
        **COMMON, **shape, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.05)
    return model


def learn(model: Any, texts: list[list[int]], steps: int, lr: float, seed: int) -> float:
    """Next-token cross-entropy on the texts, eight a step; the last step's loss in nats a token."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    draw = torch.Generator().manual_seed(seed)
    loss = torch.zeros(())
    for _ in range(steps):
        some = [texts[i] for i in torch.randint(len(texts), (8,), generator=draw).tolist()]
        longest = max(map(len, some))
        ids = torch.stack([pad(torch.tensor(one), (0, longest - len(one)), value=-100) for one in some])
        logits = model(input_ids=ids.clamp(min=0), use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=-100)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    return float(loss.detach())


def add_head(target: Any, out: Path, seed: int) -> None:
    """Put a random head into the target's weight file. Norms vary: of even ones a second norm would undo the first."""
    head = new_drafter(spec_for(DrafterPart(family="mtp"), target), target, seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.dim() == 1:
                weight.mul_(torch.randn(weight.shape, generator=draw).exp())
    file = out / "model.safetensors"
    write_tensors(file, {**read_tensors(file), **tensors_of(head, torch.float32, out)[0]})


def make(kind: str, out: Path, *, steps: int, lr: float, seed: int) -> None:
    """The folder: config.json that promises one head, weights with a random one among them, the tokenizer."""
    tokenizer = load_tokenizer("smollm2")
    model = new_model(kind, tokenizer, seed)
    prompts = read_prompts(["builtin:train"], Path("."))
    texts = [
        encode_prompt(tokenizer, list(p.question), template_kwargs={})
        + tokenizer.encode(p.question[-1]["content"], add_special_tokens=False)
        + [tokenizer.eos_token_id]
        for p in prompts
    ]
    loss = learn(model, texts, steps, lr, seed)
    model.eval().requires_grad_(False)
    setattr(model.config, depth_key(model.config.model_type), 1)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    add_head(load_target(model, tokenizer=tokenizer), out, seed)
    told = {"class": kind, "parameters": sum(p.numel() for p in model.parameters()), "steps": steps, "loss": loss}
    print(json.dumps(told))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=tuple(CLASSES), metavar="CLASS")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=400, help="of eight prompts each (default 400)")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make(options.kind, options.out, steps=options.steps, lr=options.lr, seed=options.seed)


if __name__ == "__main__":
    main()
