from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.data.overlap import COMMON, ngram_overlap, words

sentences = st.lists(st.lists(st.sampled_from("abcd"), max_size=9).map(" ".join), max_size=6)


@settings(deadline=None)
@given(train=sentences, held_out=sentences, n=st.integers(1, 4))
def test_counts_equal_brute_force(train, held_out, n):
    def grams(text):
        return [" ".join(text.split()[i : i + n]) for i in range(len(text.split()) - n + 1)]

    found = ngram_overlap(train, held_out, n)
    known = {gram for text in train for gram in grams(text)}
    hits = [[gram in known for gram in grams(text)] for text in held_out]
    assert found.ngrams == sum(map(len, hits))
    assert found.shared == sum(map(sum, hits))
    assert found.texts_shared == found.texts_rare == sum(map(any, hits))  # never more than COMMON training texts here
    assert found.identical == sum(bool(text) and text in train for text in held_out)
    assert found.short == sum(not row for row in hits)
    assert found.common == 0
    assert found.share == (found.shared / found.ngrams if found.ngrams else 0)
    assert found.texts_share == (found.texts_shared / len(held_out) if held_out else 0)

    def alike(seen, held):
        own = grams(held)
        if seen and seen == held:
            return 1.0
        return sum(gram in grams(seen) for gram in own) / len(own) if own else 0.0

    best = max((alike(seen, held) for seen in train for held in held_out), default=0.0)
    if found.worst is None:
        assert best == 0
    else:
        seen, held, share = found.worst
        assert share == pytest.approx(best)
        assert alike(train[seen], held_out[held]) == pytest.approx(best)


def test_words():
    assert words("It's  snake_case: x^2 = 4!\nÉté") == ("it", "s", "snake", "case", "x", "2", "4", "été")
    assert words("数学 test") == ("数", "学", "test")


def test_case_punctuation_and_white_space_do_not_hide_a_copy():
    found = ngram_overlap(["How many apples, does Ann have?"], ["HOW many\napples does Ann have"], 4)
    assert found.identical == 1
    assert found.share == 1
    assert not found.clean


def test_short_copy_is_seen():
    found = ngram_overlap(["Say hello.", "other"], ["say hello"], 8)
    assert (found.identical, found.short, found.ngrams, found.worst) == (1, 1, 0, (0, 0, 1.0))
    assert "1 are identical" in str(found)


def test_set_phrases_are_counted_apart():
    phrase = "please reason step by step now"
    train = [f"{i} {phrase}" for i in range(COMMON + 1)]
    found = ngram_overlap(train, [f"new question {phrase}"], 4)
    assert (found.shared, found.common, found.texts_shared, found.texts_rare) == (3, 3, 1, 0)
    assert found.clean
    assert found.worst is None
    assert not ngram_overlap(train[1:], [f"new question {phrase}"], 4).clean


def test_worst_pair():
    train = ["one two three four", "five six seven eight nine ten"]
    held_out = ["one two three four x y z w", "a five six seven eight nine", "alpha beta gamma delta"]
    assert ngram_overlap(train, held_out, 4).worst == (1, 1, pytest.approx(2 / 3))


def test_nothing():
    for train, held_out in (([], []), (["a b"], []), ([], ["a b"]), (["?"], ["?", ""])):
        found = ngram_overlap(train, held_out, 2)
        assert (found.share, found.identical, found.worst, found.clean) == (0, 0, None, True)
    assert ngram_overlap([], [], 2).texts_share == 0
