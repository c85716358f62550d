"""Which of the checkpoints due in the first slower tier are made when it cannot take all of them, and how late."""

from __future__ import annotations

import math
from dataclasses import dataclass

NOISE = 1e-9
"""What decimal places do to a whole number."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """Commits of a tier that is offered a checkpoint every so often."""

    steps: float
    """Between two commits; where they are not even, as weighs on the work that a fault costs: Σd²/Σd."""
    lag_s: float
    """From the update to the commit, weighed by the time that each is the newest."""


def rhythm(copied_s: float, write_s: float, every: int, step_s: float, update_s: float) -> Rhythm:
    """Return what is made of one checkpoint every `every` steps, where those due while the tier is busy are left out.

    A snapshot is whole `copied_s` after its update. The ranks agree on whether the drainer is busy at the end of each
    step, `update_s` before it is over. One that is due when it is not is pinned as soon as it is whole. One that is
    due when it is busy gets a second look a step later, and is pinned then. So from one that was pinned

    - as soon as it was whole, the next is the first for which copied + write + update ≤ m·every + 1 (in steps), and
      it is pinned early if without the 1;
    - at the second look, the next is the first with write ≤ m·every, and it is pinned early if 1 + write is, too.

    A copy that lasts longer than its step stretches that step.
    """
    copied, write, update = copied_s / step_s, write_s / step_s, update_s / step_s
    step = max(1.0, copied + update)
    early, walked = True, dict[bool, tuple[int, float]]()
    while early not in walked:
        lag = copied + write if early else step - update + write
        ahead = max(1, math.ceil((lag + update - step) / every - NOISE))
        walked[early] = (ahead * every, lag)
        early = lag + update <= ahead * every * (1 + NOISE)
    cycle = list(walked.values())[list(walked).index(early) :]
    gaps = [steps + after[1] - lag for (steps, lag), after in zip(cycle, [*cycle[1:], cycle[0]], strict=True)]
    total = sum(gaps)
    lag = sum(gap * lag for gap, (_, lag) in zip(gaps, cycle, strict=True)) / total
    return Rhythm(sum(gap * gap for gap in gaps) / total, lag * step_s)
