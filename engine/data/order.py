"""The order of samples as a function of (seed, epoch, index): nothing to store, nothing to replay.

A permutation of any size n in O(1) memory: a balanced Feistel network over the next even number of bits, walked until
it lands below n (Black & Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). The round function is the
finaliser of splitmix64 (Steele, Lea & Flood, OOPSLA 2014).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6
GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment
Indices = NDArray[np.uint64]


def _mix(x: Indices) -> Indices:
    """splitmix64's finaliser, element by element; overflow wraps on purpose."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _word(number: int) -> Indices:
    return np.array([number % 2**64], dtype=np.uint64)


def permute(indices: Indices, size: int, seed: int, epoch: int) -> Indices:
    """Where each index of 0..size-1 goes in this epoch; a bijection on 0..size-1."""
    if size < 1:
        raise ValueError(f"cannot order {size} samples")
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    base = _mix(_mix(_word(seed + GOLDEN)) + _word(epoch))
    keys = [_mix(base + _word(GOLDEN * (number + 1))) for number in range(ROUNDS)]
    result = indices.astype(np.uint64)
    outside = np.ones(len(result), dtype=bool)
    while outside.any():
        x = result[outside]
        left, right = x >> half, x & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        result[outside] = (left << half) | right
        outside = result >= np.uint64(size)
    return result


def samples_at(first: int, count: int, size: int, seed: int) -> list[int]:
    """Samples number `first` to `first + count` of the endless stream of epochs over `size` samples."""
    chosen: list[int] = []
    while len(chosen) < count:
        epoch, offset = divmod(first + len(chosen), size)
        take = min(count - len(chosen), size - offset)
        chosen += permute(np.arange(offset, offset + take, dtype=np.uint64), size, seed, epoch).tolist()
    return chosen
