"""How many steps lie between two checkpoints of a tier, for `every: auto`.

What a checkpoint costs the training (a stall, or processor time on a CPU) may take `max_overhead` of the time at most,
so k·step is at least cost/max_overhead. A snapshot of every step that keeps within that is made: it is what dtrain is
for. Where it does not, fewer are made, and not more than lose least time: at k·step below the interval of Young (1974,
doi:10.1145/361147.361115) and Daly (2006, doi:10.1016/j.future.2004.11.016) for that cost, and for the faults that this
tier is the fastest to survive, more snapshots cost more than the work they save. A run gets ten at least, if the
budget allows them.

A slower tier is written behind the training, so besides it must keep up: it is busy for `DRAIN_SHARE` of the time at
most, and done when the next checkpoint is due. It is never wider than Young's and Daly's interval for training that
stops for the whole write, nor than a tenth of the run, unless the tier cannot keep up with that: within those limits
what the budget is exceeded by is small, and the plan says it. An object store behind a disk is written less often.

Each tier is filled from the one before, so an interval is a multiple of the one before and divides the ones after
that the spec gives, and what is to be kept for good.

More budget, or a faster copy, disk or link, never makes an interval wider. Multiples alone would not keep that: from
99 steps up the next multiple of 99 is 99, that of 50 is 100. So an interval that is chosen, and of which another one
that is chosen is a multiple, is of a chain in which each divides the next: doubles of what is given before it, or
divisors of what is given after it. All multiples of a wider one are then multiples of a narrower one, too. Where the
tiers after it want no more than the chain has below it, all of them take its own, and it need be of no chain. Else
nothing finer than doubling would do: were both 2 and 3 chosen beneath a wide one, all narrower ones had to be multiples
of both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

DRAIN_SHARE = 0.8
"""A slower tier is planned to be busy for at most this part of the time."""
LEAST_PER_RUN = 10
"""Checkpoints of a run that a slower tier gets at least: losing all faster ones loses a 20th on average."""
FAR_LONGEST_S = 3600.0
"""Time between two of an object store behind a disk in a long run, where the store sustains that."""
UNTIMED_EVERY, UNTIMED_PER_RUN = 100, 10
"""While step times are not known: every 100 steps, and at least ten times in a run."""
MOST_DIVIDED = 10**12
NEVER = 2**62
"""Steps that no run makes."""

FITS = "every step keeps within max_overhead"
BUDGET = "max_overhead allows no more"
LEAST_LOSS = "more often would cost more than it saves (Young, Daly)"
SUSTAINED = "as often as it can be written behind the training"
PER_RUN = "a tenth of the run"
WITH_SNAPSHOT = "with each snapshot"
WITH_EACH = "with each checkpoint of the tier before"
HOURLY = "one in an hour"
UNTIMED = "times are not known"
GIVEN = "given"


@dataclass(frozen=True, slots=True)
class Interval:
    """Steps between two checkpoints, and what decided that."""

    steps: int
    why: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """The interval that a tier would have if it were the only one."""

    steps: int
    why: str
    least: int | None = None
    """It may as well be as narrow as this."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an interval must fit in: the run, the tiers before it, and what is given after it."""

    max_steps: int
    source_every: int = 1
    """Interval of the tier before."""
    divides: int | None = None
    """What it should divide; left alone if no multiple of `source_every` does."""
    follows_auto: bool = False
    """That of the tier before is chosen, too."""
    after: int | None = None
    """The widest that is wanted by tiers after it whose intervals are chosen, too; None: there are none."""

    def fitted(self, wanted: Wanted) -> Interval:
        """Return the next interval from what is wanted up that the tiers before and after can have, within the run.

        One of a chain is rather the next one down, if that is not below the `least`.
        """
        steps = self.next(wanted.steps)
        if self._chained(wanted.steps) and wanted.least is not None:
            chain = self._chain()
            down = max((part for part in chain if part <= wanted.steps), default=1)
            steps = max(_next(wanted.least, chain), down)
        elif self.after is not None and wanted.least is not None and wanted.steps < self._chain()[-1]:
            # with a slower tier after it, it would be of the chain: it must not be wider than then
            steps = min(steps, replace(self, after=NEVER).fitted(wanted).steps)
        return Interval(steps, WITH_EACH if wanted.steps < self.source_every == steps else wanted.why)

    def next(self, wanted: int) -> int:
        """Return the next interval from `wanted` up; the largest there is, even if that is smaller."""
        if self._chained(wanted):
            return _next(wanted, self._chain())
        if self._multiples_divide:
            return _next(wanted, [self.source_every * part for part in divisors(self._parts)])
        longest = self._chain()[-1] if self.follows_auto else self.max_steps
        return self.source_every * max(1, min(-(-wanted // self.source_every), longest // self.source_every))

    def _chained(self, wanted: int) -> bool:
        """Tell whether another one must be a multiple of it: not if all that follow can take the same."""
        return self.after is not None and wanted < _next(self.after, self._chain())

    def _chain(self) -> list[int]:
        """Return all intervals from `source_every` up that the chain has within the run, and one at least."""
        if self._multiples_divide:
            parts = [1]
            for part in divisors(self._parts):
                parts += [part] if part > parts[-1] and part % parts[-1] == 0 else []
            return [self.source_every * part for part in parts]
        doublings = max(1, self.max_steps // self.source_every).bit_length()
        return [self.source_every << doubling for doubling in range(doublings)]

    @property
    def _multiples_divide(self) -> bool:
        return self.divides is not None and self.divides % self.source_every == 0

    @property
    def _parts(self) -> int:
        return (self.divides or 0) // self.source_every


def _next(wanted: int, ordered: Sequence[int]) -> int:
    return next((part for part in ordered if part >= wanted), ordered[-1])


def young_daly_s(cost_s: float, mtbf_s: float) -> float:
    """Return the work between two checkpoints that loses least time, if a checkpoint stops the work for `cost_s`.

    Young: √(2·δ·M). Daly's higher-order form, for δ below 2·M: √(2·δ·M)·[1 + ⅓·√(δ/2M) + ⅑·(δ/2M)] - δ, else M.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s) * math.sqrt(mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def memory_every(cost_s: float, step_s: float, max_overhead: float, mtbf_s: float, max_steps: int) -> Wanted:
    """Return the interval of snapshots that cost `cost_s` each, with a fault that needs them every `mtbf_s`."""
    allowed = _steps_within(cost_s, step_s, max_overhead)
    if allowed == 1:
        return Wanted(1, FITS)
    least, per_run = math.ceil(young_daly_s(cost_s, mtbf_s) / step_s), max_steps // LEAST_PER_RUN
    if allowed >= min(least, per_run):
        return Wanted(allowed, BUDGET)
    return Wanted(min(least, per_run), LEAST_LOSS if least <= per_run else PER_RUN, allowed)


def slow_every(*, write_s: float, cost_s: float, step_s: float, budget: float, mtbf_s: float, max_steps: int) -> Wanted:
    """Return the interval of the first slower tier.

    `write_s` is the time of a write behind the training, `cost_s` what it takes from the training, `budget` the
    fraction of the time that may be taken.
    """
    sustained = _sustained(write_s, 0.0, step_s)
    stopping = math.floor(young_daly_s(write_s, mtbf_s) / step_s)
    widest = max(sustained, min(stopping, max_steps // LEAST_PER_RUN))
    reasons = {
        SUSTAINED: sustained,
        BUDGET: _steps_within(cost_s, step_s, budget),
        LEAST_LOSS: math.ceil(young_daly_s(cost_s, mtbf_s) / step_s),
    }
    why = max(reasons, key=reasons.__getitem__)
    if reasons[why] <= widest:
        return Wanted(reasons[why], why, max(sustained, reasons[BUDGET]))
    why = LEAST_LOSS if widest == stopping else PER_RUN if widest > sustained else SUSTAINED
    return Wanted(widest, why, sustained)


def far_every(*, write_s: float, lag_s: float, step_s: float, max_steps: int) -> Wanted:
    """Return the interval of an object store behind a disk.

    It is for the loss of everything else, and nobody knows how often that happens: `LEAST_PER_RUN` checkpoints of a
    run, or one in `FAR_LONGEST_S` if that is more, as far as the store sustains it. So seldom, its cost is small.
    """
    hourly = math.floor(FAR_LONGEST_S / step_s)
    reasons = {SUSTAINED: _sustained(write_s, lag_s, step_s)}
    reasons |= {HOURLY: hourly} if hourly < max_steps / LEAST_PER_RUN else {PER_RUN: max_steps // LEAST_PER_RUN}
    why = max(reasons, key=reasons.__getitem__)
    return Wanted(reasons[why], why)


def untimed_every(place: Place) -> Interval:
    """Return the interval of a slower tier while step times are not known."""
    wanted = min(UNTIMED_EVERY, place.max_steps // UNTIMED_PER_RUN)
    return Interval(Place(NEVER, place.source_every, place.divides).next(wanted), UNTIMED)


@lru_cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors, smallest first; of more than `MOST_DIVIDED` only 1 and itself."""
    if number > MOST_DIVIDED:
        return (1, number)
    small = [part for part in range(1, math.isqrt(number) + 1) if number % part == 0]
    return (*small, *(number // part for part in reversed(small) if part * part != number))


def _sustained(write_s: float, lag_s: float, step_s: float) -> int:
    """Return the smallest interval that a tier keeps up with: not busy for more than its share, nor when one is due.

    A write begins `lag_s` after it is due; 0 where the next one waits for the end of the one before.
    """
    return max(1, math.ceil(min(max(write_s / DRAIN_SHARE, lag_s + write_s) / step_s, NEVER)))


def _steps_within(cost_s: float, step_s: float, fraction: float) -> int:
    """Return the smallest k with cost/(k·step) at most `fraction`; `NEVER` if there is none."""
    if cost_s <= fraction * step_s:
        return 1
    allowed_s = fraction * step_s
    return math.ceil(min(cost_s / allowed_s, NEVER)) if allowed_s > 0 else NEVER
