"""What carrying a checkpoint from memory to disk costs, against `cp` with fsync and against torch's DCP.

    python -m tests.benchmarks.storage [--mib 1024] [--blocks 7] [--folder DIR] [--no-dcp]

One state of the given size lies in tmpfs. Each block does, in an order that turns from block to block:

    cp       cp of the file, fsync of file and folder, then one digest pass over the source
    dtrain   what the drainer does: every slot byte checked, copied, fsynced, read back past the cache, committed;
             also by the processor's time, for the planner (`planners/devices.py: DRAIN_CPU_S_PER_BYTE`)
    verify   `dtrain verify` of that checkpoint: every byte read past the cache
    DCP      torch.distributed.checkpoint.save of the same tensors, then fsync of what it wrote

Ratios are taken within a block; medians are quoted with their quartiles. Then the time to commit a manifest of 10,000
shards and to list 1,000 checkpoints. Nothing here is asserted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtrain.tiers.format.digest import digest, file_digest
from dtrain.tiers.format.layout import RunDir, Version, shard_name
from dtrain.tiers.format.manifest import ShardFile, build, parse_manifest
from dtrain.tiers.format.shardfile import Entry, Shard
from dtrain.tiers.memory.gather import gather
from dtrain.tiers.memory.slots import TMPFS, MemoryDir, Slot, SlotRecord
from dtrain.tiers.tier import Tier, disk_tier

TENSORS = 64
RUN_ID = "bench"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--folder", default=".", help="where the disk to measure is mounted")
    parser.add_argument("--no-dcp", action="store_true", help="leave torch out")
    return parser.parse_args()


def fill(memory: MemoryDir, mib: int) -> SlotRecord:
    """One rank's slot of `mib` MiB of random bytes, committed."""
    rows = mib * 2**20 // TENSORS // 4 // 1024
    entries = tuple(
        Entry(f"model.layer{i}", "F32", (rows, 1024), (0, 0), (rows, 1024), rows * 4096) for i in range(TENSORS)
    )
    shard = Shard(0, 1, RUN_ID, (*entries, Entry("rng.python", "U8", (8,), (0,), (8,), 8)))
    slot = Slot(memory.path, 0, 1, 0)
    header, digests = shard.header(), []
    with slot.file.open("wb") as file:
        file.write(header)
        for entry in shard.entries:
            data = os.urandom(entry.nbytes)
            digests.append(digest(data))
            file.write(data)
    meta = {"data": {"samples": 0}, "ties": {}}
    record = SlotRecord(RUN_ID, 1, 1, 0, 1, 0, digest(header), tuple(digests), meta)
    slot.commit(record, drain=False)
    return record


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def by_cp(source: Path, folder: Path) -> None:
    """What a careful person does by hand."""
    target = folder / "copy.safetensors"
    subprocess.run(["cp", str(source), str(target)], check=True)
    sync(target)
    sync(folder)
    file_digest(source)


def by_dcp(state: Any, folder: Path) -> None:
    """Torch's own, made durable, for it does not fsync files by itself in every version."""
    from torch.distributed.checkpoint.state_dict_saver import save

    target = folder / "dcp"
    save(state, checkpoint_id=target, no_dist=True)
    for path in target.iterdir():
        sync(path)
    sync(folder)


def timed(work: Callable[[], object]) -> float:
    os.sync()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def torch_state(memory: MemoryDir, record: SlotRecord) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(memory.file_of(record)))


def measure(options: argparse.Namespace, memory: MemoryDir, place: Path) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds of each job, and the processor's of the drains."""
    record = fill(memory, options.mib)
    state = None if options.no_dcp else torch_state(memory, record)
    times: dict[str, list[float]] = {}
    worked_s: list[float] = []
    for block in range(options.blocks + 1):  # the first warms up
        folder = place / f"block-{block}"
        folder.mkdir()
        tier = disk_tier(folder / "tier", RUN_ID).fenced()

        def drain(tier: Tier = tier) -> None:
            began = time.process_time()
            tier.write(*gather(memory, [record]))
            worked_s.append(time.process_time() - began)

        jobs: list[tuple[str, Callable[[], object]]] = [
            ("cp", lambda folder=folder: by_cp(memory.file_of(record), folder)),  # type: ignore[misc]
            ("dtrain", drain),
        ]
        if state is not None:
            jobs.append(("DCP", lambda folder=folder: by_dcp(state, folder)))  # type: ignore[misc]
        shift = block % len(jobs)
        for name, work in jobs[shift:] + jobs[:shift]:
            seconds = timed(work)
            if block:
                times.setdefault(name, []).append(seconds)
        seconds = timed(tier.read(Version(1, 1)).check_bytes)
        if block:
            times.setdefault("verify", []).append(seconds)
        shutil.rmtree(folder)
    return times, worked_s[1:]


