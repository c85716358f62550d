"""A shard as a safetensors file whose data begins on a page, so that it can be copied and mapped as it is.

Layout: 8 bytes length, JSON header padded with blanks up to a page, then the tensors without gaps. The header's
`__metadata__` carries what safetensors has no place for: rank, world, and in `boxes` per piece its offset in the
tensor, one number per dimension, and the tensor's global shape. The header of a run's shard is the same for every step.

Files that were written before tensors could be cut in any dimension have `rows` there, with the first row only.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...specs.dtypes import DTYPE_BYTES
from .boxes import inside
from .digest import digest
from .files import open_plain
from .jsonfile import Unreadable

PAGE = 4096
MAX_HEADER = 100_000_000
"""Most bytes of a header that the safetensors library reads."""
RNG_PREFIX = "rng."
_MAX_DIMENSIONS = 64


class TooManyTensors(ValueError):
    """The table of a shard's tensors would be longer than readers take."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored piece: the box of `shape` from `offset` on of a tensor of shape `global_shape`, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]
    nbytes: int

    @property
    def begin(self) -> int:
        """First byte, in the row-major bytes of the whole tensor, of the row in which the piece begins."""
        row_bytes = math.prod(self.global_shape[1:]) * DTYPE_BYTES[self.dtype]
        return self.offset[0] * row_bytes if self.offset else 0

    @property
    def is_state(self) -> bool:
        """Model or optimizer, as against a rank's own random state."""
        return not self.name.startswith(RNG_PREFIX)


