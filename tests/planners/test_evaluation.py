"""Evaluations in the plan: their time, and what of the copy they take on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.planners.build import MakeSpec
from tests.planners.test_plan_page import page

from dtrain.planners.machine import Machine, Measured
from dtrain.planners.plan import Plan, make_plan, plan_from_json

TEN = {"every": 10, "batches": 21}


def test_it_counts_the_passes_of_the_busiest_rank(make_spec: MakeSpec, laptop: Machine) -> None:
    plan, without = make_plan(make_spec(evaluation=TEN), laptop), make_plan(make_spec(), laptop)
    assert without.evaluation is None
    evaluation = plan.evaluation
    assert evaluation is not None and evaluation.forward_s == plan.iteration.forward_s
    assert (evaluation.every, evaluation.batches, evaluation.windows) == (10, 21, 11)
    assert evaluation.time_s == pytest.approx(11 * (plan.iteration.forward_s or 0))
    assert (plan.iteration, plan.forward, plan.backward) == (without.iteration, without.forward, without.backward)
    assert plan.expected == without.expected, "the copy fits as it is"
    assert plan_from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_measured_passes_count_and_unknown_ones_do_not(make_spec: MakeSpec, laptop: Machine) -> None:
    own = {"model": {"type": "python", "entry": "m:f"}, "evaluation": TEN}
    unknown = make_plan(make_spec(**own), laptop).evaluation
    assert unknown is not None and (unknown.forward_s, unknown.time_s) == (None, None)
    known = make_plan(make_spec(**own), laptop, Measured(0.25, 0.5, 0.1)).evaluation
    assert known is not None and (known.forward_s, known.time_s) == (0.25, 2.75)


def test_longer_samples_take_longer(make_spec: MakeSpec, laptop: Machine) -> None:
    def forward_s(seq_len: int) -> float:
        own = {"type": "text", "path": "other", "seq_len": seq_len}
        evaluation = make_plan(make_spec(evaluation={**TEN, "dataset": own}), laptop).evaluation
        return (evaluation.forward_s if evaluation else None) or 0.0

    assert 2 < forward_s(256) / forward_s(128) < 4  # attention grows with the square


@pytest.mark.parametrize(("memory", "every", "spared"), [(1, 1, 1.0), (1, 10, 0.1), (2, 10, 0.2), (4, 10, 0.2)])
def test_a_copy_that_does_not_fit_a_step_has_the_evaluation_s_time_too(
    make_spec: MakeSpec, laptop: Machine, memory: int, every: int, spared: float
) -> None:
    """`spared` is the part of the snapshots that an evaluation follows: every lcm-th step of each `memory` steps."""

    def plan(**changes: Any) -> Plan:
        cluster = {"workers_per_node": 2, "channels": {"storage": {"bandwidth": "5MB/s"}}}
        tiers = [{"type": "memory", "every": memory}]
        return make_plan(make_spec(cluster=cluster, tiers=tiers, **changes), laptop)

    without, little = plan(), plan(evaluation={"every": every, "batches": 2})
    assert little.evaluation is not None
    whole_s, saved_s = without.expected.stall_s or 0, (without.expected.stall_s or 0) - (little.expected.stall_s or 0)
    assert 0 < (little.evaluation.time_s or 0) < whole_s * memory
    assert saved_s * memory == pytest.approx(spared * (little.evaluation.time_s or 0))
    much = plan(evaluation={"every": every, "batches": 10_000})
    assert (much.expected.stall_s or 0) == pytest.approx((1 - spared) * whole_s)


def test_the_page_says_it(make_spec: MakeSpec, laptop: Machine) -> None:
    text = " ".join(page(make_plan(make_spec(evaluation=TEN), laptop), 200).split())
    assert "evaluation of 21 batches, every 10 steps: 11 more forward passes of each rank in" in text
    assert "up to 5.26 MiB of a snapshot is copied there" in text
    assert "evaluation" not in page(make_plan(make_spec(), laptop), 200)
