"""The memory tier: preallocated slots on tmpfs that outlive the workers.

One folder per run. Every rank has `SLOTS` slot files, each already a shard in its final form. A slot is whole only
while its commit record is there; a checkpoint in memory is whole only when every rank has a record of the same
version. A `.drain` mark pins a slot until the drainer has carried it to the slower tiers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..format.digest import digest
from ..format.jsonfile import Unreadable, dumps, read, replace
from ..format.layout import RunDir, Version

SLOTS = 3
PEER_SLOTS = 2
"""More of them where other nodes get copies: the version that all of them have is kept until they have the next."""
TMPFS = Path("/dev/shm")
OWNER = "owner.json"
_SLOT_FILE = re.compile(r"rank-\d{5}-of-(\d{5})\.slot\d(?:\.json|\.drain|\.peer|\.sent)?")
_REPLICAS = re.compile(r"of-node-(\d{5,9})")
_SLOT = re.compile(r"rank-(\d{5})-of-(\d{5})\.slot(\d)\.json")


class MemoryTierError(Exception):
    """The memory tier cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class SlotRecord:
    """Commit record of one slot: what it holds, and the digests of its entries in file order."""

    run_id: str
    step: int
    attempt: int
    rank: int
    world: int
    slot: int
    header_digest: str
    digests: tuple[str, ...]
    meta: dict[str, Any] = field(default_factory=dict)
    runs: tuple[int, ...] = ()
    """How many entries, one after the other, each digest is of; empty: one each."""

    @property
    def version(self) -> Version:
        """The version of the state in the slot."""
        return Version(attempt=self.attempt, step=self.step)

    def to_bytes(self) -> bytes:
        """The record with a digest of itself."""
        body = dict(vars(self))
        return dumps({"record": body, "digest": digest(dumps(body))})


def parse_record(value: dict[str, Any], where: str) -> SlotRecord:
    """Check a record's own digest and read it; raises Unreadable."""
    try:
        body = value["record"]
        if digest(dumps(body)) != value["digest"]:
            raise Unreadable(f"{where}: the record does not match its digest")
        return SlotRecord(**{**body, "digests": tuple(body["digests"]), "runs": tuple(map(int, body.get("runs", ())))})
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(f"{where}: not a commit record ({error})") from error


@dataclass(frozen=True)
class Slot:
    """Paths of one slot of one rank."""

    folder: Path
    rank: int
    world: int
    index: int

    @cached_property
    def stem(self) -> str:
        """Common part of the slot's file names."""
        return f"rank-{self.rank:05d}-of-{self.world:05d}.slot{self.index}"

    @cached_property
    def file(self) -> Path:
        """The shard itself."""
        return self.folder / self.stem

    @cached_property
    def record_file(self) -> Path:
        """The commit record."""
        return self.folder / f"{self.stem}.json"

    @cached_property
    def drain_mark(self) -> Path:
        """Present while the slot waits to be drained."""
        return self.folder / f"{self.stem}.drain"

    @cached_property
    def peer_mark(self) -> Path:
        """Present while the slot is kept for the sake of its copies on other nodes."""
        return self.folder / f"{self.stem}.peer"

    @cached_property
    def sent_mark(self) -> Path:
        """Says of which version all those nodes have their copy."""
        return self.folder / f"{self.stem}.sent"

    def record(self) -> SlotRecord | None:
        """The commit record, or None when the slot is not whole."""
        try:
            return parse_record(read(self.record_file), str(self.record_file))
        except Unreadable:
            return None

    def invalidate(self) -> None:
        """Declare the slot's content void."""
        self.record_file.unlink(missing_ok=True)
        self.drain_mark.unlink(missing_ok=True)
        self.withdraw()

    def offer(self) -> None:
        """Have the slot copied to other nodes, and keep it as it is."""
        self.sent_mark.unlink(missing_ok=True)
        self.peer_mark.touch()

    @property
    def offered(self) -> bool:
        """Tell whether the slot is kept for the sake of its copies."""
        return self.peer_mark.exists()

    def sent(self, version: Version) -> None:
        """All nodes that are to have a copy have this one."""
        replace(self.sent_mark, version.dirname.encode())

    def is_sent(self, version: Version) -> bool:
        """Tell whether they have."""
        try:
            return self.sent_mark.read_bytes() == version.dirname.encode()
        except FileNotFoundError:
            return False

    def withdraw(self) -> None:
        """The slot is of no use to other nodes any more."""
        self.peer_mark.unlink(missing_ok=True)
        self.sent_mark.unlink(missing_ok=True)

    def commit(self, record: SlotRecord, *, drain: bool) -> None:
        """Declare the slot whole; with `drain` it stays pinned until the drainer releases it."""
        replace(self.record_file, record.to_bytes())
        if drain:
            self.pin()

    def pin(self) -> None:
        """Keep the slot as it is until the drainer has carried it on and releases it."""
        self.drain_mark.touch()

    @property
    def pinned(self) -> bool:
        """Tell whether the drainer still needs the slot."""
        return self.drain_mark.exists()


