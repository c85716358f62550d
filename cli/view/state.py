"""What a run's two files have told so far, kept in bounded memory. No output, no clock of its own."""

from __future__ import annotations

import math
import re
import statistics
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WARMUP_STEPS = 2
"""First steps of every attempt that the figures leave out: they pay for allocations and cold caches."""
RECENT_STEPS = 20
LOSS_STEPS = 512
SERIES_LIMIT = 4096
_SPEED = ("memory", "peer", "disk", "object")
_NOT_TRIED = "not tried again yet"
_SLOW = "slower than its interval"
_RECOVERY = re.compile(
    r"the (?:(?P<tier>\w+) tier works|state is finite) again; (?P<count>\d+) \w+ were left out meanwhile"
)
TIMED = ("step_s", "forward_s", "backward_s", "optimizer_s", "stall_s")
_WHERE_ABOVE_0 = ("snapshot_bytes", "tokens_per_s")


class Series:
    """Values of one figure over a whole run: beyond `SERIES_LIMIT` only every second, fourth, … is kept.

    Not as objects: each would keep a page of what else the lines held, and a launcher lives for months.
    """

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self._kept = array("d")
        self._stride = 1

    def add(self, value: float) -> None:
        """Take the next value."""
        if self.count % self._stride == 0:
            self._kept.append(value)
            if len(self._kept) > SERIES_LIMIT:
                self._kept = self._kept[::2]
                self._stride *= 2
        self.count += 1
        self.total += value

    @property
    def median(self) -> float | None:
        """Median of what is kept, or None without values."""
        return statistics.median(self._kept) if self._kept else None


