"""Clocks that are set back or forward change nothing: steps and attempts give the order, time-outs do not see them."""

from __future__ import annotations

import ast
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tiers.build import Place, snapshot

from dtrain.tiers.format.layout import Version
from dtrain.tiers.reading.lineage import highest_attempt
from dtrain.tiers.reading.recovery import find
from dtrain.tiers.retention import Rule

ROOT = Path(__file__).parents[2]
DAY_S = 86_400.0
WALL = {
    "engine/training/report.py",  # `time` of lines for people
    "engine/job.py",  # the same, of a worker's last words
    "tiers/format/jsonfile.py",  # the same, of events
    "cli/identity.py",  # when a run was made
    "tiers/memory/leftovers.py",  # how old an empty folder without an owner is that nobody holds
    "cli/bench/folder.py",  # the same, of a benchmark's
}
"""All that may ask for the time of day: what is told to people, and what besides is protected by a lock."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time of day jumps: a day back, two days forward, and the same again."""
    start, asked = time.time(), [0.0]

    def now() -> float:
        asked.append(start + (-DAY_S, 2 * DAY_S, 0.0)[len(asked) % 3])
        return asked[-1]

    monkeypatch.setattr(time, "time", now)
    yield asked


def date(folder: Path, seconds: float) -> None:
    """Date a checkpoint with all that is in it, as a copy or a clock that was set back does."""
    for path in (*folder.iterdir(), folder):
        os.utime(path, (seconds, seconds))


@pytest.mark.parametrize("dates", [(3, 2, 1, 0), (1, 1, 1, 1), (0, 3, 1, 2)], ids=["backwards", "equal", "mixed"])
def test_the_newest_is_the_highest_step_and_attempt_whatever_the_dates_say(
    place: Place, clock: list[float], dates: tuple[int, ...]
) -> None:
    stored = [(step, attempt) for step, attempt in ((10, 1), (20, 1), (30, 1), (20, 2))]
    for (step, attempt), days in zip(stored, dates, strict=True):
        date(place.store(step, attempt), 1.7e9 + DAY_S * days)
    found = [candidate.version for candidate in find(None, [place.disk]).candidates]
    assert found == sorted((Version(attempt, step) for step, attempt in stored), reverse=True)
    assert found[0] == Version(2, 20), "what a later attempt has made goes before what was thrown away"
    assert highest_attempt(place.run, place.memory, [place.disk]) == 2
    place.disk.prune(Rule(keep=2))
    kept = [candidate.version for candidate in find(None, [place.disk]).candidates]
    assert kept == found[:2]


def test_snapshots_in_memory_are_in_order_too(place: Place, clock: list[float]) -> None:
    for slot, step in enumerate((7, 9, 8)):
        snapshot(place.memory, step, slot=slot)
        for path in place.memory.path.iterdir():
            os.utime(path, (1.7e9 - DAY_S * step, 1.7e9 - DAY_S * step))
    assert [candidate.version.step for candidate in find(place.memory, []).candidates] == [9, 8, 7]


def test_only_what_is_told_to_people_asks_for_the_time_of_day() -> None:
    """All waits, time-outs and intervals measure with a clock that nobody can set."""
    asking = set()
    for folder in ("engine", "tiers", "cli", "planners", "specs"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.Attribute) and (ast.unparse(node) in ("time.time", "time.time_ns")):
                    asking.add(path.relative_to(ROOT).as_posix())
                imported = isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime")
                assert not imported or {name.name for name in node.names} <= {"timedelta"}, path  # type: ignore[attr-defined]
    assert asking == WALL
