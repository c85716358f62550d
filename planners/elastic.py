"""The plan of a run whose number of nodes may change: that of the most, and what is different with fewer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..specs.models import Spec
from .machine import Machine, Measured
from .memory import memory_warnings
from .plan import Plan, make_plan
from .sharding.layout import Cuts
from .sharding.shards import TensorInfo
from .words import duration, listed

SHOWN = 8
"""Numbers of nodes that a line lists."""


def elastic_plan(
    spec: Spec,
    machine: Machine,
    measured: Measured | None = None,
    parameters: Sequence[TensorInfo] | None = None,
    cuts: Cuts | None = None,
) -> Plan:
    """Plan a spec as `make_plan` does, with the most nodes that can be used; its notes say what is with fewer."""
    plan = make_plan(spec.largest, machine, measured, parameters, cuts)
    if not spec.cluster.nodes.elastic:
        return plan
    counts = spec.usable_nodes
    lines = [
        f"nodes {spec.cluster.nodes.to_spec()}: planned for {counts[-1]}; numbers whose ranks divide the global batch "
        f"evenly are used: {listed(counts, SHOWN)}",
        *_shards(spec),
    ]
    warnings = [*plan.warnings, *_not_used(spec)]
    if counts[0] < counts[-1]:
        least = make_plan(spec.at(counts[0]), machine, measured, parameters, cuts)
        before, then = plan.iteration, least.iteration
        line = f"with {counts[0]}: {before.micro_batches} -> {then.micro_batches} micro-batches on each rank"
        if before.step_s is not None and then.step_s is not None:
            line += f", a step {duration(before.step_s)} -> {duration(then.step_s)}"
        lines.append(f"{line}; the global batch and the order of the samples stay")
        held = set(memory_warnings(plan.memory))
        warnings += [f"with {counts[0]} nodes: {words}" for words in memory_warnings(least.memory) if words not in held]
    return replace(plan, assumptions=(*plan.assumptions, *lines), warnings=tuple(warnings))


def _shards(spec: Spec) -> Iterator[str]:
    """What `dp_shard` is with numbers of nodes that do not leave it as the spec has it."""
    asked = spec.strategy.dp_shard
    found = {nodes: spec.at(nodes).strategy.dp_shard for nodes in spec.usable_nodes}
    others = [f"{shard} with {nodes}" for nodes, shard in found.items() if shard != asked]
    if others:
        yield f"dp_shard follows the number of nodes: dp_shard {asked} is {listed(others, SHOWN)}"


def _not_used(spec: Spec) -> Iterator[str]:
    """Numbers of nodes within MIN and MAX that are of no use, what does not come out even, and what would."""
    count, shape = spec.cluster.nodes, spec.shape
    reasons = {nodes: why for nodes in range(count.least, count + 1) if (why := shape.why_not(nodes)) is not None}
    if not reasons:
        return
    first = next(iter(reasons))
    line = f"cluster.nodes {count.to_spec()}: {listed(list(reasons), SHOWN)} cannot be used"
    line += f" ({reasons[first]})" if len(reasons) == 1 else f" (with {first}: {reasons[first]})"
    if first < spec.usable_nodes[0]:
        line += f"; with fewer than {spec.usable_nodes[0]} the run waits for more"
    if max(reasons) > spec.usable_nodes[0]:
        line += "; the nodes beyond the next smaller number stand by"
    units = [spec.training.micro_batch_size * shape.data_parallel(nodes) for nodes in reasons]
    if all(units):
        kept = [spec.training.micro_batch_size * shape.data_parallel(nodes) for nodes in spec.usable_nodes]
        line += f"; a global_batch_size that is a multiple of {math.lcm(*units, *kept) * spec.strategy.pp} fits all"
    else:
        line += "; with workers_per_node a multiple of tp * pp all come out even"
    yield line
