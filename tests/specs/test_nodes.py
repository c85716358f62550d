"""An elastic number of nodes: how it is written, which numbers can be used, what cannot be with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.specs.build import Desk, changed

from dtrain.planners.elastic import elastic_plan
from dtrain.planners.machine import Machine
from dtrain.planners.plan import Plan
from dtrain.specs.load import spec_from_json, spec_to_json
from dtrain.specs.nodes import NodeCount, Shape, shards_among, usable

MACHINE = Machine(2, 2**34, 2**33, "cpu")


@pytest.mark.parametrize("written", ["2:4", '"2:4"'])
def test_a_range_is_read_and_stored_as_it_was_written(desk: Desk, written: str) -> None:
    spec = desk.load(changed(("nodes: 2, w", f"nodes: {written}, w")))
    assert (spec.cluster.nodes, spec.cluster.nodes.least, spec.cluster.nodes.elastic) == (4, 2, True)
    assert spec_to_json(spec)["cluster"]["nodes"] == "2:4"
    assert spec_from_json(spec_to_json(spec)) == spec
    assert spec_from_json(spec_to_json(spec)).cluster.nodes.least == 2


def test_only_numbers_that_divide_the_global_batch_are_used_and_the_plan_says_which(desk: Desk) -> None:
    spec = desk.load(changed(("nodes: 2, w", "nodes: 1:4, w")))  # 32 samples, 4 in a pass, 2 workers
    assert spec.usable_nodes == (1, 2, 4)
    assert [spec.at(nodes).micro_batches for nodes in spec.usable_nodes] == [4, 2, 1]
    plan = elastic_plan(spec, MACHINE)
    assert plan.training.nodes == 4
    said = "\n".join(plan.assumptions)
    assert "nodes 1:4: planned for 4" in said and "are used: 1, 2, 4" in said
    assert "with 1: 1 -> 4 micro-batches" in said


WRONG = {
    "nothing divides": ("nodes: 3:3, w", "training.global_batch_size", "32 is not a multiple"),
    "the wrong way round": ("nodes: 4:2, w", "cluster.nodes", "MIN:MAX"),
    "none": ("nodes: 0:2, w", "cluster.nodes", "MIN:MAX"),
    "dots": ("nodes: 2..4, w", "cluster.nodes", "MIN:MAX"),
    "fixed replicas": ("nodes: 2:4, w", "strategy.dp_replicate", "leave it out"),
    "without snapshots": ("nodes: 2:4, w", "cluster.nodes", "no `memory` tier"),
    "with copies": ("nodes: 2:4, w", "tiers[1].replicas", "at the least 2 nodes"),
}
FURTHER = {
    "fixed replicas": [("name: t", "strategy: {dp_replicate: 8}")],
    "without snapshots": [("  - {type: memory, every: 1}\n", "")],
    "with copies": [("  - {type: disk", "  - {type: peer, replicas: 2}\n  - {type: disk")],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused(desk: Desk, name: str) -> None:
    new, key, words = WRONG[name]
    problem = desk.problem(changed(("nodes: 2, w", new), *FURTHER.get(name, [])))
    assert problem.key == key
    assert words in f"{problem.message} {problem.hint}"


@given(
    st.integers(1, 6), st.integers(0, 6), st.integers(1, 4), st.integers(1, 8), st.integers(1, 2), st.integers(1, 48)
)
def test_a_usable_number_gives_every_rank_the_same_passes_and_shards_that_fit(
    least: int, more: int, workers: int, shard: int, tp: int, batch: int
) -> None:
    for nodes in usable(NodeCount(least + more, least), Shape(workers, tp, 1, "1f1b", batch, 1)):
        among, over = divmod(nodes * workers, tp)
        assert least <= nodes <= least + more
        assert over == 0 and batch % among == 0
        found = shards_among(shard, among)
        assert among % found == 0 and found >= min(shard, among)
        assert among % shard or found == shard or shard > among


@pytest.mark.parametrize(
    ("workers", "shard", "found"),
    [(1, 4, {2: (1, 2), 4: (1, 4)}), (2, 2, {2: (2, 2), 4: (4, 2)}), (2, 4, {2: (1, 4), 4: (2, 4)})],
)
def test_dp_shard_follows_the_number_of_nodes(
    desk: Desk, workers: int, shard: int, found: dict[int, tuple[int, int]]
) -> None:
    spec = desk.load(
        changed(("nodes: 2, workers_per_node: 2", f"nodes: 2:4, workers_per_node: {workers}")),
        f"strategy.dp_shard={shard}",
    )
    for nodes, degrees in found.items():
        there = spec.at(nodes)
        assert (there.strategy.replicas(there.world_size), there.strategy.dp_shard) == degrees
        assert spec_from_json(spec_to_json(spec)).at(nodes) == there


def test_three_of_four_nodes_are_used_where_the_batch_divides(desk: Desk) -> None:
    spec = desk.load(
        changed(("nodes: 2, workers_per_node: 2", "nodes: 2:4, workers_per_node: 1")),
        "strategy.dp_shard=4", "training.global_batch_size=48",
    )  # fmt: skip
    assert {nodes: spec.at(nodes).strategy.dp_shard for nodes in spec.usable_nodes} == {2: 2, 3: 3, 4: 4}
    said = "\n".join(elastic_plan(spec, MACHINE).assumptions)
    assert "dp_shard 4 is 2 with 2, 3 with 3" in said


def told(plan: Plan) -> list[str]:
    return [line for line in plan.warnings if line.startswith("cluster.nodes")]


def test_the_plan_names_the_numbers_that_cannot_be_used_and_what_does_not_come_out_even(desk: Desk) -> None:
    spec = desk.load(changed(("nodes: 2, w", "nodes: 1:4, w")))  # 32 samples, 4 in a pass, 2 workers
    plan = elastic_plan(spec, MACHINE)
    assert told(plan) == [
        "cluster.nodes 1:4: 3 cannot be used (global_batch_size 32 is no multiple of micro_batch_size * 6 = 24); the "
        "nodes beyond the next smaller number stand by; a global_batch_size that is a multiple of 96 fits all"
    ]
    assert not told(elastic_plan(desk.load(changed(("nodes: 2, w", "nodes: 1:2, w"))), MACHINE))
    fitting = desk.load(changed(("nodes: 2, w", "nodes: 1:4, w")), "training.global_batch_size=96")
    assert fitting.usable_nodes == (1, 2, 3, 4)
    cut = desk.load(changed(("nodes: 2, workers_per_node: 2", "nodes: 1:4, workers_per_node: 1")), "strategy.tp=2")
    (words,) = told(elastic_plan(cut, MACHINE))
    assert "1, 3 cannot be used (with 1: tp * pp = 2 does not divide 1 workers); with fewer than 2" in words
    assert "workers_per_node a multiple of tp * pp" in words


def test_more_shards_than_there_can_be_ranks_is_refused(desk: Desk) -> None:
    problem = desk.problem(changed(("nodes: 2, w", "nodes: 2:4, w")), "strategy.dp_shard=16")
    assert problem.key == "strategy.dp_shard"
    assert "use 8 or less" in f"{problem.hint}"
