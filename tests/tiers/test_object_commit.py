"""Checkpoints over HTTP: whatever the network and the store do, a checkpoint is whole or not there."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from tests.tiers.build import RUN_ID, Place, snapshot
from tests.tiers.s3 import BUCKET, CHUNK, STEP, Proxy, call, good_steps, keys, place_at, store_at, wait_for, write
from tests.tiers.stores import LateListings
from tests.tiers.test_layouts import BIAS, MATRIX, meshed, plain_digest, store

from dtrain.tiers import faults
from dtrain.tiers.drain.writer import TierJob, Writer
from dtrain.tiers.fence import Fenced, Taken, claim
from dtrain.tiers.format.jsonfile import Unreadable
from dtrain.tiers.format.layout import Version
from dtrain.tiers.memory.gather import gather
from dtrain.tiers.reading.recovery import candidate_of, contents, open_candidate
from dtrain.tiers.reading.stretches import Stretch, stretches
from dtrain.tiers.reading.whole import facts_of, read_whole
from dtrain.tiers.retention import Rule
from dtrain.tiers.stores import object as object_store
from dtrain.tiers.tier import Tier, open_tier
from dtrain.tiers.together import Group

pytest_plugins = ["tests.tiers.s3fixtures"]
pytestmark = pytest.mark.usefixtures("environment")


DATA, LAST_DATA, FINAL = r"rank-0000\d", r"rank-00001", r"manifest\.json"
PASSES = {
    "throttled at first": [{"action": "status", "times": 2}],
    "throttled now and then": [{"action": "status", "path": p, "times": 1} for p in (DATA, FINAL, "begun", "list")],
    "the reply to a part is lost": [{"action": "lose", "method": "PUT", "path": "partNumber=2", "times": 1}],
    "the reply to the end of an upload is lost": [{"action": "lose", "method": "POST", "path": "uploadId", "times": 1}],
    "no end of an upload is ever answered": [{"action": "lose", "method": "POST", "path": "uploadId"}],
    "the reply to the manifest is lost": [{"action": "lose", "method": "PUT", "path": FINAL}],
    "the reply to the note is lost": [{"action": "lose", "method": "PUT", "path": "begun", "times": 1}],
    "cut in the middle of a part": [{"action": "cut", "method": "PUT", "path": DATA, "times": 2}],
    "cut in the middle of the manifest": [{"action": "cut", "method": "PUT", "path": FINAL, "times": 1}],
    "reading back is cut": [{"action": "short", "method": "GET", "path": DATA, "times": 2}],
    "lists are cut": [{"action": "short", "method": "GET", "path": "list-type", "times": 2}],
}
FAILS = {
    "no data gets through": [{"action": "status", "method": "PUT", "path": DATA}],
    "the last file does not get through": [{"action": "cut", "method": "PUT", "path": LAST_DATA}],
    "uploads cannot be ended": [{"action": "status", "method": "POST", "path": "uploadId", "status": 500}],
    "the manifest does not get through": [{"action": "cut", "method": "PUT", "path": FINAL}],
    "the manifest is forbidden": [
        {"action": "status", "method": "PUT", "path": FINAL, "status": 403, "code": "AccessDenied"}
    ],
    "everything is an error": [{"action": "status", "status": 500, "code": "InternalError"}],
    "nothing can be read back": [{"action": "lose", "method": "GET", "path": DATA}],
    "a bit is wrong when read back": [{"action": "flip", "method": "GET", "path": LAST_DATA}],
    "nothing can be listed": [{"action": "status", "method": "GET", "path": "list-type"}],
    "nor deleted what was begun": [
        {"action": "status", "method": "PUT", "path": LAST_DATA},
        {"action": "status", "method": "POST", "path": "delete"},
    ],
}


@pytest.mark.parametrize("script", PASSES.values(), ids=PASSES.keys())
def test_trouble_that_passes_ends_in_a_whole_checkpoint(
    script: list[dict[str, Any]], server: str, proxy: Proxy, prefix: str, place: Place
) -> None:
    struck = [proxy.fail(**fault) for fault in script]
    write(open_tier(place_at(proxy.endpoint, prefix), RUN_ID), place, 10)
    assert all(fault.struck for fault in struck)
    proxy.heal()
    assert good_steps(open_tier(place_at(server, prefix), RUN_ID), place.run.spool) == [10]
    expected = [
        f"{STEP.format(10)}/{name}" for name in ("manifest.json", *(f"rank-0000{r}.safetensors" for r in (0, 1)))
    ]
    assert keys(server, prefix) == expected


@pytest.mark.parametrize("script", FAILS.values(), ids=FAILS.keys())
def test_row_33_trouble_that_lasts_ends_in_an_error_and_no_checkpoint(
    script: list[dict[str, Any]], server: str, proxy: Proxy, prefix: str, place: Place
) -> None:
    tier = open_tier(place_at(proxy.endpoint, prefix), RUN_ID).fenced()
    struck = [proxy.fail(**fault) for fault in script]
    with pytest.raises((OSError, Unreadable)) as error:
        write(tier, place, 10)
    assert "\n" not in str(error.value)
    assert all(fault.struck for fault in struck)
    proxy.heal()
    healed = open_tier(place_at(server, prefix), RUN_ID)
    assert healed.scan()[0] == []
    assert healed.get(Version(1, 10)) is None
    healed = healed.fenced()
    healed.remove_leftovers()
    write(healed, place, 10)
    assert good_steps(healed, place.run.spool) == [10]
    assert not [key for key in keys(server, prefix) if key.startswith((".tmp", ".trash"))]


def test_a_note_that_cannot_be_taken_away_leaves_the_checkpoint_whole(
    server: str, proxy: Proxy, prefix: str, place: Place
) -> None:
    proxy.fail("status", "POST", "delete")
    write(open_tier(place_at(proxy.endpoint, prefix), RUN_ID), place, 10)
    healed = open_tier(place_at(server, prefix), RUN_ID).fenced()
    assert good_steps(healed, place.run.spool) == [10]
    assert healed.remove_leftovers() == [f".tmp-{STEP.format(10)}"]
    assert good_steps(healed, place.run.spool) == [10]


# Leftovers, and what is not ours.


def upload_slowly(endpoint: str, prefix: str, memory: Path) -> None:
    """In a process of its own: a writer that hangs in the middle of a file."""
    from dtrain.tiers.memory.slots import MemoryDir

    object_store.CHUNK = CHUNK
    records = MemoryDir(memory).whole()[Version(1, 10)]
    open_tier(place_at(endpoint, prefix), RUN_ID).fenced().write(*gather(MemoryDir(memory), records))


def killed_in_the_middle(proxy: Proxy, prefix: str, place: Place, path: str) -> None:
    snapshot(place.memory, 10)
    hanging = proxy.fail("hang", "PUT", path)
    child = multiprocessing.get_context("spawn").Process(
        target=upload_slowly, args=(proxy.endpoint, prefix, place.memory.path)
    )
    child.start()
    wait_for(lambda: hanging.struck > 0)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    proxy.heal()


@pytest.mark.parametrize("path", [r"rank-00001.*partNumber=2", r"manifest\.json"])
def test_a_killed_writer_leaves_no_checkpoint_and_the_next_writer_clears_it_away(
    path: str, server: str, proxy: Proxy, prefix: str, place: Place
) -> None:
    killed_in_the_middle(proxy, prefix, place, path)
    left = keys(server, prefix)
    assert f"{STEP.format(10)}/rank-00000.safetensors" in left
    assert f".tmp-{STEP.format(10)}/begun.json" in left
    reader = open_tier(place_at(server, prefix), RUN_ID)
    good, bad = reader.scan()
    assert good == [] and [rejected.version for rejected in bad] == [Version(1, 10)]
    assert reader.newest() is None
    assert reader.get(Version(1, 10)) is None
    reader.prune(Rule(1))
    with pytest.raises(Taken):
        open_tier(place_at(server, prefix), "beef").fenced()
    assert keys(server, prefix) == left, "nobody else touches it"
    job = TierJob(place_at(server, prefix), keep=2)
    writer = Writer(job, place.run, RUN_ID, Group(0, 1))
    writer.open()
    assert [key for key in keys(server, prefix) if not key.startswith(".fence/")] == []
    writer.release()
    assert keys(server, prefix) == []


def test_what_others_put_there_is_never_deleted_and_never_overwritten(server: str, prefix: str, place: Place) -> None:
    foreign = [
        "notes.txt",
        f"{STEP.format(1)}/readme.md",
        f"{STEP.format(1)}/sub/manifest.json",
        f"{STEP.format(9)}/rank-00000.safetensors",
        f".tmp-{STEP.format(8)}/mine.txt",
        f".trash-{STEP.format(7)}x/begun.json",
        f"{STEP.format(1)}x/manifest.json",
        ".fence/epoch.json",
    ]
    tier = open_tier(place_at(server, prefix), RUN_ID).fenced()
    write(tier, place, 1)
    for key in foreign:
        call(server, "PUT", f"{BUCKET}/{prefix}/{key}", b"{}")
    for step in (2, 3):
        write(tier, place, step)
    with pytest.raises(FileExistsError, match="a folder of this name"):
        write(tier, place, 9)
    tier.prune(Rule(1))
    tier.remove_leftovers()
    assert tier.fence is not None
    tier.fence.release()
    assert good_steps(tier, place.run.spool) == [3]
    ours = {
        f"{STEP.format(3)}/{name}" for name in ("manifest.json", "rank-00000.safetensors", "rank-00001.safetensors")
    }
    assert set(keys(server, prefix)) == {*foreign, *ours}
    assert {key: call(server, "GET", f"{BUCKET}/{prefix}/{key}") for key in foreign} == dict.fromkeys(foreign, b"{}")


def test_a_writer_that_was_shut_out_while_uploading_commits_nothing(server: str, prefix: str, place: Place) -> None:
    old = open_tier(place_at(server, prefix), RUN_ID).fenced()

    def take_over(name: str, where: str, detail: Any) -> None:
        if name == "object.put" and where.endswith("rank-00001.safetensors"):
            faults.watch(None)
            claim(store_at(server, prefix), RUN_ID)

    faults.watch(take_over)
    try:
        with pytest.raises(Fenced):
            write(old, place, 10)
    finally:
        faults.watch(None)
    assert old.scan()[0] == []


# Listings that lag behind.


@pytest.mark.parametrize("lag", [2, 30])
def test_late_listings_never_make_a_wrong_checkpoint_nor_lose_one(
    lag: int, server: str, prefix: str, place: Place
) -> None:
    now = open_tier(place_at(server, prefix), RUN_ID)
    late = Tier(now.place, LateListings(now.store, lag), RUN_ID).fenced()
    for step in range(1, 5):
        version = write(late, place, step).version
        assert late.get(version) is not None, "it is read, not listed"
        late.prune(Rule(2), {version})
        assert {3, 4} & set(range(step + 1)) <= set(good_steps(now, place.run.spool))
        late.remove_leftovers()
        assert step in good_steps(now, place.run.spool)
    for _ in range(lag + 1):
        late.store.files("")
    late.prune(Rule(2))
    assert good_steps(now, place.run.spool) == [3, 4]
    assert late.newest() == Version(1, 4)


@pytest.mark.parametrize("lag", [1, 30])
def test_late_listings_do_not_let_two_writers_in(lag: int, server: str, prefix: str, place: Place) -> None:
    now = open_tier(place_at(server, prefix), RUN_ID)
    store = LateListings(now.store, lag)
    first = Tier(now.place, store, RUN_ID).fenced()
    write(first, place, 1)
    second = claimed(Tier(now.place, store, RUN_ID), lag)
    with pytest.raises(Fenced):
        write(first, place, 2)
    write(second, place, 3)
    assert good_steps(now, place.run.spool) == [1, 3]


def claimed(tier: Tier, lag: int) -> Tier:
    """A claim that is not listed yet makes the next one fail, which is safe; a writer tries again later."""
    for _ in range(lag):
        with contextlib.suppress(FileExistsError):
            return tier.fenced()
    return tier.fenced()


@pytest.mark.parametrize("lag", [1, 30])
def test_late_listings_do_not_let_a_commit_be_taken_for_a_leftover(
    lag: int, server: str, prefix: str, place: Place
) -> None:
    now = open_tier(place_at(server, prefix), RUN_ID)
    store = LateListings(now.store, lag)
    tier = Tier(now.place, store, RUN_ID).fenced()

    def pass_time(name: str, where: str, detail: Any) -> None:
        if name == "object.put" and where.endswith("rank-00001.safetensors"):
            for _ in range(lag + 1):
                store.files("")  # by now the note shows, and not yet what follows

    faults.watch(pass_time)
    try:
        write(tier, place, 1)
    finally:
        faults.watch(None)
    tier.remove_leftovers()
    assert good_steps(now, place.run.spool) == [1]


def test_only_files_with_something_wanted_are_fetched_and_none_stays_in_the_spool(
    proxy: Proxy, prefix: str, place: Place, tmp_path: Path
) -> None:
    """Of a state in boxes: some pieces; all of it, tensor by tensor; and up to where a reader stops."""
    spool = tmp_path / "spool"
    store(place, [MATRIX, BIAS], meshed(1, 2, 2))
    (records,) = place.memory.whole().values()
    tier = open_tier(place_at(proxy.endpoint, prefix), RUN_ID).fenced()
    opened = open_candidate(candidate_of(tier.write(*gather(place.memory, records))), spool)

    def fetched(since: int) -> list[str]:
        return sorted({path.rpartition("/")[2] for path in proxy.seen("GET", "rank-")[since:]})

    before = len(proxy.seen("GET", "rank-"))
    (rank,) = [c.rank for c in contents(opened, lambda entry, _: entry.name == BIAS.name and entry.offset == (4,))]
    assert fetched(before) == [f"rank-{rank:05d}.safetensors"]
    before = len(proxy.seen("GET", "rank-"))
    assert read_whole(opened, facts_of(opened)) == plain_digest([MATRIX, BIAS])
    assert fetched(before) == [f"rank-{rank:05d}.safetensors" for rank in range(4)]
    pieces = cast("Generator[Stretch, None, None]", stretches(opened, lambda _: None))
    with closing(pieces):
        next(pieces)
        assert spool.exists()
    assert not spool.exists()
