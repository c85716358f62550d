"""Who takes part in an attempt, who is waited for, and for how long."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.build import job_spec

from dtrain.engine.nodes import seats as module
from dtrain.engine.nodes.seats import Seats
from dtrain.specs.nodes import NodeCount


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def seats(batch: int = 24, **cluster: Any) -> Seats:
    """2 to 4 nodes of one worker; 24 samples, 2 in a pass, fit all of these numbers, 8 fit 2 and 4."""
    training = {"global_batch_size": batch, "micro_batch_size": 2, "optimizer": {"name": "adamw", "lr": 1e-3}}
    spec = job_spec(training=training, cluster={"nodes": NodeCount(4, 2), "rejoin_timeout": 50.0, **cluster})
    return Seats(spec)


def test_enough_wait_for_a_last_call_at_the_beginning_and_begin_at_once_when_all_are_there(clock: Clock) -> None:
    few = seats(last_call=10.0)
    assert few.missing([]) == [1, 2, 3]
    assert few.enough_after([]) is None, "one is not enough, however long it waits"
    clock.now += 100
    assert few.missing([2]) == [1, 3]
    assert few.enough_after([2]) == (210, 2)
    clock.now += 9
    assert few.missing([2, 3]) == [1]
    assert few.enough_after([2, 3]) == (210, 3)
    assert few.missing([1, 2, 3]) == []
    clock.now += 1.1
    assert few.missing([2]) == []
    few.take([2])
    assert few.roster == (0, 2)


@pytest.mark.parametrize(("policy", "waits_s"), [("shrink", 0.0), ("wait", 50.0)])
def test_a_lost_node_is_waited_for_as_the_spec_says(clock: Clock, policy: str, waits_s: float) -> None:
    some = seats(on_node_loss=policy)
    some.take([1, 2, 3])
    some.rise()
    assert bool(some.missing([1, 2])) == (waits_s > 0)
    assert some.enough_after([1, 2]) == (100 + waits_s, 3)
    clock.now += waits_s + 0.1
    assert some.missing([1, 2]) == []
    some.take([1, 2])
    assert some.roster == (0, 1, 2)
    some.rise()
    assert some.missing([1, 2]) == [], "one that the run goes on without already is waited for no more"


def test_another_that_dies_meanwhile_leaves_enough_or_too_few(clock: Clock) -> None:
    some = seats(on_node_loss="wait")
    some.take([1, 2, 3])
    some.rise()
    assert some.missing([1, 2]) == [3]
    clock.now += 20
    assert some.missing([1]) == [2, 3]
    assert some.enough_after([1]) == (150, 2), "the first one's time counts"
    assert some.missing([]) == [1, 2, 3]
    assert (some.enough, some.enough_after([])) == (False, None)


def test_of_more_than_can_be_used_those_that_were_there_stay(clock: Clock) -> None:
    two = seats(8)
    two.take([2])
    assert two.roster == (0, 2)
    two.take([1, 2])
    assert two.roster == (0, 2), "three cannot be used"
    assert not two.has_more([1, 2])
    assert two.has_more([1, 2, 3]), "all are there, so nobody else is waited for"
