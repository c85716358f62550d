"""How many steps lie between two checkpoints of a tier, for `every: auto`.

A snapshot of the memory tier costs the training something (a stall, or processor time on a CPU), so it is made
as often as the budget allows: the smallest k with cost/(k·step) at most `max_overhead`. A disk checkpoint is
written behind the training, so its interval is the smallest that the disk sustains and the budget allows. It
is never wider than the interval that would be best if the training stopped for the whole write
(Young 1974, doi:10.1145/361147.361115; Daly 2006, doi:10.1016/j.future.2004.11.016), unless the disk cannot
keep up with that, and never wider than the run. An object store behind a disk is written less often.

Each tier is filled from the one before, so an interval is a multiple of the one before and divides the ones after
that the spec gives, and what is to be kept for good.
"""

from __future__ import annotations

import math

DRAIN_SHARE = 0.8
"""A slower tier is planned to be busy for at most this part of the time."""
LEAST_BUDGET_SHARE = 0.25
"""Part of the budget that a slower tier may use even if the faster ones have used up the rest."""
FAR_PER_RUN = 10
"""Checkpoints of a run that an object store behind a disk gets at least: losing the disk loses a 20th on average."""
FAR_LONGEST_S = 3600.0
"""Time between two of them in a long run, where the store sustains that."""
UNTIMED_EVERY, UNTIMED_PER_RUN = 100, 10
"""While step times are not known: every 100 steps, and at least ten times in a run."""
MOST_DIVIDED = 10**12
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


def memory_every(cost_s: float, step_s: float, max_overhead: float, max_steps: int, divides: int | None) -> int:
    """Return the smallest interval whose snapshots, of `cost_s` each, cost at most `max_overhead` of the time.

    With `divides` it must divide that, for the slower tiers are filled from snapshots: the next larger divisor is
    taken.
    """
    return _fitted(_steps_within(cost_s, step_s, max_overhead), 1, max_steps, divides)


def disk_every(
    *,
    write_s: float,
    cost_s: float,
    step_s: float,
    budget: float,
    mtbf_s: float,
    max_steps: int,
    snapshot_every: int,
    divides: int | None = None,
) -> int:
    """Return the interval of the first slower tier, a multiple of `snapshot_every` that divides `divides`.

    `write_s` is the time of a write behind the training, `cost_s` what it takes from the training, `budget`
    the fraction of the time that may be taken.
    """
    sustained = _sustained(write_s, step_s)
    guide = max(sustained, math.floor(young_daly_s(write_s, mtbf_s) / step_s))
    wanted = min(max(sustained, _steps_within(cost_s, step_s, budget)), guide)
    return _fitted(wanted, snapshot_every, max_steps, divides)


def far_every(
    *,
    write_s: float,
    cost_s: float,
    step_s: float,
    budget: float,
    max_steps: int,
    source_every: int,
    divides: int | None = None,
) -> int:
    """Return the interval of an object store behind a disk, a multiple of the disk's that divides `divides`.

    It is for the loss of everything else, and nobody knows how often that happens: `FAR_PER_RUN` checkpoints of a
    run, or one in `FAR_LONGEST_S` if that is more, as far as the store sustains it and the budget allows.
    """
    worth = min(max_steps / FAR_PER_RUN, FAR_LONGEST_S / step_s)
    wanted = max(_sustained(write_s, step_s), _steps_within(cost_s, step_s, budget), math.floor(worth))
    return _fitted(wanted, source_every, max_steps, divides)


def untimed_every(max_steps: int, source_every: int, divides: int | None = None) -> int:
    """Return the interval of a slower tier while step times are not known, a multiple of `source_every`."""
    return _fitted(min(UNTIMED_EVERY, max_steps // UNTIMED_PER_RUN), source_every, NEVER, divides)


def _fitted(wanted: int, source_every: int, max_steps: int, divides: int | None) -> int:
    """Return the next interval from `wanted` up that the tiers before and after can have, within the run.

    It is a multiple of `source_every`; and it divides `divides` if any multiple does, even if it must be smaller.
    """
    least = max(1, math.ceil(min(wanted, NEVER) / source_every))
    most = max(1, max_steps // source_every)
    if divides is not None and divides % source_every == 0:
        fitting = [part for part in divisors(divides // source_every) if part <= most]
        return source_every * next((part for part in fitting if part >= least), fitting[-1])
    return source_every * min(least, most)


def divisors(number: int) -> list[int]:
    """Return the divisors, smallest first; of more than `MOST_DIVIDED` only 1 and itself."""
    if number > MOST_DIVIDED:
        return [1, number]
    small = [part for part in range(1, math.isqrt(number) + 1) if number % part == 0]
    return small + [number // part for part in reversed(small) if part * part != number]


def _sustained(write_s: float, step_s: float) -> int:
    """Return the smallest interval at which a tier is not busy for more than its share of the time."""
    return max(1, math.ceil(write_s / (DRAIN_SHARE * step_s)))


def _steps_within(cost_s: float, step_s: float, fraction: float) -> int:
    """Return the smallest k with cost/(k·step) at most `fraction`; `NEVER` if there is none."""
    if cost_s <= fraction * step_s:
        return 1
    allowed_s = fraction * step_s
    return math.ceil(min(cost_s / allowed_s, NEVER)) if allowed_s > 0 else NEVER
