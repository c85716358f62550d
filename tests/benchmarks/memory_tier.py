"""What a snapshot of every step costs: blocks of steps with and without the memory tier, alternating in one run.

    python -m tests.benchmarks.memory_tier [--spec SPEC] [--blocks 12] [--steps 8] [key=value ...]

Every rank trains with the product's own step; only rank 0 prints. Ratios are taken between neighbouring blocks, so a
machine that drifts does not count; medians are quoted with their quartiles. Nothing here is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from dtrain.cli.machine import this_machine
from dtrain.engine.context import Context, StopFlag, join, leave
from dtrain.engine.parts import Parts, assemble
from dtrain.engine.snapshot import Cadence, Pace, Snapshots
from dtrain.engine.step import Progress, train_step
from dtrain.planners.plan import Plan, make_plan
from dtrain.specs.load import load_spec
from dtrain.specs.models import Spec
from dtrain.tiers.memory import TMPFS, MemoryDir

SPEC = Path(__file__).parents[2] / "specs/examples/tiny-gpt.yaml"
WARM_UP = 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default=str(SPEC))
    parser.add_argument("--blocks", type=int, default=12, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=8, help="steps in a block")
    parser.add_argument("overrides", nargs="*")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    spec = load_spec(options.spec, [*options.overrides, "tiers=[{type: memory, every: 1}]", "max_steps=1000000"])
    if "RANK" in os.environ:
        work(options, spec)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="dtrain-bench-", dir=TMPFS)
    common = {"WORLD_SIZE": str(spec.world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.memory_tier", *sys.argv[1:]],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "DTRAIN_BENCH_DIR": folder},
        )
        for rank in range(spec.world_size)
    ]
    codes = [worker.wait() for worker in workers]
    MemoryDir(Path(folder)).remove()
    sys.exit(max(codes))


def work(options: argparse.Namespace, spec: Spec) -> None:
    memory = MemoryDir(Path(os.environ["DTRAIN_BENCH_DIR"]))
    context = join(spec, memory, StopFlag())
    parts = assemble(spec, context)
    plan = make_plan(spec, this_machine(spec))
    snapshots = open_snapshots(parts, context, memory, plan)
    progress = Progress()
    pairs = []
    block(parts, context, progress, None, WARM_UP)
    block(parts, context, progress, snapshots, WARM_UP)
    for number in range(options.blocks):
        order = (None, snapshots) if number % 2 else (snapshots, None)
        times = {kind is not None: block(parts, context, progress, kind, options.steps) for kind in order}
        pairs.append((times[False], times[True]))
    if context.rank == 0:
        report(options, spec, plan, pairs)
    leave(context, 0)


def open_snapshots(parts: Parts, context: Context, memory: MemoryDir, plan: Plan) -> Snapshots:
    return Snapshots(
        parts.state,
        memory,
        run_id="bench",
        attempt=1,
        rank=context.rank,
        world=context.world,
        device=context.device,
        cadence=Cadence(memory=1, slow=0, drain_patient=False),
        pace=Pace(
            plan.forward.bytes_per_window or 0, plan.backward.bytes_per_window or 0, plan.forward.slice_bytes or 2**20
        ),
        restored=None,
        alive=context.beat,
    )


def block(
    parts: Parts, context: Context, progress: Progress, snapshots: Snapshots | None, steps: int
) -> tuple[list[float], list[float]]:
    """Step times and stalls of one block; the copy left over at its end is not counted."""
    seconds, stalls = [], []
    for _ in range(steps):
        started = time.perf_counter()
        outcome = train_step(parts, context, progress, snapshots)
        trained = time.perf_counter()
        if snapshots is not None:
            snapshots.begin(progress.step, progress.meta(parts, "bench", context.world), drain_busy=False)
        ended = time.perf_counter()
        seconds.append(ended - started)
        stalls.append(float(outcome.metrics["stall_s"]) + ended - trained)
    if snapshots is not None:
        snapshots.finish()
        context.all_agree(True)
        snapshots.superseded()
    return seconds, stalls


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"q1": low, "median": middle, "q3": high}


def report(
    options: argparse.Namespace,
    spec: Spec,
    plan: Plan,
    pairs: list[tuple[tuple[list[float], list[float]], tuple[list[float], list[float]]]],
) -> None:
    without = [statistics.median(plain[0]) for plain, _ in pairs]
    with_tier = [statistics.median(stored[0]) for _, stored in pairs]
    stalls = [stall for _, stored in pairs for stall in stored[1]]
    result = {
        "spec": options.spec,
        "workers": spec.world_size,
        "cores": len(os.sched_getaffinity(0)),
        "threads_per_worker": torch.get_num_threads(),
        "parameters": plan.model.parameters,
        "snapshot_bytes_per_rank": plan.model.state_bytes_per_rank,
        "pairs_of_blocks": len(pairs),
        "steps_per_block": options.steps,
        "step_s_without": spread(without),
        "step_s_with": spread(with_tier),
        "ratio_with_to_without": spread([b / a for a, b in zip(without, with_tier, strict=True)]),
        "stall_ms": spread([stall * 1000 for stall in stalls]),
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
