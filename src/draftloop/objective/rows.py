"""One number a row: how far the drafter's law q of one position is from the target's law p, or from a label.

Knows laws (hidden rows + readout) and a vocabulary; does NOT know blocks, positions, weights or reductions: those are
`terms.py`. The sums run over the whole vocabulary, in log space, a chunk of rows at a time.

A row yields a single scalar, so its derivative with respect to its hidden row is a single vector of H numbers. Forward
computes both while the chunk's logits exist and keeps only the vector; backward is one multiplication. Nothing as wide
as the vocabulary outlives its chunk, and no logits are computed twice. What else is asked of the same laws (how likely
they find a given token) is read off in the same pass. A readout that is trained itself has a derivative as large as
itself for every row: only the sum over rows is kept, for which backward computes each chunk's logits a second time,
but for chunks that a GPU has plenty of memory to hold until then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from draftloop.core.law import Readout, Sampling
from draftloop.objective.fused import Kernel, fused, why_eager
from draftloop.objective.question import Kind, Question, ask, places

__all__ = ["Kernel", "Kind", "Overlap", "overlap_rows", "row_values", "rows_at_once", "spread"]

_Compute = Callable[[Tensor, bool], tuple[Tensor, Tensor | None]]  # rows, differentiate -> values, Jacobian rows

# On a CPU, larger tensors are mapped and page-faulted anew at every operation, which costs more than their arithmetic:
# 512 rows of 49152 take 1.5x as long in one chunk; from 128 rows on, a larger vocabulary gains nothing either.
_CPU_ROWS = 128

_KEPT = 4  # tensors as wide as the vocabulary that autograd keeps of a chunk, at most (`_Chunk`)

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
    kernel: Kernel = "auto",
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

    Where the drafter's readout has `candidates`, `overlap` and `nla` are those of the law that is drawn from: q is
    normalised over the row's k candidates, p over the whole vocabulary, alpha = sum over the candidates of min(p, q).
    `ce` and the two KL are taken before the cut, on the softmax of all logits: only so is a token that should have been
    a candidate, and is none, pulled among them.

    Args:
        kind: which value.
        student: [n, W] the drafter's rows after its final norm, any float dtype; the gradient has its dtype.
        readout: turns `student` into logits; what of it is trained gets its gradient too.
        teacher: [n, H_t] the target's hidden rows after its final norm; no gradient flows to it. Not for `ce`.
        teacher_readout: turns `teacher` into logits over the whole vocabulary; default: `readout`, the shared head.
        labels: int64 [n], for `ce` alone.
        temperature: of p and of q. 0, for `overlap` and `ce`, is a greedy target: p is the point mass on its argmax and
            q stays at 1, so alpha = q(argmax p).
        chunk: most rows whose logits are held at a time (a few tensors of chunk x V x 4 bytes); a CPU holds fewer.
        kernel: `eager` computes such chunks; `triton` holds no logits at all (`fused.py`); `auto` takes the faster.

    Returns:
        float32 [n] (float64 where the readout's weight is).

    Raises:
        InputError: `triton` is asked for where it cannot be had.
        DraftloopError: our own misuse, see `question.ask`.
    """
    question = ask(kind, student, readout, teacher, teacher_readout, labels, temperature)
    return _answer(question, student, chunk, kernel)


def overlap_rows(
    student: Tensor,
    readout: Readout,
    *,
    teacher: Tensor,
    teacher_readout: Readout,
    tokens: Tensor,
    temperature: float = 1.0,
    chunk: int = 512,
    kernel: Kernel = "auto",
) -> Overlap:
    """`row_values("overlap", ...)`, and how likely both laws find a token a row, without another vocabulary pass.

    Args:
        student: [n, H], as in `row_values`, and so are all that are not named here.
        tokens: int64 [n], target ids: the proposed token of each row.

    Returns:
        Three [n].

    Raises:
        InputError, DraftloopError: as `row_values` does.
    """
    question = ask("overlap", student, readout, teacher, teacher_readout, None, temperature)
    beside = torch.empty(2, student.shape[0], dtype=question.exact, device=student.device)
    alpha = _answer(replace(question, labels=tokens, beside=beside), student, chunk, kernel)
    return Overlap(alpha, beside[0], beside[1])


def _answer(question: Question, student: Tensor, chunk: int, kernel: Kernel) -> Tensor:
    wanted = torch.is_grad_enabled() and student.requires_grad
    if why_eager(kernel, question.heads, student.device) is None:
        compute: _Compute = partial(fused, question)
    else:
        compute = partial(_by_chunks, question, rows_at_once(chunk, student.device))
    with torch.autocast(student.device.type, enabled=False):  # the readout's own dtype is the law's
        if torch.is_grad_enabled() and question.readout.parameters:
            return _by_checkpoints(question, rows_at_once(chunk, student.device), student)
        result: Tensor = _RowValues.apply(student, compute) if wanted else compute(student, False)[0]
    return result


def rows_at_once(chunk: int, device: torch.device) -> int:
    """Most rows whose logits are held at a time, where `chunk` are asked for."""
    return min(chunk, _CPU_ROWS) if device.type == "cpu" else chunk


