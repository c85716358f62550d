"""Several nodes, one shared folder: drainers as real processes, one per node, each with memory of its own."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.tiers.build import RUN_ID, TENSORS, Place, put, value_of

from dtrain.tiers.drain.drainer import DrainJob
from dtrain.tiers.drain.writer import TierJob
from dtrain.tiers.faults import fail_at
from dtrain.tiers.format.jsonfile import dumps, read_lines
from dtrain.tiers.format.layout import RunDir, Version, part_name
from dtrain.tiers.memory.gather import gather
from dtrain.tiers.memory.slots import MemoryDir
from dtrain.tiers.reading.recovery import candidate_of, contents, open_candidate
from dtrain.tiers.stores.store import Place as StorePlace
from dtrain.tiers.tier import open_tier
from dtrain.tiers.together import Group, write

NODES, WORLD = 3, 6


class Nodes:
    """The memory and the drainer of each node."""

    def __init__(self, place: Place, folder: Path, commit: str, patience_s: float = 20.0) -> None:
        self.place, self.patience_s = place, patience_s
        self.roots = [StorePlace("disk", str(place.root), {"commit": commit})] * NODES
        self.next: tuple[TierJob, ...] = ()
        self.memories = [folder / f"memory-{node}" for node in range(NODES)]
        for node, path in enumerate(self.memories):
            path.mkdir()
            RunDir(place.run.root, node).own.mkdir(exist_ok=True)

    def ranks(self, node: int) -> tuple[int, ...]:
        return (2 * node, 2 * node + 1)

    def pin(self, step: int, nodes: range = range(NODES)) -> None:
        for node in nodes:
            for rank in self.ranks(node):
                put(MemoryDir(self.memories[node]), rank, WORLD, 0, step, drain=True)

    def start(self, node: int, fault: str = "") -> subprocess.Popen[bytes]:
        job = self.memories[node] / "drainer.json"
        job.write_bytes(
            DrainJob(
                str(self.place.run.root), str(self.memories[node]), RUN_ID, (TierJob(self.roots[node], 2), *self.next),
                self.ranks(node), node, NODES, self.patience_s,
            ).to_bytes()
        )  # fmt: skip
        command = [sys.executable, "-m", "dtrain.tiers.drain.drainer", str(job)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "DTRAIN_FAULT": fault})

    def pending(self, node: int) -> int:
        return len(MemoryDir(self.memories[node]).pending())

    def events(self, event: str) -> list[dict[str, object]]:
        """Of all nodes, each of which writes its own."""
        runs = [RunDir(self.place.run.root, node) for node in range(NODES)]
        return [line for run in runs for line in read_lines(run.events) if line["event"] == event]


def stop(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"stop\n")
        process.stdin.close()
    return [process.wait(timeout=60) for process in processes]


def whole_steps(place: Place) -> list[int]:
    """Steps whose every byte is right."""
    steps = []
    for checkpoint in place.disk.scan()[0]:
        got = {info.name: bytearray() for info in TENSORS}
        for content in contents(open_candidate(candidate_of(checkpoint))):
            if content.is_state:
                got[content.name] += content.data
        assert {name: bytes(data) for name, data in got.items()} == {
            info.name: value_of(info, checkpoint.version.step) for info in TENSORS
        }
        steps.append(checkpoint.version.step)
    return steps


@pytest.mark.parametrize("commit", ["rename", "manifest"])
def test_every_node_adds_its_shards_and_node_0_commits(place: Place, tmp_path: Path, commit: str) -> None:
    nodes = Nodes(place, tmp_path, commit)
    nodes.pin(10)
    assert stop([nodes.start(node) for node in (2, 1, 0)]) == [0, 0, 0]
    assert whole_steps(place) == [10]
    assert [event["step"] for event in nodes.events("committed")] == [10], "one node tells it"
    assert [nodes.pending(node) for node in range(NODES)] == [0, 0, 0]
    folder = place.root / "step-0000000010.a0001"
    expected = {f"rank-{rank:05d}.safetensors" for rank in range(WORLD)} | {"manifest.json"}
    assert {path.name for path in folder.iterdir()} == expected


def test_row_35_a_node_that_is_slow_between_two_operations_leaves_nothing_in_the_checkpoint(
    place: Place, tmp_path: Path
) -> None:
    """Its part is seen before the name that it was written under is gone."""
    nodes = Nodes(place, tmp_path, "auto")
    nodes.pin(6)
    slow = fail_at(None, None, "disk.unlink", kind="slow", attempt=None)
    drainers = [nodes.start(node, slow if node else "") for node in range(NODES)]
    deadline = time.monotonic() + 60
    while not nodes.events("committed"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    stop(drainers)
    (folder,) = [path for path in place.root.iterdir() if path.name.startswith("step-")]
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_row_11_a_node_whose_disk_is_not_the_shared_one_is_told_of_it(place: Place, tmp_path: Path) -> None:
    nodes = Nodes(place, tmp_path, "auto", patience_s=1)
    nodes.roots[1] = StorePlace("disk", str(tmp_path / "a disk of its own"))
    nodes.pin(10)
    stop([nodes.start(node) for node in range(NODES)])
    reasons = " ".join(str(event["reason"]) for event in nodes.events("skipped"))
    assert "node 1 sees no checkpoint" in reasons
    assert "not shared between the nodes" in reasons
    assert "node 1 has not added its part" in reasons
    assert place.disk.scan()[0] == []
    assert place.tree() == [], "the try has left nothing"


@pytest.mark.parametrize("commit", ["rename", "manifest"])
@pytest.mark.parametrize(("node", "point"), [(0, "drain.file"), (0, "drain.rename"), (1, "drain.file")])
def test_a_drainer_killed_in_the_middle_comes_back_and_the_checkpoint_is_made(
    place: Place, tmp_path: Path, commit: str, node: int, point: str
) -> None:
    nodes = Nodes(place, tmp_path, commit)
    nodes.pin(10)
    processes = [nodes.start(n, fail_at(None, None, point) if n == node else "") for n in range(NODES)]
    assert processes[node].wait(timeout=30) == -9
    processes[node] = nodes.start(node)
    deadline = time.monotonic() + 30
    while sum(nodes.pending(n) for n in range(NODES)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert stop(processes) == [0, 0, 0]
    assert whole_steps(place) == [10], nodes.events("skipped")
    assert place.tree() == ["step-0000000010.a0001"]


def test_a_part_for_an_earlier_try_is_thrown_away_and_its_node_adds_it_again(place: Place, tmp_path: Path) -> None:
    """Node 0 has died and begins anew while another node is at its files: neither waits for the other in vain."""
    nodes = Nodes(place, tmp_path, "manifest")
    nodes.pin(10)
    version = Version(1, 10)
    memories = [MemoryDir(path, nodes.ranks(node)) for node, path in enumerate(nodes.memories)]
    parts = [gather(memory, memory.whole()[version]) for memory in memories]
    tiers = [open_tier(root, RUN_ID) for root in nodes.roots]
    with ThreadPoolExecutor(NODES) as pool:
        leading = pool.submit(write, tiers[0], *parts[0], Group(0, NODES, 20.0))
        while part_name(0) not in tiers[1].store.files(version.dirname):
            time.sleep(0.001)
        shards = [shard.checked().to_json() for shard in parts[1][0].shards]
        late = dumps({"run_id": RUN_ID, "shards": shards, "word": "of the first try"})
        tiers[1].store.create(version.dirname, part_name(1), late)  # the note alone: the files went with that try
        others = [pool.submit(write, tiers[node], *parts[node], Group(node, NODES, 20.0)) for node in (1, 2)]
        assert leading.result().version == version
        assert [one.result().version for one in others] == [version, version]
    assert whole_steps(place) == [10]
    assert place.tree() == ["step-0000000010.a0001"]


@pytest.mark.parametrize("broken", [range(NODES), range(1, 2)], ids=["for all", "for one node"])
def test_where_the_first_tier_fails_all_nodes_add_their_parts_to_the_next(
    place: Place, tmp_path: Path, broken: range
) -> None:
    nodes = Nodes(place, tmp_path, "auto", patience_s=1)
    (file := tmp_path / "file").touch()
    for node in broken:
        nodes.roots[node] = StorePlace("disk", str(file / "no folder can be here"))
    far = StorePlace("object", f"file://{tmp_path / 'far'}")
    nodes.next = (TierJob(far, 2, every=10),)
    nodes.pin(10)
    stop([nodes.start(node) for node in range(NODES)])
    assert [(event["tier"], event["step"]) for event in nodes.events("committed")] == [("object", 10)]
    (checkpoint,) = open_tier(far, RUN_ID).scan()[0]
    assert checkpoint.manifest.body["world"] == WORLD


def test_without_launchers_the_newest_that_all_nodes_have_is_saved(place: Place, tmp_path: Path) -> None:
    """The death of the workers has left a later snapshot whole on some nodes alone, on node 0 or on others."""
    nodes = Nodes(place, tmp_path, "auto")
    nodes.pin(9)
    assert stop([nodes.start(node) for node in range(NODES)]) == [0, 0, 0]
    for node in range(NODES):
        for rank in nodes.ranks(node):
            for slot, step in enumerate((9, 10) if node == 2 else (9, 10, 11)):
                put(MemoryDir(nodes.memories[node]), rank, WORLD, slot, step)
    processes = [nodes.start(node) for node in range(NODES)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert whole_steps(place) == [9, 10]
    assert not nodes.memories[2].exists()
    assert nodes.memories[0].exists(), "for all it knows another node may yet come back with step 11"
