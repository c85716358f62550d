"""The state as stretches of bytes, each tensor's in row-major order, whatever the boxes in which it is stored.

Where every rank holds whole rows and its file follows the one before, files are read one after the other. Where it is
not so (a tensor cut by columns, a piece divided among replicas), it goes tensor by tensor, and within it band by band:
the pieces of a band together make up whole rows, and are put together in memory unless there is one only. A file is
then kept from its first piece to its last, which for a remote one is a copy in the spool; only the bytes of one piece
are mapped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ...specs.dtypes import DTYPE_BYTES
from ..format.digest import digest
from ..format.jsonfile import Unreadable
from ..format.shardfile import Entry, mapped
from ..stores.store import Progress
from .recovery import Opened, Source, checked, contents, local, verified

Piece = tuple[int, Entry]
"""Number of the file, and what lies in it."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Verified bytes of a tensor from byte `begin` of its row-major bytes; valid until the next one is asked for."""

    name: str
    begin: int
    data: memoryview


def stretches(opened: Opened, told: Progress) -> Iterator[Stretch]:
    """All bytes of the state, each tensor's from first to last; random states are checked on the way.

    The pieces must be known to make up the tensors. Raises Unreadable at the first that is not what it should be.
    """
    return _by_file(opened, told) if _in_order(opened.sources) else _by_tensor(opened.sources, told)


def _in_order(sources: Sequence[Source]) -> bool:
    """Tell whether every piece is whole rows that follow those in the files before.

    Of boxes that make up a tensor, only whole rows begin one where the one before ends: those beside each other in one
    row begin at the same byte.
    """
    done: dict[str, int] = {}
    for source in sources:
        for entry in source.entries:
            if entry.is_state and entry.nbytes:
                if entry.begin != done.get(entry.name, 0):
                    return False
                done[entry.name] = entry.begin + entry.nbytes
    return True


def _by_file(opened: Opened, told: Progress) -> Iterator[Stretch]:
    done: dict[str, int] = {}
    for content in contents(opened):
        told(len(content.data))
        if content.is_state:
            begin = done.get(content.name, 0)
            done[content.name] = begin + len(content.data)
            yield Stretch(content.name, begin, content.data)


def _by_tensor(sources: Sequence[Source], told: Progress) -> Iterator[Stretch]:
    pieces: dict[str, list[Piece]] = {}
    for number, source in enumerate(sources):
        for entry in source.entries:
            if entry.is_state and entry.nbytes:
                pieces.setdefault(entry.name, []).append((number, entry))
    # tensors of the same files together, so that these can be let go before others are opened
    order = sorted(pieces, key=lambda name: (pieces[name][0][0], pieces[name][-1][0], name))
    with _Files(sources, told) as files:
        for name in order:
            for band in _bands(pieces[name]):
                with files.read(*band[0]) if len(band) == 1 else _assembled(band, files) as data:
                    yield Stretch(name, band[0][1].begin, data)
        files.check_others()


def _bands(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Split the pieces of a tensor into runs that are whole rows together, the first rows first."""
    band: list[Piece] = []
    end = 0
    for number, entry in sorted(pieces, key=lambda piece: piece[1].offset):
        if band and entry.offset[0] >= end:
            yield band
            band = []
        band.append((number, entry))
        end = max(end, entry.offset[0] + entry.shape[0]) if entry.shape else 0
    yield band


@contextlib.contextmanager
def _assembled(band: Sequence[Piece], files: _Files) -> Iterator[memoryview]:
    """The bytes of a band of several pieces."""
    import numpy as np  # takes a while, and most commands never get here

    (_, some), first = band[0], band[0][1].offset[0]
    end = max(entry.offset[0] + entry.shape[0] for _, entry in band)
    width = DTYPE_BYTES[some.dtype]
    rows = np.empty((end - first, *some.global_shape[1:], width), np.uint8)
    for number, entry in band:
        corner = (entry.offset[0] - first, *entry.offset[1:])
        place = tuple(slice(at, at + size) for at, size in zip(corner, entry.shape, strict=True))
        with files.read(number, entry) as data:
            rows[place] = np.frombuffer(data, np.uint8).reshape(*entry.shape, width)
    with rows.reshape(-1).data as view:
        yield view


@dataclass(frozen=True)
class _Kept:
    """A file at hand: its path, where each entry begins, and what lets it go."""

    path: Path
    begins: dict[str, int]
    held: ExitStack


class _Files:
    """Files that are needed a piece at a time, each from its first piece to its last. A context manager."""

    def __init__(self, sources: Sequence[Source], told: Progress) -> None:
        self._sources, self._told = sources, told
        self._left = [sum(1 for e in source.entries if e.is_state and e.nbytes) for source in sources]
        self._kept: dict[int, _Kept] = {}
        self._unseen = set(range(len(sources)))

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self._kept):
            self._kept.pop(number).held.close()

    @contextlib.contextmanager
    def read(self, number: int, entry: Entry) -> Iterator[memoryview]:
        """The bytes of a piece, verified. Raises Unreadable."""
        if number not in self._kept:
            self._kept[number] = self._open(number)
        kept, source = self._kept[number], self._sources[number]
        with mapped(kept.path, kept.begins[entry.name], entry.nbytes) as data:
            if digest(data) != source.digests[entry.name]:
                raise Unreadable(f"{source.where}: {entry.name} does not match its digest")
            self._told(entry.nbytes)
            yield data
        self._left[number] -= 1
        if not self._left[number]:
            self._kept.pop(number).held.close()

    def check_others(self) -> None:
        """Check the files that hold nothing but a random state. Raises Unreadable."""
        for number in sorted(self._unseen):
            self._open(number).held.close()

    def _open(self, number: int) -> _Kept:
        """Have a file at hand, its header and random state checked."""
        source = self._sources[number]
        self._unseen.discard(number)
        with ExitStack() as stack:
            path = stack.enter_context(local(source))
            with checked(source, path) as reader:
                offsets, entries = reader.shard.offsets(), reader.shard.entries
                for index, entry in enumerate(entries):
                    if not entry.is_state:
                        verified(source, reader, index, offsets).release()
                        self._told(entry.nbytes)
                begins = {e.name: reader.data_start + offset for e, offset in zip(entries, offsets, strict=True)}
            held = stack.pop_all()
        return _Kept(path, begins, held)
