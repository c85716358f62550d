"""Does a rank that says nothing do anything? Asked before its first step, when there are no passes to count.

A large model is read, data are counted, kernels are compiled for minutes without a word. All that takes time of a
processor or moves bytes, in the worker or in a process that it has started; one that waits for what never comes does
neither. A loop that never ends takes a processor, but moves nothing: so what moves bytes is counted by itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
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


@dataclass(frozen=True)
class Signs:
    """How often a worker was seen to do something."""

    any: int = 0
    moved: int = 0
    """Those of them that were more than processor time."""


@dataclass
class _Known:
    """What one worker had used when it was last seen to do something, and when it last moved bytes."""

    use: Use
    at: float
    nbytes: int
    signs: Signs = Signs()


class Activity:
    """Counts, for each worker of this node, how often it was seen to do something."""

    def __init__(self) -> None:
        """Nobody has been looked at."""
        self._known: dict[int, _Known] = {}
        self._looked = -EVERY_S

    def signs(self, pids: Collection[int], now: float) -> dict[int, Signs]:
        """How often the process group of each of `pids` was seen to do something.

        Looks at all of them at once, twice a second at most and where one of them is new. `now`: monotonic, s.
        """
        if pids and (now - self._looked >= EVERY_S or not self._known.keys() >= set(pids)):
            self._looked = now
            for pid, use in use_of(pids).items():
                self._see(self._known.setdefault(pid, _Known(use, now, use.nbytes)), use, now)
        return {pid: self._known[pid].signs for pid in pids}

    def _see(self, known: _Known, use: Use, now: float) -> None:
        cpu_s, nbytes = use.cpu_s - known.use.cpu_s, use.nbytes - known.nbytes
        ended = min(cpu_s, use.nbytes - known.use.nbytes) < 0  # one of its processes did: what that had used is gone
        moved = ended or nbytes >= MIN_BYTES
        if moved or cpu_s >= max(MIN_CPU_S, MIN_SHARE * (now - known.at)):
            known.use, known.at = use, now
            known.signs = Signs(known.signs.any + 1, known.signs.moved + moved)
            known.nbytes = use.nbytes if moved else known.nbytes


def use_of(groups: Collection[int]) -> dict[int, Use]:
    """What the processes of each process group have used, those that have ended meanwhile left out (proc(5))."""
    used = dict.fromkeys(groups, Use())
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            group = int(fields[2])
            if group not in used:
                continue
            use = used[group]
            cpu_s = use.cpu_s + (int(fields[11]) + int(fields[12])) * _TICK_S
            used[group] = Use(cpu_s, use.nbytes)  # of another user's process that is all we may know
            moved = dict(line.split(": ") for line in Path("/proc", name, "io").read_text().splitlines())
            read = max(int(moved["rchar"]), int(moved["read_bytes"]))
            used[group] = Use(cpu_s, use.nbytes + read + int(moved["wchar"]))
    return used
