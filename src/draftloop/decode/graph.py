"""The engine of fixed shapes: a whole round is one CUDA graph, and the host looks only now and then.

The host launches rounds ahead of what it has read: while it reads the log of one piece, the next piece runs. Rows that
ended are refilled from the requests that wait. On the CPU the same rounds run without a graph, which is how they are
tested against the eager loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from draftloop.core.errors import EnvironmentFault, InputError
from draftloop.decode.fixed import FixedRows, lines
from draftloop.decode.trace import Commit, Generation, Options, Request, Step
from draftloop.target.fixed import Kernel, check_flash
from draftloop.target.flash import why_not_flash

LOOK_EVERY = 8  # rounds in a piece; a row that ended stands idle for at most two pieces
_IDLE_SHARE = 8  # rows are refilled when one in so many is idle: a prefill costs the host as much as many rounds
_PREFILL_TOKENS = 1 << 16  # of one prefill forward, padding included
_WARM_UPS = 3
_MANY = 512  # rows from which plain products outrun the attention kernels
_WALKED_ALONE, _BUSY = 2048, 32  # tokens that one program may walk over; rows that keep a GPU busy even so


@dataclass
class _Piece:
    """Rounds that were launched and not yet read."""

    holder: list[int | None]
    log: Tensor
    scores: Tensor
    verified: Tensor | None
    ready: Any
    rounds: int


@dataclass
class _Entry:
    """Prompts that were fed and whose first tokens were not yet read."""

    rows: list[int]
    first: Tensor
    ready: Any
    holder: list[int | None] = field(default_factory=list)
    rounds: int = 0


class GraphEngine:
    """Decodes any number of requests with one set of rows; built once, used for many calls.

    Args:
        target: a `Target`.
        drafter: a drafter with a cache of fixed size, or None for plain decoding.
        options: sampling, rule, seed and the rest; `options.engine` "fused" compiles the layers.
        rows: texts at a time.
        longest: the longest text, prompt and response.
        kernel: how attention is computed; default: see `_kernel`.
        compiler: what compiles; default: `torch.compile` for "fused", nothing else.
        join: whether layers that read the same input are one product where they are compiled (see `target.joined`).

    Raises:
        InputError: this target or drafter has no form of fixed size.
        EnvironmentFault: the round cannot be compiled or captured, or memory does not suffice.
    """

    def __init__(
        self,
        target: Any,
        drafter: Any | None,
        options: Options,
        *,
        rows: int,
        longest: int,
        kernel: Kernel | None = None,
        compiler: Callable[[Any], Any] | None = None,
        join: bool = True,
    ) -> None:
        if why := unsupported(target, drafter):
            raise InputError(why, where=target.name, fix="Decode with engine eager.")
        self.target, self.options = target, options
        drafted = drafter.spec.drafted if drafter is not None else 0
        if compiler is None and options.engine == "fused":
            compiler = partial(torch.compile, dynamic=False)
        self.compiler = compiler
        self.kernel: Kernel = kernel or _kernel(target, rows, longest, compiler is not None)
        if self.kernel == "flash" and (why := why_not_flash(target.device, target.dtype)):
            raise InputError(why, where=target.name, fix="Use the kernel matmul or sdpa.")
        if self.kernel == "flash":
            check_flash(target, longest + drafted + 1)
        self._joined = target.join() if compiler is not None and join else None
        self._captured: list[Any] = []
        self._call: object = None  # the latest
        self._on_gpu = target.device.type == "cuda"
        self.count = rows
        self._graph: Any = None
        try:
            self.rows = FixedRows(
                target, drafter, options, rows=rows, longest=longest, turns=2 * LOOK_EVERY, compiler=compiler
            )
            if self._on_gpu:
                self._capture()
            elif compiler is not None:
                self.turn()  # what cannot be compiled is told now
        except (RuntimeError, torch.OutOfMemoryError) as error:
            raise _fault(error, target.name, compiler is not None) from error
        except Exception as error:
            if compiler is None or isinstance(error, InputError):
                raise
            raise _fault(error, target.name, True) from error  # a compiler's own kinds of error

    @property
    def drafted(self) -> int:
        """K."""
        return self.rows.drafted

    def close(self) -> None:
        """Let go of graph and caches; the engine cannot be used after."""
        if self._graph is not None:
            self._graph.reset()
        self.rows.cache.drop()

    def _fixed(self) -> AbstractContextManager[None]:
        return self.target.fixed(self.rows.cache, self.kernel, self.compiler, self._joined)

    def _recorded(self) -> list[Any]:
        """What a graph goes on doing whatever becomes of the models: their modules, hooks, and where weights stand."""
        drafter = self.rows.drafter
        models = (self.target.model, *((drafter,) if hasattr(drafter, "parameters") else ()))
        found: list[Any] = []
        for module in (module for model in models for module in model.modules()):
            hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
            held = (*module._parameters.values(), *module._buffers.values())
            found += [module, vars(module).get("forward"), *hooks]
            found += [None if one is None else one.data_ptr() for one in held]
        return found

    def _renew(self) -> None:
        """Decode with the weights as they are now. All rows are idle."""
        if self._joined is not None:
            self._joined.refresh()
        if self._graph is not None and self._recorded() != self._captured:  # replaced, not written over
            self._graph.reset()
            self._graph = None
            self.rows.at.zero_()
            self._capture()

    def turn(self) -> None:
        """One round of all rows; on CUDA a launch that returns at once."""
        if self._graph is not None:
            self._graph.replay()
            return
        with self._fixed():
            self.rows.turn()

    def _capture(self) -> None:
        """Warm up beside the main stream, then record one round. All rows are idle, so nothing comes of it."""
        here = torch.cuda.current_stream(self.target.device)
        beside = _beside(self.target.device)
        beside.wait_stream(here)
        # the outer stream is for a capture that fails, which would leave us on its own
        with torch.cuda.stream(here), self._fixed():
            with torch.cuda.stream(beside):
                for _ in range(_WARM_UPS):
                    self.rows.turn()
            here.wait_stream(beside)
            graph = torch.cuda.CUDAGraph()
            # what matrix products write to in between shall lie in the graph's own memory, and go with it
            _forget_workspaces()
            with torch.cuda.graph(graph):
                self.rows.turn()
            _forget_workspaces()
        self._graph, self._captured = graph, self._recorded()

    # the host's side -------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def decode(self, requests: Sequence[Request], results: list[Generation]) -> Iterator[list[Commit]]:
        """Continue every request; yield what each round (or each prefill) committed, as the host learns of it.

        Raises:
            InputError: a later call took the rows from this one, which had not ended.
        """
        call = self._call = object()
        for commits in self._continue(requests, results):
            yield commits
            if self._call is not call:
                raise InputError(
                    "another call took the rows of this engine before this one had ended",
                    where=self.target.name,
                    fix="Exhaust one call before the next begins, or give each a Decoder of its own.",
                )

    def _continue(self, requests: Sequence[Request], results: list[Generation]) -> Iterator[list[Commit]]:
        self.rows.done.fill_(True)
        self._renew()
        waiting = deque(sorted(range(len(requests)), key=lambda i: len(requests[i].ids)))  # little padding
        holder: list[int | None] = [None] * self.count
        under_way: deque[_Piece | _Entry] = deque()
        blocks: list[list[Tensor]] = [[] for _ in requests]
        parity = 0
        while True:
            idle = [row for row, index in enumerate(holder) if index is None]
            if waiting and (len(idle) == self.count or len(idle) * _IDLE_SHARE >= self.count):
                alone = not under_way
                under_way.extend(self._admit(idle, waiting, requests, holder))
                while alone and under_way:  # nothing runs that reading could hold up
                    yield from self._read(under_way.popleft(), results, holder, blocks)
            ahead = self._ahead(holder, under_way, results)
            if ahead:
                under_way.append(self._launch(min(LOOK_EVERY, ahead), parity, holder))
                parity = 1 - parity
            elif not under_way and not waiting:
                return
            while len(under_way) > 1:
                yield from self._read(under_way.popleft(), results, holder, blocks)
            if under_way and not ahead:
                yield from self._read(under_way.popleft(), results, holder, blocks)

    def _admit(
        self, idle: list[int], waiting: deque[int], requests: Sequence[Request], holder: list[int | None]
    ) -> Iterator[_Entry]:
        while idle and waiting:
            rows: list[int] = []
            while idle and waiting:
                if rows and (len(rows) + 1) * len(requests[waiting[0]].ids) > _PREFILL_TOKENS:
                    break
                rows.append(idle.pop(0))
                holder[rows[-1]] = waiting.popleft()
            first = self.rows.admit(rows, [requests[holder[row]] for row in rows])  # type: ignore[index]
            yield _Entry(rows, *self._to_host(first), holder=list(holder))

    def _ahead(self, holder: list[int | None], under_way: deque[_Piece | _Entry], results: list[Generation]) -> int:
        """The most rounds that any row may still need beyond those under way."""
        most = 0
        for row, index in enumerate(holder):
            if index is None:
                continue
            flying = sum(piece.rounds for piece in under_way if piece.holder[row] == index)
            most = max(most, self.options.max_new_tokens - max(1, len(results[index].tokens)) - flying)
        return most

    def _launch(self, rounds: int, parity: int, holder: list[int | None]) -> _Piece:
        first = parity * LOOK_EVERY
        self.rows.at.fill_(first)
        for _ in range(rounds):
            self.turn()
        here = slice(first, first + rounds)
        log, _ = self._to_host(self.rows.log[here])
        scores, ready = self._to_host(self.rows.scores[here])
        verified = self.rows.verified[here].clone() if self.rows.verified is not None else None
        return _Piece(list(holder), log, scores, verified, ready, rounds)

    def _to_host(self, value: Tensor) -> tuple[Tensor, Any]:
        """A copy on the host and the event after which it may be read."""
        if not self._on_gpu:
            return value.clone(), None
        copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        copy.copy_(value, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self.target.device))
        return copy, ready

    def _read(
        self,
        what: _Piece | _Entry,
        results: list[Generation],
        holder: list[int | None],
        blocks: list[list[Tensor]],
    ) -> Iterator[list[Commit]]:
        """Move what came of it into the results; free the rows that ended."""
        if what.ready is not None:
            what.ready.synchronize()
        if isinstance(what, _Entry):
            commits = []
            for row, (token, ended, done) in zip(what.rows, what.first.tolist(), strict=True):
                commits.append(
                    self._commit(what.holder, row, (token,), bool(ended), bool(done), results, holder, blocks)
                )
            yield commits
            return
        for turn, played in enumerate(lines(what.log, what.scores, self.drafted)):
            commits = []
            for row, line in enumerate(played):
                index = what.holder[row]
                if line is None or index is None:
                    continue
                step = Step(line.anchor, line.proposed, line.log_q, line.accepted, len(line.tokens))
                results[index].steps.append(step)
                if what.verified is not None:
                    blocks[index].append(what.verified[turn, row])
                commits.append(
                    self._commit(what.holder, row, line.tokens, line.ended, line.done, results, holder, blocks)
                )
            if commits:
                yield commits

    def _commit(
        self,
        held: list[int | None],
        row: int,
        tokens: tuple[int, ...],
        ended: bool,
        done: bool,
        results: list[Generation],
        holder: list[int | None],
        blocks: list[list[Tensor]],
    ) -> Commit:
        index = held[row]
        assert index is not None
        result = results[index]
        result.tokens.extend(tokens)
        result.finished = ended
        if done:
            holder[row] = None
            if self.rows.hidden is not None:
                length = len(result.prompt) + len(result.tokens) - 1
                result.hidden = self.rows.hidden[row, :length].clone()
                result.features = self.rows.features[row, :length].clone() if self.rows.features is not None else None
                result.verified = torch.stack(blocks[index]) if blocks[index] else None
                blocks[index] = []
        return Commit(index, tokens, done)


def _kernel(target: Any, rows: int, longest: int, compiled: bool) -> Kernel:
    """How attention is computed if nobody says, by measurement (results/decode.json).

    `flash` where layers are compiled, for it is one kernel in the place of several. It has a program for each key head
    of each row, which walks over the whole text alone: few rows of long texts leave most of the GPU idle (where that
    begins to cost more than it saves is a guess).
    """
    pays = compiled and target.device.type == "cuda" and (longest <= _WALKED_ALONE or rows >= _BUSY)
    if pays and not why_not_flash(target.device, target.dtype):
        return "flash"
    return "matmul" if compiled or rows >= _MANY else "sdpa"


@cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    """The stream that rounds are warmed up on: one for all, since each keeps a workspace of its own for good."""
    return torch.cuda.Stream(device)


def _forget_workspaces() -> None:
    forget = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if forget is not None:
        forget()


def unsupported(target: Any, drafter: Any | None) -> str:
    """Why this pair cannot decode with fixed shapes, as a clause; empty if it can."""
    if not hasattr(target, "new_fixed_cache"):
        return "the target has no cache of fixed size"
    if drafter is not None and not hasattr(drafter, "new_fixed_cache"):
        return "the drafter has no cache of fixed size"
    if drafter is not None and (why := getattr(drafter, "why_not_fixed", str)()):
        return str(why)
    return str(target.why_not_fixed())


def _fault(error: Exception, name: str, compiled: bool) -> EnvironmentFault:
    cause = error.__context__
    if isinstance(cause, RuntimeError) and not compiled:  # ending a capture that failed fails with less to say
        error = cause
    words = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = " ".join(words[:2]).rstrip(".")[:200]
    if isinstance(error, torch.OutOfMemoryError):
        return EnvironmentFault(
            "the rows do not fit into the GPU's memory", where=name, fix="Lower batch_size or max_new_tokens."
        )
    how = "compiled or captured" if compiled else "captured"
    return EnvironmentFault(
        f"a round of decoding cannot be {how} as a CUDA graph ({type(error).__name__}: {told})",
        where=name,
        fix="Decode with engine graph, which compiles nothing, or eager." if compiled else "Decode with engine eager.",
    )
