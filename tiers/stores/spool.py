"""Copies of remote files in a folder of this machine, made once for all processes that read them at the same time.

A lock file beside each copy (flock(2), so a killed process lets go) is held shared by readers and alone by whoever
makes or removes the copy. A copy that nobody holds was left by somebody who was killed: it is never trusted but made
anew. The last reader takes the copy and the lock file away. Any of these files may vanish at any time (a new start
of the run clears the folder): who holds a lock on a file that has no name any more begins again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

Fetch = Callable[[BinaryIO], None]
"""Writes the content into a file; raises OSError."""


@contextmanager
def shared_copy(folder: Path, name: str, fetch: Fetch) -> Iterator[Path]:
    """The copy called `name`, made by `fetch` unless another process has it at hand. Raises OSError."""
    copy, lock = folder / name, folder / f"{name}.lock"
    descriptor = _hold(copy, lock, fetch)
    try:
        yield copy
    finally:
        _let_go(descriptor, copy, lock)


def _hold(copy: Path, lock: Path, fetch: Fetch) -> int:
    """Return a descriptor that holds the lock shared, with the copy there."""
    while True:
        with contextlib.suppress(FileNotFoundError):  # the folder went before the lock file was in it
            _make_folder(copy.parent)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if _try_alone(descriptor) and _has_name(descriptor, lock):
                    _make(copy, lock, fetch)
                # taking the lock shared may let another process in first, so what it found has to be looked at again
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                if _has_name(descriptor, lock) and copy.exists():
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)


def _make_folder(folder: Path) -> None:
    """Make the folder, which others may make and remove meanwhile. Raises OSError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # it was there, and gone before anybody could see that it was a folder
        with contextlib.suppress(FileNotFoundError):  # one look: between two it may go and come again
            if not stat.S_ISDIR(folder.stat().st_mode):
                raise


def _make(copy: Path, lock: Path, fetch: Fetch) -> None:
    """Fetch the content anew; what is there is a leftover."""
    copy.unlink(missing_ok=True)
    part = copy.with_name(f"{copy.name}.part")
    part.unlink(missing_ok=True)
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            fetch(file)
        part.rename(copy)
    except BaseException as error:
        for left in (part, lock):
            left.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            copy.parent.rmdir()
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise OSError(error.errno, error.strerror, str(copy)) from error
        raise


def _let_go(descriptor: int, copy: Path, lock: Path) -> None:
    """Take the copy away unless somebody else reads it."""
    try:
        if _try_alone(descriptor) and _has_name(descriptor, lock):
            copy.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty, or gone
                copy.parent.rmdir()
    finally:
        os.close(descriptor)


def _try_alone(descriptor: int) -> bool:
    """Take the lock alone if nobody else has it; on False a lock that was held shared is lost."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _has_name(descriptor: int, path: Path) -> bool:
    """Tell whether the open file is still the one of this name."""
    try:
        there = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)
