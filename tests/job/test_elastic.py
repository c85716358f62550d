"""A run whose number of nodes changes under it: the same batches, samples and state, whoever is there."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.job.dtrain import Job, cleaned, slow, wait, wait_for_step
from tests.job.nodes import Cluster, cluster, spec_of

from dtrain.tiers.jsonfile import read_lines

TOLERANCE = 1e-4
"""Relative, of a loss against that of the fixed run: float32 sums in another order, and updates that follow them."""
SPEC = spec_of('"2:3"').replace("rejoin_timeout: 30s", "rejoin_timeout: 30s, last_call: 20s")
STEPS = 36  # time for a launcher to start on a busy machine before two nodes alone are at the end
WORDS = ["model.dropout=0", "training.global_batch_size=12", "training.micro_batch_size=2", f"max_steps={STEPS}"]
"""Dropout draws differently with another number of ranks; 12 samples are 2 micro-batches on 3 nodes, 3 on 2."""


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """The same job with three ranks from beginning to end."""
    job = Job(tmp_path_factory.mktemp("fixed") / "job", {"OMP_NUM_THREADS": "1"})
    job.write_spec()
    with cleaned(job):
        ended = job.do("run", "spec.yaml", "cluster.workers_per_node=3", *WORDS)
        assert ended.code == 0, ended.said
        yield job


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path / "job", 3, SPEC) as made:
        yield made


def test_three_nodes_two_and_three_again_train_as_three(nodes: Cluster, fixed: Job) -> None:
    nodes.start_all(*WORDS, fault=slow(4, STEPS, attempt=None))
    wait_for_step(nodes.job, 5)
    nodes.kill_node(2)
    shutil.rmtree(nodes.memory(2).path, ignore_errors=True)  # the machine is gone
    wait(lambda: len(nodes.job.events("attempt")) == 2, 20, "two nodes to go on")
    attempt = nodes.job.events("attempt")[1]
    assert (attempt["nodes"], attempt["world"]) == (2, 2)
    wait(lambda: {line["attempt"] for line in read_lines(nodes.job.run.metrics)} >= {2}, 30, "a step of two nodes")
    nodes.start(2, *WORDS)
    ended = nodes.end()
    assert [one.code for one in ended] == [0, 0, 0], ended
    assert [event["nodes"] for event in nodes.job.events("attempt")] == [3, 2, 3]
    assert [(e["kind"], e["node"]) for e in nodes.job.events("fault")] == [("node", 2)], "to grow is no fault"

    shrunk, grown = nodes.job.events("restored")
    assert shrunk["tier"] == "disk", "a third of the newest snapshot went with the node"
    assert grown["tier"] == "peer", "all of the last one was in the memory of the two others"
    assert shrunk["state_digest"] is not None
    (_, resized) = nodes.job.events("resized")
    assert (resized["before"], resized["nodes"]) == (2, 3)
    assert grown["state_digest"] == resized["state_digest"], "what three have is what two had"

    lines = {line["step"]: line for line in read_lines(nodes.job.run.metrics)}
    assert [lines[step]["samples"] for step in sorted(lines)] == [12 * step for step in range(1, STEPS + 1)]
    for step, loss in fixed.losses().items():
        assert math.isclose(nodes.job.losses()[step], loss, rel_tol=TOLERANCE), (step, nodes.job.losses()[step], loss)
    wait(lambda: not nodes.job.processes(), 20, "the drainer of the killed launcher to give up")
    nodes.assert_nothing_left()


PEERS = "tiers=[{type: memory, every: 1}, {type: peer, every: 1}, {type: disk, every: 12}]"


@pytest.mark.campaign
def test_four_nodes_two_three_and_four_go_on_from_copies_in_each_others_memory(tmp_path: Path) -> None:
    """24 samples are 3 micro-batches on 4 nodes, 4 on 3, 6 on 2."""
    words = ["model.dropout=0", "training.global_batch_size=24", "training.micro_batch_size=2", "max_steps=30", PEERS]
    whole = Job(tmp_path / "whole", {"OMP_NUM_THREADS": "1"})
    whole.write_spec()
    spec = spec_of('"2:4"').replace("rejoin_timeout: 30s", "rejoin_timeout: 30s, last_call: 2s")
    with cleaned(whole), cluster(tmp_path / "job", 4, spec) as nodes:
        assert whole.do("run", "spec.yaml", "cluster.workers_per_node=4", *words[:4]).code == 0
        job = nodes.job

        def lose(node: int, attempts: int) -> None:
            nodes.lose_node(node)
            wait(lambda: len(job.events("attempt")) == attempts, 20, f"{attempts} attempts")

        def wait_for_copy(attempt: int) -> None:
            wait(
                lambda: any(e["attempt"] == attempt and e["tier"] == "peer" for e in job.events("committed")),
                30, f"a copy of attempt {attempt}",
            )  # fmt: skip

        nodes.start_all(*words, fault=slow(2, 30, attempt=None))
        wait_for_copy(1)
        lose(3, 2)
        wait_for_copy(2)
        lose(1, 3)
        wait_for_copy(3)
        nodes.start(3, *words, fault=slow(2, 30, attempt=None))
        wait(lambda: len(job.events("attempt")) == 4, 30, "three nodes")
        nodes.start(1, *words)
        ended = nodes.end()
        assert [one.code for one in ended] == [0] * 4, ended
        assert [event["nodes"] for event in job.events("attempt")] == [4, 3, 2, 3, 4]
        assert [event["tier"] for event in job.events("restored")] == ["peer"] * 4, "never from the disk's older step"
        lines = read_lines(job.run.metrics)
        for number, restored in enumerate(job.events("restored"), 1):
            before = max(line["step"] for line in lines if line["attempt"] <= number)
            assert before - 2 <= restored["step"], (before, restored)
        last = {line["step"]: line for line in lines}
        assert [last[step]["samples"] for step in sorted(last)] == [24 * step for step in range(1, 31)]
        for step, loss in whole.losses().items():
            assert math.isclose(job.losses()[step], loss, rel_tol=TOLERANCE), (step, job.losses()[step], loss)
        wait(lambda: not job.processes(), 20, "all processes to end")
        nodes.assert_nothing_left()
