"""Loading a target by structure, from a directory, a hub id or a live module, and proving that we read it rightly.

No list of model names: the parts are found in the model, and a probe compares what we read (taps, tree mask, cache,
readout) with the model's own plain forward. What does not agree is refused.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftloop.core.errors import EnvironmentFault, InputError
from draftloop.core.law import Readout
from draftloop.core.tree import pack_branches
from draftloop.core.weights import check_folder
from draftloop.target.attention import narrowed
from draftloop.target.embedded import embedded_target
from draftloop.target.family import family_of
from draftloop.target.model import Target, text_config

EMBEDDED = "smollm2"


def load_target(
    source: str | os.PathLike[str] | nn.Module,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Target:
    """Load a Hugging Face causal LM as a target (kinds of attention: docs/attention.md).

    Args:
        source: a checkpoint folder, a hub id, `smollm2` (the embedded default), or a live causal LM.
        tokenizer: the tokenizer to use (a live module has none without it); default: read from `source`.
        dtype: auto (bfloat16), float32 or bfloat16; a live module keeps its own.
        device: auto (cuda where there is a GPU, else cpu) or a torch device; a live module stays where it is.
        revision: hub revision.
        trust_remote_code: run Python that comes with the checkpoint.

    Raises:
        InputError: no such checkpoint, pickled or broken weights, a tokenizer of another model, or a kind of model
            that cannot be scored exactly yet.
        EnvironmentFault: not enough memory, or the hub cannot be reached.
    """
    if isinstance(source, nn.Module):
        return _wrap(source, tokenizer, getattr(source, "name_or_path", "") or type(source).__name__)
    name = str(source)
    path = str(embedded_target()) if name == EMBEDDED else name
    local = Path(path).expanduser()
    if local.exists() or path.startswith((".", "/", "~")):
        check_folder(local)
        path = str(local)
    model = _read_model(path, name, pick_dtype(dtype), pick_device(device), revision, trust_remote_code)
    if tokenizer is None:
        tokenizer = _read_tokenizer(path, name, revision, trust_remote_code)
    return _wrap(model, tokenizer, name)


def load_tokenizer(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a checkpoint folder, a hub id or `smollm2`, without its model.

    Raises:
        InputError: it cannot be loaded.
    """
    path = embedded_target() if source == EMBEDDED else Path(source).expanduser()
    return _read_tokenizer(str(path) if path.exists() else source, source, revision, trust_remote_code)


def pick_device(device: str | torch.device) -> torch.device:
    """`auto` = the first GPU where there is one.

    Raises:
        InputError: no such device here.
    """
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device} cannot be used here", fix="Use device: auto or cpu.") from error
    return torch.device(device)


def pick_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """`auto` = bfloat16.

    Raises:
        InputError: no such type.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    kinds = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
    if dtype not in kinds:
        raise InputError(f"there is no dtype {dtype!r}", fix=f"Use one of {', '.join(kinds)}.")
    return kinds[dtype]


def _read_model(
    path: str, name: str, dtype: torch.dtype, device: torch.device, revision: str | None, trust: bool
) -> nn.Module:
    from transformers.utils import logging

    logging.disable_progress_bar()  # standard error is for sentences and our own progress
    try:
        try:
            model, info = _from_pretrained(path, dtype, revision, trust, "sdpa")
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            model, info = _from_pretrained(path, dtype, revision, trust, "eager")  # its class has no other way
        model = model.to(device)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise EnvironmentFault(
            "the target does not fit into memory", where=name, fix="Use a smaller one or another device."
        ) from error
    except Exception as error:  # a broken config.json fails in as many ways as there are model classes
        if isinstance(error, OSError) and "connect" in str(error):
            raise EnvironmentFault(
                "there is no such folder, and the hub cannot be reached to ask for that id",
                where=name,
                fix="Check the spelling of the path, or the network.",
            ) from error
        raise InputError(
            f"the target cannot be loaded ({_first_line(error)})", where=name, fix=_hint(error, trust)
        ) from error
    missing = sorted(info["missing_keys"]) + sorted(str(k) for k in info.get("mismatched_keys", []))
    if missing:
        raise InputError(
            f"the checkpoint lacks {len(missing)} tensors ({missing[0]}, ...)",
            where=name,
            fix="Use a complete causal LM checkpoint.",
        )
    return model


def _lacks_sdpa(model: Any) -> bool:
    """Whether a model (or its class) attends eagerly because it has no other way (attention sinks, ...)."""
    return not getattr(model, "_supports_sdpa", True)


def _from_pretrained(path: str, dtype: torch.dtype, revision: str | None, trust: bool, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust,
        attn_implementation=attention,
        use_safetensors=True,
        output_loading_info=True,
    )


def _hint(error: Exception, trust: bool) -> str:
    text = str(error)
    if "trust_remote_code" in text and not trust:
        return "Its code is not part of transformers; pass trust_remote_code if you trust it."
    if "safetensors" in text:
        return "Only safetensors weights are read; convert the checkpoint with model.save_pretrained."
    if text.startswith("Validation error for field"):
        return "Correct its config.json."
    return "Give a checkpoint folder, a reachable hub id, or `smollm2` for the embedded default."


def _first_line(error: Exception) -> str:
    """What an error of another package says first; where that only announces the next line, that one."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    told = lines[0]
    if told.endswith(":") and lines[1:]:
        told = re.sub(r"^\w*(Error|Exception): ", "", lines[1].strip())
    return told.rstrip(".")[:200]


