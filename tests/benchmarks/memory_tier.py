"""What a checkpoint of every step costs: blocks of steps without, with the memory tier, and with a disk behind it.

    python -m tests.benchmarks.memory_tier [--spec SPEC] [--disk FOLDER] [--threads N] [key=value ...]

Blocks of each kind alternate in one run, every rank trains with the product's own step, the disk is filled by the
product's own drainer, and only rank 0 prints. Ratios are taken between blocks of the same round, so a machine that
drifts does not count; the median is quoted with its 95 % interval (order statistics). Nothing here is asserted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dtrain.cli.machine import this_machine
from dtrain.engine.entry import add_import_paths
from dtrain.engine.parallel.context import Context, StopFlag, join, leave
from dtrain.engine.profile import parameters_of
from dtrain.engine.snapshot.snapshots import Cadence, Pace, Snapshots
from dtrain.engine.storage.drain import DrainerProcess
from dtrain.engine.training.parts import Parts, assemble
from dtrain.engine.training.step import Progress, train_step
from dtrain.planners.plan import Plan, make_plan
from dtrain.specs.load import load_spec
from dtrain.specs.models import Spec
from dtrain.tiers.drain.drainer import DrainJob
from dtrain.tiers.drain.writer import TierJob
from dtrain.tiers.format.jsonfile import read_lines
from dtrain.tiers.format.layout import RunDir
from dtrain.tiers.memory.slots import TMPFS, MemoryDir
from dtrain.tiers.stores.store import Place

from .ranks import FOLDER, start_ranks

SPEC = Path(__file__).parents[2] / "specs/examples/tiny-gpt.yaml"
WARM_UP = 3
CADENCES = {"memory": Cadence(1, 0, False), "disk": Cadence(1, 1, True)}


@dataclass
class Block:
    """What the steps of one block took."""

    step_s: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default=str(SPEC))
    parser.add_argument("--blocks", type=int, default=12, help="rounds of blocks")
    parser.add_argument("--steps", type=int, default=8, help="steps in a block")
    parser.add_argument("--threads", type=int, help="per worker; default: all cores, divided among the workers")
    parser.add_argument("--disk", type=Path, help="also blocks with a disk tier of every step, in this folder")
    parser.add_argument("overrides", nargs="*")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    spec = load_spec(options.spec, [*options.overrides, "tiers=[{type: memory, every: 1}]", "max_steps=1000000"])
    if "RANK" in os.environ:
        work(options, spec)
        return
    folder = Path(tempfile.mkdtemp(prefix="dtrain-bench-", dir=TMPFS))
    run = RunDir(Path(tempfile.mkdtemp(prefix="dtrain-bench-", dir=options.disk)))
    tier = TierJob(Place("disk", str(run.root / "checkpoints")), keep=1)
    drainer = DrainerProcess(run, DrainJob(str(run.root), str(folder), "bench", (tier,)), 60.0, lambda: None)
    if options.disk is not None:
        drainer.start()
    codes = [rank.wait() for rank in start_ranks("tests.benchmarks.memory_tier", spec, folder)]
    drainer.stop(60.0)
    rates = [event["bytes_per_s"] for event in read_lines(run.events) if event["event"] == "committed"]
    if rates:
        words = f"{len(rates)} checkpoints on disk, median {statistics.median(rates) / 2**20:.0f} MiB/s while it wrote"
        sys.stdout.write(words + "\n")
    MemoryDir(folder).remove()
    shutil.rmtree(run.root)
    sys.exit(max(codes))


def work(options: argparse.Namespace, spec: Spec) -> None:
    memory = MemoryDir(Path(os.environ[FOLDER]))
    context = join(spec, memory, StopFlag())
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    add_import_paths(str(Path.cwd()), str(Path(options.spec).parent))
    plan = make_plan(spec, this_machine(spec), None, parameters_of(spec))
    parts = assemble(spec, context)
    snapshots = open_snapshots(parts, context, memory, plan)
    progress = Progress()
    kinds = ["none", "memory", *(["disk"] if options.disk is not None else [])]
    rounds: list[dict[str, Block]] = []
    for kind in kinds:
        block(parts, context, progress, snapshots, kind, WARM_UP)
    for number in range(options.blocks):
        first = number % len(kinds)
        order = [*kinds[first:], *kinds[:first]]
        rounds.append({kind: block(parts, context, progress, snapshots, kind, options.steps) for kind in order})
    if context.rank == 0:
        report(options, spec, plan, kinds, rounds)
    leave(context, 0)


def open_snapshots(parts: Parts, context: Context, memory: MemoryDir, plan: Plan) -> Snapshots:
    return Snapshots(
        parts.state,
        memory,
        run_id="bench",
        attempt=1,
        device=context.device,
        cadence=CADENCES["memory"],
        pace=Pace(
            plan.forward.bytes_per_window or 0, plan.backward.bytes_per_window or 0, plan.forward.slice_bytes or 2**20
        ),
        restored=None,
        alive=context.beat,
    )


def block(parts: Parts, context: Context, progress: Progress, snapshots: Snapshots, kind: str, steps: int) -> Block:
    """Steps of one kind; what is left over at the end, a copy and a drain, is waited for and not counted."""
    told, stored = Block(), snapshots if kind != "none" else None
    snapshots.cadence = CADENCES.get(kind, snapshots.cadence)
    for _ in range(steps):
        started = time.perf_counter()
        outcome = train_step(parts, context, progress, stored)
        trained = time.perf_counter()
        if stored is not None:
            meta = progress.meta(parts, "bench")
            stored.begin(progress.step, meta, drain_busy=outcome.drain_busy)
        ended = time.perf_counter()
        told.step_s.append(ended - started)
        told.stall_s.append(float(outcome.metrics["stall_s"]) + ended - trained)
    if stored is not None:
        stored.finish()
        context.all_agree(True)
        stored.superseded()
        stored.offer(drain_busy=not context.all_agree(not stored.draining()))
        while not context.all_agree(not stored.draining()):
            time.sleep(0.01)
    return told


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"q1": low, "median": middle, "q3": high}


def with_interval(values: list[float]) -> dict[str, float]:
    """Median and its 95 % interval by order statistics, from the normal form of the binomial."""
    ordered, count = sorted(values), len(values)
    half = 0.98 * math.sqrt(count)
    low, high = max(0, math.floor(count / 2 - half)), min(count - 1, math.ceil(count / 2 + half) - 1)
    return {"median": statistics.median(values), "from": ordered[low], "to": ordered[high]}


def report(
    options: argparse.Namespace, spec: Spec, plan: Plan, kinds: list[str], rounds: list[dict[str, Block]]
) -> None:
    medians = {kind: [statistics.median(one[kind].step_s) for one in rounds] for kind in kinds}
    means = {kind: [statistics.fmean(one[kind].step_s) for one in rounds] for kind in kinds}
    result = {
        "spec": options.spec,
        "overrides": options.overrides,
        "workers": spec.world_size,
        "cores": len(os.sched_getaffinity(0)),
        "threads_per_worker": torch.get_num_threads(),
        "parameters": plan.model.parameters,
        "snapshot_bytes_per_rank": plan.model.state_bytes_per_rank,
        "rounds": len(rounds),
        "steps_per_block": options.steps,
        "step_s": {kind: spread(medians[kind]) for kind in kinds},
    }
    for kind in kinds[1:]:
        stalls = [1000 * stall for one in rounds for stall in one[kind].stall_s]
        result[kind] = {
            "ratio_of_medians": with_interval([b / a for a, b in zip(medians["none"], medians[kind], strict=True)]),
            "ratio_of_means": with_interval([b / a for a, b in zip(means["none"], means[kind], strict=True)]),
            "stall_ms": {**spread(stalls), "mean": statistics.fmean(stalls), "most": max(stalls)},
        }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
