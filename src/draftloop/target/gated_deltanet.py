"""Gated DeltaNet layers (Qwen3-Next, Qwen3.5 and their like): a short convolution, then the gated delta rule.

What such a layer knows of a text is a state, not keys; so a branch goes on from the trunk's state at its fork, rebuilt
from the nearest snapshot, with a convolution and a recurrence of its own. `GatedDeltaNet` reads one module of the model
by its structure and says the same as its forward; `Log` is what it remembers of texts. Knows no tree and no cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad, softplus
from transformers.activations import ACT2FN

from draftloop.target.delta_rule import Tokens, pass_over, replay


@dataclass(frozen=True)
class Log:
    """What one layer remembers of n texts of t tokens, enough to go on from any of them.

    Attributes:
        raw: [n, K - 1 + t, D] inputs of the convolution of K taps, those of the K - 1 tokens before the texts included.
        g: [n, t, H] log decay.
        u: [n, t, H, Dv] what each token wrote.
        snapshots: [n, m, H, Dk, Dv] states in front of tokens 0, `spacing`, 2 `spacing`, ...
        spacing: tokens between two snapshots.
    """

    raw: Tensor
    g: Tensor
    u: Tensor
    snapshots: Tensor
    spacing: int
    PARTS: ClassVar[int] = 4

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors."""
        return self.raw, self.g, self.u, self.snapshots

    def select(self, rows: Tensor) -> Log:
        """Only these texts (int64 [m]), in this order."""
        raw, g, u, snapshots = (part.index_select(0, rows) for part in self.parts)
        return Log(raw, g, u, snapshots, self.spacing)

    def without(self, first: int) -> Log:
        """The same without its first tokens, a multiple of `spacing`."""
        if not first:
            return self
        raw, g, u = (part[:, first:].clone() for part in (self.raw, self.g, self.u))
        return Log(raw, g, u, self.snapshots[:, first // self.spacing :].clone(), self.spacing)

    def kept(self, row: int, size: int) -> tuple[Tensor, ...]:
        """A copy of the parts of one text, cut to its first `size` tokens."""
        return tuple(part[row, :end].clone() for part, end in zip(self.parts, self._ends(size), strict=True))

    def kept_bytes(self, size: int) -> int:
        """What `kept` weighs."""
        return sum(part[0, 0].nbytes * end for part, end in zip(self.parts, self._ends(size), strict=True))

    def _ends(self, size: int) -> tuple[int, ...]:
        """How much of each part belongs to the first `size` tokens."""
        before = self.raw.shape[1] - self.g.shape[1]
        return before + size, size, size, max(1, -(-size // self.spacing))

    @staticmethod
    def stack(texts: list[tuple[Tensor, ...]], spacing: int) -> Log:
        """Texts that were `kept`, side by side; what is behind the end of a shorter one is never read."""

        def side_by_side(parts: tuple[Tensor, ...]) -> Tensor:
            longest = max(part.shape[0] for part in parts)
            return torch.stack([pad(part, (0, 0) * (part.dim() - 1) + (0, longest - part.shape[0])) for part in parts])

        raw, g, u, snapshots = (side_by_side(parts) for parts in zip(*texts, strict=True))
        return Log(raw, g, u, snapshots, spacing)


@dataclass(frozen=True)
class Projected:
    """What a layer reads of hidden rows, token by token.

    Attributes:
        raw: [n, t, D] inputs of the convolution: queries, keys and values.
        z: [n, t, H, Dv] the output gate.
        g: [n, t, H] log decay.
        beta: [n, t, H].
    """

    raw: Tensor
    z: Tensor
    g: Tensor
    beta: Tensor

    def at(self, row: Tensor, slot: Tensor) -> Projected:
        """The tokens at slots int64 [m, t] of rows int64 [m]; where the slot is -1, tokens that change nothing."""
        real = slot >= 0

        def pick(part: Tensor) -> Tensor:
            got = part[row.unsqueeze(1), slot.clamp(min=0)]
            return torch.where(real.reshape(*real.shape, *[1] * (got.dim() - 2)), got, 0)

        return Projected(*(pick(part) for part in (self.raw, self.z, self.g, self.beta)))


class GatedDeltaNet:
    """One mixer module of the model.

    Args:
        module: as `fits` recognised it.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.index = int(module.layer_idx)
        self.taps = int(module.conv1d.kernel_size[0])
        self.widths = (int(module.key_dim), int(module.key_dim), int(module.value_dim))
        self.key_width, self.value_width = int(module.head_k_dim), int(module.head_v_dim)
        self.heads = int(module.num_v_heads)
        self.shared = self.heads // int(module.num_k_heads)  # value heads that share a key head

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether a module has these parts (its numbers are compared by the probe)."""
        names = ("conv1d", "A_log", "dt_bias", "norm", "out_proj", "head_k_dim", "head_v_dim", "key_dim", "value_dim",
                 "num_k_heads", "num_v_heads", "layer_idx", "activation")  # fmt: skip
        apart = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        together = ("in_proj_qkvz", "in_proj_ba", "fix_query_key_value_ordering")
        has = all(hasattr(module, name) for name in names)
        return has and any(all(hasattr(module, name) for name in form) for form in (apart, together))

    @property
    def dtype(self) -> torch.dtype:
        """The recurrence runs in float32 at least, as in the model."""
        return torch.promote_types(self.module.conv1d.weight.dtype, torch.float32)

    def project(self, hidden: Tensor) -> Projected:
        """[n, t, hidden size] hidden rows, normalised by the decoder layer."""
        module = self.module
        if hasattr(module, "in_proj_qkvz"):
            *mixed, z, b, a = module.fix_query_key_value_ordering(
                module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
            )
            raw = torch.cat([part.flatten(2) for part in mixed], -1)
        else:
            raw, z = module.in_proj_qkv(hidden), module.in_proj_z(hidden)
            b, a = module.in_proj_b(hidden), module.in_proj_a(hidden)
        rate = -module.A_log.float().exp() * softplus(a.float() + module.dt_bias)  # in float32, as the model has it
        gate = z.unflatten(-1, (self.heads, -1)) if z.dim() == 3 else z
        return Projected(raw, gate, rate.to(self.dtype), b.sigmoid())

    def finish(self, out: Tensor, z: Tensor) -> Tensor:
        """Gate, norm and output projection: [n, t, H, Dv] twice -> [n, t, hidden size]."""
        rows = self.module.norm(out.to(z.dtype).reshape(-1, self.value_width), z.reshape(-1, self.value_width))
        return self.module.out_proj(rows.reshape(*z.shape[:2], -1))

    def go_on(self, given: Projected, state: Tensor, tail: Tensor, spacing: int) -> tuple[Tensor, Log]:
        """Run texts from a state and the raw inputs in front of them ([n, K - 1, D]); outputs [n, t, H, Dv]."""
        raw = torch.cat([tail, given.raw], 1)
        q, k, v = self._convolved(raw).split(self.widths, dim=-1)
        q, k = (self._keys(part) for part in (q, k))
        v = v.unflatten(-1, (self.heads, -1)).to(self.dtype)
        tokens = Tokens(q * self.key_width**-0.5, k, v, given.g, given.beta.to(self.dtype))
        passed = pass_over(tokens, state, spacing)
        return passed.out, Log(raw, given.g, passed.u, passed.snapshots, spacing)

    def start(self, texts: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """State [n, H, Dk, Dv] and raw inputs [n, K - 1, D] in front of texts that begin."""
        state = like.new_zeros(texts, self.heads, self.key_width, self.value_width, dtype=self.dtype)
        return state, like.new_zeros(texts, self.taps - 1, sum(self.widths))

    def state_at(self, log: Log, text: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """What is needed to go on behind some token of logged texts.

        Args:
            log: n texts.
            text: int64 [b], which of them.
            after: int64 [b], how many of its tokens lie before.

        Returns:
            state [b, H, Dk, Dv] and raw inputs [b, K - 1, D].
        """
        number = (after - 1).clamp(min=0) // log.spacing  # one that exists whatever the length of the text
        begin, reach = number * log.spacing, min(log.spacing, log.g.shape[1])
        steps = torch.arange(reach, device=after.device)
        where = (begin.unsqueeze(1) + steps).clamp(max=max(0, log.g.shape[1] - 1))
        state = log.snapshots[text, number]
        if reach:
            width = self.widths[0]
            window = (begin.unsqueeze(1) + torch.arange(reach + self.taps - 1, device=after.device)).clamp(
                max=log.raw.shape[1] - 1
            )
            keys = log.raw[..., width : 2 * width][text.unsqueeze(1), window]
            k = self._keys(self._convolved(keys, slice(width, 2 * width)))
            line = text.unsqueeze(1)
            state = replay(state, k, log.g[line, where], log.u[line, where], after - begin)
        tail = after.unsqueeze(1) + torch.arange(self.taps - 1, device=after.device)
        return state, log.raw[text.unsqueeze(1), tail]

    def _convolved(self, raw: Tensor, channels: slice = slice(None)) -> Tensor:
        """[n, K - 1 + t, D] -> [n, t, D]."""
        conv = self.module.conv1d
        bias = None if conv.bias is None else conv.bias[channels]
        out = conv1d(raw.transpose(1, 2).to(conv.weight.dtype), conv.weight[channels], bias, groups=raw.shape[-1])
        return ACT2FN[self.module.activation](out).to(raw.dtype).transpose(1, 2)

    def _keys(self, flat: Tensor) -> Tensor:
        """[n, t, Hk * Dk] -> normalised, one for each value head [n, t, H, Dk]."""
        heads = flat.unflatten(-1, (-1, self.key_width)).to(self.dtype)
        unit = heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + 1e-6)
        return unit.repeat_interleave(self.shared, dim=2)
