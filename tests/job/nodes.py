"""Several nodes on one machine: a command for each, which share the run's folder and nothing else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from tests.job.dtrain import SPEC, Ended, Job, finish

from dtrain.tiers.format.layout import RunDir
from dtrain.tiers.memory.slots import MemoryDir, memory_dir

NODES = 2


def spec_of(nodes: int | str, workers: int = 1) -> str:
    """The tiny job on this many nodes."""
    return SPEC.replace("workers_per_node: 2", f"workers_per_node: {workers}, nodes: {nodes}, rejoin_timeout: 30s")


SMALL = spec_of(NODES)


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Cluster:
    """One job on several nodes of this machine."""

    job: Job
    port: int = field(default_factory=free_port)
    running: dict[int, subprocess.Popen[str]] = field(default_factory=dict)
    host: str = "127.0.0.1"
    within: dict[int, list[str]] = field(default_factory=dict)
    """What runs a node's command somewhere else."""
    nodes: int = NODES

    def start(self, node: int, *words: str, command: str = "run", fault: str = "") -> subprocess.Popen[str]:
        """Start the command of one node."""
        start = ("run", "spec.yaml") if command == "run" else ("resume", "--from", "latest", "spec.yaml")
        place = ("--node-rank", str(node), "--rendezvous", f"{self.host}:{self.port}")
        self.running[node] = self.job.start(*start, *words, *place, fault=fault, within=self.within.get(node, ()))
        return self.running[node]

    def start_all(self, *words: str, command: str = "run", fault: str = "") -> None:
        """Start the same command on all nodes."""
        for node in range(self.nodes):
            self.start(node, *words, command=command, fault=fault)

    def end(self, timeout: float = 60) -> list[Ended]:
        """Wait for all of them."""
        started = time.monotonic()
        return [finish(self.running[node], started, timeout) for node in sorted(self.running)]

    def memory(self, node: int) -> MemoryDir:
        """The snapshots of a node."""
        return memory_dir(RunDir(self.job.run.root, node))

    def worker(self, rank: int) -> psutil.Process:
        """The worker of a rank."""
        return self.job.workers()[rank]

    def kill_node(self, node: int) -> None:
        """Kill -9 of a node's launcher; its workers die with it."""
        os.kill(self.running[node].pid, signal.SIGKILL)
        finish(self.running.pop(node))

    def lose_node(self, node: int) -> None:
        """Kill -9 of a launcher and of all it leaves, and its memory is gone: the machine has been replaced."""
        self.kill_node(node)
        mine = str(self.memory(node).path)
        for process in psutil.process_iter(["cmdline"]):
            if any(mine in word for word in process.info["cmdline"] or ()):
                with suppress(psutil.Error):
                    process.kill()
        self.memory(node).remove()

    def peer_processes(self, node: int) -> list[psutil.Process]:
        """What sends and keeps copies on a node."""
        job = str(self.memory(node).path / "peer.json")
        return [process for process in psutil.process_iter(["cmdline"]) if job in (process.info["cmdline"] or ())]

    def assert_nothing_left(self) -> None:
        """No process, nothing in any node's memory, no temporary file."""
        self.job.assert_nothing_left()
        assert not [node for node in range(self.nodes) if self.memory(node).path.exists()]


@contextmanager
def cluster(folder: Path, nodes: int = NODES, spec: str = SMALL) -> Iterator[Cluster]:
    """Nodes that leave nothing behind, whatever the test did."""
    job = Job(folder, {"OMP_NUM_THREADS": "1"})  # the nodes share the cores of one machine
    job.write_spec(spec.replace(f"nodes: {NODES}", f"nodes: {nodes}"))
    made = Cluster(job, nodes=nodes)
    try:
        yield made
    finally:
        job.kill_all()
        for process in made.running.values():
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=5)
        for node in range(nodes):
            made.memory(node).remove()
