"""A run played event by event: slices, windows, links, gradients, slower tiers and faults.

It takes the plan's decisions (bytes per window, slice, intervals) and the machine's rates, but none of the planner's
formulas, and says what then happens. What it plays is what the engine does: a window grants bytes, the copier begins a
slice while any are left, the update waits for the copy, three slots hold snapshots, one drainer carries them on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dtrain.planners.plan import Plan

SLOTS = 3
PLAYED_IN_FULL = 40
"""Steps that are played slice by slice; the others are drawn from these."""


@dataclass(frozen=True)
class Reality:
    """One rank and its node as they are."""

    micro_batches: int
    forward_s: float
    backward_s: float
    exchange_s: float
    optimizer_s: float
    shard_bytes: int
    bytes_per_s: float
    gradients_s: float = 0.0
    """Gradients hold the copy's link for this long from the begin of the last backward pass."""
    beside_bytes_per_s: float = 0.0
    """What they leave of it."""
    copier_threads_per_core: float = 0.0
    """0 on an accelerator; on a CPU the workers of a node by its cores, which the passes use all."""
    write_s: float = 0.0
    upload_s: float = 0.0
    jitter: float = 0.0
    """Standard deviation of a pass's time, as a part of it."""

    @property
    def step_s(self) -> float:
        """A step without checkpoints."""
        return self.micro_batches * (self.forward_s + self.backward_s) + self.exchange_s + self.optimizer_s


@dataclass(frozen=True)
class Step:
    """One step that was played: its length, and when, after the update before it, the copy was whole."""

    length_s: float
    copied_s: float
    stall_s: float


def play_step(plan: Plan, reality: Reality, rng: np.random.Generator, *, copying: bool) -> Step:
    """Play one step slice by slice."""
    passes = list(_passes(plan, reality, rng))
    left, granted = (reality.shard_bytes if copying else 0), 0
    part = 0.0  # of the slice under way
    now, gradients_begin_s, copied_s = 0.0, math.inf, 0.0
    while passes or left > 0:
        if passes and passes[0].fresh:
            granted += passes[0].grant
            passes[0].fresh = False
            if passes[0].last:
                gradients_begin_s = now
        slice_ = min(left, plan.forward.slice_bytes)
        busy = left > 0 and (part > 0 or granted > 0 or not passes)
        # the passes' threads use all cores; copiers beside them get their fair share
        speed = 1 / (1 + reality.copier_threads_per_core) if busy and passes else 1.0
        held = gradients_begin_s <= now < gradients_begin_s + reality.gradients_s
        rate = speed * (reality.beside_bytes_per_s if held else reality.bytes_per_s)
        until = [passes[0].left_s / speed] if passes else []
        until += [(slice_ - part) / rate] if busy and rate > 0 else []
        until += [gradients_begin_s + reality.gradients_s - now] if held else []
        elapsed = min(until)
        now += elapsed
        if busy:
            part += rate * elapsed
            if part >= slice_ * (1 - 1e-9):
                granted, left, part = granted - slice_, left - slice_, 0.0
                copied_s = now
        if passes:
            passes[0].left_s -= elapsed * speed
            if passes[0].left_s <= 1e-12:
                passes.pop(0)
                finished_s = now
    return Step(now + reality.optimizer_s, copied_s, now - finished_s)


@dataclass
class _Pass:
    left_s: float
    grant: int
    last: bool = False
    fresh: bool = True


def _passes(plan: Plan, reality: Reality, rng: np.random.Generator) -> Iterator[_Pass]:
    noise = np.maximum(0.1, rng.normal(1, reality.jitter, 2 * reality.micro_batches))
    forward, backward = plan.forward.bytes_per_window or 0, plan.backward.bytes_per_window or 0
    for micro in range(reality.micro_batches):
        yield _Pass(reality.forward_s * noise[2 * micro], forward)
        last = micro == reality.micro_batches - 1
        yield _Pass(reality.backward_s * noise[2 * micro + 1] + (reality.exchange_s if last else 0), backward, last)


@dataclass(frozen=True)
class Write:
    """One checkpoint on its way into a tier: the step of its state, when its copy was whole, when it is."""

    step: int
    copied: float
    whole: float


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    step_s: float
    """Wall time per step, faults included."""
    goodput: float
    """Part of the wall time that steps which last would have taken without checkpoints and faults."""
    lost_steps: dict[str, list[float]]
    """Work lost by each fault, by kind."""
    made: Counter[str]
    """Checkpoints begun, by tier."""


