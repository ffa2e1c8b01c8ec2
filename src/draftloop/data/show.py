"""Show: trunks as a person can check them, with the supervised tokens marked.

Knows trunks and a tokenizer that decodes. Does not know chat templates or models. Supervised text is coloured and
stands between `>>>` and `<<<`, so that it can be told apart without colour too.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from draftloop.data.template import Tokenizer
from draftloop.data.trunk import Trunk

OPEN, CLOSE = ">>>", "<<<"
_LONGEST = 2000  # characters of one run that are shown; the middle of a longer one is left out


def show(trunks: Sequence[Trunk], tokenizer: Tokenizer, n: int) -> RenderableType:
    """Lay out the first `n` trunks, the counts over all of them, and what looks wrong.

    Args:
        trunks: all trunks of a data set.
        tokenizer: the target's.
        n: how many to show in full.
    """
    parts: list[Text] = []
    for trunk in trunks[:n]:
        state = "ends with end-of-sequence" if trunk.finished else "cut off by the length limit"
        head = f"{trunk.id} ({trunk.set}, sample {trunk.sample}): {trunk.supervised} of {len(trunk)} tokens supervised"
        parts += [Text(_printable(f"{head}, {state}"), style="bold"), _marked(trunk, tokenizer), Text()]
    sizes = Counter(trunk.set for trunk in trunks)
    supervised, total = sum(trunk.supervised for trunk in trunks), sum(map(len, trunks))
    share = f" ({supervised / total:.0%})" if total else ""
    sets = ", ".join(f"{count} {name}" for name, count in sorted(sizes.items()))
    parts.append(Text(_printable(f"{len(trunks)} trunks ({sets}): {supervised} of {total} tokens supervised{share}")))
    parts += [Text(f"warning: {line}", style="yellow") for line in warnings(trunks)]
    return Group(*parts)


def warnings(trunks: Sequence[Trunk]) -> list[str]:
    """Say what a person should know before training on these trunks, a sentence each; empty if nothing."""
    if not trunks:
        return ["there are no trunks"]
    lines = []
    if cut := sum(not trunk.finished for trunk in trunks):
        lines.append(
            f"{cut} of {len(trunks)} responses were cut off by the length limit (data.response.max_new_tokens)"
        )
    if bare := sum(trunk.supervised < 2 for trunk in trunks):
        lines.append(f"{bare} of {len(trunks)} trunks have a single supervised token, so there is nothing to draft")
    if again := len(trunks) - len({trunk.tokens for trunk in trunks}):
        lines.append(f"{again} of {len(trunks)} trunks repeat another one token for token")
    return lines


def _marked(trunk: Trunk, tokenizer: Tokenizer) -> Text:
    text = Text()
    end = 0
    for start, stop in trunk.spans:
        text.append(_run(trunk, tokenizer, end, start), style="dim")
        text.append(OPEN + _run(trunk, tokenizer, start, stop) + CLOSE, style="bold green")
        end = stop
    text.append(_run(trunk, tokenizer, end, len(trunk)), style="dim")
    return text


def _run(trunk: Trunk, tokenizer: Tokenizer, start: int, stop: int) -> str:
    """Tokens start..stop as text, decoded behind what precedes them: some decoders drop a leading space otherwise."""
    before, upto = (
        str(tokenizer.decode(list(trunk.tokens[:at]), skip_special_tokens=False, clean_up_tokenization_spaces=False))
        for at in (start, stop)
    )
    text = _printable(upto.removeprefix(before))
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
    return text


def _printable(text: str) -> str:
    """Control characters as escapes: a prompt must not be able to steer the terminal."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else repr(c)[1:-1] for c in text)
