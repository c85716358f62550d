"""Every way to spread a model, over nodes: a worker dies, a node dies, and the run is that of one node bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.job.dtrain import STEPS, assert_same, slow, unbroken, wait, wait_for_step
from tests.job.nodes import Cluster, cluster, spec_of

from dtrain.tiers.faults import fail_at

STRATEGIES = {
    "fsdp": ["strategy.dp_shard=4"],
    "hybrid": ["strategy.dp_shard=2"],
    "tensor in a node": ["strategy.tp=2"],
    "tensor over nodes": ["strategy.tp=4", "model.n_heads=4"],
    "pipeline over nodes": ["strategy.pp=2"],
    "pipeline and fsdp": ["strategy.pp=2", "strategy.dp_shard=2"],
}
USUAL = {"hybrid"}
"""All others run with `make campaigns`."""


DISK = f"tiers=[{{type: memory, every: 1}}, {{type: disk, every: {STEPS}}}]"
"""Late, so that the drainer of a dead launcher does not bring the newest snapshot to the disk before a resume."""


def lose_a_worker_then_a_node(nodes: Cluster, words: list[str], rank: int) -> None:
    """Kill a worker of the last node in step 4, its launcher after step 7, and start it again."""
    last = nodes.nodes - 1
    nodes.start_all(*words, fault=f"{fail_at(rank, 4, 'window.backward')};{slow(7, attempt=2)}")
    wait_for_step(nodes.job, 7)
    nodes.kill_node(last)
    wait(lambda: len(nodes.job.events("fault")) == 2, 20, "the death to be noticed")
    nodes.start(last, *words)
    ended = nodes.end()
    assert [one.code for one in ended] == [0] * nodes.nodes, ended
    faults = [(e["kind"], e["rank"], e["node"]) for e in nodes.job.events("fault")]
    assert faults == [("killed", rank, last), ("node", None, last)]
    assert [e["tier"] for e in nodes.job.events("restored")] == ["memory", "memory"], "its memory outlived its launcher"
    nodes.assert_nothing_left()


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.campaign] * (n not in USUAL)) for n in STRATEGIES])
def test_two_nodes_of_two_workers_are_one_of_four(name: str, tmp_path: Path) -> None:
    words = [*STRATEGIES[name], DISK]
    oracle = unbroken(tmp_path / "unbroken", 4, words)
    with cluster(tmp_path / "job", 2, spec_of(2, 2)) as nodes:
        lose_a_worker_then_a_node(nodes, words, 3)
        assert_same(nodes.job, oracle)


@pytest.mark.campaign
@pytest.mark.parametrize("count", [3, 4])
def test_more_than_two_nodes_are_one(count: int, tmp_path: Path) -> None:
    words = [f"training.global_batch_size={4 * count}", DISK]
    oracle = unbroken(tmp_path / "unbroken", count, words)
    with cluster(tmp_path / "job", count, spec_of(count)) as nodes:
        lose_a_worker_then_a_node(nodes, words, count - 1)
        assert_same(nodes.job, oracle)