class Run:
    """A run under way."""

    def __init__(self, plan: Plan, reality: Reality, waits: bool, mtbf_s: dict[str, float], seed: int) -> None:
        self.plan, self.reality, self.waits, self.mtbf_s = plan, reality, waits, mtbf_s
        self.rng = np.random.default_rng(seed)
        self.every = {tier.type: tier.every for tier in plan.tiers}
        self.slow = [kind for kind in ("disk", "object") if kind in self.every]
        self.write_s = {"memory": 0.0, "disk": reality.write_s, "object": reality.upload_s}
        self.writes: dict[str, list[Write]] = {kind: [] for kind in self.every}
        self.made: Counter[str] = Counter()
        self.lost: dict[str, list[float]] = {kind: [] for kind in mtbf_s}
        self.faults = {kind: self.rng.exponential(mean_s) for kind, mean_s in mtbf_s.items()}
        self.now, self.step, self.restored, self.newest, self.furthest = 0.0, 0, 0, 0, 0
        self.wish: int | None = None
        """A step that is due in the first slower tier, whose drainer was busy."""

    def play(self, steps: int) -> Outcome:
        """Play `steps` steps, repeated ones included."""
        played = {
            copying: [play_step(self.plan, self.reality, self.rng, copying=copying) for _ in range(PLAYED_IN_FULL)]
            for copying in (True, False)
        }
        for choice in self.rng.integers(0, PLAYED_IN_FULL, steps):
            self._look_again()
            snapshot, drain = self._due()
            outcome = played[snapshot][choice]
            kind = min(self.faults, key=self.faults.__getitem__, default="")
            if snapshot:
                self._store(self.now + outcome.copied_s, drain=drain)
            if kind and self.faults[kind] < self.now + outcome.length_s:
                self._fail(kind, outcome.length_s)
                continue
            self.now, self.step = self.now + outcome.length_s, self.step + 1
            self.furthest = max(self.furthest, self.step)
        goodput = self.furthest * self.reality.step_s / self.now
        return Outcome(self.now / steps, goodput, self.lost, self.made)

    def _due(self) -> tuple[bool, bool]:
        """Is the state of this step copied, and is it for the drainer? Waits for a slot if it must."""
        self.wish = None
        if self.step == self.restored:
            return False, False
        pinned = self._pinned()
        occupied = sorted(write.whole for write in pinned)
        newest = 0 if any(write.step == self.newest for write in pinned) else 1  # its slot is not given away either
        due = bool(self.slow) and self.step % self.every[self.slow[0]] == 0
        drain = due and (self.waits or not self._busy())
        self.wish = self.step if due and not drain else None
        snapshot = due or ("memory" in self.every and self.step % self.every["memory"] == 0)
        if snapshot and len(occupied) + newest >= SLOTS:
            self.now = occupied[len(occupied) + newest - SLOTS]
        return snapshot, drain

    def _look_again(self) -> None:
        """The newest whole snapshot was due when the drainer was busy: is it still?"""
        if self.wish is not None and not self._busy():
            self._carry(self.wish, self.now - self.reality.optimizer_s)

    def _busy(self) -> bool:
        """What the ranks agree on at the end of a step, before its update."""
        writes = self.writes[self.slow[0]]
        return bool(writes) and writes[-1].whole > self.now - self.reality.optimizer_s

    def _pinned(self) -> list[Write]:
        """The snapshots whose slots the drainer has not let go of."""
        return [write for write in self.writes[self.slow[0]] if write.whole > self.now] if self.slow else []

    def _store(self, copied: float, *, drain: bool) -> None:
        self.newest = self.step
        if "memory" in self.every:
            self._write("memory", copied, self.step)
        if drain:
            self._carry(self.step, copied)

    def _carry(self, step: int, pinned: float) -> None:
        """From memory to the first slower tier, and from there to the next if that is free then."""
        whole = self._write(self.slow[0], pinned, step)
        behind = self.slow[1:]
        if behind and step % self.every[behind[0]] == 0 and self._free_at(behind[0]) <= whole:
            self._write(behind[0], whole, step)

    def _write(self, kind: str, copied: float, step: int) -> float:
        """Begin a write when the one before is done; returns when it will be whole."""
        whole = max(copied, self._free_at(kind)) + self.write_s[kind]
        self.writes[kind] = [*self.writes[kind][-5:], Write(step, copied, whole)]
        self.made[kind] += 1
        return whole

    def _free_at(self, kind: str) -> float:
        return self.writes[kind][-1].whole if self.writes[kind] else 0.0

    def _fail(self, kind: str, length_s: float) -> None:
        """Lose what no tier has that survives; a lost worker leaves the drainer at work, a lost node does not."""
        at = self.faults[kind]  # before `now` if it came while the step waited for a slot
        survivors = ["memory", *self.slow] if kind == "process" else self.slow
        whole = [write.step for tier in survivors for write in self.writes.get(tier, ()) if write.whole <= at]
        back = max(whole, default=0)
        self.lost[kind].append(self.step - back + max(0.0, at - self.now) / length_s)
        for tier, writes in self.writes.items():
            kept = [w for w in writes if (w.copied if kind == "process" else w.whole) <= at]
            self.writes[tier] = [] if kind == "node" and tier == "memory" else kept
        away_s = getattr(self.plan.expected.recovery_s, kind)
        self.now, self.step, self.restored, self.wish = at + away_s, back, back, None
        self.faults = {other: due + away_s for other, due in self.faults.items()}  # nothing else fails meanwhile
        self.faults[kind] = self.now + self.rng.exponential(self.mtbf_s[kind])
