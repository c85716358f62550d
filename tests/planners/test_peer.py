"""The peer tier in the plan: how often, how much memory, what it survives, and at what pace it is sent."""

from __future__ import annotations

from typing import Any

import pytest
from tests.planners.build import tiny

from dtrain.planners.document import Plan
from dtrain.planners.machine import Machine
from dtrain.planners.plan import make_plan, plan_from_json

PEER: list[dict[str, Any]] = [{"type": "memory"}, {"type": "peer", "replicas": 2}, {"type": "disk"}]


def plan_of(tiers: list[dict[str, Any]], accelerator: str = "h100", **cluster: Any) -> Plan:
    found = {"nodes": 4, "workers_per_node": 2, **cluster}
    training = {"global_batch_size": 16, "micro_batch_size": 2, "optimizer": {"name": "adamw", "lr": 0.1}}
    machine = Machine(cpu_cores=8, host_memory_bytes=2**40, shm_free_bytes=2**39, accelerator=accelerator)
    return make_plan(tiny(tiers=tiers, cluster=found, training=training, max_steps=1000), machine)


def test_a_lost_node_is_answered_by_the_peers_and_a_lost_cluster_by_the_disk() -> None:
    plan = plan_of(PEER)
    peer = plan.tier("peer")
    assert peer is not None
    assert (peer.replicas, peer.survives) == (2, ("process", "node"))
    without = plan_of([PEER[0], PEER[2]])
    assert (plan.expected.lost_steps.node or 0) < (without.expected.lost_steps.node or 0)
    assert plan.expected.lost_steps.cluster == pytest.approx(without.expected.lost_steps.cluster)
    assert plan_from_json(plan.to_json()) == plan


def test_copies_of_other_nodes_and_two_more_snapshots_are_counted_in_the_host_memory() -> None:
    shard = plan_of(PEER).model.state_bytes_per_rank
    assert shard is not None
    plan, without = plan_of(PEER), plan_of([PEER[0], PEER[2]])
    assert plan.memory.replica_bytes_per_node == 2 * 2 * 2 * shard  # slots, replicas, workers of a node
    assert plan.memory.slot_bytes_per_node == (3 + 2) * 2 * shard + 8 * shard
    assert without.memory.slot_bytes_per_node == 3 * 2 * shard
    assert without.memory.replica_bytes_per_node == 0


THREE = [PEER[0], {"type": "peer", "replicas": 3}, {"type": "disk", "every": 5}]
SLOW = {"network_bandwidth": 1e6}


def test_a_slow_network_makes_copies_rarer_and_the_disk_is_not_bound_to_them() -> None:
    plan = plan_of(THREE, hardware=SLOW)
    peer, disk = plan.tier("peer"), plan.tier("disk")
    assert peer is not None and disk is not None
    assert peer.every == 2
    assert plan_of(THREE).tiers[1].every == 1
    assert peer.write_s == pytest.approx(3 * (plan.model.state_bytes_per_rank or 0) / 1e6)
    assert any("repeats up to 4 steps" in line for line in plan.warnings), "two steps are promised for every: 1 alone"
    assert not any("repeats up to" in line for line in plan_of(THREE).warnings)
    assert disk.every == 5, "no multiple of the peers' interval"

    def told(**peer: object) -> str:
        tiers = [PEER[0], {"type": "peer", "replicas": 3, "every": 1} | peer]
        (line,) = [line for line in plan_of(tiers, hardware=SLOW).warnings if "one copy takes" in line]
        return line

    assert "training will wait for it" in told()
    assert "copies will be rarer" in told(when_slow="skip")
    assert "training will wait for it" in told(when_slow="wait")
    assert not any("multiple" in line for line in plan.warnings)


def test_what_is_sent_is_held_back_only_where_gradients_cross_the_same_link() -> None:
    shared, own = plan_of(PEER), plan_of(PEER, channels={"storage": {"shared": False}})
    paces = [getattr(plan.tier("peer"), "pace_bytes_per_s", None) for plan in (shared, own)]
    node_bytes = 2 * 2 * (shared.model.state_bytes_per_rank or 0)
    assert paces == [pytest.approx(node_bytes / (0.9 * (shared.iteration.step_s or 0))), None]


@pytest.mark.parametrize("accelerator", ["cpu", "h100"])
def test_by_themselves_both_channels_take_one_interface_and_two_are_named(accelerator: str) -> None:
    """Whatever computes: processors without an accelerator have but one network, too."""
    names = {"compute": {"interface": "eth0"}, "storage": {"interface": "eth1"}}
    same = {"compute": {"interface": "eth0"}, "storage": {"interface": "eth0"}}
    paced = [
        getattr(plan_of(PEER, accelerator, **changes).tier("peer"), "pace_bytes_per_s", None) is not None
        for changes in ({}, {"channels": same}, {"channels": names})
    ]
    assert paced == [True, True, False]


def test_an_interval_that_the_network_does_not_sustain_is_told() -> None:
    given = [PEER[0], {"type": "peer", "replicas": 3, "every": 1}]
    assert any(line.startswith("peer: one copy takes") for line in plan_of(given, hardware=SLOW).warnings)
    assert not any("peer:" in line for line in plan_of(given).warnings)


def test_a_zone_that_leaves_no_other_is_told() -> None:
    assert any("own zone" in line for line in plan_of(PEER, nodes_per_zone=4).warnings)
    assert not any("own zone" in line for line in plan_of(PEER, nodes_per_zone=2).warnings)
