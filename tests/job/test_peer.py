"""The peer tier: nodes are lost with their memory, and the job goes on from that of others, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.job.dtrain import STEPS, Job, assert_same, finish, slow, unbroken, wait, wait_for_step
from tests.job.nodes import Cluster, cluster

from dtrain.tiers.faults import fail_at

TIERS = f"tiers=[{{type: memory, every: 1}}, {{type: peer, every: 1}}, {{type: disk, every: {STEPS}}}]"
MEMORY_ONLY = "tiers=[{type: memory, every: 1}, {type: peer, every: 1}]"


def lose_and_replace(nodes: Cluster, node: int, at_step: int, *words: str) -> None:
    """A node is lost in step `at_step`, noticed, and an empty one takes its place."""
    wait_for_step(nodes.job, at_step)
    nodes.lose_node(node)
    wait(lambda: nodes.job.events("fault"), 15, "the death to be noticed")
    nodes.start(node, TIERS, *words)


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


def test_node_0_is_lost_with_its_memory_and_all_go_on_from_what_the_other_has(tmp_path: Path, oracle: Job) -> None:
    with cluster(tmp_path / "job") as nodes:
        nodes.start_all(MEMORY_ONLY, fault=slow(4))
        wait_for_step(nodes.job, 6)
        nodes.lose_node(0)
        ended = finish(nodes.running.pop(1), timeout=20)
        assert ended.code == 75, ended.said
        nodes.start_all(MEMORY_ONLY, command="resume")
        both = nodes.end()
        assert [one.code for one in both] == [0, 0], both
        assert_went_on_from_peers(nodes.job, 6)
        assert nodes.job.losses() == oracle.losses()
        nodes.assert_nothing_left()


@pytest.mark.campaign
def test_of_three_nodes_one_is_lost_and_the_copy_of_its_state_is_on_one_of_the_others(tmp_path: Path) -> None:
    """Three ranks see 12 samples in a step: another job than the oracle, so one that nothing happens to is run, too."""
    size = "training.global_batch_size=12"
    whole = unbroken(tmp_path / "whole", 3, [size])
    with cluster(tmp_path / "job", nodes=3) as nodes:
        nodes.start_all(TIERS, size, fault=slow(5))
        lose_and_replace(nodes, 2, 6, size)
        ended = nodes.end()
        assert [one.code for one in ended] == [0, 0, 0], ended
        assert_went_on_from_peers(nodes.job, 6)
        assert_same(nodes.job, whole)
        nodes.assert_nothing_left()


PROCESS: list[tuple[str, int]] = [("peer.send", 3), ("peer.sent", 6)]
"""Where the process of the peer tier dies, each time a step later."""


def test_the_process_that_sends_dies_again_and_again_and_training_never_notices(tmp_path: Path, oracle: Job) -> None:
    with cluster(tmp_path / "job") as nodes:
        deaths = [fail_at(None, step, point, attempt=1 + at) for at, (point, step) in enumerate(PROCESS)]
        nodes.start_all(TIERS, fault=f"{';'.join(deaths)};{slow(3)}")
        ended = nodes.end()
        assert [one.code for one in ended] == [0, 0], ended
        assert_same(nodes.job, oracle)
        assert not nodes.job.events("fault")
        told = [event["detail"] for event in nodes.job.events("warning")]
        assert sum("process of the peer tier ended with -9: started again" in words for words in told) >= 2, told
        last = max(event["step"] for event in nodes.job.events("committed") if event["tier"] == "peer")
        assert last > 6, "copies are made again"
        nodes.assert_nothing_left()


@pytest.mark.campaign
def test_a_peer_that_stands_still_holds_up_nobody(tmp_path: Path, oracle: Job) -> None:
    with cluster(tmp_path / "job") as nodes:
        # Long enough for a time-out after the stop, however long this test takes to get its turn.
        windows = ";".join(fail_at(0, step, "window.forward", kind="slow", nth=1) for step in range(4, STEPS + 1))
        nodes.start_all(TIERS, fault=f"{slow(4)};{windows}")
        wait_for_step(nodes.job, 1)
        (process,) = nodes.peer_processes(1)
        wait_for_step(nodes.job, 3)
        process.suspend()
        ended = nodes.end()
        assert [one.code for one in ended] == [0, 0], ended
        assert_same(nodes.job, oracle)
        assert not nodes.job.events("fault")
        told = [event["detail"] for event in nodes.job.events("warning")]
        assert sum("node 1 takes no copies of node 0's snapshots" in words for words in told) == 1, told
        last = max(event["step"] for event in nodes.job.events("committed") if event["tier"] == "peer")
        assert last < STEPS - 2, "the tier is behind, and nothing else is"
        nodes.assert_nothing_left()


def test_bits_flipped_in_a_nodes_own_memory_are_mended_from_the_copy_on_the_other(tmp_path: Path, oracle: Job) -> None:
    """All that rank 1 has itself is damaged, and no disk is there: without the copies nothing could be read."""
    with cluster(tmp_path / "job") as nodes:
        nodes.start_all(MEMORY_ONLY, fault=slow(4))
        wait_for_step(nodes.job, 6)
        nodes.job.kill_all()
        for process in nodes.running.values():
            finish(process)
        for slot in nodes.memory(1).all_slots():
            data = bytearray(slot.file.read_bytes())
            data[len(data) // 2] ^= 4
            slot.file.write_bytes(data)
        nodes.start_all(MEMORY_ONLY, command="resume")
        both = nodes.end()
        assert [one.code for one in both] == [0, 0], both
        (restored,) = nodes.job.events("restored")
        assert restored["step"] >= 4, "what the other node has a copy of is at most two steps back"
        told = [event["detail"] for event in nodes.job.events("warning")]
        assert any("in rank 1's shard that rank 1 has in memory: taken from the copy" in words for words in told), told
        assert_same(nodes.job, oracle)
        nodes.assert_nothing_left()
