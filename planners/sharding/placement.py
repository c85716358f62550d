"""Which other nodes keep copies of a node's snapshots: any loss of as many nodes as there are copies leaves one.

Copies lie on `replicas` different nodes beside the owner, so of the `replicas` + 1 places of a shard that many may be
lost. All nodes send alike: to those a fixed number of places further round a ring, so each also keeps the copies of
exactly `replicas` others, and none is loaded more than another. With zones the ring goes through one after the other,
and a shift by at least the largest zone, and at most by all nodes less that one, always ends in another zone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """Who keeps whose copies."""

    holders: tuple[tuple[int, ...], ...]
    """By node: the nodes that get a copy of its shards, the nearest first."""
    crosses_zones: bool
    """Whether each node has a copy outside its own zone; False without zones."""

    def kept_by(self, node: int) -> tuple[int, ...]:
        """The nodes whose copies `node` keeps."""
        return tuple(owner for owner, holders in enumerate(self.holders) if node in holders)


def place(count: int, replicas: int, nodes_per_zone: int | None = None, names: Sequence[int] = ()) -> Placement:
    """Place `replicas` copies of what each of `count` nodes has.

    Nodes next to each other in rank, `nodes_per_zone` at a time, are one zone; where nodes are missing, `names` are the
    ranks of those that are there, in order, and the placement speaks of positions among them. Raises ValueError for too
    few nodes.
    """
    nodes, ranks = count, names or range(count)
    if not 0 < replicas < nodes:
        raise ValueError(f"{replicas} copies on other nodes need at least {replicas + 1} nodes, there are {nodes}")
    zones = [rank // nodes_per_zone for rank in ranks] if nodes_per_zone is not None else [0] * nodes
    shifts = _shifts(zones, replicas)
    holders = tuple(tuple((node + shift) % nodes for shift in shifts) for node in range(nodes))
    crosses = all(any(zones[node] != zones[holder] for holder in held) for node, held in enumerate(holders))
    return Placement(holders, crosses)


def _shifts(zones: Sequence[int], replicas: int) -> list[int]:
    """How far round the ring the copies go; the nodes of a zone follow each other in it."""
    nodes, largest = len(zones), max(Counter(zones).values())
    if largest == nodes:
        return list(range(1, replicas + 1))
    outside = range(largest, nodes - largest + 1)
    apart = outside[::largest]  # copies in zones that differ from each other, too
    rest = sorted(set(range(1, nodes)) - set(apart), key=lambda shift: (shift not in outside, abs(2 * shift - nodes)))
    return [*apart, *rest][:replicas]
