"""What several nodes can go on from together: each tells what it has, and one of them decides for all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..format.layout import Version
from ..memory.slots import MemoryDir
from ..stores.store import Place
from ..tier import Tier
from .recovery import MEMORY, PEER, Candidate

Passed = dict[str, Any]
"""A checkpoint that was passed over, as events tell it."""


@dataclass(frozen=True)
class Shards:
    """Some of the shards of one version."""

    world: int
    """How many there are."""
    ranks: frozenset[int]


@dataclass(frozen=True)
class Held:
    """What one node has in its memory, and what it sees in the tiers that all nodes share."""

    memory: frozenset[Version] = frozenset()
    """Versions of which all of the node's own ranks have a whole snapshot."""
    pinned: frozenset[Version] = frozenset()
    """Those of them that wait to be carried to a slower tier."""
    seen: Mapping[str, frozenset[Version]] = field(default_factory=dict)
    """By tier; one that the node has not looked into, or could not, is left out."""
    highest: int = 0
    """Highest attempt number in its memory, whole or not."""
    shards: Mapping[Version, Shards] = field(default_factory=dict)
    """Whose shards of each version are in its memory, its own and those that it keeps for other nodes."""

    def to_json(self) -> dict[str, Any]:
        """Form for messages."""
        return {
            "memory": pairs_of(self.memory),
            "pinned": pairs_of(self.pinned),
            "seen": {tier: pairs_of(versions) for tier, versions in self.seen.items()},
            "highest": self.highest,
            "shards": [
                [version.attempt, version.step, found.world, sorted(found.ranks)]
                for version, found in sorted(self.shards.items())
            ],
        }


def held_from_json(value: Mapping[str, Any]) -> Held:
    """Read the form of `to_json`; raises ValueError for what is none."""
    try:
        seen = {str(tier): versions_from(pairs) for tier, pairs in value["seen"].items()}
        shards = {
            Version(attempt=int(attempt), step=int(step)): Shards(int(world), frozenset(map(int, ranks)))
            for attempt, step, world, ranks in value["shards"]
        }
        memory, pinned = versions_from(value["memory"]), versions_from(value["pinned"])
        return Held(memory, pinned, seen, int(value["highest"]), shards)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not what a node holds: {error}") from error


def pairs_of(versions: Iterable[Version]) -> list[list[int]]:
    """Versions as messages have them."""
    return [[version.attempt, version.step] for version in sorted(versions)]


def versions_from(pairs: Iterable[Sequence[int]]) -> frozenset[Version]:
    """Versions from their form in messages."""
    return frozenset(Version(attempt=int(attempt), step=int(step)) for attempt, step in pairs)


def look(memory: MemoryDir, tiers: Iterable[Tier]) -> Held:
    """What this node has: its ranks' snapshots, and the folders of the disk tier; an object store is one for all."""
    seen: dict[str, frozenset[Version]] = {}
    for tier in tiers:
        if tier.name != "object":
            with contextlib.suppress(OSError):
                seen[tier.name] = frozenset(tier.versions())
    records = [record for slot in memory.every_slot() if (record := slot.record())]
    shards: dict[Version, Shards] = {}
    for one in records:
        others = shards[one.version].ranks if one.version in shards else frozenset()
        shards[one.version] = Shards(one.world, others | {one.rank})
    pinned = {record.version for slot in memory.pending() if (record := slot.record())}
    whole = memory.whole().keys()
    return Held(frozenset(whole), frozenset(pinned & whole), seen, max((r.attempt for r in records), default=0), shards)


def agreed(candidates: Iterable[Candidate], held: Mapping[int, Held]) -> tuple[list[Candidate], list[Passed]]:
    """The candidates of node 0 that every node can read its part of, in their order, and those passed over with why.

    In memory each node must have the shards of its own ranks, or other nodes must have copies of those that are
    missing: such a candidate is one of the peer tier. A folder on disk must be seen by all.
    """
    between = between_nodes(held)
    chosen: list[Candidate] = []
    passed: list[Passed] = []
    for candidate in candidates:
        reason = next((words for node in sorted(held) if (words := _lack(candidate, node, held[node]))), None)
        known = any(candidate.version in one.shards for one in held.values())
        in_memory = candidate.tier in (MEMORY, PEER)
        if in_memory and known and candidate.version not in between:
            reason = reason or "some of its shards are in no node's memory"
        if in_memory and (reason is None or candidate.version in between):
            tier = MEMORY if reason is None else PEER
            chosen.append(Candidate(candidate.version, replace(candidate.place, type=tier)))
        elif reason is None:
            chosen.append(candidate)
        else:
            version = candidate.version
            passed.append({"tier": candidate.tier, "step": version.step, "attempt": version.attempt, "reason": reason})
    return chosen, passed


def with_memory_of_all(candidates: Sequence[Candidate], held: Mapping[int, Held], memory: MemoryDir) -> list[Candidate]:
    """The candidates of node 0, and what its `memory` has lost and the nodes have between them; in order."""
    known = {candidate.version for candidate in candidates if candidate.tier in (MEMORY, PEER)}
    more = [Candidate(version, Place(MEMORY, str(memory.path))) for version in between_nodes(held) - known]
    return sorted([*more, *candidates], key=lambda candidate: candidate.version, reverse=True)


def between(candidate: Candidate) -> Candidate:
    """What is in memory as a candidate whose shards move between the nodes."""
    if candidate.tier != MEMORY:
        return candidate
    return Candidate(candidate.version, replace(candidate.place, type=PEER))


def between_nodes(held: Mapping[int, Held]) -> frozenset[Version]:
    """Every version of which each shard is in some node's memory, its own or as a copy."""
    worlds: dict[Version, int] = {}
    ranks: dict[Version, set[int]] = {}
    for one in held.values():
        for version, found in one.shards.items():
            worlds[version] = found.world
            ranks.setdefault(version, set()).update(found.ranks)
    return frozenset(version for version, found in ranks.items() if found >= set(range(worlds[version])))


def _lack(candidate: Candidate, node: int, held: Held) -> str | None:
    """Why a node cannot read its part; None when it can, as far as is known."""
    if candidate.tier in (MEMORY, PEER):
        return None if candidate.version in held.memory else f"node {node} does not have its part of it in memory"
    seen = held.seen.get(candidate.tier)
    if seen is None or candidate.version in seen:
        return None
    return f"node {node} does not see {candidate.folder}: the folder is not shared between the nodes"


def newest(held: Mapping[int, Held], nodes: int) -> Version | None:
    """The newest version that all nodes together have whole in memory; None while a node is missing."""
    return max(common(held, nodes), default=None)


def common(held: Mapping[int, Held], nodes: int) -> frozenset[Version]:
    """Every version that all nodes together have whole in memory."""
    if not held or held.keys() != set(range(nodes)):
        return frozenset()
    return frozenset.intersection(*(one.memory for one in held.values()))


def to_drain(held: Mapping[int, Held], nodes: int) -> frozenset[Version]:
    """Versions to be carried to a slower tier: whole on all nodes, and on one of them waiting for it."""
    wanted = frozenset[Version]().union(*(one.pinned for one in held.values()))
    return common(held, nodes) & wanted
