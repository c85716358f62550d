"""What a plan rests on, and what a person should know before running it, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..specs.models import GptModel, Spec
from .costs import Costs, backlog_s
from .document import Expected
from .expected import RESTART_S
from .machine import Machine
from .memory import MemoryNeed, memory_warnings
from .sizes import Sizes
from .times import StepTimes, sample_tokens
from .words import duration, plural, share


def plan_assumptions(
    spec: Spec,
    machine: Machine,
    rests_on: Sequence[str],
    times: StepTimes | None,
    sizes: Sizes | None,
) -> list[str]:
    """Return the machine's notes, the tables' figures in use, and what is not known."""
    lines = [*machine.assumed, *rests_on]
    if sizes is None:
        lines.append("sizes of a python model are counted by --profile and by run")
    elif sample_tokens(spec) is None or not isinstance(spec.model, GptModel):
        lines.append("activations are not counted: only the built-in model on a known seq_len is")
    if times is None:
        lines.append("times are not known without --profile; windows are set as if backward took twice forward")
    if spec.world_size > 1 and times is not None:
        lines.append("the exchange of gradients hides behind the last backward pass as far as it fits")
    if spec.cluster.nodes > 1:
        lines.append("all nodes are alike")
        if spec.disk_tier is not None:
            lines.append("the disk tier lies on a file system that every node reaches")
    if times is not None:
        lines.append(f"a restart takes {duration(RESTART_S)} before anything is read")
        if not spec.tiers:
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
    if 0 < machine.accelerator_count < spec.cluster.workers_per_node:
        lines.append(
            f"{plural(spec.cluster.workers_per_node, 'worker')} per node share "
            f"{plural(machine.accelerator_count, 'accelerator')}"
        )
    lines += _interval_warnings(spec, every)
    if costs is None or step_s is None:
        return lines
    if "disk" in every and backlog_s(costs.write_s, every["disk"], step_s) > 0:
        lines.append(
            f"disk: one write takes {duration(costs.write_s)}, {plural(every['disk'], 'step')} take "
            f"{duration(every['disk'] * step_s)}; the training will wait for the disk (use every: auto)"
        )
    if expected.overhead is not None and expected.overhead > expected.budget:
        given = any(tier.every != "auto" for tier in spec.tiers)
        lines.append(
            f"checkpoints cost {share(expected.overhead)} of the step time, checkpoint.max_overhead allows "
            f"{share(expected.budget)}; " + ("use every: auto or allow more" if given else "allow more")
        )
    if expected.goodput == 0:
        lines.append("faults would take all the time: lost work and recovery exceed the time between faults")
    return lines


def _interval_warnings(spec: Spec, every: Mapping[str, int]) -> list[str]:
    lines = []
    memory, disk = every.get("memory"), every.get("disk")
    if memory is not None and disk is not None and disk % memory:
        lines.append(
            f"disk every {disk} is not a multiple of memory every {memory}: "
            "disk checkpoints need snapshots of their own"
        )
    for tier, steps in every.items():
        if steps > spec.max_steps:
            lines.append(f"{tier} every {plural(steps, 'step')}: the run has {plural(spec.max_steps, 'step')} only")
    return lines
