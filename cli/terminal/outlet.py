"""Standard output and error of the command, whatever is behind them: a closed pipe, a full disk, or nothing at all.

A pipe that nobody reads any more ends the command as it ends any other (SIGPIPE, 141 to a shell), a disk that is full
with one line and code 69. A stream that was closed beforehand is one that nobody wants to read. A run goes on without
its output, and its own code comes first.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, TextIO

from ...specs.codes import Code


class OutputLost(Exception):
    """Standard output takes no more; no OSError, for nothing is wrong with what the command works on."""


class _Outlet(io.FileIO):
    """A stream that fails once at most: what follows is swallowed."""

    failure: OSError | None = None

    def __init__(self, descriptor: int, *, keeps_on: bool) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.keeps_on = keeps_on

    def write(self, data: object, /) -> int:
        if self.failure is None:
            try:
                return super().write(data)  # type: ignore[arg-type]
            except OSError as error:
                self.failure = error
                if not self.keeps_on:
                    raise OutputLost from error
        return memoryview(data).nbytes  # type: ignore[arg-type]


@contextmanager
def told() -> Iterator[None]:
    """Do a command's work with streams that fail in good order, then end the process with its code."""
    _fill_gaps()
    out, error = _Outlet(1, keeps_on=False), _Outlet(2, keeps_on=True)
    sys.stdout, sys.stderr = _text(out, sys.stdout), _text(error, sys.stderr)
    code: object = Code.DONE
    try:
        yield
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        code = Code.INTERRUPTED
    except OutputLost:
        pass
    with contextlib.suppress(OutputLost):
        sys.stdout.flush()
    _leave(_code_for(out, code))


def _leave(code: int) -> NoReturn:
    """Exit; without taking torch apart, module by module, where it was used: 0.3 s. Files are closed by now."""
    if "torch" not in sys.modules:
        sys.exit(code)
    sys.stderr.flush()
    os._exit(code)


def keep_going_without_output() -> None:
    """What is under way is worth more than its output: a stream that fails is no reason to stop it."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, _Outlet):
        raw.keeps_on = True


def _code_for(out: _Outlet, code: object) -> int:
    code = code if isinstance(code, int) else Code.DONE if code is None else Code.BUG
    if out.failure is None:
        return code
    if out.failure.errno != errno.EPIPE:
        sys.stderr.write(f"standard output: {out.failure.strerror}: the answer is lost\n")
        return code or Code.MISSING_RESOURCE
    if not out.keeps_on:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
    return code


def _fill_gaps() -> None:
    """A standard stream that is closed leaves its number to the next file that is opened, and output would go there."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _text(raw: _Outlet, before: TextIO | None) -> TextIO:
    """Names of files may be no text at all: they are shown escaped."""
    encoding = getattr(before, "encoding", None) or "utf-8"
    lines = raw.fileno() == 2 or raw.isatty()
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=lines)