def _by_checkpoints(question: Question, chunk: int, student: Tensor) -> Tensor:
    """Values [n], differentiable in rows and readout.

    The first chunks are kept between forward and backward as far as memory is plentiful; of the others no logits are.
    """
    values = _Chunk(question)
    kept = _spare(student.device) // (_KEPT * question.readout.weight.shape[0] * question.exact.itemsize)
    parts = [slice(start, start + chunk) for start in range(0, max(student.shape[0], 1), chunk)]
    return torch.cat(
        [
            values(student[part], part)
            if part.stop <= kept
            else checkpoint(values, student[part], part, use_reentrant=False, preserve_rng_state=False)
            for part in parts
        ]
    )


def _spare(device: torch.device) -> int:
    """Bytes that may be held until backward: a quarter of what a GPU has free. Numbers do not depend on it."""
    if device.type != "cuda":
        return 0
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (torch.cuda.mem_get_info(device)[0] + cached) // 4


def _by_chunks(question: Question, chunk: int, student: Tensor, differentiate: bool) -> tuple[Tensor, Tensor | None]:
    """Values [n] of rows [n, H] and, if asked, d value / d row [n, H]: the eager reference of `fused.py`."""
    # n = 0 still visits one empty chunk, so that the result has the right dtype
    parts = [slice(start, start + chunk) for start in range(0, max(student.shape[0], 1), chunk)]
    values = _Chunk(question)
    if not differentiate:
        return torch.cat([values(student[part], part) for part in parts]), None
    jacobian = torch.empty(student.shape, dtype=student.dtype, device=student.device)
    out = []
    for part in parts:
        with torch.enable_grad():
            hidden = student[part].detach().requires_grad_()
            value = values(hidden, part)
            (jacobian[part],) = torch.autograd.grad(value.sum(), hidden)
        out.append(value.detach())
    return torch.cat(out), jacobian


@dataclass(frozen=True)
class _Chunk:
    """The values of a chunk of rows, written as the formulas are; autograd differentiates them."""

    asked: Question

    def __call__(self, hidden: Tensor, part: slice) -> Tensor:
        """From hidden [c, W], the rows `part` of all, to values [c]."""
        asked = self.asked
        z, support = self._logits(hidden)
        log_q = self._tempered(z).log_softmax(-1)
        if asked.kind == "ce":
            assert asked.labels is not None
            return -_at(log_q, asked.labels[part])
        assert asked.teacher is not None
        with torch.no_grad():
            y = asked.teacher_readout.logits(asked.teacher[part])
            log_p = _GREEDY.log_probs(y) if asked.temperature == 0 else self._tempered(y).log_softmax(-1)
            if asked.beside is not None:
                assert asked.labels is not None
                asked.beside[0, part] = _at(log_p, asked.labels[part])
                asked.beside[1, part] = self._drafters(log_q, support, asked.labels[part])
        if support is not None:
            log_p = log_p.index_select(-1, support) if support.dim() == 1 else log_p.gather(-1, support)
        if asked.kind == "overlap":
            return torch.minimum(log_p, log_q).exp().sum(-1)
        if asked.kind == "nla":
            return -torch.minimum(log_p, log_q).logsumexp(-1)
        if asked.kind == "reverse_kl":
            return (log_q.exp() * (log_q - log_p)).sum(-1)
        if support is not None:
            log_p = log_p.log_softmax(-1)  # p given the support
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    def _tempered(self, logits: Tensor) -> Tensor:
        return logits if self.asked.temperature in (0.0, 1.0) else logits / self.asked.temperature

    def _logits(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """The drafter's logits where it has any, so that no -inf enters a sum, and the tokens that they are of.

        Those are int64 [c, k] candidates, [V_d] of a reduced vocabulary, or all (None).
        """
        readout = self.asked.readout
        if readout.candidates and self.asked.kind in ("overlap", "nla"):
            found = readout.shortlist(hidden)
            return readout.scores(hidden, found), found.ids
        return replace(readout.uncut, support=None).logits(hidden), readout.support

    def _drafters(self, log_q: Tensor, support: Tensor | None, tokens: Tensor) -> Tensor:
        if support is None:
            return _at(log_q, tokens)
        if support.dim() == 2:
            return torch.where(support == tokens.unsqueeze(-1), log_q, float("-inf")).amax(-1)
        place = places(tokens, self.asked.readout)
        return torch.where(place < 0, float("-inf"), _at(log_q, place.clamp(min=0)))


def _at(log_law: Tensor, tokens: Tensor) -> Tensor:
    """[n, V] -> [n]."""
    return log_law.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


class _RowValues(torch.autograd.Function):
    """Values with the Jacobian rows d value / d hidden computed in forward."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, compute: _Compute) -> Tensor:
        values, jacobian = compute(student, True)
        assert jacobian is not None
        ctx.save_for_backward(jacobian.to(student.dtype))
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (jacobian,) = ctx.saved_tensors
        return (jacobian * upstream.unsqueeze(-1)).to(jacobian.dtype), None
