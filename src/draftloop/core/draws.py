"""Keyed randomness: every uniform is a pure function of what it is for.

A draw is keyed by (seed, purpose, prompt, sample, anchor, position) and never taken from a global stream, so a row's
sample depends neither on its batch nor on what was drawn before it: refilled batches, resumed runs and several
processes agree. The bits are a splitmix64-style hash in wrapping int64 arithmetic, the same on CPU and CUDA.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor


class Purpose(IntEnum):
    """What a uniform decides. Two purposes never share a uniform."""

    TARGET = 1  # a token drawn from the target's law
    DRAFT = 2  # a token drawn from the drafter's law
    ACCEPT = 3  # the accept/reject coin of the ratio rule
    RESIDUAL = 4  # the token drawn from the residual after a rejection
    ANCHOR = 5  # which anchors of a trunk a training step uses
    ORDER = 6  # the order in which an epoch visits its trunks
    INIT = 7  # initial weights
    BRANCH = 8  # whether a sampled branch is the drafter's argmax instead


def _signed(value: int) -> int:
    """A 64-bit pattern as the Python int that torch's int64 takes."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_A = _signed(0xBF58476D1CE4E5B9)
_MIX_B = _signed(0x94D049BB133111EB)


Word = TypeVar("Word", Tensor, int)  # 64 bits: int64 tensors, or a Python int while no tensor has come in


def _wrapped(x: Word) -> Word:
    """Torch's int64 wraps by itself."""
    return _signed(x) if isinstance(x, int) else x


def _shift(x: Word, by: int) -> Word:
    """Logical right shift (torch's is arithmetic)."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix(x: Word) -> Word:
    """splitmix64's finaliser: every input bit reaches every output bit."""
    x = _wrapped((x ^ _shift(x, 30)) * _MIX_A)
    x = _wrapped((x ^ _shift(x, 27)) * _MIX_B)
    return x ^ _shift(x, 31)


def key_of(name: str) -> int:
    """A 63-bit key for a string (a prompt id), stable across runs and machines."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def _begun(seed: int, purpose: Purpose) -> int:
    """The state before any key."""
    return _signed(seed * 0x9E3779B97F4A7C15 + int(purpose))


def _absorbed(state: Any, keys: Sequence[Any], device: torch.device) -> Any:
    """The state after further keys (tensors, arrays of int64 or ints)."""
    for key in keys:
        word: Any = key.to(device=device, dtype=torch.int64) if isinstance(key, Tensor) else key
        word = _signed(word) if isinstance(word, int) else word
        state = _mix(_wrapped(_wrapped(state * _GOLDEN) + _mix(_wrapped(word + _GOLDEN))))
    return state


def bits(seed: int, purpose: Purpose, *keys: Tensor | int) -> Tensor:
    """64 hashed bits for each broadcast element of `keys`; int64, shape = broadcast of the keys."""
    tensors = [key for key in keys if isinstance(key, Tensor)]
    device = next((t.device for t in tensors if t.dim() > 0), torch.device("cpu"))
    # ints stay ints until a tensor comes: a tensor made from one could not be copied while a CUDA graph is captured
    state: Any = _absorbed(_mix(_begun(seed, purpose)), keys, device)
    return state if isinstance(state, Tensor) else torch.tensor(state, dtype=torch.int64)


def uniforms(seed: int, purpose: Purpose, *keys: Tensor | int) -> Tensor:
    """One uniform in (0, 1) for each broadcast element of `keys`; float64, shape = broadcast of the keys."""
    return _unit(bits(seed, purpose, *keys))


def uniforms_after(state: Tensor, *keys: Tensor | int) -> Tensor:
    """As `uniforms` of (seed, purpose, *first, *keys), where state = `bits` of (seed, purpose, *first)."""
    return _unit(_absorbed(state, keys, state.device))


def _unit(state: Tensor) -> Tensor:
    # 52 bits: with 53 the half would be rounded away, and the largest value to 1
    return (_shift(state, 12).to(torch.float64) + 0.5) * 2.0**-52


def permutation(seed: int, purpose: Purpose, size: int, *keys: int) -> Tensor:
    """A keyed random order of range(size); int64 [size]."""
    # numpy's operations begin sooner than torch's, and numbers as few as these are done by then
    hashed = _absorbed(_mix(_begun(seed, purpose)), [*keys, np.arange(size)], torch.device("cpu"))
    return torch.from_numpy(hashed.argsort(kind="stable"))