@dataclass(frozen=True)
class MemoryDir:
    """The folder of one run on this node's tmpfs; `ranks` are the node's own, None for all of a run on one node."""

    path: Path
    ranks: tuple[int, ...] | None = None
    world: int | None = None
    """Ranks over all nodes, where snapshots of another world size do not count as whole."""

    @property
    def drainer_lock(self) -> Path:
        """Held by the one drainer of this node."""
        return self.path / "drainer.lock"

    def note_taken_over(self, tier: str, by: str) -> None:
        """A slower tier was taken over by somebody: no drainer of this start of the run may claim it again."""
        replace(self.path / f"taken-over.{tier}.json", dumps({"tier": tier, "by": by}))

    def taken_over(self) -> dict[str, str]:
        """Tier → by whom, as noted since the run was started."""
        found: dict[str, str] = {}
        for path in sorted(self.path.glob("taken-over.*.json")):
            with contextlib.suppress(Unreadable, KeyError):
                note = read(path)
                found[str(note["tier"])] = str(note["by"])
        return found

    def forget_taken_over(self) -> None:
        """A new start may claim all tiers."""
        for path in self.path.glob("taken-over.*.json"):
            path.unlink(missing_ok=True)

    def heartbeat(self, rank: int) -> Path:
        """Counter that a rank raises at every window."""
        return self.path / f"rank-{rank:05d}.heartbeat"

    def slots(self, rank: int, world: int, count: int = SLOTS) -> list[Slot]:
        """The slots of a rank."""
        return [Slot(self.path, rank, world, index) for index in range(count)]

    def replica_of(self, node: int) -> MemoryDir:
        """Copies of another node's snapshots, kept here for it."""
        return MemoryDir(self.path / f"of-node-{node:05d}", ())

    def replicas(self) -> dict[int, MemoryDir]:
        """All of them, by node."""
        try:
            names = sorted(os.listdir(self.path))
        except FileNotFoundError:
            return {}
        return {int(match[1]): self.replica_of(int(match[1])) for name in names if (match := _REPLICAS.fullmatch(name))}

    def every_slot(self) -> list[Slot]:
        """Every slot that has a commit record, those that are kept for other nodes too."""
        return [*self.all_slots(), *(slot for kept in self.replicas().values() for slot in kept.all_slots())]

    def forget_copies(self, after: Version | None, world: int) -> None:
        """A run of `world` ranks goes on from `after` (None: from step 0).

        Copies of what is newer are from a past that it has left, and slots of other worlds are copied no more.
        """
        for slot in self.all_slots():
            if slot.world != world:
                slot.withdraw()
        for slot in (slot for kept in self.replicas().values() for slot in kept.all_slots()):
            record = slot.record()
            if record is None or after is None or record.version > after:
                slot.invalidate()

    @property
    def is_needed(self) -> bool:
        """Tell whether somebody could go on from what is here: whole snapshots, or another node's.

        Where the number of nodes has changed, those of before count until there are newer ones.
        """
        anybodys = self if self.world is None else MemoryDir(self.path, ())
        return bool(anybodys.whole()) or any(kept.all_slots() for kept in self.replicas().values())

    def remove_unneeded(self) -> None:
        """Remove the folder unless somebody could go on from what is here."""
        if self.path.is_dir() and not self.is_needed:
            self.remove()

    def all_slots(self) -> list[Slot]:
        """Every slot that has a commit record."""
        try:
            names = sorted(os.listdir(self.path))
        except FileNotFoundError:
            return []
        matches = (_SLOT.fullmatch(name) for name in names)
        return [Slot(self.path, int(m[1]), int(m[2]), int(m[3])) for m in matches if m]

    def pending(self) -> list[Slot]:
        """Slots that wait to be drained."""
        return [slot for slot in self.all_slots() if slot.pinned]

    def whole(self) -> dict[Version, list[SlotRecord]]:
        """Versions of which every rank of this node has a committed slot, with their records by rank."""
        found: dict[tuple[Version, int], dict[int, SlotRecord]] = defaultdict(dict)
        for slot in self.all_slots():
            record = slot.record()
            if record is not None and (record.rank, record.world) == (slot.rank, slot.world):
                found[record.version, record.world][record.rank] = record
        complete: dict[Version, list[SlotRecord]] = {}
        for (version, world), records in found.items():
            if self.world not in (None, world):
                continue
            wanted = range(world) if self.ranks is None else self.ranks
            if records.keys() >= set(wanted) and len({record.run_id for record in records.values()}) == 1:
                complete[version] = [records[rank] for rank in wanted]
        return complete

    def settle(self, wanted: Collection[Version] | None = None) -> None:
        """After the workers are gone: keep drain marks of whole versions only, on all their ranks.

        `wanted`: mark these and no others, as all nodes have agreed.
        """
        whole = self.whole()
        if wanted is None:
            wanted = {record.version for slot in self.pending() if (record := slot.record())}
        for slot in self.all_slots():
            record = slot.record()
            if record is not None and record.version in wanted and record.version in whole:
                slot.pin()
            else:
                slot.drain_mark.unlink(missing_ok=True)

    def mark_for_drain(self, version: Version) -> None:
        """Pin every slot of a whole version for the drainer."""
        for record in self.whole()[version]:
            Slot(self.path, record.rank, record.world, record.slot).pin()

    def file_of(self, record: SlotRecord) -> Path:
        """The shard file that a record speaks of."""
        return Slot(self.path, record.rank, record.world, record.slot).file

    def of_other_worlds(self, world: int) -> list[Path]:
        """Slot files that a run of another world size left; of use only until this one has its first snapshot."""
        files = [(path, _SLOT_FILE.fullmatch(path.name)) for path in self.path.iterdir()]
        return [path for path, match in files if match is not None and int(match[1]) != world]

    def left_by_other_worlds(self, world: int) -> list[Path]:
        """The same, with the copies of other nodes' snapshots."""
        kept = [path for folder in self.replicas().values() for path in folder.of_other_worlds(world)]
        return [*self.of_other_worlds(world), *kept]

    def remove(self) -> None:
        """Give the memory back."""
        shutil.rmtree(self.path, ignore_errors=True)


