"""Files of lines that several processes append to. A line that cannot be written is counted, and never ends its writer.

The loss of the first line is told at once, to standard error or to whoever `tell_losses` names; how many there were is
told by the first line that can be written again.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from .files import open_plain

READ_BYTES = 32 * 2**20
"""How far from the end a file of lines is read: some hundred thousand lines."""
BLOCK_BYTES = 64 * 2**10
"""Of it at once: some hundred lines."""
_NOTE = "lost-lines-"


class Journal:
    """One file of lines, seen from one process."""

    def __init__(self, path: Path) -> None:
        """Nothing is opened before the first line."""
        self.path = path
        self.lost = 0
        """Lines lost since the last one that was written."""
        self._reason = ""
        self._lock = threading.Lock()

    def append(self, line: bytes) -> str | None:
        """Append one line; never raises OSError. Returns what is to be told of lines that were lost before it."""
        with self._lock:
            try:
                _append(self.path, line + b"\n")
            except OSError as error:
                self._lose(error)
                return None
            lost, self.lost = self.lost, 0
        lines = "1 line was" if lost == 1 else f"{lost} lines were"
        return f"{lines} lost that belong in {self.path.name}: {self._reason}" if lost else None

    def _lose(self, error: OSError) -> None:
        told_before, self._reason = bool(self._reason), error.strerror or str(error)
        self.lost += 1
        if not told_before:
            _told(f"{self.path}: {self._reason}: lines are lost, training goes on")


def _append(path: Path, data: bytes) -> None:
    """In a single write, so that lines of several processes never mix; after half a line a new one is begun."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if info.st_size and os.pread(descriptor, 1, info.st_size - 1) != b"\n":
            data = b"\n" + data
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)


@functools.cache
def journal(path: Path) -> Journal:
    """This process's journal of a file."""
    return Journal(path)


def newest_first(path: Path, max_bytes: int = READ_BYTES) -> Iterator[bytes]:
    """Yield the lines of the last `max_bytes` of a file that has been written whole, the last one first.

    What comes before a line is read only when it is asked for. A missing file has no lines. Raises OSError for what is
    no plain file.
    """
    try:
        descriptor = open_plain(path)
    except FileNotFoundError:
        return
    with os.fdopen(descriptor, "rb") as file:
        position, block, rest = file.seek(0, os.SEEK_END), BLOCK_BYTES, b""
        start = max(0, position - max_bytes)
        while position > start:
            begin = max(start, position - block)
            rest, *lines = (os.pread(descriptor, position - begin, begin) + rest).split(b"\n")
            position = begin
            block = BLOCK_BYTES if lines else 2 * block
            yield from filter(None, reversed(lines))
        if rest and not start:
            yield rest


def _on_stderr(words: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{words}\n")
        sys.stderr.flush()


_told: Callable[[str], None] = _on_stderr


def tell_losses(to: Callable[[str], None]) -> None:
    """Have the loss of lines in this process told to somebody else than standard error."""
    global _told  # noqa: PLW0603  # one for the process, like its standard error
    _told = to


def leave_note(folder: Path, words: str) -> None:
    """Tell the launcher of a loss by a file in `folder`, which lies in memory: the disk may be full."""
    with contextlib.suppress(OSError), (folder / f"{_NOTE}{os.getpid()}").open("a") as file:
        file.write(f"{words}\n")


def take_notes(folder: Path) -> list[str]:
    """What other processes have left in `folder` since the last call."""
    words: list[str] = []
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{_NOTE}*"):
            words += path.read_text(errors="replace").splitlines()
            path.unlink()
    return words
