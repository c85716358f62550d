"""How soon each kind of fault is found, and from the loss of a node to the next finished step.

    python -m tests.benchmarks.detection [--times 3]

Each kind strikes a running job of two ranks, as often as asked; seconds from the moment it begins to the event that
names it, beside the bound of 2 x heartbeat_timeout. The links of nodes in namespaces are cut where there is root and
`ip`. Then one of three nodes (one worker each) is killed and the run shrinks to two, in stages: detect = to the event
`lost`; teardown = to `fault`, all workers ended; rendezvous = to the next `attempt`; up = to the read state, less the
load (workers, groups, model, two passes); load; step = to the first finished step.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from tests.job.dtrain import Job, cleaned, finish, wait, wait_for_step
from tests.job.links import made_links
from tests.job.nodes import Cluster, cluster

from dtrain.tiers.format.jsonfile import read_lines

HEARTBEAT_S = 2.0
CHANNELS = "cluster.channels={compute: {interface: comp0}, storage: {interface: stor0}}"
STAGES = ("detect", "teardown", "rendezvous", "up", "load", "step", "total")
STUCK = '''
import ctypes, os, time, torch
from torch import nn

def strikes():
    """Rank 1, from some calls on, after a stamp."""
    if os.environ.get("RANK") != "1" or os.environ.get("DTRAIN_ATTEMPT") != "1":
        return False
    strikes.calls += 1
    if strikes.calls == {after}:
        open("stamp", "w").write(str(time.time()))
    return strikes.calls >= {after}
strikes.calls = 0

class Net(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.layer = how, nn.Linear(8, 8)
    def forward(self, x):
        time.sleep(0.02)
        if self.how != "loader" and strikes():
            ctypes.PyDLL(None).sleep(600) if self.how == "gil" else time.sleep(0.1)
        return self.layer(x).square().mean()

def net(how):
    return Net(how)

class Points:
    def __init__(self, how):
        self.how = how
    def __len__(self):
        return 512
    def __getitem__(self, i):
        if self.how == "loader" and strikes():
            time.sleep(600)
        return (torch.ones(8) * i,)

points = Points
'''
SPEC = """
name: stuck
output_dir: {output_dir}
max_steps: 1000000
model: {{type: python, entry: "stuck:net", kwargs: {{how: HOW}}}}
dataset: {{type: python, entry: "stuck:points", kwargs: {{how: HOW}}}}
training: {{global_batch_size: 16, micro_batch_size: 4, optimizer: {{name: adamw, lr: 1e-3}}}}
cluster: {{workers_per_node: 2, device: cpu, heartbeat_timeout: 2s}}
tiers: [{{type: memory, every: 1}}]
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3)
    times = parser.parse_args().times
    kinds: dict[str, Callable[[Path], float]] = {
        "stopped process": stopped,
        "GIL held": lambda folder: stuck(folder, "gil", 60),
        "stuck data loader": lambda folder: stuck(folder, "loader", 300),
        "slow rank": lambda folder: stuck(folder, "slow", 60),
        "dead node": lambda folder: node(folder, "kill"),
    }
    if os.geteuid() == 0 and shutil.which("ip"):
        kinds |= {
            "link cut both ways": lambda folder: node(folder, "cut"),
            "cut towards node 0": lambda folder: node(folder, "up"),
            "cut from node 0": lambda folder: node(folder, "down"),
        }
    say(f"seconds, median (smallest to largest) of {times}; bound 2 x heartbeat_timeout = {2 * HEARTBEAT_S:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        for at, (name, measure) in enumerate(kinds.items()):
            say(f"{name:20} {words([measure(Path(folder) / f'{at}-{turn}') for turn in range(times)])}")
        lost = [loss(Path(folder) / f"loss-{turn}") for turn in range(times)]
    say("a node is lost, three nodes go on as two: to the next finished step (promise: 15)")
    for stage in STAGES:
        say(f"{stage:20} {words([one[stage] for one in lost])}")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def words(seconds: list[float]) -> str:
    return f"{median(seconds):5.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


@contextmanager
def running(job: Job, *override: str) -> Any:
    """The run of one node, ended afterwards."""
    process = job.start("run", "spec.yaml", *override)
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        finish(process)


def told(job: Job, *kinds: str) -> dict[str, Any]:
    """The first event of one of these kinds, once it is there."""

    def found() -> list[dict[str, Any]]:
        return [line for line in read_lines(job.run.events) if line["event"] in kinds]

    wait(found, 60, " or ".join(kinds))
    return found()[0]


def stopped(folder: Path) -> float:
    """SIGSTOP to a worker."""
    with cleaned(Job(folder)) as job:
        job.write_spec()
        with running(job, "max_steps=1000000"):
            wait_for_step(job, 20)
            began = time.time()
            job.workers()[1].suspend()
            return float(told(job, "fault")["time"]) - began


def stuck(folder: Path, how: str, after: int) -> float:
    """Rank 1 gets stuck in its own code, or is slow."""
    with cleaned(Job(folder)) as job:
        job.write_spec(SPEC.replace("HOW", how))
        (folder / "stuck.py").write_text(STUCK.replace("{after}", str(after)))
        with running(job):
            wait((folder / "stamp").exists, 60, "the fault")
            event = told(job, "warning" if how == "slow" else "fault")
            assert "rank 1" in event["detail"], event
            return float(event["time"]) - float((folder / "stamp").read_text())


def node(folder: Path, how: str) -> float:
    """Node 1 of two is killed, or its link is cut: both ways, towards node 0, from node 0."""
    if how == "kill":
        with cluster(folder) as nodes:
            return node_of(nodes, lambda: nodes.kill_node(1))
    with made_links(2) as links, cluster(folder) as nodes:
        nodes.host = links.address(0)
        nodes.within = {each: links.exec(each) for each in range(2)}
        ways = {
            "cut": lambda: links.cut(1, "comp0"),
            "up": lambda: links.cut_way(1, 0),
            "down": lambda: links.cut_way(0, 1),
        }
        return node_of(nodes, ways[how], CHANNELS)


def node_of(nodes: Cluster, strike: Callable[[], None], *override: str) -> float:
    """Seconds until node 0 tells that node 1 is lost, or which rank stands still."""
    nodes.start_all("max_steps=1000000", *override)
    wait_for_step(nodes.job, 20)
    began = time.time()
    strike()
    return float(told(nodes.job, "lost", "fault")["time"]) - began


def loss(folder: Path) -> dict[str, float]:
    """The stages after the loss of one of three nodes, in seconds."""
    size = ("cluster.nodes=2:3", "training.global_batch_size=12", "training.micro_batch_size=2", "max_steps=1000000")
    with cluster(folder, 3) as nodes:
        nodes.start_all(*size, "cluster.last_call=20s")
        wait_for_step(nodes.job, 30)
        began = time.time()
        nodes.kill_node(2)
        lost, fault = float(told(nodes.job, "lost")["time"]), float(told(nodes.job, "fault")["time"])

        def of(attempt: int, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [line for line in lines if line.get("attempt") == attempt]

        wait(lambda: of(2, read_lines(nodes.job.run.metrics)), 60, "the next finished step")
        events = of(2, read_lines(nodes.job.run.events))
        start = next(float(event["time"]) for event in events if event["event"] == "attempt")
        read = next(event for event in events if event["event"] == "restored")
        load, done = float(read["seconds"]), float(of(2, read_lines(nodes.job.run.metrics))[0]["time"])
        ends = (lost, fault, start, read["time"] - load, read["time"], done)
        begins = (began, *ends)
        parts = [end - begin for begin, end in zip(begins, ends, strict=False)]
        return dict(zip(STAGES, [*parts, done - began], strict=True))


if __name__ == "__main__":
    main()
