"""What can be resumed from, in every tier, and its bytes, verified as they are read."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...specs.dtypes import DTYPE_BYTES
from ..format.digest import digest
from ..format.jsonfile import Unreadable
from ..format.layout import Version, shard_name
from ..format.manifest import Manifest
from ..format.shardfile import Entry, Shard, ShardReader
from ..memory.runs import by_entry
from ..memory.slots import MemoryDir, SlotRecord
from ..stores.store import Place, place_from_json
from ..tier import Checkpoint, Rejected, Tier, open_tier

MEMORY = "memory"
PEER = "peer"
"""A version in memory of which some nodes have lost their part, and others have copies of it."""


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
        return self.place.url if self.tier in (MEMORY, PEER) else f"{self.place.url.rstrip('/')}/{self.version.dirname}"

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


Parts = dict[int, tuple[Path, SlotRecord]]
"""Shards of one version by rank: file and commit record."""


def parts_in_memory(memory: MemoryDir) -> dict[Version, Parts]:
    """Every shard in a node's memory, by version: those of its own ranks, and copies that it keeps for other nodes."""
    found: dict[Version, Parts] = {}
    for slot in memory.every_slot():
        record = slot.record()
        if record is not None and (record.rank, record.world) == (slot.rank, slot.world):
            found.setdefault(record.version, {}).setdefault(record.rank, (slot.file, record))
    return found


def is_complete(parts: Parts) -> bool:
    """Tell whether all shards of a version are among its parts."""
    return any(parts.keys() == set(range(record.world)) for _, record in parts.values())


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
    """One rank's shard file, and what must lie in it; `open` gives a file of this machine."""

    open: Callable[[], AbstractContextManager[Path]]
    where: str
    rank: int
    nbytes: int
    header_digest: str
    entries: tuple[Entry, ...]
    """In any order. A manifest says nothing of a random state's size: it is one of no bytes here."""
    digests: Mapping[str, str]
    """Name of each entry → digest of its bytes."""


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
        return _open_memory(candidate, [(memory.file_of(record), record) for record in records])
    if candidate.tier == PEER:
        parts = parts_in_memory(MemoryDir(Path(candidate.place.url))).get(candidate.version, {})
        if not is_complete(parts):
            raise Unreadable(f"{candidate.version} is no longer whole in this node's memory")
        return _open_memory(candidate, [parts[rank] for rank in sorted(parts)])
    try:
        tier = open_tier(candidate.place, None, spool)
        return open_checkpoint(candidate, tier.read(candidate.version))
    except OSError as error:
        raise Unreadable(f"{candidate.folder}: {error.strerror or error}") from error


def _open_memory(candidate: Candidate, found: list[tuple[Path, SlotRecord]]) -> Opened:
    sources = []
    for path, record in found:
        with ShardReader(path) as reader:
            shard, nbytes = reader.shard, reader.data_start + reader.shard.data_bytes
            if reader.header_digest != record.header_digest:
                raise Unreadable(f"{path}: the header does not match its digest")
            each = by_entry(record, reader).digests
        digests = {entry.name: content for entry, content in zip(shard.entries, each, strict=True)}
        sources.append(
            Source(_as_it_is(path), str(path), record.rank, nbytes, record.header_digest, shard.entries, digests)
        )
    first = found[0][1]
    return Opened(candidate, tuple(sources), first.meta, first.world)


def _as_it_is(path: Path) -> Callable[[], AbstractContextManager[Path]]:
    return lambda: contextlib.nullcontext(path)


def open_checkpoint(candidate: Candidate, checkpoint: Checkpoint) -> Opened:
    """Describe a checkpoint of a slower tier."""
    manifest, store = checkpoint.manifest, checkpoint.tier.store
    stored = _stored(manifest)

    def opener(name: str) -> Callable[[], AbstractContextManager[Path]]:
        return lambda: store.local(checkpoint.folder, name)

    def source(rank: int, name: str) -> Source:
        info, held = manifest.files[name], stored[name]
        entries = tuple(entry for entry, _ in held)
        digests = {entry.name: content for entry, content in held}
        where = f"{checkpoint.where}/{name}"
        return Source(opener(name), where, rank, info["bytes"], info["header_digest"], entries, digests)

    world = manifest.body["world"]
    return Opened(candidate, tuple(source(rank, shard_name(rank)) for rank in range(world)), manifest.body, world)


