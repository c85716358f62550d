"""The plan of a run whose number of nodes may change: that of the most, and what is different with fewer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..specs.models import Spec
from .layout import Cuts
from .machine import Machine, Measured
from .plan import Plan, make_plan
from .shards import TensorInfo
from .words import duration


def elastic_plan(
    spec: Spec,
    machine: Machine,
    measured: Measured | None = None,
    parameters: Sequence[TensorInfo] | None = None,
    cuts: Cuts | None = None,
) -> Plan:
    """Plan a spec as `make_plan` does, with the most nodes that can be used; its assumptions say what is with fewer."""
    plan = make_plan(spec.largest, machine, measured, parameters, cuts)
    if not spec.cluster.nodes.elastic:
        return plan
    counts = spec.usable_nodes
    lines = [
        f"nodes {spec.cluster.nodes.to_spec()}: planned for {counts[-1]}; numbers whose ranks divide the global batch "
        f"evenly are used: {', '.join(map(str, counts))}"
    ]
    if counts[0] < counts[-1]:
        least = make_plan(spec.at(counts[0]), machine, None, parameters, cuts)
        before, then = plan.iteration, least.iteration
        line = f"with {counts[0]}: {before.micro_batches} -> {then.micro_batches} micro-batches on each rank"
        if before.step_s is not None and then.step_s is not None and measured is None:
            line += f", a step {duration(before.step_s)} -> {duration(then.step_s)}"
        lines.append(f"{line}; the global batch and the order of the samples stay")
    return replace(plan, assumptions=(*plan.assumptions, *lines))
