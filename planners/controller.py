"""Keeps what checkpoints cost within `checkpoint.max_overhead` while a run goes on: figures in, intervals out.

The steps of a run are looked at in windows. What a snapshot costs the training, c, is the time the training waited for
it, plus what the passes beside its copy took longer than others, as far as that stands out from the noise. With steps
of t seconds it is affordable every k steps when c/(k·t) is at most the budget, so

    k = ceil(c / (budget · t))

One that is `auto` goes both ways. One that the spec gives is kept while the budget is exceeded by little, for somebody
wants to lose no more steps than that; the run says what it costs. It is widened only when checkpoints take several
times the budget (`GIVEN_TIMES_BUDGET`), comes back when they no longer do, and is never narrowed below what is given.
While the whole attempt is over its budget, an interval is set for half of it, until the average is back within. Only
the wait for a slow tier whose spec says that training waits for it (`when_slow`) is no cost here: that was asked for.

The first slower tier, if it is `auto`, gets what is left of the budget, by the same rule with the cost of a drain.

Every rank decides by itself, from figures of which each is the worst of all ranks, so all decide the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from .intervals import DRAIN_SHARE, NEVER
from .words import duration, share, shares

WARM_UP_STEPS = 2
"""First steps of an attempt, which take longer for many reasons."""
EARLY_SNAPSHOTS = 4
"""After these the interval is widened already if they cost very much."""
SPENT_SNAPSHOTS, SPENT_SHARE = (1, 2), 0.5
"""After these already, if they alone took this part of what the whole run may spend and the interval is `auto`."""
EARLY_TIMES_BUDGET, EARLY_WAIT_S = 4.0, 0.01
"""What is very much: so many times the budget, and a wait that is no accident of a machine that is busy."""
WINDOW_STEPS, WINDOW_SNAPSHOTS = 16, 6
"""Least length of a window; both must be reached."""
PROBE_STEPS, PROBE_TIMES = 64, 8
"""After so many steps without a full window each snapshot is looked at alone, and may narrow the interval so much."""
GIVEN_TIMES_BUDGET, GIVEN_COST_S = 4.0, 0.01
"""An interval that the spec gives is widened when a typical snapshot costs more than both."""
NARROW_SHARE = 0.7
"""An interval is narrowed only to one that takes at most this part of the budget, so that it does not go to and fro."""
CALIBRATION_EVERY = 2
"""Interval of snapshots in the first window of `every: auto`: without steps that have none there is no comparing."""
LEAST_COMPARED = 6
"""Steps of each kind that are compared."""
ERRORS = 3.0
"""A difference counts when it is this many standard errors."""
LEAST_BUDGET_SHARE = 0.25
"""Part of the budget that a slower tier may use even if the snapshots have used up the rest."""
KEPT_SAMPLES = 512
SEARCHED = 1000
Kind = Callable[["Sample"], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """What the spec and its plan say about the intervals; 0: the job has no such tier."""

    budget: float
    max_steps: int
    memory: int
    memory_auto: bool
    slow: int
    slow_auto: bool
    reached: tuple[int, ...] = ()
    """Steps whose multiples further tiers are to get, or a tier is to keep for good."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Steps between snapshots in memory, and between those that go on to the first slower tier; 0: never."""

    memory: int
    slow: int

    @property
    def snapshots(self) -> int:
        """Steps between snapshots, whatever they are for."""
        return self.memory or self.slow


@dataclass(frozen=True, slots=True)
class Sample:
    """One step as one rank saw it."""

    step_s: float
    waited_s: float
    """For the handing over and the end of copies, not for a slow tier."""
    copied: bool
    """A copy was under way."""
    drain_s: float = 0.0
    """Time in which the drainer was at work."""
    drained: int = 0
    """Snapshots that it was done with."""

    @property
    def draining(self) -> bool:
        """Tell whether a drainer was at work."""
        return self.drain_s > 0

    @property
    def marked(self) -> bool:
        """Tell whether checkpoints had anything to do with it."""
        return self.copied or self.draining


