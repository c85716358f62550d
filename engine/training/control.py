"""The controller at work: feeds it the steps of this rank, and applies what all ranks decide alike."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ...planners.document import Plan, Settled
from ...planners.running.controller import Decision, decide, excess_of_given, first_setting, rule_of
from ...planners.running.observed import Figures, Sample, Setting, Window
from ...planners.sharding.layers import windows_per_step
from ...planners.windows import Windows, storage_parameters
from ...specs.models import Spec
from ...tiers.format.jsonfile import replace as replace_file
from ..parallel.context import Context
from ..snapshot.snapshots import Cadence, Pace, Snapshots
from .report import Reporter

WINDOW_PASSES = 256
"""Steps whose passes, and copies, are remembered."""
OTHER_PACE = 0.2
"""The windows are given other shares when one of them changes by more than this part."""


def beginning(spec: Spec, plan: Plan) -> tuple[Cadence, Pace]:
    """Intervals and pace to begin an attempt with: what an earlier one settled on, else the plan's."""
    measured, first = plan.measured, spec.first_slow_tier
    setting = first_setting(rule_of(spec, plan))
    pace = Pace(
        plan.forward.bytes_per_window or 0, plan.backward.bytes_per_window or 0, plan.forward.slice_bytes or 2**20
    )
    if measured is not None:
        setting = Setting(measured.memory_every, measured.slow_every)
        pace = Pace(measured.forward_bytes, measured.backward_bytes, measured.slice_bytes)
    return Cadence(setting.memory, setting.slow, first is not None and first.waits), pace


