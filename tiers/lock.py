"""Locks that the kernel drops with their holder: one process drives a run, one drains it."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path
from types import TracebackType

from .format.jsonfile import Unreadable, dumps, read

NAMING_S = 0.5
"""Longest wait for a holder to write its name; one on another host, over a shared disk, is not looked up."""


class Locked(Exception):
    """Somebody else holds the lock; the message names them."""


class FileLock:
    """An exclusive lock on a file that tells who holds it. Use as a context manager."""

    def __init__(self, path: Path, timeout_s: float = 0.0) -> None:
        """Lock `path` within `timeout_s` seconds when entered."""
        self.path = path
        self.timeout_s = timeout_s
        self._descriptor = -1

    def __enter__(self) -> FileLock:
        deadline = time.monotonic() + self.timeout_s
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() >= deadline:
                    os.close(descriptor)
                    raise Locked(f"{self.path} is held by {self._holder_of_now()}") from error
                time.sleep(0.05)
        self._descriptor = descriptor
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        text = dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": started})
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text, 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def _holder_of_now(self) -> str:
        """The holder, once it has written its name: until then the file names nobody, or one who has died."""
        deadline = time.monotonic() + NAMING_S
        while time.monotonic() < deadline:
            pid = self.holder_pid()
            if pid is not None and Path(f"/proc/{pid}").exists():
                break
            time.sleep(0.01)
        return self.holder()

    def holder(self) -> str:
        """Who wrote into the lock file last."""
        try:
            info = read(self.path)
        except Unreadable:
            return "another process"
        return f"process {info.get('pid')} on {info.get('host')} since {info.get('started')}"

    def holder_pid(self) -> int | None:
        """Process id of the holder, if the file tells."""
        try:
            pid = read(self.path).get("pid")
        except Unreadable:
            return None
        return pid if isinstance(pid, int) else None


class FolderLock:
    """An exclusive or shared lock on a folder itself, which leaves no file in it. Use as a context manager."""

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        """Lock the folder `path` when entered, or raise Locked at once."""
        self.path, self.shared = path, shared
        self._descriptor = -1

    def __enter__(self) -> FolderLock:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if self.shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise Locked(f"{self.path} is in use by another run") from error
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)
