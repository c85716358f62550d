"""Stragglers: a rank that does the same work as the others, but slower, so that all of them wait for it at every step.

Each rank counts the time that it spends on batches and forward passes, where it waits for nobody (with gradients
divided among ranks it waits there, too, so all look alike and nobody is told of). Over a time-out's length the ranks
have made the same steps: who has worked much longer on them than the others is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

from ...planners.sharding.mesh import Mesh
from ...tiers.memory.heartbeat import DONE_STEP

FACTOR = 1.5
"""Ranks that share the cores of one machine were seen to differ by less, over as long."""
MIN_SHARE = 0.1
"""Of the time of a step: what is lost to less than that is not worth a word."""
MIN_STEPS = 2


@dataclass(frozen=True)
class Work:
    """The step that a rank is in, and the time it has worked."""

    step: int
    busy_s: float


@dataclass
class Stragglers:
    """Looks at the ranks of all nodes, and tells of each slow one once."""

    mesh: Mesh
    window_s: float
    tell: Callable[[str], None]
    named: set[int] = field(default_factory=set)
    _began: float = 0.0
    _before: dict[int, Work] = field(default_factory=dict)

    def see(self, now: Mapping[int, Work], at: float) -> None:
        """Take in what all ranks say at a time (monotonic, s)."""
        if not now or not all(0 < work.step < DONE_STEP for work in now.values()):
            self._before = {}
            return
        if self._before.keys() != now.keys():
            self._began, self._before = at, dict(now)
            return
        steps = min(now[rank].step - work.step for rank, work in self._before.items())
        if at - self._began < self.window_s or steps < MIN_STEPS:
            return
        step_s = (at - self._began) / steps
        each = {
            rank: (now[rank].busy_s - work.busy_s) / max(1, now[rank].step - work.step)
            for rank, work in self._before.items()
        }
        self._began, self._before = at, dict(now)
        for rank in sorted(each.keys() - self.named):
            self._judge(rank, each, step_s)

    def _judge(self, rank: int, each: Mapping[int, float], step_s: float) -> None:
        others = [seconds for other, seconds in each.items() if other != rank and other in self.mesh.stage(rank)]
        if not others:
            return
        usual = median(others)
        if each[rank] > FACTOR * usual and each[rank] - usual > MIN_SHARE * step_s:
            self.named.add(rank)
            self.tell(
                f"rank {rank} is slow: {1000 * each[rank]:.0f} ms for the batches and forward passes of a step, the "
                f"others {1000 * usual:.0f} ms, and all wait for it"
            )
