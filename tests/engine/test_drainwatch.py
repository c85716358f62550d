"""How long slots are seen pinned."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dtrain.engine.snapshot import drainwatch
from dtrain.engine.snapshot.drainwatch import DrainWatch
from dtrain.tiers.memory.slots import MemoryDir, Slot


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every look comes one second after the one before."""
    seconds = iter(range(1000))
    monkeypatch.setattr(drainwatch.time, "perf_counter", lambda: float(next(seconds)))
    yield


@pytest.fixture
def slots(memory: MemoryDir) -> list[Slot]:
    return memory.slots(0, 1)


@pytest.mark.usefixtures("clock")
def test_a_slot_counts_from_the_look_that_finds_it_pinned_to_the_one_that_does_not(slots: list[Slot]) -> None:
    watch = DrainWatch(slots)
    watch.look()
    assert not watch.draining()
    slots[1].pin()
    watch.look()
    assert (watch.busy_s, watch.draining()) == (0.0, True)
    watch.look()
    slots[1].drain_mark.unlink()
    watch.look()
    watch.look()
    assert (watch.busy_s, watch.ended) == (2.0, 1)
    assert not watch.draining()


@pytest.mark.usefixtures("clock")
def test_one_pinned_after_the_other_counts_twice_and_their_time_once(slots: list[Slot]) -> None:
    watch = DrainWatch(slots)
    for slot in slots[:2]:
        slot.pin()
        watch.add(slot)
    watch.look()
    slots[0].drain_mark.unlink()
    assert watch.draining()
    slots[1].drain_mark.unlink()
    assert not watch.draining()
    assert (watch.busy_s, watch.ended) == (4.0, 2)
