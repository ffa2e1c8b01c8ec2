"""One number a row: how far the drafter's law q of one position is from the target's law p, or from a label.

Knows laws (hidden rows + readout) and a vocabulary; does NOT know blocks, positions, weights or reductions: those are
`terms.py`. The sums run over the whole vocabulary, in log space, a chunk of rows at a time.

A row yields a single scalar, so its derivative with respect to its hidden row is a single vector of H numbers. Forward
computes both while the chunk's logits exist and keeps only the vector; backward is one multiplication. Nothing as wide
as the vocabulary outlives its chunk, and no logits are computed twice. What else is asked of the same laws (how likely
they find a given token) is read off in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftloop.core.errors import DraftloopError
from draftloop.core.law import Readout, Sampling

Kind = Literal["ce", "forward_kl", "reverse_kl", "overlap", "nla"]

# On a CPU, larger tensors are mapped and page-faulted anew at every operation, which costs more than their arithmetic:
# 512 rows of 49152 take 1.5x as long in one chunk; from 128 rows on, a larger vocabulary gains nothing either.
_CPU_ROWS = 128

_GREEDY = Sampling()


class Overlap(NamedTuple):
    """What ratio verification makes of each row; float32 (float64 where the readout's weight is), of any shape.

    Attributes:
        alpha: sum_v min(p, q); differentiable in the drafter's rows.
        log_p: log p(token), detached.
        log_q: log q(token), detached; -inf for a token that the drafter's reduced vocabulary lacks.
    """

    alpha: Tensor
    log_p: Tensor
    log_q: Tensor

    def spread(self, index: Tensor, shape: torch.Size) -> Overlap:
        """[m] rows -> `shape`, at flat positions `index`; 0 elsewhere."""
        return Overlap(*(spread(rows, index, shape) for rows in self))

    def detach(self) -> Overlap:
        """Without a graph."""
        return Overlap(*(rows.detach() for rows in self))


def spread(rows: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    """[m] rows -> `shape`, at flat positions `index`; 0 elsewhere."""
    return rows.new_zeros(shape.numel()).index_copy(0, index, rows).view(shape)


def row_values(
    kind: Kind,
    student: Tensor,
    readout: Readout,
    *,
    teacher: Tensor | None = None,
    teacher_readout: Readout | None = None,
    labels: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int = 512,
) -> Tensor:
    """Compute a value for each row, differentiable in `student`.

    p is the target's law and q the drafter's, both softmax(logits / temperature) over the whole vocabulary.

    - `ce`: -log q(label).
    - `forward_kl`: KL(p || q) = sum_v p (log p - log q).
    - `reverse_kl`: KL(q || p) = sum_v q (log q - log p).
    - `overlap`: alpha = sum_v min(p, q) = 1 - TV(p, q), the acceptance of ratio verification.
    - `nla`: -log alpha (LK losses, 2602.23881), from the logarithms, so a tiny alpha costs no precision.

    Where the drafter's readout has a reduced vocabulary (`support`), q is 0 outside it. All but `forward_kl` are
    exact there (p stays normalised over the whole vocabulary). KL(p || q) would be infinite, so `forward_kl` takes p
    given that the token is in the support, the part that the drafter can match. A `ce` label outside is an error: the
    caller gives such a row weight 0, which also keeps it out of the mean.

    Args:
        kind: which value.
        student: [n, H] the drafter's hidden rows after its final norm, any float dtype; the gradient has its dtype.
        readout: turns `student` into logits; frozen.
        teacher: [n, H_t] the target's hidden rows after its final norm; no gradient flows to it. Not for `ce`.
        teacher_readout: turns `teacher` into logits over the whole vocabulary; default: `readout`, the shared head.
        labels: int64 [n], for `ce` alone.
        temperature: of p and of q. 0, for `overlap` and `ce`, is a greedy target: p is the point mass on its argmax and
            q stays at 1, so alpha = q(argmax p).
        chunk: most rows whose logits are held at a time (a few tensors of chunk x V x 4 bytes); a CPU holds fewer.

    Returns:
        float32 [n] (float64 where the readout's weight is).

    Raises:
        DraftloopError: our own misuse (a missing input, rows that do not match, a trainable readout, a label outside
            the support, temperature 0 with another kind).
    """
    teacher_readout = teacher_readout or readout
    _check(kind, student, readout, teacher, teacher_readout, labels, temperature)
    support = readout.support
    if kind == "ce" and labels is not None and support is not None:
        labels = _labels_in_support(labels, readout)
    values = _Chunk(kind, readout, support, teacher, teacher_readout, labels, temperature)
    return _by_chunks(values, student, chunk)


def overlap_rows(
    student: Tensor,
    readout: Readout,
    *,
    teacher: Tensor,
    teacher_readout: Readout,
    tokens: Tensor,
    temperature: float = 1.0,
    chunk: int = 512,
) -> Overlap:
    """`row_values("overlap", ...)`, and how likely both laws find a token a row, without another vocabulary pass.

    Args:
        student: [n, H], as in `row_values`, and so are all that are not named here.
        tokens: int64 [n], target ids: the proposed token of each row.

    Returns:
        Three [n].

    Raises:
        DraftloopError: as `row_values` does.
    """
    _check("overlap", student, readout, teacher, teacher_readout, tokens, temperature)
    exact = torch.float64 if readout.weight.dtype == torch.float64 else torch.float32
    beside = torch.empty(2, student.shape[0], dtype=exact, device=student.device)
    values = _Chunk("overlap", readout, readout.support, teacher, teacher_readout, tokens, temperature, beside)
    return Overlap(_by_chunks(values, student, chunk), beside[0], beside[1])


def _by_chunks(values: _Chunk, student: Tensor, chunk: int) -> Tensor:
    if student.device.type == "cpu":
        chunk = min(chunk, _CPU_ROWS)
    # n = 0 still visits one empty chunk, so that the result has the right dtype and a graph
    parts = [slice(start, start + chunk) for start in range(0, max(student.shape[0], 1), chunk)]
    with torch.autocast(student.device.type, enabled=False):  # the readout's own dtype is the law's
        if torch.is_grad_enabled() and student.requires_grad:
            result: Tensor = _RowValues.apply(student, values, parts)
            return result
        return torch.cat([values(student[part], part) for part in parts])


@dataclass(frozen=True)
class _Chunk:
    """The values of a chunk of rows, written as the formulas are; autograd differentiates them."""

    kind: Kind
    readout: Readout
    support: Tensor | None
    teacher: Tensor | None
    teacher_readout: Readout
    labels: Tensor | None
    temperature: float
    beside: Tensor | None = None  # [2, n], to be filled with log p and log q of the labels

    def __call__(self, hidden: Tensor, part: slice) -> Tensor:
        """From hidden [c, H], the rows `part` of all, to values [c]."""
        # logits of the support alone: no -inf enters any sum
        z = replace(self.readout, support=None).logits(hidden)
        log_q = self._tempered(z).log_softmax(-1)
        if self.kind == "ce":
            assert self.labels is not None
            return -_at(log_q, self.labels[part])
        assert self.teacher is not None
        with torch.no_grad():
            y = self.teacher_readout.logits(self.teacher[part])
            log_p = _GREEDY.log_probs(y) if self.temperature == 0 else self._tempered(y).log_softmax(-1)
            if self.beside is not None:
                assert self.labels is not None
                self.beside[0, part] = _at(log_p, self.labels[part])
                self.beside[1, part] = self._drafters(log_q, self.labels[part])
        if self.support is not None:
            log_p = log_p.index_select(-1, self.support)
        if self.kind == "overlap":
            return torch.minimum(log_p, log_q).exp().sum(-1)
        if self.kind == "nla":
            return -torch.minimum(log_p, log_q).logsumexp(-1)
        if self.kind == "reverse_kl":
            return (log_q.exp() * (log_q - log_p)).sum(-1)
        if self.support is not None:
            log_p = log_p.log_softmax(-1)  # p given the support
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    def _tempered(self, logits: Tensor) -> Tensor:
        return logits if self.temperature in (0.0, 1.0) else logits / self.temperature

    def _drafters(self, log_q: Tensor, tokens: Tensor) -> Tensor:
        if self.support is None:
            return _at(log_q, tokens)
        place = _places(tokens, self.readout)
        return torch.where(place < 0, float("-inf"), _at(log_q, place.clamp(min=0)))


def _at(log_law: Tensor, tokens: Tensor) -> Tensor:
    """[n, V] -> [n]."""
    return log_law.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


class _RowValues(torch.autograd.Function):
    """Values with the Jacobian rows d value / d hidden computed in forward."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, values: Callable[[Tensor, slice], Tensor], parts: list[slice]) -> Tensor:
        jacobian = torch.empty(student.shape, dtype=student.dtype, device=student.device)
        out = []
        for part in parts:
            with torch.enable_grad():
                hidden = student[part].detach().requires_grad_()
                value = values(hidden, part)
                (jacobian[part],) = torch.autograd.grad(value.sum(), hidden)
            out.append(value.detach())
        ctx.save_for_backward(jacobian)
        return torch.cat(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (jacobian,) = ctx.saved_tensors
        return (jacobian * upstream.unsqueeze(-1)).to(jacobian.dtype), None, None


def _places(tokens: Tensor, readout: Readout) -> Tensor:
    """Target ids -> rows of the reduced vocabulary, -1 outside; int64 [n]."""
    assert readout.support is not None
    assert readout.vocab_size is not None
    place = torch.full((readout.vocab_size,), -1, dtype=torch.int64, device=tokens.device)
    place[readout.support] = torch.arange(readout.support.shape[0], device=tokens.device)
    return place[tokens]


def _labels_in_support(labels: Tensor, readout: Readout) -> Tensor:
    labels = _places(labels, readout)
    if bool((labels < 0).any()):
        raise DraftloopError(
            "a label is outside the drafter's reduced vocabulary", where="ce", fix="Give such rows weight 0."
        )
    return labels


def _check(
    kind: Kind,
    student: Tensor,
    readout: Readout,
    teacher: Tensor | None,
    teacher_readout: Readout,
    labels: Tensor | None,
    temperature: float,
) -> None:
    if temperature == 0 and kind not in ("ce", "overlap"):
        raise DraftloopError(f"{kind} has no temperature 0", where="row_values")
    given = labels if kind == "ce" else teacher
    if given is None:
        raise DraftloopError(f"{kind} needs {'labels' if kind == 'ce' else 'teacher rows'}", where="row_values")
    if given.shape[0] != student.shape[0]:
        raise DraftloopError(
            f"{student.shape[0]} drafter rows but {given.shape[0]} to compare with", where="row_values"
        )
    if kind != "ce" and teacher_readout.support is not None:
        raise DraftloopError("the target's law must cover the whole vocabulary", where="row_values")
    # A trainable readout plugs in here: _RowValues would return d value / d weight too, summed over the chunks, and
    # needs the upstream gradient for it, hence the logits a second time in backward.
    weights = [readout.weight] if readout.bias is None else [readout.weight, readout.bias]
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
        raise DraftloopError(
            "a trainable readout would get no gradient", where="row_values", fix="Freeze it (requires_grad_(False))."
        )
