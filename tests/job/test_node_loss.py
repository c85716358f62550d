"""A node is lost in an elastic run: the others wait for it, or go on; what else happens meanwhile hangs nobody."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.job.dtrain import Job, assert_same, cleaned, slow, wait, wait_for_step
from tests.job.elastic import elastic_spec
from tests.job.nodes import Cluster, cluster

STEPS = 12
WAIT = "cluster.on_node_loss=wait"
WORDS = ["training.global_batch_size=12", "training.micro_batch_size=2", f"max_steps={STEPS}"]
LATE = "tiers=[{type: memory, every: 1}, {type: disk, every: 12}]"
"""What is resumed before the last step is in memory or nowhere."""


def unbroken(folder: Path, workers: int = 3) -> Job:
    """The same job on one node, to its end."""
    job = Job(folder, {"OMP_NUM_THREADS": "1"})
    job.write_spec()
    with cleaned(job):
        ended = job.do("run", "spec.yaml", f"cluster.workers_per_node={workers}", *WORDS)
        assert ended.code == 0, ended.said
    return job


def lose_launcher(nodes: Cluster, node: int) -> None:
    """Its memory stays; wait until the others wait for it."""
    before = len(nodes.job.events("waiting"))
    nodes.kill_node(node)
    wait(lambda: len(nodes.job.events("waiting")) > before, 20, "the others to wait")


def test_the_others_wait_for_a_lost_node_and_a_stop_meanwhile_loses_nothing(tmp_path: Path) -> None:
    """Told to wait they go on with all, bit for bit; ended while they wait, all that is in memory is there after."""
    oracle = unbroken(tmp_path / "unbroken")
    words = [*WORDS, WAIT, LATE]
    with cluster(tmp_path / "job", 3, elastic_spec("2:3")) as nodes:
        nodes.start_all(*words, fault=slow(4))
        wait_for_step(nodes.job, 5)
        lose_launcher(nodes, 2)
        assert "node 2" in nodes.job.events("waiting")[-1]["detail"]
        assert "then on with 2 nodes" in nodes.job.events("waiting")[-1]["detail"]
        nodes.running[1].send_signal(signal.SIGTERM)
        ended = nodes.end(20)
        assert [one.code for one in ended] == [75, 75], ended
        assert "in the memory of the nodes" in ended[0].said
        assert "waiting for node 2" in ended[1].said, "whoever looks at another node sees what it waits for"
        reached = max(nodes.job.losses())
        nodes.start_all(*words, command="resume", fault=slow(8, attempt=2))
        wait_for_step(nodes.job, 9)
        lose_launcher(nodes, 1)
        nodes.start(1, *words)
        ended = nodes.end()
        assert [one.code for one in ended] == [0, 0, 0], ended
        assert [event["nodes"] for event in nodes.job.events("attempt")] == [3, 3, 3]
        assert [event["tier"] for event in nodes.job.events("restored")] == ["memory", "memory"]
        assert nodes.job.events("restored")[0]["step"] >= reached - 1
        assert_same(nodes.job, oracle)
        nodes.assert_nothing_left()


@pytest.mark.campaign
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("node", [0, 1])
def test_a_signal_ends_the_wait_at_once(node: int, number: signal.Signals, tmp_path: Path) -> None:
    with cluster(tmp_path / "job", 3, elastic_spec("2:3", rejoin="300s")) as nodes:
        nodes.start_all(*WORDS, WAIT, fault=slow(4))
        wait_for_step(nodes.job, 5)
        lose_launcher(nodes, 2)
        nodes.running[node].send_signal(number)
        code = 130 if number == signal.SIGINT else 75
        ended = nodes.end(10)
        assert [one.code for one in ended] == [code, code], ended
        assert all("Traceback" not in one.said for one in ended)
        wait(lambda: not nodes.job.processes(), 10, "everything to end")


@pytest.mark.campaign
def test_a_node_that_never_returns_is_waited_for_and_then_done_without(tmp_path: Path) -> None:
    with cluster(tmp_path / "job", 3, elastic_spec("2:3", rejoin="8s")) as nodes:
        nodes.start_all(*WORDS, WAIT, fault=slow(4))
        wait_for_step(nodes.job, 5)
        lose_launcher(nodes, 2)
        ended = nodes.end()
        assert [one.code for one in ended] == [0, 0], ended
        assert [event["nodes"] for event in nodes.job.events("attempt")] == [3, 2]
        assert nodes.job.events("finished")[0]["steps"] == STEPS


@pytest.mark.campaign
def test_too_few_for_too_long_is_the_end(tmp_path: Path) -> None:
    with cluster(tmp_path / "job", 3, elastic_spec("2:3", rejoin="8s")) as nodes:
        nodes.start_all(*WORDS, WAIT, fault=slow(4))
        wait_for_step(nodes.job, 5)
        nodes.kill_node(1)
        nodes.kill_node(2)
        (ended,) = nodes.end(30)
        assert ended.code == 69, ended
        assert "nodes 1, 2 did not come" in ended.said and "rejoin_timeout" in ended.said
        assert "Traceback" not in ended.said
        nodes.start_all(*WORDS, WAIT, command="resume")
        ended_all = nodes.end()
        assert [one.code for one in ended_all] == [0, 0, 0], ended_all
        nodes.assert_nothing_left()
