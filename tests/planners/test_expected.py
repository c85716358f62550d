from __future__ import annotations

import pytest

from dtrain.planners.costs import backlog_s, checkpoint_costs
from dtrain.planners.expected import (
    RESTART_S,
    Faults,
    Source,
    fault_rate,
    goodput,
    job_mtbf_s,
    lost_steps,
    recovery_s,
)
from dtrain.specs.models import Cluster

CLUSTER = Cluster.model_validate({"nodes": 4, "workers_per_node": 8, "mtbf": {"process": "32h", "node": "400h"}})


def test_lost_work_is_half_an_interval_and_the_lag() -> None:
    assert lost_steps(Source(every=1, lag_s=0.5, read_s=0), step_s=1.0, max_steps=1000) == pytest.approx(1.0)
    assert lost_steps(Source(every=20, lag_s=3.0, read_s=0), step_s=1.0, max_steps=1000) == pytest.approx(13.0)


def test_without_a_surviving_tier_half_of_the_run_is_lost() -> None:
    assert lost_steps(None, 1.0, 1000) == 500
    assert lost_steps(Source(every=5000, lag_s=0, read_s=0), 1.0, 1000) == 500


def test_recovery_is_notice_restart_and_read() -> None:
    source = Source(every=1, lag_s=0, read_s=7.0)
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
    # 10 steps of 2 s, stretched by a tenth, and 16 s of recovery each hour
    assert goodput(0.1, 2.0, once_an_hour, lost, recovery) == pytest.approx((1 - 38 / 3600) / 1.1)
    assert goodput(0.0, 1.0, Faults(None, None, None), lost, recovery) == 1
    assert goodput(0.0, 1e6, once_an_hour, lost, recovery) == 0


def test_costs_of_a_checkpoint_that_fits() -> None:
    costs = checkpoint_costs(2**30, workers_per_node=4, bytes_per_s=2**30, window_s=10.0, cpu_cores=None)
    assert costs.copy_s == 1
    assert costs.commit_lag_s == pytest.approx(7.5)
    assert costs.write_s == pytest.approx(4.05)
    assert (costs.snapshot_s, costs.drain_cpu_s) == (0, 0)


def test_costs_of_a_checkpoint_that_does_not_fit() -> None:
    costs = checkpoint_costs(2**30, 1, 2**30, 0.25, None)
    assert costs.snapshot_stall_s == pytest.approx(0.75)
    assert costs.commit_lag_s == pytest.approx(1.0)


def test_on_a_cpu_the_copy_takes_processor_time() -> None:
    one = checkpoint_costs(2**30, 2, 8 * 2**30, 10.0, cpu_cores=2)
    more_cores = checkpoint_costs(2**30, 2, 8 * 2**30, 10.0, cpu_cores=8)
    assert one.snapshot_stall_s == 0
    assert one.snapshot_s > 0
    assert one.snapshot_s == pytest.approx(4 * more_cores.snapshot_s)


def test_backlog() -> None:
    assert backlog_s(5.0, 2, 1.0) == pytest.approx(3.0)
    assert backlog_s(5.0, 6, 1.0) == 0
