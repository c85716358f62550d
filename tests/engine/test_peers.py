"""Two nodes' processes of the peer tier: what is offered arrives, whoever dies or stands still meanwhile."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.planners.build import tiny

from dtrain.engine.storage.peers import NoPeers, Peers, peers_of
from dtrain.planners.machine import Machine
from dtrain.planners.plan import make_plan
from dtrain.specs.models import Spec
from dtrain.tiers.format.digest import digest
from dtrain.tiers.format.jsonfile import read_lines
from dtrain.tiers.format.layout import RunDir, Version
from dtrain.tiers.format.shardfile import Entry, Shard
from dtrain.tiers.memory.slots import MemoryDir, Slot, SlotRecord
from dtrain.tiers.peers import process as peer
from dtrain.tiers.peers.seal import Seal

SEAL = Seal("a token of this test")
BYTES = 3 * 2**20
MACHINE = Machine(cpu_cores=2, host_memory_bytes=2**34, shm_free_bytes=2**30, accelerator="cpu")


def spec_of(*tiers: dict[str, object]) -> Spec:
    return tiny(
        cluster={"nodes": 2, "workers_per_node": 1, "rendezvous": "127.0.0.1:1", "heartbeat_timeout": "1s"},
        training={"global_batch_size": 8, "micro_batch_size": 4, "optimizer": {"name": "adamw", "lr": 0.1}},
        tiers=[{"type": "memory"}, *tiers],
    )


class Node:
    """A node's memory, with one rank's slots in it."""

    def __init__(self, folder: Path, number: int) -> None:
        run = RunDir(folder / "run", number)
        run.own.mkdir(parents=True, exist_ok=True)
        self.number, self.run = number, run
        self.memory = MemoryDir(folder / f"memory-{number}", (number,))
        self.memory.path.mkdir()
        spec = spec_of({"type": "peer"})
        peers = peers_of(run, spec, make_plan(spec, MACHINE), self.memory, "r", SEAL)
        assert isinstance(peers, Peers)
        self.peers = peers

    def snapshot(self, step: int, index: int = 0) -> Slot:
        """A whole snapshot, offered to the others."""
        slot = self.memory.slots(self.number, 2)[index]
        shard = Shard(self.number, 2, "r", (Entry("w", "U8", (BYTES,), (0,), (BYTES,), BYTES),))
        data = bytes([step]) * BYTES
        slot.invalidate()
        slot.file.write_bytes(shard.header() + data)
        record = SlotRecord("r", step, 1, self.number, 2, index, digest(shard.header()), (digest(data),), {})
        slot.commit(record, drain=False)
        slot.offer()
        return slot

    def copies(self, owner: int) -> list[int]:
        """Steps that are whole here of another node."""
        records = [slot.record() for slot in self.memory.replica_of(owner).all_slots()]
        return sorted(record.step for record in records if record is not None)

    def pid(self) -> int:
        assert self.peers._process is not None
        return self.peers._process.pid


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    made = [Node(tmp_path, number) for number in range(2)]
    introduce(made)
    yield made
    for node in made:
        node.peers.stop()


def introduce(nodes: list[Node], attempt: int = 1) -> None:
    """What node 0 does before an attempt."""
    for node in nodes:
        nodes[0].peers.heard(node.number, node.peers.door(lambda: "lo"))
    for node in nodes:
        node.peers.tell(attempt, nodes[0].peers.directory())


def wait(what: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_offered_is_with_the_peer_before_the_slot_says_so(nodes: list[Node]) -> None:
    slots = [node.snapshot(1) for node in nodes]
    wait(lambda: all(slot.is_sent(Version(attempt=1, step=1)) for slot in slots))
    for node in nodes:
        (slot,) = node.memory.replica_of(1 - node.number).all_slots()
        assert slot.file.read_bytes() == slots[1 - node.number].file.read_bytes()
    nodes[0].snapshot(2, 1)
    wait(lambda: nodes[1].copies(0) == [1, 2])
    assert nodes[0].copies(1) == [1]


def test_what_is_not_offered_stays_at_home(nodes: list[Node]) -> None:
    nodes[0].snapshot(1).withdraw()
    nodes[0].snapshot(2, 1)
    wait(lambda: nodes[1].copies(0) == [2])


def test_a_peer_that_was_replaced_gets_everything_again(nodes: list[Node], tmp_path: Path) -> None:
    slot = nodes[0].snapshot(1)
    wait(lambda: slot.is_sent(Version(attempt=1, step=1)))
    nodes[1].peers.stop()
    nodes[1].memory.remove()
    nodes[1] = Node(tmp_path, 1)
    slot = nodes[0].snapshot(2, 1)
    introduce(nodes, 2)
    try:
        wait(lambda: slot.is_sent(Version(attempt=1, step=2)))
        assert nodes[1].copies(0) == [2]
    finally:
        nodes[1].peers.stop()


def test_what_was_sent_is_offered_again_to_a_peer_that_was_replaced(nodes: list[Node], tmp_path: Path) -> None:
    """By the sender's own count it has it; and one that has it takes no bytes of it."""
    version = Version(attempt=1, step=1)
    slots = [node.snapshot(1) for node in nodes]
    wait(lambda: all(slot.is_sent(version) for slot in slots))
    nodes[1].peers.stop()
    nodes[1].memory.remove()
    nodes[1] = Node(tmp_path, 1)
    introduce(nodes, 2)
    nodes[1].snapshot(1)
    for slot in slots:
        slot.offer()
    try:
        wait(lambda: all(slot.is_sent(version) for slot in slots))
        assert (nodes[1].copies(0), nodes[0].copies(1)) == ([1], [1])
    finally:
        nodes[1].peers.stop()


