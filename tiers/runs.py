"""Digests of small tensors: a commit record has one for each run of them, and who reads the slot works out the rest.

A worker that hashed each of thousands of small tensors at every step would do little else.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import xxhash

from .digest import digest
from .jsonfile import Unreadable
from .memory import SlotRecord
from .shardfile import ShardReader


def by_entry(record: SlotRecord, reader: ShardReader) -> SlotRecord:
    """The record with a digest for each entry of its slot, in file order.

    Raises Unreadable when it speaks of other tensors than the slot has, or when a run does not match its digest.
    """
    counts = record.runs or (1,) * len(record.digests)
    if len(counts) != len(record.digests) or sum(counts) != len(reader.shard.entries) or min(counts, default=1) < 1:
        raise Unreadable(f"{reader.path}: the commit record speaks of other tensors")
    if not record.runs:
        return record
    found: list[str] = []
    entries, data = iter(reader.shard.entries), reader.all_data()
    for count, wanted in zip(counts, record.digests, strict=True):
        names = [entry.name for entry in islice(entries, count)]
        if count == 1:
            next(data).release()
            found.append(wanted)
            continue
        whole = xxhash.xxh3_128()
        for view in islice(data, count):
            with view:
                whole.update(view)
                found.append(digest(view))
        if whole.hexdigest() != wanted:
            raise Unreadable(f"{reader.path}: {names[0]} to {names[-1]} do not match the commit record")
    return replace(record, digests=tuple(found), runs=())
