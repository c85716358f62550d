"""Seconds of the parts of a step."""

import time

import pytest
import torch

from dtrain.engine import timing
from dtrain.engine.timing import StepClock


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
