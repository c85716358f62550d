"""Two nodes in network namespaces of their own, with a link for each channel; needs root and `ip`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.job.dtrain import Job, assert_same
from tests.job.links import Links, ip, made_links
from tests.job.nodes import Cluster, cluster

from dtrain.tiers.faults import fail_at

CHANNELS = "cluster.channels={compute: {interface: comp0}, storage: {interface: stor0}}"
STATE_BYTES = 2 * 289 * 2**10
"""Of the little model with its optimizer, over both ranks."""


@pytest.fixture
def links() -> Iterator[Links]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and ip")
    with ExitStack() as stack:
        try:
            made = stack.enter_context(made_links(2))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr}")
        yield made


@pytest.fixture
def nodes(tmp_path: Path, links: Links) -> Iterator[Cluster]:
    with cluster(tmp_path / "job") as made:
        made.host = links.address(0)
        made.within = {node: links.exec(node) for node in range(2)}
        yield made


def test_gradients_and_checkpoints_take_their_own_links(nodes: Cluster, links: Links, oracle: Job) -> None:
    nodes.start_all(CHANNELS, fault=fail_at(1, 5, "window.forward"))
    ended = nodes.end()
    assert [one.code for one in ended] == [0, 0], ended
    assert_same(nodes.job, oracle)
    assert [event["tier"] for event in nodes.job.events("restored")] == ["memory"]
    for node in range(2):
        given = links.sent(node, "stor0")
        assert STATE_BYTES / 2 * 0.9 < given < STATE_BYTES, "each gives the other its shard, once"
        assert links.sent(node, "comp0") > 12 * STATE_BYTES / 3 / 2, "gradients of 12 steps"
    nodes.assert_nothing_left()


def test_a_pair_that_cannot_reach_each_other_is_named(nodes: Cluster, links: Links) -> None:
    ip("-n", links.names[1], "link", "set", "stor0", "down")
    nodes.start_all(CHANNELS)
    ended = nodes.end()
    assert [one.code for one in ended] == [69, 69], ended
    assert all("node 0 cannot reach node 1 on the storage channel" in one.said for one in ended)
    assert "Traceback" not in ended[0].said
    nodes.assert_nothing_left()


@pytest.mark.campaign
def test_by_itself_each_node_takes_the_interface_of_the_rendezvous(nodes: Cluster, links: Links) -> None:
    nodes.start_all("max_steps=4")
    ended = nodes.end()
    assert [one.code for one in ended] == [0, 0], ended
    assert links.sent(1, "stor0") < 10_000 < links.sent(1, "comp0")
    nodes.assert_nothing_left()
