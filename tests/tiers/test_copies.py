"""Copies of one run in one place, and claims that vanish: no lineages mixed, no tier given up for nothing."""

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.build import RUN_ID, Place, snapshot
from tests.tiers.test_writer import ALONE, events, from_memory

from dtrain.tiers import fence
from dtrain.tiers.drain.drainer import Drainer, DrainJob
from dtrain.tiers.drain.writer import TierFailed, TierJob, Writer
from dtrain.tiers.fence import ClaimGone, Fenced, Taken, claim
from dtrain.tiers.format.jsonfile import dumps
from dtrain.tiers.format.layout import RunDir, Version
from dtrain.tiers.memory.gather import gather
from dtrain.tiers.stores.directory import DirectoryStore
from dtrain.tiers.stores.store import Place as StorePlace
from dtrain.tiers.tier import Tier, open_tier

WAYS = ["rename", "manifest"]


@pytest.fixture(params=WAYS)
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> StorePlace:
    """A place outside the run's folder, committed to in either way."""
    return StorePlace("disk", str(tmp_path / "shared"), {"commit": request.param})


def copy_of(place: Place, name: str = "copy") -> RunDir:
    """As `cp -r` makes it."""
    return RunDir(Path(shutil.copytree(place.run.root, place.run.root.with_name(name))))


def tier_at(where: StorePlace, run: RunDir) -> Tier:
    return open_tier(where, RUN_ID, home=run.root)


def stored(place: Place, tier: Tier, step: int, attempt: int = 1) -> None:
    snapshot(place.memory, step, attempt=attempt)
    tier.write(*gather(place.memory, place.memory.whole()[Version(attempt, step)]))


def release(tier: Tier) -> None:
    assert tier.fence is not None
    tier.fence.release()


def writer(place: Place, where: StorePlace, **options: Any) -> Writer:
    return Writer(TierJob(where, **{"keep": 9, **options}), place.run, RUN_ID, ALONE)


@pytest.mark.parametrize("alive", [True, False])
def test_a_copy_of_a_run_is_refused_whether_the_other_is_alive_or_ended_in_good_order(
    place: Place, shared: StorePlace, alive: bool
) -> None:
    original = tier_at(shared, place.run).fenced()
    stored(place, original, 1)
    if not alive:
        release(original)
        assert not (Path(shared.url) / ".fence").exists(), "the checkpoint alone says who made it"
    copy = copy_of(place)
    for attempt in (tier_at(shared, copy).fenced, tier_at(shared, copy).refuse_others):
        with pytest.raises(Taken) as refused:
            attempt()
        assert str(place.run.root) in str(refused.value)
        assert str(copy.root) in str(refused.value)
        assert "place of its own" in str(refused.value)
    if alive:
        original.check_fence()
    else:
        assert not (Path(shared.url) / ".fence").exists(), "a refusal leaves no claim"
        tier_at(shared, place.run).fenced()


def test_a_claim_alone_keeps_the_copy_out_too(place: Place, shared: StorePlace) -> None:
    tier_at(shared, place.run).fenced()
    with pytest.raises(Taken, match="is a copy of it"):
        tier_at(shared, copy_of(place)).fenced()


@pytest.mark.parametrize("claimed", [True, False])
def test_a_run_that_was_moved_goes_on(place: Place, shared: StorePlace, claimed: bool) -> None:
    before = tier_at(shared, place.run).fenced()
    stored(place, before, 1)
    if not claimed:
        release(before)
    moved = RunDir(place.run.root.rename(place.run.root.with_name("moved")))
    after = tier_at(shared, moved)
    after.refuse_others()
    stored(place, after.fenced(), 2)
    assert after.read(Version(1, 2)).manifest.made_by["output_dir"] == str(moved.root)
    with pytest.raises(Taken):  # and a copy of it made later is refused by its new name
        tier_at(shared, RunDir(Path(shutil.copytree(moved.root, place.run.root)))).fenced()


@pytest.mark.parametrize("way", ["link", "other run", "no run.json", "garbled"])
def test_only_another_folder_with_the_same_run_in_it_holds_a_run_up(place: Place, shared: StorePlace, way: str) -> None:
    stored(place, tier_at(shared, place.run).fenced(), 1)
    if way == "link":
        (place.run.root.with_name("link")).symlink_to(place.run.root)
        tier_at(shared, RunDir(place.run.root.with_name("link"))).fenced()
        return
    copy = copy_of(place)
    if way == "no run.json":
        place.run.run.unlink()
    else:
        place.run.run.write_bytes(dumps({"run_id": "another"}) if way == "other run" else b"{")
    tier_at(shared, copy).fenced()


