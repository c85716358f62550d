"""Who stores what: the part of a tensor that several ranks hold alike is divided among them, each byte stored once.

A rank holds a box of each tensor: all of it where the tensor is replicated, a part where it is sharded. The boxes that
the same ranks hold alike, in their given order, are seen as one run of bytes and cut into as many nearly equal parts as
there are such ranks. A cut inside a box is moved to the next row (an index of dimension 0), so every piece is a box of
whole rows of what its rank holds, and no rank needs to ask another which ones are its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...specs.dtypes import DTYPE_BYTES


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
class Held:
    """The box of a tensor that the ranks in `holders` hold alike: `shape` from `offset` on."""

    tensor: TensorInfo
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    holders: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Number of rows: the size of dimension 0, or 1 for a 0-dim tensor."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the box."""
        return math.prod(self.shape[1:]) * DTYPE_BYTES[self.tensor.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return self.rows * self.row_bytes


def replicated(tensors: Sequence[TensorInfo], world: int) -> list[Held]:
    """What a rank holds of tensors that are whole on each of `world` ranks."""
    everyone = tuple(range(world))
    return [Held(tensor, (0,) * len(tensor.shape), tensor.shape, everyone) for tensor in tensors]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `start` to `stop` of what a rank holds of a tensor; a 0-dim tensor is one row."""

    held: Held
    start: int
    stop: int

    @property
    def tensor(self) -> TensorInfo:
        """The tensor it is a part of."""
        return self.held.tensor

    @property
    def offset(self) -> tuple[int, ...]:
        """Where the piece begins in the tensor."""
        return (self.held.offset[0] + self.start, *self.held.offset[1:]) if self.held.offset else ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the piece."""
        return (self.stop - self.start, *self.held.shape[1:]) if self.held.shape else ()

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return (self.stop - self.start) * self.held.row_bytes

    @property
    def offset_bytes(self) -> int:
        """Where the piece begins in the row-major bytes of what the rank holds."""
        return self.start * self.held.row_bytes


def own(held: Sequence[Held], rank: int) -> list[Piece]:
    """Return the pieces of `held` that `rank` stores, in the same order; every holder must see the same order."""
    runs: dict[tuple[int, ...], list[Held]] = {}
    for box in held:
        runs.setdefault(box.holders, []).append(box)
    stored: dict[int, Piece] = {}
    for holders, boxes in runs.items():
        mine = _cut(boxes, len(holders))[holders.index(rank)]
        stored |= {id(piece.held): piece for piece in mine}
    return [stored[id(box)] for box in held if id(box) in stored]


def shard_bytes(pieces: Sequence[Piece]) -> int:
    """Bytes of these pieces."""
    return sum(piece.nbytes for piece in pieces)


def divide(tensors: Sequence[TensorInfo], world: int) -> list[list[Piece]]:
    """Divide `tensors`, whole on each of `world` ranks, among these.

    Every row belongs to exactly one rank; ranks differ by at most one row of bytes on each side. A rank may
    get nothing (fewer rows than ranks).
    """
    return _cut(replicated(tensors, world), world)


def _cut(boxes: Sequence[Held], parts: int) -> list[list[Piece]]:
    """Cut the boxes, seen as one run of bytes, into nearly equal parts."""
    total = sum(box.nbytes for box in boxes)
    shards: list[list[Piece]] = [[] for _ in range(parts)]
    part, position = 0, 0
    for box in boxes:
        width, count, start = box.row_bytes, box.rows, 0
        if width == 0 or count == 0:
            shards[part].append(Piece(box, 0, count))
            continue
        while start < count:
            end_of_part = total * (part + 1) // parts
            room = -(-(end_of_part - position) // width)
            if room <= 0 and part < parts - 1:
                part += 1
                continue
            stop = min(count, start + max(room, 1))
            shards[part].append(Piece(box, start, stop))
            position += (stop - start) * width
            start = stop
    return shards
