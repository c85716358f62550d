"""How many steps lie between two checkpoints of a tier, for `every: auto`.

A snapshot of the memory tier costs the training something (a stall, or processor time on a CPU), so it is made
as often as the budget allows: the smallest k with cost/(k·step) at most `max_overhead`. A disk checkpoint is
written behind the training, so its interval is the smallest that the disk sustains and the budget allows. It
is never wider than the interval that would be best if the training stopped for the whole write
(Young 1974, doi:10.1145/361147.361115; Daly 2006, doi:10.1016/j.future.2004.11.016), unless the disk cannot
keep up with that, and never wider than the run.
"""

from __future__ import annotations

import math

DRAIN_SHARE = 0.8
"""A disk is planned to be busy for at most this part of the time."""
LEAST_BUDGET_SHARE = 0.25
"""Part of the budget that the disk tier may use even if the memory tier has used up the rest."""
NEVER = 2**62
"""Steps that no run makes."""


def young_daly_s(cost_s: float, mtbf_s: float) -> float:
    """Return the work between two checkpoints that loses least time, if a checkpoint stops the work for `cost_s`.

    Young: √(2·δ·M). Daly's higher-order form, for δ below 2·M: √(2·δ·M)·[1 + ⅓·√(δ/2M) + ⅑·(δ/2M)] - δ, else M.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def memory_every(cost_s: float, step_s: float, max_overhead: float, max_steps: int, disk_every: int | None) -> int:
    """Return the smallest interval whose snapshots, of `cost_s` each, cost at most `max_overhead` of the time.

    With a given `disk_every` it must divide that, for a disk checkpoint starts from a snapshot: the next
    larger divisor is taken.
    """
    needed = min(_steps_within(cost_s, step_s, max_overhead), max_steps)
    if disk_every is None:
        return needed
    return next((k for k in range(needed, disk_every) if disk_every % k == 0), disk_every)


def disk_every(
    *,
    write_s: float,
    cost_s: float,
    step_s: float,
    budget: float,
    mtbf_s: float,
    max_steps: int,
    snapshot_every: int,
) -> int:
    """Return the interval of the disk tier, a multiple of `snapshot_every`.

    `write_s` is the time of a write behind the training, `cost_s` what it takes from the training, `budget`
    the fraction of the time that may be taken.
    """
    sustained = max(1, math.ceil(write_s / (DRAIN_SHARE * step_s)))
    guide = max(sustained, math.floor(young_daly_s(write_s, mtbf_s) / step_s))
    wanted = min(max(sustained, _steps_within(cost_s, step_s, budget)), guide)
    multiple = snapshot_every * math.ceil(wanted / snapshot_every)
    return min(multiple, max(snapshot_every, max_steps // snapshot_every * snapshot_every))


def _steps_within(cost_s: float, step_s: float, fraction: float) -> int:
    """Return the smallest k with cost/(k·step) at most `fraction`; `NEVER` if there is none."""
    if cost_s <= fraction * step_s:
        return 1
    allowed_s = fraction * step_s
    return math.ceil(min(cost_s / allowed_s, NEVER)) if allowed_s > 0 else NEVER
