"""A node is lost in an elastic run: the others wait for it, or go on; what else happens meanwhile hangs nobody."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.job.dtrain import Job, assert_same, slow, unbroken, wait, wait_for_step
from tests.job.elastic import assert_trained_alike, elastic_spec
from tests.job.nodes import Cluster, cluster

from dtrain.tiers.faults import fail_at
from dtrain.tiers.format.jsonfile import read_lines

STEPS, LONG_STEPS = 12, 60
WAIT = "cluster.on_node_loss=wait"
WORDS = ["training.global_batch_size=12", "training.micro_batch_size=2", f"max_steps={STEPS}"]
LATE = "tiers=[{type: memory, every: 1}, {type: disk, every: 12}]"
"""What is resumed before the last step is in memory or nowhere."""


def lose_launcher(nodes: Cluster, node: int) -> None:
    """Its memory stays; wait until the others wait for it."""
    before = len(nodes.job.events("waiting"))
    nodes.kill_node(node)
    wait(lambda: len(nodes.job.events("waiting")) > before, 20, "the others to wait")


@pytest.mark.campaign
def test_the_others_wait_for_a_lost_node_and_a_stop_meanwhile_loses_nothing(tmp_path: Path) -> None:
    """Told to wait they go on with all, bit for bit; ended while they wait, all that is in memory is there after."""
    oracle = unbroken(tmp_path / "unbroken", 3, WORDS)
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
        wait(lambda: not nodes.job.processes(), 30, "everything to end, the drainer of the killed launcher, too")


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


def wait_for_attempt(nodes: Cluster, number: int) -> None:
    wait(lambda: len(nodes.job.events("attempt")) >= number, 30, f"attempt {number}")


def shrink(nodes: Cluster, words: Sequence[str], fault: str) -> None:
    """Three nodes train, and go on as two when the last one is lost with its memory."""
    nodes.start_all(*words, fault=fault)
    wait_for_step(nodes.job, 5)
    nodes.lose_node(2)
    wait_for_attempt(nodes, 2)
    wait(lambda: {line["attempt"] for line in read_lines(nodes.job.run.metrics)} >= {2}, 60, "a step of two nodes")


LONG = [*WORDS[:2], "model.dropout=0", f"max_steps={LONG_STEPS}"]


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return unbroken(tmp_path_factory.mktemp("fixed") / "job", 3, LONG)


@pytest.mark.campaign
def test_a_node_that_dies_while_it_loads_is_done_without_and_without_node_0_nothing_is_lost(
    tmp_path: Path, fixed: Job
) -> None:
    """What two nodes had in memory is there for the three, the two and, after a resume, the three again."""
    with cluster(tmp_path / "job", 3, elastic_spec("2:3", last_call="2s")) as nodes:
        job = nodes.job
        slowly = ";".join(slow(4, LONG_STEPS, attempt) for attempt in (1, 2, 4))
        loading = ";".join(fail_at(2, None, "restore.before", kind="stop", attempt=attempt) for attempt in (3, 5))
        shrink(nodes, LONG, slowly)
        nodes.start(2, *LONG, fault=loading)
        wait(job.stopped, 30, "the newcomer to stand still while it loads")
        nodes.lose_node(2)
        wait_for_attempt(nodes, 4)
        assert [event["nodes"] for event in job.events("attempt")] == [3, 2, 3, 2]
        wait(lambda: len(job.events("restored")) == 2, 30, "the two to read what they had")
        assert [event["tier"] for event in job.events("restored")] == ["disk", "peer"]

        nodes.start(2, *LONG, fault=loading)
        wait(job.stopped, 30, "the newcomer to stand still while it loads")
        reached = max(job.losses())
        nodes.kill_node(0)
        ended = nodes.end(30)
        assert [one.code for one in ended] == [75, 70], "the newcomer had nothing in its memory yet"
        assert "is in this node's memory" in ended[0].said and "dtrain resume" in ended[0].said
        nodes.running.clear()
        nodes.start_all(*LONG, command="resume")
        ended = nodes.end()
        assert [one.code for one in ended] == [0, 0, 0], ended
        assert job.events("restored")[-1]["tier"] == "peer"
        assert job.events("restored")[-1]["step"] == reached
        assert_trained_alike(job, fixed, LONG_STEPS)
        nodes.assert_nothing_left()
