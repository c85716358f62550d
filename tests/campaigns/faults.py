"""Faults at random moments in jobs of several nodes: every job ends as the one that nothing happened to.

    python -m tests.campaigns.faults --faults 200 --seed 1
    python -m tests.campaigns.faults --faults 200 --seed 1 --links     # namespaces of their own; needs root and `ip`

A job trains on `--nodes` nodes of one worker. One fault after the other strikes it: a worker is killed or stopped, a
node is killed (and with `--peer` loses its memory), a node stands still and goes on, node 0 is killed, something else
is killed while the job is recovering; with `--links` also: the compute or the storage link of a node, or the way from
one node to another, is cut for a while. What a scheduler would do is done here: a launcher that has ended is started
again with the same command; all of them, when node 0 has ended. When a job has had its share, it is let run to its end
and compared: every loss and the state's digest, bit for bit. Exit code 1 when anything was different, or did not end,
or when a restart goes on from an older step than it could have (`restarts.py`).
The seed gives the same faults again, their moments as far as a machine's timing does.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from tests.campaigns.restarts import MOST_REPEATED, restarts
from tests.job.dtrain import SPEC, Job
from tests.job.links import Links, made_links
from tests.job.nodes import Cluster

from dtrain.tiers.format.jsonfile import read_lines

STEPS = 60
PER_JOB = 5
"""Faults in one job."""
TURN_S = 0.05
NO_PROGRESS_S = 90.0
"""Longest wait for the next finished step, or for the end: a node that comes too late looks for the others for 60 s."""
PEER = "  - {{type: peer, every: 1, replicas: 1}}\n"
CHANNELS = "cluster.channels={compute: {interface: comp0}, storage: {interface: stor0}}"
DONE, PREEMPTED = 0, 75


@dataclass
class Tally:
    """What happened in all jobs."""

    faults: Counter[str] = field(default_factory=Counter)
    jobs: int = 0
    started_again: int = 0
    repeated: Counter[int] = field(default_factory=Counter)
    """Restarts by the steps that they did again."""
    excused: Counter[str] = field(default_factory=Counter)
    """Restarts that did more steps again than two, and why they may."""
    restored: Counter[str] = field(default_factory=Counter)
    """Tiers that the restarts began from."""
    wrong: list[str] = field(default_factory=list)


class Ground:
    """One job and the nodes it runs on."""

    def __init__(self, folder: Path, options: argparse.Namespace, links: Links | None, steps: int = STEPS) -> None:
        self.options, self.links, self.nodes = options, links, options.nodes
        text = SPEC.replace("workers_per_node: 2", f"workers_per_node: 1, nodes: {self.nodes}, rejoin_timeout: 60s")
        disk = "  - {{type: disk, every: 3"
        assert disk in text
        text = text.replace(disk, (PEER if options.peer else "") + "  - {{type: disk, every: 10")
        job = Job(folder, {"OMP_NUM_THREADS": "1"})
        job.write_spec(text.replace("global_batch_size: 16", f"global_batch_size: {4 * self.nodes}"), steps)
        self.cluster = Cluster(job)
        if links is not None:
            self.cluster.host = links.address(0)
            self.cluster.within = {node: links.exec(node) for node in range(self.nodes)}
        self.words = [CHANNELS] if links is not None else []
        self.command = "run"
        self.codes: dict[int, int] = {}
        self.again = 0
        self.lost: list[tuple[float, int]] = []
        """When which node has lost its memory."""

    @property
    def job(self) -> Job:
        return self.cluster.job

    def start(self, node: int) -> None:
        self.codes.pop(node, None)
        self.cluster.start(node, *self.words, command=self.command)

    def start_all(self) -> None:
        for node in range(self.nodes):
            self.start(node)

    def step(self) -> int:
        return max(self.job.losses(), default=0)

    def processes(self, node: int) -> list[psutil.Process]:
        """A node's launcher and all that it has started."""
        with suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.cluster.running[node].pid)
            return [launcher, *launcher.children(recursive=True)]
        return []

    def tend(self) -> bool:
        """Do what a scheduler does; True when the job has ended well on all nodes."""
        for node, process in self.cluster.running.items():
            if node not in self.codes and process.poll() is not None:
                self.codes[node] = process.returncode
        if self.codes.get(0) == DONE:
            return bool(len(self.codes) == self.nodes)
        if 0 in self.codes:
            if len(self.codes) == self.nodes:
                stored = any(self.job.events(kind) for kind in ("committed", "restored")) or self.step() > 0
                self.command = "resume" if stored else "run"
                self.again += self.nodes
                self.start_all()
            return False
        for node in [node for node in self.codes if self.codes[node] != DONE]:
            self.again += 1
            self.start(node)
        return False

    def tend_until(self, condition: Callable[[], bool]) -> bool:
        """Go on until it is so; False when the job has ended before. Raises TimeoutError without progress."""
        step, deadline = self.step(), time.monotonic() + NO_PROGRESS_S
        while not condition():
            if self.tend():
                return False
            if self.step() > step:
                step, deadline = self.step(), time.monotonic() + NO_PROGRESS_S
            if time.monotonic() > deadline:
                raise TimeoutError(f"no step since {step} for {NO_PROGRESS_S:.0f} s; codes {self.codes}")
            time.sleep(TURN_S)
        return True

    def end(self) -> None:
        """Leave nothing behind."""
        self.job.kill_all()
        for process in self.cluster.running.values():
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=5)
        for node in range(self.nodes):
            self.cluster.memory(node).remove()


