"""From a spec and a machine to the plan: sizes, times, windows, intervals, memory, expected losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..specs.models import GptModel, SlowTier, Spec
from ..specs.models import Tier as TierSpec
from . import gpt, intervals
from .costs import Costs, backlog_s, checkpoint_costs
from .devices import DISK_BYTES_PER_S, OBJECT_BYTES_PER_S, Rates, assumptions, rates, with_digest
from .document import (
    Expected,
    Iteration,
    ModelSize,
    Plan,
    Storage,
    TierPlan,
    Training,
    plan_from_json,
)
from .expected import (
    KINDS,
    Faults,
    Source,
    fault_rate,
    goodput,
    job_mtbf_s,
    lost_steps,
    recovery_s,
)
from .machine import Machine, Measured
from .memory import SNAPSHOTS_KEPT, MemoryNeed, memory_need
from .notes import plan_assumptions, plan_warnings
from .shards import TensorInfo
from .sizes import Sizes, count_sizes, device_parts
from .times import StepTimes, sample_tokens, step_times
from .windows import storage_parameters

__all__ = ["Machine", "Measured", "Plan", "make_plan", "plan_from_json"]

SURVIVES: dict[str, tuple[str, ...]] = {
    "memory": ("process",),
    "disk": ("process", "node", "cluster"),
    "object": ("process", "node", "cluster"),
}
"""Faults after which a tier can still be read."""
UNTIMED_DISK_EVERY = 100
"""Largest interval of the disk tier while step times are not known; a tenth of the run if that is less."""


@dataclass(frozen=True, slots=True)
class _Known:
    """Everything the parts of a plan are made from."""

    spec: Spec
    machine: Machine
    rates: Rates
    sizes: Sizes | None
    times: StepTimes | None
    bytes_per_s: float
    """Rate of a rank's storage channel."""

    @property
    def window_s(self) -> float | None:
        """Time per step in which the state is constant."""
        if self.times is None:
            return None
        return self.spec.micro_batches * (self.times.forward_s + self.times.backward_s)

    @property
    def step_s(self) -> float | None:
        """Time of a step without checkpoints."""
        if self.times is None or self.window_s is None:
            return None
        return self.window_s + self.times.exchange_s + self.times.optimizer_s

    @property
    def costs(self) -> Costs | None:
        """Costs of one checkpoint."""
        if self.sizes is None or self.window_s is None:
            return None
        return checkpoint_costs(
            self.sizes.shard_bytes,
            self.spec.cluster.workers_per_node,
            self.bytes_per_s,
            self.window_s,
            self.machine.cpu_cores if self.machine.accelerator == "cpu" else None,
        )


def make_plan(
    spec: Spec,
    machine: Machine,
    measured: Measured | None = None,
    parameters: Sequence[TensorInfo] | None = None,
) -> Plan:
    """Plan one run of `spec` on nodes like `machine`.

    `measured` replaces the tables' times. `parameters` are the trained tensors of the model as built, needed
    for a python model, whose sizes nobody knows before; without them its sizes and bytes per window are None,
    and without `measured` its times are.
    """
    if spec.micro_batches < 1:
        raise ValueError(
            f"training.global_batch_size {spec.training.global_batch_size} is less than one micro-batch of "
            f"{spec.training.micro_batch_size} on each of {spec.world_size} ranks"
        )
    known = _know(spec, machine, measured, parameters)
    every = _intervals(known)
    tiers = tuple(_tier(known, tier, every[tier.type]) for tier in spec.tiers)
    forward, backward = storage_parameters(
        known.sizes.shard_bytes if known.sizes else None,
        spec.micro_batches,
        (known.times.forward_s, known.times.backward_s) if known.times else None,
        known.bytes_per_s,
        tuple(tier.type for tier in spec.tiers[:1]),
    )
    expected, memory = _expected(known, every), _memory(known)
    source = "unknown" if known.times is None else "table" if measured is None else "measured"
    copy_measured = measured is not None and measured.copy_bytes_per_s is not None
    rests_on = assumptions(spec, machine, source == "table", copy_measured)
    return Plan(
        name=spec.name,
        source=source,
        training=_training(known),
        model=_model(known),
        iteration=_iteration(known),
        storage=_storage(known),
        forward=forward,
        backward=backward,
        tiers=tiers,
        memory=memory,
        expected=expected,
        assumptions=tuple(plan_assumptions(spec, machine, rests_on, known.times, known.sizes)),
        warnings=tuple(
            plan_warnings(
                spec,
                machine,
                memory=memory,
                expected=expected,
                every=every,
                costs=known.costs,
                step_s=known.step_s,
            )
        ),
    )


