"""Snapshots made without torch, for tests of the storage side."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dtrain.planners.sharding.shards import TensorInfo, divide
from dtrain.specs.dtypes import DTYPE_BYTES
from dtrain.tiers.format.digest import digest, state_digest
from dtrain.tiers.format.jsonfile import dumps, replace
from dtrain.tiers.format.layout import RunDir
from dtrain.tiers.format.manifest import Manifest
from dtrain.tiers.format.shardfile import Entry, Shard
from dtrain.tiers.memory.gather import gather
from dtrain.tiers.memory.slots import MemoryDir, Slot, SlotRecord
from dtrain.tiers.reading.recovery import Opened, contents
from dtrain.tiers.tier import disk_tier

TENSORS = [
    TensorInfo("model.a", "F32", (37, 50)),
    TensorInfo("model.scalar", "F32", ()),
    TensorInfo("model.empty", "F32", (0, 4)),
    TensorInfo("model.b", "BF16", (5000,)),
]
RUN_ID = "feed"


def value_of(info: TensorInfo, step: int) -> bytes:
    """The bytes that a tensor has at a step."""
    pattern = digest(f"{info.name} {step}".encode()).encode()
    return (pattern * (info.nbytes // len(pattern) + 1))[: info.nbytes]


def shard_of(rank: int, world: int) -> Shard:
    """The layout of one rank's file."""
    entries = [
        Entry(p.tensor.name, p.tensor.dtype, p.shape, p.offset, p.tensor.shape, p.nbytes)
        for p in divide(TENSORS, world)[rank]
    ]
    return Shard(rank, world, RUN_ID, (*entries, Entry("rng.python", "U8", (9,), (0,), (9,), 9)))


def cut_out(whole: bytes, entry: Entry) -> bytes:
    """The bytes of a piece, from those of the whole tensor."""
    width = DTYPE_BYTES[entry.dtype]
    array = np.frombuffer(whole, np.uint8).reshape(*entry.global_shape, width)
    box = tuple(slice(begin, begin + size) for begin, size in zip(entry.offset, entry.shape, strict=True))
    return array[box].tobytes()


def put(memory: MemoryDir, rank: int, world: int, slot: int, step: int, attempt: int = 1, drain: bool = False) -> Slot:
    """Fill and commit one slot."""
    return fill(memory, shard_of(rank, world), {info.name: info for info in TENSORS}, slot, step, attempt, drain)


def fill(
    memory: MemoryDir,
    shard: Shard,
    infos: Mapping[str, TensorInfo],
    slot: int,
    step: int,
    attempt: int = 1,
    drain: bool = False,
) -> Slot:
    """Fill and commit one slot with the pieces of a shard."""
    target = Slot(memory.path, shard.rank, shard.world, slot)
    data = bytearray()
    digests = []
    for entry in shard.entries:
        state = entry.is_state
        piece = cut_out(value_of(infos[entry.name], step), entry) if state else bytes([shard.rank] * entry.nbytes)
        data += piece
        digests.append(digest(piece))
    target.file.write_bytes(shard.header() + data)
    meta = {"data": {"samples": step * 8}, "ties": {}} if shard.rank == 0 else {}
    record = SlotRecord(
        RUN_ID, step, attempt, shard.rank, shard.world, slot, digest(shard.header()), tuple(digests), meta
    )
    target.commit(record, drain=drain)
    return target


def snapshot(
    memory: MemoryDir, step: int, *, world: int = 2, slot: int = 0, attempt: int = 1, drain: bool = False
) -> None:
    """Fill and commit the same slot of every rank."""
    for rank in range(world):
        put(memory, rank, world, slot, step, attempt, drain)


class Place:
    """A run's folders for one test."""

    def __init__(self, folder: Path) -> None:
        """Make them below `folder`."""
        self.run = RunDir(folder / "run")
        self.run.logs.mkdir(parents=True)
        self.memory = MemoryDir(folder / "memory")
        self.memory.path.mkdir()
        replace(self.run.run, dumps({"run_id": RUN_ID}))
        self.root = self.run.disk("checkpoints")
        self.disk = disk_tier(self.root, RUN_ID)

    def store(self, step: int, attempt: int = 1, world: int = 2) -> Path:
        """Commit a checkpoint of `step` on disk; returns its folder."""
        snapshot(self.memory, step, world=world, attempt=attempt)
        version = max(v for v in self.memory.whole() if v.step == step)
        return self.root / self.disk.write(*gather(self.memory, self.memory.whole()[version])).folder

    def tree(self) -> list[str]:
        """Names of everything in the disk tier."""
        return sorted(set(os.listdir(self.root)) - {".fence"}) if self.root.is_dir() else []


def digest_of(opened: Opened) -> str:
    """The state digest of a checkpoint, worked out the plain way: everything in memory at once."""
    found: dict[str, tuple[str, tuple[int, ...], np.ndarray]] = {}
    for content in contents(opened):
        if content.is_state:
            width = DTYPE_BYTES[content.dtype]
            empty = np.zeros((*content.global_shape, width), np.uint8)
            _, _, array = found.setdefault(content.name, (content.dtype, content.global_shape, empty))
            box = tuple(slice(begin, begin + size) for begin, size in zip(content.offset, content.shape, strict=True))
            array[box] = np.frombuffer(content.data, np.uint8).reshape(*content.shape, width)
    return state_digest((name, dtype, shape, digest(a.tobytes())) for name, (dtype, shape, a) in found.items())


def manifest_of(memory: MemoryDir, records: Sequence[SlotRecord]) -> tuple[Manifest, dict[str, Path]]:
    """The manifest that a snapshot's checkpoint will have, and the file of each name in it."""
    part, sources = gather(memory, records)
    return part.manifest([shard.checked() for shard in part.shards]), sources
