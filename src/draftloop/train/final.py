"""The end of a run: every stage walked on the test prompts, first and last decoded for real, losslessness audited.

Raw rows (one a prompt and arm) go to raw.jsonl; summary.json is derived from them and the stages' accounts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from draftloop.core.files import write_text
from draftloop.core.law import Sampling
from draftloop.decode.trace import Options
from draftloop.drafter.build import for_decoding
from draftloop.drafter.ngram import NAME as NGRAM
from draftloop.drafter.ngram import NgramSpec, ngram_drafter
from draftloop.drafter.spec import DFlashSpec, has_learned_mask
from draftloop.evaluate.audit import Audit, audit
from draftloop.evaluate.speed import compare, spread
from draftloop.evaluate.summary import acceptance_fields, write_summary
from draftloop.evaluate.tau import Response, acceptance, paired
from draftloop.evaluate.walk import walk
from draftloop.recipe import StagePart
from draftloop.train.material import Material, command, hardware, load_recipe_target, versions
from draftloop.train.progress import Progress
from draftloop.train.stage import StageOutcome


def conclude(
    material: Material, outcomes: Sequence[StageOutcome], delivered: StageOutcome, seconds: float, say: Any
) -> Path:
    """Measure on the test prompts and write raw.jsonl and summary.json.

    Args:
        material: the run's.
        outcomes: of every stage.
        delivered: the one whose drafter is delivered.
        seconds: wall-clock time of the run so far.
        say: where sentences go.
    """
    began = datetime.now(UTC)
    arms = [(material.begins_as, material.initial), *((one.name, one.tensors) for one in outcomes)]
    walks: dict[str, list[Response]] = {}
    with Progress("walk the test prompts", len(arms), unit="drafters", silent=material.quiet) as progress:
        for n, (name, tensors) in enumerate(arms):
            walks[name] = walk(_served(material, tensors), material.lessons["test"], material.store)
            progress.update(n + 1)
    lookup = ngram_drafter(NgramSpec(material.drafter.spec.drafted), material.target)
    looked_up = walk(lookup, material.lessons["test"], material.store)
    walked = {**walks, NGRAM: looked_up}
    raw = [{"kind": "walk", "arm": arm, **row.to_json()} for arm, rows in walked.items() for row in rows]
    decoding, decoded = _decoding(material, delivered)
    checked = _audit(material, delivered)
    took = seconds + (datetime.now(UTC) - began).total_seconds()
    stages = [_stage(material, None, walks[material.begins_as], False)]
    stages += [_stage(material, one, walks[one.name], one is delivered) for one in outcomes]
    gain = paired(walks[material.begins_as], walks[delivered.name])
    summary = {
        "schema": 1,
        "name": material.recipe.name,
        "command": command(),
        "created": began.isoformat(timespec="seconds"),
        "seconds": took,
        "versions": versions(),
        "hardware": hardware(),
        "target": {
            "name": material.target.name,
            "fingerprint": material.target.fingerprint,
            "parameters": sum(p.numel() for p in material.target.model.parameters()),
            "dtype": str(material.target.dtype).removeprefix("torch."),
        },
        "drafter": _drafter(material),
        "data": _data(material),
        "stages": stages,
        "delivered": delivered.name,
        "gain": gain.to_json(),
        "ngram": {
            "name": lookup.spec.name,
            **acceptance_fields(acceptance(looked_up)),
            "gain": paired(looked_up, walks[delivered.name]).to_json(),
        },
        "decoding": decoding,
        "lossless": checked.equal if checked else None,
        "audit": asdict(checked) if checked else None,
    }
    write_text(material.folder / "raw.jsonl", "".join(json.dumps(row) + "\n" for row in raw + decoded))
    return write_summary(material.folder, summary)


def _served(material: Material, tensors: dict[str, torch.Tensor]) -> Any:
    material.drafter.load_state_dict(tensors)
    return for_decoding(material.drafter, material.target)


def _length(material: Material) -> int:
    recipe = material.recipe
    return recipe.evaluate.max_new_tokens or recipe.data.response.max_new_tokens


def _decoding(material: Material, delivered: StageOutcome) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Real decoding at batch 1, the first and the delivered drafter against plain."""
    wanted = spread(material.prepared["test"].trunks, material.recipe.evaluate.decode_prompts)
    if not wanted:
        return None, []
    drafters = [
        (material.begins_as, _served(material, material.initial)),
        (delivered.name, _served(material, delivered.tensors)),
    ]
    options = Options(_length(material), Sampling(), batch_size=1, seed=material.recipe.seed)
    with Progress("decode for real", len(wanted) * 3, unit="responses", silent=material.quiet) as progress:
        plain, arms = compare(
            material.target, drafters, wanted, options, advance=lambda done, total: progress.update(done)
        )
    found = {
        "batch_size": 1,
        "dtype": str(material.target.dtype).removeprefix("torch."),
        "prompts": len(wanted),
        "max_new_tokens": options.max_new_tokens,
        "plain": {"tokens_per_s": plain.tokens_per_s, "ms_per_token": plain.ms_per_round},
        "arms": [arm.to_json() for arm in arms],
    }
    return found, [row for arm in arms for row in arm.rows]


