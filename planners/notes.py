"""What a plan rests on, and what a person should know before running it, in sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from ..specs.models import PythonModel, Spec
from .costs import Costs
from .document import Expected
from .machine import Machine
from .memory import MemoryNeed, memory_warnings
from .models.workload import Workload
from .schedule import keeps_up
from .sharding.placement import place
from .sizes import Sizes
from .times import StepTimes
from .words import duration, plural, shares


def plan_assumptions(
    spec: Spec,
    machine: Machine,
    rests_on: Sequence[str],
    work: Workload | None,
    times: StepTimes | None,
    sizes: Sizes | None,
) -> list[str]:
    """Return the machine's notes, the tables' figures in use, and what is not known."""
    lines = [*machine.assumed, *rests_on]
    if sizes is None:
        lines.append("sizes of a python model are counted by --profile and by run; model.like describes it")
    elif work is None or work.tokens is None:
        lines.append("activations are not counted: that needs model.like, and the tokens per sample")
    if isinstance(spec.model, PythonModel) and work is not None:
        lines.append(f"model.like describes the model as {spec.model.like.family if spec.model.like else ''}")
    if times is None:
        lines.append("times are not known without --profile; windows are set as if backward took twice forward")
    if spec.world_size > 1 and times is not None:
        hides = machine.accelerator != "cpu"
        lines.append(
            "the exchange of gradients hides behind the last backward pass as far as it fits"
            if hides
            else "the exchange of gradients takes the processors' time, so passes do not hide it"
        )
    if spec.cluster.nodes > 1:
        lines.append("all nodes are alike")
    if spec.disk_tier is not None:
        shared = "every node reaches the disk tier's file system, which" if spec.cluster.nodes > 1 else "the disk tier"
        lines.append(f"{shared} outlives the nodes; a disk inside a node is lost with that node")
    if times is not None:
        lines.append(f"a restart takes {duration(spec.cluster.hardware.restart_time)} before anything is read")
        if not spec.used_tiers:
            lines.append("without tiers a fault loses half of the run on average")
    return lines


def plan_warnings(
    spec: Spec,
    machine: Machine,
    *,
    memory: MemoryNeed,
    expected: Expected,
    every: Mapping[str, int],
    costs: Costs | None,
    step_s: float | None,
) -> list[str]:
    """Return what does not fit, costs more than allowed, or will not do what it seems to."""
    lines = memory_warnings(memory)
    chosen = spec.cluster.accelerator
    if chosen != "auto" and spec.cluster.device != "auto" and (chosen == "cpu") != (spec.cluster.device == "cpu"):
        lines.append(f"planned for cluster.accelerator {chosen}, but cluster.device is {spec.cluster.device}")
    if 0 < machine.accelerator_count < spec.cluster.workers_per_node:
        lines.append(
            f"{plural(spec.cluster.workers_per_node, 'worker')} per node share "
            f"{plural(machine.accelerator_count, 'accelerator')}"
        )
    lines += [spec.unused] if spec.unused is not None else []
    lines += _interval_warnings(spec, every)
    lines += _peer_warnings(spec, every, costs, step_s)
    if costs is None or step_s is None:
        return lines
    lines += [*_late_warnings(spec, every, costs, step_s), *_stop_warnings(spec, costs, step_s)]
    if expected.overhead is not None and expected.overhead > expected.budget:
        given = any(tier.every != "auto" for tier in spec.used_tiers)
        cost, allowed = shares(expected.overhead, expected.budget)
        lines.append(
            f"checkpoints cost {cost} of the step time, checkpoint.max_overhead allows {allowed}; "
            + ("use every: auto or allow more" if given else "allow more")
        )
    if expected.goodput == 0:
        lines.append("faults would take all the time: lost work and recovery exceed the time between faults")
    return lines


def _peer_warnings(spec: Spec, every: Mapping[str, int], costs: Costs | None, step_s: float | None) -> list[str]:
    """Say where copies are made more rarely than asked for, and where a zone takes all of them."""
    peer, zone = spec.peer_tier, spec.cluster.nodes_per_zone
    if peer is None:
        return []
    lines = []
    if zone is not None and not place(spec.cluster.nodes, peer.replicas, zone).crosses_zones:
        lines.append(f"peer: a zone of {plural(zone, 'node')} leaves too few others: some copies lie in their own zone")
    if costs is not None and step_s is not None and costs.send_s > every["peer"] * step_s:
        lines.append(
            f"peer: one copy takes {duration(costs.send_s)}, one is due every {duration(every['peer'] * step_s)}; "
            f"{'training will wait for it (when_slow: skip: it will not)' if peer.waits else 'copies will be rarer'}"
        )
    if every["peer"] > 1 and peer.every == "auto" and not peer.waits:
        repeated = 2 * every["peer"]  # one interval until the next copy begins, one while that is sent
        lines.append(
            f"peer: a copy of every step does not fit, one is made every {plural(every['peer'], 'step')}: the loss of "
            f"a node repeats up to {repeated} steps; with every: 1 it is 2, and training waits for copies"
        )
    return lines


def _late_warnings(spec: Spec, every: Mapping[str, int], costs: Costs, step_s: float) -> list[str]:
    """Say which tiers cannot be written as often as they are to be, and what happens then."""
    lines = []
    for position, tier in enumerate(spec.slow_tiers):
        steps, write_s = every[tier.type], costs.slow_s(tier.type)
        waits = tier.waits and position == 0
        if keeps_up(costs, tier.type, position, steps, step_s):
            continue
        lag_s = costs.commit_lag_s + costs.write_s
        follows = f"the training will wait for the {_PLACES[tier.type]}" if waits else "checkpoints will be left out"
        remedy = "" if tier.every == "auto" else " (use every: auto)"
        begins = "" if position == 0 else f" and begins {duration(lag_s)} after its update"
        lines.append(
            f"{tier.type}: one write takes {duration(write_s)}{begins}, one is due every {duration(steps * step_s)}; "
            f"{follows}{remedy}"
        )
    return lines


_PLACES = {"disk": "disk", "object": "object store"}


def _stop_warnings(spec: Spec, costs: Costs, step_s: float) -> list[str]:
    """Say where a stop signal leaves too little time: the first slower tier gets what it needs, others half of it."""
    lines, limit_s = [], spec.cluster.shutdown_timeout
    for position, tier in enumerate(spec.slow_tiers):
        write_s = costs.slow_s(tier.type)
        if position == 0 and step_s + write_s > limit_s:
            lines.append(
                f"after a stop signal the last step and its write to the {_PLACES[tier.type]} take "
                f"{duration(step_s + write_s)}, more than cluster.shutdown_timeout {duration(limit_s)}: whoever stops "
                "the job must wait so long before it kills"
            )
        if position > 0 and write_s > limit_s / 2:
            lines.append(
                f"{tier.type}: one write takes {duration(write_s)}, and after a stop signal it gets half of "
                f"cluster.shutdown_timeout, {duration(limit_s / 2)}: the last step of a stopped run will not be there"
            )
    return lines


def _interval_warnings(spec: Spec, every: Mapping[str, int]) -> list[str]:
    """Say which intervals do not fit each other, what is to be kept for good, or the run."""
    lines = []
    filled = {kind: steps for kind, steps in every.items() if kind != "peer"}  # nothing is filled from peers
    for (faster, short), (slower, long) in pairwise(filled.items()):
        if long % short:
            own = f"{slower} checkpoints need snapshots of their own"
            rare = f"only every {math.lcm(short, long)} steps reach it"
            follows = own if faster == "memory" else rare
            lines.append(f"{slower} every {long} is not a multiple of {faster} every {short}: {follows}")
    for tier in spec.slow_tiers:
        steps = every[tier.type]
        if tier.keep_every is not None and tier.keep_every % steps:
            lines.append(
                f"{tier.type}: keep_every {tier.keep_every} is not a multiple of every {steps}: only every "
                f"{math.lcm(tier.keep_every, steps)} steps are kept for good"
            )
    for kind, steps in every.items():
        if steps > spec.max_steps:
            lines.append(f"{kind} every {plural(steps, 'step')}: the run has {plural(spec.max_steps, 'step')} only")
    return lines
