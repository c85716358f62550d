"""Shards in the memory of several nodes: every rank gets what it wants, verified, or all ranks refuse together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.build import TENSORS, put, value_of
from torch.distributed import HashStore

from dtrain.engine.network.channels import StorageChannel
from dtrain.engine.restore import exchange
from dtrain.engine.restore.exchange import Exchange, Given, nearest
from dtrain.tiers.format.jsonfile import Unreadable
from dtrain.tiers.format.layout import Version
from dtrain.tiers.format.shardfile import Entry, Shard
from dtrain.tiers.memory.slots import MemoryDir, Slot
from dtrain.tiers.reading.recovery import Candidate
from dtrain.tiers.stores.store import Place

WORLD, STEP = 3, 4
CANDIDATE = Candidate(Version(attempt=1, step=STEP), Place("memory", ""))
Got = dict[tuple[int, str], bytes]


@dataclass
class Meeting:
    """Where threads that stand for ranks put things together."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(WORLD, timeout=20))
    said: dict[int, bytes] = field(default_factory=dict)


class Rank:
    """What an exchange needs of a worker's context."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.world, self.meeting = rank, WORLD, meeting

    def gather_bytes(self, data: bytes) -> list[bytes]:
        self.meeting.said[self.rank] = data
        self.meeting.barrier.wait()
        heard = [self.meeting.said[rank] for rank in range(WORLD)]
        self.meeting.barrier.wait()
        return heard

    def all_agree(self, mine: bool) -> bool:
        return all(self.gather_bytes(bytes([mine]))[rank] == b"\1" for rank in range(WORLD))


@pytest.fixture
def memories(tmp_path: Path) -> list[MemoryDir]:
    """Each rank on a node of its own."""
    made = []
    for rank in range(WORLD):
        made.append(MemoryDir(tmp_path / str(rank), (rank,)))
        made[-1].path.mkdir()
        put(made[-1], rank, WORLD, 0, STEP)
    return made


@pytest.fixture
def everywhere(memories: list[MemoryDir], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Any]]]:
    """Run the same on all ranks; what each returned or raised."""
    monkeypatch.setattr(exchange, "CHUNK", 1000)

    def run(work: Callable[[Exchange, int], Any]) -> list[Any]:
        meeting, store = Meeting(), HashStore()

        def one(rank: int) -> Any:
            channel = StorageChannel(store, rank, WORLD, "lo", timedelta(seconds=20))
            try:
                return work(Exchange(memories[rank], Rank(rank, meeting), channel), rank)
            except Unreadable as error:
                return error

        with ThreadPoolExecutor(WORLD) as pool:
            return list(pool.map(one, range(WORLD)))

    yield run


def everything(entry: Entry, rank: int) -> bool:
    return True


def take(wanted: Callable[[int], Callable[[Entry, int], bool]]) -> Callable[[Exchange, int], Got]:
    def work(found: Exchange, rank: int) -> Got:
        opened = found.open(CANDIDATE)
        return {(c.rank, c.name): bytes(c.data) for c in opened.contents(wanted(rank))}

    return work


def test_every_rank_gets_all_shards(everywhere: Callable[..., list[Any]]) -> None:
    first, *others = everywhere(take(lambda rank: everything))
    assert all(one == first for one in others)
    for info in TENSORS:
        pieces = [data for (_, name), data in sorted(first.items()) if name == info.name]
        assert b"".join(pieces) == value_of(info, STEP)
    assert [first[rank, "rng.python"] for rank in range(WORLD)] == [bytes([rank] * 9) for rank in range(WORLD)]


def test_each_rank_gets_what_it_wants_and_no_more(everywhere: Callable[..., list[Any]]) -> None:
    def wanted(rank: int) -> Callable[[Entry, int], bool]:
        return lambda entry, of: (of != rank if rank == 0 else entry.name == "model.b") or entry.name == "rng.python"

    whole = everywhere(take(lambda rank: everything))[0]
    for rank, got in enumerate(everywhere(take(wanted))):
        assert got == {(of, name): data for (of, name), data in whole.items() if wanted(rank)(_named(name), of)}


def _named(name: str) -> Entry:
    return Entry(name, "U8", (), (), (), 0)


def test_facts_and_meta_are_those_of_the_whole(everywhere: Callable[..., list[Any]]) -> None:
    def work(found: Exchange, rank: int) -> Any:
        opened = found.open(CANDIDATE)
        return {name: (facts.dtype, facts.shape) for name, facts in opened.facts().items()}, opened.meta

    for facts, meta in everywhere(work):
        assert facts == {info.name: (info.dtype, info.shape) for info in TENSORS}
        assert meta["data"] == {"samples": STEP * 8}


@pytest.mark.parametrize("rank", range(WORLD))
def test_a_flipped_bit_is_refused_by_all_who_want_the_piece(
    rank: int, memories: list[MemoryDir], everywhere: Callable[..., list[Any]]
) -> None:
    (slot,) = memories[rank].all_slots()
    data = bytearray(slot.file.read_bytes())
    data[-2000] ^= 1
    slot.file.write_bytes(data)
    for answer in everywhere(take(lambda rank: everything)):
        assert isinstance(answer, Unreadable)
        assert f"rank {rank}'s model." in str(answer) and "does not match its digest" in str(answer)
    unhurt = everywhere(take(lambda _: lambda entry, of: of != rank))
    assert unhurt[0] and all(answer == unhurt[0] for answer in unhurt)


@pytest.mark.parametrize("damage", ["no record", "cut", "header", "other version", "other run"])
def test_a_shard_that_is_not_there_is_refused_by_all(
    damage: str, memories: list[MemoryDir], everywhere: Callable[..., list[Any]]
) -> None:
    (slot,) = memories[1].all_slots()
    if damage == "no record":
        slot.invalidate()
    elif damage == "cut":
        slot.file.write_bytes(slot.file.read_bytes()[:-1])
    elif damage == "header":
        data = slot.file.read_bytes()
        slot.file.write_bytes(data.replace(b'"run_id":"feed"', b'"run_id":"fee0"'))
    elif damage == "other version":
        put(memories[1], 1, WORLD, 0, STEP - 1)
    else:
        record = slot.record()
        assert record is not None
        slot.commit(type(record)(**{**vars(record), "run_id": "another"}), drain=False)
    answers = everywhere(take(lambda rank: everything))
    assert all(isinstance(answer, Unreadable) for answer in answers), answers
    assert len({str(answer) for answer in answers}) == 1


def test_a_snapshot_of_more_ranks_than_there_are_is_not_taken_for_whole(
    memories: list[MemoryDir], everywhere: Callable[..., list[Any]]
) -> None:
    for rank, memory in enumerate(memories):
        for slot in memory.all_slots():
            slot.invalidate()
        put(memory, rank, WORLD + 1, 0, STEP)
    answers = everywhere(take(lambda rank: everything))
    assert all("the shard of rank 3 is in no node's memory" in str(answer) for answer in answers)


def keep_copy(memory: MemoryDir, rank: int) -> MemoryDir:
    """A copy of a rank's shard in another node's memory."""
    kept = memory.replica_of(rank)
    kept.path.mkdir()
    put(kept, rank, WORLD, 1, STEP)
    return kept


@pytest.mark.parametrize("damage", ["no record", "cut", "header"])
def test_what_a_node_has_lost_comes_from_a_copy_on_another(
    damage: str, memories: list[MemoryDir], everywhere: Callable[..., list[Any]]
) -> None:
    whole = everywhere(take(lambda rank: everything))[0]
    keep_copy(memories[0], 1)
    (slot,) = memories[1].all_slots()
    if damage == "no record":
        memories[1].remove()
        memories[1].path.mkdir()
    elif damage == "cut":
        slot.file.write_bytes(slot.file.read_bytes()[:-1])
    else:
        data = slot.file.read_bytes()
        slot.file.write_bytes(data.replace(b'"run_id":"feed"', b'"run_id":"fee0"'))
    assert everywhere(take(lambda rank: everything)) == [whole] * WORLD
    own = everywhere(take(lambda rank: lambda entry, of: of == rank))
    assert own[1] == {(of, name): data for (of, name), data in whole.items() if of == 1}


def flip(slot: Slot, at: int = -2000) -> bytes:
    """Turn a bit of a slot's data over; the bytes before."""
    before = slot.file.read_bytes()
    data = bytearray(before)
    data[at] ^= 1
    slot.file.write_bytes(data)
    return before


