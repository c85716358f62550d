"""Digests: xxh3-128 of bytes, and the one hash of a whole state."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path

import xxhash

from .jsonfile import dumps

CHUNK = 8 * 2**20


def digest(data: bytes | bytearray | memoryview) -> str:
    """xxh3-128 of some bytes, as hex."""
    return xxhash.xxh3_128_hexdigest(data)


def file_digest(path: Path) -> str:
    """xxh3-128 of a whole file, as hex."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return hasher.hexdigest()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            for start in range(0, len(view), CHUNK):
                with view[start : start + CHUNK] as chunk:
                    hasher.update(chunk)
    return hasher.hexdigest()


def state_digest(tensors: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    """One hash over (name, dtype, global shape, digest of the row-major bytes), whatever their order.

    It does not depend on how the tensors were divided among ranks, so it is the same for every world size.
    """
    hasher = xxhash.xxh3_128()
    for name, dtype, shape, content in sorted(tensors):
        hasher.update(dumps([name, dtype, list(shape), content]))
    return hasher.hexdigest()
