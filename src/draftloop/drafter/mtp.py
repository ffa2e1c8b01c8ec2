"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): one layer behind the target's last, used again.

Write h_j for the target's hidden row at position j after its final norm, which is what engines feed, and x_j for the
token there. A decoder layer of the target's own class reads fc([norm_e(embedding of x_{j+1}); norm_h(h_j)]), and its
output after a norm of its own is read by the target's readout: the law of x_{j+2}. The next slot takes that output,
normed, in the place of h_j (`feeds`). Chains, context and caches are `chain`'s, the layer is `host`'s; embedding and
readout are borrowed. Tensor names are those of Qwen3-Next's and Qwen3.5's checkpoints without their prefix `mtp.`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from draftloop.core.errors import InputError
from draftloop.drafter.chain import ChainDrafter, Chains, FixedChainCache
from draftloop.drafter.dflash import RMSNorm
from draftloop.drafter.host import Host, text_part
from draftloop.drafter.masks import Pair, computed_in
from draftloop.drafter.spec import DrafterSpec, shape_for
from draftloop.recipe import DrafterPart

Feeds = Literal["normed", "raw"]
Way = tuple[Feeds, bool]

# (engine, `model_type`) -> `feeds` and `blank_first`, where an engine does not compute a head as SGLang and we do by
# default: vLLM 0.32's deepseek_mtp.py and glm4_moe_mtp.py
WAYS: dict[tuple[str, str], Way] = {
    ("vllm", "deepseek_v3"): ("normed", True),
    ("vllm", "glm4_moe"): ("raw", True),
}


@dataclass(frozen=True, kw_only=True)
class MTPSpec(DrafterSpec):
    """Shape of an MTP module: that of the target's layers, whose configuration it keeps.

    Attributes:
        target_config: the target's configuration as a dictionary (`config.to_dict()`), from which its layer is made.
        feeds: what a slot hands the next: the output after the module's own norm, or before it (vLLM for GLM-4 MoE).
        blank_first: at position 0 the embedding of the next token is left out (vLLM for DeepSeek-V3 and GLM-4 MoE).
    """

    family = "mtp"

    target_config: dict[str, Any] = field(repr=False)
    feeds: Feeds = "normed"
    blank_first: bool = False

    @property
    def kind(self) -> str:
        """The `model_type` of the target's decoder."""
        return str(text_part(self.target_config).model_type)


def computed_by(spec: MTPSpec, engine: str) -> MTPSpec:
    """The same module as an engine (vllm, sglang) computes it; training and decoding here then do the same."""
    feeds, blank = WAYS.get((engine, spec.kind), ("normed", False))
    return replace(spec, feeds=feeds, blank_first=blank)


def mtp_spec(part: DrafterPart, target: Any) -> MTPSpec:
    """The shape of an MTP module for a target; as `shape_for`, and refused where its layer cannot be run alone."""
    shape = shape_for(part, target, (target.num_layers - 1,))
    shape |= {"layers": 1, "target_layers": (target.num_layers,)}  # the row behind the last layer and the final norm
    spec = MTPSpec(**shape, target_config=_told(target.model))
    spec = computed_by(spec, part.served_by) if part.served_by else spec
    _check_runs(MTP(spec).to(target.device).bind(target.embed, target.readout), target)
    return spec


def _told(model: Any) -> dict[str, Any]:
    """A model's configuration as a config.json would hold it, without what is not of its shape."""
    told: dict[str, Any] = json.loads(json.dumps(model.config.to_dict(), default=str))
    for name in ("_name_or_path", "dtype", "transformers_version", "id2label", "label2id"):
        told.pop(name, None)
    return {**told, "architectures": told.get("architectures") or [type(model).__name__]}


@torch.no_grad()
def _check_runs(module: MTP, target: Any) -> None:
    """Run a module on a few tokens.

    Raises:
        InputError: the layer's own code fails with positions and keys of ours.
    """
    text = torch.zeros(1, 4, dtype=torch.int64, device=target.device)
    features = torch.zeros(1, 3, target.hidden_size, device=target.device)
    try:
        module.pack(features, text[:, 2:3], text).step(0, None)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"a decoder layer of the target's cannot be run alone ({type(error).__name__}: {error})",
            where=target.name,
            fix="Train another family (drafter.family) for this target.",
        ) from error