@pytest.mark.parametrize("wants", ["all", "its own", "others'"])
def test_a_flipped_bit_comes_from_a_copy_and_is_mended(
    wants: str, memories: list[MemoryDir], everywhere: Callable[..., list[Any]]
) -> None:
    """Also where nobody but another rank wants the piece: the slot stays whole for whoever is to be sent it."""
    wanted = {
        "all": lambda rank: everything,
        "its own": lambda rank: lambda entry, of: of == rank,
        "others'": lambda rank: lambda entry, of: of != rank,
    }[wants]
    whole = everywhere(take(wanted))
    kept = keep_copy(memories[0], 1)
    (slot,), (copy,) = memories[1].all_slots(), kept.all_slots()
    before = flip(slot)
    assert everywhere(take(wanted)) == whole
    assert slot.file.read_bytes() == before, "mended in its place"
    before = flip(copy)
    assert everywhere(take(wanted)) == whole
    assert copy.file.read_bytes() != before, "nobody has looked at the copy"

    def mended(found: Exchange, rank: int) -> list[str]:
        opened = found.open(CANDIDATE)
        list(opened.contents(everything))
        return opened.mended

    assert everywhere(mended) == [[]] * WORLD
    flip(copy)
    flip(slot)
    (words, *_), *others = everywhere(mended)
    assert "in rank 1's shard that rank 1 has in memory: taken from the copy that rank 0 has" in words
    assert others == [[words]] * (WORLD - 1), "all ranks know alike"