def test_a_run_goes_on_after_the_loss_of_its_host(
    place: Place, shared: StorePlace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lost = RunDir(tmp_path / "only" / "seen" / "there")
    monkeypatch.setattr(socket, "gethostname", lambda: "lost-host")
    stored(place, tier_at(shared, lost).fenced(), 1)
    monkeypatch.undo()
    tier = tier_at(shared, place.run)
    assert tier.read(Version(1, 1)).manifest.made_by == {"host": "lost-host", "output_dir": str(lost.root)}
    tier.refuse_others()
    stored(place, tier.fenced(), 2)


def test_what_lies_inside_the_run_folder_was_copied_with_it_and_goes_on(place: Place) -> None:
    inside = StorePlace("disk", str(place.root))
    stored(place, tier_at(inside, place.run).fenced(), 1)  # killed: its claim is copied too
    copy = copy_of(place)
    theirs = tier_at(StorePlace("disk", str(copy.disk("checkpoints"))), copy)
    theirs.refuse_others()
    stored(place, theirs.fenced(), 2)
    assert [checkpoint.version.step for checkpoint in tier_at(inside, place.run).scan()[0]] == [1]


def test_a_link_out_of_the_run_folder_does_not_make_a_shared_place_its_own(place: Place, tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    place.root.symlink_to(tmp_path / "big")
    stored(place, tier_at(StorePlace("disk", str(place.root)), place.run).fenced(), 1)
    copy = RunDir(Path(shutil.copytree(place.run.root, place.run.root.with_name("copy"), symlinks=True)))
    with pytest.raises(Taken):
        tier_at(StorePlace("disk", str(copy.disk("checkpoints"))), copy).fenced()


@pytest.mark.parametrize("made_by", [None, [], "x", {}, {"output_dir": 7}, {"output_dir": "a\0b"}, {"output_dir": ""}])
def test_what_a_manifest_says_of_its_maker_is_not_trusted(place: Place, made_by: Any) -> None:
    fence.refuse_copy(DirectoryStore(Path("/nowhere")), RUN_ID, place.run.root, made_by)


def test_a_deleted_claim_is_made_again_and_counted_and_told_once(place: Place, shared: StorePlace) -> None:
    disk = writer(place, shared)
    assert disk.carry(*from_memory(place, 1))
    shutil.rmtree(Path(shared.url) / ".fence")
    assert not disk.carry(*from_memory(place, 2))
    assert not disk.closed
    assert "our claim was deleted" in events(place, "skipped")[0]["reason"]
    disk.health._again_at = 0.0
    assert disk.carry(*from_memory(place, 3))
    assert disk.carry(*from_memory(place, 4))
    assert [event["left_out"] for event in events(place, "skipped")] == [1]
    assert "1 checkpoints were left out" in events(place, "warning")[0]["detail"]
    assert sorted(checkpoint.version.step for checkpoint in tier_at(shared, place.run).scan()[0]) == [1, 3, 4]
    assert events(place, "fault") == []


def test_an_emptied_place_is_filled_again(place: Place, shared: StorePlace) -> None:
    disk = writer(place, shared)
    assert disk.carry(*from_memory(place, 1))
    shutil.rmtree(shared.url)
    assert not disk.carry(*from_memory(place, 2))
    disk.health._again_at = 0.0
    assert disk.carry(*from_memory(place, 3))


@pytest.mark.parametrize("options", [{"on_failure": "stop"}, {}])
def test_a_deleted_claim_costs_neither_the_last_step_nor_a_run_that_stops_for_failures(
    place: Place, shared: StorePlace, options: dict[str, Any]
) -> None:
    disk = writer(place, shared, **options)
    assert disk.carry(*from_memory(place, 1))
    shutil.rmtree(Path(shared.url) / ".fence")
    assert disk.carry(*from_memory(place, 2), last=not options)


def test_who_sleeps_while_somebody_takes_over_and_ends_in_good_order_does_not_claim_again(
    place: Place, shared: StorePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the other is in the fence then, and its folder cannot be seen from here: its checkpoint tells."""
    asleep = writer(place, shared)
    assert asleep.carry(*from_memory(place, 1))
    other = tier_at(shared, RunDir(Path("/not/to/be/seen"))).fenced()
    stored(place, other, 2, attempt=2)
    release(other)
    version, load = from_memory(place, 3)
    assert not asleep.carry(version, load, last=True)
    assert asleep.closed
    (told,) = events(place, "fault")
    assert "somebody else has written step 2 (attempt 2)" in told["detail"]
    assert {checkpoint.version.step for checkpoint in other.scan()[0]} == {1, 2}
    assert not (Path(shared.url) / ".fence").exists()


def test_of_two_whose_claims_were_deleted_one_goes_on(place: Place, shared: StorePlace) -> None:
    old = tier_at(shared, place.run).fenced()
    new = tier_at(shared, place.run).fenced()
    shutil.rmtree(Path(shared.url) / ".fence")
    for tier in (old, new):
        with pytest.raises(ClaimGone):
            tier.check_fence()
    assert new.fence is not None
    again = tier_at(shared, place.run).fenced(new.fence.epoch)
    for tier in (old, new):
        with pytest.raises(Fenced, match="taken over by process"):
            tier.check_fence()
    again.check_fence()
    release(old)
    again.check_fence()


def test_a_place_that_was_unmounted_is_not_claimed_on_the_disk_below(
    place: Place, shared: StorePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = writer(place, shared)
    assert disk.carry(*from_memory(place, 1))
    Path(shared.url).rename(place.run.root / "unmounted")
    monkeypatch.setattr(fence, "_device", lambda store: -1)
    assert not disk.carry(*from_memory(place, 2), last=True)
    assert not Path(shared.url).exists()
    assert "unmounted?" in events(place, "skipped")[0]["reason"]
    (place.run.root / "unmounted").rename(shared.url)
    disk.health._again_at = 0.0
    assert disk.carry(*from_memory(place, 3)), "mounted again, its claim is still there"


def test_a_takeover_stops_a_run_whose_tier_is_to_stop_it(place: Place, shared: StorePlace) -> None:
    disk = writer(place, shared, on_failure="stop")
    assert disk.carry(*from_memory(place, 1))
    claim(disk.open().store, RUN_ID)
    with pytest.raises(TierFailed, match="taken over by process"):
        disk.carry(*from_memory(place, 2))


def test_a_takeover_found_while_deleting_is_one_too(place: Place, shared: StorePlace) -> None:
    disk = writer(place, shared, keep=1)
    assert disk.carry(*from_memory(place, 1))
    told = disk._tell

    def taken_after_commit(event: str, version: Version, **details: object) -> None:
        told(event, version, **details)
        if event == "committed":
            claim(disk.open().store, RUN_ID)

    disk._tell = taken_after_commit  # type: ignore[method-assign]
    disk.carry(*from_memory(place, 2))
    assert disk.closed
    assert [event["kind"] for event in events(place, "fault")] == ["taken"]


def drainer(place: Place, where: StorePlace) -> Drainer:
    return Drainer(DrainJob(str(place.run.root), str(place.memory.path), RUN_ID, (TierJob(where, 2),)))


def test_a_drainer_that_is_started_again_does_not_take_back_what_was_taken_over(
    place: Place, shared: StorePlace
) -> None:
    first = drainer(place, shared)
    first.start()
    other = tier_at(shared, RunDir(Path("/not/to/be/seen"))).fenced()
    snapshot(place.memory, 1, drain=True)
    first.drain_pending()
    assert list(place.memory.taken_over()) == ["disk"]
    again = drainer(place, shared)
    again.start()
    snapshot(place.memory, 2, drain=True)
    again.drain_pending()
    other.check_fence()
    assert steps_in(other) == []
    assert place.memory.pending() == []
    place.memory.forget_taken_over()
    assert place.memory.taken_over() == {}


def steps_in(tier: Tier) -> list[int]:
    return [checkpoint.version.step for checkpoint in tier.scan()[0]]


def test_what_another_has_stored_under_the_same_name_does_not_count_as_ours(place: Place, shared: StorePlace) -> None:
    disk = writer(place, shared)
    assert disk.carry(*from_memory(place, 1))
    stored(place, tier_at(shared, RunDir(Path("/not/to/be/seen"))).fenced(), 2)
    assert not disk.carry(*from_memory(place, 3))
    assert disk.closed
    assert not disk.holds(Version(1, 2))
    assert disk.get(Version(1, 2)) is not None, "it can be looked at"
