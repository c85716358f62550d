"""Whether a slow storage link slows training: `python -m tests.benchmarks.channels [--blocks 5]` (root, `ip`, `tc`).

Two nodes in namespaces with a compute and a storage link each, and a peer tier, so that every step's state is on its
way to the other node. Blocks of steps alternate: the storage links as fast as they go, and limited to 100 Mbit/s by a
token bucket (`tc tbf`). Printed: the median step of each pair of blocks, their ratio, and what each interface carried.
With `--shared` both channels take one interface, which is not limited: the plan's pacing against `--unpaced`.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.job.dtrain import finish, wait_for_step
from tests.job.links import Links, made_links
from tests.job.nodes import Cluster, cluster

from dtrain.tiers.format.jsonfile import read_lines

LIMIT = ("rate", "100mbit", "burst", "256kb", "latency", "50ms")
TIERS = "tiers=[{type: memory, every: 1}, {type: peer, every: EVERY, when_slow: SLOW}]"
TWO = "cluster.channels={compute: {interface: comp0}, storage: {interface: stor0}}"
ONE = "cluster.channels={compute: {interface: comp0}, storage: {interface: comp0, shared: SHARED}}"
SIZE = ("model.d_model=256", "model.n_layers=4", "max_steps=1000000", "cluster.heartbeat_timeout=10s")
SETTLE_S = 1.0
"""After a change: steps that both states had a part in are left out."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="length of a block")
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--unpaced", action="store_true")
    parser.add_argument("--every", default="1", help="of the peer tier")
    parser.add_argument("--when-slow", default="skip", help="of the peer tier: skip or wait")
    chosen = parser.parse_args()
    channels = ONE.replace("SHARED", "false" if chosen.unpaced else "auto") if chosen.shared else TWO
    with tempfile.TemporaryDirectory() as folder, made_links(2) as links, cluster(Path(folder) / "job") as nodes:
        nodes.host = links.address(0)
        nodes.within = {node: links.exec(node) for node in range(2)}
        nodes.start_all(channels, TIERS.replace("EVERY", chosen.every).replace("SLOW", chosen.when_slow), *SIZE)
        try:
            wait_for_step(nodes.job, 20)
            measure(nodes, links, chosen.blocks, chosen.seconds, limited=not chosen.shared)
        finally:
            nodes.running[0].send_signal(signal.SIGINT)
            for process in nodes.running.values():
                finish(process)


def measure(nodes: Cluster, links: Links, blocks: int, seconds: float, *, limited: bool) -> None:
    """Alternate, and print each pair."""
    ratios = []
    for turn in range(blocks):
        free = block(nodes, links, seconds)
        if not limited:
            say(f"block {turn + 1}: {free[0]}")
            continue
        limit(links, "add")
        slow = block(nodes, links, seconds)
        limit(links, "del")
        ratios.append(slow[1] / free[1])
        say(f"block {turn + 1}: as fast as it goes: {free[0]} | 100 Mbit/s: {slow[0]} | step {ratios[-1]:.3f} times")
    if ratios:
        say(f"step with the limit / without, median of {blocks} pairs: {median(ratios):.3f}")


def block(nodes: Cluster, links: Links, seconds: float) -> tuple[str, float]:
    """The median step, and the rates of the interfaces of node 0."""
    time.sleep(SETTLE_S)
    began, before = time.time(), [links.sent(0, name) for name in ("comp0", "stor0")]
    time.sleep(seconds)
    ended, after = time.time(), [links.sent(0, name) for name in ("comp0", "stor0")]
    steps = [line["step_s"] for line in read_lines(nodes.job.run.metrics) if began < line["time"] < ended]
    copies = [
        event
        for event in read_lines(nodes.job.run.events)
        if event["event"] == "committed" and event["tier"] == "peer" and began < event["time"] < ended
    ]
    rates = [8e-6 * (new - old) / (ended - began) for old, new in zip(before, after, strict=True)]
    return (
        f"step {1000 * median(steps):.1f} ms of {len(steps)}, {len(copies)} copies with the peers, "
        f"comp0 {rates[0]:.0f} and stor0 {rates[1]:.0f} Mbit/s",
        median(steps),
    )


def limit(links: Links, what: str) -> None:
    """Limit the storage link of both nodes, or let it go."""
    for node in range(2):
        words = ("tc", "qdisc", what, "dev", "stor0", "root", *(("tbf", *LIMIT) if what == "add" else ()))
        subprocess.run(links.exec(node, *words), check=True, capture_output=True)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
