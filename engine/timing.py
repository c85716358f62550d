"""How long the parts of a step take: wall clock on the CPU, events on a CUDA stream."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepClock:
    """Sums the seconds of named parts over one step."""

    def __init__(self, device: torch.device) -> None:
        """Measure on `device`."""
        self.cuda = device.type == "cuda"
        self.seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
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
        """Seconds since the clock was made; resolves the events of a CUDA stream."""
        for name, begin, end in self._events:
            end.synchronize()
            self.seconds[name] += begin.elapsed_time(end) / 1000
        self._events.clear()
        return time.perf_counter() - self._started