def _stored(manifest: Manifest) -> dict[str, list[tuple[Entry, str]]]:
    """File name → what lies in it, with its digest."""
    stored: dict[str, list[tuple[Entry, str]]] = {name: [] for name in manifest.files}
    for name, info in manifest.tensors.items():
        dtype, whole = info["dtype"], tuple(info["shape"])
        for piece in info["pieces"]:
            shape = tuple(piece["shape"])
            entry = Entry(name, dtype, shape, tuple(piece["offset"]), whole, math.prod(shape) * DTYPE_BYTES[dtype])
            stored[piece["file"]].append((entry, piece["digest"]))
    for info in manifest.body["rng"].values():
        stored[info["file"]] += [(Entry(name, "U8", (0,), (0,), (0,), 0), one) for name, one in info["tensors"].items()]
    return stored


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


Wanted = Callable[[Entry, int], bool]
"""Tells whether an entry that a rank (the number) has stored is to be read."""


def contents(opened: Opened, wanted: Wanted | None = None) -> Iterator[Content]:
    """Read every entry that is `wanted` (all without it) of every shard, verified.

    A file with none of them is neither opened nor fetched. Raises Unreadable at the first entry whose digest is not
    right, and at a header that is not what it was or does not agree with the manifest.
    """
    for source in opened.sources:
        if wanted is not None and not any(wanted(entry, source.rank) for entry in source.entries):
            continue
        with local(source) as path, checked(source, path) as reader:
            offsets = reader.shard.offsets()
            for index, entry in enumerate(reader.shard.entries):
                if wanted is None or wanted(entry, source.rank):
                    with verified(source, reader, index, offsets) as data:
                        yield Content(
                            source.rank, entry.name, entry.dtype, entry.shape, entry.offset, entry.global_shape,
                            entry.is_state, data,
                        )  # fmt: skip


def verified(source: Source, reader: ShardReader, index: int, offsets: Sequence[int]) -> memoryview:
    """The bytes of an entry, to be released before the file is closed; raises Unreadable when they are not right."""
    data, name = reader.data(index, offsets), reader.shard.entries[index].name
    if digest(data) != source.digests[name]:
        data.release()
        raise Unreadable(f"{source.where}: {name} does not match its digest")
    return data


@contextlib.contextmanager
def local(source: Source) -> Iterator[Path]:
    """Have a shard at hand as a file; a store that fails now is a shard that cannot be read. Raises Unreadable."""
    with contextlib.ExitStack() as stack:
        try:
            path = stack.enter_context(source.open())
        except OSError as error:
            raise Unreadable(f"{source.where}: {error.strerror or error}") from error
        yield path


def checked(source: Source, path: Path) -> ShardReader:
    """Open a shard that is at hand; raises Unreadable when its header is not what is known of it."""
    reader = ShardReader(path)
    try:
        if reader.header_digest != source.header_digest:
            raise Unreadable(f"{source.where}: the header does not match its digest")
        _check_same(source, reader.shard)
    except Unreadable:
        reader.close()
        raise
    return reader


def _check_same(source: Source, shard: Shard) -> None:
    """What the header says lies in the file is what is known of it from elsewhere."""
    if shard.rank != source.rank:
        raise Unreadable(f"{source.where}: it is the shard of rank {shard.rank}")
    known = {entry.name: entry for entry in source.entries}
    for entry in shard.entries:
        wanted = known.pop(entry.name, None)
        if wanted is None or (entry.is_state and entry != wanted):
            raise Unreadable(f"{source.where}: {entry.name!r} is not the piece that the manifest speaks of")
    if known:
        raise Unreadable(f"{source.where}: {min(known)!r} is missing in it")


def verify(opened: Opened) -> None:
    """Read and check every byte; raises Unreadable."""
    for content in contents(opened):
        content.data.release()
