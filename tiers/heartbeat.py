"""A counter per rank in shared memory, raised by the training thread at every window and read by the launcher."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import signal
import struct
from dataclasses import dataclass

from .memory import MemoryDir

_FORMAT = struct.Struct("<QQQ")
DONE_STEP = 2**63  # said by a rank that has signed off
_FILE = re.compile(r"rank-(\d{5})\.heartbeat")


@dataclass(frozen=True)
class Beat:
    """What one rank last said: its process, its counter, the step it works on."""

    rank: int
    pid: int
    count: int
    step: int


class Heartbeat:
    """Writing end; one per worker."""

    def __init__(self, memory: MemoryDir, rank: int) -> None:
        """Make the counter of `rank`, starting at 0."""
        path = memory.heartbeat(rank)
        with path.open("wb") as file:
            file.write(_FORMAT.pack(os.getpid(), 0, 0))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FORMAT.size)
        self._count = 0

    def beat(self, step: int) -> None:
        """Say: still here, in this step."""
        self._count += 1
        _FORMAT.pack_into(self._map, 0, os.getpid(), self._count, step)


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
        if len(data) == _FORMAT.size:
            pid, count, step = _FORMAT.unpack(data)
            beats.append(Beat(int(match[1]), pid, count, step))
    return beats


def clear_heartbeats(memory: MemoryDir) -> None:
    """Forget all counters; call before the workers of an attempt start."""
    for beat in read_heartbeats(memory):
        memory.heartbeat(beat.rank).unlink(missing_ok=True)


def end_group(pid: int) -> None:
    """Kill what is left of a worker's process group (each worker leads its own)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if pid > 1 and pid != os.getpgid(0):
            os.killpg(pid, signal.SIGKILL)
