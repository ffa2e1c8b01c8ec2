from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.core.errors import InputError
from draftloop.data.prompts import Prompt, split


def prompts_of(texts) -> list[Prompt]:
    return [Prompt(f"p{i}", "s", ({"role": "user", "content": text},)) for i, text in enumerate(texts)]


class TestSplit:
    @settings(max_examples=100, deadline=None)
    @given(
        texts=st.lists(st.text("abcd \nA", min_size=1, max_size=4), min_size=1, max_size=30),
        validation=st.integers(0, 4) | st.floats(0, 0.4),
        test=st.integers(0, 4) | st.floats(0, 0.4),
        seed=st.integers(0, 5),
    )
    def test_is_a_partition_that_shares_no_text(self, texts, validation, test, seed):
        prompts = prompts_of(texts)
        wanted = [
            size if isinstance(size, int) else max(int(size > 0), round(size * len(texts)))
            for size in (validation, test)
        ]
        parts = None
        with contextlib.suppress(InputError):
            parts = split(prompts, validation=validation, test=test, seed=seed)
        if parts is None:
            assert len({" ".join(text.casefold().split()) for text in texts}) <= sum(wanted)
            return
        assert sorted(p.id for part in parts for p in part) == sorted(p.id for p in prompts)
        seen = [{" ".join(p.text.casefold().split()) for p in part} for part in parts]
        assert not seen[0] & seen[1]
        assert not seen[0] & seen[2]
        assert not seen[1] & seen[2]
        assert parts[0]
        for part, size in zip(parts[1:], wanted, strict=True):
            assert bool(part) == (size > 0)
            assert len(part) >= size
            assert [p.id for p in part] == [p.id for p in prompts if p in part]

    def test_sizes(self):
        prompts = prompts_of(f"text {i}" for i in range(100))
        assert [len(part) for part in split(prompts, validation=7, test=0.2, seed=0)] == [73, 7, 20]
        assert [len(part) for part in split(prompts, validation=0, test=0.001, seed=0)] == [99, 0, 1]

    def test_depends_on_ids_and_seed_not_on_places(self):
        prompts = prompts_of(f"text {i}" for i in range(40))

        def held(given, seed):
            return [{p.id for p in part} for part in split(given, validation=6, test=6, seed=seed)]

        assert held(prompts, 0) == held(prompts[::-1], 0)
        assert held(prompts, 0) != held(prompts, 1)
        assert held(prompts, 0)[2] != {f"p{i}" for i in range(6)}

    @pytest.mark.parametrize(("validation", "test"), [(3, 0), (0, 3), (2, 1), (1.0, 0), (0, 50)])
    def test_too_few(self, validation, test):
        with pytest.raises(InputError, match="3 different prompts are too few"):
            split(prompts_of(["a", "b", "c", "A "]), validation=validation, test=test, seed=0)

    def test_nothing(self):
        with pytest.raises(InputError, match="0 different prompts"):
            split([], validation=1, test=1, seed=0)
