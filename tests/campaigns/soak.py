"""A job that saves every step for a long time, killed now and then: does anything of it grow?

    python -m tests.campaigns.soak --minutes 180 --seed 1

Launcher, drainer and the process that forks the workers live as long as the job; workers live until the next kill, so
theirs are compared between attempts of the same age. Sampled once a second: resident memory, open files, threads, and
what the run has on tmpfs. The first part of the samples of a process is its warm-up. Exit code 1 when the medians of
the second and the last quarter differ by more than the bounds, when a kill is not answered, or when something is left
at the end. The seed gives the same moments of the kills and the same ranks again.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil
from tests.job.dtrain import Job, cleaned, finish, wait_for_step

from dtrain.tiers.memory.slots import memory_dir

ROLES = {
    "dtrain.engine.attempt.nursery": "nursery",
    "dtrain.engine.worker": "worker",
    "dtrain.tiers.drain.drainer": "drainer",
    "standin.py": "stand-in",
}
MIB = 2.0**20
BOUNDS = {"memory, MiB": 1.0, "open files": 2.0, "threads": 2.0, "tmpfs, MiB": 0.1, "tmpfs entries": 2.0}
"""Most that the last quarter may have more than the second, and besides 1 MiB of memory in an hour."""
MIB_PER_HOUR = 1.0
KILL_S = (20.0, 60.0)
"""Between two kills."""
WARM_S = 10.0
"""Age from which on a worker's samples count."""
MOST_DEATHS = 10**6


@dataclass
class Samples:
    """What was seen of one kind of process, or of tmpfs, over time."""

    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def take(self, **found: float) -> None:
        """One look."""
        for name, value in found.items():
            self.values[name].append(value)

    def grown(self, name: str, hours: float) -> tuple[float, float, bool]:
        """The medians of the second and the last quarter, and whether that is within the bounds."""
        values = self.values[name]
        quarter = max(1, len(values) // 4)
        before, after = median(values[quarter : 2 * quarter] or values), median(values[-quarter:])
        allowed = BOUNDS[name] + (MIB_PER_HOUR * hours if name == "memory, MiB" else 0.0)
        return before, after, after - before <= allowed


def role_of(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    return next((role for mark, role in ROLES.items() if mark in words), "launcher")


def look(job: Job, seen: dict[str, Samples]) -> None:
    """Sample all processes of the job and what it has on tmpfs."""
    now = time.time()
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for process in job.processes():
        with contextlib.suppress(psutil.Error):
            role = role_of(process)
            if role == "worker" and now - process.create_time() < WARM_S:
                return  # only whole jobs of a certain age are alike
            found = process.memory_info().rss / MIB, process.num_fds(), process.num_threads()
            sums[role] = [total + one for total, one in zip(sums[role], found, strict=True)]
    for role, (memory, files, threads) in sums.items():
        seen[role].take(**{"memory, MiB": memory, "open files": files, "threads": threads})
    paths = list(memory_dir(job.run).path.rglob("*"))
    used = sum(path.stat().st_blocks * 512 for path in paths if path.exists())
    seen["tmpfs"].take(**{"tmpfs, MiB": used / MIB, "tmpfs entries": len(paths)})


def soak(job: Job, seconds: float, chosen: random.Random) -> tuple[dict[str, Samples], list[str], int]:
    """Let the job run and kill workers; returns the samples, what went wrong, and the number of kills."""
    seen: dict[str, Samples] = defaultdict(Samples)
    process = job.start("run", "spec.yaml", f"max_steps={10**9}", f"cluster.max_restarts={MOST_DEATHS}")
    wait_for_step(job, 1)
    begun, kills = time.monotonic(), 0
    next_kill = begun + chosen.uniform(*KILL_S)
    while time.monotonic() - begun < seconds and process.poll() is None:
        look(job, seen)
        if time.monotonic() >= next_kill and (workers := job.workers()):
            with contextlib.suppress(psutil.NoSuchProcess):
                chosen.choice(workers).send_signal(signal.SIGKILL)
                kills += 1
            next_kill += chosen.uniform(*KILL_S)
        time.sleep(1.0)
    wrong = [f"the job ended by itself with {process.returncode}"] if process.poll() is not None else []
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    wrong += [f"a stop ended with {ended.code}: {ended.said[-2000:]}"] if ended.code != 75 else []
    told = len(job.events("fault"))
    wrong += [f"{kills} kills, {told} faults told"] if told != kills else []
    try:
        job.assert_nothing_left()
    except AssertionError as error:
        wrong.append(f"left behind: {error}")
    return seen, wrong, kills


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def main(words: Sequence[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="dtrain-soak-") as folder:
        job = Job(Path(folder) / "job")
        job.write_spec()
        with cleaned(job):
            seen, wrong, kills = soak(job, 60 * options.minutes, random.Random(options.seed))
            steps, commits = max(job.losses(), default=0), len(job.events("committed"))
    say(f"seed {options.seed}: {options.minutes:g} min, {steps:,} steps, {commits:,} commits, {kills} kills")
    for role, samples in sorted(seen.items()):
        for name, values in samples.values.items():
            before, after, fine = samples.grown(name, options.minutes / 60)
            say(f"{role:<9} {name:<13} {before:10.2f} -> {after:10.2f}  ({len(values)} looks)")
            wrong += [] if fine else [f"{role}: {name} grew from {before:.2f} to {after:.2f}"]
    for line in wrong:
        say(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
