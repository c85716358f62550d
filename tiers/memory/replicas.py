"""Copies of other nodes' snapshots in this node's memory, as they arrive.

Each rank of another node has `REPLICA_SLOTS` slots here: the newest whole version stays until the next one is whole.
A copy counts from the moment its commit record is there, which is written when every digest has been found right.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..format.jsonfile import Unreadable
from ..format.shardfile import ShardReader
from .runs import check_runs
from .slots import MemoryDir, Slot, SlotRecord, parse_record

REPLICA_SLOTS = 2
MAX_WORLD = 10**5
"""Ranks that a slot's name has room for."""


class Refused(Exception):
    """A copy that is not kept; the message says why."""


class Keeper:
    """Takes in copies for the nodes that this one keeps them for."""

    def __init__(self, memory: MemoryDir, run_id: str) -> None:
        """Keep them below `memory`, for one run."""
        self.memory, self.run_id = memory, run_id
        self._locks: dict[tuple[int, int], threading.Lock] = {}
        self._guard = threading.Lock()

    def take(self, node: int, announced: Any, nbytes: int, fill: Callable[[memoryview | None], None]) -> bool:
        """Take in a copy of a slot of `node` with this commit record; False if it is here already.

        `fill` is called once with where its `nbytes` bytes belong (None: they are not wanted). Raises Refused before
        or after that, and what `fill` raises; the version that was here before stays then.
        """
        record = self._checked(announced)
        with self._guard:
            lock = self._locks.setdefault((node, record.rank), threading.Lock())
        with lock:
            folder = self.memory.replica_of(node)
            folder.path.mkdir(mode=0o700, exist_ok=True)
            slots = folder.slots(record.rank, record.world, REPLICA_SLOTS)
            held = [(slot, found.version) for slot in slots if (found := slot.record()) is not None]
            newest = max((version for _, version in held), default=None)
            if newest is not None and record.version < newest:
                raise Refused(f"{newest} of rank {record.rank} is here already")
            if newest == record.version:
                fill(None)
                return False
            free = next(slot for slot in slots if (slot, newest) not in held)
            self._fill(free, replace(record, slot=free.index), nbytes, fill)
            if newest is not None:  # all nodes had that one before this one was sent: nobody needs another world's
                for path in folder.of_other_worlds(record.world):
                    path.unlink(missing_ok=True)
        return True

    def _checked(self, announced: Any) -> SlotRecord:
        try:
            record = parse_record(announced, "what was sent")
            numbers = (record.step, record.attempt, record.rank, record.world)
            if not all(type(number) is int and number >= 0 for number in numbers):
                raise Refused("its commit record has numbers that are none")
        except (Unreadable, TypeError) as error:
            raise Refused(str(error)) from error
        if not record.rank < record.world < MAX_WORLD:
            raise Refused(f"there is no rank {record.rank} of {record.world}")
        if record.run_id != self.run_id:
            raise Refused(f"it belongs to run {record.run_id}, here is {self.run_id}")
        return record

    def _fill(self, slot: Slot, record: SlotRecord, nbytes: int, fill: Callable[[memoryview | None], None]) -> None:
        slot.invalidate()
        try:
            target = _room(slot, nbytes)
        except (OSError, ValueError, OverflowError) as error:
            raise Refused(f"{nbytes:,} bytes for a copy cannot be had: {error}") from error
        with target, memoryview(target) as view:
            fill(view)
        try:
            check(slot, record)
        except Unreadable as error:
            raise Refused(str(error)) from error
        slot.commit(record, drain=False)


def check(slot: Slot, record: SlotRecord) -> None:
    """Raise Unreadable unless a slot's file is what a commit record says, byte by byte."""
    with ShardReader(slot.file) as reader:
        shard = reader.shard
        if reader.header_digest != record.header_digest:
            raise Unreadable(f"{slot.file}: the header is not that of the commit record")
        if (shard.rank, shard.world, shard.run_id) != (record.rank, record.world, record.run_id):
            raise Unreadable(f"{slot.file}: it is the shard of rank {shard.rank} of {shard.world}")
        check_runs(record, reader)


def _room(slot: Slot, nbytes: int) -> mmap.mmap:
    """The slot's file, of this size, for writing; its pages are taken now, so a full tmpfs is an error here."""
    descriptor = os.open(slot.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(descriptor).st_size != nbytes:
            os.ftruncate(descriptor, 0)
            os.posix_fallocate(descriptor, 0, nbytes)
        return mmap.mmap(descriptor, nbytes)
    except OSError:
        slot.file.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
