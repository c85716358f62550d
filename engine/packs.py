"""Small tensors, copied as one: thousands of them would each cost Python's lock more time than their bytes take.

Measured for this (12,000 tensors of 4 to 64 bytes, one core): 2 ms for one `torch.cat` of them, which works without
that lock; 100 ms with a copy, a digest and a look at the numbers for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..planners.shards import Piece

SMALL_BYTES = 16 * 2**10
"""Pieces below are packed: their bytes are copied faster than Python calls a function for them."""
PACK_BYTES = 2**20
"""A pack is closed when it has grown to this."""


@dataclass(frozen=True)
class Pack:
    """Small pieces of one dtype that follow each other in the slot, and where they are put together."""

    sources: list[Tensor]
    """Their elements, each as one row; views of the live tensors."""
    together: Tensor

    def fill(self) -> None:
        """Put them together as they are now."""
        with torch.no_grad():
            torch.cat(self.sources, out=self.together)


def runs_of(pieces: Sequence[Piece], alike: Sequence[object], packable: Sequence[bool]) -> list[range]:
    """Divide pieces into runs: small ones that follow each other and are alike together, each of the others alone."""
    return list(_runs(pieces, alike, packable))


def _runs(pieces: Sequence[Piece], alike: Sequence[object], packable: Sequence[bool]) -> Iterator[range]:
    begin, nbytes = 0, 0
    for number, piece in enumerate(pieces):
        small = packable[number] and piece.nbytes < SMALL_BYTES
        joins = small and number > begin and packable[begin] and pieces[begin].nbytes < SMALL_BYTES
        if number > begin and not (joins and alike[number] == alike[begin] and nbytes < PACK_BYTES):
            yield range(begin, number)
            begin, nbytes = number, 0
        nbytes += piece.nbytes
    if pieces:
        yield range(begin, len(pieces))


def pack(pieces: Sequence[Piece], tensors: Sequence[Tensor]) -> Pack:
    """Make the pack of some pieces; `tensors` are this rank's parts of theirs, row by row in memory."""
    sources = [_row(piece, tensor) for piece, tensor in zip(pieces, tensors, strict=True)]
    together = torch.empty(sum(map(torch.Tensor.numel, sources)), dtype=sources[0].dtype, device=sources[0].device)
    return Pack(sources, together)


def _row(piece: Piece, tensor: Tensor) -> Tensor:
    part = tensor.detach()
    if part.dim() and piece.stop - piece.start < part.shape[0]:
        part = part[piece.start : piece.stop]
    return part.view(-1)
