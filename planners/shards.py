"""Who stores what: replicated state divided among the ranks by bytes, each byte stored once.

The tensors, in their given order, are seen as one run of bytes and cut into `world` nearly equal parts. A cut
inside a tensor is moved to the next row (an index of dimension 0), so every piece is a box of whole rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..specs.dtypes import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, dtype (safetensors tag) and global shape of one tensor of the state."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `start` to `stop` of a tensor; a 0-dim tensor is one row."""

    tensor: TensorInfo
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the piece."""
        return (self.stop - self.start, *self.tensor.shape[1:]) if self.tensor.shape else ()

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return math.prod(self.shape) * DTYPE_BYTES[self.tensor.dtype]

    @property
    def offset_bytes(self) -> int:
        """Where the piece begins in the tensor's row-major bytes."""
        return self.start * row_bytes(self.tensor)


def rows(tensor: TensorInfo) -> int:
    """Number of rows: the size of dimension 0, or 1 for a 0-dim tensor."""
    return tensor.shape[0] if tensor.shape else 1


def row_bytes(tensor: TensorInfo) -> int:
    """Bytes of one row."""
    return math.prod(tensor.shape[1:]) * DTYPE_BYTES[tensor.dtype]


def divide(tensors: Sequence[TensorInfo], world: int) -> list[list[Piece]]:
    """Divide `tensors` among `world` ranks.

    Every row belongs to exactly one rank; ranks differ by at most one row of bytes on each side. A rank may
    get nothing (fewer rows than ranks).
    """
    total = sum(tensor.nbytes for tensor in tensors)
    shards: list[list[Piece]] = [[] for _ in range(world)]
    rank, position = 0, 0
    for tensor in tensors:
        width, count, start = row_bytes(tensor), rows(tensor), 0
        if width == 0 or count == 0:
            shards[rank].append(Piece(tensor, 0, count))
            continue
        while start < count:
            end_of_rank = total * (rank + 1) // world
            room = -(-(end_of_rank - position) // width)
            if room <= 0 and rank < world - 1:
                rank += 1
                continue
            stop = min(count, start + max(room, 1))
            shards[rank].append(Piece(tensor, start, stop))
            position += (stop - start) * width
            start = stop
    return shards
