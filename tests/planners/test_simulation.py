"""The planner's overhead, lost work and goodput against a run that is played event by event, over 10^5 steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from tests.planners.build import tiny
from tests.planners.simulation import Reality, Run, play_step

from dtrain.planners.devices import CPU_COPY_BYTES_PER_S, DISK_COMMIT_S, OBJECT_COMMIT_S, with_digest
from dtrain.planners.known import know
from dtrain.planners.machine import Machine, Measured
from dtrain.planners.plan import Plan, make_plan
from dtrain.specs.models import Spec

STEPS = 100_000
WITHIN = 0.1
SHARD = 5_512_000
"""Bytes of a shard of the small job, for two ranks: about."""
MEMORY = {"type": "memory"}
AUTO = {"type": "memory", "every": "auto"}
DISK = {"type": "disk"}
BUCKET = {"type": "object", "url": "s3://bucket/run"}
GPU = Machine(cpu_cores=64, host_memory_bytes=2**38, shm_free_bytes=2**37, accelerator="h100", accelerator_count=8)
CPU = Machine(cpu_cores=2, host_memory_bytes=2**34, shm_free_bytes=2**33, accelerator="cpu")
CORES = Machine(cpu_cores=10**6, host_memory_bytes=2**34, shm_free_bytes=2**33, accelerator="cpu")


SHORT = Measured(0.1, 0.2, 0.05, exchange_s=0.0)


@dataclass(frozen=True)
class Case:
    """A job; the copy takes `load` of the time of its windows, a write to the disk `write` steps."""

    load: float
    tiers: list[dict[str, Any]] = field(default_factory=lambda: [MEMORY, DISK | {"every": 10}])
    write: float = 0.5
    upload: float = 2.0
    micro_batches: int = 4
    times: Measured = SHORT
    machine: Machine = GPU
    gradients: float = 0.0
    """Time of the gradients on the copy's link, in backward passes."""
    process_mtbf: float = 150
    """Of the whole job, in steps."""
    node_mtbf: float = 400
    max_overhead: float = 0.01

    @property
    def step_s(self) -> float:
        """Without checkpoints."""
        passes_s = self.micro_batches * (self.times.forward_s + self.times.backward_s)
        return passes_s + self.times.optimizer_s + (self.times.exchange_s or 0.0)

    def spec(self) -> Spec:
        """The job as people would write it."""
        window_s = self.micro_batches * (self.times.forward_s + self.times.backward_s)
        gradient_bytes = 4 * 918_656
        shared: dict[str, Any] = {"bandwidth": SHARD / (self.load * window_s), "shared": self.gradients > 0}
        hardware: dict[str, Any] = {
            "disk_bandwidth": 2 * SHARD / (self.write * self.step_s),
            "object_bandwidth": 4 * SHARD / (self.upload * self.step_s),
        }
        if self.gradients:
            hardware["node_bandwidth"] = gradient_bytes / (self.gradients * self.times.backward_s)
        cluster = {
            "workers_per_node": 2,
            "channels": {"storage": shared},
            "hardware": hardware,
            "mtbf": {"process": 2 * self.process_mtbf * self.step_s, "node": self.node_mtbf * self.step_s},
        }
        training = {"global_batch_size": 8 * self.micro_batches}
        checkpoint = {"max_overhead": self.max_overhead}
        return tiny(cluster=cluster, training=training, tiers=self.tiers, checkpoint=checkpoint, max_steps=STEPS)

    def reality(self) -> Reality:
        """The machine that the job runs on."""
        spec = self.spec()
        known = know(spec, self.machine, self.times, None)
        assert known.sizes is not None
        given = spec.cluster.hardware
        rate = float(spec.cluster.channels.storage.bandwidth)
        gradient_rate = 0.0 if given.node_bandwidth == "auto" else given.node_bandwidth
        node_bytes = 2 * known.sizes.shard_bytes
        return Reality(
            micro_batches=self.micro_batches,
            forward_s=self.times.forward_s,
            backward_s=self.times.backward_s,
            exchange_s=self.times.exchange_s or 0.0,
            optimizer_s=self.times.optimizer_s,
            shard_bytes=known.sizes.shard_bytes,
            bytes_per_s=rate,
            gradients_s=self.gradients * self.times.backward_s,
            beside_bytes_per_s=max(0.0, rate - gradient_rate),
            copier_threads_per_core=2 / self.machine.cpu_cores if self.machine is CPU else 0.0,
            write_s=node_bytes / float(given.disk_bandwidth) + DISK_COMMIT_S,
            upload_s=2 * node_bytes / float(given.object_bandwidth) + OBJECT_COMMIT_S,
        )


