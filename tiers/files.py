"""Every change that a tier makes to a file system, one function and one name each, so that a fault can be aimed at it.

Nothing here tries again: after a failed fsync the kernel may have dropped the dirty pages and the next one may
succeed without them (Rebello et al., USENIX ATC 2020), so whoever gets an error throws the file away.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import faults

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def make_dir(path: Path) -> None:
    """Make a folder that may be there already; its parents must exist."""
    if not path.is_dir():
        faults.operation("disk.mkdir", path)
        path.mkdir(exist_ok=True)


@contextmanager
def creating(path: Path) -> Iterator[int]:
    """Create a file that must not exist, make it durable at the end; removed again when anything fails."""
    faults.operation("disk.create", path)
    descriptor = os.open(path, _NEW, 0o666)
    try:
        yield descriptor
        sync(descriptor, path)
    except BaseException:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise
    os.close(descriptor)


def write(descriptor: int, data: bytes, path: Path) -> None:
    """Write all bytes at the file's position."""
    faults.operation("disk.write", path, len(data))
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_new(path: Path, data: bytes) -> None:
    """Write a small file that must not exist yet, durably."""
    with creating(path) as descriptor:
        write(descriptor, data, path)


def sync(descriptor: int, path: Path) -> None:
    """Make a file's content durable."""
    faults.operation("disk.sync", path)
    os.fsync(descriptor)


def sync_dir(path: Path) -> None:
    """Make the names in a folder durable."""
    faults.operation("disk.sync_dir", path)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(path: Path, new: Path) -> None:
    """Give a file or folder a name that nothing has; the check is for people's folders, not against races."""
    if new.exists() or new.is_symlink():
        raise FileExistsError(17, "exists already", str(new))
    faults.operation("disk.rename", path, str(new))
    path.rename(new)


def unlink(path: Path) -> None:
    """Delete a file; one that is gone already is no error."""
    faults.operation("disk.unlink", path)
    path.unlink(missing_ok=True)


def remove_dir(path: Path) -> None:
    """Delete an empty folder."""
    faults.operation("disk.rmdir", path)
    path.rmdir()
