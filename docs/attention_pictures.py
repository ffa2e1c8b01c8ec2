"""The pictures of attention.md, drawn from the very masks that score trees; run it and they are drawn anew.

A trunk of ten tokens and two branches. Rows are queries, columns keys; `#` is seen, `.` is not.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from draftloop.core.tree import Packed, Tree, pack_branches
from draftloop.target.attention import CHUNKED, FULL, SLIDING, SoftmaxAttention

PAGE = Path(__file__).with_name("attention.md")
LENGTH, FORKS, BRANCH, WINDOW, SPACING, RATIO = 10, (2, 6), 3, 4, 4, 2


def packed() -> Packed:
    """The tree of all pictures."""
    trunk = torch.arange(LENGTH)
    fork, length = torch.tensor(FORKS), torch.full((len(FORKS),), BRANCH)
    tokens = torch.zeros(len(FORKS), BRANCH, dtype=torch.int64)
    return pack_branches([trunk], [0], torch.zeros(len(FORKS), dtype=torch.int64), fork, tokens, length)


def grid(seen: torch.Tensor, tree: Tree) -> str:
    """A bool mask [N, N] with the position of each slot beside it; branches apart from the trunk."""
    place, branch = tree.position[0].tolist(), tree.branch[0].tolist()
    names = ["trunk" if b < 0 else "ab"[b] for b in branch]

    def spread(cells: list[str]) -> str:
        gaps = [" | " if i and branch[i] != branch[i - 1] else " " for i in range(len(cells))]
        return "".join(gap + cell for gap, cell in zip(gaps, cells, strict=True))

    lines = [f"{'position':>9}" + spread([str(p) for p in place])]
    for i, row in enumerate(seen.tolist()):
        if i and branch[i] != branch[i - 1]:
            lines.append("")
        lines.append(f"{names[i]:>7}{place[i]:>2}" + spread(["#" if see else "." for see in row]))
    return "\n".join(lines)


def softmax(kind: str) -> str:
    """What one kind of softmax layer sees."""
    config = SimpleNamespace(sliding_window=WINDOW, attention_chunk_size=WINDOW)
    tree = packed().tree
    masks = SoftmaxAttention(config, frozenset([FULL, kind])).tree_masks(tree)
    mask = masks[kind] if isinstance(masks, dict) else masks
    assert mask is not None
    return grid(mask[0, 0], tree)


def recurrent() -> str:
    """From which state each branch of a Gated DeltaNet layer goes on."""
    lines = packed().tree.lines()
    marks = ["S" if t % SPACING == 0 else " " for t in range(LENGTH)]
    out = ["    position  " + "  ".join(str(t) for t in range(LENGTH)), "   snapshots  " + "  ".join(marks)]
    for name, fork in zip("ab", lines.fork.tolist(), strict=True):
        start = fork // SPACING * SPACING
        cells = [" " if t < start or t > fork else "r" for t in range(LENGTH)]
        own = ["b" if fork < t <= fork + BRANCH else cell for t, cell in enumerate(cells)]
        out.append(f"    branch {name}  " + "  ".join(own))
    return "\n".join(line.rstrip() for line in out)


def groups() -> str:
    """How the text of each branch is cut into groups of an indexer."""
    lines = packed().tree.lines()
    out = ["    position  " + "".join(f" {t} " for t in range(LENGTH))]
    out.append("       trunk  " + _cut(["="] * LENGTH))
    for name, fork in zip("ab", lines.fork.tolist(), strict=True):
        shared = (fork + 1) // RATIO * RATIO
        out.append(f"    branch {name}  " + _cut(["="] * shared + ["*"] * (fork + 1 + BRANCH - shared)))
    return "\n".join(line.rstrip() for line in out)


def _cut(cells: list[str]) -> str:
    """Groups in brackets; an incomplete one stays open."""
    line = ""
    for t, cell in enumerate(cells):
        line += ("[" if t % RATIO == 0 else " ") + cell + ("]" if t % RATIO == RATIO - 1 else " ")
    return line


def pictures() -> dict[str, str]:
    """By name, as they stand in the page."""
    return {"full": softmax(FULL), "sliding": softmax(SLIDING), "chunked": softmax(CHUNKED),
            "recurrent": recurrent(), "groups": groups()}  # fmt: skip


def page(text: str) -> str:
    """The page with its pictures drawn anew."""
    for name, picture in pictures().items():
        opening = f"<!-- picture: {name} -->\n```text\n"
        before, rest = text.split(opening)
        text = before + opening + picture + "\n```\n" + rest.split("\n```\n", 1)[1]
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
