"""What a drafter is made for: its shape, the target layers it reads, its mask; and the defaults for each.

Knows no weights but the embeddings that a mask token is chosen among. A spec made for one target is refused on another
by `check_fits`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from draftloop.core.errors import InputError
from draftloop.recipe import DrafterPart

DEPTH = 2  # layers of a drafter where neither recipe nor family says
LEARNED = "learned"  # what drafter.mask_token says for a learned mask vector


@dataclass(frozen=True, kw_only=True)
class DrafterSpec:
    """What the shapes of all families have in common.

    Attributes:
        family: whose shape this is, as `drafter.family` of a recipe spells it.
        block_size: B, slots of a block, the anchor's included, in every family and in every checkpoint form. How many
            tokens that drafts is `drafted`.
        target_layers: tapped decoder layers, strictly ascending, 0-based (the output of that layer).
        made_for: free-form facts about the target it was trained for (fingerprints), kept in the checkpoint.
    """

    family: ClassVar[str]

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_target_layers: int
    target_layers: tuple[int, ...]
    block_size: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    max_positions: int = 2048
    made_for: dict[str, Any] = field(default_factory=dict)

    @property
    def drafted(self) -> int:
        """K tokens a block: B - 1 unless the family's anchor slot predicts too."""
        return self.block_size - 1

    def __post_init__(self) -> None:
        for what in ("hidden_size", "layers", "heads", "kv_heads", "head_dim", "intermediate_size"):
            if getattr(self, what) < 1:
                raise InputError(f"{what} {getattr(self, what)} is not a size", fix="Use at least 1.")
        if self.drafted < 1:
            raise InputError(
                f"block_size {self.block_size} drafts nothing",
                fix="Use at least 2 (one anchor slot, one drafted slot).",
            )
        if self.block_size > self.max_positions:
            raise InputError(
                f"a block of {self.block_size} is longer than the drafter's {self.max_positions} positions",
                fix="Use about 4 to 16.",
            )
        if self.heads % self.kv_heads:
            raise InputError(
                f"{self.heads} heads cannot share {self.kv_heads} key/value heads",
                fix="Make one a multiple of the other.",
            )
        if self.head_dim % 2:
            raise InputError(
                f"head_dim {self.head_dim} is odd, which rotary positions cannot use", fix="Use an even head_dim."
            )


@dataclass(frozen=True, kw_only=True)
class DFlashSpec(DrafterSpec):
    """Shape of a DFlash drafter.

    Attributes:
        mask_token_id: token whose embedding fills the drafted slots; with `learned_mask` a stand-in (`stand_in`), which
            engines want named and whose embedding is never used.
        learned_mask: the drafted slots hold a learned vector instead of a token's embedding.
    """

    family = "dflash"

    mask_token_id: int
    learned_mask: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise InputError(
                f"mask token {self.mask_token_id} is outside the vocabulary of {self.vocab_size}",
                fix="Choose an unused special token.",
            )


def has_learned_mask(spec: Any) -> TypeGuard[DFlashSpec]:
    """Whether its drafted slots hold a learned vector, which lies beside the weights in a file of its own."""
    return isinstance(spec, DFlashSpec) and spec.learned_mask