def _audit(material: Material, delivered: StageOutcome) -> Audit | None:
    """Greedy equality in float32, on the very weights that were trained with."""
    chosen = spread(material.prepared["test"].trunks, material.recipe.evaluate.audit_prompts)
    wanted = [(prompt, request) for prompt, _, request in chosen]
    if not wanted:
        return None
    target, twin = material.target, material.drafter
    if target.dtype != torch.float32:
        target = load_recipe_target(material.recipe.target, dtype="float32")
    drafters = []
    for name, tensors in ((material.begins_as, material.initial), (delivered.name, delivered.tensors)):
        twin.load_state_dict(tensors)
        drafters.append((name, for_decoding(twin, target)))
    with Progress("audit losslessness", 3, unit="decodes", silent=material.quiet) as progress:
        return audit(
            target,
            drafters,
            wanted,
            max_new_tokens=_length(material),
            batch_size=material.recipe.evaluate.batch_size,
            advance=lambda done, total: progress.update(done),
        )


def _stage(
    material: Material, outcome: StageOutcome | None, responses: list[Response], delivered: bool
) -> dict[str, Any]:
    part = next((s for s in material.recipe.stages if outcome is not None and s.name == outcome.name), None)
    fields = acceptance_fields(acceptance(responses))
    base: dict[str, Any] = {
        "name": outcome.name if outcome else material.begins_as,
        "start": None,
        "method": None,
        "cells": None,
        "steps": outcome.steps if outcome else 0,
        "labels": outcome.labels if outcome else 0,
        "seconds": outcome.seconds if outcome else 0.0,
        "chosen_step": outcome.chosen_step if outcome else None,
        "validation": outcome.validation if outcome else [],
        "split": None,
        "delivered": delivered,
    }
    if part is not None and outcome is not None:
        base |= {
            "start": part.start,
            "method": part.method,
            "cells": {
                "trunks": part.trunks,
                "anchors": part.anchors,
                "proposals": _mixture(part),
                "objective": part.objective.kind,
            },
        }
        if set(part.mixture) != {"trunk"} and any(map(any, outcome.splits)):
            base["split"] = _split(outcome.splits)
    return {**base, **fields}


def _mixture(part: StagePart) -> str:
    """`sampled`, or `trunk 0.33 + sampled 0.67`."""
    if len(part.mixture) == 1:
        return next(iter(part.mixture))
    return " + ".join(f"{source} {share:.2g}" for source, share in part.mixture.items())


def _split(splits: list[list[int]]) -> dict[str, Any]:
    accepted, first, later, whole = splits
    full = sum(whole)
    return {
        "accepted": sum(accepted),
        "first_rejected": sum(first),
        "later_rejected": sum(later),
        "blocks": sum(first) + full,
        "full_blocks": full,
        "by_position": [{"accepted": a, "rejected": f + r} for a, f, r in zip(accepted, first, later, strict=True)],
    }


def _drafter(material: Material) -> dict[str, Any]:
    spec, tokenizer = material.drafter.spec, material.target.tokenizer
    weights = (material.folder / "drafter").glob("*.safetensors")  # a learned mask vector has a file of its own
    mask: dict[str, Any] = {"mask_token_id": None, "mask_token": None}
    if has_learned_mask(spec):
        mask["mask_token"] = "a learned vector"
    elif isinstance(spec, DFlashSpec):
        text = tokenizer.convert_ids_to_tokens(spec.mask_token_id) if tokenizer is not None else None
        mask = {"mask_token_id": spec.mask_token_id, "mask_token": text}
    return {
        "family": spec.family,
        "parameters": sum(p.numel() for p in material.drafter.parameters()),
        "bytes": sum(file.stat().st_size for file in weights),
        "block_size": spec.block_size,
        "layers": spec.layers,
        "target_layers": list(spec.target_layers),
        **mask,
    }


def _data(material: Material) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, prepared in material.prepared.items():
        sets: dict[str, int] = {}
        for prompt in material.prompts[name]:
            sets[prompt.set] = sets.get(prompt.set, 0) + 1
        out[name] = {
            "prompts": len(material.prompts[name]),
            "responses": len(prepared.trunks),
            "tokens": sum(trunk.supervised for trunk in prepared.trunks),
            "sets": sets,
        }
    overlap = material.overlap()
    out["overlap"] = {"n": overlap.n, "share_of_ngrams": overlap.share, "share_of_prompts": overlap.texts_share}
    return out
