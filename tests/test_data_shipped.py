from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftloop.data.builtin import SPLITS, builtin_path
from draftloop.data.overlap import ngram_overlap
from draftloop.data.prompts import read_prompts


class TestShipped:
    @pytest.fixture(scope="class")
    @classmethod
    def shipped(cls):
        return {name: read_prompts([f"builtin:{name}"], Path("/nowhere")) for name in SPLITS}

    def test_sizes(self, shipped):
        sizes = {"train": 20, "validation": 4, "test": 10}
        for name, prompts in shipped.items():
            assert {s: sum(p.set == s for p in prompts) for s in ("maths", "code", "chat")} == dict.fromkeys(
                ("maths", "code", "chat"), sizes[name]
            )
            assert {p.set for p in prompts[:3]} == {"maths", "code", "chat"}  # a limit takes of each
            rows = [json.loads(line) for line in builtin_path(name).read_text().splitlines()]
            assert all(set(row) == {"id", "set", "prompt"} for row in rows)

    def test_ids_are_unique_over_all_splits(self, shipped):
        ids = [p.id for prompts in shipped.values() for p in prompts]
        assert len(set(ids)) == len(ids) == 102
        assert not any("#" in name for name in ids)

    @pytest.mark.parametrize("n", [4, 8])
    def test_splits_share_no_phrase(self, shipped, n):
        texts = {name: [p.text for p in prompts] for name, prompts in shipped.items()}
        for seen, held in (("train", "validation"), ("train", "test"), ("validation", "test")):
            overlap = ngram_overlap(texts[seen], texts[held], n)
            assert overlap.ngrams > 50
            assert (overlap.shared, overlap.identical, overlap.worst) == (0, 0, None)

    @pytest.mark.smollm2
    def test_lengths(self, shipped):
        from transformers import AutoTokenizer

        from draftloop.target.embedded import embedded_target

        tokenizer = AutoTokenizer.from_pretrained(embedded_target())
        for prompts in shipped.values():
            assert all(8 <= len(tokenizer(p.text)["input_ids"]) <= 60 for p in prompts)
