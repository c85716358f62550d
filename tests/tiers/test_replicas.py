"""A copy counts when it is whole and right; until then, and whatever goes wrong, the one before it stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain.tiers.format.digest import digest
from dtrain.tiers.format.layout import Version
from dtrain.tiers.format.shardfile import Entry, Shard
from dtrain.tiers.memory.replicas import Keeper, Refused
from dtrain.tiers.memory.slots import MemoryDir, SlotRecord

OWNER, RANK, WORLD, RUN = 1, 1, 2, "run-1"
SHARD = Shard(RANK, WORLD, RUN, (Entry("w", "F32", (4,), (0,), (4,), 16), Entry("b", "F32", (2,), (0,), (2,), 8)))


def copy_of(step: int, attempt: int = 1, **changes: Any) -> tuple[SlotRecord, bytes]:
    """A commit record, and the file that it speaks of."""
    data = bytes([step]) * 24
    header = SHARD.header()
    record = SlotRecord(
        RUN, step, attempt, RANK, WORLD, 4, digest(header), (digest(data[:16]), digest(data[16:])), {"step": step}
    )
    return replace(record, **changes), header + data


def sending(data: bytes) -> Callable[[memoryview | None], None]:
    def fill(target: memoryview | None) -> None:
        if target is not None:
            target[:] = data

    return fill


@pytest.fixture
def keeper(tmp_path: Path) -> Keeper:
    return Keeper(MemoryDir(tmp_path), RUN)


def take(keeper: Keeper, record: SlotRecord, data: bytes) -> bool:
    return keeper.take(OWNER, json.loads(record.to_bytes()), len(data), sending(data))


def kept(keeper: Keeper) -> dict[Version, bytes]:
    """What is here of the owner, by version."""
    found = {}
    for slot in keeper.memory.replica_of(OWNER).all_slots():
        record = slot.record()
        assert record is not None
        assert record.slot == slot.index
        found[record.version] = slot.file.read_bytes()
    return found


def test_the_newest_two_are_kept_under_the_name_of_their_owner(keeper: Keeper) -> None:
    for step in range(1, 6):
        assert take(keeper, *copy_of(step))
        assert max(kept(keeper)) == Version(attempt=1, step=step)
    assert kept(keeper) == {Version(attempt=1, step=step): copy_of(step)[1] for step in (4, 5)}
    assert list(keeper.memory.replicas()) == [OWNER]
    assert keeper.memory.all_slots() == [], "not among this node's own"
    assert {slot.rank for slot in keeper.memory.every_slot()} == {RANK}


def test_what_is_here_is_not_sent_again_and_older_ones_are_refused(keeper: Keeper) -> None:
    asked: list[memoryview | None] = []
    take(keeper, *copy_of(3, attempt=2))
    record, data = copy_of(3, attempt=2)
    assert not keeper.take(OWNER, json.loads(record.to_bytes()), len(data), asked.append)
    assert asked == [None]
    with pytest.raises(Refused, match="step 3"):
        take(keeper, *copy_of(9, attempt=1))


def wrong_digest() -> tuple[SlotRecord, bytes]:
    record, data = copy_of(2)
    return record, data[:-1] + b"x"


def wrong_header() -> tuple[SlotRecord, bytes]:
    record, data = copy_of(2)
    return replace(record, header_digest="0" * 32), data


def cut() -> tuple[SlotRecord, bytes]:
    record, data = copy_of(2)
    return record, data[:-8]


def of_another_rank() -> tuple[SlotRecord, bytes]:
    record, data = copy_of(2)
    return replace(record, rank=0), data


@pytest.mark.parametrize("made", [wrong_digest, wrong_header, cut, of_another_rank])
def test_a_copy_that_is_not_right_leaves_the_one_before(
    keeper: Keeper, made: Callable[[], tuple[SlotRecord, bytes]]
) -> None:
    take(keeper, *copy_of(1))
    with pytest.raises(Refused):
        take(keeper, *made())
    assert kept(keeper) == {Version(attempt=1, step=1): copy_of(1)[1]}
    take(keeper, *copy_of(3))
    assert max(kept(keeper)).step == 3


def test_a_copy_that_does_not_arrive_whole_leaves_the_one_before(keeper: Keeper) -> None:
    def torn(target: memoryview | None) -> None:
        assert target is not None
        target[:100] = copy_of(3)[1][:100]
        raise ConnectionResetError

    for step in (1, 2):
        take(keeper, *copy_of(step))
    record, data = copy_of(3)
    with pytest.raises(ConnectionResetError):
        keeper.take(OWNER, json.loads(record.to_bytes()), len(data), torn)
    assert list(kept(keeper)) == [Version(attempt=1, step=2)], "the older one made room, the newer one is whole"


@pytest.mark.parametrize(
    "changes",
    [{"run_id": "run-2"}, {"rank": 2}, {"world": 10**6}, {"rank": -1}, {"attempt": "3"}],
    ids=["another run", "no such rank", "too many ranks", "negative", "text"],
)
def test_a_record_that_does_not_belong_here_is_refused_unread(keeper: Keeper, changes: dict[str, Any]) -> None:
    record, data = copy_of(1, **changes)
    with pytest.raises(Refused):
        keeper.take(OWNER, json.loads(record.to_bytes()), len(data), lambda target: pytest.fail("nothing is read"))
    assert not keeper.memory.replicas()


@pytest.mark.parametrize("announced", [None, {}, {"record": {}, "digest": "x"}, [1], {"record": 3, "digest": ""}])
def test_what_is_no_record_is_refused(keeper: Keeper, announced: Any) -> None:
    with pytest.raises(Refused):
        keeper.take(OWNER, announced, 10, sending(b""))


def test_more_bytes_than_there_are_is_refused(keeper: Keeper) -> None:
    record, _ = copy_of(1)
    with pytest.raises(Refused, match="cannot be had"):
        keeper.take(OWNER, json.loads(record.to_bytes()), 2**62, sending(b""))
    assert not kept(keeper)


def test_copies_of_another_world_make_room_once_a_second_one_is_whole(keeper: Keeper) -> None:
    take(keeper, *copy_of(1))
    shard = replace(SHARD, rank=0, world=3)
    data = bytes(24)
    record = SlotRecord(RUN, 1, 2, 0, 3, 0, digest(shard.header()), (digest(data[:16]), digest(data[16:])))
    take(keeper, record, shard.header() + data)
    assert sorted(version.attempt for version in kept(keeper)) == [1, 2], "other nodes may not have theirs yet"
    take(keeper, replace(record, step=2), shard.header() + data)
    assert {version.attempt for version in kept(keeper)} == {2}
    assert not [path for path in keeper.memory.replica_of(OWNER).path.iterdir() if "of-00002" in path.name]


def test_what_a_run_has_left_behind_is_forgotten_when_it_goes_on(keeper: Keeper) -> None:
    for step in (1, 2):
        take(keeper, *copy_of(step))
    own = keeper.memory.slots(0, 3)[0]
    own.file.touch()
    own.commit(replace(copy_of(1)[0], rank=0, world=3, slot=0), drain=False)
    own.offer()
    keeper.memory.forget_copies(Version(attempt=1, step=1), 2)
    assert list(kept(keeper)) == [Version(attempt=1, step=1)]
    assert not own.offered, "of another world"
    keeper.memory.forget_copies(None, 2)
    assert not kept(keeper)