def test_a_process_that_dies_is_started_again_at_its_port(nodes: list[Node]) -> None:
    door, pid = nodes[1].peers.door(lambda: "lo"), nodes[1].pid()
    os.kill(pid, signal.SIGKILL)
    wait(lambda: nodes[1].peers._process is not None and nodes[1].peers._process.ended is not None)
    slot = nodes[0].snapshot(1)
    nodes[1].peers.tend(1)
    assert (nodes[1].peers.door(lambda: "lo"), nodes[1].pid() != pid) == (door, True)
    wait(lambda: slot.is_sent(Version(attempt=1, step=1)))
    assert any("the process of the peer tier ended" in event["detail"] for event in read_lines(nodes[1].run.events))


def test_a_peer_that_stands_still_is_told_of_once_and_gets_its_copy_later(nodes: list[Node]) -> None:
    os.kill(nodes[1].pid(), signal.SIGSTOP)
    slot = nodes[0].snapshot(1)
    try:
        wait(lambda: bool(read_lines(nodes[0].run.events)), 40)
        assert not slot.is_sent(Version(attempt=1, step=1))
    finally:
        os.kill(nodes[1].pid(), signal.SIGCONT)
    wait(lambda: slot.is_sent(Version(attempt=1, step=1)))
    wait(lambda: len(read_lines(nodes[0].run.events)) == 2)
    first, second = (event["detail"] for event in read_lines(nodes[0].run.events))
    assert "node 1 takes no copies" in first and "training goes on" in first
    assert "takes copies again" in second


def test_who_has_another_key_sends_nothing(nodes: list[Node]) -> None:
    nodes[0].peers.tell(1, {**nodes[0].peers.directory(), "key": "00" * 32})
    slot = nodes[0].snapshot(1)
    wait(lambda: bool(read_lines(nodes[0].run.events)))
    assert "does not accept this run's key" in read_lines(nodes[0].run.events)[0]["detail"]
    assert not slot.is_sent(Version(attempt=1, step=1))
    assert not nodes[1].copies(0)


def test_the_process_ends_with_its_launcher_and_what_it_has_kept_stays(nodes: list[Node]) -> None:
    slot = nodes[0].snapshot(1)
    wait(lambda: slot.is_sent(Version(attempt=1, step=1)))
    pid = nodes[1].pid()
    nodes[1].peers.stop()
    assert not Path(f"/proc/{pid}").exists()
    assert nodes[1].copies(0) == [1]
    assert nodes[1].peers.door(lambda: "lo") is None, "nothing is started again at the end of a run"


def test_without_a_peer_tier_there_is_no_process(tmp_path: Path) -> None:
    spec = spec_of()
    peers = peers_of(RunDir(tmp_path), spec, make_plan(spec, MACHINE), MemoryDir(tmp_path), "r", SEAL)
    assert type(peers) is NoPeers
    assert (peers.door(lambda: "lo"), peers.directory()) == (None, {})


def test_a_pause_between_tries_ends_when_nodes_have_come_or_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the copies of the steps after a restart wait for the end of a pause that a lost node has caused, and what
    the job does meanwhile is lost with the next node."""
    monkeypatch.setattr(peer, "RETRY_S", (3600.0, 3600.0))
    (tmp_path / "memory").mkdir()
    job = peer.PeerJob(str(tmp_path), str(tmp_path / "memory"), "r", 0, "127.0.0.1", 0, (1,), (1,), None, 1.0)
    post = peer.Post(job)
    monkeypatch.setattr(post, "next_for", lambda target: ("slot", "record"))
    tried: queue.Queue[peer.Directory | None] = queue.Queue()

    def send(self: peer.Sender, slot: object, record: object) -> None:
        tried.put(self.post.directory)
        if self.post.directory is after:
            raise EOFError  # the thread's end
        raise OSError("nobody listens there")

    monkeypatch.setattr(peer.Sender, "_send", send)
    before, after = (peer.Directory(b"", attempt, {}) for attempt in (1, 2))
    post.directory = before

    def work() -> None:
        with suppress(EOFError):
            peer.Sender(post, 1).run()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert tried.get(timeout=10) is before
    post.directory = after
    assert tried.get(timeout=10) is after
    thread.join(10)
    assert not thread.is_alive()