@dataclass(frozen=True, slots=True)
class Figures:
    """What a window of steps says; seconds. Every figure grows with the cost, so that the worst rank counts."""

    step_s: float
    """Mean time of a step."""
    wait_s: float
    """Mean time that the training waited per snapshot."""
    slowed_s: float
    """What the passes beside one copy took longer."""
    drain_s: float
    """What all steps beside one drain took longer."""
    drain_steps: float
    """Time that a drain lasts, in steps; 0: there was none."""
    total: float
    """Part of the time of the whole attempt so far that was waited for snapshots."""
    typical_s: float
    """Median wait per snapshot: what a busy machine does now and then does not count."""
    spent_s: float = 0.0
    """Time of the whole attempt so far that was waited for snapshots."""
    drain_unseen: float = 0.0
    """1: there were too few steps with or without a drain to compare, so `drain_s` says nothing; else 0."""

    @property
    def snapshot_s(self) -> float:
        """What a snapshot costs."""
        return self.wait_s + self.slowed_s

    def values(self) -> list[float]:
        """The figures in their order."""
        return [getattr(self, name) for name in self.__slots__]

    def plain_s(self, setting: Setting) -> float:
        """Time of a step without checkpoints."""
        return max(1e-9, self.step_s - self.snapshot_s / setting.snapshots)

    def overhead(self, setting: Setting) -> float:
        """Cost of checkpoints as a fraction of a step without."""
        drains_s = self.drain_s / setting.slow if setting.slow else 0.0
        return (self.snapshot_s / setting.snapshots + drains_s) / self.plain_s(setting)


@dataclass(frozen=True, slots=True)
class Decision:
    """What changes, and why."""

    setting: Setting
    reason: str


def first_setting(rule: Rule) -> Setting:
    """Return the intervals to begin with: the plan's, but for the first window of an `auto` one."""
    memory = CALIBRATION_EVERY if rule.memory == 1 and rule.memory_auto else rule.memory
    return Setting(memory, _multiple(rule.slow, memory) if rule.slow_auto else rule.slow)