LONG = Measured(10.0, 20.0, 5.0, exchange_s=0.0)
"""Passes beside which notice and restart are short."""
CASES = {
    "fits with slack": Case(0.2),
    "fits with slack, one micro-batch": Case(0.2, micro_batches=1),
    "just fits": Case(0.97),
    "exactly fits what an exposed exchange adds": Case(1.05, times=Measured(0.1, 0.2, 0.05, exchange_s=0.1)),
    "does not fit": Case(1.6),
    "does not fit by far, planned": Case(3.0, [AUTO, DISK], times=LONG),
    "does not fit by far, short steps": Case(2.3, [AUTO, DISK]),
    "intervals longer than the time between faults": Case(
        0.5, [MEMORY | {"every": 50}, DISK | {"every": 150}], process_mtbf=80, node_mtbf=100, times=LONG
    ),
    "a disk seldom written beside frequent lost workers": Case(
        0.5, [MEMORY | {"every": 20}, DISK | {"every": 100}], process_mtbf=40, node_mtbf=120, times=LONG
    ),
    "does not fit, planned, larger budget": Case(3.0, [AUTO, DISK], max_overhead=0.2, times=LONG),
    "shared link with room": Case(0.5, gradients=0.9, machine=CORES),
    "shared link, the last window is needed": Case(0.9, gradients=0.6, machine=CORES),
    "shared link, does not fit": Case(1.1, gradients=0.9, machine=CORES),
    "shared link, gradients longer than the pass": Case(
        1.2, gradients=1.5, machine=CORES, times=Measured(0.1, 0.2, 0.05, exchange_s=0.1)
    ),
    "slow disk, left out": Case(0.2, [MEMORY, DISK | {"every": 4, "when_slow": "skip"}], write=9.3),
    "disk at every step": Case(0.2, [MEMORY, DISK | {"every": 1, "when_slow": "skip"}], write=0.9),
    "disk at every step, too slow": Case(0.2, [MEMORY, DISK | {"every": 1, "when_slow": "skip"}], write=1.1),
    "disk at every second step, two of three": Case(0.2, [MEMORY, DISK | {"every": 2, "when_slow": "skip"}], write=2.1),
    "disk alone at every step": Case(0.4, [DISK | {"every": 1, "when_slow": "skip"}], write=0.8),
    "slow disk, waited for": Case(0.2, [MEMORY, DISK | {"every": 4, "when_slow": "wait"}], write=9.3),
    "slow disk, planned": Case(0.2, [MEMORY, DISK], write=9.3, times=LONG),
    "disk as fast as a step, planned": Case(0.2, [MEMORY, DISK], write=0.7, times=LONG),
    "slow disk, waited for, fewer snapshots": Case(
        0.2, [MEMORY | {"every": 2}, DISK | {"every": 6, "when_slow": "wait"}], write=10.0
    ),
    "slow disk, waited for, no snapshots between": Case(
        0.2, [DISK | {"every": 6, "when_slow": "wait"}], write=10.0, process_mtbf=500, node_mtbf=600
    ),
    "disk alone": Case(1.4, [DISK | {"every": 5}]),
    "bucket alone behind memory": Case(0.4, [MEMORY, BUCKET | {"every": 8}], upload=3.0),
    "memory, disk and bucket": Case(0.4, [MEMORY, DISK | {"every": 5}, BUCKET | {"every": 20}], upload=6.0),
    "memory, disk and bucket, planned": Case(1.3, [AUTO, DISK, BUCKET], write=4.0, upload=9.0, times=LONG),
    "rare faults": Case(0.6, process_mtbf=500, node_mtbf=800),
    "frequent faults": Case(0.6, process_mtbf=60, node_mtbf=200, times=LONG),
    "memory every third": Case(1.5, [MEMORY | {"every": 3}, DISK | {"every": 9}]),
}


def played(case: Case) -> tuple[Plan, Reality, Run, Run]:
    """The plan, the machine, a run without faults and one with them."""
    spec, reality = case.spec(), case.reality()
    plan = make_plan(spec, case.machine, case.times)
    waits = spec.first_slow_tier is not None and spec.first_slow_tier.waits
    means = {kind: getattr(plan.expected.mtbf_s, kind) for kind in ("process", "node")}
    return plan, reality, Run(plan, reality, waits, {}, seed=1), Run(plan, reality, waits, means, seed=2)


@pytest.mark.parametrize("name", CASES)
def test_the_plan_says_what_a_played_run_comes_to(name: str) -> None:
    plan, reality, calm, stormy = played(CASES[name])
    peaceful = calm.play(STEPS)
    overhead = peaceful.step_s / reality.step_s - 1
    assert plan.iteration.step_s == pytest.approx(reality.step_s, rel=1e-6)
    assert plan.expected.overhead == pytest.approx(overhead, rel=WITHIN, abs=2e-4)
    outcome = stormy.play(STEPS)
    for kind in ("process", "node"):
        lost, said = outcome.lost_steps[kind], getattr(plan.expected.lost_steps, kind)
        assert len(lost) > 100, "too few faults to judge by"
        assert said == pytest.approx(fmean(lost), rel=WITHIN), (kind, len(lost))
    assert plan.expected.goodput == pytest.approx(outcome.goodput, rel=WITHIN)
    for tier in plan.tiers:
        if tier.auto:
            assert peaceful.made[tier.type] == pytest.approx(STEPS / tier.every, rel=0.01), "left out what was planned"


