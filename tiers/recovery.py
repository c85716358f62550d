"""What can be resumed from, in every tier, and its bytes, verified as they are read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .digest import digest
from .jsonfile import Unreadable
from .layout import Version
from .manifest import Manifest
from .memory import MemoryDir, SlotRecord
from .shardfile import Entry, ShardReader
from .store import Place, place_from_json
from .tier import Checkpoint, Rejected, Tier, open_tier

MEMORY = "memory"


@dataclass(frozen=True)
class Candidate:
    """A checkpoint to continue from."""

    version: Version
    place: Place

    @property
    def tier(self) -> str:
        """Type of the tier it lies in."""
        return self.place.type

    @property
    def folder(self) -> str:
        """Where it is, in words a person can use."""
        return self.place.url if self.tier == MEMORY else f"{self.place.url.rstrip('/')}/{self.version.dirname}"

    def to_json(self) -> dict[str, Any]:
        """Form for the job file."""
        return {
            "tier": self.tier,
            "step": self.version.step,
            "attempt": self.version.attempt,
            "folder": self.folder,
            "place": self.place.to_json(),
        }


def candidate_from_json(value: dict[str, Any]) -> Candidate:
    """Read the form of the job file."""
    return Candidate(Version(attempt=value["attempt"], step=value["step"]), place_from_json(value["place"]))


def in_memory(memory: MemoryDir) -> list[Candidate]:
    """The whole snapshots of a node."""
    return [Candidate(version, Place(MEMORY, str(memory.path))) for version in memory.whole()]


@dataclass(frozen=True)
class Found:
    """What a run has in all tiers."""

    candidates: list[Candidate]
    """Whole checkpoints, newest first and the faster tier first."""
    rejected: list[Rejected]
    """Folders named like a checkpoint that are not usable."""
    unreachable: list[str]
    """Tiers that could not be looked into, and why."""


def find(memory: MemoryDir | None, tiers: Iterable[Tier]) -> Found:
    """Look into all tiers; `tiers` are those beside memory, fastest first."""
    found = [(candidate.version, 0, candidate) for candidate in (in_memory(memory) if memory is not None else [])]
    bad: list[Rejected] = []
    unreachable: list[str] = []
    for order, tier in enumerate(tiers):
        try:
            good, rejected = tier.scan()
        except OSError as error:
            unreachable.append(f"the {tier.name} tier {tier.store.where} cannot be read: {error.strerror or error}")
            continue
        found += [(checkpoint.version, -1 - order, candidate_of(checkpoint)) for checkpoint in good]
        bad += rejected
    found.sort(key=lambda item: item[:2], reverse=True)
    return Found([candidate for _, _, candidate in found], bad, unreachable)


def candidate_of(checkpoint: Checkpoint) -> Candidate:
    """A checkpoint of a slower tier as a candidate."""
    return Candidate(checkpoint.version, checkpoint.tier.place)


@dataclass(frozen=True)
class Source:
    """One shard file with the digests its content must have; `open` gives a file of this machine."""

    open: Callable[[], AbstractContextManager[Path]]
    where: str
    nbytes: int
    header_digest: str
    digests: dict[str, str]


@dataclass(frozen=True)
class Opened:
    """A candidate with its description read: where the shards are, and what the manifest says beside tensors."""

    candidate: Candidate
    sources: tuple[Source, ...]
    meta: dict[str, Any]
    world: int

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(source.nbytes for source in self.sources)


def open_candidate(candidate: Candidate, spool: Path | None = None) -> Opened:
    """Read a candidate's description; raises Unreadable with the reason. `spool`: for copies of remote files."""
    if candidate.tier == MEMORY:
        memory = MemoryDir(Path(candidate.place.url))
        records = memory.whole().get(candidate.version)
        if records is None:
            raise Unreadable(f"{candidate.version} is no longer whole in memory")
        return _open_memory(candidate, memory, records)
    try:
        tier = open_tier(candidate.place, None, spool)
        return open_checkpoint(candidate, tier.read(candidate.version))
    except OSError as error:
        raise Unreadable(f"{candidate.folder}: {error.strerror or error}") from error


def _open_memory(candidate: Candidate, memory: MemoryDir, records: list[SlotRecord]) -> Opened:
    sources = []
    for record in records:
        path = memory.file_of(record)
        with ShardReader(path) as reader:
            names = [entry.name for entry in reader.shard.entries]
            nbytes = reader.data_start + reader.shard.data_bytes
        if len(names) != len(record.digests):
            raise Unreadable(f"{path}: the commit record speaks of other tensors")
        digests = dict(zip(names, record.digests, strict=True))
        sources.append(Source(_as_it_is(path), str(path), nbytes, record.header_digest, digests))
    return Opened(candidate, tuple(sources), records[0].meta, records[0].world)


def _as_it_is(path: Path) -> Callable[[], AbstractContextManager[Path]]:
    return lambda: contextlib.nullcontext(path)


def open_checkpoint(candidate: Candidate, checkpoint: Checkpoint) -> Opened:
    """Describe a checkpoint of a slower tier."""
    manifest, store = checkpoint.manifest, checkpoint.tier.store
    digests = _digests_by_file(manifest)

    def opener(name: str) -> Callable[[], AbstractContextManager[Path]]:
        return lambda: store.local(checkpoint.folder, name)

    sources = tuple(
        Source(opener(name), f"{checkpoint.where}/{name}", info["bytes"], info["header_digest"], digests[name])
        for name, info in manifest.files.items()
    )
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
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]
    is_state: bool
    data: memoryview


def contents(opened: Opened) -> Iterator[Content]:
    """Read every entry of every shard, verified; raises Unreadable at the first whose digest is not right."""
    for source in opened.sources:
        with _reading(source) as reader:
            if reader.header_digest != source.header_digest:
                raise Unreadable(f"{source.where}: the header does not match its digest")
            offsets = reader.shard.offsets()
            for index, entry in enumerate(reader.shard.entries):
                with reader.data(index, offsets) as data:
                    if digest(data) != source.digests.get(entry.name):
                        raise Unreadable(f"{source.where}: {entry.name} does not match its digest")
                    yield Content(
                        reader.shard.rank, entry.name, entry.dtype, entry.shape, entry.offset, entry.global_shape,
                        entry.is_state, data,
                    )  # fmt: skip


@contextlib.contextmanager
def _reading(source: Source) -> Iterator[ShardReader]:
    """Open a shard; a store that fails now is a shard that cannot be read."""
    with contextlib.ExitStack() as stack:
        try:
            path = stack.enter_context(source.open())
        except OSError as error:
            raise Unreadable(f"{source.where}: {error.strerror or error}") from error
        yield stack.enter_context(ShardReader(path))


def verify(opened: Opened) -> None:
    """Read and check every byte; raises Unreadable."""
    for content in contents(opened):
        content.data.release()


def entries_of(opened: Opened) -> Iterator[Entry]:
    """What lies in the shards, from their headers alone."""
    for source in opened.sources:
        with _reading(source) as reader:
            yield from reader.shard.entries
