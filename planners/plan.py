"""From a spec and a machine to the plan: sizes, times, windows, intervals, memory, expected losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from ..specs.models import Spec
from ..specs.places import MemoryTier, PeerTier, SlowTier
from ..specs.places import Tier as TierSpec
from .devices import assumptions
from .document import Expected, Iteration, ModelSize, Plan, Storage, TierPlan, Training, plan_from_json
from .expected import KINDS, Before, Faults, Source, fault_rate, goodput, job_mtbf_s, lost_steps, recovery_s
from .intervals import Interval
from .known import Known, know
from .machine import Machine, Measured
from .memory import REPLICA_SLOTS, SNAPSHOTS_KEPT, MemoryNeed, memory_need
from .models.workload import sample_tokens
from .notes import plan_assumptions, plan_warnings
from .remedies import changes, reasons
from .schedule import SURVIVES, cost_per_step_s, files_each, held_at_most, peer_pace, source, tier_intervals
from .sharding.layout import Cuts
from .sharding.mesh import mesh_of
from .sharding.shards import TensorInfo
from .sizes import device_parts

__all__ = ["Machine", "Measured", "Plan", "make_plan", "plan_from_json"]


def make_plan(
    spec: Spec,
    machine: Machine,
    measured: Measured | None = None,
    parameters: Sequence[TensorInfo] | None = None,
    cuts: Cuts | None = None,
) -> Plan:
    """Plan one run of `spec` on nodes like `machine`.

    `measured` replaces the tables' times and rates: a run that has timed its first steps calls this again with what
    it saw, everything else unchanged. `parameters` are the tensors of the model as built; without them a python model
    is counted by its `like`, and if it has none its sizes and bytes per window are None, and without `measured` its
    times are. `cuts` say how a python model is cut, where tp or pp do that.
    """
    if spec.micro_batches < 1:
        raise ValueError(
            f"training.global_batch_size {spec.training.global_batch_size} is less than one micro-batch of "
            f"{spec.training.micro_batch_size} on each of {spec.world_size} ranks"
        )
    known = know(spec, machine, measured, parameters, cuts)
    every = tier_intervals(known)
    tiers = tuple(_tier(known, tier, every[tier.type]) for tier in spec.used_tiers)
    steps = {kind: interval.steps for kind, interval in every.items()}
    forward, backward = known.storage_parameters
    expected, memory = _expected(known, steps), _memory(known)
    times_from = "unknown" if known.times is None else "table" if measured is None else "measured"
    rests_on = assumptions(spec, machine, times_from == "table", measured, known.rates, known.bytes_per_s)
    return Plan(
        name=spec.name,
        source=times_from,
        training=_training(known),
        model=_model(known),
        iteration=_iteration(known),
        storage=_storage(known),
        forward=forward,
        backward=backward,
        tiers=tiers,
        memory=memory,
        expected=expected,
        evaluation=known.evaluation,
        why=tuple(reasons(known, (forward, backward))),
        changes=tuple(changes(known, every)),
        assumptions=tuple(plan_assumptions(spec, machine, rests_on, known.work, known.times, known.sizes)),
        warnings=tuple(
            plan_warnings(
                spec,
                machine,
                memory=memory,
                expected=expected,
                every=steps,
                costs=known.costs,
                step_s=known.step_s,
            )
        ),
    )


def _training(known: Known) -> Training:
    spec, seq_len = known.spec, sample_tokens(known.spec)
    batch = spec.training.global_batch_size
    return Training(
        world=spec.world_size,
        nodes=spec.cluster.nodes,
        workers_per_node=spec.cluster.workers_per_node,
        accelerator=known.machine.accelerator,
        strategy=" x ".join(mesh_of(spec).words()),
        data_parallel=spec.data_parallel,
        precision=spec.training.precision,
        optimizer=spec.training.optimizer.name,
        max_steps=spec.max_steps,
        global_batch_size=batch,
        micro_batch_size=spec.training.micro_batch_size,
        seq_len=seq_len,
        tokens_per_step=None if seq_len is None else batch * seq_len,
    )


def _model(known: Known) -> ModelSize:
    sizes, work = known.sizes, known.work
    return ModelSize(
        parameters=sizes.parameters if sizes else None,
        layers=work.model.n_layers if work else None,
        state_bytes=sizes.state_bytes if sizes else None,
        state_bytes_per_rank=sizes.shard_bytes if sizes else None,
        tensors=sizes.tensors if sizes else None,
        forward_flop=work.forward_flop if work else None,
    )


def _iteration(known: Known) -> Iteration:
    times = known.times
    return Iteration(
        micro_batches=known.spec.micro_batches,
        forward_s=times.forward_s if times else None,
        backward_s=times.backward_s if times else None,
        window_s=known.windows.window_s if known.windows else None,
        optimizer_s=times.optimizer_s if times else None,
        exchange_s=times.exchange_s if times else None,
        bubble_s=times.bubble_s if times else None,
        step_s=known.step_s,
    )


def _storage(known: Known) -> Storage:
    shard = known.sizes.shard_bytes if known.sizes else None
    copy_s = None if shard is None else shard / known.bytes_per_s
    windows = known.windows
    if shard is None or windows is None:
        return Storage(known.bytes_per_s, copy_s, None, None, None, None, None)
    return Storage(
        bytes_per_s=windows.bytes_per_s,
        copy_s=shard / windows.bytes_per_s,
        load=shard / windows.capacity_bytes if windows.capacity_bytes > 0 else None,
        pace=windows.pace(shard),
        capacity_bytes=windows.capacity_bytes,
        gradients_s=windows.gradients_s,
        stall_s=windows.stall_s(shard),
    )


def _tier(known: Known, tier: TierSpec, every: Interval) -> TierPlan:
    bytes_ = known.sizes.state_bytes if known.sizes else None
    slow = tier if isinstance(tier, SlowTier) else None
    most = held_at_most(tier, known.spec.max_steps)
    write_s = None
    if known.costs is not None:
        write_s = known.costs.copy_s if isinstance(tier, MemoryTier) else known.costs.slow_s(tier.type)
    replicas = tier.replicas if isinstance(tier, PeerTier) else 1
    kept = REPLICA_SLOTS - 1 if isinstance(tier, PeerTier) else SNAPSHOTS_KEPT
    return TierPlan(
        type=tier.type,
        every=every.steps,
        auto=tier.every == "auto",
        why=every.why,
        bytes=bytes_,
        write_s=write_s,
        keep=slow.keep if slow else kept,
        keep_every=slow.keep_every if slow else None,
        peak_bytes=None if bytes_ is None else most * replicas * bytes_,
        peak_files=most * files_each(slow, known.spec.world_size) if slow else None,
        survives=SURVIVES[tier.type],
        replicas=replicas if isinstance(tier, PeerTier) else None,
        pace_bytes_per_s=peer_pace(known, every.steps) if isinstance(tier, PeerTier) else None,
    )


def _memory(known: Known) -> MemoryNeed:
    shard = known.sizes.shard_bytes if known.sizes else None
    host = known.spec.cluster.hardware.host_memory
    on_cpu = known.machine.accelerator == "cpu"
    return memory_need(
        parts=device_parts(known.spec, known.sizes, known.work, on_cpu=on_cpu) if known.sizes else None,
        shard_bytes=shard if known.spec.used_tiers else 0,
        workers_per_node=known.spec.cluster.workers_per_node,
        device_limit_bytes=known.rates.device_memory_bytes,
        host_limit_bytes=known.machine.host_memory_bytes if host == "auto" else host,
        shm_free_bytes=known.machine.shm_free_bytes,
        replicas=known.spec.peer_tier.replicas if known.spec.peer_tier else 0,
    )


def _lost(mtbf_s: Faults, sources: dict[str, Source | None], kind: str, step_s: float, max_steps: int) -> float:
    """Return the work that a fault of this kind costs, among faults of the others.

    Those that read from the same tier or a slower one throw the run back at least as far; those that a faster tier
    answers only within its interval.
    """
    own = sources[kind]
    faster = [other for other in KINDS if KINDS.index(other) < KINDS.index(kind) and sources[other] != own]
    if own is None:
        faster = []
    rate = fault_rate(mtbf_s, [other for other in KINDS if other not in faster])
    before_rate = fault_rate(mtbf_s, faster)
    nearest = sources[faster[0]] if faster else None
    before = Before(1 / before_rate, nearest.every, nearest.lag_s) if nearest is not None and before_rate else None
    return lost_steps(own, step_s, max_steps, 1 / rate if rate else math.inf, before)


def _expected(known: Known, every: dict[str, int]) -> Expected:
    """Weigh what checkpoints cost against what faults cost."""
    spec, costs, step_s = known.spec, known.costs, known.step_s
    mtbf_s, budget = job_mtbf_s(spec.cluster, spec.world_size), spec.checkpoint.max_overhead
    if costs is None or step_s is None:
        nothing = Faults(None, None, None)
        return Expected(None, budget, None, nothing, nothing, mtbf_s, None)
    overhead_s, stall_s = cost_per_step_s(known, costs, every, step_s)
    busy_s = step_s + cost_per_step_s(known, costs, every, step_s, waits=False)[0]
    sources = {kind: source(known, costs, every, kind, busy_s) for kind in KINDS}
    each = (_lost(mtbf_s, sources, kind, busy_s, spec.max_steps) for kind in KINDS)
    # whenever a fault comes, a slower tier has nothing newer than a faster one; where training all but stands still the
    # two forms are of differences in which digits are lost
    lost = Faults(*accumulate(each, max))
    recovery = Faults(*(recovery_s(kind, spec.cluster, sources[kind]) for kind in KINDS))
    overhead = overhead_s / step_s
    useful = goodput(overhead, step_s, mtbf_s, lost, recovery)
    return Expected(overhead, budget, stall_s, lost, recovery, mtbf_s, useful)
