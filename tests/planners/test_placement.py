"""Copies on other nodes: every loss that they are for is survived, and no node is loaded more than another."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest

from dtrain.planners.sharding.placement import place

SMALL = [(nodes, replicas) for nodes in range(2, 9) for replicas in range(1, nodes)]


@pytest.mark.parametrize(("nodes", "replicas"), SMALL)
@pytest.mark.parametrize("nodes_per_zone", [None, 1, 2, 3, 5])
def test_every_loss_of_as_many_nodes_leaves_every_shard(nodes: int, replicas: int, nodes_per_zone: int | None) -> None:
    holders = place(nodes, replicas, nodes_per_zone).holders
    for count in range(replicas + 1):
        for lost in combinations(range(nodes), count):
            for owner in range(nodes):
                assert {owner, *holders[owner]} - set(lost), (lost, owner)


@pytest.mark.parametrize(("nodes", "replicas"), SMALL)
@pytest.mark.parametrize("nodes_per_zone", [None, 2, 3])
def test_all_nodes_keep_as_many_copies(nodes: int, replicas: int, nodes_per_zone: int | None) -> None:
    placement = place(nodes, replicas, nodes_per_zone)
    assert all(len({*held} - {owner}) == replicas for owner, held in enumerate(placement.holders))
    assert set(Counter(holder for held in placement.holders for holder in held).values()) == {replicas}
    for node in range(nodes):
        assert all(node in placement.holders[owner] for owner in placement.kept_by(node))
        assert len(placement.kept_by(node)) == replicas


@pytest.mark.parametrize(
    ("nodes", "replicas", "nodes_per_zone"), [(8, 1, 4), (8, 2, 2), (9, 2, 3), (7, 1, 3), (6, 1, 1)]
)
def test_the_loss_of_a_zone_leaves_every_shard(nodes: int, replicas: int, nodes_per_zone: int) -> None:
    placement = place(nodes, replicas, nodes_per_zone)
    assert placement.crosses_zones
    for first in range(0, nodes, nodes_per_zone):
        lost = set(range(first, min(first + nodes_per_zone, nodes)))
        assert all({owner, *held} - lost for owner, held in enumerate(placement.holders))


def test_copies_lie_in_zones_that_differ_from_each_other() -> None:
    for owner, held in enumerate(place(12, 3, 3).holders):
        assert len({node // 3 for node in (owner, *held)}) == 4


def test_without_zones_or_with_one_zone_the_neighbours_keep_them() -> None:
    assert place(4, 2).holders[3] == (0, 1)
    assert place(4, 2, 4).holders == place(4, 2).holders
    assert not place(4, 2, 4).crosses_zones


def test_a_zone_larger_than_all_others_together_is_told() -> None:
    assert not place(5, 1, 4).crosses_zones


@pytest.mark.parametrize(("nodes", "replicas"), [(1, 1), (2, 2), (3, 0)])
def test_too_few_nodes_are_refused(nodes: int, replicas: int) -> None:
    with pytest.raises(ValueError, match="nodes"):
        place(nodes, replicas)
