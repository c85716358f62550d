"""What several nodes can go on from together: each tells what it has, and one of them decides for all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .layout import Version
from .memory import MemoryDir
from .recovery import MEMORY, Candidate
from .tier import Tier

Passed = dict[str, Any]
"""A checkpoint that was passed over, as events tell it."""


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

    def to_json(self) -> dict[str, Any]:
        """Form for messages."""
        return {
            "memory": _pairs(self.memory),
            "pinned": _pairs(self.pinned),
            "seen": {tier: _pairs(versions) for tier, versions in self.seen.items()},
            "highest": self.highest,
        }


def held_from_json(value: Mapping[str, Any]) -> Held:
    """Read the form of `to_json`; raises ValueError for what is none."""
    try:
        seen = {str(tier): versions_from(pairs) for tier, pairs in value["seen"].items()}
        return Held(versions_from(value["memory"]), versions_from(value["pinned"]), seen, int(value["highest"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not what a node holds: {error}") from error


def _pairs(versions: Iterable[Version]) -> list[list[int]]:
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
    records = [record for slot in memory.all_slots() if (record := slot.record())]
    pinned = {record.version for slot in memory.pending() if (record := slot.record())}
    whole = memory.whole().keys()
    return Held(frozenset(whole), frozenset(pinned & whole), seen, max((r.attempt for r in records), default=0))


def agreed(candidates: Iterable[Candidate], held: Mapping[int, Held]) -> tuple[list[Candidate], list[Passed]]:
    """The candidates of node 0 that every node can read its part of, in their order, and those passed over with why.

    In memory each node must have the shards of its own ranks; a folder on disk must be seen by all.
    """
    chosen: list[Candidate] = []
    passed: list[Passed] = []
    for candidate in candidates:
        reason = next((words for node in sorted(held) if (words := _lack(candidate, node, held[node]))), None)
        if reason is None:
            chosen.append(candidate)
        else:
            version = candidate.version
            passed.append({"tier": candidate.tier, "step": version.step, "attempt": version.attempt, "reason": reason})
    return chosen, passed


def _lack(candidate: Candidate, node: int, held: Held) -> str | None:
    """Why a node cannot read its part; None when it can, as far as is known."""
    if candidate.tier == MEMORY:
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
    if held.keys() != set(range(nodes)):
        return frozenset()
    return frozenset.intersection(*(one.memory for one in held.values()))


def to_drain(held: Mapping[int, Held], nodes: int) -> frozenset[Version]:
    """Versions to be carried to a slower tier: whole on all nodes, and on one of them waiting for it."""
    wanted = frozenset[Version]().union(*(one.pinned for one in held.values()))
    return common(held, nodes) & wanted
