"""One checkpoint from several nodes in a store that all of them see: each adds its files, node 0 writes the manifest.

Node 0 begins the folder and leaves an invitation in it (`part-00000.json`). Every other node waits for that, copies
its files in, and says in `part-<node>.json` what they hold. Node 0 waits for all parts, takes these notes away, and
commits. A node that sees no invitation is told that the folder is not shared; a part that does not come ends the try,
and nothing of it is left. All of it goes through the store, so no message can be lost between the nodes.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from . import faults
from .gather import Part
from .jsonfile import Unreadable, dumps
from .layout import Version, part_name, staging_name
from .manifest import ShardFile, shard_file_from_json
from .store import StoreError
from .tier import Checkpoint, Tier

MAX_PART_BYTES = 64 * 2**20
POLL_S = 0.05
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Group:
    """The nodes that write together."""

    node: int
    nodes: int
    patience_s: float = 60.0
    """Longest wait for another node."""

    @property
    def leads(self) -> bool:
        """Tell whether this node writes the manifest."""
        return self.node == 0


def write(tier: Tier, part: Part, sources: Mapping[str, Path], group: Group) -> Checkpoint:
    """Write a checkpoint together with the other nodes; returns it once it is committed.

    Raises OSError when the place or another node fails, Unreadable when bytes are wrong, Fenced.
    """
    if (there := tier.get(part.version)) is not None:
        there.check_same({shard.name: {"bytes": shard.nbytes, "digest": shard.digest} for shard in part.shards})
        return there
    return _lead(tier, part, sources, group) if group.leads else _join(tier, part, sources, group)


def _lead(tier: Tier, part: Part, sources: Mapping[str, Path], group: Group) -> Checkpoint:
    version = part.version
    with tier.begun(version) as folder:
        tier.store.create(folder, part_name(0), dumps({"nodes": group.nodes}))
        _add(tier, folder, part, sources)
        others = [_part_of(tier, folder, node, version, group) for node in range(1, group.nodes)]
        manifest = part.manifest(shard for shards in others for shard in shards)
        tier.check_sizes(folder, manifest)  # what the others say they have written must be what node 0 sees
        tier.store.delete(folder, [part_name(node) for node in range(group.nodes)])
        return tier.seal(manifest)


def _join(tier: Tier, part: Part, sources: Mapping[str, Path], group: Group) -> Checkpoint:
    version = part.version
    where = tier.store.where
    unseen = (
        f"node {group.node} sees no checkpoint of {version} begun by node 0 in {where}: if the folder is not shared "
        "between the nodes, use one that is"
    )
    folder = _wait(lambda: _invited(tier, version), group, unseen)
    while True:  # once more when node 0 begins anew, having thrown the first try away
        tier.store.delete(folder, [part_name(group.node), *sources])  # of an earlier try of this node
        _add(tier, folder, part, sources)
        shards = [shard.to_json() for shard in part.shards]
        tier.store.create(folder, part_name(group.node), dumps({"run_id": part.run_id, "shards": shards}))
        _wait(
            lambda: _taken(tier, folder, version, group.node), group, f"node 0 has not committed {version} in {where}"
        )
        found = _wait(
            lambda: tier.get(version) or _invited(tier, version), group, f"node 0 has given up {version} in {where}"
        )
        if isinstance(found, Checkpoint):
            return found


def _taken(tier: Tier, folder: str, version: Version, node: int) -> bool | None:
    """Node 0 has done something with our part: committed, or thrown away."""
    return part_name(node) not in tier.store.files(folder) or tier.get(version) is not None or None


def _invited(tier: Tier, version: Version) -> str | None:
    for folder in (staging_name(version.dirname), version.dirname):
        if part_name(0) in tier.store.files(folder):
            return folder
    return None


def _add(tier: Tier, folder: str, part: Part, sources: Mapping[str, Path]) -> None:
    for shard in part.shards:
        tier.add(folder, shard.name, sources[shard.name], shard.digest)
        faults.point("drain.file", part.version.step, shard.rank)


def _part_of(tier: Tier, folder: str, node: int, version: Version, group: Group) -> list[ShardFile]:
    """The description that another node leaves; waits for it."""

    def read() -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return tier.store.read(folder, part_name(node), MAX_PART_BYTES)
        return None

    data = _wait(read, group, f"node {node} has not added its part of {version} to {tier.store.where}")
    try:
        value = json.loads(data)
        return [shard_file_from_json(shard) for shard in value["shards"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unreadable(f"{tier.store.where}/{folder}/{part_name(node)}: {error}") from error


def _wait(look: Callable[[], _Found | None], group: Group, words: str) -> _Found:
    deadline = time.monotonic() + group.patience_s
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise StoreError(f"{words} (waited {group.patience_s:.0f} s)")
        time.sleep(POLL_S)
    return found
