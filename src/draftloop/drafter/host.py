"""One decoder layer of the target's own class, run as the layer of a chain: for drafters grafted onto a target.

The layer is transformers' own code, made from the target's configuration, so what it computes (gated or latent
attention, experts, partial rotary positions, norms wherever they stand) is not written here again. Only what a query
sees is ours: the layer hands our attention function queries, keys and values, and the plan of who sees what in the
place of a mask. The one file of this room that knows transformers.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from draftloop.core.errors import InputError
from draftloop.drafter.masks import CachedChains, PackedChains, Pair

_ATTENTION = "draftloop_chain"
_BEYOND = {"softcap": "soft-capped scores", "s_aux": "attention sinks", "position_bias": "a bias of positions"}
_OTHER = "Train another family (drafter.family) for this target."


class _Enough(Exception):
    """Keys and values are known, and nothing else of the layer is wanted."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key, self.value = key, value


_KEYS_ONLY = object()


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """What the layer calls: [b, heads, t, d] -> [b, t, heads, d]."""
    beyond = [what for name, what in _BEYOND.items() if more.get(name) is not None]
    if beyond:
        raise InputError(f"the target's layers attend with {beyond[0]}, which the mtp family lacks", fix=_OTHER)
    if attention_mask is _KEYS_ONLY:
        raise _Enough(key, value)
    assert isinstance(attention_mask, CachedChains | PackedChains), "the layer changed the mask that it was given"
    return attention_mask.attend(query, key, value, scaling).transpose(1, 2), None


@cache
def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(_ATTENTION, _attention)  # type: ignore[arg-type]


class Host:
    """A target's class of decoder layer, and what such a layer is called with. No module: it holds no weights.

    Args:
        told: the target's configuration as a dictionary, `model_type` included; `config.to_dict()` gives it.

    Attributes:
        config: of one such layer, with full attention (and experts, where the class has any).

    Raises:
        InputError: transformers does not know the class, or its layers are not of a kind that can be run alone.
    """

    def __init__(self, told: dict[str, Any]) -> None:
        _register()
        self.config = _one_layer(told)
        kind = self.config.model_type
        try:
            with torch.device("meta"):
                base = _base(self.config)
            self._layer, norm, rotary = type(base.layers[0]), getattr(base, "norm", None), base.rotary_emb
        except Exception as error:  # the class's own code, with a configuration of ours
            raise InputError(
                f"no decoder layer can be made of the class of a {kind} ({type(error).__name__}: {error})", fix=_OTHER
            ) from error
        self._norm = type(norm) if norm is not None and [n for n, _ in norm.named_parameters()] == ["weight"] else None
        self._turns = type(rotary)
        self._by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
        self._rotary: dict[torch.device, nn.Module] = {}  # out of the module tree: its frequencies stay in float32
        self.config._attn_implementation = _ATTENTION

    def layer(self) -> nn.Module:
        """A new layer; where it has several ways of computing experts, the plain one."""
        return self._layer(self.config, 0)  # type: ignore[no-any-return]

    def norm(self) -> nn.Module | None:
        """A new norm of the class of the target's final one; None where that is more than a weight."""
        return None if self._norm is None else self._norm(self.config.hidden_size, eps=self.eps)

    @property
    def eps(self) -> float:
        """Of the norms."""
        return float(getattr(self.config, "rms_norm_eps", None) or 1e-6)

    @property
    def experts(self) -> int:
        """How many experts the layer has; 0 = a plain feed-forward."""
        names = ("num_experts", "n_routed_experts", "num_local_experts")
        return next((int(n) for name in names if (n := getattr(self.config, name, None))), 0)

    def keys_values(self, layer: nn.Module, x: Tensor, positions: Tensor, turned: Any) -> Pair:
        """Inputs [b, t, H] at int64 [b, t] -> keys and values [b, kv heads, t, d]; no more is computed."""
        try:
            self._call(layer, x, positions, turned, _KEYS_ONLY)
        except _Enough as found:
            return found.key, found.value
        raise AssertionError("the layer does not attend")

    def run(
        self, layer: nn.Module, x: Tensor, positions: Tensor, turned: Any, chains: CachedChains | PackedChains
    ) -> Tensor:
        """Inputs [b, N, H] at int64 [b, N], `turned` there -> the layer's output [b, N, H]; `chains` attends."""
        return self._call(layer, x, positions, turned, chains)

    def _call(self, layer: nn.Module, x: Tensor, positions: Tensor, turned: Any, mask: Any) -> Tensor:
        out = layer(
            x,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=turned,
            use_cache=False,
        )
        return out[0] if isinstance(out, tuple) else out

    def turned(self, x: Tensor, positions: Tensor) -> Any:
        """What the target's rotary module says of int64 [b, t], in the type of x."""
        if x.device not in self._rotary:
            with torch.device("cpu"):
                made = self._turns(config=self.config)
            self._rotary[x.device] = made.to(x.device)
        more = {"layer_type": self.config.layer_types[0]} if self._by_kind else {}
        return self._rotary[x.device](x, position_ids=positions, **more)  # type: ignore[no-any-return]


def text_part(told: dict[str, Any]) -> Any:
    """The configuration of the decoder that a model's dictionary means.

    Raises:
        InputError: transformers has no class for it.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = told.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise InputError(f"transformers knows no model of type {kind!r}", fix=_OTHER)
    return CONFIG_MAPPING[kind].from_dict(dict(told)).get_text_config(decoder=True)


def _one_layer(told: dict[str, Any]) -> Any:
    """The same configuration for a model of a single layer, with what is listed layer by layer cut down to it."""
    config = text_part(told)
    config.num_hidden_layers = 1
    for name, value in (
        ("layer_types", ["full_attention"]),
        ("mlp_layer_types", ["sparse"]),
        ("no_rope_layers", [1]),
        ("mlp_only_layers", []),
        ("first_k_dense_replace", 0),
        ("per_layer_config", None),
    ):
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    config._experts_implementation = "eager"
    return config


def _base(config: Any) -> Any:
    from transformers import AutoModel

    return AutoModel.from_config(config)
