"""Ten thousand nodes, planned, and what faults cost a large job: `python -m tests.benchmarks.scale [--plot FILE.svg]`.

First the time to place copies over that many nodes and to choose what they go on from after a loss. Then goodput and
lost work against the rate of faults, for one job that stores its state in different ways:

none      nothing is stored; a fault begins the job anew. Mean wall time (M + R)·(exp(W/M) - 1) for W of work, faults
          M apart and R to restart (Daly 2006, doi:10.1016/j.future.2004.11.016, with the whole run as one segment)
stop      training stops for each write to a disk that all share, at Young's and Daly's interval t for the time d of a
          write: wall time per work M·exp(R/M)·(exp((t + d)/M) - 1)/t (Daly 2006), lost (t + d)/2
disk, memory, peer   dtrain's plan with these tiers, the ones before included (planners/expected.py)

The last three are played event by event too (tests/planners/simulation.py): in brackets the goodput of the game.
Half of the faults end a worker, half a node; `lost` is the mean work that a fault loses.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from tests.planners.simulation import Reality, Run

from dtrain.engine.network.addresses import parse_endpoint
from dtrain.engine.network.line import Host
from dtrain.planners.intervals import young_daly_s
from dtrain.planners.machine import Machine
from dtrain.planners.plan import Plan, make_plan
from dtrain.planners.sharding.placement import place
from dtrain.specs.load import load_spec
from dtrain.tiers.format.layout import Version
from dtrain.tiers.peers.seal import Seal
from dtrain.tiers.reading.agree import Held, Shards, agreed, held_from_json, to_drain
from dtrain.tiers.reading.recovery import MEMORY, Candidate
from dtrain.tiers.stores.store import Place

NODES, WORKERS, ZONE = 10_000, 8, 32
LOST_ZONE = range(64, 64 + ZONE)
OLD, NEW = Version(attempt=1, step=41), Version(attempt=1, step=42)
DAY_S = 86_400.0
RUN_S = 7 * DAY_S
FAULTS_PER_DAY = (1, 3, 10, 30, 100, 300)
PLAYED_STEPS = 60_000
Result = TypeVar("Result")
JOB = """
name: seven-billion
output_dir: /runs/seven-billion
max_steps: 1000000
model: {type: gpt, n_layers: 32, d_model: 4096, n_heads: 32, vocab_size: 32000}
dataset: {type: text, path: "python:stdlib", seq_len: 4096}
training: {global_batch_size: 4096, micro_batch_size: 1, precision: bf16-mixed, optimizer: {name: adamw, lr: 3e-4}}
strategy: {dp_replicate: 128, dp_shard: 8}
cluster: {nodes: 128, workers_per_node: 8, device: cuda, accelerator: h100}
"""
SHARED_DISK = 10 * 10**9
"""Bytes per second that the disk takes from all nodes together; assumed."""
GPUS = Machine(cpu_cores=96, host_memory_bytes=2**41, shm_free_bytes=2**40, accelerator="h100", accelerator_count=8)
TIERS = {
    "disk": "[{type: disk}]",
    "memory": "[{type: memory}, {type: disk}]",
    "peer": "[{type: memory}, {type: peer, replicas: 1}, {type: disk}]",
}


@dataclass(frozen=True)
class Found:
    """What one way to store the state comes to at one rate of faults."""

    goodput: float
    lost_s: float
    played: float | None = None


class Game(Run):
    """A run that also has copies in another node's memory, which a node's loss leaves."""

    def __init__(self, plan: Plan, reality: Reality, mtbf_s: dict[str, float], seed: int) -> None:
        super().__init__(plan, reality, False, mtbf_s, seed)
        self.peer_s = next((tier.write_s or 0.0 for tier in plan.tiers if tier.type == "peer"), None)
        self.write_s["peer"] = self.peer_s or 0.0

    def _store(self, copied: float, *, drain: bool) -> None:
        super()._store(copied, drain=drain)
        if self.peer_s is not None:
            self._write("peer", copied, self.step)

    def _fail(self, kind: str, length_s: float) -> None:
        slow = self.slow
        if kind == "node" and self.peer_s is not None:
            self.slow = [*slow, "peer"]  # type: ignore[list-item]
        super()._fail(kind, length_s)
        self.slow = slow


def main() -> None:
    """Print both parts; draw the second one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", metavar="FILE", help=".svg, .png or .pdf; needs dtrain[plot]")
    chosen = parser.parse_args()
    planning()
    found = {rate: ways(rate) for rate in FAULTS_PER_DAY}
    print_table(found)
    if chosen.plot:
        draw(found, Path(chosen.plot))


