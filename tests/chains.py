"""Small EAGLE-3 drafters whose every part matters, and the family written out slot by slot."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from draftloop.drafter.build import new_drafter
from draftloop.drafter.eagle3 import Eagle3, Eagle3Spec
from tests.packed import rand


def chain_spec(target, *, block: int = 5, taps=(0, 1, 2), vocab: int | None = 40, **changes) -> Eagle3Spec:
    shape = dict(
        hidden_size=target.hidden_size, layers=1, heads=4, kv_heads=2, head_dim=12, intermediate_size=64,
        vocab_size=target.vocab_size, num_target_layers=target.num_layers, target_layers=taps, block_size=block,
        draft_vocab=vocab,
    )  # fmt: skip
    return Eagle3Spec(**{**shape, **changes})


def chain_drafter(target, seed: int = 0, **changes) -> Eagle3:
    """Loud matrices, norms that are not ones, a vocabulary with gaps."""
    drafter = new_drafter(chain_spec(target, **changes), target, seed)
    with torch.no_grad():
        for i, (name, weight) in enumerate(drafter.named_parameters()):
            if weight.dim() > 1:
                weight.mul_(1 if "lm_head" in name else 24 if "o_proj" in name or "down_proj" in name else 8)
            else:
                weight.copy_(1 + 0.3 * rand(weight.numel(), seed=seed + i))
    counts = torch.randint(0, 50, (target.vocab_size,), generator=torch.Generator().manual_seed(seed))
    drafter.meet(counts, target)
    return drafter.double() if target.dtype == torch.float64 else drafter


@torch.no_grad()
def by_definition(drafter: Eagle3, target, features, text, anchor: int, drafted) -> torch.Tensor:
    """Rows [K, H] of one chain in float64, a head and a source at a time: EAGLE-3 written out.

    Args:
        features: [S, F * H]; text: ids; drafted: the K tokens that the slots are given (the last is not read).
    """
    spec = drafter.spec
    w = {name: value.detach().double() for name, value in drafter.state_dict().items()}
    embedding = target.model.get_input_embeddings().weight.double()
    at = lambda name: w[f"layers.0.{name}.weight"]  # noqa: E731

    def norm(x, weight):
        return weight * x / (x.square().mean() + spec.norm_eps).sqrt()

    def turn(x, position):
        half = spec.head_dim // 2
        angle = position * spec.rope_theta ** (-torch.arange(half).double() / half)
        z = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half).double(), angle)
        return torch.cat([z.real, z.imag])

    def joined(state, token):
        normed = norm(state, at("hidden_norm"))
        inner = torch.cat([norm(embedding[token], at("input_layernorm")), normed])
        return (normed if spec.norm_before_residual else state), inner

    taken = [w["fc.weight"] @ f.double() for f in features[:anchor]]
    sources = [(joined(g, int(text[j + 1]))[1], j) for j, g in enumerate(taken[:-1])]  # the pairs below anchor - 1
    state, token, rows = taken[-1], int(text[anchor]), []
    for k in range(spec.drafted):
        stream, inner = joined(state, token)
        position = anchor - 1 + k
        sources.append((inner, position))
        heads = []
        for head in range(spec.heads):
            kv = head // (spec.heads // spec.kv_heads)
            own, shared = (slice(i * spec.head_dim, (i + 1) * spec.head_dim) for i in (head, kv))
            query = turn(at("self_attn.q_proj")[own] @ inner, position)
            keys = torch.stack([turn(at("self_attn.k_proj")[shared] @ s, p) for s, p in sources])
            values = torch.stack([at("self_attn.v_proj")[shared] @ s for s, _ in sources])
            heads.append((keys @ query / math.sqrt(spec.head_dim)).softmax(0) @ values)
        stream = stream + at("self_attn.o_proj") @ torch.cat(heads)
        y = norm(stream, at("post_attention_layernorm"))
        state = stream + at("mlp.down_proj") @ (F.silu(at("mlp.gate_proj") @ y) * (at("mlp.up_proj") @ y))
        rows.append(norm(state, w["norm.weight"]))
        token = int(drafted[k])
    return torch.stack(rows)