@dataclass(frozen=True, slots=True)
class Shard:
    """Header of a shard file: which entries lie where."""

    rank: int
    world: int
    run_id: str
    entries: tuple[Entry, ...]

    def offsets(self) -> list[int]:
        """Byte offset of each entry in the data."""
        offsets, position = [], 0
        for entry in self.entries:
            offsets.append(position)
            position += entry.nbytes
        return offsets

    @property
    def data_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.nbytes for entry in self.entries)

    def header(self) -> bytes:
        """The file's first bytes, a whole number of pages."""
        boxes = {entry.name: [list(entry.offset), list(entry.global_shape)] for entry in self.entries}
        metadata = {"dtrain": "1", "rank": str(self.rank), "world": str(self.world), "run_id": self.run_id}
        table: dict[str, Any] = {"__metadata__": {**metadata, "boxes": json.dumps(boxes, separators=(",", ":"))}}
        for entry, offset in zip(self.entries, self.offsets(), strict=True):
            table[entry.name] = {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "data_offsets": [offset, offset + entry.nbytes],
            }
        text = json.dumps(table, separators=(",", ":")).encode()
        text = text.ljust(-(-(len(text) + 8) // PAGE) * PAGE - 8)
        if len(text) > MAX_HEADER:
            raise TooManyTensors(
                f"{len(self.entries)} tensors on rank {self.rank} make a header of {len(text) / 1e6:.1f} MB, and "
                f"readers take {MAX_HEADER / 1e6:g} MB at most: put small tensors together in larger ones, give them "
                "shorter names, or divide them among more ranks"
            )
        return len(text).to_bytes(8, "little") + text


def parse_header(text: bytes, where: str) -> Shard:
    """Read a header's JSON; raises Unreadable when it is not one of ours."""
    try:
        table = json.loads(text)
        metadata = table.pop("__metadata__")
        boxes = _boxes(metadata)
        ordered = sorted(table.items(), key=lambda item: tuple(item[1]["data_offsets"]))
        entries: list[Entry] = []
        position = 0
        for name, info in ordered:
            entries.append(_entry(name, info, boxes[name], position))
            position += entries[-1].nbytes
        return Shard(int(metadata["rank"]), int(metadata["world"]), str(metadata["run_id"]), tuple(entries))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(f"{where}: damaged header ({error})") from error


def _boxes(metadata: dict[str, Any]) -> dict[str, list[Any]]:
    """Tensor name → offset and global shape of its piece."""
    if "boxes" in metadata:
        boxes: dict[str, list[Any]] = json.loads(metadata["boxes"])
        return boxes
    rows = json.loads(metadata["rows"])
    return {name: [[start, *[0] * (len(whole) - 1)] if whole else [], whole] for name, (start, whole) in rows.items()}


def _entry(name: str, info: dict[str, Any], box: list[Any], position: int) -> Entry:
    begin, end = info["data_offsets"]
    if type(begin) is not int or type(end) is not int or begin != position or end < begin:
        raise ValueError(f"tensor {name!r} does not follow the one before")
    offset, shape, global_shape = (_shape(name, sizes) for sizes in (box[0], info["shape"], box[1]))
    if not inside(global_shape, (offset, shape)):
        raise ValueError(f"tensor {name!r} is no part of {list(global_shape)}")
    if end - begin != math.prod(shape) * DTYPE_BYTES[info["dtype"]]:
        raise ValueError(f"tensor {name!r} has {end - begin} bytes for shape {info['shape']}")
    return Entry(name, info["dtype"], shape, offset, global_shape, end - begin)


def _shape(name: str, sizes: object) -> tuple[int, ...]:
    if not isinstance(sizes, list) or len(sizes) > _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has no shape")
    if not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
        raise ValueError(f"tensor {name!r} has sizes that are none")
    return tuple(sizes)


@contextlib.contextmanager
def mapped(path: Path, begin: int, nbytes: int) -> Iterator[memoryview]:
    """Map `nbytes` of a file, one at least, from byte `begin` on. Raises Unreadable when they are not there."""
    page = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        descriptor = open_plain(path)
        with os.fdopen(descriptor, "rb"):
            window = mmap.mmap(descriptor, begin - page + nbytes, access=mmap.ACCESS_READ, offset=page)
    except (OSError, ValueError) as error:
        raise Unreadable(f"{path}: {error}") from error
    with window, memoryview(window) as view, view[begin - page :] as data:
        yield data


class ShardReader:
    """A shard file mapped for reading. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Map `path`; raises Unreadable when it is missing, cut or damaged in its header."""
        self.path = path
        try:
            descriptor = open_plain(path)
            with os.fdopen(descriptor, "rb"):
                self._map = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise Unreadable(f"{path}: {error}") from error
        length = int.from_bytes(self._map[:8], "little")
        if length > min(MAX_HEADER, len(self._map) - 8):
            self._map.close()
            raise Unreadable(f"{path}: the header is longer than the file")
        try:
            self.shard = parse_header(self._map[8 : 8 + length], str(path))
            if 8 + length + self.shard.data_bytes != len(self._map):
                raise Unreadable(f"{path}: {len(self._map)} bytes, should be {8 + length + self.shard.data_bytes}")
        except Unreadable:
            self._map.close()
            raise
        self.data_start = 8 + length
        self._view = memoryview(self._map)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file."""
        self._view.release()
        self._map.close()

    def head(self) -> memoryview:
        """The header with its length; release the view before closing."""
        return self._view[: self.data_start]

    def all(self) -> memoryview:
        """The whole file; release the view before closing."""
        return self._view[:]

    @property
    def header_digest(self) -> str:
        """Digest of the header with its length."""
        with self.head() as head:
            return digest(head)

    def all_data(self) -> Iterator[memoryview]:
        """Bytes of every entry in order; release each view before closing."""
        offsets = self.shard.offsets()
        return (self.data(index, offsets) for index in range(len(offsets)))

    def together(self, run: range, offsets: Sequence[int]) -> memoryview:
        """Bytes of entries that follow each other; release the view before closing."""
        last = run.stop - 1
        start, end = offsets[run.start], offsets[last] + self.shard.entries[last].nbytes
        return self._view[self.data_start + start : self.data_start + end]

    def data(self, index: int, offsets: Sequence[int]) -> memoryview:
        """Bytes of entry `index`; release the view before closing."""
        begin = self.data_start + offsets[index]
        return self._view[begin : begin + self.shard.entries[index].nbytes]
