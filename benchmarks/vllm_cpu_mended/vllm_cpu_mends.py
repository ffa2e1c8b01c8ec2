"""A vLLM plugin: three faults of its CPU paths, mended where the platform itself overrides kernels.

1. `expand_kernel` repeats a request's temperature (a float32) for each of its drafted tokens, but the CPU version
   writes into an int64 copy of the output and drops it: tokens are verified at whatever the memory held as temperature.
2. The fused norm of a DFlash drafter's context keys takes the first layer's weight for all layers on a CPU.
3. The rotary kernel misreads queries of shape [tokens, heads, size] and keys that are a view, as latent attention
   (DeepSeek) hands them over: the target's own output is wrong. vLLM's plain version of the same step takes them.
"""

from __future__ import annotations

from typing import Any


def _expand(output: Any, input_val: Any, cu_num_tokens: Any, replace_from: Any, replace_to: Any, *_: Any) -> None:
    """Repeat input_val[i] over the tokens of request i, with one value replaced by another."""
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    values = input_val.masked_fill(input_val == replace_from, replace_to)
    output[: int(counts.sum())] = values.repeat_interleave(counts)


def _normalize_context_k(self: Any, all_k: Any) -> Any:
    """RMS norm of keys [layers, tokens, heads, head size], each layer by its own weight."""
    import torch

    scale = all_k.float().pow(2).mean(-1, keepdim=True).add(self._rms_norm_eps).rsqrt()
    weight = torch.as_tensor(self._k_norm_weights)[:, None, None, :]
    return ((all_k.float() * scale).to(all_k.dtype) * weight).contiguous()


def _rotate(kernel: Any) -> Any:
    """Rotary positions by the kernel where it reads its arguments rightly, else by vLLM's own plain version."""

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        return (self.forward_native if query.dim() > 2 else kernel.__get__(self))(positions, query, key)

    return forward_cpu


def mend() -> None:
    """Called by vLLM in each of its processes before the platform registers its kernels."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding  # type: ignore[import-not-found]
    from vllm.model_executor.models import qwen3_dflash  # type: ignore[import-not-found]
    from vllm.utils import cpu_triton_utils  # type: ignore[import-not-found]

    RotaryEmbedding.forward_cpu = _rotate(RotaryEmbedding.forward_cpu)
    cpu_triton_utils._expand_kernel_impl = _expand
    for model in vars(qwen3_dflash).values():
        if hasattr(model, "_normalize_context_k"):
            model._normalize_context_k = _normalize_context_k
