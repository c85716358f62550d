"""A slot of the memory tier mapped into the worker that fills it."""

from __future__ import annotations

import ctypes
import mmap
import os

from ...tiers.format.layout import Version
from ...tiers.memory.slots import Slot
from .device import PagesError, Side


class SlotError(Exception):
    """A slot cannot be made: tmpfs is full, or a limit forbids the file; the message says which and how much."""


class OpenSlot:
    """A slot mapped into this process, every page touched."""

    def __init__(self, slot: Slot, header: bytes, size: int) -> None:
        """Make the file if it is not there in this form, and map it; raises SlotError."""
        self.slot = slot
        self.version: Version | None = None
        try:
            self._map = _map(slot, header, size)
        except OSError as error:
            raise SlotError(f"{slot.file}: {size:,} bytes for snapshots cannot be had: {error.strerror}") from error
        self.begin = len(header)
        self.locked = False
        self.data = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + self.begin

    def write(self, position: int, data: bytes | memoryview) -> None:
        """Put bytes at `position` of the data."""
        start = self.begin + position
        self._map[start : start + len(data)] = data

    def read(self, begin: int, end: int) -> memoryview:
        """The bytes from `begin` to `end` of the data, as they lie there."""
        return memoryview(self._map)[self.begin + begin : self.begin + end]

    def lock_pages(self, side: Side) -> None:
        """Page-lock the slot for copies from a device; raises SlotError."""
        try:
            side.lock(self.data - self.begin, len(self._map))
        except PagesError as error:
            raise SlotError(
                f"{self.slot.file}: {len(self._map):,} bytes cannot be page-locked for copies from a device: {error}. "
                "This node must have that much memory free, and let this user lock it"
            ) from error
        self.locked = True

    def unlock_pages(self, side: Side) -> None:
        """Let go of the pages, if they are locked, once nothing is copied into them any more; raises PagesError."""
        if self.locked:
            side.unlock(self.data - self.begin)
            self.locked = False


def _map(slot: Slot, header: bytes, size: int) -> mmap.mmap:
    descriptor = os.open(slot.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(descriptor).st_size != size or os.pread(descriptor, len(header), 0) != header:
            slot.invalidate()
            os.ftruncate(descriptor, 0)
            os.posix_fallocate(descriptor, 0, size)  # takes the pages now: a full tmpfs is an error here, no SIGBUS
            os.pwrite(descriptor, header, 0)
        return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)
