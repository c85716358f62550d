from __future__ import annotations

import math

import pytest

from dtrain.planners.costs import Cores, Costs, backlog_s, checkpoint_costs
from dtrain.planners.devices import DISK_COMMIT_S, rates
from dtrain.planners.expected import (
    Before,
    Faults,
    Source,
    fault_rate,
    goodput,
    job_mtbf_s,
    lost_steps,
    recovery_s,
)
from dtrain.planners.machine import Machine
from dtrain.planners.windows import Windows
from dtrain.specs.models import Cluster

RESTART_S = 25.0
CLUSTER = Cluster.model_validate(
    {"nodes": 4, "workers_per_node": 8, "mtbf": {"process": "32h", "node": "400h"}, "hardware": {"restart_time": "25s"}}
)


def test_lost_work_is_half_an_interval_and_the_lag() -> None:
    assert lost_steps(Source("memory", every=1, lag_s=0.5, read_s=0), step_s=1.0, max_steps=1000) == pytest.approx(1.0)
    assert lost_steps(Source("memory", every=20, lag_s=3.0, read_s=0), step_s=1.0, max_steps=1000) == pytest.approx(
        13.0
    )


def test_frequent_faults_find_less_to_lose_than_half_an_interval() -> None:
    source = Source("disk", every=100, lag_s=0.0, read_s=0)
    # X mod 100 for an exponential X of mean 50: mean 50 - 100/(e² - 1)
    assert lost_steps(source, 1.0, 10**6, mtbf_s=50.0) == pytest.approx(50 - 100 / (math.e**2 - 1))
    assert lost_steps(source, 1.0, 10**6, mtbf_s=1e12) == pytest.approx(50)
    late = Source("disk", every=1, lag_s=1e9, read_s=0)
    assert lost_steps(late, 1.0, 10**6, mtbf_s=50.0) == pytest.approx(50)


def test_faults_that_a_faster_tier_answers_change_nothing_where_both_tiers_have_the_same_checkpoints() -> None:
    both = lost_steps(Source("disk", every=100, lag_s=2.0, read_s=0), 1.0, 10**6, mtbf_s=75.0)
    beside = Before(mtbf_s=150.0, every=100, lag_s=2.0)
    assert lost_steps(Source("disk", 100, 2.0, 0), 1.0, 10**6, 150.0, beside) == pytest.approx(both)


@pytest.mark.parametrize("mtbf_s", [1e9, 1e15, 1e25])
def test_rare_faults_behind_a_faster_tier_cost_half_an_interval_and_the_lag(mtbf_s: float) -> None:
    rare = lost_steps(Source("disk", 100, 3.0, 0), 1.0, 10**6, mtbf_s, Before(mtbf_s, every=5, lag_s=1.0))
    assert rare == pytest.approx(53, rel=1e-3)


def test_each_interval_of_the_faster_tier_is_gone_over_until_it_is_whole() -> None:
    """Lost are whole intervals before the broken one, and a part of that: without lags the sums have closed forms."""
    rate, between, near, times = 1 / 200, 1 / 50, 100.0, 3
    survives = math.exp(-(rate + between) * near)
    part = rate / (rate + between)
    whole = survives / (survives + (1 - survives) * part)
    before = sum(j * whole**j * (1 - whole) for j in range(times)) / (1 - whole**times)
    broken = 1 / (rate + between) - near * survives / (1 - survives)
    lost = lost_steps(Source("disk", 300, 0, 0), 1.0, 10**6, 200.0, Before(50.0, near, 0.0))
    assert lost == pytest.approx(before * near + broken)


def test_work_stands_still_while_training_waits() -> None:
    source = Source("disk", every=4, lag_s=6.0, read_s=0, waiting=0.5, waiting_steps=10.0)
    assert lost_steps(source, 1.0, 10**6) == pytest.approx((8 + 10) / 2)


def test_without_a_surviving_tier_half_of_the_run_is_lost() -> None:
    assert lost_steps(None, 1.0, 1000) == 500
    assert lost_steps(Source("memory", every=5000, lag_s=0, read_s=0), 1.0, 1000) == 500


