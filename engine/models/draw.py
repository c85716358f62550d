"""First weights that depend on the seed and a parameter's name only, so that each rank draws just what it holds."""

from __future__ import annotations

import math

import torch
import xxhash
from torch import Tensor

BLOCK_ROWS = 256
"""Rows that are drawn from one seed: a rank with some of a matrix's rows draws little more than those."""


def normal(name: str, shape: tuple[int, ...], std: float, seed: int, begin: int, end: int) -> Tensor:
    """Rows `begin` to `end` of the normal weights [shape] of a parameter, float32 on the CPU."""
    drawn = torch.empty(end - begin, *shape[1:])
    generator = torch.Generator()
    for block in range(begin // BLOCK_ROWS, math.ceil(end / BLOCK_ROWS)):
        first = block * BLOCK_ROWS
        rows = torch.empty(min(BLOCK_ROWS, shape[0] - first), *shape[1:])
        generator.manual_seed(xxhash.xxh3_64_intdigest(f"{seed} {name} {block}".encode()) >> 1)
        rows.normal_(std=std, generator=generator)
        low, high = max(begin, first), min(end, first + len(rows))
        drawn[low - begin : high - begin] = rows[low - first : high - first]
    return drawn
