"""What a run has measured, taken along when its number of nodes changes: rates and passes stay, the rest follows.

A rank copies at the same rate whoever else is there, and a pass over one micro-batch takes what it took, times what
the plans of both numbers say that the strategy's own exchange changes. From these follow, for the new number:

    step        windows · (forward + backward) + rest        the rest (update, exchange, waits) as it was measured
    snapshot    cost · bytes of a shard now / before         so an interval: that of the controller, see `controller`
    slow tier   every · (cost of a shard / step), now / before

All of it is only what the next attempt begins with: its first full window replaces it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ...specs.models import Spec
from ..document import Plan, Settled, Training
from ..sharding.layers import windows_per_step
from ..sharding.mesh import mesh_of
from ..windows import Windows, storage_parameters
from .controller import Rule, decide, rule_of
from .observed import Figures, Setting


def taking_along(plan: Plan, spec: Spec, before: Plan, former: Spec) -> Plan:
    """Return `plan`, of `spec`, with what the run measured under `before`, of `former`, as far as that still tells.

    Both are of one job with two numbers of nodes; of another job nothing is taken along.
    """
    measured = before.measured
    bytes_now, bytes_before = plan.model.state_bytes_per_rank, before.model.state_bytes_per_rank
    if measured is None or not bytes_now or not bytes_before or not _one_job(plan, before, former):
        return plan
    forward_s = measured.forward_s * _ratio(plan.iteration.forward_s, before.iteration.forward_s)
    backward_s = measured.backward_s * _ratio(plan.iteration.backward_s, before.iteration.backward_s)
    setting = Setting(measured.memory_every, measured.slow_every)
    plain_before_s = max(1e-9, measured.step_s - measured.snapshot_s / setting.snapshots)
    passes_s = windows_per_step(former) * (measured.forward_s + measured.backward_s)
    rest_s = max(0.0, plain_before_s - passes_s)
    count = windows_per_step(spec)
    plain_s = count * (forward_s + backward_s) + rest_s
    snapshot_s = measured.snapshot_s * bytes_now / bytes_before
    rule = rule_of(spec, plan)
    dearer = bytes_now / bytes_before * plain_before_s / max(1e-9, plain_s)
    setting = _setting(rule, setting, plain_s, snapshot_s, dearer, measured.step)
    rate = measured.copy_bytes_per_s or plan.storage.bytes_per_s
    forward, backward = storage_parameters(
        bytes_now, count, Windows(count, forward_s, backward_s, rate), tiers=("memory",)
    )
    cost_s = snapshot_s / setting.snapshots
    settled = Settled(
        step=measured.step,
        forward_s=forward_s,
        backward_s=backward_s,
        step_s=plain_s + cost_s,
        copy_bytes_per_s=measured.copy_bytes_per_s,
        snapshot_s=snapshot_s,
        overhead=cost_s / max(1e-9, plain_s),
        memory_every=setting.memory,
        slow_every=setting.slow,
        forward_bytes=forward.bytes_per_window or 0,
        backward_bytes=backward.bytes_per_window or 0,
        slice_bytes=forward.slice_bytes,
    )
    return replace(plan, measured=settled)


def _one_job(plan: Plan, before: Plan, former: Spec) -> bool:
    """Tell whether the plans differ in nothing but the number of nodes and what follows from it."""
    size, was = plan.model, before.model
    return (
        (size.parameters, size.layers, size.state_bytes) == (was.parameters, was.layers, was.state_bytes)
        and _without_nodes(plan.training) == _without_nodes(before.training)
        and _given(plan) == _given(before)
        and before.training.strategy == " x ".join(mesh_of(former).words())
    )


def _without_nodes(training: Training) -> Training:
    return replace(training, world=0, nodes=0, data_parallel=0, strategy="")


def _given(plan: Plan) -> list[tuple[str, bool, int]]:
    """Tiers and the intervals that the spec gives."""
    return [(tier.type, tier.auto, 0 if tier.auto else tier.every) for tier in plan.tiers]


def _ratio(now: float | None, before: float | None) -> float:
    return now / before if now and before else 1.0


def _setting(rule: Rule, before: Setting, plain_s: float, snapshot_s: float, dearer: float, step: int) -> Setting:
    """The controller's answer to the costs that are expected, and an `auto` slow tier as much rarer as it is dearer."""
    figures = Figures(
        step_s=plain_s + snapshot_s / before.snapshots, wait_s=snapshot_s, slowed_s=0.0, drain_s=0.0, drain_steps=0.0,
        total=0.0, typical_s=snapshot_s, drain_unseen=1.0,
    )  # fmt: skip
    decision = decide(rule, before, figures, step=step)
    found = decision.setting if decision is not None else before
    if not (rule.slow_auto and found.slow and found.memory):
        return found
    slow = min(math.ceil(before.slow * dearer), max(before.slow, rule.max_steps))
    return replace(found, slow=-(-slow // found.memory) * found.memory)
