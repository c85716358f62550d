"""Digests of small tensors: a commit record has one for each run of them, and who reads the slot works out the rest.

A worker that hashed each of thousands of small tensors at every step would do little else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from ..format.digest import digest
from ..format.jsonfile import Unreadable
from ..format.shardfile import ShardReader
from .slots import SlotRecord


def counts_of(record: SlotRecord, reader: ShardReader) -> Sequence[int]:
    """How many entries each digest of a record is of; raises Unreadable when it speaks of other tensors."""
    counts = record.runs or (1,) * len(record.digests)
    if len(counts) != len(record.digests) or sum(counts) != len(reader.shard.entries) or min(counts, default=1) < 1:
        raise Unreadable(f"{reader.path}: the commit record speaks of other tensors")
    return counts


def check_runs(record: SlotRecord, reader: ShardReader) -> None:
    """Raise Unreadable unless every tensor is what the record says; each byte is hashed once."""
    for run, wanted, data in _runs(record, reader):
        with data:
            _check(reader, run, wanted, data)


def by_entry(record: SlotRecord, reader: ShardReader) -> SlotRecord:
    """The record with a digest for each entry of its slot, in file order.

    Raises Unreadable when it speaks of other tensors than the slot has, or when a run does not match its digest.
    """
    if not record.runs:
        counts_of(record, reader)
        return record
    found: list[str] = []
    for run, wanted, data in _runs(record, reader):
        with data:
            if len(run) == 1:
                found.append(wanted)
                continue
            _check(reader, run, wanted, data)
            position = 0
            for entry in reader.shard.entries[run.start : run.stop]:
                with data[position : position + entry.nbytes] as part:
                    found.append(digest(part))
                position += entry.nbytes
    return replace(record, digests=tuple(found), runs=())


def _runs(record: SlotRecord, reader: ShardReader) -> Iterator[tuple[range, str, memoryview]]:
    """Each run with its digest and its bytes; release these."""
    counts, offsets = counts_of(record, reader), reader.shard.offsets()
    for begin, count, wanted in zip(accumulate(counts, initial=0), counts, record.digests, strict=False):
        run = range(begin, begin + count)
        yield run, wanted, reader.together(run, offsets)


def _check(reader: ShardReader, run: range, wanted: str, data: memoryview) -> None:
    if digest(data) != wanted:
        first, last = reader.shard.entries[run.start].name, reader.shard.entries[run.stop - 1].name
        names = f"{first} does not" if len(run) == 1 else f"{first} to {last} do not"
        raise Unreadable(f"{reader.path}: {names} match the commit record")
