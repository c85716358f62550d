"""The controller in a worker's loop: it acts, it says so, it leaves it for a restart, and no loss changes by it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.engine.build import CPU, RUN_ID, job_spec

from dtrain.engine.parallel.context import Context, StopFlag
from dtrain.engine.snapshot.snapshots import Cadence, Pace, Snapshots
from dtrain.engine.training.control import Control, beginning
from dtrain.engine.training.parts import assemble
from dtrain.engine.training.report import Reporter
from dtrain.engine.training.step import Progress, train_step
from dtrain.planners.document import Settled
from dtrain.planners.machine import Machine, Measured
from dtrain.planners.plan import Plan, make_plan, plan_from_json
from dtrain.planners.running.observed import WARM_UP_STEPS, WINDOW_STEPS
from dtrain.planners.sharding.shards import TensorInfo
from dtrain.planners.windows import Windows, storage_parameters
from dtrain.specs.models import Spec
from dtrain.tiers.format.jsonfile import dumps, read_lines
from dtrain.tiers.format.layout import RunDir
from dtrain.tiers.memory.heartbeat import Heartbeat
from dtrain.tiers.memory.slots import MemoryDir

pytestmark = pytest.mark.usefixtures("group")
STEPS = 30


def planned(spec: Spec) -> Plan:
    parameters = [TensorInfo("inner.weight", "F32", (8, 4)), TensorInfo("outer.weight", "F32", (1, 8))]
    measured = Measured(0.01, 0.02, 0.001, 1e9)
    return make_plan(spec, Machine(2, None, None, "cpu"), measured, parameters)


SLOW_COPY_S = 0.04
"""Well beyond a step."""


class Loop:
    """A worker's loop without its process; the controller is told times that are not those of this machine."""

    def __init__(self, folder: Path, memory: MemoryDir, spec: Spec, wait_s: float) -> None:
        self.run, self.spec = RunDir(folder), spec
        folder.mkdir(exist_ok=True)
        self.context = Context(0, 0, 1, CPU, StopFlag(), Heartbeat(memory, 0))
        if not self.run.plan.exists():
            self.run.plan.write_bytes(dumps(planned(spec).to_json()))
        self.parts, self.plan = assemble(spec, self.context), self.read_plan()
        cadence, pace = beginning(spec, self.plan)
        self.snapshots = Snapshots(
            self.parts.state, memory, run_id=RUN_ID, attempt=1, device=CPU,
            cadence=cadence, pace=pace, restored=None, alive=self.context.beat,
        )  # fmt: skip
        self.wait_s = wait_s
        """That the training waits for a copy."""
        self.looked_at: Settled | None = None
        """What was beside the plan before the end."""
        self.stored: list[int] = []
        self.losses: list[float] = []

    def read_plan(self) -> Plan:
        return plan_from_json(json.loads(self.run.plan.read_text()))

    def train(self, steps: int) -> None:
        control = Control(self.spec, self.plan, self.run.plan, self.context, self.snapshots)
        reporter, progress = Reporter(self.run, 1, active=True, slow_tier="disk"), Progress()
        try:
            for step in range(1, steps + 1):
                outcome = train_step(self.parts, self.context, progress, self.snapshots)
                self.snapshots.begin(step, progress.meta(self.parts, "spec"), drain_busy=False)
                for slot in self.snapshots.slots:
                    slot.slot.drain_mark.unlink(missing_ok=True)
                waited_s = self.wait_s if outcome.metrics["snapshot_bytes"] else 0.0
                outcome.metrics.update(step_s=0.01 + waited_s, stall_s=waited_s, forward_s=0.003, backward_s=0.006)
                self.stored += [outcome.committed.step] if outcome.committed is not None else []
                self.losses.append(outcome.metrics["loss"])
                control.step(step, outcome.metrics, reporter)
            self.looked_at = self.read_plan().measured
            control.end(2**20, reporter)
            self.snapshots.finish()
        finally:
            self.snapshots.close()

    def adjusted(self, what: str) -> list[dict[str, Any]]:
        return [event for event in read_lines(self.run.events) if event["event"] == "adjusted" and what in event]


def spec_with(**changes: Any) -> Spec:
    tiers = [{"type": "memory", "every": 1}, {"type": "disk", "every": 4}]
    return job_spec(**{"max_steps": STEPS, "tiers": tiers, "checkpoint": {"max_overhead": 0.005}, **changes})


def test_a_slow_memory_tier_is_written_less_often_and_no_loss_changes(tmp_path: Path, memory: MemoryDir) -> None:
    loop = Loop(tmp_path / "slow", memory, spec_with(), SLOW_COPY_S)
    loop.train(STEPS)
    event = loop.adjusted("every")[0]
    assert event["every"]["memory"]["from"] == 1
    assert event["overhead"] > event["budget"] == 0.005
    assert "max_overhead is 0.5 %" in event["reason"]
    assert len(loop.stored) < STEPS / 2
    assert loop.snapshots.cadence.slow % loop.snapshots.cadence.memory == 0, "disk checkpoints are snapshots too"
    free = Loop(tmp_path / "free", memory, spec_with(checkpoint={"max_overhead": 1.0}), 0.0)
    free.train(STEPS)
    assert free.adjusted("every") == []
    assert free.stored == list(range(1, STEPS))
    assert loop.losses == free.losses


