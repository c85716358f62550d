"""Durable file copies in the kernel, read back while they are written: O_DIRECT where the file system takes it.

Measured for this (0.5 GiB, tmpfs to ext4, two cores): O_DIRECT 1.7 GiB/s at 0.09 s of CPU, sendfile with fsync 1.0
GiB/s at 0.25 s, read and write 0.35 GiB/s at 1.1 s.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import xxhash

from .. import faults
from ..format import files
from ..format.digest import Hasher
from ..format.shardfile import PAGE

CHUNK = 16 * 2**20
NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


def copy_durable(
    source: Path, target: Path, told: Callable[[int], None] | None = None, hasher: Hasher | None = None
) -> str:
    """Copy `source` to the new file `target`, fsync it, and read it back; returns the digest of what was read.

    `hasher` gets all that was read, too: in order, and from the start again after a reset.

    Raises OSError; an unfinished target is removed.
    """
    size = source.stat().st_size
    with files.creating(target) as descriptor, ReadBack(target, hasher) as back:
        if not _copy_direct(source, target, size, back, told):
            with source.open("rb") as file:
                _send(file.fileno(), descriptor, size, target, told)
        content = back.finish(size)
    if content is None:  # only the page cache has it so far: from the disk, now that it is there
        content = digest_uncached(target, None, hasher)
    return content


def _copy_direct(source: Path, target: Path, size: int, back: ReadBack, told: Callable[[int], None] | None) -> bool:
    """Write past the page cache; False when the file system does not take O_DIRECT."""
    if size == 0:
        return True
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in NO_DIRECT:
            return False
        raise
    try:
        with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _write_direct(descriptor, mapped, size, target, back, told)
    finally:
        os.close(descriptor)


def _write_direct(
    descriptor: int, mapped: mmap.mmap, size: int, target: Path, back: ReadBack, told: Callable[[int], None] | None
) -> bool:
    whole = size // PAGE * PAGE
    position = 0
    with memoryview(mapped) as view:
        while position < whole:
            with view[position : min(whole, position + CHUNK)] as chunk:
                faults.operation("disk.write", target, len(chunk))
                try:
                    written = os.pwrite(descriptor, chunk, position)
                except OSError as error:
                    if error.errno == errno.EINVAL and position == 0:
                        return False
                    raise
            written -= written % PAGE  # a short write is gone on with from a page on
            if written == 0:
                raise OSError(errno.EIO, "the disk took no bytes", str(target))
            position += written
            back.written(position)
            if told is not None:
                told(written)
    if whole < size:
        faults.operation("disk.write", target, size - whole)
        with mmap.mmap(-1, PAGE) as block:
            block[: size - whole] = mapped[whole:size]
            os.pwrite(descriptor, block, whole)
        os.ftruncate(descriptor, size)
    return True


def _send(source: int, target: int, size: int, path: Path, told: Callable[[int], None] | None) -> None:
    position = 0
    os.lseek(target, 0, os.SEEK_SET)
    os.ftruncate(target, 0)
    while position < size:
        faults.operation("disk.write", path, min(CHUNK, size - position))
        sent = os.sendfile(target, source, position, min(CHUNK, size - position))
        if sent == 0:
            raise OSError(errno.EIO, "the source file is shorter than it was")
        position += sent
        if told is not None:
            told(sent)


class ReadBack:
    """A thread that reads what was written with O_DIRECT from the device, a chunk behind the writer."""

    def __init__(self, path: Path, hasher: Hasher | None = None) -> None:
        """Read `path`; the thread starts with the first chunk."""
        self.path, self._hasher = path, hasher
        self._ready = 0
        self._size: int | None = None
        self._changed = threading.Condition()
        self._digest: str | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ReadBack:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(-1)

    def written(self, position: int) -> None:
        """All bytes up to `position` are on their way to the device."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="dtrain-read-back", daemon=True)
            self._thread.start()
        with self._changed:
            self._ready = position
            self._changed.notify()

    def finish(self, size: int) -> str | None:
        """The digest of all `size` bytes; None when nothing was written with O_DIRECT."""
        if self._thread is None:
            return None
        self._end(size)
        if self._error is not None:
            raise self._error
        return self._digest

    def _end(self, size: int) -> None:
        with self._changed:
            self._size = size
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _read(self) -> None:
        try:
            faults.operation("disk.read", self.path)
            with _Direct(self.path, self._hasher) as file:
                while (until := self._wait(file.position)) is not None:
                    file.hash_until(until)
                if self._size is not None and self._size >= 0:
                    self._digest = file.hexdigest(self._size)
        except BaseException as error:
            self._error = error

    def _wait(self, position: int) -> int | None:
        """Wait until more is written; None at the end."""
        with self._changed:
            while self._ready <= position and self._size is None:
                self._changed.wait()
            return self._ready if self._ready > position and self._size != -1 else None


class _Direct:
    """A file hashed chunk by chunk with O_DIRECT reads."""

    def __init__(self, path: Path, hasher: Hasher | None = None) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._buffer = mmap.mmap(-1, CHUNK)
        self._hasher = hasher or xxhash.xxh3_128()
        self._hasher.reset()
        self.position = 0

    def __enter__(self) -> _Direct:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
        self._buffer.close()

    def hash_until(self, end: int) -> None:
        """Hash up to byte `end`."""
        while self.position < end:
            with memoryview(self._buffer)[: min(CHUNK, -(-(end - self.position) // PAGE) * PAGE)] as block:
                got = min(os.preadv(self._descriptor, [block], self.position), end - self.position)
                if got <= 0:
                    raise OSError(errno.EIO, "the file is shorter than what was written")
                with block[:got] as part:
                    self._hasher.update(part)
            self.position += got

    def hexdigest(self, size: int) -> str:
        """The digest of the first `size` bytes."""
        self.hash_until(size)
        return self._hasher.hexdigest()


def digest_uncached(path: Path, told: Callable[[int], None] | None = None, hasher: Hasher | None = None) -> str:
    """xxh3-128 of a file as the device holds it; through the page cache (emptied before) where O_DIRECT is refused."""
    faults.operation("disk.read", path)
    size = path.stat().st_size
    try:
        with _Direct(path, hasher) as file:
            while file.position < size:
                before = file.position
                file.hash_until(min(size, before + CHUNK))
                if told is not None:
                    told(file.position - before)
            return file.hexdigest(size)
    except OSError as error:
        if error.errno not in NO_DIRECT:
            raise
    return _digest_cached(path, told, hasher)


def _digest_cached(path: Path, told: Callable[[int], None] | None, hasher: Hasher | None) -> str:
    hasher = hasher or xxhash.xxh3_128()
    hasher.reset()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = bytearray(CHUNK)
        while got := file.readinto(buffer):
            with memoryview(buffer)[:got] as part:
                hasher.update(part)
            if told is not None:
                told(got)
    return hasher.hexdigest()