@dataclass
class RunState:
    """The last word on every figure of a run, and sums over the steps this view has seen."""

    run_dir: Path
    max_steps: int
    reached: int = 0
    """Highest step ever finished, also before this view began to look."""
    step: int = 0
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    samples_seen: int | None = None
    tokens_seen: int | None = None
    """None where samples are not runs of tokens."""
    evaluated: Mapping[str, Any] | None = None
    """The last evaluation's event."""
    attempt: int = 0
    attempts: int = 0
    """Attempts seen by this view; one more than the restarts."""
    world: int | None = None
    nodes: int | None = None
    count: int = 0
    """Steps that were run, repeated ones too."""
    repeated: int = 0
    """Steps that had been finished before: lost work."""
    repeated_s: float = 0.0
    downtime_s: float = 0.0
    """From each fault to the beginning of the first step after it."""
    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMED, 0.0))
    """Seconds by key of metrics.jsonl, over all steps."""
    series: dict[str, Series] = field(default_factory=lambda: {key: Series() for key in (*TIMED, *_WHERE_ABOVE_0)})
    """Figures without the warm-up steps of each attempt; bytes only of steps that made a snapshot."""
    recent: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSS_STEPS))
    channels: dict[str, float] = field(default_factory=dict)
    """Bytes of checkpoints that each channel has carried between nodes, over all of them."""
    committed: dict[str, int] = field(default_factory=dict)
    """Last committed step per tier, in the order in which the tiers first committed."""
    commit_of: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """The `committed` event behind each entry of `committed`."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Checkpoints a tier left out, per tier."""
    skip_reason: dict[str, str] = field(default_factory=dict)
    """Why a tier left one out last; for one that was not tried, why the one before."""
    outages: dict[str, int] = field(default_factory=dict)
    """Tiers that have left something out since they last worked, and how much."""
    rates: dict[str, Series] = field(default_factory=dict)
    """Bytes per second of the writes into each tier that tells them."""
    warnings: int = 0
    faults: list[Mapping[str, Any]] = field(default_factory=list)
    restarts_in_row: int = 0
    """Attempts with a fault since the last finished step."""
    phase: str = "starting"
    """starting · training · restarting · stopping · finished."""
    preempted: Mapping[str, Any] | None = None
    finished: Mapping[str, Any] | None = None
    state_digest: str | None = None
    """Of the last step whose digest was told: at a restore or at the end."""
    state_digest_step: int | None = None
    _fault_attempt: int | None = None
    _fault_time: float | None = None
    _steps_of_attempt: int = 0
    _counted: dict[str, int] = field(default_factory=dict)
    """Checkpoints of an outage that were counted one by one."""

    @property
    def restarts(self) -> int:
        """Attempts after the first one."""
        return max(0, self.attempts - 1)

    @property
    def overhead(self) -> float | None:
        """Stall as a fraction of step time, warm-up left out; None before the first such step."""
        total = self.series["step_s"].total
        return self.series["stall_s"].total / total if total > 0 else None

    @property
    def tiers(self) -> list[str]:
        """Tiers that have committed or left out something, fastest first."""
        told = {**self.committed, **self.skipped}
        return sorted(told, key=lambda tier: _SPEED.index(tier) if tier in _SPEED else len(_SPEED))

    def recent_mean(self, key: str) -> float | None:
        """Mean of one figure over the last few steps."""
        values = [value for record in self.recent if (value := number(record, key)) is not None]
        return sum(values) / len(values) if values else None

    def take_history(self, records: list[dict[str, Any]]) -> None:
        """Learn from steps of an earlier start which steps would be repeated ones."""
        self.reached = max([self.reached, *(integer(record, "step") or 0 for record in records)])
        if records:
            self.step = integer(records[-1], "step") or 0
            self._take_seen(records[-1])

    def _take_seen(self, record: Mapping[str, Any]) -> None:
        self.samples_seen = integer(record, "samples") or self.samples_seen
        self.tokens_seen = integer(record, "tokens_seen") or self.tokens_seen

    def take_step(self, record: Mapping[str, Any]) -> bool:
        """Take a line of metrics.jsonl; False for one that tells of no new step, or of an attempt that is over."""
        step, attempt = integer(record, "step"), integer(record, "attempt")
        if step is None or (attempt is not None and attempt < self.attempt):
            return False
        if "eval_loss" in record and step == self.step:
            return False  # the same step's line again, after its evaluation: the event tells of that
        self._begin_attempt(attempt)
        self._take_timing(record, repeated=step <= self.reached)
        self.step, self.reached = step, max(step, self.reached)
        self.loss = number(record, "loss")
        self.lr, self.grad_norm = number(record, "lr"), number(record, "grad_norm")
        self._take_seen(record)
        self.recent.append(record)
        if self.loss is not None:
            self.losses.append(self.loss)
        if self._fault_attempt is None or self.attempt > self._fault_attempt:
            self.phase, self.restarts_in_row, self._fault_attempt = "training", 0, None
        return True

    def take_event(self, record: Mapping[str, Any]) -> None:
        """Take a line of events.jsonl; unknown events change nothing."""
        handler = _HANDLERS.get(str(record.get("event")))
        if handler is not None:
            handler(self, record)

    def _take_timing(self, record: Mapping[str, Any], *, repeated: bool) -> None:
        self.count += 1
        self._steps_of_attempt += 1
        step_s = number(record, "step_s") or 0.0
        if repeated:
            self.repeated += 1
            self.repeated_s += step_s
        self._end_downtime(number(record, "time"), step_s)
        for key, series in self.series.items():
            value = number(record, key)
            if value is None or not math.isfinite(value):
                continue
            if key in self.totals:
                self.totals[key] += value
            if self._steps_of_attempt > WARMUP_STEPS and (value > 0 or key in self.totals):
                series.add(value)

    def _end_downtime(self, now: float | None, step_s: float) -> None:
        if self._fault_time is not None and self._fault_attempt != self.attempt and now is not None:
            self.downtime_s += max(0.0, now - step_s - self._fault_time)
            self._fault_time = None

    def _begin_attempt(self, attempt: int | None) -> bool:
        """Note a new attempt, whichever file told of it first."""
        if attempt is None or attempt <= self.attempt:
            return False
        self.attempt = attempt
        self.attempts += 1
        self._steps_of_attempt = 0
        self.recent.clear()
        return True

    def _on_attempt(self, record: Mapping[str, Any]) -> None:
        if self._begin_attempt(integer(record, "attempt")):
            self.phase = "restarting" if self.attempts > 1 else "starting"
        self.world = integer(record, "world") or self.world
        nodes = record.get("nodes")
        self.nodes = len(nodes) if isinstance(nodes, list) else integer(record, "nodes") or self.nodes

    def _on_committed(self, record: Mapping[str, Any]) -> None:
        step, tier = integer(record, "step"), record.get("tier")
        if step is None or not isinstance(tier, str):
            return
        # A slow tier may report late what an earlier attempt stored; the later attempt has the last word.
        self.outages.pop(tier, None)
        channel, carried = record.get("channel"), number(record, "bytes")
        if isinstance(channel, str) and carried is not None and math.isfinite(carried):
            self.channels[channel] = self.channels.get(channel, 0.0) + carried
        rate = number(record, "bytes_per_s")
        if rate is not None and math.isfinite(rate):
            self.rates.setdefault(tier, Series()).add(rate)
        known = self.commit_of.get(tier)
        if known is None or version_of(record) >= version_of(known):
            self.committed[tier], self.commit_of[tier] = step, record

    def _on_fault(self, record: Mapping[str, Any]) -> None:
        self.faults.append(record)
        if record.get("kind") == "tier":
            self.phase = "stopping"
        if not ends_attempt(record):
            return
        attempt = integer(record, "attempt")
        attempt = self.attempt if attempt is None else attempt
        if attempt != self._fault_attempt:
            self.restarts_in_row += 1
        self._fault_attempt = attempt
        if self._fault_time is None:
            self._fault_time = number(record, "time")
        self.phase = "restarting"

    def _on_restored(self, record: Mapping[str, Any]) -> None:
        step = integer(record, "step")
        self.step = self.step if step is None else step
        self._take_digest(record)

    def _on_skipped(self, record: Mapping[str, Any]) -> None:
        tier, count = str(record.get("tier")), integer(record, "left_out") or 1
        reason = record.get("reason")
        if isinstance(reason, str) and (tier not in self.skip_reason or _NOT_TRIED not in reason):
            self.skip_reason[tier] = reason
        if is_late(record):
            self.skipped[tier] = self.skipped.get(tier, 0) + count
            return
        counted = 0 if count == 1 else self._counted.get(tier, 0)
        self.skipped[tier] = self.skipped.get(tier, 0) + max(0, count - counted)
        self.outages[tier] = self._counted[tier] = max(count, counted)

    def _on_warning(self, record: Mapping[str, Any]) -> None:
        recovery = recovery_of(record)
        if recovery is None:
            self.warnings += 1
            return
        tier, count = recovery
        unseen = max(0, count - self._counted.pop(tier, 0))  # not every one has an event of its own
        self.skipped[tier] = self.skipped.get(tier, 0) + unseen

    def _on_evaluated(self, record: Mapping[str, Any]) -> None:
        self.evaluated = record

    def _on_preempted(self, record: Mapping[str, Any]) -> None:
        self.preempted, self.phase = record, "stopping"

    def _on_finished(self, record: Mapping[str, Any]) -> None:
        self.finished, self.phase = record, "finished"
        self._take_digest(record)

    def _take_digest(self, record: Mapping[str, Any]) -> None:
        digest = record.get("state_digest")
        if isinstance(digest, str):
            self.state_digest, self.state_digest_step = digest, integer(record, "step")


