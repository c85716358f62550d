"""The drainer as a real process: killed at every one of its points, it loses nothing and leaves nothing half done."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.tiers.build import RUN_ID, Place, snapshot

from dtrain.tiers.drain.drainer import DrainJob
from dtrain.tiers.drain.writer import TierJob
from dtrain.tiers.faults import POINTS, fail_at
from dtrain.tiers.format.jsonfile import read_lines
from dtrain.tiers.format.layout import Version
from dtrain.tiers.reading.recovery import find, open_candidate, verify

DRAIN_POINTS = [name for name in POINTS if name.startswith(("drain.", "prune."))]


def start(place: Place, fault: str = "", keep: int = 2) -> subprocess.Popen[bytes]:
    job = place.memory.path / "drainer.json"
    job.write_bytes(
        DrainJob(str(place.run.root), str(place.memory.path), RUN_ID, (TierJob(place.disk.place, keep),)).to_bytes()
    )
    environment = {**os.environ, "DTRAIN_FAULT": fault}
    return subprocess.Popen(
        [sys.executable, "-m", "dtrain.tiers.drain.drainer", str(job)], stdin=subprocess.PIPE, env=environment
    )


def stop(process: subprocess.Popen[bytes]) -> int:
    assert process.stdin is not None
    process.stdin.write(b"stop\n")
    process.stdin.close()
    return process.wait(timeout=20)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def test_pinned_snapshots_reach_the_disk_and_are_released(place: Place) -> None:
    process = start(place)
    for step, slot in ((10, 0), (20, 1), (30, 2)):
        snapshot(place.memory, step, slot=slot, drain=True)
        wait_for(place.root / Version(1, step).dirname / "manifest.json")
    assert stop(process) == 0
    assert place.memory.pending() == []
    assert place.tree() == ["step-0000000020.a0001", "step-0000000030.a0001"]
    events = read_lines(place.run.events)
    assert [(e["event"], e["step"], e["tier"]) for e in events] == [("committed", s, "disk") for s in (10, 20, 30)]
    assert all(e["bytes"] > 0 and e["seconds"] > 0 for e in events)


def test_snapshots_that_are_not_pinned_stay_in_memory(place: Place) -> None:
    process = start(place)
    snapshot(place.memory, 10)
    assert stop(process) == 0
    assert place.tree() == []


@pytest.mark.parametrize("point", DRAIN_POINTS)
def test_rows_1_and_12_killed_anywhere_the_older_step_stays_and_the_next_drainer_finishes(
    place: Place, point: str
) -> None:
    for step in (5, 6):
        place.store(step)
    snapshot(place.memory, 10, slot=1, drain=True)
    killed = start(place, fail_at(None, None, point))
    assert killed.wait(timeout=20) == -9
    good = [c for c in find(None, [place.disk]).candidates]
    for candidate in good:
        verify(open_candidate(candidate))
    assert {c.version.step for c in good} & {6, 10}, "at no moment without a good checkpoint"
    assert stop(start(place)) == 0
    verify(open_candidate(find(None, [place.disk]).candidates[0]))
    assert place.tree() == ["step-0000000006.a0001", "step-0000000010.a0001"], "nothing is left over, retention holds"
    assert place.memory.pending() == []


def test_orphaned_it_saves_the_newest_snapshot_and_gives_the_memory_back(place: Place) -> None:
    snapshot(place.memory, 41, slot=0)
    snapshot(place.memory, 42, slot=1)
    process = start(place)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=20) == 0
    assert place.tree() == ["step-0000000042.a0001"]
    assert not place.memory.path.exists()


def test_a_failing_disk_is_told_of_and_the_slot_released(place: Place) -> None:
    place.root.mkdir(parents=True)
    (place.root / "step-0000000010.a0001").write_text("a file where the folder should go")
    snapshot(place.memory, 10, drain=True)
    assert stop(start(place)) == 0
    (event,) = [e for e in read_lines(place.run.events) if e["event"] == "skipped"]
    assert "exists already" in event["reason"]
    assert place.memory.pending() == []
    assert place.tree() == ["step-0000000010.a0001"], "the staging folder is gone"
