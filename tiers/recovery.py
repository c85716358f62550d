"""Which checkpoints a run could continue from, newest first, and how to read one whatever its tier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .digest import digest, state_digest
from .disk import Checkpoint, DiskTier, Rejected
from .jsonfile import Unreadable
from .layout import Version
from .manifest import Manifest, read_manifest
from .memory import MemoryDir, SlotRecord
from .shardfile import Entry, ShardReader


@dataclass(frozen=True)
class Candidate:
    """A checkpoint to continue from."""

    tier: str
    version: Version
    folder: str

    def to_json(self) -> dict[str, Any]:
        """Form for the job file."""
        return {
            "tier": self.tier,
            "step": self.version.step,
            "attempt": self.version.attempt,
            "folder": self.folder,
        }


def candidate_from_json(value: dict[str, Any]) -> Candidate:
    """Read the form of the job file."""
    return Candidate(value["tier"], Version(attempt=value["attempt"], step=value["step"]), value["folder"])


def find(memory: MemoryDir | None, disk: DiskTier | None) -> tuple[list[Candidate], list[Rejected]]:
    """All whole checkpoints, newest first and the faster tier first, and the folders that are not usable."""
    found: list[tuple[Version, int, Candidate]] = []
    bad: list[Rejected] = []
    for version in memory.whole() if memory is not None else ():
        assert memory is not None
        found.append((version, 1, Candidate("memory", version, str(memory.path))))
    if disk is not None:
        good, bad = disk.scan()
        found += [(c.version, 0, Candidate("disk", c.version, str(c.folder))) for c in good]
    found.sort(key=lambda item: item[:2], reverse=True)
    return [candidate for _, _, candidate in found], bad


@dataclass(frozen=True)
class Source:
    """One shard file with the digests its content must have."""

    path: Path
    header_digest: str
    digests: dict[str, str]


@dataclass(frozen=True)
class Opened:
    """A candidate with its description read: where the shards are, and what the manifest says beside tensors."""

    candidate: Candidate
    sources: tuple[Source, ...]
    meta: dict[str, Any]
    world: int


def open_candidate(candidate: Candidate) -> Opened:
    """Read a candidate's description; raises Unreadable with the reason."""
    if candidate.tier == "memory":
        memory = MemoryDir(Path(candidate.folder))
        records = memory.whole().get(candidate.version)
        if records is None:
            raise Unreadable(f"{candidate.version} is no longer whole in memory")
        return _open_memory(candidate, memory, records)
    return open_checkpoint(Checkpoint(Path(candidate.folder), read_manifest(Path(candidate.folder))))


def _open_memory(candidate: Candidate, memory: MemoryDir, records: list[SlotRecord]) -> Opened:
    sources = []
    for record in records:
        path = memory.file_of(record)
        with ShardReader(path) as reader:
            names = [entry.name for entry in reader.shard.entries]
        if len(names) != len(record.digests):
            raise Unreadable(f"{path}: the commit record speaks of other tensors")
        sources.append(Source(path, record.header_digest, dict(zip(names, record.digests, strict=True))))
    return Opened(candidate, tuple(sources), records[0].meta, records[0].world)


def open_checkpoint(checkpoint: Checkpoint) -> Opened:
    """Describe a checkpoint on disk."""
    manifest = checkpoint.manifest
    digests = _digests_by_file(manifest)
    sources = tuple(
        Source(checkpoint.folder / name, info["header_digest"], digests[name]) for name, info in manifest.files.items()
    )
    candidate = Candidate("disk", manifest.version, str(checkpoint.folder))
    return Opened(candidate, sources, manifest.body, manifest.body["world"])


def _digests_by_file(manifest: Manifest) -> dict[str, dict[str, str]]:
    digests: dict[str, dict[str, str]] = {name: {} for name in manifest.files}
    for name, info in manifest.tensors.items():
        for piece in info["pieces"]:
            digests[piece["file"]][name] = piece["digest"]
    for info in manifest.body["rng"].values():
        digests[info["file"]].update(info["tensors"])
    return digests


@dataclass(frozen=True)
class Content:
    """One entry of a shard with its verified bytes; the view is valid until the next one is asked for."""

    rank: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    global_shape: tuple[int, ...]
    is_state: bool
    data: memoryview


def contents(opened: Opened) -> Iterator[Content]:
    """Read every entry of every shard, verified; raises Unreadable at the first whose digest is not right."""
    for source in opened.sources:
        with ShardReader(source.path) as reader:
            if reader.header_digest != source.header_digest:
                raise Unreadable(f"{source.path}: the header does not match its digest")
            offsets = reader.shard.offsets()
            for index, entry in enumerate(reader.shard.entries):
                with reader.data(index, offsets) as data:
                    if digest(data) != source.digests.get(entry.name):
                        raise Unreadable(f"{source.path}: {entry.name} does not match its digest")
                    yield Content(
                        reader.shard.rank, entry.name, entry.dtype, entry.shape, entry.start, entry.global_shape,
                        entry.is_state, data,
                    )  # fmt: skip


def verify(opened: Opened) -> None:
    """Read and check every byte; raises Unreadable."""
    for content in contents(opened):
        content.data.release()


def digest_of(opened: Opened) -> str:
    """The state digest of a checkpoint: whole tensors by their stored digest, divided ones by reading them."""
    whole: dict[str, tuple[str, str, tuple[int, ...], str]] = {}
    divided: dict[str, list[tuple[int, bytes]]] = {}
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for content in contents(opened):
        if not content.is_state:
            continue
        if content.shape == content.global_shape:
            whole[content.name] = (content.name, content.dtype, content.global_shape, digest(content.data))
        else:
            shapes[content.name] = (content.dtype, content.global_shape)
            divided.setdefault(content.name, []).append((content.start, bytes(content.data)))
    for name, parts in divided.items():
        data = b"".join(part for _, part in sorted(parts))
        whole[name] = (name, *shapes[name], digest(data))
    return state_digest(whole.values())


def entries_of(opened: Opened) -> Iterator[Entry]:
    """What lies in the shards, from their headers alone."""
    for source in opened.sources:
        with ShardReader(source.path) as reader:
            yield from reader.shard.entries
