"""Every change that a tier makes to a file system, one function and one name each, so that a fault can be aimed at it.

Nothing here tries again: after a failed fsync the kernel may have dropped the dirty pages and the next one may
succeed without them (Rebello et al., USENIX ATC 2020), so whoever gets an error throws the file away.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .. import faults

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_STAGED = re.compile(r"\.(.+)\.new\d*")
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def make_dir(path: Path) -> None:
    """Make a folder that may be there already; its parents must exist. A link in its place is refused."""
    if path.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "is a link", str(path))
    if not path.is_dir():
        faults.operation("disk.mkdir", path)
        path.mkdir(exist_ok=True)


def make_dirs(path: Path) -> None:
    """Make a folder with all that is missing above it, every name durable."""
    if not path.is_dir():
        make_dirs(path.parent)
        faults.operation("disk.mkdir", path)
        path.mkdir(exist_ok=True)
        sync_dir(path.parent)


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
        with contextlib.suppress(OSError):
            unlink(path)
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


def write_staged(path: Path, data: bytes) -> Path:
    """Write the file that is to become `path` under a name of its own beside it, durably; returns that name.

    A name that is taken was left by a writer that died, or another one is at it: both are left alone.
    """
    for number in itertools.count():
        staged = path.with_name(f".{path.name}.new{number or ''}")
        try:
            write_new(staged, data)
        except FileExistsError:
            continue
        return staged
    raise AssertionError


def final_name(name: str) -> str:
    """The name that a staged file is to get; any other name stays as it is."""
    match = _STAGED.fullmatch(name)
    return match[1] if match else name


def publish(staged: Path, path: Path) -> None:
    """Give a staged file its name, which must be free: of two who try at once, one gets FileExistsError.

    Where there are no hard links the look and the change are two; nothing else that is there everywhere excludes.
    """
    faults.operation("disk.link", staged, str(path))
    try:
        os.link(staged, path, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        rename(staged, path)
    else:
        unlink(staged)


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
        raise FileExistsError(errno.EEXIST, "exists already", str(new))
    faults.operation("disk.rename", path, str(new))
    path.rename(new)


def unlink(path: Path) -> None:
    """Delete a file; one that is gone already is no error."""
    faults.operation("disk.unlink", path)
    path.unlink(missing_ok=True)


def remove_dir(path: Path) -> None:
    """Delete a folder unless something is in it; one that is gone already is no error."""
    faults.operation("disk.rmdir", path)
    try:
        path.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise


def open_plain(path: Path) -> int:
    """Open a regular file for reading; links, pipes, sockets, devices and folders are refused without waiting."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_plain(path: Path, max_bytes: int) -> bytes:
    """A regular file whole; whatever else has this name, and one that is larger, is refused. Raises OSError."""
    with os.fdopen(open_plain(path), "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", str(path))
    return data