def test_pieces_damaged_in_different_places_are_put_together(
    memories: list[MemoryDir], everywhere: Callable[..., list[Any]]
) -> None:
    """The copy of one shard is damaged where the next one is whole; each piece comes from where it is right."""
    whole = everywhere(take(lambda rank: everything))
    copies = [keep_copy(memories[node], 1).all_slots()[0] for node in (0, 2)]
    (slot,) = memories[1].all_slots()
    before = flip(slot)
    flip(copies[0])
    assert everywhere(take(lambda rank: everything)) == whole
    assert [one.file.read_bytes() == before for one in (slot, *copies)] == [True, True, True]


def test_what_is_damaged_everywhere_is_refused_by_all(
    memories: list[MemoryDir], everywhere: Callable[..., list[Any]]
) -> None:
    (copy,), (slot,) = keep_copy(memories[0], 1).all_slots(), memories[1].all_slots()
    flip(copy)
    flip(slot)
    for answer in everywhere(take(lambda rank: everything)):
        assert isinstance(answer, Unreadable)
        assert "rank 1's model." in str(answer)


def test_a_copy_with_other_bytes_of_the_same_name_mends_nothing(
    memories: list[MemoryDir], everywhere: Callable[..., list[Any]]
) -> None:
    """Its digests are right for what it has, and it has something else."""
    (copy,), (slot,) = keep_copy(memories[0], 1).all_slots(), memories[1].all_slots()
    put(memories[0].replica_of(1), 1, WORLD, 1, STEP + 1)
    record = copy.record()
    assert record is not None
    copy.commit(type(record)(**{**vars(record), "step": STEP}), drain=False)
    flip(slot)
    assert all(isinstance(answer, Unreadable) for answer in everywhere(take(lambda rank: everything)))


def test_a_shard_that_cannot_be_read_is_offered_to_nobody(
    memories: list[MemoryDir], everywhere: Callable[..., list[Any]]
) -> None:
    keep_copy(memories[0], 1)
    (slot,) = memories[1].all_slots()
    slot.file.write_bytes(slot.file.read_bytes()[:-1])
    everywhere(take(lambda rank: lambda entry, of: of != rank))
    assert slot.record() is None


def test_two_lost_nodes_get_theirs_from_the_last_one(
    memories: list[MemoryDir], everywhere: Callable[..., list[Any]]
) -> None:
    whole = everywhere(take(lambda rank: everything))[0]
    for lost in (0, 1):
        keep_copy(memories[2], lost)
        memories[lost].remove()
        memories[lost].path.mkdir()
    assert everywhere(take(lambda rank: everything)) == [whole] * WORLD

    def meta(found: Exchange, rank: int) -> Any:
        return found.open(CANDIDATE).meta["data"]

    assert everywhere(meta) == [{"samples": STEP * 8}] * WORLD, "what rank 0 says of the whole is in its copy"


def test_a_node_that_has_lost_its_shard_has_it_again_afterwards(
    memories: list[MemoryDir], everywhere: Callable[..., list[Any]]
) -> None:
    """Else its copy is the only one until the next snapshot is with the peers, and that may be lost as well."""
    (copy,), (before,) = keep_copy(memories[0], 1).all_slots(), memories[1].all_slots()
    record = before.record()
    memories[1].remove()
    memories[1].path.mkdir()
    everywhere(take(lambda rank: lambda entry, of: of != rank))
    assert memories[1].all_slots() == [], "not all of it has come"
    everywhere(take(lambda rank: lambda entry, of: of == rank))
    (slot,) = memories[1].all_slots()
    assert slot.record() == record
    assert slot.file.read_bytes() == copy.file.read_bytes()
    copy.invalidate()
    assert all(isinstance(answer, dict) for answer in everywhere(take(lambda rank: everything)))


def test_a_copy_of_another_version_is_none(memories: list[MemoryDir], everywhere: Callable[..., list[Any]]) -> None:
    put(keep_copy(memories[0], 1), 1, WORLD, 1, STEP + 1)
    memories[1].all_slots()[0].invalidate()
    answers = everywhere(take(lambda rank: everything))
    assert all("of rank 1 is not in" in str(answer) for answer in answers), answers


def test_each_shard_is_given_by_its_own_rank_or_by_the_one_with_least_to_give() -> None:
    def offer(giver: int, rank: int) -> Given:
        return Given(giver, Shard(rank, 4, "r", ()), None)  # type: ignore[arg-type]

    offers = [offer(0, 0), offer(1, 1), offer(0, 2), offer(1, 2), offer(0, 3), offer(1, 3), offer(0, 1)]
    assert {rank: one.giver for rank, one in nearest(offers).items()} == {0: 0, 1: 1, 2: 0, 3: 1}