def decide(
    rule: Rule, setting: Setting, figures: Figures, *, step: int = 0, early: int = 0, probe: bool = False
) -> Decision | None:
    """Return other intervals when the figures call for them; after only `early` snapshots when they cry for them.

    `step` is the one that has just ended. What is widened past the end of the run would never be looked at again, and
    a bad moment would cost all checkpoints of the rest: then one more snapshot is made in the middle of that.

    A `probe` is one of the few snapshots that a wide interval has. It may narrow that by `PROBE_TIMES` at most and
    never widen it, and the next one is looked at again: if it was wrong, it has cost one more snapshot.
    """
    if early and not _cries(rule, setting, figures):
        return None
    if early in SPENT_SNAPSHOTS and not _spends_all(rule, setting, figures):
        return None
    snapshots = _within_the_rest(_snapshots(rule, setting, figures), rule, setting, step)
    if probe:
        if snapshots >= setting.snapshots:
            return None
        snapshots = min(_reaching(max(snapshots, setting.snapshots // PROBE_TIMES), rule), setting.snapshots)
    slow = setting.slow
    if not setting.memory:
        slow = snapshots
    elif slow and rule.slow_auto:
        measured = figures.drain_steps > 0 and not early and not probe
        slow = _multiple(_slow(rule, setting, figures, snapshots) if measured else slow, snapshots)
    elif slow:
        slow = rule.slow if snapshots == rule.memory else _multiple(rule.slow, snapshots)
    wanted = Setting(snapshots if setting.memory else 0, slow)
    if wanted == setting:
        return None
    return Decision(wanted, _reason(rule, setting, figures))


def _cries(rule: Rule, setting: Setting, figures: Figures) -> bool:
    costly = figures.wait_s / setting.snapshots > EARLY_TIMES_BUDGET * rule.budget * figures.plain_s(setting)
    return costly and figures.typical_s > EARLY_WAIT_S


def _spends_all(rule: Rule, setting: Setting, figures: Figures) -> bool:
    auto = rule.memory_auto if rule.memory else rule.slow_auto
    return auto and figures.spent_s > SPENT_SHARE * rule.budget * rule.max_steps * figures.plain_s(setting)


def _snapshots(rule: Rule, setting: Setting, figures: Figures) -> int:
    """Return the interval of snapshots."""
    current, plain_s = setting.snapshots, figures.plain_s(setting)
    auto = rule.memory_auto if rule.memory else rule.slow_auto
    least = 1 if auto else rule.memory or rule.slow
    budget = rule.budget / 2 if figures.total > rule.budget else rule.budget
    wanted = _affordable(figures.snapshot_s, budget * plain_s)
    if wanted > current:
        if not auto and current == least and not _breaks(rule, setting, figures):
            return current
        return min(_reaching(max(wanted, least), rule), max(current, rule.max_steps))
    narrow = _reaching(max(least, _affordable(figures.snapshot_s, NARROW_SHARE * budget * plain_s)), rule)
    return min(current, narrow)


def _within_the_rest(wanted: int, rule: Rule, setting: Setting, step: int) -> int:
    """Return `wanted`, or less if no multiple of it is left in a rest of the run that is worth another look."""
    left = rule.max_steps - step
    falls_in = (step // wanted + 1) * wanted < rule.max_steps
    if wanted <= setting.snapshots or left <= PROBE_STEPS or falls_in or rule.budget == 0:
        return wanted
    return max(setting.snapshots, step + left // 2)


def _breaks(rule: Rule, setting: Setting, figures: Figures) -> bool:
    """Tell whether a given interval takes so much that the budget must come first."""
    typical_s = figures.typical_s + figures.slowed_s
    allowed_s = GIVEN_TIMES_BUDGET * rule.budget * figures.plain_s(setting) * setting.snapshots
    return typical_s > max(allowed_s, GIVEN_COST_S)


def excess_of_given(rule: Rule, setting: Setting, figures: Figures) -> str | None:
    """Say what a given interval costs when that is more than the budget and the interval stays; else None."""
    auto = rule.memory_auto if rule.memory else rule.slow_auto
    given = rule.memory or rule.slow
    over = (figures.typical_s + figures.slowed_s) / setting.snapshots > rule.budget * figures.plain_s(setting)
    if auto or setting.snapshots != given or not over or _breaks(rule, setting, figures):
        return None
    fits = _affordable(figures.snapshot_s, rule.budget * figures.plain_s(setting))
    return f"{_reason(rule, setting, figures)}; every: {given} is given and stays, every: auto would take {fits}"


def _slow(rule: Rule, setting: Setting, figures: Figures, snapshots: int) -> int:
    """Return the interval of the first slower tier: what it sustains, and what the rest of the budget allows."""
    plain_s = figures.plain_s(setting)
    left = rule.budget - figures.snapshot_s / snapshots / plain_s
    left_s = max(left, LEAST_BUDGET_SHARE * rule.budget) * plain_s
    sustained = math.ceil(figures.drain_steps / DRAIN_SHARE)
    wanted = max(sustained, _affordable(figures.drain_s, left_s))
    if wanted > setting.slow:
        return min(wanted, max(setting.slow, rule.max_steps))
    if figures.drain_unseen:
        return setting.slow
    return min(setting.slow, max(sustained, _affordable(figures.drain_s, NARROW_SHARE * left_s)))


def _affordable(cost_s: float, allowed_s: float) -> int:
    """Return the smallest k with cost/k at most what is allowed per step."""
    if cost_s <= allowed_s:
        return 1
    return math.ceil(min(cost_s / allowed_s, NEVER)) if allowed_s > 0 else NEVER


def _reaching(wanted: int, rule: Rule) -> int:
    """Return the next interval from `wanted` up that divides, or is a multiple of, all that others rely on."""
    others = [steps for steps in (*rule.reached, 0 if rule.slow_auto else rule.slow) if steps]
    for steps in range(wanted, wanted + SEARCHED):
        if all(other % steps == 0 or steps % other == 0 for other in others):
            return steps
    return wanted


def _multiple(steps: int, of: int) -> int:
    """Round up to a multiple; of 0 there is only the number itself."""
    return -(-steps // of) * of if of else steps


def _reason(rule: Rule, setting: Setting, figures: Figures) -> str:
    plain_s, overhead = figures.plain_s(setting), figures.overhead(setting)
    costs = [f"a snapshot costs {duration(figures.snapshot_s)}"]
    if figures.drain_s:
        costs.append(f"a drain {duration(figures.drain_s)} over {figures.drain_steps:.3g} steps")
    cost, allowed = shares(overhead, rule.budget)
    words = f"{' and '.join(costs)}, a step takes {duration(plain_s)}: {cost}"
    total = f"; {share(figures.total)} so far" if figures.total > rule.budget else ""
    return f"{words}{total}, max_overhead is {allowed}{'' if overhead > rule.budget else ', there is room'}"


@dataclass
class Window:
    """Steps of one rank that are looked at together, and the totals of its attempt."""

    samples: list[Sample] = field(default_factory=list)
    """Of a long stretch of steps without checkpoints only the first ones: they are all alike."""
    drains: list[Sample] = field(default_factory=list)
    """The same, but over as many windows as it takes to compare steps with and without a drain."""
    steps: int = 0
    snapshots: int = 0
    """Copies in the window."""
    window_s: float = 0.0
    window_waited_s: float = 0.0
    passed: int = 0
    """Steps of the attempt."""
    step_s: float = 0.0
    waited_s: float = 0.0
    waits: list[float] = field(default_factory=list)
    """One per snapshot of the window."""
    looked_early: int = 0
    """Snapshots of the attempt when they were last looked at before the window was full."""
    looked_probe: int = 0
    """Snapshots of the window when one was last looked at by itself."""
    _waiting_s: float = 0.0

    def add(self, sample: Sample) -> None:
        """Take a step; the first ones of an attempt are let pass."""
        self.passed += 1
        if self.passed <= WARM_UP_STEPS:
            return
        self.steps, self.snapshots = self.steps + 1, self.snapshots + sample.copied
        self.window_s, self.window_waited_s = self.window_s + sample.step_s, self.window_waited_s + sample.waited_s
        self.step_s, self.waited_s = self.step_s + sample.step_s, self.waited_s + sample.waited_s
        self._waiting_s += sample.waited_s
        if sample.copied:
            self.waits.append(self._waiting_s)
            self._waiting_s = 0.0
        for samples in (self.samples, self.drains):
            if len(samples) < KEPT_SAMPLES or sample.marked or samples[-1].marked:
                samples.append(sample)

    def early(self) -> int:
        """Return how many snapshots the attempt has had, once each time that they are to be looked at already; else 0.

        The same on every rank.
        """
        if self.snapshots <= self.looked_early or self.snapshots not in (*SPENT_SNAPSHOTS, EARLY_SNAPSHOTS):
            return 0
        self.looked_early = self.snapshots
        return self.snapshots

    def probe(self) -> bool:
        """Tell, once for each snapshot of a window that takes long to fill, that it is to be looked at by itself.

        The same on every rank.
        """
        if self.full or self.steps < PROBE_STEPS or self.snapshots <= self.looked_probe:
            return False
        self.looked_probe = self.snapshots
        return True

    @property
    def full(self) -> bool:
        """Tell whether the window is complete; the same on every rank."""
        return self.steps >= WINDOW_STEPS and self.snapshots >= WINDOW_SNAPSHOTS

    def figures(self) -> Figures:
        """What the window says so far."""
        ends = [number for number, sample in enumerate(self.drains, 1) if sample.drained]
        whole = self.drains[: ends[-1]] if ends else self.drains  # what has begun and not ended would count as whole
        drains = max(1, sum(sample.drained for sample in whole))
        drain_s = sum(sample.drain_s for sample in whole)
        beside = sum(sample.draining for sample in whole)
        step_s = self.window_s / self.steps
        slowed = _excess(self.samples, lambda sample: sample.copied, lambda sample: sample.draining)
        per_step = self._drain_excess()
        return Figures(
            step_s=step_s,
            wait_s=self.window_waited_s / max(1, self.snapshots),
            slowed_s=slowed or 0.0,
            drain_s=(per_step or 0.0) * beside / drains,
            drain_steps=drain_s / drains / step_s if step_s > 0 else 0.0,
            total=self.waited_s / self.step_s if self.step_s > 0 else 0.0,
            typical_s=median(self.waits or [0.0]),
            spent_s=self.waited_s,
            drain_unseen=float(per_step is None),
        )

    def _drain_excess(self) -> float | None:
        return _excess(self.drains, lambda sample: sample.draining, lambda sample: sample.copied)

    def restart(self) -> None:
        """Begin the next window: after a full one, or with other intervals."""
        if len(self.drains) >= KEPT_SAMPLES or self._drain_excess() is not None:
            self.drains = []
        self.samples, self.waits, self.steps, self.snapshots, self.looked_probe = [], [], 0, 0, 0
        self.window_s = self.window_waited_s = 0.0


def _excess(samples: Sequence[Sample], marked: Kind, other: Kind) -> float | None:
    """What marked steps take longer than the rest, compared among those that agree in the other respect.

    None: too few of them do.
    """
    found, weight = 0.0, 0
    for alike in (False, True):
        steps = [sample for sample in samples if other(sample) == alike]
        longer = [sample.step_s - sample.waited_s for sample in steps if marked(sample)]
        plain = [sample.step_s - sample.waited_s for sample in steps if not marked(sample)]
        if min(len(longer), len(plain)) >= LEAST_COMPARED:
            found += len(longer) * excess(longer, plain)
            weight += len(longer)
    return found / weight if weight else None


def excess(longer: Sequence[float], plain: Sequence[float]) -> float:
    """Return the difference of the medians; 0 while it is within the noise.

    The standard error of a median of normal values is 1.2533·s/√n, s is taken from the median deviation (·1.4826).
    """
    difference = median(longer) - median(plain)
    error = math.hypot(_error(longer), _error(plain))
    return difference if difference > ERRORS * error else 0.0


def _error(values: Sequence[float]) -> float:
    middle = median(values)
    return 1.2533 * 1.4826 * median(abs(value - middle) for value in values) / math.sqrt(len(values))