def default_target_layers(num_layers: int, taps: int) -> tuple[int, ...]:
    """Evenly spread layers from 1 to num_layers - 3, as z-lab's DFlash places them.

    Raises:
        InputError: the target has too few layers for that many distinct ones.
    """
    if taps == 1:
        return (num_layers // 2,)
    last = num_layers - 3
    ids = tuple(round(1 + i * (last - 1) / (taps - 1)) for i in range(taps))
    if len(set(ids)) < taps or ids[0] < 0 or last < 1:
        raise InputError(
            f"{taps} layers cannot be spread over a target of {num_layers}",
            fix="Give drafter.target_layers explicitly.",
        )
    return ids


def choose_mask_token(
    tokenizer: Any,
    wanted: int | str | None,
    vocab_size: int,
    taken: set[int],
    embed: Callable[[Tensor], Tensor],
) -> int | None:
    """The token that marks a slot to be drafted: one of the target's vocabulary that no text contains.

    By preference a special token that is called unused; a row of the embedding behind the tokenizer's last id (for
    Qwen3, the one of the published drafters); a special token whose embedding training left alone; any special token
    without a known use.

    Args:
        tokenizer: the target's tokenizer, or None.
        wanted: an id, a token's text, `learned` for no token (one of that very text can be named by its id), or None to
            choose.
        vocab_size: rows V of the target's readout.
        taken: ids with a meaning of their own (end-of-sequence), never chosen.
        embed: the target's input embedding, int64 [n] -> [n, H].

    Returns:
        its id; None where a learned vector takes its place: asked for, or because the vocabulary has no unused token.

    Raises:
        InputError: the wanted one does not exist, or there is no tokenizer to choose by.
    """
    fix = f"Set drafter.mask_token to an unused special token of the target (its text or its id), or to {LEARNED}."
    if wanted == LEARNED:
        return None
    if isinstance(wanted, int):
        if not 0 <= wanted < vocab_size:
            raise InputError(
                f"mask token {wanted} is outside the vocabulary of {vocab_size}", where="drafter.mask_token", fix=fix
            )
        return wanted
    if isinstance(wanted, str):
        found = tokenizer.convert_tokens_to_ids(wanted) if tokenizer is not None else None
        if found is None or tokenizer.convert_ids_to_tokens(found) != wanted:
            raise InputError(f"the target's tokenizer has no token {wanted!r}", where="drafter.mask_token", fix=fix)
        return int(found)
    if tokenizer is None:
        raise InputError("without a tokenizer no mask token can be chosen", where="drafter.mask_token", fix=fix)
    template = str(getattr(tokenizer, "chat_template", None) or "")
    special = dict(sorted((tokenizer.get_added_vocab() or {}).items(), key=lambda item: item[1]))
    in_use = set(taken) | {
        t
        for t in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
        if t is not None
    }
    free = {text: i for text, i in special.items() if i not in in_use and text not in template and i < vocab_size}
    for sign in ("mask", "unused", "reserved", "placeholder", "extra"):
        for text, i in free.items():
            if sign in text.lower():
                return i
    behind = max(tokenizer.get_vocab().values()) + 1
    if behind < vocab_size:
        return behind
    if not free:
        return None
    ids = list(free.values())
    alone = left_alone(embed(torch.tensor(ids))).tolist()
    return next((i for i, untouched in zip(ids, alone, strict=True) if untouched), ids[0])


def stand_in(tokenizer: Any, eos_ids: Sequence[int], vocab_size: int) -> int:
    """The id that a drafter with a learned mask names as its mask token: padding, else an end of sequence.

    Engines put their learned vector where a block holds this id, so it must not be a token that a block begins with:
    padding is in no text, and nothing is drafted after an end.

    Args:
        tokenizer: the target's tokenizer, or None.
        eos_ids: ids that end a response.
        vocab_size: rows V of the target's readout.
    """
    named = [getattr(tokenizer, "pad_token_id", None), *eos_ids, getattr(tokenizer, "eos_token_id", None)]
    return next((i for i in named if i is not None and 0 <= i < vocab_size), 0)


def left_alone(rows: Tensor) -> Tensor:
    """Which embedding rows training never told apart from another one of them.

    What no text contains is only ever pushed by the softmax, and all such rows alike: they end up parallel.

    Args:
        rows: [n, H].

    Returns:
        bool [n].
    """
    unit = F.normalize(rows.float(), dim=-1)
    return (unit @ unit.T).fill_diagonal_(-1.0).amax(-1) > 0.999


def shape_for(part: DrafterPart, target: Any, layers: tuple[int, ...], depth: int = DEPTH) -> dict[str, Any]:
    """The fields of `DrafterSpec` that a recipe's drafter section means for a target.

    Args:
        part: the section.
        target: a `Target`, read by its public attributes.
        layers: target layers to read where the section names none.
        depth: layers of the drafter where the section names none.

    Raises:
        InputError: the section asks for something that the target does not have.
    """
    config = target.config
    heads = part.heads or config.num_attention_heads
    layers = tuple(part.target_layers) if part.target_layers is not None else layers
    exist = bool(layers) and all(0 <= i < target.num_layers for i in layers)
    if not exist or any(b <= a for a, b in pairwise(layers)):
        raise InputError(
            f"target layers {list(layers)} must exist and be strictly ascending",
            where="drafter.target_layers",
            fix=f"The target has layers 0 to {target.num_layers - 1}.",
        )
    positions = int(getattr(config, "max_position_embeddings", None) or 2048)
    if part.block_size > positions:
        raise InputError(
            f"a block of {part.block_size} is longer than the target's {positions} positions",
            where="drafter.block_size",
            fix="Use about 4 to 16.",
        )
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "hidden_size": target.hidden_size,
        "layers": part.layers or depth,
        "heads": heads,
        "kv_heads": part.kv_heads or getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": part.head_dim
        or getattr(config, "head_dim", None)
        or target.hidden_size // config.num_attention_heads,
        "intermediate_size": part.intermediate_size
        or getattr(config, "intermediate_size", None)
        or 4 * target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
        "target_layers": layers,
        "block_size": part.block_size,
        "rope_theta": float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0),
        "norm_eps": float(getattr(config, "rms_norm_eps", None) or 1e-6),
        "max_positions": positions,
        "made_for": made_for(target),
    }


def dflash_spec(part: DrafterPart, target: Any) -> DFlashSpec:
    """The shape of a DFlash drafter for a target; as `shape_for`."""
    return DFlashSpec(**block_shape(part, target))


def block_shape(part: DrafterPart, target: Any) -> dict[str, Any]:
    """The fields of `DFlashSpec`, shared by all that draft a block at once; as `shape_for`."""
    taps = part.taps or part.layers or DEPTH
    layers = () if part.target_layers is not None else default_target_layers(target.num_layers, taps)
    return {**shape_for(part, target, layers), **mask_for(part, target)}


def mask_for(part: DrafterPart, target: Any) -> dict[str, Any]:
    """The fields of `DFlashSpec` that say what drafted slots hold; as `choose_mask_token`."""
    mask = choose_mask_token(
        target.tokenizer,
        part.mask_token,
        target.vocab_size,
        set(target.eos_ids),
        lambda ids: target.embed(ids.to(target.device)),
    )
    unused = stand_in(target.tokenizer, target.eos_ids, target.vocab_size) if mask is None else mask
    return {"mask_token_id": unused, "learned_mask": mask is None}


def made_for(target: Any) -> dict[str, Any]:
    """The facts about a target that a drafter trained for it keeps."""
    return {"target": target.name, "target_fingerprint": target.fingerprint}


def check_fits(spec: DrafterSpec, target: Any, where: str) -> None:
    """Refuse a drafter that was made for another target.

    Raises:
        InputError: hidden size, vocabulary or layers differ.
    """
    fix = "Use the target it was trained for, or train a new drafter."
    for what, mine, theirs in (
        ("hidden size", spec.hidden_size, target.hidden_size),
        ("vocabulary", spec.vocab_size, target.vocab_size),
        ("number of target layers", spec.num_target_layers, target.num_layers),
    ):
        if mine != theirs:
            raise InputError(
                f"the drafter was made for a target with {what} {mine}, this one has {theirs}", where=where, fix=fix
            )
