"""What a run has measured, after its number of nodes has changed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.build import job_spec

from dtrain.planners.document import Settled
from dtrain.planners.machine import Machine, Measured
from dtrain.planners.plan import Plan, make_plan
from dtrain.planners.running.resized import taking_along
from dtrain.planners.sharding.layers import windows_per_step
from dtrain.specs.models import Spec
from dtrain.specs.nodes import NodeCount

MACHINE = Machine(2, None, None, "cpu")
FORWARD_S, BACKWARD_S, REST_S, COST_S, RATE = 0.030, 0.080, 0.010, 0.001, 2e9
"""Other figures than the plan's."""


def elastic(every: int | str = 1, slow: int | str = 4, **strategy: int) -> Spec:
    return job_spec(
        model={"type": "gpt", "n_layers": 2, "d_model": 64, "n_heads": 4},
        dataset={"type": "text", "path": "python:stdlib", "seq_len": 32},
        training={"global_batch_size": 24, "micro_batch_size": 2, "optimizer": {"name": "adamw", "lr": 1e-3}},
        strategy=strategy, max_steps=1000,
        cluster={"device": "cpu", "nodes": NodeCount(4, 1), "workers_per_node": 1},
        tiers=[{"type": "memory", "every": every}, {"type": "disk", "every": slow}],
    )  # fmt: skip


def planned(spec: Spec) -> Plan:
    return make_plan(spec, MACHINE, Measured(0.02, 0.04, 0.005, 1e9))


def measured_with(spec: Spec, **settled: Any) -> Plan:
    """The plan of a run with so many nodes that has measured what it does."""
    step_s = windows_per_step(spec) * (FORWARD_S + BACKWARD_S) + REST_S + COST_S
    found = Settled(
        step=40, forward_s=FORWARD_S, backward_s=BACKWARD_S, step_s=step_s, copy_bytes_per_s=RATE, snapshot_s=COST_S,
        overhead=COST_S / (step_s - COST_S), memory_every=1, slow_every=4, forward_bytes=4096, backward_bytes=4096,
        slice_bytes=4096,
    )  # fmt: skip
    return replace(planned(spec), measured=replace(found, **settled))


def test_rates_and_passes_stay_and_the_rest_follows() -> None:
    spec = elastic()
    four, two = spec.at(4), spec.at(2)
    plan = taking_along(planned(two), two, measured_with(four), four)
    taken = plan.measured
    assert taken is not None
    assert replace(plan, measured=None) == planned(two)
    assert (taken.forward_s, taken.backward_s, taken.copy_bytes_per_s) == (FORWARD_S, BACKWARD_S, RATE)
    assert windows_per_step(two) == 2 * windows_per_step(four) == 6
    shard, before = plan.model.state_bytes_per_rank, planned(four).model.state_bytes_per_rank
    assert shard is not None and before is not None
    assert taken.snapshot_s == pytest.approx(COST_S * shard / before)
    assert taken.step_s == pytest.approx(6 * (FORWARD_S + BACKWARD_S) + REST_S + taken.snapshot_s)
    assert 6 * (taken.forward_bytes + taken.backward_bytes) >= shard, "a snapshot fits into the windows of a step"
    assert (taken.memory_every, taken.slow_every) == (1, 4), "intervals that are given stay"


def test_with_fewer_passes_a_snapshot_that_no_longer_fits_its_budget_becomes_rarer_if_it_may() -> None:
    spec = elastic("auto", "auto")
    one, four = spec.at(1), spec.at(4)
    before = measured_with(one, snapshot_s=0.013)  # 1 % of 1.3 s; of a fourth of that it is more
    taken = taking_along(planned(four), four, before, one).measured
    assert taken is not None
    kept = taking_along(planned(four), four, replace(before, tiers=before.tiers), one).measured
    assert kept == taken
    shares = planned(four).model.state_bytes_per_rank / planned(one).model.state_bytes_per_rank  # type: ignore[operator]
    plain_s = 3 * (FORWARD_S + BACKWARD_S) + (before.measured.step_s - 0.013 - 12 * (FORWARD_S + BACKWARD_S))  # type: ignore[union-attr]
    assert taken.memory_every == max(1, math.ceil(0.013 * shares / (0.01 * plain_s)))
    assert taken.slow_every % taken.memory_every == 0


def test_of_another_job_nothing_is_taken_along() -> None:
    spec = elastic()
    four, two = spec.at(4), spec.at(2)
    others = (
        elastic(2), elastic(1, 8), spec.model_copy(update={"max_steps": 10}), elastic(1, 4, tp=2),
    )  # fmt: skip
    for other in others:
        assert taking_along(planned(other.at(2)), other.at(2), measured_with(four), other.at(4)).measured is None
    assert taking_along(planned(two), two, planned(four), four).measured is None, "nothing was measured"


@given(st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4]), st.floats(0, 1))
def test_there_and_back_is_what_was_measured(one: int, other: int, shard: int, cost_s: float) -> None:
    spec = elastic(dp_shard=shard)
    here, there = spec.at(one), spec.at(other)
    before = measured_with(here, snapshot_s=cost_s)
    away = taking_along(planned(there), there, before, here)
    back = taking_along(planned(here), here, away, there).measured
    assert back is not None and before.measured is not None
    assert back.forward_s == pytest.approx(before.measured.forward_s)
    assert back.backward_s == pytest.approx(before.measured.backward_s)
    assert back.snapshot_s == pytest.approx(cost_s)
    assert away.measured is not None and away.measured.memory_every >= 1
