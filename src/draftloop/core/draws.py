"""Keyed randomness: every uniform is a pure function of what it is for.

A draw is keyed by (seed, purpose, prompt, sample, anchor, position) and never taken from a global stream, so a row's
sample depends neither on its batch nor on what was drawn before it: refilled batches, resumed runs and several
processes agree. The bits are a splitmix64-style hash in wrapping int64 arithmetic, the same on CPU and CUDA.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

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
_ALL = (1 << 64) - 1


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift (torch's is arithmetic)."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser: every input bit reaches every output bit."""
    x = (x ^ _shift(x, 30)) * _MIX_A
    x = (x ^ _shift(x, 27)) * _MIX_B
    return x ^ _shift(x, 31)


def _mix_int(x: int) -> int:
    """`_mix` of the low 64 bits of a number; as unsigned."""
    x &= _ALL
    x = (x ^ (x >> 30)) * _MIX_A & _ALL
    x = (x ^ (x >> 27)) * _MIX_B & _ALL
    return x ^ (x >> 31)


def key_of(name: str) -> int:
    """A 63-bit key for a string (a prompt id), stable across runs and machines."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def bits(seed: int, purpose: Purpose, *keys: Tensor | int) -> Tensor:
    """64 hashed bits for each broadcast element of `keys`; int64, shape = broadcast of the keys."""
    # leading numbers are mixed as such: the same bits without a dozen tiny tensors each
    first = next((i for i, key in enumerate(keys) if isinstance(key, Tensor)), len(keys))
    number = _mix_int(seed * 0x9E3779B97F4A7C15 + int(purpose))
    for key in keys[:first]:
        number = _mix_int(number * _GOLDEN + _mix_int(int(key) + _GOLDEN))
    rest = [key if isinstance(key, Tensor) else torch.tensor(_signed(key), dtype=torch.int64) for key in keys[first:]]
    device = next((t.device for t in rest if t.dim() > 0), torch.device("cpu"))
    state = torch.tensor(_signed(number), dtype=torch.int64, device=device)
    for tensor in rest:
        state = _mix(state * _GOLDEN + _mix(tensor.to(device=device, dtype=torch.int64) + _GOLDEN))
    return state


def uniforms(seed: int, purpose: Purpose, *keys: Tensor | int) -> Tensor:
    """One uniform in (0, 1) for each broadcast element of `keys`; float64, shape = broadcast of the keys."""
    # 52 bits: with 53 the half would be rounded away, and the largest value to 1
    return (_shift(bits(seed, purpose, *keys), 12).to(torch.float64) + 0.5) * 2.0**-52


def permutation(seed: int, purpose: Purpose, size: int, *keys: int) -> Tensor:
    """A keyed random order of range(size); int64 [size]."""
    return torch.argsort(bits(seed, purpose, *keys, torch.arange(size)), stable=True)
