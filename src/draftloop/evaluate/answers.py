"""The target's own answers to prompt files, which walks and the offline evaluation read; kept for the next drafter.

Knows where they are kept and what is refused. Does not know any drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftloop.core.errors import InputError
from draftloop.core.law import Sampling
from draftloop.data.chat import encode_turn
from draftloop.data.prompts import Prompt
from draftloop.data.trunk import Trunk
from draftloop.recipe import DataPart, ResponsePart
from draftloop.supervise.responses import prepare_trunks


def evaluation_trunks(
    target: Any,
    prompts: Sequence[Prompt],
    files: Sequence[str],
    folder: Path,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    template_kwargs: Mapping[str, Any] | None = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> list[Trunk]:
    """Answer prompts, or take the answers that are kept.

    Args:
        target: a `Target` with a tokenizer.
        prompts: as read from `files`.
        files: prompt files; their names name what is kept.
        folder: where answers are kept.
        max_new_tokens: length limit.
        sampling: how the answers are drawn.
        seed: of the keyed draws.
        template_kwargs: passed to the chat template.
        advance: called with (responses done, responses in all).

    Raises:
        InputError: prompts cannot be used, or are too long with their answers.
    """
    check_lengths(target, prompts, max_new_tokens, template_kwargs or {})
    temperature, top_k, top_p = sampling.temperature, sampling.top_k, sampling.top_p
    if sampling.greedy:
        top_k, top_p = 0, 1.0  # which have no effect then
    data = DataPart(
        max_prompt_tokens=max(1, target.context_limit - max_new_tokens),
        template_kwargs=dict(template_kwargs or {}),
        response=ResponsePart(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p),
    )
    name = "-".join(Path(str(file)).stem.replace(":", "-") for file in files)[:80]
    if not sampling.greedy:
        name += f"-t{temperature:g}-k{top_k}-p{top_p:g}"
    answers = prepare_trunks(target, prompts, data, folder / f"{name}.jsonl", seed=seed, advance=advance)
    if answers.too_long:
        raise InputError(
            f"{len(answers.too_long)} prompts with {max_new_tokens} new tokens do not fit into the target's"
            f" context of {target.context_limit} tokens",
            where=next((p.where for p in prompts if p.id == answers.too_long[0]), "") or answers.too_long[0],
            fix="Lower max_new_tokens, or leave these prompts out.",
        )
    return answers.trunks


def check_lengths(
    target: Any, prompts: Sequence[Prompt], max_new_tokens: int, template_kwargs: Mapping[str, Any]
) -> None:
    """Refuse a prompt whose first turn does not fit into the target, before any is answered.

    Raises:
        InputError: it does not (names its file and line), or its answer alone does not.
    """
    limit = target.context_limit
    if max_new_tokens >= limit:
        raise InputError(
            f"{max_new_tokens} new tokens do not fit into the target's context of {limit} tokens",
            where="max_new_tokens",
            fix="Lower it.",
        )
    for prompt in prompts if target.tokenizer is not None else ():
        length = len(encode_turn(target.tokenizer, prompt, (), template_kwargs=template_kwargs))
        if length > limit - max_new_tokens:
            raise InputError(
                f"the prompt's {length} tokens and {max_new_tokens} new ones do not fit into the target's context of"
                f" {limit}",
                where=prompt.where or prompt.id,
                fix="Shorten it or take it out, or lower max_new_tokens.",
            )