def _know(spec: Spec, machine: Machine, measured: Measured | None, parameters: Sequence[TensorInfo] | None) -> _Known:
    reached = rates(machine, spec.cluster, spec.training.precision)
    sizes = count_sizes(spec, parameters)
    bandwidth = spec.cluster.channels.storage.bandwidth
    if bandwidth == "auto":
        copied = measured.copy_bytes_per_s if measured else None
        bandwidth = with_digest(copied) if copied else reached.copy_bytes_per_s
    count, bytes_ = (sizes.parameters, sizes.parameter_bytes) if sizes else (0, 0)
    times = step_times(spec, reached, count, bytes_, measured)
    return _Known(spec, machine, reached, sizes, times, bandwidth)


def _intervals(known: _Known) -> dict[str, int]:
    """Return the steps between two checkpoints of each tier that the spec has."""
    spec, every = known.spec, {}
    memory = spec.memory_tier
    if memory is not None:
        every["memory"] = (
            memory.every if memory.every != "auto" else _auto_memory(known, next(iter(spec.slow_tiers), None))
        )
    for tier in spec.slow_tiers:  # each is filled from the one before
        before = next(reversed(every.values()), None)
        every[tier.type] = tier.every if tier.every != "auto" else _auto_slow(known, tier.type, before)
    return every


def _auto_memory(known: _Known, slow: SlowTier | None) -> int:
    """Return the memory tier's interval; 1 while the times are not known."""
    if known.costs is None or known.step_s is None:
        return 1
    given = slow.every if slow is not None and slow.every != "auto" else None
    budget = known.spec.checkpoint.max_overhead
    return intervals.memory_every(known.costs.snapshot_s, known.step_s, budget, known.spec.max_steps, given)


