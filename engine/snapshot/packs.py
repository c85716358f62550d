"""Small tensors, copied as one: thousands of them would each cost Python's lock more time than their bytes take.

Measured for this (3,000 weights of 64 bytes with what AdamW keeps of each: 12,000 tensors, one core): 0.2 ms to gather
them by one `numpy.take`; 2 ms for one `torch.cat` of them, which works without that lock; 100 ms with a copy, a digest
and a look at the numbers for each. To look whether one of them was written into takes 0.05 to 0.1 µs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...planners.sharding.shards import Piece

TINY_BYTES = 256
"""Pieces that are smaller than this on average are gathered at the step boundary: it takes less than to watch them."""
STRETCH_NUMBERS = 64
"""Neighbours in memory are copied as one where that many numbers are: numpy takes as long to begin a copy."""

Bytes = NDArray[np.uint8]
Addresses = NDArray[np.int64]


class Pack:
    """Small pieces of one dtype that follow each other in the slot, and where they are put together."""

    def __init__(self, sources: Sequence[Tensor]) -> None:
        """Of tensors that lie row by row; those of later on, if one is put in its place, are others."""
        self.sources = [source.view(-1) for source in sources]
        self.together = _room_for(sources)

    def fill(self) -> None:
        """Put them together as they are now."""
        with torch.no_grad():
            torch.cat(self.sources, out=self.together)


class Gathered(Pack):
    """Tiny pieces in host memory, put together without a line of code for each.

    That takes so little time that the training thread does it at the step boundary, and need not be watched.
    """

    def __init__(self, sources: Sequence[Tensor]) -> None:
        """Of tensors that lie row by row in host memory."""
        self.sources = list(sources)  # their memory is read, so it must stay
        self.together = _room_for(sources)
        width = self.together.element_size()
        sizes = np.array([source.numel() * width for source in sources], np.int64)
        held = sizes > 0  # what holds nothing has no address
        starts, sizes = _stretches(np.array([source.data_ptr() for source in sources], np.int64)[held], sizes[held])
        out = self.together.view(torch.uint8).numpy()
        if len(sizes) * STRETCH_NUMBERS * width <= sizes.sum():
            self._gather = _copy_of(starts, sizes, out)
        else:
            self._gather = _take_of(starts, sizes, out.view(f"u{width}"))

    def fill(self) -> None:
        """Put them together as they are now."""
        self._gather()


def _stretches(starts: Addresses, sizes: Addresses) -> tuple[Addresses, Addresses]:
    """Memory that is read in this order: what begins where the one before has ended is one with it."""
    first = np.flatnonzero(np.append(True, starts[1:] != starts[:-1] + sizes[:-1]))
    return starts[first], np.add.reduceat(sizes, first)


def _copy_of(starts: Addresses, sizes: Addresses, out: Bytes) -> Callable[[], None]:
    """A copy of a few stretches."""
    ends = np.cumsum(sizes).tolist()
    pairs = [
        (out[end - size : end], np.frombuffer((ctypes.c_uint8 * size).from_address(start), np.uint8))
        for start, size, end in zip(starts.tolist(), sizes.tolist(), ends, strict=True)
    ]

    def copy() -> None:
        for target, source in pairs:
            target[:] = source

    return copy


def _take_of(starts: Addresses, sizes: Addresses, out: NDArray[Any]) -> Callable[[], None]:
    """A copy of many stretches by one call: every number has its address."""
    width, lowest = out.itemsize, int(starts.min())
    span = int((starts + sizes).max()) - lowest
    memory = np.frombuffer(memoryview((ctypes.c_char * span).from_address(lowest)), out.dtype)
    counts, first = sizes // width, (starts - lowest) // width
    numbers = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())

    def take() -> None:
        memory.take(numbers, out=out, mode="clip")

    return take


def _room_for(sources: Sequence[Tensor]) -> Tensor:
    return torch.empty(sum(map(Tensor.numel, sources)), dtype=sources[0].dtype, device=sources[0].device)


def pack(pieces: Sequence[Piece], tensors: Sequence[Tensor]) -> Pack:
    """Make the pack of some pieces; `tensors` are this rank's parts of theirs, row by row in memory."""
    parts = [_part(piece, tensor) for piece, tensor in zip(pieces, tensors, strict=True)]
    nbytes = sum(piece.nbytes for piece in pieces)
    if 0 < nbytes < TINY_BYTES * len(pieces) and all(map(_is_aligned, parts)):
        return Gathered(parts)
    return Pack(parts)


def _part(piece: Piece, tensor: Tensor) -> Tensor:
    part = tensor.detach()
    if part.dim() and piece.stop - piece.start < part.shape[0]:
        part = part[piece.start : piece.stop]
    return part


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.data_ptr() % tensor.element_size() == 0