def _read_tokenizer(path: str, name: str, revision: str | None, trust: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust)
    except Exception as error:  # likewise
        raise InputError(
            f"the tokenizer cannot be loaded ({_first_line(error)})",
            where=name,
            fix="The folder needs the tokenizer's files.",
        ) from error


def _wrap(model: Any, tokenizer: Any, name: str) -> Target:
    """Find the parts, check that they belong together, probe."""
    config: Any = text_config(model)
    model.eval().requires_grad_(False)
    implementation = getattr(config, "_attn_implementation", "sdpa")
    if implementation != "sdpa" and not (implementation == "eager" and _lacks_sdpa(model)):
        raise InputError(
            f"the model attends by `{implementation}`, which reads our masks wrongly",
            where=name,
            fix="Load it with attn_implementation='sdpa'.",
        )
    base = model.get_decoder() if hasattr(model, "get_decoder") else getattr(model, "base_model", None)
    if base is model:  # a class whose decoder goes by another name than its own prefix
        base = getattr(model, "model", base)
    depth = getattr(config, "num_hidden_layers", 0)
    lists = [m for m in base.children() if isinstance(m, nn.ModuleList) and len(m) == depth] if base is not None else []
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if base is None or len(lists) != 1 or not isinstance(head, nn.Linear):
        raise InputError(
            "no decoder layers or no linear head were found in the model",
            where=name,
            fix="Give a decoder-only causal LM.",
        )
    wide = getattr(config, "hidden_size", None) or head.weight.shape[1]
    if wide != head.weight.shape[1]:
        raise InputError(
            f"the model's layers are {wide} wide and its head reads {head.weight.shape[1]}",
            where=name,
            fix="A drafter needs a target whose head reads its layers' own width.",
        )
    readout = Readout(
        head.weight,
        head.bias,
        scale=float(getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)),
        soft_cap=getattr(config, "final_logit_softcapping", None),
    )
    family = family_of(base, config, name)
    eos = _eos_ids(model, tokenizer, readout.weight.shape[0], name)
    target = Target(
        model,
        tokenizer,
        base=base,
        layers=lists[0],
        readout=readout,
        family=family,
        eos_ids=eos,
        context_limit=_context_limit(config),
        name=name,
    )
    _check_finite(model, name)
    try:
        with narrowed(config, 3):  # so that windows matter to the few tokens of the probe
            _probe(target)
    except InputError:
        raise
    except Exception as error:  # the model's own code, fed with a mask and a cache of ours
        raise InputError(
            f"the model cannot run with a tree mask or a cache of ours ({_first_line(error)})", where=name, fix=_PLAIN
        ) from error
    return target


_PLAIN = "This kind of attention cannot be scored exactly yet; docs/attention.md names those that can."


def _context_limit(config: Any) -> int:
    """The longest text that its family scores exactly, at frequencies that do not depend on the length."""
    rope = getattr(config, "rope_parameters", None) or {}
    bounds = [getattr(config, "max_position_embeddings", None)]
    if rope.get("rope_type") == "longrope":  # beyond the original length, every key of the text would turn anew
        bounds.append(rope.get("original_max_position_embeddings"))
    # a window by any other name (keep_window_size, attention_window, ...) begins to matter at its length
    told = config.to_dict() if hasattr(config, "to_dict") else {}
    bounds += [told[key] for key in told if key.endswith(("window_size", "_window")) and key != "sliding_window"]
    return min([1 << 30, *(bound for bound in bounds if isinstance(bound, int) and bound > 1)])


