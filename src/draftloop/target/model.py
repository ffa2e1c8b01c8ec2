"""The target: the causal LM that verifies, seen as hidden rows, tapped features and a readout.

Wraps an unmodified Hugging Face model. Knows no drafter, no sampling and no loss: `extend` feeds tokens through a cache
(prefill and verification alike), `score` reads a whole tree of trunks and branches in one forward, `resume` only the
branches, on trunks whose state was kept. What depends on the kind of attention is the `AttentionFamily`'s.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from draftloop.core.errors import InputError
from draftloop.core.files import fingerprint
from draftloop.core.law import Law, Readout, Sampling
from draftloop.core.products import served_products
from draftloop.core.tree import Packed, Tree
from draftloop.target.attention import AttentionFamily, Masks
from draftloop.target.cache import RowCache, TrunkState
from draftloop.target.fixed import FixedCache, Kernel, WholeCache, attending_fixed, compiled, why_not_fixed
from draftloop.target.flex import attending_flex, chosen, flex_fault
from draftloop.target.joined import AT_MOST, Joined, joined_bytes

Read = tuple[Tensor, Tensor]  # int64 [n], int64 [n]: rows and slots whose hidden rows are wanted


@dataclass(frozen=True)
class Rows:
    """What a forward leaves.

    Attributes:
        hidden: [b, t, H] after the final norm, what the readout reads; [n, H] if only n slots were asked for.
        features: [b, t, F * H] raw outputs of the tapped decoder layers, ascending; None if none was tapped. The tap
            behind the last layer, number `num_layers`, is the hidden row itself, after the final norm.
    """

    hidden: Tensor
    features: Tensor | None


class Target:
    """A verifier.

    Attributes:
        model: the Hugging Face causal LM, in eval mode, frozen.
        tokenizer: its tokenizer, or None for a bare module.
        eos_ids: tokens that end a response.
        context_limit: longest text that it can score exactly.
        version: counts weight changes (`touch`); it keys features, trunk states and traces.
        family: what its kind of attention needs.
        tree_attention: how trees are read: `dense` masks, `flex` = FlexAttention, or `auto`, see `flex.chosen`.
        engine: how texts are decoded where the options say `auto` (see `decode.trace.Options`).
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        base: nn.Module,
        layers: nn.ModuleList,
        readout: Readout,
        family: AttentionFamily,
        eos_ids: Sequence[int],
        context_limit: int,
        name: str,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._base, self._layers = base, layers
        self._readout, self.family = readout, family
        self.eos_ids = tuple(eos_ids)
        self.context_limit = context_limit
        self.name = name
        self.version = 0
        self.tree_attention = "auto"
        self._flex_fault: str | None = None  # not tried yet
        self.engine = "auto"
        self._reads_early = True  # whether the last layer's output may be cut down to the slots that are read
        self._cache_name = "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"

    @property
    def readout(self) -> Readout:
        """Logits from hidden rows, by the weight that the model's head has now: it may have been given another."""
        head: Any = self.model.get_output_embeddings()  # type: ignore[operator]
        if head.weight is not self._readout.weight:
            self._readout = replace(self._readout, weight=head.weight, bias=head.bias)
        return self._readout

    @readout.setter
    def readout(self, readout: Readout) -> None:
        self._readout = readout

    @property
    def config(self) -> Any:
        """The Hugging Face configuration of the model's decoder."""
        return text_config(self.model)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self._layers)

    @property
    def hidden_size(self) -> int:
        """Width H of hidden rows and of each tapped feature."""
        return int(self.readout.weight.shape[1])

    @property
    def vocab_size(self) -> int:
        """Rows V of the readout."""
        return int(self.readout.weight.shape[0])

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.readout.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights, hidden rows and features."""
        return self.readout.weight.dtype

    @property
    def fingerprint(self) -> str:
        """16 hex digits of configuration, a sample of the weights, and version."""
        config = {k: v for k, v in self.config.to_dict().items() if k not in _NOT_IDENTITY}
        # rounded to bfloat16, so that a checkpoint is the same target in either type
        sample = [
            p.detach().flatten()[:: max(1, p.numel() // 16)].bfloat16().float().sum().item()
            for p in self.model.parameters()
        ]
        return fingerprint(config, [f"{s:.4e}" for s in sample], self.version)

    def touch(self) -> None:
        """Say that the weights changed: features and traces of the old version no longer count."""
        self.version += 1

    def embed(self, ids: Tensor) -> Tensor:
        """int64 [...] -> [..., H] input embeddings."""
        out: Tensor = self.model.get_input_embeddings()(ids)  # type: ignore[operator]
        return out

    def law(self, hidden: Tensor, sampling: Sampling) -> Law:
        """The law of hidden rows [n, H] under `sampling`."""
        return Law(hidden, self.readout, sampling)

    def new_cache(self, capacity: int) -> RowCache:
        """An empty cache for texts of at most `capacity` tokens."""
        self.check_length(capacity)
        return self.family.new_cache(self.num_layers, capacity)

    def why_not_fixed(self) -> str:
        """Why it cannot decode with fixed shapes, as a clause; empty if it can."""
        return self.family.why_not_fixed() or why_not_fixed(self._base.config)

    def new_fixed_cache(self, rows: int, capacity: int) -> FixedCache:
        """A cache of `rows` texts whose tensors keep their size and place; `capacity` may exceed the context."""
        assert not self.why_not_fixed(), self.why_not_fixed()  # said in a sentence by whoever asks for the engine
        own: Any = self._base.config
        heads = int(own.num_attention_heads)
        shared = int(getattr(own, "num_key_value_heads", None) or heads)
        return FixedCache(self.num_layers, rows, capacity, heads // shared, self.readout.weight)

    def new_prompt_cache(self, capacity: int) -> WholeCache:
        """An empty cache for prompts of which the longest has `capacity` tokens."""
        return WholeCache(self.num_layers, capacity)

    def join(self) -> Joined | None:
        """What of its layers can be one product (see `joined`); None where nothing can, or it would take too much."""
        return Joined(self._layers) if 0 < joined_bytes(self._layers) <= AT_MOST else None

    @contextmanager
    def fixed(
        self,
        cache: FixedCache,
        kernel: Kernel,
        compiler: Callable[[Any], Any] | None = None,
        joined: Joined | None = None,
    ) -> Iterator[None]:
        """Let the model read a `FixedCache` for a while, its layers compiled where a compiler is given.

        Args:
            cache: of the model's own `new_fixed_cache`.
            kernel: how attention is computed.
            compiler: `torch.compile` with its options.
            joined: of the model's own `join`; counts only where layers are compiled.
        """
        cache.kernel = kernel
        with ExitStack() as stack:
            stack.enter_context(attending_fixed((self.config, self._base.config), kernel))
            if compiler is not None:
                stack.enter_context(compiled(self._base, self._layers, cache, self._cache_name, compiler, joined))
            yield

    def check_length(self, tokens: int) -> None:
        """Refuse texts that the target cannot score exactly.

        Raises:
            InputError: longer than `context_limit`.
        """
        if tokens > self.context_limit:
            raise InputError(
                f"a text of {tokens} tokens is longer than the target's {self.context_limit}",
                where=self.name,
                fix="Shorten the prompts (in a recipe: data.max_prompt_tokens) or lower max_new_tokens.",
            )

    @torch.no_grad()
    def extend(self, cache: RowCache, ids: Tensor, positions: Tensor, taps: Sequence[int] = ()) -> Rows:
        """Feed tokens at per-row positions (prefill, one step, or a block to verify).

        Args:
            cache: written at `positions`; a position fed before is overwritten.
            ids: int64 [b, t].
            positions: int64 [b, t], ascending by one in each row; padding may stand behind a row's end.
            taps: decoder layers whose outputs are wanted.
        """
        masks = cache.fit(self.family.text_masks(cache.aim(positions), positions))
        return self._forward(ids, positions, masks, taps, self.family.mixing(cache), cache)

    @torch.no_grad()
    def score(self, tree: Tree, taps: Sequence[int] = (), read: Read | None = None, longest: int | None = None) -> Rows:
        """Read trunks and branches in one forward: each slot sees its ancestors and nothing else.

        Args:
            tree: rows of trunks and branches.
            taps: decoder layers whose outputs are wanted, at all slots.
            read: the slots whose hidden rows are wanted; None = all.
            longest: tokens of the longest text; None = the device is asked.

        Raises:
            InputError: a text is longer than `context_limit`.
        """
        self.check_length(int(tree.position.max()) + 1 if longest is None else longest)
        flex = self._flexes(tree)
        masks = self.family.tree_masks(tree, flex=flex)
        return self._forward(tree.tokens, tree.position, masks, taps, self.family.mixing(tree), read=read, flex=flex)

    @torch.no_grad()
    def resume(self, packed: Packed, states: list[TrunkState], read: Read) -> Tensor:
        """Feed the branches alone, on trunks that were computed before: `score` without its trunk slots.

        Args:
            packed: trunks and branches, laid out `aligned`; of a trunk no more than its state holds.
            states: one a trunk, of this `version`.
            read: branch slots whose hidden rows are wanted.

        Returns:
            [n, H].

        Raises:
            InputError: a text is longer than `context_limit`.
        """
        assert all(state.version == self.version for state in states), "a state of other weights"
        tree, first = packed.tree, packed.first
        self.check_length(packed.longest)
        flex = self._flexes(tree)
        cache, masks = self.family.resume(states, packed), self.family.tree_masks(tree, first, flex=flex)
        read = (read[0], read[1] - first)
        mixing = self.family.mixing(cache)
        ids, place = tree.tokens[:, first:], tree.position[:, first:]
        return self._forward(ids, place, masks, (), mixing, cache, read, flex).hidden

    def _flexes(self, tree: Tree) -> bool:
        """Whether this tree is read by FlexAttention; asked for and wrong is an error, chosen and wrong is dense.

        Raises:
            InputError: FlexAttention was asked for, and gives other rows on this model or does not run.
        """
        if not chosen(self.tree_attention, self.device, self.dtype, tree.tokens.shape[1]):
            return False
        if self._flex_fault is None:
            self._flex_fault = ""  # while it is tried
            self._flex_fault = flex_fault(self)
            if self._flex_fault and self.tree_attention == "auto":
                warnings.warn(f"{self.name}: {self._flex_fault}; its trees are read with dense masks", stacklevel=3)
        if self._flex_fault and self.tree_attention == "flex":
            raise InputError(self._flex_fault, where=self.name, fix="Set target.tree_attention to auto or dense.")
        return not self._flex_fault

    def _forward(
        self,
        ids: Tensor,
        positions: Tensor,
        masks: Masks,
        taps: Sequence[int],
        mixing: AbstractContextManager[None],
        cache: Any = None,
        read: Read | None = None,
        flex: bool = False,
    ) -> Rows:
        check_taps(taps, self.num_layers)
        kwargs: dict[str, Any] = {} if cache is None else {self._cache_name: cache}
        # a last block may reach beyond the context, where learned positions end; nothing of that is kept
        places = positions.clamp(max=self.context_limit - 1)
        final = self.num_layers in taps  # its row is wanted at all slots, so nothing is cut down
        early = read if self._reads_early and not final else None
        with ExitStack() as stack:
            stack.enter_context(served_products())
            tapped = stack.enter_context(self._tapped(taps[:-1] if final else taps))
            stack.enter_context(self._cut_down(early))
            stack.enter_context(mixing)
            if flex:
                stack.enter_context(attending_flex(self._base))
            elif self._adds_masks():
                masks = _added(masks, self.dtype)
            out = self._base(
                input_ids=ids, position_ids=places, attention_mask=masks, use_cache=cache is not None, **kwargs
            )
        hidden = out.last_hidden_state
        if final:
            tapped[self.num_layers] = hidden
        if read is not None:
            hidden = hidden.squeeze(0) if early is not None else hidden[read]
        features = torch.cat([tapped[layer] for layer in taps], dim=-1) if taps else None
        return Rows(hidden, features)

    def _adds_masks(self) -> bool:
        """Whether attention adds masks to the scores: `eager` wants numbers, CUDA's would make them in every layer."""
        way = getattr(self.config, "_attn_implementation", "")
        return way == "eager" or (way == "sdpa" and self.device.type == "cuda" and self.family.takes_numbers())

    @contextmanager
    def _cut_down(self, read: Read | None) -> Iterator[None]:
        """Let the last layer hand on only the slots that are read, [1, n, H]: what follows it works slot by slot."""

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (output[0][read].unsqueeze(0), *output[1:])
            return output[read].unsqueeze(0)

        handles = [] if read is None else [self._layers[-1].register_forward_hook(hook)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def one_stream(self, rows: Tensor) -> Tensor:
        """[..., H] of what a layer hands on: the mean of its residual streams where it has several, [..., n * H]."""
        return rows if rows.shape[-1] == self.hidden_size else rows.unflatten(-1, (-1, self.hidden_size)).mean(-2)

    @contextmanager
    def _tapped(self, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Hook the outputs of decoder layers while a forward runs."""
        caught: dict[int, Tensor] = {}

        def catcher(layer: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                caught[layer] = self.one_stream(output[0] if isinstance(output, tuple) else output)

            return hook

        handles = [self._layers[layer].register_forward_hook(catcher(layer)) for layer in taps]
        try:
            yield caught
        finally:
            for handle in handles:
                handle.remove()


def text_config(model: Any) -> Any:
    """The configuration of a model's decoder: its own, or the part for text of a model that also sees or hears."""
    config = model.config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def _added(masks: Masks, dtype: torch.dtype) -> Masks:
    """Boolean masks as numbers to add to scores."""
    if isinstance(masks, dict):
        return {kind: None if mask is None else _added(mask, dtype) for kind, mask in masks.items()}  # type: ignore[misc]
    return torch.zeros(masks.shape, dtype=dtype, device=masks.device).masked_fill(~masks, torch.finfo(dtype).min)


_NOT_IDENTITY = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache"}


def check_taps(taps: Sequence[int], num_layers: int) -> None:
    """Taps must exist and ascend strictly, for engines sort them in silence (and permute `fc`).

    They are layer ids, and the number of layers for the row after the final norm.

    Raises:
        InputError: they do not.
    """
    if any(not 0 <= layer <= num_layers for layer in taps):
        raise InputError(
            f"target layers {list(taps)} do not all exist", fix=f"The target has layers 0 to {num_layers - 1}."
        )
    if any(b <= a for a, b in pairwise(taps)):
        raise InputError(f"target layers {list(taps)} are not strictly ascending", fix=f"Write {sorted(set(taps))}.")
