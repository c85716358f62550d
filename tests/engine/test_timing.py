"""Seconds of the parts of a step."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from dtrain.engine import timing
from dtrain.engine.timing import StepClock, WorkClock


class Hands:
    """A clock that a test moves."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        patch.setattr(timing.time, "perf_counter", lambda: self.now)


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    return Hands(monkeypatch)


def test_parts_are_summed_by_name(hands: Hands) -> None:
    clock = StepClock(torch.device("cpu"))
    for seconds in (1.0, 2.5):
        with clock.part("forward"):
            hands.now += seconds
        hands.now += 10
        with clock.waiting("stall"):
            hands.now += 0.25
    assert clock.seconds == {"forward": 3.5, "stall": 0.5}
    assert clock.total() == 24.0
    assert clock.seconds["backward"] == 0.0, "what did not happen took no time"


def test_parts_may_lie_in_each_other(hands: Hands) -> None:
    clock = StepClock(torch.device("cpu"))
    with clock.part("outer"):
        hands.now += 1
        with clock.part("inner"):
            hands.now += 2
    assert clock.seconds == {"outer": 3.0, "inner": 2.0}


def test_what_a_part_raises_is_let_through() -> None:
    clock = StepClock(torch.device("cpu"))
    with pytest.raises(KeyError), clock.part("forward"):
        raise KeyError
    with pytest.raises(KeyError), clock.waiting("stall"):
        raise KeyError


def test_real_time_is_measured() -> None:
    clock = StepClock(torch.device("cpu"))
    with clock.part("forward"):
        time.sleep(0.02)
    assert 0.02 <= clock.seconds["forward"] <= clock.total() < 5


class Event:
    """An event of a device, which passes it when the test says so."""

    now = 0

    def __init__(self, **kwargs: object) -> None:
        self.at: float | None = None

    def record(self) -> None:
        self.at = Event.now
        Event.now += 1

    def query(self) -> bool:
        return self.at is not None and self.at < Event.passed

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query()
        return 1000.0 * (end.at - self.at)

    passed = 0


def test_what_a_device_has_not_come_to_is_counted_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread asks whether a part is over, and waits for none."""
    monkeypatch.setattr(timing.torch.cuda, "Event", Event)
    unfinished: list[timing.Timed] = []
    first = StepClock(torch.device("cuda", 0), unfinished)
    for name in ("forward", "backward", "optimizer"):
        with first.part(name):
            pass
    Event.passed = 5  # in the middle of the update
    first.total()
    assert first.seconds == {"forward": 1.0, "backward": 1.0}
    second = StepClock(torch.device("cuda", 0), unfinished)
    with second.part("forward"):
        pass
    Event.passed = 8
    second.total()
    assert second.seconds == {"optimizer": 1.0, "forward": 1.0}
    assert unfinished == []


def test_a_thread_that_waits_for_a_core_does_not_work(
    hands: Hands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "schedstat"
    told.write_text("7000000000 1000000000 3\n")
    monkeypatch.setattr(timing, "SCHEDSTAT", str(told))
    clock = WorkClock()
    began = clock.now()
    hands.now += 3.0
    told.write_text("7500000000 3500000000 4\n")
    assert clock.now() - began == 0.5, "2.5 of the 3 s it had no core"
    clock.close()


@pytest.mark.parametrize("told", [None, "", "12\n"])
def test_where_the_kernel_tells_nothing_the_wall_clock_counts(
    hands: Hands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str | None
) -> None:
    path = tmp_path / "schedstat"
    if told is not None:
        path.write_text(told)
    monkeypatch.setattr(timing, "SCHEDSTAT", str(path))
    clock = WorkClock()
    began = clock.now()
    hands.now += 3.0
    assert clock.now() - began == 3.0
    clock.close()
