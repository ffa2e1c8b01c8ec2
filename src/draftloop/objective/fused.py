"""The readout fused with the loss: values of rows and their derivatives without logits in memory, on CUDA.

The same answers as the eager chunks of `rows.py`, which are its reference. Knows one question and how its kernels are
to be launched; does NOT know blocks, weights, autograd or recipes.

    1. log-sum-exp of q, and of p: tiles of logits, kept by nobody
    2. what the value adds up (overlap, nla, reverse_kl; forward_kl does it in 3, ce has it from 1)
    3. d value / d logits of a slab of the vocabulary, times that slab of the readout: the hidden rows' derivative

Each step forms the logits anew, so seven matrix products of rows x vocabulary x hidden stand for the three of the eager
version (ce: three, forward_kl: five); what is saved is every pass over logits in memory. The readout is frozen.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from draftloop.core.errors import InputError
from draftloop.core.law import Readout
from draftloop.objective.question import Question, places

Kernel = Literal["auto", "eager", "triton"]

_FASTER_UP_TO = 576  # hidden size; measured on an H200 (results/raw/fused-h200.jsonl)
_SLAB = 1 << 25  # derivatives in the logits that are held at a time


class Tile(NamedTuple):
    """Shape of a program's work: rows x columns of logits, `deep` hidden numbers at a time; then warps and stages.

    `each`: tiles that a program of steps 1 and 2 visits; no row count enters, so a row's sums keep their order.
    """

    rows: int
    columns: int
    deep: int
    each: int
    warps: int
    stages: int


_TILES = {2: Tile(128, 128, 64, 16, 8, 3), 4: Tile(32, 64, 32, 16, 4, 2)}  # by bytes of a number
_INTERPRETED = Tile(16, 16, 16, 2, 4, 2)


def why_eager(kernel: Kernel, heads: Sequence[Readout], device: torch.device) -> str | None:
    """Why the eager chunks answer and not the kernels, in words that follow "because"; None where the kernels do.

    Args:
        kernel: what the recipe says.
        heads: the readouts that are read.
        device: of the rows.

    Raises:
        InputError: the kernels are asked for and cannot answer.
    """
    if kernel == "eager":
        return "objective.kernel says so"
    reason = _refusal(heads, device)
    if kernel == "triton":
        if reason is not None:
            raise InputError(
                f"objective.kernel is triton, but {reason}", fix="Use objective.kernel: auto, or eager for the chunks."
            )
        return None
    if reason is None and (device.type != "cuda" or heads[0].weight.dtype == torch.float32):
        reason = "chunks are faster on a CPU and in float32"
    if reason is None and heads[0].weight.shape[1] > _FASTER_UP_TO:
        reason = "no measurement shows the kernels to be faster at this hidden width"
    return reason


def _refusal(heads: Sequence[Readout], device: torch.device) -> str | None:
    """Why the kernels cannot answer at all."""
    if device.type != "cuda" and not _interpreted():
        return f"the drafter is on {device.type} and the kernels need a CUDA GPU"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "the kernels need a GPU of compute capability 8.0 or newer"
    for head in heads:
        if head.parameters:
            return "the drafter's readout is trained itself"
        if head.added is not None:
            return "the drafter's readout adds to the logits what depends on the token before"
        if head.candidates:
            return "the drafter's readout leaves a chance to some candidates of each row alone"
        if head.weight.element_size() not in _TILES:
            return f"a readout in {str(head.weight.dtype).removeprefix('torch.')} has no kernel"
        parts = [part for part in (head.weight, head.bias, head.support) if part is not None]
        if not all(part.is_contiguous() for part in parts):
            return "a readout does not lie in one piece"
    return None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def fused(question: Question, student: Tensor, differentiate: bool) -> tuple[Tensor, Tensor | None]:
    """Values [n] of rows [n, H] and, if asked, d value / d row [n, H] in float32; fills `question.beside`.

    The laws are those of `Readout.logits`: inputs are cast to the readout's type, logits rounded to it.
    """
    if not student.shape[0]:
        return student.new_zeros(0, dtype=torch.float32), torch.zeros_like(student, dtype=torch.float32)
    with torch.cuda.device_of(student):  # where kernels are launched
        return _answer(_Work.of(question, student), differentiate)


def _answer(work: _Work, differentiate: bool) -> tuple[Tensor, Tensor | None]:
    question = work.question
    labels = None if question.labels is None else question.labels.contiguous()
    if question.kind == "ce":
        assert labels is not None
        mine = work.law(work.mine, labels)
        return mine.log_sum - mine.token, work.pull(mine, None, labels) if differentiate else None

    asked = labels if question.beside is not None else None
    mine = work.law(work.mine, _drafters(asked, question))
    # forward_kl compares with p given the support; all else reads the whole law
    theirs = work.law(work.theirs, asked, within=question.kind == "forward_kl")
    if question.beside is not None and labels is not None:
        log_p = theirs.token - theirs.log_sum
        question.beside[0] = torch.where(labels == theirs.best, 0.0, -torch.inf) if work.greedy else log_p
        question.beside[1] = mine.token - mine.log_sum
    if question.kind == "forward_kl" and differentiate:  # its derivative needs no number of step 2
        sums = work.new_sums()
        jacobian = work.pull(mine, theirs, None, sums=sums)
        return sums.sum(0), jacobian
    value, first, second = work.value(mine, theirs)
    return value, work.pull(mine, theirs, None, first, second) if differentiate else None


def _drafters(tokens: Tensor | None, question: Question) -> Tensor | None:
    """Target ids as rows of the drafter's readout, -1 where it lacks them."""
    if tokens is None or question.readout.support is None:
        return tokens
    return places(tokens, question.readout)


