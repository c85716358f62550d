"""Two nodes in network namespaces of their own, with a link for each channel; needs root and `ip`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.job.dtrain import Job, assert_same, finish, slow, wait, wait_for_step
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


LATEST_S = 25
"""Until a cut link is told of: the bound is 2 x heartbeat_timeout, and a machine may be busy."""


@pytest.mark.parametrize("way", [(1, 0), pytest.param((0, 1), marks=pytest.mark.campaign)])
def test_a_link_that_is_cut_one_way_is_told_and_the_run_goes_on_once_it_is_mended(
    way: tuple[int, int], nodes: Cluster, links: Links, oracle: Job
) -> None:
    """The other way still works: what comes from there arrives, and only the answers are lost."""
    nodes.start_all(CHANNELS, fault=slow(3))
    wait_for_step(nodes.job, 4)
    links.cut_way(*way)
    wait(lambda: nodes.job.events("lost") or nodes.job.events("fault"), LATEST_S, "the cut to be noticed")
    links.mend_all()
    ended = []
    for node in (1, 0):  # a node that has given up is started again, as a scheduler does
        one = finish(nodes.running[node])
        if one.code != 0:
            nodes.start(node, CHANNELS, command="resume" if node == 0 else "run")
            one = finish(nodes.running[node])
        ended.append(one)
    assert [one.code for one in ended] == [0, 0], ended
    assert [(e["kind"], e["node"]) for e in nodes.job.events("fault")][:1] == [("node", 1)]
    assert_same(nodes.job, oracle)
    nodes.assert_nothing_left()


def test_copies_for_peers_take_the_storage_link_and_connections_are_bound_to_it(nodes: Cluster, links: Links) -> None:
    tiers = "tiers=[{type: memory, every: 1}, {type: peer, every: 1}]"
    nodes.start_all(CHANNELS, tiers, fault=slow(3))
    wait_for_step(nodes.job, 5)
    for node in range(2):
        mine = {links.address(node, 0), links.address(node, 1), "127.0.0.1"}
        said = subprocess.run(links.exec(node, "ss", "-Hltnp"), check=True, capture_output=True, text=True).stdout
        listens = {line.split()[3].rpartition(":")[0].strip("[]").partition("%")[0] for line in said.splitlines()}
        assert links.address(node, 1) in listens, "the peer tier and the storage group"
        outside = {address.removeprefix("::ffff:") for address in listens} - mine
        assert not outside, f"node {node} listens at {sorted(outside)}"
    ended = nodes.end()
    assert [one.code for one in ended] == [0, 0], ended
    copied = [event for event in nodes.job.events("committed") if event["tier"] == "peer"]
    assert all(event["channel"] == "storage" for event in copied)
    total = sum(event["bytes"] for event in copied)
    given = [links.sent(node, "stor0") for node in range(2)]
    assert 0.9 * total < sum(given), "every copy went over the storage links"
    assert all(links.sent(node, "comp0") > 12 * STATE_BYTES / 3 / 2 for node in range(2)), "gradients of 12 steps"
