"""Nodes that come and go at random under an elastic run: every job ends, with each sample once and the same losses.

    python -m tests.campaigns.elastic --faults 100 --seed 1 --nodes 2:4
    python -m tests.campaigns.elastic --faults 30 --seed 1 --nodes 2:6 --peer -- strategy.dp_shard=6

A job trains on MIN:MAX nodes of `--workers` workers. The faults of `tests.campaigns.faults` strike it, and two at once:
two nodes are killed one after the other, a node is killed while it joins. A killed launcher is started again after a
while, so the run goes on with fewer meanwhile, or, in every second job, waits for it. When a job has had its share it
is let run to its end and compared with one of a fixed number of ranks: steps, samples and losses (float32 sums in
another order). Exit code 1 when anything was different, or did not end. What follows `--` are further words of the
command.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.campaigns.faults import DONE, STEPS, Faults, Ground, Tally, one_job, say
from tests.job.dtrain import SPEC, Job, cleaned
from tests.job.nodes import Cluster

from dtrain.specs.nodes import parse_nodes
from dtrain.tiers.format.jsonfile import read_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

TOLERANCE = 1e-3
"""Relative: sums in another order after every change of nodes, and the updates that follow from them."""
PER_JOB = 4
AWAY_S = 8.0
"""A killed launcher is started again after so long at the most."""
PEER = "  - {{type: peer, every: 1, replicas: 1}}\n"
MICRO = 2


class Shrinking(Ground):
    """One job whose nodes come and go."""

    def __init__(self, folder: Path, options: argparse.Namespace, chance: random.Random, *, wait: bool) -> None:
        """`wait`: a lost node is waited for."""
        self.options, self.links, self.chance = options, None, chance
        self.nodes = int(parse_nodes(options.nodes))
        policy = f'nodes: "{options.nodes}", rejoin_timeout: 30s, last_call: 2s, max_restarts: 9'
        policy += ", on_node_loss: wait" if wait else ""
        text = SPEC.replace("workers_per_node: 2", f"workers_per_node: {options.workers}, {policy}")
        disk = "  - {{type: disk, every: 3"
        text = text.replace(disk, (PEER if options.peer else "") + "  - {{type: disk, every: 10")
        job = Job(folder, {"OMP_NUM_THREADS": "1"})
        job.write_spec(text, STEPS)
        self.cluster = Cluster(job, nodes=self.nodes)
        self.words = words_of(options)
        self.command, self.codes, self.again, self.lost = "run", {}, 0, []
        self._back: dict[int, float] = {}

    def tend(self) -> bool:
        """A scheduler that takes its time; all are started anew when node 0 has ended."""
        for node, process in self.cluster.running.items():
            if node not in self.codes and process.poll() is not None:
                self.codes[node] = process.returncode
                self._back[node] = time.monotonic() + self.chance.uniform(0.0, AWAY_S)
        if self.codes.get(0) == DONE:
            return bool(len(self.codes) == self.nodes)
        if 0 in self.codes:
            return super().tend()
        for node in [node for node in self.codes if self.codes[node] != DONE and time.monotonic() > self._back[node]]:
            self.again += 1
            self.start(node)
        return False


class Strikes(Faults):
    """Two at once, too."""

    def __init__(self, ground: Ground, chance: random.Random) -> None:
        super().__init__(ground, chance)
        self.kinds |= {"kill two nodes": self.kill_two, "kill as it joins": self.kill_joining}

    def kill_two(self) -> None:
        one, other = self.chance.sample(range(1, self.ground.nodes), 2)
        self._kill(one)
        self._later(self.chance.uniform(0.0, 4.0), lambda: self._kill(other))

    def kill_joining(self) -> None:
        """A node is killed, and again a moment after it was let in."""
        node, before = self.chance.randrange(1, self.ground.nodes), len(self.ground.job.events("joined"))
        self._kill(node)
        moment = self.chance.uniform(0.0, 3.0)
        if self.ground.tend_until(lambda: len(self.ground.job.events("joined")) > before):
            self._later(moment, lambda: self._kill(node))


def words_of(options: argparse.Namespace) -> list[str]:
    """What fits every number of nodes: a batch that they all divide, no dropout."""
    count = parse_nodes(options.nodes)
    ranks = [nodes * options.workers for nodes in range(count.least, count + 1)]
    batch = MICRO * math.lcm(*ranks)
    return [
        f"training.global_batch_size={batch}", f"training.micro_batch_size={MICRO}", "model.dropout=0", *options.words,
    ]  # fmt: skip


@contextmanager
def shrinking(folder: Path, options: argparse.Namespace, chance: random.Random, *, wait: bool) -> Iterator[Shrinking]:
    made = Shrinking(folder, options, chance, wait=wait)
    try:
        yield made
    finally:
        made.end()


def fixed(folder: Path, options: argparse.Namespace) -> dict[int, float]:
    """The losses of the job of two workers that nothing happens to."""
    job = Job(folder, {"OMP_NUM_THREADS": "1"})
    job.write_spec(SPEC, STEPS)
    plain = [word for word in words_of(options) if not word.startswith("strategy.")]
    with cleaned(job):
        ended = job.do("run", "spec.yaml", *plain, timeout=200)
        assert ended.code == 0, ended.said
        return job.losses()


def compare(ground: Shrinking, losses: dict[int, float], tally: Tally, seen: Counter[int]) -> float:
    """Note what is different; returns the largest relative difference of a loss."""
    job, name = ground.job, f"job {tally.jobs}"
    seen.update(event["nodes"] for event in job.events("attempt"))
    tally.restored.update(event["tier"] for event in job.events("restored"))
    lines = {line["step"]: line for line in read_lines(job.run.metrics)}
    batch = int(ground.words[0].partition("=")[2])
    if [line["samples"] for _, line in sorted(lines.items())] != [batch * step for step in range(1, STEPS + 1)]:
        tally.wrong.append(f"{name}: not every sample once, in its step")
        return math.inf
    apart, step = max((abs(float(lines[step]["loss"]) - loss) / loss, step) for step, loss in losses.items())
    if apart > TOLERANCE:
        tally.wrong.append(f"{name}: the loss of step {step} differs by {apart:.1e}")
    return apart


def campaign(options: argparse.Namespace, folder: Path) -> tuple[Tally, Counter[int], float]:
    chance, tally, seen, worst = random.Random(options.seed), Tally(), Counter[int](), 0.0
    losses = fixed(folder / "fixed", options)
    while sum(tally.faults.values()) < options.faults:
        left = options.faults - sum(tally.faults.values())
        wait = bool(tally.jobs % 2)
        with shrinking(folder / f"job-{tally.jobs + 1}", options, chance, wait=wait) as struck:
            try:
                one_job(struck, chance, min(PER_JOB, left), tally, Strikes)
                tally.jobs += 1
                worst = max(worst, compare(struck, losses, tally, seen))
            except TimeoutError as error:
                tally.jobs += 1
                tally.wrong.append(f"job {tally.jobs}: {error}")
            tally.started_again += struck.again
        if tally.wrong and options.stop:
            break
    return tally, seen, worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", default="2:4", help="MIN:MAX")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--peer", action="store_true", help="with a peer tier; a killed node loses its memory")
    parser.add_argument("--stop", action="store_true", help="stop at the first job that went wrong and keep its folder")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    started, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="dtrain-elastic-"))
    tally, seen, worst = campaign(options, folder)
    for kind, count in sorted(tally.faults.items()):
        say(f"{kind:20} {count:5}")
    say("attempts by nodes: " + ", ".join(f"{nodes}: {seen[nodes]}" for nodes in sorted(seen)))
    say("restarts began from: " + ", ".join(f"{tier}: {n}" for tier, n in sorted(tally.restored.items())))
    for words in tally.wrong[:20]:
        say(f"  {words}")
    seconds = time.monotonic() - started
    say(
        f"seed {options.seed}: {sum(tally.faults.values())} faults in {tally.jobs} jobs of {options.nodes} nodes, "
        f"{tally.started_again} launchers started again, {seconds:.0f} s, losses within {worst:.1e}, "
        f"{len(tally.wrong)} different"
    )
    if tally.wrong and options.stop:
        say(f"kept: {folder}")
    else:
        subprocess.run(["rm", "-rf", str(folder)], check=True)
    sys.exit(1 if tally.wrong else 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