@dataclass(frozen=True)
class _Side:
    """One law: [n, H] rows in its readout's type, and the readout."""

    hidden: Tensor
    readout: Readout

    @staticmethod
    def of(hidden: Tensor, readout: Readout) -> _Side:
        return _Side(hidden.detach().to(readout.weight.dtype).contiguous(), readout)

    def flags(self, suffix: str = "") -> dict[str, bool | int]:
        """What the kernels are compiled for."""
        return {
            "BIAS" + suffix: self.readout.bias is not None,
            "CAP" + suffix: self.readout.soft_cap is not None,
            "WIDTH" + suffix: self.hidden.shape[1],
        }


class _Law(NamedTuple):
    """Of each row: log-sum-exp of its logits, their argmax (the first of equals), the logit of a token; [n]."""

    log_sum: Tensor
    best: Tensor
    token: Tensor


@dataclass(frozen=True)
class _Work:
    """A question with its rows, and how its kernels are cut."""

    question: Question
    mine: _Side
    theirs: _Side | None
    tile: Tile

    @staticmethod
    def of(question: Question, student: Tensor) -> _Work:
        mine, theirs = _Side.of(student, question.readout), None
        if question.kind != "ce" and question.teacher is not None:
            theirs = _Side.of(question.teacher, question.teacher_readout)
        widest = max(side.readout.weight.element_size() for side in (mine, theirs) if side)
        return _Work(question, mine, theirs, _INTERPRETED if _interpreted() else _TILES[widest])

    @property
    def count(self) -> int:
        return self.mine.hidden.shape[0]

    @property
    def greedy(self) -> bool:
        """Whether p is a point mass."""
        return self.question.temperature == 0

    @property
    def temperature(self) -> float:
        return self.question.temperature or 1.0

    def shares(self, columns: int) -> int:
        """How many programs share the columns of a block of rows."""
        return -(-columns // (self.tile.columns * self.tile.each))

    def grid(self, shares: int) -> tuple[int, int]:
        return -(-self.count // self.tile.rows), shares

    def law(self, side: _Side | None, tokens: Tensor | None, within: bool = False) -> _Law:
        """Step 1 for one law; `within`: over the drafter's support alone."""
        from draftloop.objective import kernels

        assert side is not None
        readout = side.readout
        support = self.question.readout.support if within else None
        size = readout.weight.shape[0] if support is None else support.shape[0]
        shares = self.shares(size)
        numbers = side.hidden.new_empty(3, shares, self.count, dtype=torch.float32)
        best = side.hidden.new_empty(shares, self.count, dtype=torch.int32)
        kernels.law_kernel[self.grid(shares)](
            side.hidden, readout.weight, readout.bias, support, tokens, numbers[0], numbers[1], best, numbers[2],
            self.count, size, float(readout.scale), float(readout.soft_cap or 1), self.temperature,
            SUPPORT=support is not None, TOKENS=tokens is not None, **side.flags(), **self.cut(self.tile.each),
        )  # fmt: skip
        largest, mass, token = numbers
        top, where = largest.max(0)
        log_sum = top + (mass * (largest - top).exp()).sum(0).log()
        return _Law(log_sum, best.gather(0, where.unsqueeze(0))[0].long(), token.amax(0))

    def value(self, mine: _Law, theirs: _Law) -> tuple[Tensor, Tensor, Tensor | None]:
        """Step 2: the values, and the one or two numbers a row that step 3 reads."""
        size = self.mine.readout.weight.shape[0]
        shares = self.shares(size)
        sums = self.mine.hidden.new_empty(3, shares, self.count, dtype=torch.float32)
        self.pair(mine, theirs, None, grid=shares, tiles=self.tile.each, start=0, stop=size, sums=sums)
        if self.question.kind not in ("overlap", "nla"):
            value = sums[0].sum(0)
            return value, value, None
        largest, total, below = sums
        top = largest.amax(0)
        fixed = torch.where(top.isinf(), 0.0, top)  # no overlap at all
        fade = (largest - fixed).exp()
        total, below = (total * fade).sum(0), (below * fade).sum(0)
        if self.question.kind == "overlap":
            return total * fixed.exp(), below * fixed.exp(), None
        log_alpha = fixed + total.log()
        return -log_alpha, log_alpha, below / total

    def new_sums(self) -> Tensor:
        """[tiles, n]."""
        tiles = -(-self.mine.readout.weight.shape[0] // self.tile.columns)
        return self.mine.hidden.new_empty(tiles, self.count, dtype=torch.float32)

    def pull(
        self,
        mine: _Law,
        theirs: _Law | None,
        labels: Tensor | None,
        first: Tensor | None = None,
        second: Tensor | None = None,
        sums: Tensor | None = None,
    ) -> Tensor:
        """Step 3: d value / d row, float32 [n, H], a slab of the vocabulary at a time."""
        weight, columns = self.mine.readout.weight, self.tile.columns
        size, width = weight.shape
        wide = min(max(_SLAB // self.count // columns, 1) * columns, -(-size // columns) * columns)
        jacobian = torch.zeros(self.count, width, dtype=torch.float32, device=weight.device)
        slab = weight.new_empty(self.count, wide)
        for start in range(0, size, wide):
            stop = min(start + wide, size)
            tiles = -(-(stop - start) // columns)
            self.pair(mine, theirs, labels, grid=tiles, tiles=1, start=start, stop=stop, first=first, second=second,
                      sums=None if sums is None else sums[start // columns :], slab=slab)  # fmt: skip
            _add_product(jacobian, slab[:, : stop - start], weight[start:stop])
        return jacobian

    def pair(
        self,
        mine: _Law,
        theirs: _Law | None,
        labels: Tensor | None,
        *,
        grid: int,
        tiles: int,
        start: int,
        stop: int,
        first: Tensor | None = None,
        second: Tensor | None = None,
        sums: Tensor | None = None,
        slab: Tensor | None = None,
    ) -> None:
        from draftloop.objective import kernels

        left, right = self.mine, self.theirs or self.mine
        chosen = labels if labels is not None else theirs.best if theirs is not None and self.greedy else None
        kernels.pair_kernel[self.grid(grid)](
            left.hidden, left.readout.weight, left.readout.bias, float(left.readout.scale),
            float(left.readout.soft_cap or 1), mine.log_sum,
            right.hidden, right.readout.weight, right.readout.bias, float(right.readout.scale),
            float(right.readout.soft_cap or 1), None if theirs is None else theirs.log_sum,
            left.readout.support, chosen, first, second, sums, slab,
            self.count, 0 if slab is None else slab.shape[1], start, stop, self.temperature,
            KIND=self.question.kind, VALUE=sums is not None, PULL=slab is not None,
            GREEDY=self.greedy and theirs is not None, SUPPORT=left.readout.support is not None and theirs is not None,
            **left.flags(), **right.flags("_T"), **self.cut(tiles),
        )  # fmt: skip

    def cut(self, tiles: int) -> dict[str, Any]:
        """How a kernel is cut; `tiles` are visited by each program."""
        rows, columns, deep, _, warps, stages = self.tile
        shape = {"TILES": tiles, "ROWS": rows, "COLUMNS": columns, "DEEP": deep}
        return {**shape, "num_warps": warps, "num_stages": stages}


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to the total, summed in float32 also where the factors are narrower."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda:
        total += torch.mm(left, right, out_dtype=torch.float32)
    else:
        total += left.float() @ right.float()
