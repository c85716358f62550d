"""A process of the storage side that a launcher keeps beside its workers: one way to start it, speak to it and end it.

It leaves by itself when the launcher dies, for its standard input is a pipe that closes then.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from ...tiers.format.jsonfile import replace
from ...tiers.format.layout import RunDir


class Helper:
    """One start of `python -m MODULE JOB.json`, in a session of its own; its last words go to the drainer's log."""

    def __init__(self, run: RunDir, module: str, path: Path, job: bytes, start: int, *, says: bool = False) -> None:
        """Start it with `job` in the file `path`; `start` counts the starts from 1. Raises OSError.

        What it `says` on its standard output is for `hear`; else that goes to the log, too.
        """
        replace(path, job)
        with _log(run) as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if says else output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "DTRAIN_ATTEMPT": str(start)},
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def ended(self) -> int | None:
        """With which code it has ended, a signal as a negative number; None while it is there."""
        return self._process.poll()

    def hear(self, timeout_s: float) -> bytes:
        """The first line it says; what came of it after `timeout_s` or when it has ended."""
        assert self._process.stdout is not None
        deadline, line = time.monotonic() + timeout_s, b""
        while not line.endswith(b"\n") and (left := deadline - time.monotonic()) > 0:
            if select.select([self._process.stdout], [], [], left)[0]:
                if not (byte := os.read(self._process.stdout.fileno(), 1)):
                    break
                line += byte
        return line

    def say(self, line: bytes) -> None:
        """Write to it; one that is dead hears nothing, which is seen to elsewhere."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def ends_within(self, timeout_s: float) -> bool:
        """Wait for its end; False when it is still there."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=timeout_s)
        return self._process.returncode is not None

    def kill(self, timeout_s: float) -> None:
        """End it at once; one that is stuck in the kernel stays for a while after `timeout_s`."""
        self._process.kill()
        self.ends_within(timeout_s)

    def end(self, timeout_s: float) -> None:
        """Close what leads to it and have it leave, killed after `timeout_s`."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if not self.ends_within(timeout_s):
            self.kill(timeout_s)
        if self._process.stdout is not None:
            self._process.stdout.close()


def _log(run: RunDir) -> IO[bytes]:
    """Where its last words go; a disk that is full is no reason to do without it."""
    try:
        run.logs.mkdir(exist_ok=True)  # never the folder of a run that was removed
        return run.drainer_log.open("ab")
    except OSError:
        return Path(os.devnull).open("ab")
