"""An elastic number of nodes: how it is written, which numbers can be used, what cannot be with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.specs.build import Desk, changed

from dtrain.planners.elastic import elastic_plan
from dtrain.planners.machine import Machine
from dtrain.specs.load import spec_from_json, spec_to_json
from dtrain.specs.nodes import NodeCount, Shape, usable


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
    plan = elastic_plan(spec, Machine(2, 2**34, 2**33, "cpu"))
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
    st.integers(1, 6), st.integers(0, 6), st.integers(1, 4), st.integers(1, 2), st.integers(1, 2), st.integers(1, 48)
)
def test_a_usable_number_gives_every_rank_the_same_passes(
    least: int, more: int, workers: int, shard: int, tp: int, batch: int
) -> None:
    for nodes in usable(NodeCount(least + more, least), Shape(workers, shard, tp, 1, "1f1b", batch, 1)):
        among, over = divmod(nodes * workers, tp)
        assert least <= nodes <= least + more
        assert over == 0 and among % shard == 0 and batch % among == 0
