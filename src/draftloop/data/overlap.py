"""Overlap: how much of a held-out set could have been learnt by heart from the training prompts.

Knows words. Does not know prompt files, tokenizers or models: it is given texts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

# A word is a run of letters and digits; scripts that are written without spaces count by the character.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")
COMMON = 10


@dataclass(frozen=True)
class Overlap:
    """What a held-out set shares with a training set.

    A shared n-gram that more than `COMMON` training texts hold is a set phrase ("reason step by step, and put your
    final answer ..."): it says nothing about one training text being a copy, so it is counted apart.

    Attributes:
        n: words in an n-gram.
        texts: number of held-out texts.
        short: held-out texts of fewer than n words, which have no n-gram (only `identical` sees them).
        ngrams: n-grams of the held-out texts, repetitions included.
        shared: those of them that occur in training.
        common: those of the shared ones that are set phrases.
        texts_shared: held-out texts with any shared n-gram.
        texts_rare: held-out texts with a shared n-gram that is no set phrase.
        identical: held-out texts whose words are all the words, in order, of a training text.
        worst: (training index, held-out index, share of the held-out text's n-grams found in that one training text,
            set phrases aside) of the pair with the largest share; None when no pair shares anything.
    """

    n: int
    texts: int
    short: int
    ngrams: int
    shared: int
    common: int
    texts_shared: int
    texts_rare: int
    identical: int
    worst: tuple[int, int, float] | None

    @property
    def share(self) -> float:
        """Share of the held-out n-grams that occur in training (0 when there are none)."""
        return self.shared / self.ngrams if self.ngrams else 0.0

    @property
    def texts_share(self) -> float:
        """Share of the held-out texts with any n-gram that occurs in training (0 when there are none)."""
        return self.texts_shared / self.texts if self.texts else 0.0

    @property
    def clean(self) -> bool:
        """Whether nothing but set phrases is shared."""
        return not self.texts_rare and not self.identical

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"{self.share:.2%} of {self.ngrams} held-out {self.n}-grams occur in training ({self.common} of "
            f"{self.shared} are set phrases); {self.texts_shared} of {self.texts} held-out prompts share one, "
            f"{self.texts_rare} not counting set phrases; {self.identical} are identical to a training prompt"
        )


def words(text: str) -> tuple[str, ...]:
    """Split into words: case, punctuation and white space do not count."""
    return tuple(_WORD.findall(text.casefold()))


def ngram_overlap(train: Sequence[str], held_out: Sequence[str], n: int = 8) -> Overlap:
    """Compare held-out texts with training texts by their word n-grams.

    Args:
        train: training texts (`Prompt.text`).
        held_out: held-out texts.
        n: words in an n-gram, at least 1.

    Returns:
        The counts, and the worst pair.
    """
    held_words = [words(text) for text in held_out]
    sought = {gram for found in held_words for gram in _ngrams(found, n)}  # the training set may be very much larger
    holders: dict[tuple[str, ...], list[int]] = {}  # n-gram -> training texts that hold it, COMMON + 1 at most
    first_with: dict[tuple[str, ...], int] = {}
    for index, text in enumerate(train):
        found = words(text)
        first_with.setdefault(found, index)
        for gram in sought.intersection(_ngrams(found, n)):
            known = holders.setdefault(gram, [])
            if len(known) <= COMMON:
                known.append(index)

    short = ngrams = shared = common = texts_shared = texts_rare = identical = 0
    worst: tuple[int, int, float] | None = None
    for at, found in enumerate(held_words):
        grams = _ngrams(found, n)
        hits = [holders[gram] for gram in grams if gram in holders]
        rare = [known for known in hits if len(known) <= COMMON]
        short += not grams
        ngrams += len(grams)
        shared += len(hits)
        common += len(hits) - len(rare)
        texts_shared += bool(hits)
        texts_rare += bool(rare)
        nearest: tuple[int, float] | None = None
        if found and found in first_with:
            identical += 1
            nearest = (first_with[found], 1.0)
        elif rare:
            (index, count), *_ = Counter(index for known in rare for index in known).most_common(1)
            nearest = (index, count / len(grams))
        if nearest and (worst is None or nearest[1] > worst[2]):
            worst = (nearest[0], at, nearest[1])
    return Overlap(n, len(held_out), short, ngrams, shared, common, texts_shared, texts_rare, identical, worst)


def _ngrams(found: tuple[str, ...], n: int) -> list[tuple[str, ...]]:
    return [found[at : at + n] for at in range(len(found) - n + 1)]
