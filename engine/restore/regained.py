"""A shard that its node has lost, put back into that node's memory as its pieces arrive from a copy.

Without it the copy would be the only one until the first snapshot of the attempt is with all peers, and the next node
that is lost before that would take it along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...tiers.format.shardfile import Shard
from ...tiers.memory.slots import Slot, SlotRecord
from ..snapshot.slot import OpenSlot


class Regained:
    """One rank's own shard of the version that a job goes on from."""

    def __init__(self, slots: Sequence[Slot], shard: Shard, record: SlotRecord) -> None:
        """Make room in a slot that holds nothing; raises SlotError. `record` is what the copy's node says of it."""
        self.slot = next(slot for slot in slots if slot.record() is None)
        self.slot.invalidate()
        header = shard.header()
        self._open = OpenSlot(self.slot, header, len(header) + shard.data_bytes)
        self._offsets = shard.offsets()
        self._record = replace(record, slot=self.slot.index)
        self._missing = set(range(len(shard.entries)))

    def put(self, index: int, data: bytearray) -> None:
        """Take in the entry at `index` of the shard, whose digest was found right."""
        self._open.write(self._offsets[index], memoryview(data))
        self._missing.discard(index)

    def commit(self) -> None:
        """Declare the slot whole, if all of it has come."""
        if not self._missing:
            self.slot.commit(self._record, drain=False)
