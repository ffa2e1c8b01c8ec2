"""The processes that train together (torchrun, accelerate): who one is, one's share of the work, sums over all.

With one process every method hands back what it was given, and torch.distributed is never touched. Small things (shares
of results, decisions of the first) travel as Python values, gradients in one buffer. All processes must ask the same in
the same order. Knows neither drafter nor loop. PyTorch is imported inside, for the command line asks here too.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from draftloop.core.errors import EnvironmentFault, InputError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

# The others wait while the first has the prompts answered; a process that dies is noticed by its closed connection.
_PATIENCE = timedelta(days=7)
_MEETING = timedelta(minutes=10)
_HOW = "Launch with `torchrun --nproc-per-node N -m draftloop.cli train RECIPE`."
_groups = itertools.count()


@dataclass(frozen=True)
class Ranks:
    """A process among those that train together: the one that asks.

    Attributes:
        rank: 0 is the first, which alone writes and speaks.
        world: how many there are.
    """

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and speaks."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """The part of this process: one run of neighbours, as long as the others' or one longer (the first ones')."""
        size, longer = divmod(len(items), self.world)
        begin = self.rank * size + min(self.rank, longer)
        return list(items[begin : begin + size + (self.rank < longer)])

    def merge(self, mine: Sequence[T]) -> list[T]:
        """Every process's list, joined in the order of the ranks; undoes `share`. Tensors in it must be on the CPU."""
        if self.world == 1:
            return list(mine)
        import torch.distributed as dist

        parts: list[Any] = [None] * self.world
        with _talk():
            dist.all_gather_object(parts, list(mine))
        return [item for part in parts for item in part]

    def once(self, work: Callable[[], T]) -> T:
        """Let the first process do something while the others wait, however long; all get its result."""
        if self.world == 1:
            return work()
        import torch.distributed as dist

        told: list[Any] = [work() if self.first else None]
        with _talk():
            dist.broadcast_object_list(told, src=0)
        result: T = told[0]
        return result

    def barrier(self) -> None:
        """Wait until all processes are here, however long."""
        self.merge([])

    def sum(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Add the processes' numbers up by name."""
        return added(self.merge([dict(numbers)]))

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace every gradient by its sum over the processes: one float32 buffer, one all-reduce.

        A parameter without a gradient counts as 0; it stays without one where no process has one, for an optimiser
        treats that otherwise than a gradient of 0.
        """
        if self.world == 1:
            return
        import torch
        import torch.distributed as dist

        wanted = [one for one in parameters if one.requires_grad]
        there = torch.tensor([one.grad is not None for one in wanted], dtype=torch.float32, device=wanted[0].device)
        parts = [torch.zeros_like(one) if one.grad is None else one.grad for one in wanted]
        flat = torch.cat([*(part.float().flatten() for part in parts), there])
        with _talk():
            dist.all_reduce(flat)
        *sums, anywhere = flat.split([one.numel() for one in wanted] + [len(wanted)])
        for one, total, holders in zip(wanted, sums, anywhere.tolist(), strict=True):
            one.grad = total.view_as(one).to(one.dtype) if holders else None


def added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add numbers up by name, in the order of the parts; a name that a part lacks counts as 0 there."""
    total: dict[str, float] = {}
    for part in parts:
        for name, number in part.items():
            total[name] = total.get(name, 0.0) + number
    return total


class PeerGone(EnvironmentFault):
    """Another process of this run ended while this one waited for it."""


def launched() -> int:
    """How many processes the launcher says it started."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def follows() -> bool:
    """Whether this is one of several processes and not the first."""
    return launched() > 1 and os.environ.get("RANK") != "0"


@cache
def has_the_word() -> bool:
    """Whether it falls to this process to say why the run fails: of several, to the first that asks."""
    if launched() == 1:
        return True
    mine = os.environ.get("RANK", "")
    try:
        holder: bytes = _store().compare_set("why the run fails", "", mine)
    except Exception:  # nobody is left to speak for us
        return True
    return holder.decode() == mine


@contextmanager
def together(device: str) -> Iterator[Ranks]:
    """Join the processes that the launcher started (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).

    Gradients travel by NCCL between GPUs, where this process takes the one of its LOCAL_RANK; all else by gloo.

    Args:
        device: the recipe's: auto, cpu or cuda.

    Raises:
        InputError: the device is one GPU for all.
        EnvironmentFault: the others do not turn up, or there are fewer GPUs than processes.
        PeerGone: another process ended.
    """
    if launched() == 1:
        yield Ranks()
        return
    import torch.distributed as dist

    ranks = _join(device)
    try:
        yield ranks
    except Exception:
        has_the_word()  # asked before the others can notice that this process goes
        raise
    finally:
        dist.destroy_process_group()


def _join(device: str) -> Ranks:
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if device != "cpu" and torch.cuda.is_available():
        if ":" in device:
            raise InputError(
                f"{device} would be the GPU of every process",
                where="target.device",
                fix="Set it to cuda: each process then takes the GPU of its LOCAL_RANK.",
            )
        local, count = int(os.environ.get("LOCAL_RANK") or 0), torch.cuda.device_count()
        if local >= count:
            raise EnvironmentFault(
                f"there are more processes than GPUs ({count})", fix="Start as many, or set target.device: cpu."
            )
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    if dist.is_initialized():
        raise InputError("torch.distributed is already in use in this process", fix="Leave its set-up to draftloop.")
    ranks = Ranks(int(os.environ.get("RANK") or 0), launched())
    try:
        store = dist.PrefixStore(f"group {next(_groups)}", _store())  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world, timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise EnvironmentFault(f"the processes do not find each other ({error})", fix=_HOW) from error
    return ranks


@cache
def _store() -> Any:
    """The launcher's key-value store."""
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=_MEETING))
    return store


@contextmanager
def _talk() -> Iterator[None]:
    """A connection that breaks means that its other end is gone."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise PeerGone(
            "another process of this run ended without a word (it was killed, or the memory is exhausted)",
            fix="Run the same command again: it goes on from the last checkpoint.",
        ) from error
