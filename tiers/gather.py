"""From the slots of a snapshot to the description of a checkpoint: every byte checked on the way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from .jsonfile import Unreadable
from .layout import Version, shard_name
from .manifest import Manifest, ShardFile, build
from .memory import MemoryDir, SlotRecord
from .runs import by_entry
from .shardfile import ShardReader

CHUNK = 2**20
"""Bytes hashed twice in a row, for the entry and for the file: few enough to stay in the processor's cache."""


@dataclass(frozen=True)
class Part:
    """What one node has of a checkpoint."""

    version: Version
    world: int
    run_id: str
    meta: dict[str, Any]
    shards: tuple[ShardFile, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of this node's files."""
        return sum(shard.nbytes for shard in self.shards)

    def manifest(self, others: Iterable[ShardFile] = ()) -> Manifest:
        """The manifest of the checkpoint, with the shards of the other nodes. Raises Unreadable when one is missing."""
        return build(self.version, self.world, self.run_id, self.meta, [*self.shards, *others])


def gather_part(memory: MemoryDir, records: Sequence[SlotRecord]) -> tuple[Part, dict[str, Path]]:
    """This node's slots of a version, checked, and the file of each name. Raises Unreadable when a byte is wrong."""
    first = records[0]
    shards = tuple(describe(memory, record) for record in records)
    part = Part(first.version, first.world, first.run_id, dict(first.meta), shards)
    return part, {shard.name: memory.file_of(record) for shard, record in zip(shards, records, strict=True)}


def gather(memory: MemoryDir, records: Sequence[SlotRecord]) -> tuple[Manifest, dict[str, Path]]:
    """The manifest of a whole snapshot and the file of each name in it. Raises Unreadable when a byte is wrong."""
    part, sources = gather_part(memory, records)
    return part.manifest(), sources


def describe(memory: MemoryDir, record: SlotRecord) -> ShardFile:
    """Read one slot and check it against its commit record. Raises Unreadable."""
    source = memory.file_of(record)
    whole = xxhash.xxh3_128()
    with ShardReader(source) as reader:
        if reader.header_digest != record.header_digest:
            raise Unreadable(f"{source}: the header does not match the commit record")
        with reader.head() as head:
            whole.update(head)
        record = by_entry(record, reader)
        for entry, data, wanted in zip(reader.shard.entries, reader.all_data(), record.digests, strict=True):
            with data:
                if _hash_both(data, whole) != wanted:
                    raise Unreadable(f"{source}: {entry.name} does not match the commit record")
        nbytes = reader.data_start + reader.shard.data_bytes
        entries = reader.shard.entries
    return ShardFile(
        shard_name(record.rank), record.rank, nbytes, whole.hexdigest(), record.header_digest, entries, record.digests
    )


def _hash_both(data: memoryview, whole: xxhash.xxh3_128) -> str:
    part = xxhash.xxh3_128()
    for begin in range(0, len(data), CHUNK):
        with data[begin : begin + CHUNK] as chunk:
            part.update(chunk)
            whole.update(chunk)
    return part.hexdigest()
