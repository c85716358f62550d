"""Small tensors, copied as one: thousands of them would each cost Python's lock more time than their bytes take.

Measured for this (3,000 weights of 64 bytes with what AdamW keeps of each: 12,000 tensors, one core): 0.2 ms to gather
them by one `numpy.take`; 2 ms for one `torch.cat` of them, which works without that lock; 100 ms with a copy, a digest
and a look at the numbers for each. To look whether one of them was written into takes 0.05 to 0.1 µs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..planners.shards import Piece

TINY_BYTES = 256
"""Pieces that are smaller than this on average are gathered at the step boundary: it takes less than to watch them."""


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
    """Tiny pieces in host memory, put together without a line of code for each: every number has its address.

    That takes so little time that the training thread does it at the step boundary, and need not be watched.
    """

    def __init__(self, sources: Sequence[Tensor]) -> None:
        """Of tensors that lie row by row in host memory."""
        self.sources = list(sources)  # their memory is read, so it must stay
        self.together = _room_for(sources)
        width = self.together.element_size()
        addresses = np.array([source.data_ptr() for source in sources], np.int64)
        counts = np.array([source.numel() for source in sources], np.int64)
        lowest = int(addresses[counts > 0].min())  # what holds nothing has no address
        span = int((addresses + counts * width).max()) - lowest
        unsigned = np.dtype(f"u{width}")
        self._memory = np.frombuffer(memoryview((ctypes.c_char * span).from_address(lowest)), unsigned)
        first = (addresses - lowest) // width
        self._numbers = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        self._out = self.together.view(torch.uint8).numpy().view(unsigned)

    def fill(self) -> None:
        """Put them together as they are now."""
        self._memory.take(self._numbers, out=self._out, mode="clip")


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
