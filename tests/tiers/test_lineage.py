"""Attempt numbers and the run's id survive the loss of any of the places that tell them."""

import shutil
from pathlib import Path

import pytest
from tests.tiers.build import RUN_ID, Place, manifest_of, snapshot
from tests.tiers.fake import FakeStore

from dtrain.tiers.format.jsonfile import append_event, dumps, replace
from dtrain.tiers.format.layout import Version
from dtrain.tiers.memory.gather import gather
from dtrain.tiers.reading.lineage import LEAP, highest_attempt, holdings, remembered
from dtrain.tiers.stores.store import Place as StorePlace
from dtrain.tiers.stores.store import StoreError
from dtrain.tiers.tier import Tier


class DeafStore(FakeStore):
    """One that cannot be asked."""

    def folders(self) -> list[str]:
        raise StoreError("no route")


def tier_of(store: FakeStore, run_id: str | None = RUN_ID) -> Tier:
    return Tier(StorePlace("object", "fake://"), store, run_id)


def told_by_logs(place: Place) -> None:
    place.run.attempt(7).mkdir()


def told_by_events(place: Place) -> None:
    append_event(place.run.events, "attempt", None, 7)


def told_by_memory(place: Place) -> None:
    snapshot(place.memory, 10, attempt=7)


def told_by_a_checkpoint(place: Place) -> None:
    snapshot(place.memory, 10, attempt=7)
    place.disk.write(*gather(place.memory, place.memory.whole()[Version(7, 10)]))
    shutil.rmtree(place.memory.path)


def told_by_an_unfinished_one(place: Place) -> None:
    (place.root / ".tmp-step-0000000010.a0007").mkdir(parents=True)


def told_by_a_damaged_one(place: Place) -> None:
    (place.root / "step-0000000010.a0007").mkdir(parents=True)


@pytest.mark.parametrize(
    "tell",
    [
        told_by_logs, told_by_events, told_by_memory, told_by_a_checkpoint, told_by_an_unfinished_one,
        told_by_a_damaged_one,
    ],
)  # fmt: skip
def test_a_number_is_never_used_again_whatever_else_is_lost(place: Place, tell: object) -> None:
    assert highest_attempt(place.run, place.memory, [place.disk]) == 0
    assert callable(tell)
    tell(place)
    used = highest_attempt(place.run, place.memory, [place.disk])
    assert used == 7
    assert place.run.next_attempt(used) == 8
    assert place.run.next_attempt(used) == 9


def test_where_the_count_is_lost_and_a_tier_is_silent_numbers_are_left_free(place: Place) -> None:
    tiers = [place.disk, tier_of(DeafStore(renames=False))]
    told_by_a_checkpoint(place)
    assert highest_attempt(place.run, place.memory, tiers) == 7 + LEAP
    told_by_logs(place)
    assert highest_attempt(place.run, place.memory, tiers) == 7, "the run's own count is whole"


def test_every_tier_says_whose_checkpoints_it_has(place: Place) -> None:
    store = FakeStore(renames=False)
    for step in (10, 20):
        snapshot(place.memory, step, attempt=2)
        assert remembered(place.memory) is None, "nobody owns this memory yet"
        replace(place.memory.path / "owner.json", dumps({"run_id": RUN_ID}))
        tier_of(store).write(*gather(place.memory, place.memory.whole()[Version(2, step)]))
        (place.memory.path / "owner.json").unlink()
    found, silent = holdings([place.disk, tier_of(store, "somebody"), tier_of(DeafStore(renames=True))])
    assert [(one.run_id, one.version) for one in found] == [(RUN_ID, Version(2, 20))]
    assert len(silent) == 1
    assert "no route" in silent[0]
    with pytest.raises(StoreError):
        holdings([tier_of(DeafStore(renames=True))], strict=True)


def test_a_name_that_is_taken_by_other_bytes_is_not_a_checkpoint_of_ours(place: Place) -> None:
    """Rather no checkpoint than one that is taken for another: the state would be another run's."""
    snapshot(place.memory, 10)
    first, sources = manifest_of(place.memory, place.memory.whole()[Version(1, 10)])
    place.disk.write(first, sources)
    assert place.disk.write(first, sources).manifest == first, "the same one again is fine"
    other_files = {name: {**info, "digest": "0" * 32} for name, info in first.files.items()}
    other = type(first)({**first.body, "files": other_files})
    with pytest.raises(FileExistsError, match="another checkpoint has this name"):
        place.disk.write(other, sources)
    assert [checkpoint.manifest for checkpoint in place.disk.scan()[0]] == [first]


def test_a_memory_without_an_owner_or_a_whole_snapshot_tells_nothing(place: Place, tmp_path: Path) -> None:
    assert remembered(place.memory) is None
    replace(place.memory.path / "owner.json", dumps({"run_id": RUN_ID}))
    assert remembered(place.memory) is None
    snapshot(place.memory, 10)
    found = remembered(place.memory)
    assert found is not None
    assert (found.run_id, found.version) == (RUN_ID, Version(1, 10))
