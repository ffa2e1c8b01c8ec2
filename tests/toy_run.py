"""A tiny target saved as a checkpoint folder with a tokenizer, and a recipe for it: whole runs in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.data_toys import CHATML
from tests.tiny import tiny_model


def toy_tokenizer():
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<mask>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat", "one two three four"], trainer)
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in specials])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = CHATML
    return fast


def toy_checkpoint(folder: Path, kind: str = "llama", **changes) -> Path:
    tokenizer = toy_tokenizer()
    eos = tokenizer.eos_token_id
    model = tiny_model(kind, vocab=len(tokenizer), eos_token_id=eos, pad_token_id=eos, bos_token_id=None, **changes)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def toy_prompts(path: Path, count: int, offset: int = 0) -> Path:
    words = ["cat", "dog", "mat", "one", "two", "three", "sun", "sea", "tree", "bird", "red", "blue"]
    rows = [
        {"id": f"p{i}", "set": ("a", "b")[i % 2], "prompt": f"{words[i % 12]} {words[(i * 5 + i // 12) % 12]} {i}?"}
        for i in range(offset, offset + count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def toy_recipe(folder: Path, **changes) -> dict:
    """A whole recipe as a mapping: SFT, then Draft-OPD, then SFT continued, on a toy target in `folder`."""
    toy_checkpoint(folder / "target")
    toy_prompts(folder / "train.jsonl", 12)
    toy_prompts(folder / "validation.jsonl", 4, 100)
    toy_prompts(folder / "test.jsonl", 6, 200)
    recipe = {
        "schema": 1,
        "name": "toy",
        "precision": "float32",
        "target": {"model": str(folder / "target"), "dtype": "float32", "device": "cpu"},
        "data": {
            "dir": str(folder),
            "train": ["train.jsonl"],
            "validation": ["validation.jsonl"],
            "test": ["test.jsonl"],
            "response": {"max_new_tokens": 16, "batch_size": 8},
        },
        "drafter": {"block_size": 4, "layers": 1, "target_layers": [0, 2]},
        "stages": [
            {"name": "sft", "method": "sft", "steps": 12, "evaluations": 2, "optimiser": {"lr": 3e-3}},
            {
                "name": "opd", "method": "draft-opd", "start": "sft", "steps": 8, "evaluations": 2,
                "rollout": {"refresh_every": 4, "batch_size": 6},
            },
            {"name": "more", "method": "sft", "start": "sft", "steps": 8, "evaluations": 2},
        ],
        "evaluate": {"decode_prompts": 2, "audit_prompts": 3},
    }  # fmt: skip
    return {**recipe, **changes}


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A folder with target, prompts and recipe.yaml."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(toy_recipe(folder), sort_keys=False), encoding="utf-8")
    return folder
