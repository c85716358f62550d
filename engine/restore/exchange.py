"""A checkpoint in the memory of several nodes: each gives the shards that it has to the ranks that need them.

First every rank tells which shards it has, with their headers and digests; then which pieces it wants. From that all
know the same order of transfers: shard by shard, piece by piece, from the one rank that has it to those that want it,
in chunks over the storage channel. A piece that all want is broadcast. Nothing goes through a disk, and no message is
a pickle. Whatever is wrong with a piece, all ranks go through all transfers, so nobody waits for one that gave up; then
those that are wrong are given once more by a rank that has a copy, and whoever has the damaged one mends it. A node
that has lost its shards has them in its memory again at the end.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch

from ...tiers.format.digest import digest
from ...tiers.format.jsonfile import Unreadable, dumps
from ...tiers.format.shardfile import Shard, ShardReader, parse_header
from ...tiers.memory.runs import by_entry
from ...tiers.memory.slots import MemoryDir, Slot, SlotRecord, parse_record
from ...tiers.reading.recovery import Candidate, Content, Wanted
from ...tiers.reading.whole import Facts
from ..network.channels import StorageChannel
from ..parallel.context import Context
from .regained import Regained

CHUNK = 8 * 2**20
"""Most bytes of one message."""
_LENGTH = 8


@dataclass(frozen=True)
class Given:
    """A shard, and the rank that gives it."""

    giver: int
    shard: Shard
    record: SlotRecord


class Exchange:
    """Opens checkpoints that lie in the memory of several nodes."""

    def __init__(self, memory: MemoryDir, context: Context, channel: StorageChannel, workers: int = 1) -> None:
        """Give what is in this node's `memory`, over `channel`; it has as many `workers`."""
        self.memory, self.context, self.channel, self.workers = memory, context, channel, workers

    def open(self, candidate: Candidate) -> Exchanged:
        """Learn who has which shard; every rank must call it. Raises Unreadable, on all ranks alike."""
        heard = self.context.gather_bytes(self._what_we_have(candidate))
        reason, given, offers = "", dict[int, Given](), list[Given]()
        try:
            understood = [_understood(rank, said) for rank, said in enumerate(heard)]
            offers = [one for found, _ in understood for one in found]
            given = nearest(offers)
            _check_complete(given, candidate, {rank: words for rank, (_, words) in enumerate(understood)})
        except Unreadable as error:
            reason = str(error)
        if not self.context.all_agree(not reason):
            raise Unreadable(reason or "another rank could not understand what the nodes have in memory")
        return Exchanged(candidate, [given[rank] for rank in sorted(given)], offers, self)

    def _what_we_have(self, candidate: Candidate) -> bytes:
        """Headers and commit records of the shards that this rank can give, or why it has not even its own.

        The copies that its node keeps for others are divided among the ranks of the node.
        """
        own, workers = self.context.rank, self.workers
        wanted = [own] if self._slot(candidate, own) is not None else []
        kept = {record.rank for slot in self.memory.every_slot() if (record := slot.record()) is not None}
        wanted += [rank for rank in sorted(kept - set(self._ranks_here())) if rank % workers == own % workers]
        shards, error = [], "" if own in wanted else f"{candidate.version} of rank {own} is not in its node's memory"
        for rank in wanted:
            try:
                with ExitStack() as stack:
                    record, reader = self.reader(candidate, rank, stack)
                    if reader.header_digest != record.header_digest:
                        raise Unreadable(f"the shard of rank {rank}: the header does not match the commit record")
                    with reader.head() as head:
                        header = base64.b64encode(head).decode()
                    told = by_entry(record, reader)  # who takes a piece cannot look at its neighbours
                    shards.append({"record": json.loads(told.to_bytes()), "header": header})
            except Unreadable as failure:
                error = error or (str(failure) if rank == own else "")
                self._damaged(candidate, rank)
        return dumps({"shards": shards, "error": error})

    def _damaged(self, candidate: Candidate, rank: int) -> None:
        """A shard that cannot be read is none: nobody is to be sent it. What the drainer holds it finds out itself."""
        found = self._slot(candidate, rank)
        if found is not None and not found[0].pinned:
            found[0].invalidate()

    def _ranks_here(self) -> range:
        first = self.context.rank - self.context.rank % self.workers
        return range(first, first + self.workers)

    def _slot(self, candidate: Candidate, rank: int) -> tuple[Slot, SlotRecord] | None:
        for slot in self.memory.every_slot():
            record = slot.record() if slot.rank == rank else None
            if record is not None and record.version == candidate.version and record.world == slot.world:
                return slot, record
        return None

    def mend(self, candidate: Candidate, shard: Shard, index: int, data: bytearray) -> None:
        """Put a piece right in this node's memory, where it is damaged there."""
        found = self._slot(candidate, shard.rank)
        if found is None:
            return
        with suppress(Unreadable), ShardReader(found[0].file) as reader:
            offsets = reader.shard.offsets()
            with reader.data(index, offsets) as stored:
                if reader.header_digest != found[1].header_digest or stored == data:
                    return
            with found[0].file.open("r+b", buffering=0) as file:
                os.pwrite(file.fileno(), data, reader.data_start + offsets[index])

    def regained(self, candidate: Candidate, given: Sequence[Given]) -> Regained | None:
        """Room for this rank's own shard; None where it has it, or that is one of another number of ranks."""
        own, world = self.context.rank, self.context.world
        mine = next((one for one in given if (one.shard.rank, one.shard.world) == (own, world)), None)
        if mine is None or mine.giver == own or self._slot(candidate, own) is not None:
            return None
        return Regained(self.memory.slots(own, world), mine.shard, mine.record)

    def reader(self, candidate: Candidate, rank: int, stack: ExitStack) -> tuple[SlotRecord, ShardReader]:
        """A shard in this node's memory, mapped until `stack` is left. Raises Unreadable."""
        found = self._slot(candidate, rank)
        if found is None:
            raise Unreadable(f"{candidate.version} of rank {rank} is not in the memory of its node")
        return found[1], stack.enter_context(ShardReader(found[0].file))


