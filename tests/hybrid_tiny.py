"""Tiny random hybrid targets: the classes of tests/test_hybrid*.py."""

from __future__ import annotations

import contextlib
import inspect
import sys

import torch
from transformers.models.qwen4_exp import configuration_qwen4_exp

from draftloop.target.load import load_target
from tests.tiny import EOS, VOCAB

# the name of indexed layers in the transformers at hand
OLDER, NEWER = "qwen_sparse_attention", "indexed_attention"
INDEXED = OLDER if OLDER in inspect.getsource(configuration_qwen4_exp) else NEWER
LINEAR3 = ["linear_attention"] * 3 + ["full_attention"]


def hybrid_model(kind: str = "qwen3_next", *, seed: int = 0, **changes):
    """A random hybrid whose states matter: large projections, slow decay."""
    common = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, max_position_embeddings=512, eos_token_id=EOS, bos_token_id=1, pad_token_id=0,
        layer_types=LINEAR3, attn_implementation="sdpa",
    )  # fmt: skip
    experts = dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24,
        decoder_sparse_step=1, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    if kind == "qwen3_next":
        from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

        model = Qwen3NextForCausalLM(Qwen3NextConfig(**{**common, **experts, **changes}))
    elif kind == "qwen3_5":
        from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**common, **changes}))
    elif kind == "qwen3_5_moe":
        from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

        model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**{**common, **experts, **changes}))
    elif kind in ("qwen4_exp", "qwen4_exp without n-grams"):
        from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

        indexer = dict(
            indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=4,
            hc_count=2, hc_lowrank=16, layer_types=["linear_attention"] * 2 + [INDEXED, "linear_attention"],
        )  # fmt: skip
        grams = dict(ple_layer_ids=[1, 4], ple_embed_dim=16, heads_per_ngram=2, ngram_vocab_size_base=101)
        grams = {} if "without" in kind else grams
        model = Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**{**common, **experts, **indexer, **grams, **changes}))
    else:
        raise ValueError(kind)
    model.config._experts_implementation = "eager"  # the grouped kernel has no float64
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
            elif name.endswith("A_log"):
                weight.uniform_(-4, 0)
    return model.eval()


def hybrid_target(kind: str = "qwen3_next", **changes):
    return load_target(hybrid_model(kind, **changes))


def slow_rule(query, key, value, g, beta, initial_state=None, output_final_state=False, **kwargs):
    """The recurrence token by token in the type of its input: transformers' own casts to float32."""
    share = value.shape[2] // key.shape[2]
    query, key = (part.repeat_interleave(share, 2) for part in (query, key))
    query, key = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + 1e-6) for part in (query, key))
    n, t, heads, width = key.shape
    state = value.new_zeros(n, heads, width, value.shape[-1]) if initial_state is None else initial_state.to(value)
    out = []
    for i in range(t):
        state = state * g[:, i].to(value).exp()[..., None, None]
        wrote = beta[:, i, :, None] * (value[:, i] - torch.einsum("nhkv,nhk->nhv", state, key[:, i]))
        state = state + key[:, i].unsqueeze(-1) * wrote.unsqueeze(-2)
        out.append(torch.einsum("nhkv,nhk->nhv", state, query[:, i] * width**-0.5))
    return torch.stack(out, 1), state if output_final_state else None


def steady_topk(scores, k, dim=-1, **kwargs):
    """`topk` whose ties go to the earlier: torch leaves them open."""
    order = torch.argsort(scores, dim=dim, descending=True, stable=True).narrow(dim, 0, k)
    return torch.return_types.topk((scores.gather(dim, order), order))


@contextlib.contextmanager
def exact_reference(model):
    """Let the model's own forward run its delta rule in float64, and break ties of indexers as we do."""
    rooms = {sys.modules[type(one).__module__] for one in model.modules() if hasattr(one, "A_log")}
    names = [
        (room, name) for room in rooms for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    ]
    true = [getattr(room, name) for room, name in names]
    topk = torch.Tensor.topk
    for room, name in names:
        setattr(room, name, slow_rule)
    torch.Tensor.topk = steady_topk
    try:
        yield
    finally:
        torch.Tensor.topk = topk
        for (room, name), rule in zip(names, true, strict=True):
            setattr(room, name, rule)