class MTP(ChainDrafter):
    """The drafter. `bind` it to a target before use.

    Attributes:
        spec: shape.
        fc: reads [embedding; hidden row], both normed.
        layers: one decoder layer of the target's class.
        norm: before the readout.
    """

    compiled = ()  # the layer is the target's code, which leaves by an exception where only keys are wanted

    def __init__(self, spec: MTPSpec) -> None:
        super().__init__()
        self.spec = spec
        self.host = Host(spec.target_config)
        self.fc = nn.Linear(2 * spec.hidden_size, spec.hidden_size, bias=False)
        self.pre_fc_norm_embedding = self._norm()
        self.pre_fc_norm_hidden = self._norm()
        self.layers = nn.ModuleList([self.host.layer()])
        self.norm = self._norm()

    def _norm(self) -> nn.Module:
        return self.host.norm() or RMSNorm(self.spec.hidden_size, self.spec.norm_eps)

    @torch.no_grad()
    def settle(self, target: Any) -> None:
        """Begin near the target: the hidden row passes through `fc`, and the last norm is the target's own."""
        self.fc.weight[:, self.spec.hidden_size :] += torch.eye(self.spec.hidden_size)
        last = getattr(target.model.get_decoder(), "norm", None)
        if type(last) is type(self.norm):
            self.norm.load_state_dict(last.state_dict())

    @property
    def weight(self) -> Tensor:
        """As `ChainDrafter.weight`."""
        return self.fc.weight

    def take(self, features: Tensor) -> Tensor:
        """The target's hidden rows [..., H], as they are."""
        return features

    def give(self, output: Tensor) -> Tensor:
        """As `ChainDrafter.give`: `feeds` says which side of the norm."""
        return self.norm(output) if self.spec.feeds == "normed" else output  # type: ignore[no-any-return]

    def read(self, state: Tensor) -> Tensor:
        """As `ChainDrafter.read`."""
        return state if self.spec.feeds == "normed" else self.norm(state)  # type: ignore[no-any-return]

    def lift(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """As `ChainDrafter.lift`."""
        embedded = self._embedded(tokens)
        if self.spec.blank_first:
            embedded = embedded.masked_fill((positions == 0).unsqueeze(-1), 0)
        return self.pre_fc_norm_embedding(embedded)  # type: ignore[no-any-return]

    def turned(self, positions: Tensor, like: Tensor) -> Any:
        """As the target turns its heads."""
        return self.host.turned(like.new_empty(0, dtype=computed_in(like)), positions)

    def _joined(self, state: Tensor, lifted: Tensor) -> Tensor:
        """The layer's input [..., H]."""
        return self.fc(torch.cat([lifted, self.pre_fc_norm_hidden(state)], -1))  # type: ignore[no-any-return]

    def keys_values(self, state: Tensor, lifted: Tensor, positions: Tensor) -> Pair:
        """As the layer makes them."""
        return self._keys_values(self._joined(state, lifted), positions)

    def _keys_values(self, x: Tensor, positions: Tensor) -> Pair:
        return self.host.keys_values(self.layers[0], x, positions, self.turned(positions, x))

    def through(self, state: Tensor, lifted: Tensor, positions: Tensor, turn: Any, chains: Chains) -> Tensor:
        """As `ChainDrafter.through`, by the target's code."""
        return self.host.run(self.layers[0], self._joined(state, lifted), positions, turn, chains)

    def why_not_fixed(self) -> str:
        """Why it cannot draft with fixed shapes, as a clause; empty if it can."""
        return "the drafter's layer has experts, whose choice the host has to be told" if self.host.experts else ""

    @torch.no_grad()
    def new_fixed_cache(self, rows: int, capacity: int) -> FixedChainCache:
        """As `ChainDrafter.new_fixed_cache`; how wide keys and values are, the layer says."""
        x = self.fc.weight.new_zeros(1, 1, self.spec.hidden_size)
        key, value = self._keys_values(x, torch.zeros(1, 1, dtype=torch.int64, device=x.device))
        shapes = [(rows, one.shape[1], capacity, one.shape[3]) for one in (key, value)]
        return FixedChainCache(shapes[0], self.spec.hidden_size, self.fc.weight.detach(), shapes[1])
