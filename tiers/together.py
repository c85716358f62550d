"""One checkpoint from several nodes in a store that all of them see: each adds its files, node 0 writes the manifest.

Node 0 begins the folder and leaves an invitation in it (`part-00000.json`). Every other node waits for that, copies
its files in, and says in `part-<node>.json` what they hold. Node 0 waits for all parts, takes these notes away, and
commits. A node that sees no invitation is told that the folder is not shared; a part that does not come ends the try,
and nothing of it is left. When node 0 has died and begins anew, its invitation has another word, which every part must
repeat: one that was made for an earlier try is thrown away, and its node adds its files again. All of it goes through
the store, so no message can be lost between the nodes.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from errno import ENOENT
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from .commit import ours
from .format.files import final_name
from .format.jsonfile import Unreadable, dumps
from .format.layout import Version, part_name, staging_name
from .format.manifest import ShardFile, shard_file_from_json
from .memory.gather import Part
from .stores.store import StoreError
from .tier import Checkpoint, Tier

MAX_PART_BYTES = 64 * 2**20
POLL_S = 0.05
MAX_TRIES = 20
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Group:
    """The nodes that write together."""

    node: int
    nodes: int
    patience_s: float = 60.0
    """Longest wait for another node."""
    is_off: Callable[[Version], bool] = lambda _: False
    """Whether the nodes have agreed meanwhile that a version is not to be written."""

    @property
    def leads(self) -> bool:
        """Tell whether this node writes the manifest."""
        return self.node == 0


class CalledOff(Unreadable):
    """The nodes have agreed not to write a version: after a fault it was not whole on every one of them."""


@dataclass(frozen=True)
class Invitation:
    """Node 0 has begun a checkpoint."""

    folder: str
    word: str
    """Different for every try."""


def write(tier: Tier, part: Part, sources: Mapping[str, Path], group: Group) -> Checkpoint:
    """Write a checkpoint together with the other nodes; returns it once it is committed.

    Raises OSError when the place or another node fails, Unreadable when bytes are wrong, Fenced.
    """
    if (there := tier.get(part.version)) is not None:
        there.check_same(part.checked())
        return there
    return _lead(tier, part, sources, group) if group.leads else _join(tier, part, sources, group)


def _lead(tier: Tier, part: Part, sources: Mapping[str, Path], group: Group) -> Checkpoint:
    version = part.version
    with tier.begun(version) as folder:
        word = secrets.token_hex(8)
        tier.store.create(folder, part_name(0), dumps({"nodes": group.nodes, "word": word}))
        own = _add(tier, folder, part)
        others = [_part_of(tier, folder, node, word, version, group) for node in range(1, group.nodes)]
        manifest = part.manifest(shard for shards in (own, *others) for shard in shards)
        tier.check_sizes(folder, manifest)  # what the others say they have written must be what node 0 sees
        # Also the names beside them: between giving a part its name and taking the other away its writer may be slow.
        parts = {part_name(node) for node in range(group.nodes)}
        tier.store.delete(folder, [name for name in ours(tier.store, folder) if final_name(name) in parts])
        return tier.seal(manifest)


def _join(tier: Tier, part: Part, sources: Mapping[str, Path], group: Group) -> Checkpoint:
    version = part.version
    where = tier.store.where
    unseen = (
        f"node {group.node} sees no checkpoint of {version} begun by node 0 in {where}: if the folder is not shared "
        "between the nodes, use one that is"
    )
    invited = _wait(lambda: _invited(tier, version), group, version, unseen)
    for _ in range(MAX_TRIES):  # once more whenever node 0 begins anew, having thrown the try before away
        try:
            _add_part(tier, invited, part, sources, group)
        except FileNotFoundError:
            time.sleep(POLL_S)  # the folder was cleared under our hands
        else:
            taken = partial(_taken, tier, invited.folder, version, group.node)
            _wait(taken, group, version, f"node 0 has not committed {version} in {where}")
        found = _wait(lambda: _seen(tier, version), group, version, f"node 0 has given up {version} in {where}")
        if found.checkpoint is not None:
            return found.checkpoint
        assert found.invitation is not None
        invited = found.invitation
    raise StoreError(f"node 0 has begun {version} in {where} again and again")


def _add_part(tier: Tier, invited: Invitation, part: Part, sources: Mapping[str, Path], group: Group) -> None:
    """Add this node's files and say so. Raises OSError, Unreadable."""
    name, folder = part_name(group.node), invited.folder
    tier.store.delete(folder, [name, *sources])  # of an earlier try of this node
    shards = [shard.to_json() for shard in _add(tier, folder, part, invited)]
    tier.store.create(folder, name, dumps({"run_id": part.run_id, "shards": shards, "word": invited.word}))


