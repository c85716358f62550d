"""From the slots of a snapshot to the description of a checkpoint, every byte checked on the way.

What is carried on is read once, where it has arrived, and held against the commit record, which was made from the
tensors themselves:

- a slot that was torn, and a bit that has flipped in memory: what arrived is not what the record says. The slot is
  hashed then, to say that it is the one to blame; nothing is hashed there otherwise;
- a bit that flipped on the way, a disk that keeps other bytes than it was given: the same, and the slot is right;
- what changes afterwards: the digests of the file and of its tensors, taken in that one pass, are in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from ..format.digest import Sums
from ..format.jsonfile import Unreadable
from ..format.layout import Version, shard_name
from ..format.manifest import Manifest, ShardFile, build
from ..format.shardfile import Entry, ShardReader
from .runs import counts_of
from .slots import MemoryDir, SlotRecord


@dataclass(frozen=True)
class Unread:
    """A slot to be carried on: what its commit record and its header say, no byte of the tensors looked at yet."""

    source: Path
    record: SlotRecord
    header_bytes: int
    entries: tuple[Entry, ...]

    @property
    def name(self) -> str:
        """The file's name in a checkpoint."""
        return shard_name(self.record.rank)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.header_bytes + sum(entry.nbytes for entry in self.entries)

    def sums(self) -> Sums:
        """What the file is to be hashed with: the header, and every tensor by itself and in its run."""
        counts = self.record.runs or (1,) * len(self.entries)
        sizes = [entry.nbytes for entry in self.entries]
        runs = [sizes[begin:end] for begin, end in pairwise(accumulate(counts, initial=0))]
        return Sums([[self.header_bytes], *runs])

    def arrived(self, sums: Sums, where: str) -> ShardFile:
        """The file that was read back from `where` with `sums`; raises Unreadable when a byte is wrong: where it is."""
        if self._fault(sums) is not None:
            self.checked()
            raise Unreadable(f"{where}/{self.name}: read back other bytes than were to be written")
        return self._described(sums)

    def checked(self) -> ShardFile:
        """The same from the slot as it lies in memory. Raises Unreadable."""
        sums = self.sums()
        with ShardReader(self.source) as reader, reader.all() as content:
            sums.update(content)
        if (fault := self._fault(sums)) is not None:
            raise Unreadable(f"{self.source}: {fault} does not match the commit record")
        return self._described(sums)

    def _fault(self, sums: Sums) -> str | None:
        """The first part that is not what the commit record says."""
        wanted = (self.record.header_digest, *self.record.digests)
        counts = self.record.runs or (1,) * len(self.entries)
        firsts = ["the header", *(self.entries[begin].name for begin, _ in pairwise(accumulate(counts, initial=0)))]
        found = [*sums.runs, *[""] * (len(wanted) - len(sums.runs))]
        return next((name for name, *both in zip(firsts, wanted, found, strict=False) if both[0] != both[1]), None)

    def _described(self, sums: Sums) -> ShardFile:
        header, *digests = sums.parts
        return ShardFile(
            self.name, self.record.rank, self.nbytes, sums.hexdigest(), header, self.entries, tuple(digests)
        )


@dataclass(frozen=True)
class Part:
    """What one node has of a checkpoint that is to be made."""

    version: Version
    world: int
    run_id: str
    meta: dict[str, Any]
    shards: tuple[Unread, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of this node's files."""
        return sum(shard.nbytes for shard in self.shards)

    def manifest(self, shards: Iterable[ShardFile]) -> Manifest:
        """The manifest of the checkpoint, with the shards of all nodes. Raises Unreadable when one is missing."""
        return build(self.version, self.world, self.run_id, self.meta, [*shards])

    def checked(self) -> dict[str, dict[str, Any]]:
        """Bytes and digest of each file, from memory. Raises Unreadable."""
        shards = [shard.checked() for shard in self.shards]
        return {shard.name: {"bytes": shard.nbytes, "digest": shard.digest} for shard in shards}


def gather(memory: MemoryDir, records: Sequence[SlotRecord]) -> tuple[Part, dict[str, Path]]:
    """This node's slots of a version and the file of each name. Raises Unreadable when a header is wrong."""
    first = records[0]
    part = Part(
        first.version, first.world, first.run_id, dict(first.meta), tuple(unread(memory, record) for record in records)
    )
    return part, {shard.name: shard.source for shard in part.shards}


def unread(memory: MemoryDir, record: SlotRecord) -> Unread:
    """Look at a slot's header. Raises Unreadable when it is not that of the commit record."""
    source = memory.file_of(record)
    with ShardReader(source) as reader:
        if reader.header_digest != record.header_digest:
            raise Unreadable(f"{source}: the header does not match the commit record")
        counts_of(record, reader)
        return Unread(source, record, reader.data_start, reader.shard.entries)
