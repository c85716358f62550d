"""The output of a worker: a log whose disk is full loses lines, and the code that prints them goes on."""

from __future__ import annotations

import io
import sys


class _Lossy(io.FileIO):
    """A stream that takes everything, whether it can be kept or not."""

    def write(self, data: object, /) -> int:
        """Write what can be written; all of it counts as written."""
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError:
            return memoryview(data).nbytes  # type: ignore[arg-type]


def keep_going_without_log() -> None:
    """Replace standard output and error, so that neither people's code nor a library dies of a print."""
    sys.stdout, sys.stderr = _stream(1), _stream(2)


def _stream(descriptor: int) -> io.TextIOWrapper:
    raw = io.BufferedWriter(_Lossy(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
