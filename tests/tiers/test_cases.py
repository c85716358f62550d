"""Faults that people met with other tools (the number in a test's name is that of the case), tried on the storage."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.build import RUN_ID, Place, put, snapshot

from dtrain.planners.sharding.shards import TensorInfo, divide
from dtrain.specs.errors import SpecError
from dtrain.specs.load import load_spec
from dtrain.tiers import faults
from dtrain.tiers.drain.drainer import Drainer, DrainJob
from dtrain.tiers.drain.writer import TierJob
from dtrain.tiers.format.digest import digest
from dtrain.tiers.format.jsonfile import Unreadable, dumps, read_lines
from dtrain.tiers.format.layout import MANIFEST, Version
from dtrain.tiers.format.manifest import build
from dtrain.tiers.memory.gather import gather
from dtrain.tiers.reading.recovery import find, open_candidate, verify
from dtrain.tiers.retention import Rule
from dtrain.tiers.stores.directory import DirectoryStore, file_system_type
from dtrain.tiers.stores.store import Place as StorePlace
from dtrain.tiers.tier import open_tier

EXAMPLE = Path(__file__).parents[2] / "specs/examples/tiny-gpt.yaml"


def usable(place: Place) -> list[int]:
    """Steps that a resume could take, newest first, every byte read."""
    steps = []
    for candidate in find(None, [place.disk]).candidates:
        try:
            verify(open_candidate(candidate))
        except Unreadable:
            continue
        steps.append(candidate.version.step)
    return steps


def rewrite(manifest: Path, **changes: Any) -> None:
    """Change a manifest and give it a digest that is right."""
    body = json.loads(manifest.read_bytes())
    del body["digest"]
    body = {key: value for key, value in {**body, **changes}.items() if value is not None}
    manifest.write_bytes(dumps({**body, "digest": digest(dumps(body))}))


@pytest.mark.parametrize(
    "loss", [{"data": None}, {"data": {}}, {"rng": None}, {"rng": {}}, {"files": {}}, {"tensors": None}]
)
def test_row_3_a_checkpoint_without_a_part_of_its_state_is_refused_and_the_older_one_used(
    place: Place, loss: dict[str, Any]
) -> None:
    place.store(1)
    rewrite(place.store(2) / MANIFEST, **loss)
    assert usable(place) == [1]
    (rejected,) = find(None, [place.disk]).rejected
    assert rejected.version.step == 2
    assert MANIFEST in rejected.reason


def test_row_4_two_newest_full_of_empty_files_the_third_is_used_and_both_are_named(place: Place) -> None:
    for step in (1, 2, 3):
        folder = place.store(step)
        if step > 1:
            for file in folder.iterdir():
                os.truncate(file, 0)
    assert usable(place) == [1]
    assert [rejected.version.step for rejected in find(None, [place.disk]).rejected] == [2, 3]


def test_row_5_no_room_for_three_of_four_ranks_means_no_checkpoint_and_nothing_left(place: Place) -> None:
    place.store(1, world=4)
    shutil.rmtree(place.memory.path)
    place.memory.path.mkdir()

    def watcher(name: str, where: str, detail: Any) -> None:
        if name == "disk.write" and "rank-00000" not in where and ".tmp-" in where:
            raise OSError(28, "No space left on device", where)

    before = faults.watch(watcher)
    try:
        with pytest.raises(OSError, match="No space left"):
            place.store(2, world=4)
    finally:
        faults.watch(before)
    assert usable(place) == [1]
    assert place.tree() == ["step-0000000001.a0001"]
    place.store(2, world=4)
    assert usable(place) == [2, 1], "with room again the same step goes in"


def test_row_6_files_of_two_steps_never_make_one_checkpoint(place: Place) -> None:
    first, second = place.store(1), place.store(2)
    shutil.copyfile(first / "rank-00001.safetensors", second / "rank-00001.safetensors")
    assert usable(place) == [1]


def test_rows_8_and_54_a_slow_save_is_of_the_step_of_its_snapshot(place: Place) -> None:
    snapshot(place.memory, 10, slot=0, drain=True)
    snapshot(place.memory, 11, slot=1)
    snapshot(place.memory, 12, slot=2)
    records = place.memory.whole()[Version(1, 10)]
    place.disk.write(*gather(place.memory, records))
    assert usable(place) == [10]
    assert find(None, [place.disk]).candidates[0].version.step == 10


def test_row_14_a_file_has_one_writer(place: Place) -> None:
    store = DirectoryStore(place.root)
    store.create("step", "a.json", b"1")
    with pytest.raises(FileExistsError):
        store.create("step", "a.json", b"2")
    source = place.run.root / "source"
    source.write_bytes(b"x" * 5000)
    store.copy_in("step", "b", source)
    with pytest.raises(FileExistsError):
        store.copy_in("step", "b", source)
    assert (place.root / "step" / "a.json").read_bytes() == b"1"


@pytest.mark.parametrize("keep", [0, -1])
def test_row_17_keep_is_at_least_one(keep: int) -> None:
    with pytest.raises(SpecError, match="keep"):
        load_spec(EXAMPLE, [f"tiers=[{{type: memory}}, {{type: disk, keep: {keep}}}]"])
    assert Rule(keep).kept([Version(1, 1), Version(1, 2)]) == {Version(1, 2)}


@pytest.mark.parametrize("commit", ["rename", "manifest"])
def test_row_20_never_more_on_the_disk_than_keep_and_the_one_being_written(place: Place, commit: str) -> None:
    tier = open_tier(StorePlace("disk", str(place.root), {"commit": commit}), RUN_ID)
    one = 0
    peak = 0

    def watcher(name: str, where: str, detail: Any) -> None:
        nonlocal peak
        files = [file for file in place.root.rglob("*") if file.is_file() and ".fence" not in file.parts]
        peak = max(peak, sum(file.stat().st_size for file in files))

    before = faults.watch(watcher)
    try:
        for step in range(1, 8):
            snapshot(place.memory, step)
            written = tier.write(*gather(place.memory, place.memory.whole()[Version(1, step)]))
            one = max(one, written.manifest.nbytes + len(written.manifest.to_bytes()))
            tier.prune(Rule(2), {Version(1, step)})
    finally:
        faults.watch(before)
    assert 2 * one < peak <= (2 + 1) * one + 4096, "and a note or a manifest under its first name"


def test_row_22_a_file_that_somebody_has_deleted_already_is_no_error(place: Place) -> None:
    for step in (1, 2):
        place.store(step)
    (place.root / Version(1, 1).dirname / "rank-00001.safetensors").unlink()
    store = DirectoryStore(place.root)
    store.delete(Version(1, 1).dirname, ["rank-00000.safetensors", "rank-00001.safetensors", MANIFEST])
    store.delete(Version(1, 1).dirname, [MANIFEST])
    assert place.tree() == [Version(1, 2).dirname]


def drain_once(place: Place, keep: int, memory_step: int, attempt: int) -> None:
    """A run that comes back, is told to stop after one step, and stores it."""
    job = DrainJob(
        str(place.run.root), str(place.memory.path), RUN_ID, (TierJob(StorePlace("disk", str(place.root)), keep),)
    )
    drainer = Drainer(job)
    drainer.start()
    snapshot(place.memory, memory_step, attempt=attempt, drain=True)
    drainer.drain_pending()


def test_row_23_twenty_preemptions_leave_no_more_than_keep(place: Place) -> None:
    for attempt in range(1, 21):
        drain_once(place, 3, attempt, attempt)
    assert [name[-4:] for name in place.tree()] == ["0018", "0019", "0020"]
    assert len(read_lines(place.run.events)) == 20


def test_row_28_a_name_that_cannot_be_written_now_does_not_stand_in_the_way_later(place: Place) -> None:
    place.root.mkdir(parents=True)
    (place.root / ".tmp-step-0000000001.a0001").write_text("a file where the staging folder should go")
    snapshot(place.memory, 1)
    with pytest.raises(OSError, match="tmp-step"):
        place.store(1)
    place.store(2)
    assert usable(place) == [2]


def test_row_32_a_mounted_bucket_gets_its_manifest_last_and_no_rename(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert file_system_type(Path("/proc")) == "proc"
    assert file_system_type(Path("/dev/shm/not/there/yet")) == "tmpfs"
    monkeypatch.setattr("dtrain.tiers.stores.directory.file_system_type", lambda path: "fuse.gcsfuse")
    tier = open_tier(StorePlace("disk", str(place.root)), RUN_ID)
    seen: list[tuple[str, str]] = []
    before = faults.watch(lambda name, where, detail: seen.append((name, where)))
    try:
        snapshot(place.memory, 1)
        tier.write(*gather(place.memory, place.memory.whole()[Version(1, 1)]))
    finally:
        faults.watch(before)
    renamed = [where for name, where in seen if name == "disk.rename"]
    assert all(where.endswith(".json.new") for where in renamed), "no folder is renamed"
    created = [Path(where).name for name, where in seen if name == "disk.create"]
    assert created[-1] == f".{MANIFEST}.new"
    assert usable(place) == [1]


def test_row_51_a_rank_without_a_byte_of_its_own_is_legal(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    little = [TensorInfo("model.a", "F32", (1, 50))]
    assert [] in [list(pieces) for pieces in divide(little, 3)]
    monkeypatch.setattr("tests.tiers.build.TENSORS", little)
    place.store(1, world=3)
    assert usable(place) == [1]


def test_row_51_a_missing_rank_is_not(place: Place) -> None:
    put(place.memory, 0, 2, 0, 1)
    record = place.memory.slots(0, 2)[0].record()
    assert record is not None
    from dtrain.tiers.memory.gather import unread

    with pytest.raises(Unreadable, match="1 ranks, should be 2"):
        build(record.version, 2, RUN_ID, {}, [unread(place.memory, record).checked()])
