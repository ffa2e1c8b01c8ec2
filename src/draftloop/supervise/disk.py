"""What the target computed for fixed trunks, kept in files: for trunks that do not fit into memory.

One safetensors file a trunk, read back bit for bit. All files lie under a folder named after what they depend on, so
those of another target, other taps or other software are never read: they are removed. Chooses nothing; the
`FeatureStore` does.
"""

from __future__ import annotations

import errno
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftloop.core.errors import EnvironmentFault
from draftloop.core.files import fingerprint
from draftloop.core.weights import write_tensors
from draftloop.data.trunk import Trunk
from draftloop.target.cache import TrunkState

Kept = tuple[Tensor, Tensor, tuple[tuple[Tensor, ...], ...]]


class TrunkFiles:
    """Features, hidden rows and states of trunks on disk, within a budget.

    Args:
        folder: for these files alone; made when the first is written.
        budget: bytes that they may take together.
    """

    def __init__(self, folder: Path, budget: float) -> None:
        self.folder, self.budget = folder, budget
        self._sizes: dict[str, int] = {}  # of the files, by name
        self._total = 0
        self._own = folder

    def open(self, *identity: object) -> None:
        """Take up the files of this identity, which are reused, and remove all others.

        Args:
            identity: whatever the rows depend on.
        """
        self._own = self.folder / fingerprint(*identity)
        self._forget()
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path != self._own:
                shutil.rmtree(path, ignore_errors=True)
        for path in self._own.iterdir() if self._own.is_dir() else ():
            if path.suffix == ".safetensors":
                self._count(path)
            else:  # a write that was killed
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove all files, and the folder above where no other process has any: nobody needs them any more."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            self.folder.parent.rmdir()
        self._forget()

    def holds(self, trunk: Trunk) -> bool:
        """Whether rows of this trunk are here."""
        return _name(trunk) in self._sizes

    def write(self, trunk: Trunk, features: Tensor, hidden: Tensor, state: TrunkState | None) -> bool:
        """Put a trunk's rows here, its state too where there is room for both; whether they are here now.

        Args:
            trunk: of T tokens.
            features: [T - 1, F * H].
            hidden: [T - 1, H].
            state: what the target needs to go on from any position.

        Raises:
            EnvironmentFault: the disk is full or the folder cannot be written.
        """
        if self.holds(trunk):
            return True
        rows = {"features": features, "hidden": hidden}
        if state is not None:
            whole = {"features": features, "hidden": state.hidden}
            for i, parts in enumerate(state.layers):
                whole |= {f"{i}.{j}": part for j, part in enumerate(parts)}
            if self._fits(whole):
                rows = whole
        if not self._fits(rows):
            return False
        path = self._path(trunk)
        try:
            write_tensors(path, rows)
        except EnvironmentFault as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
                error = EnvironmentFault(
                    "the disk is full",
                    where=str(path.parent),
                    fix="Free some space or lower feature_disk_gb, and run the same command again.",
                )
            raise error from cause
        self._count(path)
        return True

    def read(self, trunk: Trunk, device: torch.device) -> Kept | None:
        """A trunk's rows; None where they are not here, or not readable.

        Returns:
            [T - 1, F * H] features, hidden rows ([T, H] with a state, else [T - 1, H]), what the state holds of each
            layer (nothing without a state).
        """
        if not self.holds(trunk):
            return None
        path = self._path(trunk)
        try:
            rows = load_file(path, device=str(device))  # on the CPU mapped into memory, not read
            features, hidden = rows.pop("features"), rows.pop("hidden")
            return features, hidden, _layers(rows)
        except (SafetensorError, OSError, KeyError):  # damaged, or taken away: what can be computed again is no loss
            path.unlink(missing_ok=True)
            self._total -= self._sizes.pop(path.stem)
            return None

    def _forget(self) -> None:
        self._sizes, self._total = {}, 0

    def _count(self, path: Path) -> None:
        self._sizes[path.stem] = path.stat().st_size
        self._total += self._sizes[path.stem]

    def _fits(self, rows: dict[str, Tensor]) -> bool:
        header = 256 * (len(rows) + 1)  # less than that a tensor
        return self._total + sum(row.nbytes for row in rows.values()) + header <= self.budget

    def _path(self, trunk: Trunk) -> Path:
        return self._own / f"{_name(trunk)}.safetensors"


def _layers(rows: dict[str, Tensor]) -> tuple[tuple[Tensor, ...], ...]:
    """The parts of each layer, from tensors named `layer.part`: of layers of several kinds not all have as many.

    Raises:
        KeyError: other names.
    """
    counts = Counter(name.split(".")[0] for name in rows)
    return tuple(tuple(rows[f"{i}.{j}"] for j in range(counts[str(i)])) for i in range(len(counts)))


def _name(trunk: Trunk) -> str:
    return fingerprint(trunk.id, trunk.sample, trunk.tokens)


def files_of(folder: Path, budget: float, rank: int = 0, world: int = 1) -> TrunkFiles | None:
    """The files of one process, its share of the budget of all; None (and whatever is there removed) without one."""
    if not budget:
        shutil.rmtree(folder, ignore_errors=True)
        return None
    for path in folder.glob("rank*"):
        if rank == 0 and path.name not in {f"rank{i}" for i in range(world)}:
            shutil.rmtree(path, ignore_errors=True)
    return TrunkFiles(folder / f"rank{rank}", budget / world)