def test_the_slack_absorbs_windows_that_turn_out_shorter() -> None:
    case = CASES["fits with slack"]
    plan, reality, *_ = played(case)
    noisy = replace(reality, jitter=0.2)
    rng = np.random.default_rng(7)
    steps = [play_step(plan, noisy, rng, copying=True) for _ in range(200)]
    assert max(step.stall_s for step in steps) == 0


def test_a_slower_channel_than_planned_costs_what_does_not_fit_and_no_more() -> None:
    """At a quarter of the planned rate a copy that took 0.2 of its windows takes 0.8, at a sixth 1.2."""
    plan, reality, *_ = played(CASES["fits with slack"])
    rng = np.random.default_rng(7)

    def stall_s(part: float) -> float:
        slow = replace(reality, bytes_per_s=reality.bytes_per_s * part)
        return play_step(plan, slow, rng, copying=True).stall_s

    assert stall_s(1 / 4) == pytest.approx(0, abs=0.26 * reality.forward_s)  # windows grant what the plan gave them
    assert 0.2 * 1.2 <= stall_s(1 / 6) <= 0.2 * 1.2 + 0.26 * reality.forward_s


def test_on_a_cpu_the_processor_time_of_copies_is_the_overhead() -> None:
    times = Measured(0.1, 0.2, 0.05, channel_bytes_per_s=with_digest(CPU_COPY_BYTES_PER_S), exchange_s=0.0)
    plan = make_plan(tiny(training={"global_batch_size": 8}, tiers=[MEMORY]), CPU, times)
    reality = Reality(
        1, 0.1, 0.2, 0.0, 0.05, plan.model.state_bytes_per_rank or 0, plan.storage.bytes_per_s,
        copier_threads_per_core=2 / CPU.cpu_cores,
    )  # fmt: skip
    played_s = Run(plan, reality, False, {}, seed=3).play(2000).step_s
    assert plan.expected.overhead == pytest.approx(played_s / reality.step_s - 1, rel=WITHIN)


def test_the_full_scale_plan_against_the_same_run_played() -> None:
    """10^13 parameters on 64 nodes, 16 micro-batches: the state is constant for 16·(t1 + t2)."""
    plan = make_plan(full_scale(), replace(GPU, cpu_cores=128))
    times, storage = plan.iteration, plan.storage
    assert times.forward_s is not None
    assert times.backward_s is not None
    assert times.window_s == pytest.approx(16 * (times.forward_s + times.backward_s))
    reality = Reality(
        16, times.forward_s, times.backward_s, times.exchange_s or 0.0, times.optimizer_s or 0.0,
        plan.model.state_bytes_per_rank or 0, storage.bytes_per_s, gradients_s=storage.gradients_s or 0.0,
    )  # fmt: skip
    step = play_step(plan, reality, np.random.default_rng(5), copying=True)
    assert step.stall_s == pytest.approx(storage.stall_s or 0.0, rel=WITHIN, abs=1e-4 * reality.step_s)
    assert (plan.forward.bytes_per_window or 0) * 16 + (plan.backward.bytes_per_window or 0) * 16 >= (
        plan.model.state_bytes_per_rank or 0
    )


def test_large_plans_are_made_at_once() -> None:
    """Printed, not asserted: what a machine takes is its own affair."""
    for name, spec in (("10^13 parameters, 512 ranks", full_scale()), ("8 billion, 16,384 ranks", wide())):
        began = time.perf_counter()
        plan = make_plan(spec, replace(GPU, cpu_cores=128))
        print(f"{name}: planned in {time.perf_counter() - began:.3f} s")  # noqa: T201
        assert plan.training.world == spec.world_size


def full_scale() -> Spec:
    """The largest job that anybody has asked for."""
    return tiny(
        model={
            "type": "gpt", "n_layers": 500, "d_model": 40960, "n_heads": 320, "vocab_size": 128000,
            "activation": "gelu",
        },
        dataset={"type": "text", "path": "corpus", "seq_len": 8192},
        training={"global_batch_size": 8192, "micro_batch_size": 1, "precision": "bf16-mixed"},
        cluster={"nodes": 64, "workers_per_node": 8},
    )  # fmt: skip


def wide() -> Spec:
    """Many ranks."""
    return tiny(
        model={"type": "gpt", "n_layers": 32, "d_model": 4096, "n_heads": 32, "d_ff": 14336, "vocab_size": 128256},
        dataset={"type": "text", "path": "corpus", "seq_len": 8192},
        training={"global_batch_size": 32768, "micro_batch_size": 1, "precision": "bf16-mixed"},
        cluster={"nodes": 2048, "workers_per_node": 8},
    )
