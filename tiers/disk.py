"""The disk tier: checkpoints that survive a power cut.

Commit: stage every file in a folder of a name never used before, fsync each, read each back, write the manifest
last, rename the folder to its final name, fsync the parent. A folder is a checkpoint only if its name is exact and
its manifest reads and matches. What dtrain did not make is never touched.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import faults
from .copyfile import copy_durable
from .digest import digest, file_digest
from .jsonfile import Unreadable, sync_dir, write_new
from .layout import MANIFEST, Version, is_leftover, parse_version, shard_name
from .lock import FolderLock
from .manifest import Manifest, build, read_manifest
from .memory import MemoryDir, SlotRecord
from .shardfile import Shard, ShardReader


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint in a folder."""

    folder: Path
    manifest: Manifest

    @property
    def version(self) -> Version:
        """The version of the state."""
        return self.manifest.version

    def check_sizes(self) -> None:
        """Raise Unreadable when a file is missing or has another size than the manifest says."""
        for name, info in self.manifest.files.items():
            try:
                size = (self.folder / name).stat().st_size
            except OSError as error:
                raise Unreadable(f"{self.folder / name}: {error.strerror}") from error
            if size != info["bytes"]:
                raise Unreadable(f"{self.folder / name}: {size} bytes, should be {info['bytes']}")


@dataclass(frozen=True)
class Rejected:
    """A folder named like a checkpoint that is not usable, and why."""

    folder: Path
    version: Version
    reason: str


@dataclass(frozen=True)
class DiskTier:
    """The checkpoints of one run in a folder (of every run, when `run_id` is None)."""

    root: Path
    run_id: str | None

    def scan(self) -> tuple[list[Checkpoint], list[Rejected]]:
        """Find all checkpoints of the run, oldest first, and all folders that look like one but are not usable."""
        good: list[Checkpoint] = []
        bad: list[Rejected] = []
        for folder, version in self._folders():
            try:
                checkpoint = Checkpoint(folder, read_manifest(folder))
                checkpoint.check_sizes()
            except Unreadable as error:
                bad.append(Rejected(folder, version, str(error)))
                continue
            if self._is_mine(checkpoint):
                good.append(checkpoint)
        return sorted(good, key=lambda c: c.version), sorted(bad, key=lambda r: r.version)

    def strangers(self) -> list[Checkpoint]:
        """Checkpoints of other runs in the same folder."""
        return [checkpoint for checkpoint in DiskTier(self.root, None).scan()[0] if not self._is_mine(checkpoint)]

    def _is_mine(self, checkpoint: Checkpoint) -> bool:
        return self.run_id is None or checkpoint.manifest.run_id == self.run_id

    def _folders(self) -> Iterator[tuple[Path, Version]]:
        if not self.root.is_dir():
            return
        for entry in sorted(self.root.iterdir()):
            version = parse_version(entry.name)
            if version is not None and not entry.is_symlink() and entry.is_dir():
                yield entry, version

    def get(self, version: Version) -> Checkpoint | None:
        """The run's checkpoint of a version, if it is committed here."""
        try:
            checkpoint = Checkpoint(self.root / version.dirname, read_manifest(self.root / version.dirname))
        except Unreadable:
            return None
        return checkpoint if self._is_mine(checkpoint) else None

    def lock(self) -> FolderLock:
        """Held by the one process that writes here; makes the folder. Raises OSError and Locked when entered."""
        self.root.mkdir(parents=True, exist_ok=True)
        return FolderLock(self.root)

    def write(self, memory: MemoryDir, records: Sequence[SlotRecord]) -> Checkpoint:
        """Carry a whole version from memory to disk and commit it. Raises OSError or Unreadable."""
        version = records[0].version
        staging = self.root / f".tmp-{version.dirname}"
        final = self.root / version.dirname
        if (there := self.get(version)) is not None:
            return there
        self.root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
            faults.point("drain.begin", version.step)
            shards = [_copy_shard(memory, record, staging) for record in records]
            manifest = build(version, shards)
            faults.point("drain.manifest", version.step)
            write_new(staging / MANIFEST, manifest.to_bytes(), durable=True)
            sync_dir(staging)
            faults.point("drain.rename", version.step)
            _rename_new(staging, final)
            sync_dir(self.root)
            faults.point("drain.committed", version.step)
        except (OSError, Unreadable):
            shutil.rmtree(staging, ignore_errors=True)
            raise
        return Checkpoint(final, manifest)

    def prune(self, keep: int) -> list[Version]:
        """Delete this run's checkpoints beyond the newest `keep`; returns what was deleted."""
        mine = self.scan()[0]
        removed = []
        for checkpoint in mine[: max(0, len(mine) - max(1, keep))]:
            trash = self.root / f".trash-{checkpoint.version.dirname}"
            shutil.rmtree(trash, ignore_errors=True)
            checkpoint.folder.rename(trash)
            sync_dir(self.root)
            faults.point("prune.renamed", checkpoint.version.step)
            shutil.rmtree(trash, ignore_errors=True)
            removed.append(checkpoint.version)
        return removed

    def remove_leftovers(self) -> list[Path]:
        """Remove unfinished writes and deletes of ours; call only while holding the drainer's lock."""
        if not self.root.is_dir():
            return []
        left = [entry for entry in self.root.iterdir() if is_leftover(entry.name) and entry.is_dir()]
        for entry in left:
            shutil.rmtree(entry, ignore_errors=True)
        return left


def _copy_shard(memory: MemoryDir, record: SlotRecord, staging: Path) -> tuple[str, Shard, SlotRecord, int, str]:
    """Copy one rank's slot, read it back, and describe it for the manifest."""
    source = memory.file_of(record)
    name = shard_name(record.rank)
    with ShardReader(source) as reader:
        if reader.header_digest != record.header_digest:
            raise Unreadable(f"{source}: the header does not match the commit record")
        shard = reader.shard
        for entry, data, wanted in zip(shard.entries, reader.all_data(), record.digests, strict=True):
            with data:
                if digest(data) != wanted:
                    raise Unreadable(f"{source}: {entry.name} does not match the commit record")
    content = file_digest(source)
    nbytes = copy_durable(source, staging / name)
    _drop_cache(staging / name)
    if file_digest(staging / name) != content:
        raise Unreadable(f"{staging / name}: read back other bytes than were written")
    faults.point("drain.file", record.step, record.rank)
    return name, shard, record, nbytes, content


def _drop_cache(path: Path) -> None:
    """Let the next read come from the disk, not from the page cache."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _rename_new(staging: Path, final: Path) -> None:
    """Rename to a name that must not hold a checkpoint yet; an unusable folder there is an error."""
    if final.exists():
        raise FileExistsError(f"{final} exists already")
    staging.rename(final)
