"""Does a rank that says nothing do anything? Asked before its first step, when there are no passes to count.

A large model is read, data are counted, kernels are compiled for minutes without a word. All that takes time of a
processor or moves bytes, in the worker or in a process that it has started; one that waits for what never comes does
neither.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

MIN_SHARE = 0.01
"""Of a core: threads that look now and then whether there is something to do take less."""
MIN_CPU_S = 0.05
"""A few ticks of the kernel's clock say nothing."""
MIN_BYTES = 2**20
EVERY_S = 0.5
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Use:
    """What the processes of a worker have used so far."""

    cpu_s: float = 0.0
    nbytes: int = 0


@dataclass
class _Known:
    """What one worker had used when it was last seen to do something, and how often that was."""

    use: Use
    at: float
    looked: float
    signs: int = 0


class Activity:
    """Counts, for each worker of this node, how often it was seen to do something."""

    def __init__(self) -> None:
        """Nobody has been looked at."""
        self._known: dict[int, _Known] = {}

    def signs(self, pid: int, now: float) -> int:
        """How often the process group of `pid` was seen to do something; looks at it at most twice a second.

        `now`: monotonic, s.
        """
        known = self._known.get(pid)
        if known is None:
            self._known[pid] = _Known(use_of(pid), now, now)
            return 0
        if now - known.looked >= EVERY_S:
            known.looked, use = now, use_of(pid)
            cpu_s, nbytes = use.cpu_s - known.use.cpu_s, use.nbytes - known.use.nbytes
            if cpu_s >= max(MIN_CPU_S, MIN_SHARE * (now - known.at)) or nbytes >= MIN_BYTES or min(cpu_s, nbytes) < 0:
                known.use, known.at, known.signs = use, now, known.signs + 1
        return known.signs


def use_of(group: int) -> Use:
    """What the processes of a process group have used, those that have ended meanwhile left out (proc(5))."""
    cpu_s, nbytes = 0.0, 0
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) != group:
                continue
            cpu_s += (int(fields[11]) + int(fields[12])) * _TICK_S
            moved = dict(line.split(": ") for line in Path("/proc", name, "io").read_text().splitlines())
            nbytes += max(int(moved["rchar"]), int(moved["read_bytes"])) + int(moved["wchar"])
    return Use(cpu_s, nbytes)
