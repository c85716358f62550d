"""How long the parts of a step take: wall clock on the CPU, events on a CUDA stream; how long a thread has work."""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile

import torch

SCHEDSTAT = "/proc/thread-self/schedstat"
"""Of the thread that opens it, in nanoseconds: time on a core, time ready to run without one (Linux, sched-stats)."""


class WorkClock:
    """Seconds of a thread without those in which it was ready and had no core; made and read by that thread.

    Where no core is spare those say what else the machine does, not how fast the thread's work is.
    """

    def __init__(self) -> None:
        """Look for what the kernel tells of this thread; where it tells nothing the clock is the wall's."""
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open(SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)

    def now(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter() - self._without_core_s()

    def _without_core_s(self) -> float:
        if self._file is None:
            return 0.0
        fields = os.pread(self._file, 128, 0).split()
        return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


Timed = tuple[str, torch.cuda.Event, torch.cuda.Event]
"""A part on a CUDA stream, its begin and its end."""


class StepClock:
    """Sums the seconds of named parts over one step."""

    def __init__(self, device: torch.device, unfinished: list[Timed] | None = None) -> None:
        """Measure on `device`. In `unfinished` one step's clock leaves to the next what the device has not come to."""
        self.cuda = device.type == "cuda"
        self.seconds: dict[str, float] = defaultdict(float)
        self._events = unfinished if unfinished is not None else []
        self._started = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of this block to `name`."""
        if self.cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
            return
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Like `part`, but for time that the training thread itself spends, whatever the device."""
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started

    def total(self) -> float:
        """Seconds since the clock was made.

        Of parts on a CUDA stream those count that are over: the thread does not wait for the update under way.
        """
        over = list(takewhile(lambda timed: timed[2].query(), self._events))
        for name, begin, end in over:
            self.seconds[name] += begin.elapsed_time(end) / 1000
        self._events[:] = self._events[len(over) :]
        return time.perf_counter() - self._started
