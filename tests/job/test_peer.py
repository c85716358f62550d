"""The peer tier: nodes are lost with their memory, and the job goes on from that of others, bit for bit."""

from __future__ import annotations

from pathlib import Path

from tests.job.dtrain import STEPS, Job, assert_same, wait, wait_for_step
from tests.job.nodes import Cluster, cluster

from dtrain.tiers.faults import fail_at

TIERS = f"tiers=[{{type: memory, every: 1}}, {{type: peer, every: 1}}, {{type: disk, every: {STEPS}}}]"


def slow(first: int, last: int = STEPS) -> str:
    """Steps of the first attempt that leave time for something to happen in them."""
    return ";".join(fail_at(0, step, "step.start", kind="slow") for step in range(first, last + 1))


def lose_and_replace(nodes: Cluster, node: int, at_step: int) -> None:
    """A node is lost in step `at_step`, noticed, and an empty one takes its place."""
    wait_for_step(nodes.job, at_step)
    nodes.lose_node(node)
    wait(lambda: nodes.job.events("fault"), 15, "the death to be noticed")
    nodes.start(node, TIERS)


def assert_went_on_from_peers(job: Job, at_step: int) -> None:
    (restored,) = job.events("restored")
    assert restored["tier"] == "peer", restored
    assert at_step - 2 <= restored["step"], "at most two steps are repeated"


def test_a_lost_node_comes_back_empty_and_gets_its_state_from_the_other(tmp_path: Path, oracle: Job) -> None:
    with cluster(tmp_path / "job") as nodes:
        nodes.start_all(TIERS, fault=slow(4))
        lose_and_replace(nodes, 1, 6)
        ended = nodes.end()
        assert [one.code for one in ended] == [0, 0], ended
        assert_went_on_from_peers(nodes.job, 6)
        assert_same(nodes.job, oracle)
        peers = [event for event in nodes.job.events("committed") if event["tier"] == "peer"]
        assert [event["attempt"] for event in peers] == sorted(event["attempt"] for event in peers)
        assert {event["attempt"] for event in peers} == {1, 2}, "copies are made again after the loss"
        nodes.assert_nothing_left()