def _auto_slow(known: _Known, kind: str, every_before: int | None) -> int:
    """Return a slower tier's interval, within what the memory tier leaves of the budget.

    Without a memory tier the snapshots are made for the first slower one alone, and count as its cost.
    """
    costs, step_s, max_steps = known.costs, known.step_s, known.spec.max_steps
    snapshot_every = every_before or 1
    if costs is None or step_s is None:
        untimed = max(1, min(UNTIMED_DISK_EVERY, max_steps // 10))
        return snapshot_every * -(-untimed // snapshot_every)
    budget = known.spec.checkpoint.max_overhead
    cost_s = costs.drain_cpu_s
    if every_before is None:
        cost_s += costs.snapshot_s
    else:
        used = costs.snapshot_s / (every_before * step_s)
        budget = max(budget - used, intervals.LEAST_BUDGET_SHARE * budget)
    mtbf_s = 1 / fault_rate(job_mtbf_s(known.spec.cluster, known.spec.world_size))
    return intervals.disk_every(
        write_s=costs.slow_s(kind),
        cost_s=cost_s,
        step_s=step_s,
        budget=budget,
        mtbf_s=mtbf_s,
        max_steps=max_steps,
        snapshot_every=snapshot_every,
    )


def _training(known: _Known) -> Training:
    spec, seq_len = known.spec, sample_tokens(known.spec)
    batch = spec.training.global_batch_size
    return Training(
        world=spec.world_size,
        nodes=spec.cluster.nodes,
        workers_per_node=spec.cluster.workers_per_node,
        accelerator=known.machine.accelerator,
        strategy=f"dp_replicate {spec.world_size}",
        precision=spec.training.precision,
        optimizer=spec.training.optimizer.name,
        max_steps=spec.max_steps,
        global_batch_size=batch,
        micro_batch_size=spec.training.micro_batch_size,
        seq_len=seq_len,
        tokens_per_step=None if seq_len is None else batch * seq_len,
    )


def _model(known: _Known) -> ModelSize:
    model, sizes, seq_len = known.spec.model, known.sizes, sample_tokens(known.spec)
    flop = None
    if isinstance(model, GptModel) and seq_len is not None:
        flop = gpt.forward_flop(model, known.spec.training.micro_batch_size, seq_len)
    return ModelSize(
        parameters=sizes.parameters if sizes else None,
        layers=model.n_layers if isinstance(model, GptModel) else None,
        state_bytes=sizes.state_bytes if sizes else None,
        state_bytes_per_rank=sizes.shard_bytes if sizes else None,
        tensors=sizes.tensors if sizes else None,
        forward_flop=flop,
    )


def _iteration(known: _Known) -> Iteration:
    times = known.times
    return Iteration(
        micro_batches=known.spec.micro_batches,
        forward_s=times.forward_s if times else None,
        backward_s=times.backward_s if times else None,
        window_s=known.window_s,
        optimizer_s=times.optimizer_s if times else None,
        exchange_s=times.exchange_s if times else None,
        step_s=known.step_s,
    )


def _storage(known: _Known) -> Storage:
    copy_s = known.sizes.shard_bytes / known.bytes_per_s if known.sizes else None
    load = copy_s / known.window_s if copy_s is not None and known.window_s else None
    return Storage(known.bytes_per_s, copy_s, load)


def _tier(known: _Known, tier: TierSpec, every: int) -> TierPlan:
    bytes_ = known.sizes.state_bytes if known.sizes else None
    keep = tier.keep if isinstance(tier, SlowTier) else SNAPSHOTS_KEPT
    write_s = None
    if known.costs is not None:
        write_s = known.costs.slow_s(tier.type) if isinstance(tier, SlowTier) else known.costs.copy_s
    return TierPlan(
        type=tier.type,
        every=every,
        auto=tier.every == "auto",
        bytes=bytes_,
        write_s=write_s,
        keep=keep,
        peak_bytes=None if bytes_ is None else _at_most(tier, known.spec.max_steps) * bytes_,
        survives=SURVIVES[tier.type],
    )


def _at_most(tier: TierSpec, max_steps: int) -> int:
    """Return how many checkpoints can be there at once, the one being written included."""
    if not isinstance(tier, SlowTier):
        return SNAPSHOTS_KEPT + 1
    return tier.keep + 1 + (max_steps // tier.keep_every if tier.keep_every is not None else 0)


def _memory(known: _Known) -> MemoryNeed:
    shard = known.sizes.shard_bytes if known.sizes else None
    return memory_need(
        parts=device_parts(known.spec, known.sizes) if known.sizes else None,
        shard_bytes=shard if known.spec.tiers else 0,
        workers_per_node=known.spec.cluster.workers_per_node,
        device_limit_bytes=known.rates.device_memory_bytes,
        host_limit_bytes=known.machine.host_memory_bytes,
        shm_free_bytes=known.machine.shm_free_bytes,
    )


def _expected(known: _Known, every: dict[str, int]) -> Expected:
    """Weigh what checkpoints cost against what faults cost."""
    spec, costs, step_s = known.spec, known.costs, known.step_s
    mtbf_s, budget = job_mtbf_s(spec.cluster, spec.world_size), spec.checkpoint.max_overhead
    if costs is None or step_s is None:
        nothing = Faults(None, None, None)
        return Expected(None, budget, None, nothing, nothing, mtbf_s, None)
    overhead_s, stall_s = _cost_per_step_s(costs, every, step_s)
    sources = {kind: _source(known, costs, every, kind) for kind in KINDS}
    lost = Faults(*(lost_steps(sources[kind], step_s, spec.max_steps) for kind in KINDS))
    recovery = Faults(*(recovery_s(kind, spec.cluster, sources[kind]) for kind in KINDS))
    overhead = overhead_s / step_s
    useful = goodput(overhead, step_s, mtbf_s, lost, recovery)
    return Expected(overhead, budget, stall_s, lost, recovery, mtbf_s, useful)


def _cost_per_step_s(costs: Costs, every: dict[str, int], step_s: float) -> tuple[float, float]:
    """Return what checkpoints add to a step on average, and how much of it is waiting."""
    if not every:
        return 0.0, 0.0
    slow = [kind for kind in every if kind != "memory"]
    snapshots = next(iter(every.values()))
    stall_s = costs.snapshot_stall_s / snapshots
    taken_s = costs.snapshot_cpu_s / snapshots
    if slow:  # only the first holds snapshots; what follows is filled from it and waited for by nobody
        stall_s += backlog_s(costs.slow_s(slow[0]), every[slow[0]], step_s) / every[slow[0]]
    taken_s += sum(costs.drain_cpu_s / every[kind] for kind in slow)
    return stall_s + taken_s, stall_s


def _source(known: _Known, costs: Costs, every: dict[str, int], kind: str) -> Source | None:
    """Return the fastest tier that survives a fault of `kind`.

    Each rank, or node, reads its own part; then the parts are gathered, for every rank holds the whole state.
    """
    tier = next((tier for tier in every if kind in SURVIVES[tier]), None)
    if tier is None or known.sizes is None:
        return None
    world, state = known.spec.world_size, known.sizes.state_bytes
    gather_s = (world - 1) / world * state / known.rates.exchange_bytes_per_s
    if tier == "memory":
        return Source(every[tier], costs.commit_lag_s, costs.copy_s + gather_s)
    node_bytes = known.sizes.shard_bytes * known.spec.cluster.workers_per_node
    read_s = node_bytes / (DISK_BYTES_PER_S if tier == "disk" else OBJECT_BYTES_PER_S)
    return Source(every[tier], costs.commit_lag_s + costs.slow_s(tier), read_s + gather_s)
