"""What the campaign of faults calls a restart from too old a step, and what it lets pass, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from tests.campaigns.restarts import Restart, restarts

Line = dict[str, Any]


class Played:
    """What a run would have written down, told event by event."""

    def __init__(self) -> None:
        self.metrics: list[Line] = []
        self.events: list[Line] = []
        self.lost: list[tuple[float, int]] = []
        self.now = self.attempt = 0

    def event(self, event: str, step: int | None = None, **further: Any) -> None:
        self.now += 1
        self.events.append({"event": event, "step": step, "attempt": self.attempt, "time": float(self.now), **further})

    def begin(self, step: int | None = None, tier: str = "peer") -> None:
        self.attempt += 1
        self.event("attempt")
        if step is not None:
            self.event("restored", step, tier=tier, skipped=[])

    def train(self, first: int, last: int, *, copied: bool = True) -> None:
        for step in range(first, last + 1):
            self.now += 1
            self.metrics.append({"step": step, "attempt": self.attempt})
            if copied and step > max(first, 2):
                self.event("committed", step - 2, tier="peer")

    def lose(self, node: int) -> None:
        self.now += 1
        self.lost.append((float(self.now), node))

    def judged(self, replicas: int = 1) -> list[Restart]:
        return restarts(self.metrics, self.events, self.lost, replicas)


@pytest.fixture
def run() -> Played:
    played = Played()
    played.begin()
    played.train(1, 10)
    return played


@pytest.mark.parametrize(("began", "wrong"), [(10, False), (8, False), (7, True), (0, True)])
def test_two_steps_may_be_repeated(run: Played, began: int, wrong: bool) -> None:
    run.begin(began)
    (restart,) = run.judged()
    assert (restart.repeated, restart.is_wrong, restart.excuse) == (10 - began, wrong, None)


def test_what_all_peers_are_told_to_have_is_gone_on_from(run: Played) -> None:
    run.event("committed", 9, tier="peer")
    run.begin(8)
    assert [restart.is_wrong for restart in run.judged()] == [True]


def test_an_attempt_that_died_without_a_copy_of_its_own_began_from_one(run: Played) -> None:
    """Whatever it began from was somewhere, and is there after it as well."""
    run.begin(9)
    run.train(10, 11, copied=False)
    run.begin(6)
    assert [(restart.reached, restart.repeated, restart.is_wrong) for restart in run.judged()] == [
        (10, 1, False),
        (11, 5, True),
    ]


def test_an_attempt_that_came_to_nothing_is_no_restart(run: Played) -> None:
    run.begin()
    run.begin(9)
    assert [restart.attempt for restart in run.judged()] == [3]


def test_steps_of_an_attempt_are_not_counted_again_after_the_next_one(run: Played) -> None:
    run.begin(8)
    run.train(9, 9, copied=False)
    run.begin(8)
    assert [restart.repeated for restart in run.judged()] == [2, 1]


def test_more_nodes_than_replicas_may_take_a_version_along(run: Played) -> None:
    run.lose(1)
    run.begin(8)
    run.lose(1)
    run.begin(8)
    run.lose(2)
    run.begin(5, tier="disk")
    found = run.judged()
    assert not any(restart.is_wrong for restart in found)
    assert [restart.excuse is None for restart in found] == [True, True, False]
    assert [restart.is_wrong for restart in run.judged(replicas=2)] == [False, False, True]


def test_what_was_lost_so_is_not_asked_for_afterwards(run: Played) -> None:
    run.lose(1)
    run.lose(2)
    run.begin(5, tier="disk")
    run.train(6, 6, copied=False)
    run.begin(5, tier="disk")
    assert not any(restart.is_wrong for restart in run.judged())
    run.train(6, 9)
    run.begin(5, tier="disk")
    assert run.judged()[-1].is_wrong


def test_a_copy_that_was_told_to_be_late_is_not_asked_for_until_it_is_there(run: Played) -> None:
    run.event("warning", 9, tier="peer", detail="late")
    run.train(11, 15, copied=False)
    run.begin(8)
    (restart,) = run.judged()
    assert (restart.repeated, restart.is_wrong) == (7, False)
    assert restart.excuse is not None
    run.begin(7)
    assert run.judged()[-1].is_wrong is False, "what the one before had begun from is two steps back at most"
    run.train(8, 9)
    run.event("committed", 9, tier="peer")
    run.begin(5)
    assert run.judged()[-1].is_wrong
