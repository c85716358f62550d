"""From a worker's death to the next finished step, in stages: `python -m tests.benchmarks.restart [--kills 7]`.

Runs of the same job are killed in turn: one restarts from memory, one from the disk, and one has no tiers and begins at
step 0, a bare restart of the same workers without any load. Stages, from the kill's own time, events.jsonl and
metrics.jsonl: noticed = death to the fault event (seen, the other workers ended); tidied = to the next attempt's start;
up = to the read state less the load (workers there, groups made, model built, two passes; without a load: to the first
step's begin); load; step = the rest, to the first finished step. Medians in ms, with the smallest and the largest.

Then workers of the same spec load the same state as others do, in turn (see `loads`): what those would add to a bare
restart. All files are in the page cache, as they are after a worker's death.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from tests.benchmarks.loads import loads_of_others
from tests.job.dtrain import Job, cleaned, finish, wait

from dtrain.tiers.format.jsonfile import read_lines

STAGES = ("noticed", "tidied", "up", "load", "step", "total")
TIERS = {
    "memory": "tiers=[{type: memory, every: 1}]",
    "disk": "tiers=[{type: disk, every: 1, keep: 2}]",
    "bare": "tiers=[]",
}


def main() -> None:
    """Kill each of the two in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=7)
    parser.add_argument("--width", type=int, default=256, help="model.d_model")
    chosen = parser.parse_args()
    size = (f"model.d_model={chosen.width}", "model.n_layers=4", "max_steps=1000000", f"cluster.max_restarts={10**6}")
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in TIERS}
        for turn in range(chosen.kills):
            for name, tiers in TIERS.items():
                with cleaned(Job(Path(folder) / f"{turn}-{name}")) as job:
                    job.write_spec()
                    found[name].append(one(job, tiers, *size))
        print_table(found)
        with cleaned(Job(Path(folder) / "loads")) as job:
            print_loads(loads_of_others(job.write_spec(), size, Path(folder), chosen.kills))


def one(job: Job, *overrides: str) -> dict[str, float]:
    """Start a run, kill one worker after some steps, and return the stages of its restart in seconds."""
    process = job.start("run", "spec.yaml", *overrides)
    try:
        wait(lambda: steps(job, 1)[5:], 60, "six steps")
        if "disk" in overrides[0]:
            wait(lambda: job.events("committed"), 60, "a checkpoint on the disk")
        killed = time.time()
        os.kill(job.workers()[1].pid, signal.SIGKILL)
        wait(lambda: steps(job, 2), 60, "the restart")
        return stages(job, killed)
    finally:
        process.send_signal(signal.SIGINT)
        finish(process)


def steps(job: Job, attempt: int) -> list[dict[str, Any]]:
    """Lines of finished steps of one attempt."""
    return [line for line in read_lines(job.run.metrics) if line["attempt"] == attempt]


def stages(job: Job, killed: float) -> dict[str, float]:
    """Seconds of each stage."""
    events = read_lines(job.run.events)
    fault = next(e["time"] for e in events if e["event"] == "fault")
    began = next(e["time"] for e in events if e["event"] == "attempt" and e["attempt"] == 2)
    first = steps(job, 2)[0]
    restored = next((e for e in events if e["event"] == "restored"), None)
    load = restored["seconds"] if restored is not None else 0.0
    up = restored["time"] if restored is not None else first["time"] - first["step_s"]
    return {
        "noticed": fault - killed,
        "tidied": began - fault,
        "up": up - began - load,
        "load": load,
        "step": first["time"] - up,
        "total": first["time"] - killed,
    }


def print_table(found: dict[str, list[dict[str, float]]]) -> None:
    """Medians with smallest and largest, in ms, and the ratio of the totals."""
    load = psutil.getloadavg()[0]
    lines = [f"{len(found['bare'])} kills each, in turn; load average {load:.1f}; ms: median (smallest to largest)"]
    for name, runs in found.items():
        cells = []
        for stage in STAGES:
            values = [1000 * run[stage] for run in runs]
            cells.append(f"{stage} {median(values):.0f} ({min(values):.0f} to {max(values):.0f})")
        lines.append(f"{name:12} " + " | ".join(cells))
    bare = median(r["total"] for r in found["bare"])
    lines += [
        f"{name} / bare: {median(r['total'] for r in found[name]) / bare:.2f}" for name in TIERS if name != "bare"
    ]
    sys.stdout.write("\n".join([*lines, ""]))


def print_loads(found: dict[str, list[float]]) -> None:
    """Medians with smallest and largest, in ms."""
    for name, seconds in found.items():
        values = [1000 * each for each in seconds]
        sys.stdout.write(f"{name:12} load {median(values):.0f} ({min(values):.0f} to {max(values):.0f})\n")


if __name__ == "__main__":
    main()
