"""A tier: the checkpoints of one run in a store. The same code for a disk and for a bucket.

Commit: every file under a name never used before, made durable, read back, then the manifest, as one change that
others see. A folder is a checkpoint only if its name is exact and its manifest reads and matches. What dtrain did not
make is never touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import faults
from .commit import Commit, clean, commit_of, is_somebodys, strangers
from .fence import Fence, Fenced, Taken, claim, refuse_copy, refuse_other
from .format.jsonfile import Unreadable
from .format.layout import MANIFEST, Version, parse_version, staging_name, unfinished
from .format.manifest import MAX_BYTES, Manifest, ShardFile, parse_manifest
from .lock import FolderLock
from .memory.gather import Part, Unread
from .retention import Rule
from .stores.directory import DirectoryStore
from .stores.store import Place, Progress, Store, StoreError, open_store


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint in a store."""

    tier: Tier
    manifest: Manifest

    @property
    def version(self) -> Version:
        """The version of the state."""
        return self.manifest.version

    @property
    def folder(self) -> str:
        """Its folder in the store."""
        return self.version.dirname

    @property
    def where(self) -> str:
        """Where it is, in words a person can use."""
        return f"{self.tier.store.where}/{self.folder}"

    def check_sizes(self) -> None:
        """Raise Unreadable when a file is missing or has another size than the manifest says."""
        self.tier.check_sizes(self.folder, self.manifest)

    def check_same(self, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise FileExistsError when it is not the checkpoint with these files: a name says nothing of the content."""
        for name, info in files.items():
            there = self.manifest.files.get(name, {})
            if any(there.get(key) != info[key] for key in ("bytes", "digest")):
                raise FileExistsError(
                    f"{self.where}: another checkpoint has this name; was the run's folder copied, and goes on twice?"
                )

    def check_bytes(self, told: Progress | None = None) -> None:
        """Read every byte, past the caches; raises Unreadable at the first file that is not what was committed.

        Raises StoreError when the place cannot be asked.
        """
        for name, info in self.manifest.files.items():
            try:
                content = self.tier.store.digest(self.folder, name, told)
            except StoreError:
                raise
            except OSError as error:
                raise Unreadable(f"{self.where}/{name}: {error.strerror or error}") from error
            if content != info["digest"]:
                raise Unreadable(f"{self.where}/{name}: does not match its digest")


@dataclass(frozen=True)
class Rejected:
    """A folder named like a checkpoint that is not usable, and why."""

    tier: str
    where: str
    version: Version
    reason: str


@dataclass(frozen=True)
class Pruned:
    """What retention did, or would do."""

    removed: list[Version]
    kept: list[Version]
    damaged: list[Rejected]
    strangers: dict[Version, list[str]] = field(default_factory=dict)
    """What is not dtrain's in the folder of a removed checkpoint, and stays there with the folder."""


class Tier:
    """The checkpoints of one run in a store (of every run, when `run_id` is None)."""

    def __init__(
        self, place: Place, store: Store, run_id: str | None, fence: Fence | None = None, home: Path | None = None
    ) -> None:
        """Look into the `store` of a place; with a `fence`, writing and deleting end when it falls.

        `home`: the run's folder, which tells one copy of a run from another.
        """
        self.place, self.store, self.run_id, self.fence, self.home = place, store, run_id, fence, home
        self._seen: dict[str, Checkpoint] = {}

    @property
    def name(self) -> str:
        """Type of the tier."""
        return self.place.type

    @property
    def commit(self) -> Commit:
        """How checkpoints come and go here."""
        return commit_of(self.store)

    def fenced(self, above: int = 0) -> Tier:
        """The same tier with a claim on its store, numbered above one that was deleted. Raises Taken, OSError."""
        assert self.run_id is not None
        fence = claim(self.store, self.run_id, self.home, above)
        try:
            self._refuse_copy()  # after the claim: from now on nobody else's checkpoint comes in between
        except (Taken, OSError):
            with contextlib.suppress(OSError):
                fence.release()
            raise
        return Tier(self.place, self.store, self.run_id, fence, self.home)

    def refuse_others(self) -> None:
        """Raise Taken when another run, or another copy of this one, has the place. Raises OSError."""
        if self.run_id is not None:
            refuse_other(self.store, self.run_id, self.home)
        self._refuse_copy()

    def _refuse_copy(self) -> None:
        """Raise Taken when the run's newest checkpoint was made by another copy of it."""
        if self.home is None or self.run_id is None:
            return
        for version in sorted(self.versions(), reverse=True):
            checkpoint = self.get(version)
            if checkpoint is not None:
                refuse_copy(self.store, self.run_id, self.home, checkpoint.manifest.made_by)
                return

    def check_fence(self) -> None:
        """Raise Fenced when somebody else has taken the place over. Raises OSError."""
        if self.fence is not None:
            self.fence.check()

    def _mine(self) -> dict[Version, Checkpoint]:
        """This run's checkpoints; what was looked into before is not read again, for it never changes."""
        names = [folder for folder, _ in self._folders()]
        self._seen = {folder: self._seen[folder] for folder in names if folder in self._seen}
        for folder in names:
            if folder not in self._seen:
                with contextlib.suppress(Unreadable):
                    self._seen[folder] = self._look_into(folder)
        mine = [checkpoint for checkpoint in self._seen.values() if self._is_mine(checkpoint)]
        return {checkpoint.version: checkpoint for checkpoint in mine}

    def scan(self) -> tuple[list[Checkpoint], list[Rejected]]:
        """Find all checkpoints of the run, oldest first, and all folders that look like one but are not usable.

        Raises OSError when the place cannot be read.
        """
        good: list[Checkpoint] = []
        bad: list[Rejected] = []
        for folder, version in self._folders():
            try:
                checkpoint = self._look_into(folder)
            except Unreadable as error:
                if is_somebodys(self.store, folder):
                    continue
                bad.append(Rejected(self.name, f"{self.store.where}/{folder}", version, str(error)))
                continue
            if self._is_mine(checkpoint):
                good.append(checkpoint)
        return sorted(good, key=lambda c: c.version), sorted(bad, key=lambda r: r.version)

    def _is_mine(self, checkpoint: Checkpoint) -> bool:
        return self.run_id is None or checkpoint.manifest.run_id == self.run_id

    def _folders(self) -> Iterator[tuple[str, Version]]:
        for name in self.store.folders():
            version = parse_version(name)
            if version is not None:
                yield name, version

    def versions(self) -> set[Version]:
        """The versions that folders are named after, whatever is in them."""
        return {version for _, version in self._folders()}

    def _look_into(self, folder: str) -> Checkpoint:
        checkpoint = self._open(folder)
        checkpoint.check_sizes()
        return checkpoint

    def check_sizes(self, folder: str, manifest: Manifest) -> None:
        """Raise Unreadable when a file of a folder is missing or has another size than the manifest says."""
        sizes = self.store.files(folder)
        for name, info in manifest.files.items():
            where = f"{self.store.where}/{folder}/{name}"
            if name not in sizes:
                raise Unreadable(f"{where}: missing")
            if sizes[name] != info["bytes"]:
                raise Unreadable(f"{where}: {sizes[name]} bytes, should be {info['bytes']}")

    def _open(self, folder: str) -> Checkpoint:
        try:
            data = self.store.read(folder, MANIFEST, MAX_BYTES)
        except StoreError:
            raise  # the place fails: that says nothing about the checkpoint
        except OSError as error:
            raise Unreadable(f"{self.store.where}/{folder}/{MANIFEST}: {error.strerror or error}") from error
        return Checkpoint(self, parse_manifest(data, folder, self.store.where))

    def read(self, version: Version) -> Checkpoint:
        """The checkpoint of a version; raises Unreadable with the reason when it is not committed here, StoreError."""
        return self._open(version.dirname)

    def get(self, version: Version) -> Checkpoint | None:
        """The run's checkpoint of a version, if it is committed here. Raises StoreError."""
        try:
            checkpoint = self.read(version)
        except Unreadable:
            return None
        return checkpoint if self._is_mine(checkpoint) else None

    def holds(self, version: Version) -> bool:
        """Tell whether a version is committed here with all its files: what it was made from may go. Raises OSError."""
        checkpoint = self.get(version)
        if checkpoint is None:
            return False
        try:
            checkpoint.check_sizes()
        except Unreadable:
            return False
        return True

    def newest(self) -> Version | None:
        """The newest version committed here."""
        return max((checkpoint.version for checkpoint in self.scan()[0]), default=None)

    def write(self, content: Manifest | Part, sources: Mapping[str, Path], told: Progress | None = None) -> Checkpoint:
        """Copy every file of a checkpoint in, read it back, and commit; the same one that is there already is returned.

        What a `Part` has, which must be all of it, comes from memory and is held against the commit records.

        Raises OSError when the place fails (FileExistsError when it has another one of this name), Unreadable when the
        bytes are not what the manifest or the record says (those that are there already, too), Fenced when somebody
        else has taken the place over. Nothing of the try is left then, as far as the place lets itself be cleaned.
        """
        version = content.version
        if (there := self.get(version)) is not None:
            there.check_same(content.files if isinstance(content, Manifest) else content.checked())
            self._settle(there, told)
            return there
        with self.begun(version) as folder:
            if isinstance(content, Part):
                return self.seal(content.manifest([self.add_shard(folder, shard, told) for shard in content.shards]))
            for rank, (name, source) in enumerate(sources.items()):
                if self.store.copy_in(folder, name, source, told) != content.files[name]["digest"]:
                    raise Unreadable(
                        f"{self.store.where}/{folder}/{name}: read back other bytes than were to be written"
                    )
                faults.point("drain.file", version.step, rank)
            return self.seal(content)

    @contextmanager
    def begun(self, version: Version) -> Iterator[str]:
        """The folder to make a checkpoint's files in; what is in it goes when they cannot be made or sealed.

        Raises OSError, Fenced.
        """
        self.check_fence()
        folder = self.commit.begin(version)
        try:
            faults.point("drain.begin", version.step)
            yield folder
        except (OSError, Unreadable, Fenced):
            with contextlib.suppress(OSError):
                self.commit.abandon(version)
            raise

    def add_shard(self, folder: str, shard: Unread, told: Progress | None = None) -> ShardFile:
        """Copy a slot in and describe what the place holds afterwards; raises Unreadable when a byte of it is wrong."""
        sums = shard.sums()
        self.store.copy_in(folder, shard.name, shard.source, told, sums)
        described = shard.arrived(sums, f"{self.store.where}/{folder}")
        faults.point("drain.file", shard.record.step, shard.record.rank)
        return described

    def seal(self, manifest: Manifest) -> Checkpoint:
        """Every file is there: make the folder that was begun a checkpoint."""
        step = manifest.version.step
        manifest = manifest.signed(self.fence.made_by) if self.fence is not None else manifest

        def check() -> None:
            self.check_fence()
            if self.store.renames:
                self._check_staged(manifest)

        faults.point("drain.manifest", step)
        self.commit.seal(manifest.version, manifest.to_bytes(), check)
        faults.point("drain.committed", step)
        return Checkpoint(self, manifest)

    def _check_staged(self, manifest: Manifest) -> None:
        """Raise Unreadable when another writer of the same version, shut out by now, has cleared its files and ours."""
        folder = manifest.version.dirname
        sizes = self.store.files(staging_name(folder)) or self.store.files(folder)
        for name, info in manifest.files.items():
            if sizes.get(name) != info["bytes"]:
                raise Unreadable(f"{self.store.where}/{folder}/{name}: changed by somebody else while it was written")

    def _settle(self, checkpoint: Checkpoint, told: Progress | None) -> None:
        """Check and make durable what another process has committed, which may have died before it was.

        Raises Unreadable, OSError.
        """
        checkpoint.check_sizes()
        checkpoint.check_bytes(told)
        self._make_durable(checkpoint)

    def _make_durable(self, checkpoint: Checkpoint) -> None:
        self.store.sync(checkpoint.folder)
        self.store.sync()

    def prune(
        self,
        rule: Rule,
        verified: Collection[Version] = (),
        spared: Collection[Version] = (),
        *,
        dry_run: bool = False,
        told: Progress | None = None,
    ) -> Pruned:
        """Delete this run's checkpoints that the rule does not keep; nothing goes before the newest kept one is good.

        `verified` are known to be good; else the newest is read first, and one that is damaged does not count and
        is left for a person to look at. `spared` are in use. Raises OSError, Fenced.
        """
        mine = self._mine()
        damaged: list[Rejected] = []
        while mine and (newest := max(mine)) not in verified:
            try:
                mine[newest].check_bytes(told)
                if not dry_run:
                    self._make_durable(mine[newest])
                break
            except Unreadable as error:
                damaged.append(Rejected(self.name, mine.pop(newest).where, newest, str(error)))
        kept = rule.kept(mine)
        removed = [version for version in sorted(mine) if version not in kept and version not in spared]
        others: dict[Version, list[str]] = {}
        for version in removed:
            listed = mine[version].manifest.files
            if found := strangers(self.store, version.dirname, listed):
                others[version] = found
            if not dry_run:
                self.commit.remove(version, listed, self.check_fence)
        return Pruned(removed, sorted(mine.keys() - set(removed)), damaged, others)

    def remove_leftovers(self) -> list[str]:
        """Remove unfinished writes and deletes of ours; call only while nobody else writes here. Returns what is gone.

        Ends early when our fence falls: from then on they may be somebody's work.
        """
        cleaned = []
        for folder in self.store.folders():
            if unfinished(folder) is not None:
                if self.fence is not None and not self.fence.stands():
                    break
                if clean(self.store, folder):
                    cleaned.append(folder)
        return cleaned

    def lock(self) -> FolderLock:
        """Held by the one process that writes into a folder; makes it. Raises OSError and Locked when entered."""
        assert isinstance(self.store, DirectoryStore)
        self.store.make_root()
        return FolderLock(self.store.root)


def open_tier(place: Place, run_id: str | None, spool: Path | None = None, home: Path | None = None) -> Tier:
    """The tier at a place, for the run in the folder `home`. Raises StoreError when the place cannot be opened."""
    return Tier(place, open_store(place, spool), run_id, home=home)


def disk_tier(root: Path, run_id: str | None) -> Tier:
    """The tier in a folder of this machine."""
    return open_tier(Place("disk", str(root)), run_id)
