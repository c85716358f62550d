"""What the steps of a running job say about its checkpoints: samples in, figures of a window out; `controller` decides.

A window is complete after some steps and some snapshots; what cries for an answer earlier is looked at earlier. What
copies and drains do to the passes beside them counts only as far as it stands out from the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

WARM_UP_STEPS = 2
"""First steps of an attempt, which take longer for many reasons."""
EARLY_SNAPSHOTS = 4
"""After these the interval is widened already if they cost very much."""
SPENT_SNAPSHOTS, SPENT_SHARE = (1, 2), 0.5
"""After these already, if they alone took this part of what the whole run may spend and the interval is `auto`."""
WINDOW_STEPS, WINDOW_SNAPSHOTS = 16, 6
"""Least length of a window; both must be reached."""
PROBE_STEPS, PROBE_TIMES = 64, 8
"""After so many steps without a full window each snapshot is looked at alone, and may narrow the interval so much."""
LEAST_COMPARED = 6
"""Steps of each kind that are compared."""
ERRORS = 3.0
"""A difference counts when it is this many standard errors."""
KEPT_SAMPLES = 512
Kind = Callable[["Sample"], bool]


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
