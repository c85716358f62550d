"""The disk tier: what is committed can be read whole, what is not whole is refused, what is not ours is left alone."""

import shutil
from pathlib import Path

import pytest
from safetensors import safe_open
from tests.tiers.build import TENSORS, Place, digest_of, put, snapshot, value_of

from dtrain.tiers.format.jsonfile import Unreadable
from dtrain.tiers.format.layout import Version, parse_version
from dtrain.tiers.memory.slots import SlotRecord
from dtrain.tiers.reading.recovery import contents, find, open_candidate, verify
from dtrain.tiers.retention import Rule
from dtrain.tiers.tier import disk_tier


def test_a_checkpoint_reads_back_as_it_was_stored(place: Place) -> None:
    place.store(120)
    found = find(None, [place.disk])
    (candidate,) = found.candidates
    assert not found.rejected
    got = {info.name: bytearray() for info in TENSORS}
    for content in contents(open_candidate(candidate)):
        if content.is_state:
            got[content.name] += content.data
    assert {name: bytes(data) for name, data in got.items()} == {i.name: value_of(i, 120) for i in TENSORS}


def test_files_are_plain_safetensors_on_page_boundaries(place: Place) -> None:
    folder = place.store(3)
    assert folder.name == "step-0000000003.a0001"
    names = set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            names |= set(opened.keys())
        assert (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 4096 == 0
    assert names == {info.name for info in TENSORS} | {"rng.python"}


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_state_digest_does_not_depend_on_the_world_size(place: Place, world: int) -> None:
    place.store(7, world=1)
    alone = digest_of(open_candidate(find(None, [place.disk]).candidates[0]))
    shutil.rmtree(place.memory.path)
    place.memory.path.mkdir()
    place.store(7, attempt=2, world=world)
    assert digest_of(open_candidate(find(None, [place.disk]).candidates[0])) == alone


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << (position % 8)
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors", "manifest.json"])
def test_every_flipped_bit_is_noticed_and_the_older_step_is_used(place: Place, name: str) -> None:
    place.store(1)
    file = place.store(2) / name
    good = file.read_bytes()
    for position in [*range(0, len(good), max(1, len(good) // 97)), len(good) - 1]:
        flip(file, position)
        usable = []
        for candidate in find(None, [place.disk]).candidates:
            try:
                verify(open_candidate(candidate))
            except Unreadable:
                continue
            usable.append(candidate.version.step)
        assert usable == [1], f"byte {position} of {name}"
        file.write_bytes(good)


@pytest.mark.parametrize("name", ["rank-00001.safetensors", "manifest.json"])
def test_every_truncation_is_noticed(place: Place, name: str) -> None:
    file = place.store(2) / name
    good = file.read_bytes()
    cuts = {0, 1, 7, 8, 4095, 4096, 4097, len(good) // 2, len(good) - 1}
    for size in sorted(cut for cut in cuts if cut < len(good)):
        file.write_bytes(good[:size])
        with pytest.raises(Unreadable):
            found = find(None, [place.disk]).candidates
            if not found:
                raise Unreadable("no manifest")
            verify(open_candidate(found[0]))


def test_row_4_the_tail_zeroed_at_full_size_is_noticed(place: Place) -> None:
    file = place.store(2) / "rank-00000.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    with pytest.raises(Unreadable):
        verify(open_candidate(find(None, [place.disk]).candidates[0]))


def test_row_13_only_exact_names_are_checkpoints_and_others_are_never_deleted(place: Place) -> None:
    for step in (10, 20, 30, 40):
        place.store(step)
    strangers = ["step-10.backup", "foo-step-12", "step-0000000010.a0001.bak", "old-step-0000000010.a0001", "step-10"]
    for name in strangers:
        shutil.copytree(place.root / "step-0000000010.a0001", place.root / name)
        (place.root / name / "mine.txt").write_text("keep me")
    assert [c.version.step for c in place.disk.scan()[0]] == [10, 20, 30, 40]
    place.disk.prune(Rule(2))
    assert [c.version.step for c in place.disk.scan()[0]] == [30, 40]
    assert place.disk.remove_leftovers() == []
    assert all((place.root / name / "mine.txt").exists() for name in strangers)


def test_row_10_a_folder_without_manifest_is_told_of_and_never_deleted(place: Place) -> None:
    folder = place.store(5)
    (folder / "manifest.json").unlink()
    found = find(None, [place.disk])
    assert not found.candidates
    assert [r.version.step for r in found.rejected] == [5]
    place.disk.prune(Rule(1))
    assert folder.exists()


def test_retention_leaves_other_runs_and_the_newest_alone(place: Place) -> None:
    place.store(1)
    disk_tier(place.root, "another run").prune(Rule(1))
    assert len(place.disk.scan()[0]) == 1
    place.store(2)
    assert place.disk.prune(Rule(1)).removed == [Version(1, 1)]
    assert place.disk.prune(Rule(1)).removed == []


def test_row_18_order_is_by_attempt_and_step_not_by_time(place: Place) -> None:
    place.store(40, attempt=1)
    place.store(30, attempt=2)
    for folder in place.root.iterdir():
        import os

        os.utime(folder, (0, 0))
    assert [c.version for c in find(None, [place.disk]).candidates] == [Version(2, 30), Version(1, 40)]


def test_a_name_is_used_once(place: Place) -> None:
    folder = place.store(9)
    before = (folder / "manifest.json").stat().st_mtime_ns
    place.store(9)
    assert (folder / "manifest.json").stat().st_mtime_ns == before


def test_memory_is_whole_only_with_one_version_on_every_rank(place: Place) -> None:
    put(place.memory, 0, 2, 0, step=4)
    put(place.memory, 1, 2, 0, step=5)
    assert place.memory.whole() == {}
    put(place.memory, 1, 2, 1, step=4, attempt=2)
    assert place.memory.whole() == {}, "the same step of another attempt is another version"
    put(place.memory, 0, 2, 1, step=5)
    assert set(place.memory.whole()) == {Version(1, 5)}


def test_a_damaged_commit_record_makes_the_slot_void(place: Place) -> None:
    snapshot(place.memory, 6)
    slot = place.memory.slots(1, 2)[0]
    text = slot.record_file.read_text()
    slot.record_file.write_text(text.replace('"step":6', '"step":7'))
    assert slot.record() is None
    assert place.memory.whole() == {}


def test_settling_keeps_only_marks_of_whole_versions(place: Place) -> None:
    snapshot(place.memory, 8, slot=0, drain=True)
    place.memory.slots(1, 2)[0].drain_mark.unlink()  # rank 1 died between record and mark
    put(place.memory, 0, 2, 1, step=9, drain=True)  # rank 1 died before its copy of step 9
    place.memory.settle()
    marked = {(slot.rank, slot.index) for slot in place.memory.pending()}
    assert marked == {(0, 0), (1, 0)}


def test_versions_and_names_belong_together() -> None:
    assert parse_version(Version(attempt=12, step=345).dirname) == Version(attempt=12, step=345)
    for name in ("step-0000000001", "step-0000000001.a1", "step-1.a0001", "step-0000000001.a0001 ", "../x"):
        assert parse_version(name) is None


def test_the_faster_tier_comes_first_and_the_newest_version_before_all(place: Place) -> None:
    place.store(10)
    snapshot(place.memory, 10)
    snapshot(place.memory, 11, slot=1)
    order = [(c.tier, c.version.step) for c in find(place.memory, [place.disk]).candidates]
    assert order == [("memory", 11), ("memory", 10), ("disk", 10)]


def test_records_survive_json(place: Place) -> None:
    snapshot(place.memory, 2)
    record = place.memory.slots(0, 2)[0].record()
    assert isinstance(record, SlotRecord)
    assert record.meta["data"] == {"samples": 16}
