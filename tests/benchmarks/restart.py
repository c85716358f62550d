"""From a worker's death to the next finished step, in stages: `python -m tests.benchmarks.restart [--kills 7]`.

Two runs of the same job are killed in turn: one restarts from memory, the other has no tiers and begins at step 0, a
bare restart of the same workers without any load. Stages, from the kill's own time, events.jsonl and metrics.jsonl:
noticed = death to the fault event (seen, the other workers ended); tidied = to the next attempt's start; up = to the
read state less the load (workers there, groups made, model built, two passes; without a load: to the first step's
begin); load; step = the rest, to the first finished step. Medians in ms, with the smallest and the largest.
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
from tests.job.dtrain import Job, cleaned, finish, wait

from dtrain.tiers.jsonfile import read_lines

STAGES = ("noticed", "tidied", "up", "load", "step", "total")
TIERS = {"memory": "tiers=[{type: memory, every: 1}]", "bare": "tiers=[]"}


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


def one(job: Job, *overrides: str) -> dict[str, float]:
    """Start a run, kill one worker after some steps, and return the stages of its restart in seconds."""
    process = job.start("run", "spec.yaml", *overrides)
    try:
        wait(lambda: steps(job, 1)[5:], 60, "six steps")
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
    ratio = median(r["total"] for r in found["memory"]) / median(r["total"] for r in found["bare"])
    sys.stdout.write("\n".join([*lines, f"memory / bare: {ratio:.2f}", ""]))


if __name__ == "__main__":
    main()