class Exchanged:
    """A checkpoint in the memory of several nodes, its description known to all."""

    def __init__(
        self, candidate: Candidate, given: Sequence[Given], offers: Sequence[Given], exchange: Exchange
    ) -> None:
        """`given` are all shards, by rank; `offers` all that there are of each."""
        self.candidate, self.given, self.offers, self.exchange = candidate, given, offers, exchange
        self.meta: dict[str, Any] = given[0].record.meta
        self.mended: list[str] = []
        """What came from a copy because it was damaged where it should have come from; the same on all ranks."""

    def facts(self) -> dict[str, Facts]:
        """Every tensor of the state by name."""
        found: dict[str, Facts] = {}
        for one in self.given:
            for entry in one.shard.entries:
                if entry.is_state:
                    before = found[entry.name].pieces if entry.name in found else 0
                    found[entry.name] = Facts(entry.dtype, entry.global_shape, before + 1)
        return found

    def contents(self, wanted: Wanted) -> Iterator[Content]:
        """The pieces that this rank wants, verified; every rank must go through to the end.

        Raises Unreadable at the end, when a piece of this rank did not arrive as it was stored from anywhere.
        """
        gather = self.exchange.context.gather_bytes
        regained = self.exchange.regained(self.candidate, self.given)
        mine = bytes(wanted(entry, one.shard.rank) for one in self.given for entry in one.shard.entries)
        wishes, given = gather(mine), list[Given | None](self.given)
        tried = [{one.giver} for one in self.given]
        while True:
            wrong = bytearray(len(mine))
            yield from self._round(given, wishes, mine, wrong, regained)
            wishes = gather(bytes(wrong))
            if not any(map(any, wishes)):
                if regained is not None:
                    regained.commit()
                return
            given = self._others(given, tried, wishes)
            if all(one is None for one in given):
                break
        names = [f"rank {one.shard.rank}'s {entry.name}" for one in self.given for entry in one.shard.entries]
        bad = next((name for name, lost, wish in zip(names, wrong, mine, strict=True) if lost and wish), None)
        if bad is not None:
            raise Unreadable(f"{self.candidate.version} in memory: {bad} does not match its digest")

    def _others(
        self, given: Sequence[Given | None], tried: Sequence[set[int]], wishes: Sequence[bytes]
    ) -> list[Given | None]:
        """Who gives those shards once more of which pieces were wrong; None for all if one has no other giver left."""
        found: list[Given | None] = []
        position = 0
        for number, one in enumerate(self.given):
            end = position + len(one.shard.entries)
            again = None
            if any(any(wish[position:end]) for wish in wishes):
                again = next((other for other in self._copies(one) if other.giver not in tried[number]), None)
                if again is None:
                    return [None] * len(self.given)
                before = given[number]
                assert before is not None
                tried[number].add(again.giver)
                names = [
                    entry.name
                    for at, entry in enumerate(one.shard.entries, position)
                    if any(wish[at] for wish in wishes)
                ]
                self.mended.append(
                    f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''} in rank {one.shard.rank}'s shard "
                    f"that rank {before.giver} has in memory: taken from the copy that rank {again.giver} has"
                )
            found.append(again)
            position = end
        return found

    def _copies(self, one: Given) -> list[Given]:
        """All that there are of a shard, byte for byte the same if none is damaged."""
        same = (one.shard.rank, one.record.header_digest, one.record.digests)
        return [
            other
            for other in self.offers
            if (other.shard.rank, other.record.header_digest, other.record.digests) == same
        ]

    def _round(
        self, given: Sequence[Given | None], wishes: Sequence[bytes], mine: bytes, wrong: bytearray,
        regained: Regained | None,
    ) -> Iterator[Content]:  # fmt: skip
        """Every piece from its giver to those who wish for it; `wrong` is marked where it is not what it should be.

        Also by a giver that has a damaged one, so that it can mend it with the next.
        """
        context, position = self.exchange.context, 0
        buffer = torch.empty(CHUNK, dtype=torch.uint8)
        for first, one in zip(self.given, given, strict=True):
            if one is None:
                position += len(first.shard.entries)
                continue
            with ExitStack() as stack:
                reader, offsets = None, one.shard.offsets()
                if one.giver == context.rank:
                    with suppress(Unreadable):
                        reader = self.exchange.reader(self.candidate, one.shard.rank, stack)[1]
                for index, entry in enumerate(one.shard.entries):
                    takers = [rank for rank, wish in enumerate(wishes) if wish[position]]
                    at, position = position, position + 1
                    stored = reader.data(index, offsets) if reader is not None and takers else None
                    data = self._pass_on(one.giver, takers, entry.nbytes, stored, buffer)
                    expected = one.record.digests[index]
                    if stored is not None:
                        wrong[at] = digest(stored) != expected
                        stored.release()
                    if data is None:
                        continue
                    wrong[at] = digest(data) != expected
                    if wrong[at]:
                        continue
                    if one is not first:
                        self.exchange.mend(self.candidate, one.shard, index, data)
                    if regained is not None and one.shard.rank == context.rank:
                        regained.put(index, data)
                    if mine[at]:
                        yield Content(
                            one.shard.rank, entry.name, entry.dtype, entry.shape, entry.offset, entry.global_shape,
                            entry.is_state, memoryview(data),
                        )  # fmt: skip

    def _pass_on(
        self, giver: int, takers: Sequence[int], nbytes: int, stored: memoryview | None, buffer: torch.Tensor
    ) -> bytearray | None:
        """Move one piece from its giver to its takers; what a taker gets, None for any other rank."""
        rank, channel = self.exchange.context.rank, self.exchange.channel
        others = [taker for taker in takers if taker != giver]
        taken = bytearray(nbytes) if rank in takers else None
        if rank != giver and taken is None and not self._is_for_all(giver, others):
            return None
        for begin in range(0, nbytes, CHUNK):
            size = min(CHUNK, nbytes - begin)
            chunk = buffer[:size]
            if stored is not None:
                chunk.numpy()[:] = memoryview(stored)[begin : begin + size]
            if self._is_for_all(giver, others):
                channel.broadcast(chunk, giver)
            elif rank == giver:
                for taker in others:
                    channel.send(chunk, taker)
            elif rank in others:
                channel.receive(chunk, giver)
            if taken is not None:
                taken[begin : begin + size] = chunk.numpy().data
        return taken

    def _is_for_all(self, giver: int, others: Sequence[int]) -> bool:
        """Tell whether every rank but the giver wants a piece."""
        return len(others) == self.exchange.context.world - 1 and bool(others) and giver not in others


