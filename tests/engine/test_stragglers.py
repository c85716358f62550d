"""A rank that all others wait for is named; ranks that are as fast as each other, or stand still, are not."""

from __future__ import annotations

from collections.abc import Sequence

from dtrain.engine.attempt.stragglers import Stragglers, Work
from dtrain.planners.sharding.mesh import Mesh
from dtrain.tiers.memory.heartbeat import DONE_STEP

WINDOW_S = 2.0


class Ranks:
    """Ranks that make a step in so many seconds, of which each works so many."""

    def __init__(self, world: int, mesh: Mesh | None = None) -> None:
        self.told: list[str] = []
        self.watch = Stragglers(mesh or Mesh(dp_replicate=world), WINDOW_S, self.told.append)
        self.at, self.step, self.busy = 0.0, 1, [0.0] * world

    def go(self, busy_s: Sequence[float], seconds: float, step_s: float = 0.1) -> list[str]:
        for _ in range(round(seconds / step_s)):
            self.at, self.step = self.at + step_s, self.step + 1
            self.busy = [before + each for before, each in zip(self.busy, busy_s, strict=True)]
            self.watch.see({rank: Work(self.step, busy) for rank, busy in enumerate(self.busy)}, self.at)
        return self.told


def test_a_slow_rank_is_named_within_two_windows_and_once() -> None:
    ranks = Ranks(3)
    assert ranks.go([0.03, 0.03, 0.035], 1.0) == []
    (told,) = ranks.go([0.03, 0.08, 0.03], 2 * WINDOW_S)
    assert told.startswith("rank 1 is slow")
    assert len(ranks.go([0.03, 0.08, 0.03], 3 * WINDOW_S)) == 1


def test_of_two_ranks_the_slower_one_is_named() -> None:
    (told,) = Ranks(2).go([0.09, 0.03], 2 * WINDOW_S)
    assert told.startswith("rank 0 is slow")


def test_what_is_little_beside_the_step_is_not_told() -> None:
    assert Ranks(2).go([0.01, 0.005], 3 * WINDOW_S) == []


def test_stages_of_a_pipeline_do_not_compare() -> None:
    assert Ranks(2, Mesh(pp=2)).go([0.09, 0.03], 3 * WINDOW_S) == []


def test_who_stands_still_starts_or_has_ended_is_no_straggler() -> None:
    ranks = Ranks(2)
    ranks.go([0.03, 0.03], 1.0)
    for _ in range(100):  # no step is made: that is a hang
        ranks.at += 0.1
        ranks.watch.see({0: Work(ranks.step, ranks.busy[0]), 1: Work(ranks.step, ranks.busy[1])}, ranks.at)
    assert ranks.told == []
    ranks.watch.see({}, ranks.at)
    ranks.watch.see({}, ranks.at + 2 * WINDOW_S)
    for step in (0, DONE_STEP):
        ranks.watch.see({0: Work(5, 1.0), 1: Work(step, 100.0)}, ranks.at)
    assert ranks.told == []