class Control:
    """Keeps the cost of checkpoints within the budget; one per worker, all of them in step."""

    def __init__(self, spec: Spec, plan: Plan, path: Path, context: Context, snapshots: Snapshots) -> None:
        """Begin with the first step of an attempt. `path` is the plan's file, where a restart looks."""
        self.spec, self.plan, self.path, self.context, self.snapshots = spec, plan, path, context, snapshots
        self.rule = rule_of(spec, plan)
        self.window = Window()
        self.passes: deque[tuple[float, float]] = deque(maxlen=WINDOW_PASSES)
        self.copies: deque[float] = deque(maxlen=WINDOW_PASSES)
        """Seconds per byte of each copy."""
        self.looks = 0
        self._seen: Settled | None = None
        """What the last full window said, as long as it is not beside the plan."""
        self._told_excess = False
        self._waited_s = self._drain_s = 0.0
        self._drained = 0

    @property
    def setting(self) -> Setting:
        """The intervals in force."""
        return Setting(self.snapshots.cadence.memory, self.snapshots.cadence.slow)

    def step(self, step: int, metrics: dict[str, Any], reporter: Reporter) -> None:
        """Take a step; at the end of a window decide with the other ranks, and act on it."""
        for_slot_s, self._waited_s = self.snapshots.waited_s - self._waited_s, self.snapshots.waited_s
        drains = self.snapshots.drains
        drain_s, self._drain_s = drains.busy_s - self._drain_s, drains.busy_s
        drained, self._drained = drains.ended - self._drained, drains.ended
        self.window.add(
            Sample(
                step_s=metrics["step_s"] - for_slot_s,
                waited_s=metrics["stall_s"] - for_slot_s,
                copied=metrics["snapshot_bytes"] > 0,
                drain_s=drain_s,
                drained=drained,
            )
        )
        passes = windows_per_step(self.spec)
        self.passes.append((metrics["forward_s"] / passes, metrics["backward_s"] / passes))
        if metrics["snapshot_bytes"] > 0:
            self.copies.append(self.snapshots.copier.moving_s / max(1, self.snapshots.constant_bytes))
        full = self.window.full
        early = 0 if full else self.window.early()
        probe = not early and self.window.probe()
        if (full or early or probe) and (self._look(step, reporter, early, probe=probe) or full):
            self.window.restart()
            self.passes.clear()
            self.copies.clear()

    def _look(self, step: int, reporter: Reporter, early: int = 0, *, probe: bool = False) -> bool:
        """Decide; returns whether the intervals are others now.

        Passes count by the wall clock, for a window is open while they wait for a core; copies by the time that they
        had one, for slices are sized by how fast they are. Of both it is the median that counts.
        """
        mine = self.window.figures().values()
        forward_s, backward_s = (median(times) for times in zip(*self.passes, strict=True))
        byte_s = median(self.copies)  # a look comes after a copy
        *values, forward_s, backward_s, byte_s = self.context.worst_of_ranks([*mine, forward_s, backward_s, byte_s])
        figures = Figures(*values)
        before = self.setting
        decision = decide(self.rule, before, figures, step=step, early=early, probe=probe)
        if decision is not None:
            self.snapshots.cadence = replace(
                self.snapshots.cadence, memory=decision.setting.memory, slow=decision.setting.slow
            )
            self._tell(step, reporter, before, decision, figures)
        changed = decision is not None
        if not early and not probe:
            self.looks += 1
            self._tell_excess(step, reporter, before, figures)
            changed |= self._set_pace(step, reporter, forward_s, backward_s, byte_s)
            changed |= self.looks & (self.looks - 1) == 0  # nothing new costs the training thread its time more rarely
        if (not early and not probe) or changed:
            self._seen = self._settled(step, figures, before, forward_s, backward_s, byte_s)
        if reporter.active and changed:
            self._write()
        return decision is not None

    def _tell(self, step: int, reporter: Reporter, before: Setting, decision: Decision, figures: Figures) -> None:
        changed = {
            tier: {"from": old, "to": new}
            for tier, old, new in (
                ("memory", before.memory, decision.setting.memory),
                (reporter.slow_tier, before.slow, decision.setting.slow),
            )
            if old != new
        }
        reporter.event(
            "adjusted", step, every=changed, reason=decision.reason, overhead=figures.overhead(before),
            budget=self.rule.budget, snapshot_s=figures.snapshot_s, wait_s=figures.wait_s, step_s=figures.step_s,
        )  # fmt: skip

    def _tell_excess(self, step: int, reporter: Reporter, before: Setting, figures: Figures) -> None:
        """Say once per attempt that an interval of the spec costs more than its budget, and stays."""
        words = None if self._told_excess else excess_of_given(self.rule, before, figures)
        if words is not None:
            self._told_excess = True
            reporter.event("warning", step, detail=words)

    def _set_pace(self, step: int, reporter: Reporter, forward_s: float, backward_s: float, byte_s: float) -> bool:
        """Spread the copy over the windows as long as they are, in slices as fast as the channel is; True: anew."""
        rate = 1 / byte_s if byte_s > 0 else self.plan.storage.bytes_per_s
        size = self.plan.model.state_bytes_per_rank or self.snapshots.constant_bytes
        count = windows_per_step(self.spec)
        windows = Windows(count, forward_s, backward_s, rate)
        forward, backward = storage_parameters(size, count, windows, ("memory",))
        before = self.snapshots.pace
        pace = Pace(forward.bytes_per_window or 0, backward.bytes_per_window or 0, forward.slice_bytes)
        shares = ((pace.forward_bytes, before.forward_bytes), (pace.backward_bytes, before.backward_bytes))
        if pace.slice_bytes == before.slice_bytes and all(abs(new - old) <= OTHER_PACE * old for new, old in shares):
            return False
        self.snapshots.set_pace(pace)
        reporter.event(
            "adjusted", step, pace={"from": vars(before), "to": vars(pace)}, forward_s=forward_s,
            backward_s=backward_s, copy_bytes_per_s=rate, reason="passes and copies as they were measured",
        )  # fmt: skip
        return True

    def end(self, device_bytes: int, reporter: Reporter) -> None:
        """The attempt is over: leave what was measured last beside the plan, with the memory that a rank has taken."""
        last = self._seen or self.plan.measured
        if reporter.active and last is not None:
            self._seen = replace(last, device_bytes_per_rank=device_bytes or None)
            self._write()

    def _settled(
        self, step: int, figures: Figures, before: Setting, forward_s: float, backward_s: float, byte_s: float
    ) -> Settled:
        setting, pace = self.setting, self.snapshots.pace
        return Settled(
            step=step,
            forward_s=forward_s,
            backward_s=backward_s,
            step_s=figures.step_s,
            copy_bytes_per_s=1 / byte_s if byte_s > 0 else 0.0,
            snapshot_s=figures.snapshot_s,
            overhead=figures.overhead(before),
            memory_every=setting.memory,
            slow_every=setting.slow,
            forward_bytes=pace.forward_bytes,
            backward_bytes=pace.backward_bytes,
            slice_bytes=pace.slice_bytes,
        )

    def _write(self) -> None:
        """Leave it beside the plan, where a restart finds it; one that finds an older plan measures anew.

        A disk that takes no more is told of with the lines of metrics that it takes no more.
        """
        self.plan, self._seen = replace(self.plan, measured=self._seen), None
        with contextlib.suppress(OSError):  # a full disk: a restart begins with the plan's figures, and measures again
            replace_file(self.path, json.dumps(self.plan.to_json(), indent=2).encode())
