"""A drain hashes every byte once, where it has arrived: what that one pass must find, and whom it must blame."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.tiers.build import RUN_ID, Place, snapshot

from dtrain.tiers.format.digest import BLOCK, Hasher, Sums, digest, file_digest
from dtrain.tiers.format.jsonfile import Unreadable
from dtrain.tiers.format.layout import Version
from dtrain.tiers.memory.gather import Unread, gather
from dtrain.tiers.stores import directory
from dtrain.tiers.stores.copyfile import copy_durable
from dtrain.tiers.stores.store import Progress
from dtrain.tiers.tier import disk_tier

Bend = Callable[[Path], None]
"""Changes a file behind everybody's back."""


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-len(data) // 4] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: -len(data) // 4])


def zero_the_end(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-500] + bytes(500))


def tear(path: Path) -> None:
    """The second half is from another step."""
    other = path.parent / "other"
    place = Place(other)
    snapshot(place.memory, 9)
    data, newer = path.read_bytes(), (place.memory.path / path.name).read_bytes()
    assert len(data) == len(newer)
    path.write_bytes(data[: -len(data) // 4] + newer[-len(data) // 4 :])


def write(place: Place) -> None:
    disk_tier(place.root, RUN_ID).write(*gather(place.memory, place.memory.whole()[Version(1, 1)]))


@pytest.fixture
def pinned(place: Place) -> Place:
    snapshot(place.memory, 1)
    return place


def slot_file(place: Place) -> Path:
    return place.memory.file_of(place.memory.whole()[Version(1, 1)][0])


@pytest.mark.parametrize("bend", [flip, zero_the_end, tear], ids=lambda bend: bend.__name__)
def test_a_slot_that_is_not_what_its_record_says_is_refused_and_named(pinned: Place, bend: Bend) -> None:
    bend(slot_file(pinned))
    with pytest.raises(Unreadable, match="does not match the commit record") as refused:
        write(pinned)
    assert str(slot_file(pinned)) in str(refused.value)
    assert pinned.tree() == []


@pytest.mark.parametrize("bend", [flip, cut, zero_the_end], ids=lambda bend: bend.__name__)
def test_what_arrives_otherwise_is_refused_and_the_memory_is_not_blamed(
    pinned: Place, bend: Bend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A bit that flips on the way, and a disk that keeps something else, differ from the record alike."""

    def copy(source: Path, target: Path, told: Progress | None = None, hasher: Hasher | None = None) -> str:
        bent = tmp_path / "bent"
        bent.write_bytes(source.read_bytes())
        bend(bent)
        return copy_durable(bent, target, told, hasher)

    monkeypatch.setattr(directory, "copy_durable", copy)
    with pytest.raises(Unreadable, match="read back other bytes than were to be written"):
        write(pinned)
    assert pinned.tree() == []


def test_what_is_right_is_not_hashed_in_memory(pinned: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(self: Unread) -> None:
        raise AssertionError("the slot was read once more")

    monkeypatch.setattr(Unread, "checked", checked)
    write(pinned)
    (checkpoint,), _ = disk_tier(pinned.root, RUN_ID).scan()
    for name, info in checkpoint.manifest.files.items():
        assert info["digest"] == file_digest(pinned.root / checkpoint.folder / name)


@pytest.mark.parametrize("sizes", [[[7]], [[4], [3, 0, 5], [0], [BLOCK + 3], [0, 0], [BLOCK, 2 * BLOCK], [0]]])
@pytest.mark.parametrize("chunk", [5_000, BLOCK, 3 * BLOCK])
def test_one_pass_gives_the_digests_of_the_file_and_of_its_parts(sizes: Sequence[Sequence[int]], chunk: int) -> None:
    total = sum(map(sum, sizes))
    data = (b"0123456789abcde" * (total // 15 + 1))[:total]
    sums = Sums(sizes)
    for tries in range(2):
        for begin in range(0, total, chunk):
            sums.update(memoryview(data)[begin : begin + chunk])
        position, parts, runs = 0, [], []
        for run in sizes:
            runs.append(digest(data[position : position + sum(run)]))
            for size in run:
                parts.append(digest(data[position : position + size]))
                position += size
        assert (sums.hexdigest(), sums.parts, sums.runs) == (digest(data), parts, runs), tries
        sums.reset()
