"""The peer tier's process: one per node, which sends this node's snapshots to its peers and keeps those of others.

Started by the launcher as `python -m dtrain.tiers.peers.process JOB.json` with pipes: it says on standard output, in
one line of JSON, at which port it listens, and is told on standard input, a line of JSON each time, who is where. It
ends when that pipe is closed, and what it has kept stays in memory. Workers come and go meanwhile: they mark the
slots to be copied (`Slot.offer`), and find out that all peers have their copy by another mark (`Slot.sent_mark`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import faults
from ..format.jsonfile import append_event, dumps, read
from ..format.layout import RunDir, Version
from ..memory.replicas import Keeper, Refused
from ..memory.slots import MemoryDir, Slot, SlotRecord
from .wire import CHUNK, Link, Pace, WireError, accept, connect

POLL_S = 0.02
RETRY_S = (0.1, 5.0)
"""First and longest pause after a copy that did not arrive; it ends when nodes have come or gone."""
NICENESS = 5


@dataclass(frozen=True)
class PeerJob:
    """What the process is told at its start."""

    run_dir: str
    memory_dir: str
    run_id: str
    node: int
    address: str
    """Where to listen, and from where to send: of the storage channel's interface."""
    port: int
    """0: any."""
    targets: tuple[int, ...]
    """Nodes that get a copy."""
    owners: tuple[int, ...]
    """Nodes whose copies are kept here."""
    pace_bytes_per_s: float | None
    patience_s: float
    """A peer that takes nothing for this long is given up for now; one that has taken nothing for half of it is told
    of."""

    def to_bytes(self) -> bytes:
        """The job as JSON."""
        return dumps(asdict(self))


def peer_job_from_json(value: dict[str, Any]) -> PeerJob:
    """Read the form of `to_bytes`."""
    return PeerJob(**{**value, "targets": tuple(value["targets"]), "owners": tuple(value["owners"])})


@dataclass(frozen=True)
class Directory:
    """Who is where, as the launcher said last."""

    key: bytes
    """By which the nodes of this run know each other."""
    attempt: int
    addresses: dict[int, tuple[str, int]]


class Post:
    """What all threads of the process share."""

    def __init__(self, job: PeerJob) -> None:
        """Nobody is known yet."""
        self.job = job
        self.run = RunDir(Path(job.run_dir), job.node)
        self.memory = MemoryDir(Path(job.memory_dir))
        self._directory: Directory | None = None
        self._arrived: dict[Path, tuple[Version, set[int]]] = {}
        """By slot: nodes that have its copy."""
        self._records: dict[Path, tuple[int, SlotRecord | None]] = {}
        """By slot: its commit record, and when that was written."""
        self._lock = threading.Lock()

    @property
    def directory(self) -> Directory | None:
        """Who is where, as far as it is known."""
        return self._directory

    @directory.setter
    def directory(self, directory: Directory) -> None:
        """What has arrived may be lost again with a node: what is offered is sent once more, and who has it says so."""
        with self._lock:
            self._arrived.clear()
            self._directory = directory

    def tell(self, detail: str) -> None:
        """An event for people."""
        attempt = self.directory.attempt if self.directory is not None else 0
        append_event(self.run.events, "warning", None, attempt, detail=detail)

    def next_for(self, target: int) -> tuple[Slot, SlotRecord] | None:
        """The oldest offered slot that a node has not got yet."""
        found = []
        for slot in self.memory.all_slots():
            record = self._record(slot) if slot.offered else None
            if record is not None and not slot.is_sent(record.version) and not self._has(target, slot, record.version):
                found.append((slot, record))
        return min(found, key=lambda one: one[1].version, default=None)

    def _record(self, slot: Slot) -> SlotRecord | None:
        """A slot's commit record, read once: it is long, and asked for many times."""
        try:
            written = slot.record_file.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        known = self._records.get(slot.file)
        if known is None or known[0] != written:
            known = self._records[slot.file] = written, slot.record()
        return known[1]

    def _has(self, target: int, slot: Slot, version: Version) -> bool:
        known = self._arrived.get(slot.file)
        return known is not None and known[0] == version and target in known[1]

    def arrived(self, target: int, slot: Slot, version: Version) -> None:
        """A node has a slot's copy; once all have it, the slot says so."""
        with self._lock:
            known = self._arrived.get(slot.file)
            nodes = {target} | (known[1] if known is not None and known[0] == version else set())
            self._arrived[slot.file] = version, nodes
        if nodes >= set(self.job.targets) and slot.offered:
            slot.sent(version)


