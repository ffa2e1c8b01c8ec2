"""Exports that are wrong in one silent way each, served by vLLM: parity must fail, and the diagnosis must name it.

    python benchmarks/wrong_exports.py DRAFTER --engine-python PYTHON --prompts FILE --out DIR [--only NAME ...]

Every shape still fits, so nothing refuses to load. Writes OUT/NAME/parity.jsonl and OUT/NAME/diagnosis.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from draftloop.core.files import write_json
from draftloop.core.weights import read_tensors, write_tensors
from draftloop.data.chat import encode_prompt
from draftloop.data.prompts import read_prompts
from draftloop.drafter.build import for_decoding
from draftloop.engines.compare import recorded_answers
from draftloop.engines.diagnose import diagnose, explain, greedy_texts
from draftloop.engines.parity import Question, Setting, parity
from draftloop.engines.serve import find_engine
from draftloop.engines.variants import read_as_is
from draftloop.engines.verdict import summarise
from draftloop.engines.vllm import read_rows
from draftloop.formats.load import load_drafter
from draftloop.target.embedded import embedded_target
from draftloop.target.load import load_target
from draftloop.train.material import command, hardware, versions

Config = dict[str, Any]


def _layers(by: int) -> Callable[[Config], None]:
    def spoil(config: Config) -> None:
        nested = config["dflash_config"]
        nested["target_layer_ids"] = [layer + by for layer in nested["target_layer_ids"]]

    return spoil


def _theta(theta: float) -> Callable[[Config], None]:
    def spoil(config: Config) -> None:
        config["rope_theta"] = config["rope_parameters"]["rope_theta"] = theta

    return spoil


def _mask(token: int) -> Callable[[Config], None]:
    def spoil(config: Config) -> None:
        config["dflash_config"]["mask_token_id"] = token

    return spoil


def _causal(config: Config) -> None:
    config["is_causal"] = True


WRONG: dict[str, Callable[[Config], None]] = {
    "target-layers-plus-1": _layers(1),
    "target-layers-minus-1": _layers(-1),
    "rope-theta-1e4": _theta(1e4),
    "mask-token-0": _mask(0),
    "causal-blocks": _causal,
    "stray-lm-head": lambda config: None,
}


def spoiled(folder: Path, to: Path, name: str, target: Any) -> Path:
    """A copy of an export with one thing wrong."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text(encoding="utf-8"))
    WRONG[name](config)
    config.pop("draftloop", None)  # it would give the change away
    write_json(to / "config.json", config)
    if name == "stray-lm-head":
        tensors = read_tensors(to / "model.safetensors")
        noise = torch.randn(target.vocab_size, target.hidden_size, generator=torch.Generator().manual_seed(0))
        write_tensors(to / "model.safetensors", {**tensors, "lm_head.weight": (0.02 * noise).bfloat16()})
    return to


def main() -> None:
    """Run them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--engine-python", type=Path, required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(WRONG))
    parser.add_argument("--count", type=int, default=16, help="prompts that the engine answers")
    parser.add_argument("--texts", type=int, default=48, help="greedy texts for the diagnosis without an engine")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    target = load_target("smollm2", dtype="float32")
    drafter = for_decoding(load_drafter(options.drafter, target), target)
    prompts = read_prompts([options.prompts], Path("."), max(options.count, options.texts))
    questions = [
        Question(p.id, p.set, tuple(encode_prompt(target.tokenizer, list(p.question), template_kwargs={})))
        for p in prompts
    ]
    engine = find_engine("vllm", options.engine_python)
    setting = Setting((0.0,), options.max_new_tokens)
    facts = {"command": command(), "versions": versions(), "hardware": hardware()}
    texts = greedy_texts(target, [(q.id, q.set, q.ids) for q in questions[: options.texts]], options.max_new_tokens)
    questions = questions[: options.count]
    asked = {(q.set, q.id): q.ids for q in questions}
    for name in options.only:
        folder = options.out / name
        served = spoiled(options.drafter, folder / "export", name, target)
        rows = parity(
            target, drafter, questions, engine, target_folder=str(embedded_target()), served=served, folder=folder,
            setting=setting, facts=facts,
        )  # fmt: skip
        found = summarise(read_rows(rows))
        head = read_as_is(served, target).head
        by_engine = explain(target, drafter, recorded_answers(read_rows(rows), asked, 0.0), head=head)
        by_texts = diagnose(served, target, texts)
        write_json(
            folder / "diagnosis.json",
            {"kind": "diagnosis", "name": name, "engine": by_engine.to_json(), "checkpoint": by_texts.to_json()},
        )
        print(f"{name}: {found['sentence']}\n  {by_engine.sentence}\n  {by_texts.sentence}", flush=True)


if __name__ == "__main__":
    main()
