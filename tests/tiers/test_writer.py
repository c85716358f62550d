"""Writers and followers: a tier that fails is told of once, tried again later, and never loses what others hold."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.tiers.build import RUN_ID, Place, snapshot

from dtrain.tiers import faults
from dtrain.tiers.drain.drainer import Drainer, DrainJob, drain_job_from_json
from dtrain.tiers.drain.follower import Follower
from dtrain.tiers.drain.writer import Load, TierFailed, TierJob, Writer
from dtrain.tiers.fence import claim
from dtrain.tiers.format.jsonfile import read_lines
from dtrain.tiers.format.layout import Version
from dtrain.tiers.memory.gather import gather
from dtrain.tiers.stores.health import LONGEST_WAIT_S, Health
from dtrain.tiers.stores.store import Place as StorePlace
from dtrain.tiers.tier import Tier, open_tier
from dtrain.tiers.together import Group

ALONE = Group(0, 1)


def events(place: Place, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(place.run.events) if line["event"] == kind]


def writer(place: Place, name: str = "checkpoints", **options: Any) -> Writer:
    job = TierJob(StorePlace("disk", str(place.run.root / name)), **{"keep": 2, **options})
    return Writer(job, place.run, RUN_ID, ALONE)


def tier_of(writer: Writer) -> Tier:
    return open_tier(writer.job.place, RUN_ID)


def steps(writer: Writer) -> list[int]:
    return [checkpoint.version.step for checkpoint in tier_of(writer).scan()[0]]


def from_memory(place: Place, step: int) -> tuple[Version, Load]:
    snapshot(place.memory, step)
    version = Version(1, step)

    @contextlib.contextmanager
    def load() -> Iterator[Any]:
        yield gather(place.memory, place.memory.whole()[version])

    return version, load


@contextlib.contextmanager
def failing(matches: Callable[[str, str], bool]) -> Iterator[None]:
    """Every operation that matches (name, path) fails with EIO."""

    def watcher(name: str, where: str, detail: Any) -> None:
        if matches(name, where):
            raise OSError(5, "Input/output error", where)

    before = faults.watch(watcher)
    try:
        yield
    finally:
        faults.watch(before)


def test_waits_double_up_to_a_minute_and_start_anew_after_a_success() -> None:
    health, now, waits = Health(), 0.0, []
    for _ in range(9):
        health.failed(now)
        begun = now
        while not health.ready(now):
            now += 0.5
        waits.append(now - begun)
    assert waits == [1, 2, 4, 8, 16, 32, LONGEST_WAIT_S, LONGEST_WAIT_S, LONGEST_WAIT_S]
    health.passed_over()
    assert health.worked() == 10, "nine failed, one was not tried"
    assert health.ready(now) and not health.failing
    health.failed(now)
    assert health.ready(now + 1)


def test_row_25_a_failing_tier_is_tried_again_and_what_was_left_out_is_counted(place: Place) -> None:
    disk = writer(place)
    with failing(lambda name, where: name == "disk.write"):
        assert not disk.carry(*from_memory(place, 10))
        assert not disk.carry(*from_memory(place, 11)), "not tried yet"
    assert steps(disk) == []
    disk.health._again_at = 0.0
    assert disk.carry(*from_memory(place, 12))
    assert steps(disk) == [12]
    told = events(place, "skipped")
    assert [(event["step"], event["left_out"]) for event in told] == [(10, 1), (11, 2)]
    assert "Input/output error" in told[0]["reason"]
    assert "free there" in told[0]["reason"]
    (again,) = events(place, "warning")
    assert "2 checkpoints were left out" in again["detail"]
    (committed,) = events(place, "committed")
    assert committed["bytes"] > 0
    assert committed["bytes_per_s"] > 0


def test_a_tier_with_on_failure_stop_ends_the_run(place: Place) -> None:
    disk = writer(place, on_failure="stop")
    with failing(lambda name, where: name == "disk.sync"), pytest.raises(TierFailed, match="on_failure is stop"):
        disk.carry(*from_memory(place, 10))
    assert place.tree() == [], "nothing half done is left"


def test_a_writer_that_was_shut_out_neither_commits_nor_deletes(place: Place) -> None:
    old = writer(place, keep=1)
    for step in (1, 2):
        assert old.carry(*from_memory(place, step))
    assert steps(old) == [2]
    claim(old.open().store, RUN_ID)
    assert not old.carry(*from_memory(place, 3))
    assert steps(old) == [2]
    assert old.closed
    assert not old.carry(*from_memory(place, 4))
    (told,) = events(place, "fault")
    assert told["kind"] == "taken"
    assert "was taken over by process" in told["detail"]
    assert place.tree() == ["step-0000000002.a0001"], "its try is cleared away"


def test_another_run_s_place_is_never_written_to(place: Place) -> None:
    disk = writer(place)
    claim(open_tier(disk.job.place, "other").store, "other")
    assert not disk.carry(*from_memory(place, 1))
    assert "belongs to another run" in events(place, "fault")[-1]["detail"]
    assert steps(disk) == []


def test_kept_for_good_every_so_many_steps(place: Place) -> None:
    disk = writer(place, keep=1, keep_every=4)
    for step in range(1, 11):
        assert disk.carry(*from_memory(place, step))
    assert steps(disk) == [4, 8, 10]


def follow(place: Place, every: int = 1) -> Follower:
    return Follower(writer(place), writer(place, "far", every=every, keep=10))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_follower_gets_the_same_files_and_the_same_manifest(place: Place) -> None:
    follower = follow(place)
    follower.start()
    version, load = from_memory(place, 6)
    assert follower.source.carry(version, load)
    follower.offer(version)
    follower.finish()
    first, second = (tier_of(w).read(version).manifest.to_bytes() for w in (follower.source, follower.target))
    assert first == second
    tier_of(follower.target).read(version).check_bytes()


def test_row_55_a_slow_follower_leaves_out_what_was_overtaken_and_says_so(place: Place) -> None:
    follower = follow(place)
    versions = []
    for step in (1, 2, 3):
        version, load = from_memory(place, step)
        versions.append(version)
        assert follower.source.carry(version, load, follower.spared)
        follower.offer(version)
    assert follower.spared() == {versions[-1]}, "one waits, whatever was offered"
    follower.start()
    follower.finish()
    assert steps(follower.target) == [3]
    assert [event["step"] for event in events(place, "skipped")] == [1, 2]


def test_what_a_follower_is_at_is_not_deleted_under_its_hands(place: Place) -> None:
    follower = Follower(writer(place, keep=1), writer(place, "far"))
    version, load = from_memory(place, 1)
    assert follower.source.carry(version, load, follower.spared)
    follower.offer(version)
    assert follower.source.carry(*from_memory(place, 2), follower.spared)
    assert steps(follower.source) == [1, 2], "one more than keep, while it is needed"
    follower.start()
    follower.finish()
    assert follower.source.carry(*from_memory(place, 3), follower.spared)
    assert steps(follower.source) == [3]


def drainer(place: Place, every: int = 1) -> Drainer:
    tiers = (
        TierJob(StorePlace("disk", str(place.root)), 2),
        TierJob(StorePlace("object", (place.run.root / "far").as_uri()), 2, every=every),
    )
    job = DrainJob(str(place.run.root), str(place.memory.path), RUN_ID, tiers)
    import json

    return Drainer(drain_job_from_json(json.loads(job.to_bytes())))


def far(place: Place) -> list[int]:
    tier = open_tier(StorePlace("object", (place.run.root / "far").as_uri()), RUN_ID)
    for checkpoint in tier.scan()[0]:
        checkpoint.check_bytes()
    return [checkpoint.version.step for checkpoint in tier.scan()[0]]


def test_the_second_tier_gets_what_its_interval_says_and_the_last_of_all(place: Place) -> None:
    work = drainer(place, every=20)
    work.start()
    for step, slot in ((10, 0), (20, 1), (30, 2)):
        snapshot(place.memory, step, slot=slot, drain=True)
        assert work.drain(Version(1, step))
        wait_for(lambda: work.follower is not None and not work.follower.spared())
    assert far(place) == [20]
    work.drain_pending()
    assert far(place) == [20, 30], "the newest goes everywhere at the end"
    assert place.memory.pending() == []


def test_a_dead_disk_does_not_keep_a_checkpoint_from_the_object_store(place: Place) -> None:
    work = drainer(place)
    work.start()
    snapshot(place.memory, 10, drain=True)
    with failing(lambda name, where: where.startswith(str(place.root))):
        work.drain_pending()
    assert far(place) == [10]
    assert place.memory.pending() == []
    assert place.disk.scan()[0] == []


def test_a_drainer_that_starts_again_takes_up_what_was_on_its_way(place: Place) -> None:
    place.store(10)
    work = drainer(place, every=10)
    work.start()
    wait_for(lambda: far(place) == [10])
    work.drain_pending()


def test_the_last_step_is_tried_whatever_failed_before(place: Place) -> None:
    work = drainer(place)
    work.start()
    snapshot(place.memory, 10, drain=True)
    with failing(lambda name, where: "/far" in where):
        assert work.drain(Version(1, 10))
        wait_for(lambda: work.follower is not None and not work.follower.spared())
    snapshot(place.memory, 20, slot=1, drain=True)
    work.drain_pending()
    assert far(place) == [20]
    assert [event["step"] for event in events(place, "skipped")] == [10]


def test_both_tiers_failing_leaves_the_memory_alone(place: Place) -> None:
    work = drainer(place)
    work.start()
    snapshot(place.memory, 10, drain=True)
    with failing(lambda name, where: name == "disk.create"):
        work.rescue()
    assert place.memory.path.exists()
    assert Version(1, 10) in place.memory.whole()