class Sender(threading.Thread):
    """Sends to one peer what it has not got yet."""

    def __init__(self, post: Post, target: int) -> None:
        """Prepare; a thread that never holds anybody up."""
        super().__init__(name=f"dtrain-to-node-{target}", daemon=True)
        self.post, self.target = post, target
        rate = post.job.pace_bytes_per_s
        self.pace = Pace(rate / len(post.job.targets) if rate is not None else None)
        self._link: Link | None = None
        self._reached: Directory | None = None
        self._failing_since: float | None = None
        self._told = False

    def run(self) -> None:
        """Until the process ends."""
        pause_s = RETRY_S[0]
        while True:
            directory = self.post.directory
            due = self.post.next_for(self.target) if directory is not None else None
            if due is None:
                time.sleep(POLL_S)
                continue
            started = time.monotonic()
            try:
                self._send(*due)
            except (OSError, WireError, Refused) as error:
                self._failed(error, started)
                unchanged = self._pause(pause_s, directory)
                pause_s = min(2 * pause_s, RETRY_S[1]) if unchanged else RETRY_S[0]
            else:
                pause_s = RETRY_S[0]
                self._succeeded()

    def _pause(self, seconds: float, directory: Directory | None) -> bool:
        """Wait before the next try; False as soon as the launcher has said anew who is where.

        A node that was lost comes back as another one, and training waits for its copies from the first step on.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.post.directory is not directory:
                return False
            time.sleep(POLL_S)
        return self.post.directory is directory

    def _send(self, slot: Slot, record: SlotRecord) -> None:
        link = self._connected()
        with slot.file.open("rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            faults.point("peer.send", record.step)
            announced = json.loads(record.to_bytes())
            link.send({"kind": "copy", "node": self.post.job.node, "record": announced, "bytes": nbytes})
            if _answer(link) == "go":
                for begin in range(0, nbytes, CHUNK):
                    size = min(CHUNK, nbytes - begin)
                    if link.connection.sendfile(file, begin, size) != size:
                        raise WireError(f"{slot.file} has become shorter")
                    wait_s = self.pace.spend(size)
                    if wait_s > 0:
                        time.sleep(wait_s)
                _answer(link)
        faults.point("peer.sent", record.step)
        self.post.arrived(self.target, slot, record.version)

    def _connected(self) -> Link:
        directory = self.post.directory
        assert directory is not None
        if self._link is not None and self._reached is directory:
            return self._link
        self._close()
        address = directory.addresses.get(self.target)
        if address is None:
            raise WireError("it has not said where it listens")
        self._link, self._reached = (
            connect(address, directory.key, self.post.job.address, self.post.job.patience_s),
            directory,
        )
        return self._link

    def _close(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None

    def _failed(self, error: Exception, started: float) -> None:
        self._close()
        self._failing_since = started if self._failing_since is None else self._failing_since
        if not self._told and time.monotonic() - self._failing_since >= self.post.job.patience_s / 2:
            self._told = True
            self.post.tell(
                f"node {self.target} takes no copies of node {self.post.job.node}'s snapshots: {error}; training goes "
                "on, and tries it again"
            )

    def _succeeded(self) -> None:
        if self._told and self._failing_since is not None:
            for_s = time.monotonic() - self._failing_since
            self.post.tell(f"node {self.target} takes copies again, after {for_s:.0f} s")
        self._failing_since, self._told = None, False


def _answer(link: Link) -> str:
    message = link.receive()
    if message is None:
        raise WireError("it has closed the connection")
    if message.get("kind") == "refused":
        raise Refused(str(message.get("why")))
    return str(message.get("kind"))


class Receiver:
    """Listens, and keeps what comes from the nodes it is to come from."""

    def __init__(self, post: Post) -> None:
        """Listen at the storage channel's address. Raises OSError."""
        self.post, self.keeper = post, Keeper(post.memory, post.job.run_id)
        family = socket.AF_INET6 if ipaddress.ip_address(post.job.address).version == 6 else socket.AF_INET
        self.listener = socket.create_server((post.job.address, post.job.port), family=family, backlog=128)
        self._links: dict[int, Link] = {}
        self._lock = threading.Lock()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.listener.getsockname()[1])

    def serve(self) -> None:
        """Take in connections until the process ends, a thread for each."""
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:  # no more descriptors, or a client that was gone at once
                time.sleep(POLL_S)
                continue
            threading.Thread(target=self._serve_one, args=(connection,), name="dtrain-from-node", daemon=True).start()

    def _serve_one(self, connection: socket.socket) -> None:
        directory = self.post.directory
        if directory is None:
            connection.close()
            return
        with contextlib.suppress(OSError, WireError):
            link = accept(connection, directory.key)
            try:
                link.connection.settimeout(None)  # a peer has nothing to send for as long as it likes
                while (message := link.receive()) is not None:
                    self._take(link, message)
            finally:
                link.close()

    def _take(self, link: Link, message: dict[str, Any]) -> None:
        """One copy. Raises WireError, OSError: the connection is of no more use then."""
        node, nbytes = message.get("node"), message.get("bytes")
        if node not in self.post.job.owners or type(nbytes) is not int or nbytes <= 0:
            link.send({"kind": "refused", "why": f"no copies of node {node} are kept on node {self.post.job.node}"})
            return
        with self._lock:
            before = self._links.get(node)
            if before is not None and before is not link:
                before.close()  # of a process that is gone, or has given that connection up
            self._links[node] = link
        asked = False

        def fill(target: memoryview | None) -> None:
            nonlocal asked
            asked = True
            link.send({"kind": "go" if target is not None else "have"})
            if target is not None:
                link.receive_into(target)

        try:
            taken = self.keeper.take(node, message.get("record"), nbytes, fill)
        except Refused as refused:
            link.send({"kind": "refused", "why": str(refused)})
            return
        if taken and asked:
            link.send({"kind": "kept"})


def listen_to_launcher(post: Post) -> None:
    """Follow what the launcher says of the nodes, until it closes the pipe."""
    for line in sys.stdin:
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            told = json.loads(line)
            addresses = {int(node): (str(host), int(port)) for node, (host, port) in told["addresses"].items()}
            post.directory = Directory(bytes.fromhex(told["key"]), int(told["attempt"]), addresses)


def main(arguments: list[str]) -> int:
    """Run the peer tier of one node."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # it ends with its launcher
    os.nice(NICENESS)
    post = Post(peer_job_from_json(read(Path(arguments[0]))))
    receiver = Receiver(post)
    threading.Thread(target=receiver.serve, name="dtrain-receiver", daemon=True).start()
    for target in post.job.targets:
        Sender(post, target).start()
    sys.stdout.write(json.dumps({"port": receiver.port}) + "\n")
    sys.stdout.flush()
    listen_to_launcher(post)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # its threads wait for other nodes