def quartiles(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f}"
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{statistics.median(values):.3f} ({low:.3f} to {high:.3f})"


def many_shards(place: Path, world: int = 10_000) -> tuple[float, float, int]:
    """Seconds to build and commit, and to read back, a manifest of `world` shards; its bytes."""
    shards = []
    for rank in range(world):
        entries = (
            *(Entry(f"model.block{t}.weight", "F32", (1, 64), (rank, 0), (world, 64), 256) for t in range(4)),
            Entry("rng.python", "U8", (8,), (0,), (8,), 8),
        )
        content = digest(str(rank).encode())
        shards.append(ShardFile(shard_name(rank), rank, 8192, content, content, entries, (content,) * len(entries)))
    tier, version = disk_tier(place / "many", RUN_ID), Version(1, 1)
    folder = tier.commit.begin(version)
    started = time.perf_counter()
    manifest = build(version, world, RUN_ID, {"data": {"samples": 0}}, shards)
    data = manifest.to_bytes()
    tier.store.create(folder, shard_name(0), b"")
    tier.commit.seal(version, data, lambda: None)
    committed = time.perf_counter()
    parse_manifest(data, version.dirname, "bench")
    return committed - started, time.perf_counter() - committed, len(data)


def many_checkpoints(place: Path, memory: MemoryDir, count: int = 1_000) -> float:
    """Seconds of the whole command `dtrain ls` over `count` checkpoints."""
    from dtrain.specs.load import load_spec, spec_to_json
    from dtrain.tiers.format.jsonfile import dumps, replace

    run = RunDir(place / "run")
    run.root.mkdir()
    spec = load_spec(Path(__file__).parents[2] / "specs/examples/tiny-gpt.yaml", ["tiers=[{type: disk, every: 1}]"])
    replace(run.spec, dumps(spec_to_json(spec)))
    replace(run.run, dumps({"run_id": RUN_ID}))
    record = fill(memory, 1)
    tier = disk_tier(run.disk("checkpoints"), RUN_ID)
    first = tier.write(*gather(memory, [record]))
    manifest = first.manifest
    folder = tier.store.where
    for step in range(2, count + 1):
        body = {**manifest.body, "step": step}
        target = Path(folder) / Version(1, step).dirname
        target.mkdir()
        for name in manifest.files:
            os.link(Path(folder) / first.folder / name, target / name)
        (target / "manifest.json").write_bytes(type(manifest)(body).to_bytes())
    return min(
        timed(
            lambda: subprocess.run(
                [str(Path(sys.executable).with_name("dtrain")), "ls", str(run.root)], check=True, stdout=-3
            )
        )
        for _ in range(3)
    )


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    options = arguments()
    memory = MemoryDir(Path(tempfile.mkdtemp(prefix="dtrain-bench-", dir=TMPFS)))
    place = Path(tempfile.mkdtemp(prefix="dtrain-bench-", dir=options.folder))
    try:
        times, worked_s = measure(options, memory, place)
        say(f"{options.mib} MiB from tmpfs to {options.folder}, {options.blocks} blocks; seconds, median (quartiles)")
        for name, values in times.items():
            say(f"  {name:7} {quartiles(values)}   {options.mib / statistics.median(values):7.0f} MiB/s")
        for name in ("cp", "DCP"):
            if name in times:
                ratios = [ours / theirs for ours, theirs in zip(times["dtrain"], times[name], strict=True)]
                say(f"  dtrain / {name}: {quartiles(ratios)}")
        say(f"  processor time of dtrain, s per GiB: {quartiles([each * 1024 / options.mib for each in worked_s])}")
        commit, read, size = many_shards(place)
        say(f"manifest of 10,000 shards, {size / 2**20:.1f} MiB: commit {commit:.3f} s, read, checked {read:.3f} s")
        say(f"dtrain ls of 1,000 checkpoints, the whole command: {many_checkpoints(place, memory):.3f} s")
    finally:
        memory.remove()
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