def _taken(tier: Tier, folder: str, version: Version, node: int) -> bool | None:
    """Node 0 has done something with our part: committed, or thrown away."""
    return part_name(node) not in tier.store.files(folder) or tier.get(version) is not None or None


@dataclass(frozen=True)
class Seen:
    """What has become of a checkpoint: it is committed, or begun anew."""

    checkpoint: Checkpoint | None
    invitation: Invitation | None


def _seen(tier: Tier, version: Version) -> Seen | None:
    checkpoint = tier.get(version)
    invitation = _invited(tier, version) if checkpoint is None else None
    return Seen(checkpoint, invitation) if checkpoint is not None or invitation is not None else None


def is_begun(tier: Tier, version: Version) -> bool:
    """Tell whether node 0 has begun a checkpoint and waits for the parts of the others. Raises OSError, Unreadable."""
    return _invited(tier, version) is not None


def _invited(tier: Tier, version: Version) -> Invitation | None:
    for folder in (staging_name(version.dirname), version.dirname):
        with contextlib.suppress(FileNotFoundError):
            data = tier.store.read(folder, part_name(0), MAX_PART_BYTES)
            return Invitation(folder, str(_values(data, tier, folder, 0)["word"]))
    return None


def _add(tier: Tier, folder: str, part: Part, invited: Invitation | None = None) -> list[ShardFile]:
    added = []
    for shard in part.shards:
        if invited is not None and _invited(tier, part.version) != invited:
            raise FileNotFoundError(ENOENT, "node 0 has begun anew", f"{tier.store.where}/{folder}")
        added.append(tier.add_shard(folder, shard))
    return added


def _part_of(tier: Tier, folder: str, node: int, word: str, version: Version, group: Group) -> list[ShardFile]:
    """The description that another node leaves; waits for it. One for an earlier try is thrown away."""

    def read() -> list[ShardFile] | None:
        with contextlib.suppress(FileNotFoundError):
            values = _values(tier.store.read(folder, part_name(node), MAX_PART_BYTES), tier, folder, node)
            if values.get("word") == word:
                return [shard_file_from_json(shard) for shard in values["shards"]]
            tier.store.delete(folder, [part_name(node)])
        return None

    return _wait(read, group, version, f"node {node} has not added its part of {version} to {tier.store.where}")


def _values(data: bytes, tier: Tier, folder: str, node: int) -> dict[str, Any]:
    """What a node says in its note; raises Unreadable."""
    keys = {"nodes", "word"} if node == 0 else {"shards"}
    try:
        values = json.loads(data)
        if isinstance(values, dict) and keys <= values.keys() and isinstance(values.get("shards", []), list):
            return values
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{tier.store.where}/{folder}/{part_name(node)}: {error}") from error
    raise Unreadable(f"{tier.store.where}/{folder}/{part_name(node)}: not the note of a node")


def _wait(look: Callable[[], _Found | None], group: Group, version: Version, words: str) -> _Found:
    deadline = time.monotonic() + group.patience_s
    while (found := look()) is None:
        if group.is_off(version):
            raise CalledOff(f"{version} is not whole on every node")
        if time.monotonic() > deadline:
            raise StoreError(f"{words} (waited {group.patience_s:.0f} s)")
        time.sleep(POLL_S)
    return found