def test_recovery_is_notice_restart_and_read() -> None:
    source = Source("memory", every=1, lag_s=0, read_s=7.0)
    assert recovery_s("process", CLUSTER, source) == pytest.approx(1 + RESTART_S + 7)
    assert recovery_s("node", CLUSTER, source) == pytest.approx(CLUSTER.heartbeat_timeout + RESTART_S + 7)
    assert recovery_s("cluster", CLUSTER, None) == RESTART_S


def test_failure_rates_add_up_over_the_job() -> None:
    mtbf = job_mtbf_s(CLUSTER, world=32)
    assert (mtbf.process, mtbf.node, mtbf.cluster) == (3600.0, 360_000.0, None)
    assert fault_rate(mtbf) == pytest.approx(1 / 3600 + 1 / 360_000)


def test_goodput_by_hand() -> None:
    once_an_hour = Faults(3600.0, None, None)
    lost, recovery = Faults(10.0, 99.0, 99.0), Faults(16.0, 99.0, 99.0)
    # in each hour of running 10 steps of 2 s, stretched by a tenth; and 16 s of recovery after it
    assert goodput(0.1, 2.0, once_an_hour, lost, recovery) == pytest.approx((3600 - 22) / 3616 / 1.1)
    assert goodput(0.0, 1.0, Faults(None, None, None), lost, recovery) == 1
    assert goodput(0.0, 1e6, once_an_hour, lost, recovery) == 0


def costs(shard: int, windows: Windows, workers: int = 1, cores: Cores | None = None) -> Costs:
    cluster = Cluster.model_validate({"workers_per_node": workers, "hardware": {"disk_bandwidth": "1GiB/s"}})
    reached = rates(Machine(2, None, None, "h100"), cluster, "fp32")
    return checkpoint_costs(shard, cluster, windows, reached, windows.bytes_per_s, cores)


def test_costs_of_a_checkpoint_that_fits() -> None:
    of_many = costs(2**30, Windows(100, 0.03, 0.07, bytes_per_s=2**30), workers=4)
    assert of_many.copy_s == 1
    assert of_many.commit_lag_s == pytest.approx(7.5, rel=0.01)
    assert of_many.write_s == pytest.approx(4 + DISK_COMMIT_S)
    assert (of_many.snapshot_s, of_many.drain_cpu_s) == (0, 0)


def test_costs_of_a_checkpoint_that_does_not_fit() -> None:
    one = costs(2**30, Windows(1, 0.1, 0.15, bytes_per_s=2**30))
    assert one.snapshot_stall_s == pytest.approx(0.75)
    assert one.commit_lag_s == pytest.approx(1.0)


def test_on_a_cpu_the_copy_takes_processor_time() -> None:
    windows = Windows(1, 3.0, 7.0, bytes_per_s=8 * 2**30)
    one, more_cores = costs(2**30, windows, 2, Cores(2, spare=0)), costs(2**30, windows, 2, Cores(8, spare=0))
    assert one.snapshot_stall_s == 0
    assert one.snapshot_s > 0
    assert one.snapshot_s == pytest.approx(4 * more_cores.snapshot_s)


def test_what_cores_that_are_spare_copy_and_write_takes_nothing_from_the_passes() -> None:
    windows = Windows(1, 3.0, 7.0, bytes_per_s=2**30)
    spare, both = costs(8 * 2**30, windows, 1, Cores(2, spare=1)), costs(8 * 2**30, windows, 1, Cores(2, spare=0))
    assert (spare.snapshot_cpu_s, spare.drain_cpu_s) == (0, 0)
    assert both.snapshot_cpu_s == pytest.approx(4)
    assert both.drain_cpu_s > 0
    longer = costs(12 * 2**30, windows, 1, Cores(2, spare=1))
    assert longer.snapshot_cpu_s == pytest.approx(1), "12 s of copies in windows of 10 s: 2 are left, on two cores"


def test_backlog() -> None:
    assert backlog_s(5.0, 2, 1.0) == pytest.approx(3.0)
    assert backlog_s(5.0, 6, 1.0) == 0