class Faults:
    """The faults, each by its name."""

    def __init__(self, ground: Ground, chance: random.Random) -> None:
        self.ground, self.chance = ground, chance
        self.kinds: dict[str, Callable[[], None]] = {
            "kill worker": self.kill_worker,
            "stop worker": self.stop_worker,
            "kill node": self.kill_node,
            "kill node 0": self.kill_first_node,
            "stop node": self.stop_node,
            "kill in recovery": self.kill_in_recovery,
        }
        if ground.links is not None:
            self.kinds |= {
                "cut compute link": lambda: self.cut("comp0"),
                "cut storage link": lambda: self.cut("stor0"),
                "cut one way": self.cut_one_way,
            }

    def strike(self) -> str:
        """One fault of a kind that comes up."""
        kind = self.chance.choice(sorted(self.kinds))
        self.kinds[kind]()
        return kind

    def _signal(self, processes: list[psutil.Process], number: int) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _worker(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            workers = self.ground.job.workers()
            return [self.chance.choice(workers)] if workers else []
        return []

    def kill_worker(self) -> None:
        self._signal(self._worker(), signal.SIGKILL)

    def stop_worker(self) -> None:
        self._signal(self._worker(), signal.SIGSTOP)

    def _kill(self, node: int) -> None:
        found = self.ground.processes(node)
        self._signal(found[:1], signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.ground.cluster.running[node].wait(5)
        psutil.wait_procs(found[1:], timeout=5)
        if self.ground.options.peer:
            self.ground.cluster.memory(node).remove()
            self.ground.lost.append((time.time(), node))

    def kill_node(self) -> None:
        self._kill(self.chance.randrange(1, self.ground.nodes))

    def kill_first_node(self) -> None:
        self._kill(0)

    def stop_node(self) -> None:
        """For longer or shorter than the others bear."""
        found = self.ground.processes(self.chance.randrange(self.ground.nodes))
        self._signal(found, signal.SIGSTOP)
        self._later(self.chance.uniform(0.5, 6.0), lambda: self._signal(found, signal.SIGCONT))

    def kill_in_recovery(self) -> None:
        self.kill_worker()
        self._later(self.chance.uniform(0.1, 3.0), self.chance.choice([self.kill_worker, self.kill_node]))

    def cut(self, interface: str) -> None:
        links, node = self.ground.links, self.chance.randrange(self.ground.nodes)
        assert links is not None
        links.cut(node, interface)
        self._later(self.chance.uniform(0.5, 6.0), lambda: links.mend(node, interface))

    def cut_one_way(self) -> None:
        links = self.ground.links
        assert links is not None
        here, there = self.chance.sample(range(self.ground.nodes), 2)
        links.cut_way(here, there)
        self._later(self.chance.uniform(0.5, 6.0), lambda: links.mend_way(here, there))

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        """Meanwhile the scheduler works on."""
        at = time.monotonic() + seconds
        try:
            self.ground.tend_until(lambda: time.monotonic() > at)
        finally:
            do()


@contextmanager
def ground(folder: Path, options: argparse.Namespace, links: Links | None) -> Iterator[Ground]:
    made = Ground(folder, options, links)
    try:
        yield made
    finally:
        made.end()


def unbroken(folder: Path, options: argparse.Namespace, links: Links | None) -> tuple[dict[int, float], str]:
    """Losses and digest of the job that nothing happens to."""
    with ground(folder, options, links) as calm:
        calm.start_all()
        calm.tend_until(lambda: False)
        return calm.job.losses(), calm.job.digest()


def one_job(ground: Ground, chance: random.Random, faults: int, tally: Tally, kinds: type[Faults] = Faults) -> None:
    """A job with so many faults, then its end."""
    ground.start_all()
    strikes = kinds(ground, chance)
    for number in range(faults):
        target = ground.step() + chance.randint(1, max(1, (STEPS - ground.step()) // (faults - number + 1)))
        if not ground.tend_until(lambda target=target: ground.step() >= target):  # type: ignore[misc]
            break
        time.sleep(chance.uniform(0.0, 0.2))
        kind = strikes.strike()
        tally.faults[kind] += 1
        say(f"  job {tally.jobs + 1}, step {ground.step()}: {kind}")
    ground.tend_until(lambda: False)


def compare(ground: Ground, oracle: tuple[dict[int, float], str], tally: Tally) -> None:
    losses, digest = oracle
    name = f"job {tally.jobs}"
    if ground.job.losses() != losses:
        found = ground.job.losses()
        first = min(step for step in losses if found.get(step) != losses[step])
        tally.wrong.append(f"{name}: the loss of step {first} is {found.get(first)}, not {losses[first]}")
    if ground.job.digest() != digest:
        tally.wrong.append(f"{name}: another digest")
    copied = [event for event in ground.job.events("committed") if event["tier"] == "peer"]
    if ground.options.peer and not copied:
        tally.wrong.append(f"{name}: nothing was ever copied to other nodes")
    metrics, events = read_lines(ground.job.run.metrics), read_lines(ground.job.run.events)
    for restart in restarts(metrics, events, ground.lost, int(ground.options.peer)):
        tally.repeated[restart.repeated] += 1
        tally.restored[str(restart.tier)] += 1
        if restart.excuse is not None and restart.repeated > MOST_REPEATED:
            tally.excused[restart.excuse] += 1
        if restart.is_wrong:
            tally.wrong.append(f"{name}: {restart}")


def campaign(options: argparse.Namespace, folder: Path, links: Links | None) -> Tally:
    """As many jobs as it takes for all faults."""
    chance, tally = random.Random(options.seed), Tally()
    oracle = unbroken(folder / "unbroken", options, links)
    while sum(tally.faults.values()) < options.faults:
        left = options.faults - sum(tally.faults.values())
        at = folder / f"job-{tally.jobs + 1}"
        with ground(at, options, links) as struck:
            try:
                one_job(struck, chance, min(PER_JOB, left), tally)
                tally.jobs += 1
                compare(struck, oracle, tally)
            except TimeoutError as error:
                tally.jobs += 1
                tally.wrong.append(f"job {tally.jobs}: {error}")
            tally.started_again += struck.again
        if links is not None:
            links.mend_all()
        if tally.wrong and options.stop:
            break
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--links", action="store_true", help="each node in a network namespace with two links")
    parser.add_argument("--peer", action="store_true", help="with a peer tier; a killed node loses its memory")
    parser.add_argument("--stop", action="store_true", help="stop at the first job that went wrong and keep its folder")
    options = parser.parse_args()
    started, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="dtrain-faults-"))
    with made_links(options.nodes) if options.links else nullcontext() as links:
        tally = campaign(options, folder, links)
    report(tally, options, time.monotonic() - started)
    if tally.wrong and options.stop:
        say(f"kept: {folder}")
    else:
        subprocess.run(["rm", "-rf", str(folder)], check=True)
    sys.exit(1 if tally.wrong else 0)


def report(tally: Tally, options: argparse.Namespace, seconds: float) -> None:
    for kind, count in sorted(tally.faults.items()):
        say(f"{kind:20} {count:5}")
    say("steps repeated by a restart: " + ", ".join(f"{n}: {tally.repeated[n]} times" for n in sorted(tally.repeated)))
    for words, count in sorted(tally.excused.items()):
        say(f"  {count} of them more than {MOST_REPEATED}, for {words}")
    say("restarts began from: " + ", ".join(f"{tier}: {n}" for tier, n in sorted(tally.restored.items())))
    for words in tally.wrong[:20]:
        say(f"  {words}")
    say(
        f"seed {options.seed}: {sum(tally.faults.values())} faults in {tally.jobs} jobs of {options.nodes} nodes, "
        f"{tally.started_again} launchers started again, {seconds:.0f} s, {len(tally.wrong)} different"
    )


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
