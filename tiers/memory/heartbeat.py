"""A counter per rank in shared memory, raised by the training thread at every window and read by the launcher."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import resource
import signal
import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from .slots import MemoryDir

_FORMAT = struct.Struct("<QQQQQdQ")
_RAISING = struct.Struct("<Q")
"""After the rest: written by another thread."""
DONE_STEP = 2**63  # said by a rank that has signed off
_FILE = re.compile(r"rank-(\d{5})\.heartbeat")


class Phase(IntEnum):
    """Where a rank is between its start and its first step, in this order."""

    IMPORTS = 0
    JOINING = 1
    MODEL = 2
    DATA = 3
    PARTS = 4
    FIRST_PASSES = 5
    RESTORING = 6
    ROOM = 7
    FIRST_STEP = 8

    def __str__(self) -> str:
        """As a person would say it: what the rank is doing."""
        return _DOING[self]


_DOING = {
    Phase.IMPORTS: "starting",
    Phase.JOINING: "joining the other ranks",
    Phase.MODEL: "building the model",
    Phase.DATA: "preparing the data",
    Phase.PARTS: "dividing the model and building the optimizer",
    Phase.FIRST_PASSES: "making passes that are thrown away",
    Phase.RESTORING: "loading the state",
    Phase.ROOM: "making room for snapshots",
    Phase.FIRST_STEP: "loading its first batch",
}


@dataclass(frozen=True)
class Beat:
    """What one rank last said: its process and when that began (clock ticks since boot), its counter, its step."""

    rank: int
    pid: int
    started: int
    count: int
    step: int
    peak: int = 0
    """Bytes of memory that it has had at once at most; it can say so no more when it has been killed."""
    busy_s: float = 0.0
    """Time that it spent on its own work so far, waiting for no other rank."""
    phase: int = 0
    """Before its first step: a `Phase`."""
    raising: bool = False
    """It has not come to the end of an exception: whatever it does, it does on the way out."""


class Heartbeat:
    """Writing end; one per worker."""

    def __init__(self, memory: MemoryDir, rank: int) -> None:
        """Make the counter of `rank`, starting at 0."""
        path = memory.heartbeat(rank)
        self._pid, self._started = os.getpid(), start_of(os.getpid()) or 0
        with path.open("wb") as file:
            file.write(_FORMAT.pack(self._pid, self._started, 0, 0, 0, 0.0, 0) + _RAISING.pack(0))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FORMAT.size + _RAISING.size)
        self._count = self._step = 0
        self._phase = Phase.IMPORTS

    def beat(self, step: int, busy_s: float = 0.0) -> None:
        """Say: still here, in this step, having worked so long."""
        self._count, self._step = self._count + 1, step
        self._say(busy_s)

    def enter(self, phase: Phase) -> None:
        """Say which part of its start this rank has come to; it counts for no pass."""
        self._phase = phase
        self._say(0.0)

    def _say(self, busy_s: float) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
        _FORMAT.pack_into(self._map, 0, self._pid, self._started, self._count, self._step, peak, busy_s, self._phase)

    def raising(self, is_so: bool) -> None:
        """Say whether an exception is on its way out; from any thread."""
        _RAISING.pack_into(self._map, _FORMAT.size, is_so)


def read_heartbeats(memory: MemoryDir) -> list[Beat]:
    """The last word of every rank of this node, by rank."""
    beats = []
    try:
        names = sorted(os.listdir(memory.path))
    except FileNotFoundError:
        return []
    for name in names:
        match = _FILE.fullmatch(name)
        if match is None:
            continue
        data = (memory.path / name).read_bytes()
        if len(data) == _FORMAT.size + _RAISING.size:
            (raising,) = _RAISING.unpack_from(data, _FORMAT.size)
            beats.append(replace(Beat(int(match[1]), *_FORMAT.unpack_from(data)), raising=bool(raising)))
    return beats


def clear_heartbeats(memory: MemoryDir) -> None:
    """Forget all counters; call before the workers of an attempt start."""
    for beat in read_heartbeats(memory):
        memory.heartbeat(beat.rank).unlink(missing_ok=True)


def start_of(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None when there is none (proc(5), field 22 of stat)."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def state_of(beat: Beat) -> str | None:
    """The state of the process that wrote the counter, in the kernel's letter (proc(5), field 3 of stat)."""
    try:
        fields = Path(f"/proc/{beat.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0] if int(fields[19]) == beat.started else None


def end_workers(memory: MemoryDir) -> None:
    """Kill what is left of all workers of this node."""
    for beat in read_heartbeats(memory):
        end_group(beat)


def end_group(beat: Beat) -> None:
    """Kill what is left of a worker's process group (each worker leads its own).

    A number that the kernel has given to another process since is left alone. While a group has members, its number
    is not given away.
    """
    if beat.pid <= 1 or start_of(beat.pid) not in (None, beat.started):
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if beat.pid != os.getpgid(0):
            os.killpg(beat.pid, signal.SIGKILL)