_HANDLERS = {
    "attempt": RunState._on_attempt,
    "committed": RunState._on_committed,
    "fault": RunState._on_fault,
    "restored": RunState._on_restored,
    "skipped": RunState._on_skipped,
    "evaluated": RunState._on_evaluated,
    "warning": RunState._on_warning,
    "preempted": RunState._on_preempted,
    "finished": RunState._on_finished,
}


def ends_attempt(fault: Mapping[str, Any]) -> bool:
    """Tell whether the workers ended by a fault: the drainer may die, a tier fail or be taken over, beside them."""
    return fault.get("kind") not in ("drainer", "tier", "taken")


def is_late(skipped: Mapping[str, Any]) -> bool:
    """Tell whether a tier left something out for being slow; `left_out` is then all that the event stands for.

    Otherwise something failed: `left_out` counts up within one outage, and not every one has an event of its own.
    """
    return _SLOW in str(skipped.get("reason"))


def recovery_of(warning: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the tier that a warning says to work again, and how much it left out; None for any other warning."""
    match = _RECOVERY.match(str(warning.get("detail")))
    return (match["tier"] or "memory", int(match["count"])) if match else None


def number(record: Mapping[str, Any], key: str) -> float | None:
    """Value of a key if it is a number (NaN and infinity are), else None."""
    value = record.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def integer(record: Mapping[str, Any], key: str) -> int | None:
    """Value of a key if it is a whole number, else None."""
    value = record.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def version_of(record: Mapping[str, Any]) -> tuple[int, int]:
    """Attempt and step of a `committed` event: what is newer is greater."""
    return integer(record, "attempt") or 0, integer(record, "step") or 0