def test_the_last_window_and_the_memory_are_beside_the_plan_at_the_end(tmp_path: Path, memory: MemoryDir) -> None:
    """Of a run of 200 steps the summary told what had been measured up to step 130."""
    long = 3 * WINDOW_STEPS + WARM_UP_STEPS
    loop = Loop(tmp_path / "long", memory, spec_with(max_steps=long, checkpoint={"max_overhead": 1.0}), 0.0)
    loop.train(long)
    assert loop.looked_at is not None
    assert loop.looked_at.step < long
    assert loop.looked_at.device_bytes_per_rank is None, "the attempt went on"
    measured = loop.read_plan().measured
    assert measured is not None
    assert (measured.step, measured.device_bytes_per_rank) == (long, 2**20)


def test_a_restart_goes_on_with_what_was_settled_on(tmp_path: Path, memory: MemoryDir) -> None:
    loop = Loop(tmp_path / "run", memory, spec_with(), SLOW_COPY_S)
    loop.train(STEPS)
    measured = loop.read_plan().measured
    assert measured is not None
    assert measured.memory_every == loop.snapshots.cadence.memory > 1
    assert measured.overhead > 0.005
    again = Loop(tmp_path / "run", memory, loop.spec, 0.0)
    assert again.snapshots.cadence == loop.snapshots.cadence
    assert again.snapshots.pace == loop.snapshots.pace
    again.snapshots.close()


class Told(Loop):
    """Steps and copies of which a test says how long they took: no figure is that of this machine."""

    def __init__(self, folder: Path, memory: MemoryDir, copies_s: Sequence[float]) -> None:
        super().__init__(folder, memory, spec_with(), 0.0)
        self.copies_s = copies_s

    def settle(self, pace: Pace) -> None:
        """One window of the controller."""
        control = Control(self.spec, self.plan, self.run.plan, self.context, self.snapshots)
        reporter, passes = Reporter(self.run, 1, active=True, slow_tier="disk"), self.spec.micro_batches
        self.snapshots.set_pace(pace)
        told = {"step_s": 0.05, "stall_s": 0.0, "forward_s": passes * 0.01, "backward_s": passes * 0.03}
        for step, copy_s in enumerate(self.copies_s, 1):
            self.snapshots.copier.moving_s = copy_s
            control.step(step, {**told, "snapshot_bytes": self.snapshots.constant_bytes}, reporter)
        self.snapshots.close()


ONE_WINDOW = WARM_UP_STEPS + WINDOW_STEPS


def test_windows_get_shares_as_long_as_they_are(tmp_path: Path, memory: MemoryDir) -> None:
    loop = Told(tmp_path / "run", memory, [0.001] * ONE_WINDOW)
    loop.settle(Pace(2**20, 0, 2**20))
    (event,) = loop.adjusted("pace")
    assert event["pace"]["from"] == {"forward_bytes": 2**20, "backward_bytes": 0, "slice_bytes": 2**20}
    pace = loop.snapshots.pace
    assert (event["forward_s"], event["backward_s"]) == (0.01, 0.03)
    assert loop.snapshots.copier.slice_bytes == pace.slice_bytes < 2**20
    size = loop.plan.model.state_bytes_per_rank
    assert size is not None
    windows = Windows(loop.spec.micro_batches, 0.01, 0.03, loop.snapshots.constant_bytes / 0.001)
    planned = storage_parameters(size, loop.spec.micro_batches, windows, ("memory",))
    assert [pace.forward_bytes, pace.backward_bytes] == [each.bytes_per_window for each in planned]
    assert loop.spec.micro_batches * (pace.forward_bytes + pace.backward_bytes) >= size


def test_one_copy_that_was_held_up_says_nothing_of_the_channel(tmp_path: Path, memory: MemoryDir) -> None:
    loop = Told(tmp_path / "run", memory, [0.001] * (ONE_WINDOW - 1) + [10.0])
    loop.settle(Pace(2**20, 0, 2**20))
    (event,) = loop.adjusted("pace")
    assert event["copy_bytes_per_s"] == pytest.approx(loop.snapshots.constant_bytes / 0.001)


@pytest.mark.parametrize("auto", [True, False])
def test_only_auto_begins_with_steps_to_compare(auto: bool) -> None:
    spec = spec_with(tiers=[{"type": "memory", "every": "auto" if auto else 1}, {"type": "disk", "every": "auto"}])
    plan = planned(spec)
    cadence, _ = beginning(spec, plan)
    assert cadence.memory == (2 if auto and plan.tiers[0].every == 1 else plan.tiers[0].every)
    assert isinstance(cadence, Cadence)


def test_a_plan_of_another_job_takes_nothing_over(tmp_path: Path, memory: MemoryDir) -> None:
    loop = Loop(tmp_path / "run", memory, spec_with(), SLOW_COPY_S)
    loop.train(STEPS)
    before = loop.read_plan()
    assert planned(spec_with()).going_on(before).measured == before.measured
    for other in ({"checkpoint": {"max_overhead": 0.2}}, {"tiers": [{"type": "memory", "every": 2}]}):
        taken = planned(spec_with(**other)).going_on(before).measured
        assert (taken is None) == ("tiers" in other), other