def memory_dir(run: RunDir, ranks: tuple[int, ...] | None = None) -> MemoryDir:
    """Where a run's snapshots lie on this node: the name follows from the run's folder and the node's rank."""
    key = hashlib.sha256(os.fsencode(run.root.resolve())).hexdigest()[:16]
    return MemoryDir(TMPFS / f"dtrain-{os.getuid()}-{key}{f'-n{run.node}' if run.node else ''}", ranks)


def open_memory_dir(run: RunDir, run_id: str, ranks: tuple[int, ...] | None = None) -> MemoryDir:
    """Make or reuse the run's folder on tmpfs; what another run left under the same name is removed.

    `ranks` are those of this node, None for all. Raises MemoryTierError when tmpfs is missing or the name is taken by
    somebody else.
    """
    memory = memory_dir(run, ranks)
    if not os.access(TMPFS, os.W_OK):
        raise MemoryTierError(
            f"{TMPFS} is missing or not writable; snapshots need a tmpfs there (mount -t tmpfs tmpfs {TMPFS})"
        )
    try:
        memory.path.mkdir(mode=0o700)
    except FileExistsError:
        info = memory.path.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
            raise MemoryTierError(f"{memory.path} is not a private folder of this user; remove it") from None
        if owner_of(memory) != run_id:
            memory.remove()
            memory.path.mkdir(mode=0o700)
    if not (memory.path / OWNER).exists():
        _sign(memory, run, run_id)
    return memory


def follow_folder(memory: MemoryDir, root: Path) -> MemoryDir:
    """Give a run's snapshots the name that belongs to `root`, where its folder was moved to.

    They stay where they are when that name is taken by others. Raises OSError.
    """
    run, run_id = RunDir(root, node_of(memory.path)), owner_of(memory)
    moved = memory_dir(run, memory.ranks)
    if run_id is None or moved.path.exists():
        return memory
    memory.path.rename(moved.path)
    _sign(moved, run, run_id)
    return moved


def _sign(memory: MemoryDir, run: RunDir, run_id: str) -> None:
    owner = {"run_id": run_id, "output_dir": str(run.root.resolve()), "node": run.node}
    replace(memory.path / OWNER, dumps(owner))


def node_of(path: Path) -> int:
    """Of which node these snapshots are; those of a run on one node say nothing."""
    try:
        node = read(path / OWNER).get("node")
    except Unreadable:
        return 0
    return node if isinstance(node, int) else 0


def owner_of(memory: MemoryDir) -> str | None:
    """The run whose snapshots lie there; None when nobody says so."""
    try:
        return str(read(memory.path / OWNER).get("run_id"))
    except Unreadable:
        return None