def planning() -> None:
    """Time placement and the choice after losses over ten thousand nodes; what is chosen is looked at."""
    placement = timed(f"place 2 copies of each of {NODES} nodes in zones of {ZONE}", lambda: place(NODES, 2, ZONE))
    timed("whose copies one node keeps", lambda: placement.kept_by(7))
    held = all_hold()
    candidates = [Candidate(version, Place(MEMORY, "")) for version in (NEW, OLD)]
    chosen, _ = timed("choose among 2 versions, nobody lost", lambda: agreed(candidates, held))
    assert [(one.version, one.tier) for one in chosen] == [(NEW, "memory"), (OLD, "memory")]
    lost = {**held, **dict.fromkeys(LOST_ZONE, Held())}
    chosen, _ = timed(f"the same, a zone of {ZONE} nodes lost with its memory", lambda: agreed(candidates, lost))
    assert [(one.version, one.tier) for one in chosen] == [(NEW, "peer"), (OLD, "peer")]
    timed("what is to be carried to the disk", lambda: to_drain(held, NODES))
    messages = [one.to_json() for one in held.values()]
    timed("read what all nodes say they hold", lambda: [held_from_json(message) for message in messages])
    one_turn(NODES)
    one_turn(NODES // 10)


def one_turn(nodes: int) -> None:
    """Time node 0's thread going once through the store for all signs of life."""
    seal = Seal("of a benchmark, and no secret")
    host = Host(parse_endpoint("127.0.0.1:0"), nodes, seal)
    for node in range(1, nodes):
        host.desk.write(f"hello/{node}", json.dumps({"word": f"w{node}"}))
        host.desk.write(f"beat/w{node}", json.dumps({"count": 1, "sent": 0, "ranks": [[0, 1, 2, 3, 1]] * WORKERS}))
    host._turn()
    assert len(host._mates) == nodes - 1
    timed(f"node 0 looks once at the signs of life of {nodes} nodes", host._turn)


def all_hold() -> dict[int, Held]:
    """What each node has: its own shards, and those that it keeps for others, of two versions."""
    kept: dict[int, list[int]] = {node: [] for node in range(NODES)}
    for owner, holders in enumerate(place(NODES, 2, ZONE).holders):
        for holder in holders:
            kept[holder].append(owner)
    return {node: holds(node, kept[node]) for node in range(NODES)}


def holds(node: int, owners: list[int] | tuple[int, ...]) -> Held:
    """One node's part."""
    ranks = frozenset(rank for owner in (node, *owners) for rank in range(owner * WORKERS, (owner + 1) * WORKERS))
    both = frozenset({OLD, NEW})
    return Held(both, frozenset({OLD}), {}, 1, {version: Shards(NODES * WORKERS, ranks) for version in both})


def timed(what: str, work: Callable[[], Result]) -> Result:
    """Do it and print how long it took."""
    began = time.perf_counter()
    result = work()
    sys.stdout.write(f"{1000 * (time.perf_counter() - began):8.1f} ms  {what}\n")
    return result


def ways(per_day: float, steps: int = PLAYED_STEPS) -> dict[str, Found]:
    """All ways to store, at one rate of faults; `steps` of each are played."""
    plans = {name: planned(tiers, per_day) for name, tiers in TIERS.items()}
    one = plans["disk"]
    mtbf_s, recovery_s = DAY_S / per_day, one.expected.recovery_s
    restart_s = fmean([recovery_s.process or 0.0, recovery_s.node or 0.0])
    write_s = (one.model.state_bytes or 0) / SHARED_DISK
    every_s = young_daly_s(write_s, mtbf_s)
    none_s = math.inf if RUN_S / mtbf_s > 700 else (mtbf_s + restart_s) * math.expm1(RUN_S / mtbf_s)
    stop = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((every_s + write_s) / mtbf_s) / every_s
    return {
        "none": Found(RUN_S / none_s, RUN_S / 2 if mtbf_s > RUN_S else mtbf_s),
        "stop": Found(1 / stop, (every_s + write_s) / 2),
        **{name: dtrains(plan, per_day, steps) for name, plan in plans.items()},
    }


def planned(tiers: str, per_day: float) -> Plan:
    """The plan of the job with these tiers, where a day has this many faults."""
    mean_s = 2 * DAY_S / per_day
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.yaml"
        path.write_text(JOB)
        spec = load_spec(
            path,
            [
                f"tiers={tiers}",
                f"cluster.mtbf.process={mean_s * 128 * 8}s",
                f"cluster.mtbf.node={mean_s * 128}s",
                f"cluster.hardware.disk_bandwidth={SHARED_DISK / 128}",
            ],
        )
    return make_plan(spec, GPUS)


def dtrains(plan: Plan, per_day: float, steps: int) -> Found:
    """By the planner's formulas, and played."""
    iteration, expected = plan.iteration, plan.expected
    assert iteration.forward_s is not None
    assert iteration.backward_s is not None
    assert expected.goodput is not None
    tiers = {tier.type: tier.write_s or 0.0 for tier in plan.tiers}
    shard = plan.model.state_bytes_per_rank or 0
    reality = Reality(
        micro_batches=iteration.micro_batches, forward_s=iteration.forward_s, backward_s=iteration.backward_s,
        exchange_s=0.0, optimizer_s=iteration.optimizer_s or 0.0, shard_bytes=shard,
        bytes_per_s=shard / tiers["memory"] if tiers.get("memory") else 10**10, write_s=tiers["disk"],
    )  # fmt: skip
    mean_s = 2 * DAY_S / per_day
    game = Game(plan, reality, {"process": mean_s, "node": mean_s}, seed=1)
    played = game.play(steps).goodput
    lost_steps = fmean([expected.lost_steps.process or 0.0, expected.lost_steps.node or 0.0])
    return Found(expected.goodput, lost_steps * reality.step_s, played)


def print_table(found: dict[int, dict[str, Found]]) -> None:
    """Goodput and lost work, a row for each rate."""
    names = list(next(iter(found.values())))
    sys.stdout.write("\ngoodput (played)\n")
    sys.stdout.write("faults/day " + "".join(f"{name:>18}" for name in names) + "\n")
    for rate, row in found.items():
        sys.stdout.write(f"{rate:>10} " + "".join(f"{_cell(one):>18}" for one in row.values()) + "\n")
    sys.stdout.write("\nlost work per fault, s\n")
    for rate, row in found.items():
        sys.stdout.write(f"{rate:>10} " + "".join(f"{one.lost_s:>18.1f}" for one in row.values()) + "\n")


def _cell(one: Found) -> str:
    return f"{one.goodput:.4f}" + (f" ({one.played:.4f})" if one.played is not None else "")


def draw(found: dict[int, dict[str, Found]], path: Path) -> None:
    """Both figures over the rate of faults."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    labels = {
        "none": "nothing stored", "stop": "training stops for the disk", "disk": "dtrain: disk",
        "memory": "dtrain: memory, disk", "peer": "dtrain: memory, peer, disk",
    }  # fmt: skip
    for name, label in labels.items():
        rows = [(rate, row[name]) for rate, row in found.items()]
        style = "--" if name in ("none", "stop") else "-"
        left.plot([rate for rate, _ in rows], [one.goodput for _, one in rows], style, marker=".", label=label)
        right.plot([rate for rate, _ in rows], [one.lost_s for _, one in rows], style, marker=".", label=label)
    left.set_ylabel("goodput")
    right.set_ylabel("work lost by a fault, s")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("faults a day")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(fontsize=8)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
