"""A run whose number of nodes changes under it: the same batches, samples and state, whoever is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.job.dtrain import Job, slow, unbroken, wait
from tests.job.elastic import WORDS, assert_trained_alike, elastic_spec, shrink_and_grow
from tests.job.nodes import cluster

from dtrain.tiers.format.jsonfile import read_lines


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same job with three ranks from beginning to end."""
    return unbroken(tmp_path_factory.mktemp("fixed") / "job", 3, WORDS)


STRATEGIES = {
    "replicas": (1, []),
    "fsdp": (1, ["strategy.dp_shard=3"]),
    "hybrid": (2, ["strategy.dp_shard=2", "training.micro_batch_size=1"]),
    "fsdp over nodes": (2, ["strategy.dp_shard=6", "training.micro_batch_size=1"]),
    "tensor": (2, ["strategy.tp=2"]),
    "pipeline": (2, ["strategy.pp=2"]),
    "pipeline and fsdp": (2, ["strategy.pp=2", "strategy.dp_shard=3"]),
    "tensor and fsdp": (2, ["strategy.tp=2", "strategy.dp_shard=3"]),
}
"""Workers of a node, and how they divide the model."""
USUAL = {"fsdp"}
"""All others run with `make campaigns`; replicas are in test_node_loss, too."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.campaign] * (n not in USUAL)) for n in STRATEGIES])
def test_three_nodes_two_and_three_again_train_as_three(name: str, tmp_path: Path, fixed: Job) -> None:
    workers, words = STRATEGIES[name]
    with cluster(tmp_path / "job", 3, elastic_spec("2:3", workers)) as nodes:
        shrink_and_grow(nodes, words, workers)
        shrunk = nodes.job.events("restored")[0]
        assert shrunk["tier"] == "disk", "a third of the newest snapshot went with the node"
        assert shrunk["state_digest"] is not None
        assert_trained_alike(nodes.job, fixed)


PEERS = "tiers=[{type: memory, every: 1}, {type: peer, every: 1}, {type: disk, every: 12}]"


@pytest.mark.campaign
def test_four_nodes_two_three_and_four_go_on_from_copies_in_each_others_memory(tmp_path: Path) -> None:
    """24 samples are 3 micro-batches on 4 nodes, 4 on 3, 6 on 2."""
    words = ["model.dropout=0", "training.global_batch_size=24", "training.micro_batch_size=2", "max_steps=30", PEERS]
    whole = unbroken(tmp_path / "whole", 4, words[:4])
    with cluster(tmp_path / "job", 4, elastic_spec("2:4", last_call="2s")) as nodes:
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
        assert_trained_alike(job, whole, 30, 24)
        wait(lambda: not job.processes(), 20, "all processes to end")
        nodes.assert_nothing_left()