def nearest(offers: Sequence[Given]) -> dict[int, Given]:
    """For each shard the rank that gives it: its own, else of those that keep a copy the one with least to give."""
    given = {one.shard.rank: one for one in offers if one.giver == one.shard.rank}
    load = Counter(one.giver for one in given.values())
    for rank in sorted({one.shard.rank for one in offers} - given.keys()):
        copies = [one for one in offers if one.shard.rank == rank]
        given[rank] = min(copies, key=lambda one: (load[one.giver], one.giver))
        load[given[rank].giver] += 1
    return given


def _understood(rank: int, said: bytes) -> tuple[list[Given], str]:
    """The shards that a rank gives, and why it has not its own. Raises Unreadable."""
    found = []
    try:
        heard = json.loads(said)
        for one in heard["shards"]:
            record = parse_record(one["record"], f"rank {rank}")
            header = base64.b64decode(one["header"], validate=True)
            shard = parse_header(header[_LENGTH:], f"the shard of rank {record.rank}")
            if digest(header) != record.header_digest or len(shard.entries) != len(record.digests):
                raise Unreadable(f"the shard of rank {record.rank}: the header does not match the commit record")
            found.append(Given(rank, shard, record))
        return found, str(heard["error"])
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        raise Unreadable(f"rank {rank} does not say what it has ({error})") from error


def _check_complete(given: dict[int, Given], candidate: Candidate, lacks: Mapping[int, str]) -> None:
    """All shards of one snapshot are there. Raises Unreadable; `lacks`: what ranks say of their own shards."""
    worlds = {one.record.world for one in given.values()}
    runs = {one.record.run_id for one in given.values()}
    if not given:
        raise Unreadable(lacks.get(0) or f"{candidate.version} is in no node's memory")
    if len(worlds) != 1 or len(runs) != 1:
        raise Unreadable(f"{candidate.version}: the nodes have snapshots of different runs in memory")
    missing = sorted(set(range(max(worlds))) - given.keys())
    if missing:
        raise Unreadable(
            lacks.get(missing[0]) or f"{candidate.version}: the shard of rank {missing[0]} is in no node's memory"
        )