def _check_finite(model: nn.Module, name: str) -> None:
    """Refuse damaged weights.

    Raises:
        InputError: a weight holds NaN or infinity (named).
    """
    for weight, values in model.named_parameters():
        if not values.is_floating_point() or values.element_size() < 2 or not values.numel():
            continue
        ends = torch.stack(torch.aminmax(values.detach()))  # no mask as large as the weight
        if not bool(torch.isfinite(ends).all()):
            raise InputError(f"weight {weight} holds NaN or infinity", where=name, fix="Use another checkpoint.")


def _eos_ids(model: Any, tokenizer: Any, vocab: int, name: str) -> list[int]:
    """End-of-sequence ids of model and tokenizer, which must belong together.

    Raises:
        InputError: the tokenizer is another model's.
    """
    ids: set[int] = set()
    for config in (model.config, getattr(model, "generation_config", None)):
        given = getattr(config, "eos_token_id", None)
        ids |= {given} if isinstance(given, int) else set(given or [])
    if tokenizer is None:
        return sorted(ids)
    fix = "Use the tokenizer that the model was trained with."
    if len(tokenizer) > vocab:
        raise InputError(f"the tokenizer has {len(tokenizer)} tokens, the model only {vocab}", where=name, fix=fix)
    own = tokenizer.eos_token_id
    if ids and own is not None and own not in ids:
        raise InputError(f"the tokenizer ends text with token {own}, the model with {sorted(ids)}", where=name, fix=fix)
    return sorted(ids | ({own} if own is not None else set()))


@torch.no_grad()
def _probe(target: Target) -> None:
    """Compare cache, tree, taps and readout with the model's own forward on a few tokens.

    Raises:
        InputError: they differ, so the target would be scored wrongly; or its logits are not finite.
    """
    ids = torch.arange(7, device=target.device) * 31 % target.vocab_size
    trunk, branch = ids[:5], ids[5:]
    plain = torch.cat([trunk[:3], branch]).unsqueeze(0)
    fed: list[torch.Tensor] = []  # what each decoder layer was given

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        fed.append(args[0] if args else kwargs["hidden_states"])

    looking = [layer.register_forward_pre_hook(look, with_kwargs=True) for layer in target._layers]
    try:
        with target._tapped(range(target.num_layers)) as tapped:
            want = target.model(input_ids=plain).logits[0].float()
    finally:
        for handle in looking:
            handle.remove()
    if not bool(torch.isfinite(want).all()):
        raise InputError(
            "the target's logits hold NaN or infinity",
            where=target.name,
            fix="Its weights are damaged; use another checkpoint.",
        )
    for layer, following in enumerate(fed[1:]):
        if not torch.equal(tapped[layer], target.one_stream(following)):
            raise InputError(
                f"the output of its layer {layer} cannot be tapped", where=target.name, fix="Use another target."
            )
    scale = want.abs().max().clamp(min=1e-6)
    limit = 1e-4 if target.dtype in (torch.float32, torch.float64) else 6e-2

    def agree(part: str, rows: torch.Tensor, expected: torch.Tensor) -> None:
        error = float((target.readout.logits(rows) - expected).abs().max() / scale)
        if error > limit:
            raise InputError(
                f"its {part} does not agree with its own plain forward (off by {error:.1e} of the largest logit)",
                where=target.name,
                fix=_PLAIN,
            )

    one = torch.ones(1, dtype=torch.int64, device=target.device)
    place = torch.arange(5, device=target.device).unsqueeze(0)
    packed = pack_branches([trunk], [0], 0 * one, 2 * one, branch.unsqueeze(0), 2 * one, aligned=True)
    slots = torch.cat([place[0, :3], packed.slot[0]])
    rows = target.score(packed.tree).hidden[0, slots]
    agree("tree mask or readout", rows, want)
    try:
        early = target.score(packed.tree, read=(torch.zeros_like(slots), slots)).hidden
        target._reads_early = torch.allclose(early, rows, rtol=1e-2, atol=1e-2)
    except (
        RuntimeError,
        ValueError,
        IndexError,
    ):  # it looks at the shape behind its last layer: slots are then picked at the end
        target._reads_early = False
    cache = target.new_cache(8)
    stale = torch.cat([trunk[:3], branch.flip(0)]).unsqueeze(0)  # wrong tokens first: the next feed must overwrite them
    target.extend(cache, stale, place)
    agree("cache", target.extend(cache, plain[:, 3:], place[:, 3:]).hidden[0], want[3:])
    state = cache.state(0, target.extend(cache, trunk.unsqueeze(0), place).hidden[0], target.version)
    agree("kept trunk", target.resume(packed, [state], (torch.zeros_like(slots[3:]), slots[3:])), want[3:])
