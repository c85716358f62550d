"""The drainer: one process per node that carries pinned snapshots from memory to disk, behind the training's back.

It is also the one that clears up when the launcher is killed, so a run without a disk tier has one too. Started by
the launcher as `python -m dtrain.tiers.drainer JOB.json` with a pipe as standard input. The word `stop` on the pipe
means: finish what is pinned and leave. The pipe closing without it means the launcher is dead: then the
newest whole snapshot is carried to disk as well, and the memory is given back once it is safe there.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from .disk import DiskTier
from .heartbeat import end_group, read_heartbeats
from .jsonfile import Unreadable, append_event, dumps, read
from .layout import RunDir, Version
from .lock import FileLock
from .memory import MemoryDir, SlotRecord

POLL_S = 0.05
NICENESS = 10


@dataclass(frozen=True)
class DrainJob:
    """What a drainer is told."""

    run_dir: str
    memory_dir: str
    disk_root: str | None
    keep: int
    run_id: str

    def to_bytes(self) -> bytes:
        """The job as JSON."""
        return dumps(vars(self))


class Drainer:
    """Carries whole, pinned versions to disk, oldest first."""

    def __init__(self, job: DrainJob) -> None:
        """Prepare for one run on one node."""
        self.job = job
        self.run = RunDir(Path(job.run_dir))
        self.memory = MemoryDir(Path(job.memory_dir))
        self.disk = DiskTier(Path(job.disk_root), job.run_id) if job.disk_root is not None else None

    def next_version(self) -> Version | None:
        """The oldest version that every rank has pinned."""
        pending = {(slot.rank, slot.index): slot.record() for slot in self.memory.pending()}
        by_version: dict[Version, int] = {}
        worlds: dict[Version, int] = {}
        for record in filter(None, pending.values()):
            by_version[record.version] = by_version.get(record.version, 0) + 1
            worlds[record.version] = record.world
        return min((v for v, count in by_version.items() if count == worlds[v]), default=None)

    def drain(self, version: Version) -> bool:
        """Carry one version to disk, release its slots, prune; False (and an event) when it failed."""
        records = self.memory.whole().get(version)
        if records is None or self.disk is None:
            return False
        started = time.monotonic()
        try:
            checkpoint = self.disk.write(self.memory, records)
        except (OSError, Unreadable) as error:
            self._event("skipped", version, tier="disk", reason=self._reason(error, records))
            self._release(records)
            return False
        seconds = time.monotonic() - started
        self._event(
            "committed", version, tier="disk", bytes=checkpoint.manifest.nbytes, seconds=seconds,
            path=str(checkpoint.folder),
        )  # fmt: skip
        self._release(records)
        try:
            self.disk.prune(self.job.keep)
        except OSError as error:
            self._event("warning", version, detail=f"an old checkpoint could not be deleted: {error}")
        return True

    def drain_pending(self) -> None:
        """Carry everything that is pinned and whole."""
        while (version := self.next_version()) is not None:
            self.drain(version)

    def rescue(self) -> None:
        """The launcher is dead: end what it left, save the newest snapshot, give the memory back."""
        for beat in read_heartbeats(self.memory):
            end_group(beat)
        if self.disk is None:
            return  # the memory is the only place there is: it stays for a resume
        self.memory.settle()
        self.drain_pending()
        newest = max(self.memory.whole(), default=None)
        if newest is None:
            return
        if self.disk.get(newest) is not None or self.drain(newest):
            self.memory.remove()

    def _release(self, records: list[SlotRecord]) -> None:
        slots = {(slot.rank, slot.index): slot for slot in self.memory.pending()}
        for record in records:
            slot = slots.get((record.rank, record.slot))
            if slot is not None:
                slot.drain_mark.unlink(missing_ok=True)

    def _event(self, event: str, version: Version, **details: object) -> None:
        append_event(self.run.events, event, version.step, version.attempt, **details)

    def _reason(self, error: Exception, records: list[SlotRecord]) -> str:
        needed = sum(self.memory.file_of(record).stat().st_size for record in records)
        free = ""
        with contextlib.suppress(OSError):
            info = os.statvfs(str(self.job.disk_root))
            free = f"; needed {needed} bytes, free {info.f_bavail * info.f_frsize}"
        return f"{error}{free}"


def follow(drainer: Drainer) -> None:
    """Work until told to stop or orphaned."""
    word = b""
    while True:
        version = drainer.next_version() if drainer.disk is not None else None
        if version is not None:
            drainer.drain(version)
            continue
        ready, _, _ = select.select([0], [], [], POLL_S)
        if ready:
            data = os.read(0, 64)
            word += data
            if b"stop" in word:
                drainer.drain_pending()
                return
            if not data:
                drainer.rescue()
                return


def main(arguments: list[str]) -> int:
    """Run the drainer of one node."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends through its pipe, so that it never leaves work half done
    os.nice(NICENESS)
    drainer = Drainer(DrainJob(**read(Path(arguments[0]))))
    with FileLock(drainer.memory.drainer_lock, timeout_s=60):
        if drainer.disk is not None:
            drainer.disk.remove_leftovers()
        follow(drainer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
