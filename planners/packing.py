"""Which pieces of a shard are copied as one: small ones that follow each other are put together before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .sharding.shards import Piece

SMALL_BYTES = 16 * 2**10
"""Pieces below are packed: their bytes are copied faster than Python calls a function for them."""
PACK_BYTES = 2**20
"""A pack is closed when it has grown to this."""


def runs_of(pieces: Sequence[Piece], alike: Sequence[object], packable: Sequence[bool]) -> list[range]:
    """Divide pieces into runs: small ones that follow each other and are alike together, each of the others alone."""
    return list(_runs(pieces, alike, packable))


def items_of(pieces: Sequence[Piece]) -> int:
    """Return how many copies these pieces take; all are taken to lie row by row."""
    return len(runs_of(pieces, [piece.tensor.dtype for piece in pieces], [True] * len(pieces)))


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
