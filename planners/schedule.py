"""When each tier gets a checkpoint, what that costs the training, and how much the tier holds at most."""

from __future__ import annotations

import math
from itertools import takewhile

from ..specs.models import Spec
from ..specs.places import DiskTier, MemoryTier, ObjectTier, PeerTier, SlowTier
from ..specs.places import Tier as TierSpec
from . import intervals
from .costs import Costs, backlog_s
from .expected import KINDS, Source, fault_rate, job_mtbf_s
from .intervals import Interval, Place, Wanted
from .known import Known
from .memory import REPLICA_SLOTS, SNAPSHOTS_KEPT
from .rhythm import rhythm

SURVIVES: dict[str, tuple[str, ...]] = {
    "memory": ("process",),
    "peer": ("process", "node"),
    "disk": KINDS,
    "object": KINDS,
}
"""Faults after which a tier can still be read; for a disk inside the node that is lost see the plan's notes, and of
nodes the peer tier survives as many as it has replicas."""
MOST_SPARSE = 1e-3
"""Least part of the time that copies to other nodes may take from passes on a CPU, where snapshots take the budget."""
PEER_PART = 0.9
"""Part of its interval in which a copy to other nodes is sent, where gradients use the same link: less at a time."""


def tier_intervals(known: Known) -> dict[str, Interval]:
    """Return the steps between two checkpoints of each tier that the spec has, fastest first."""
    every: dict[str, Interval] = {}
    wanted: dict[str, Wanted | None] = {
        tier.type: _wanted(known, tier) for tier in known.spec.used_tiers if tier.every == "auto"
    }
    for tier in known.spec.used_tiers:  # each is filled from the one before
        if tier.every != "auto":
            every[tier.type] = Interval(tier.every, intervals.GIVEN)
            continue
        # memory is filled from nothing, other nodes from memory, a slower tier from memory or disk
        sources = [every[kind].steps for kind in every if kind != "peer"]
        place = _place(known, tier, sources[-1] if sources else 1, wanted)
        own = wanted[tier.type]
        if own is not None:
            every[tier.type] = place.fitted(own)
        elif isinstance(tier, SlowTier):
            every[tier.type] = intervals.untimed_every(place)
        else:
            every[tier.type] = Interval(place.source_every, intervals.UNTIMED)
        if isinstance(tier, PeerTier) and own is not None and every[tier.type].steps == place.source_every:
            every[tier.type] = Interval(place.source_every, intervals.WITH_SNAPSHOT)
    return every


def _wanted(known: Known, tier: TierSpec) -> Wanted | None:
    """Return the interval that a tier would have by itself; None while times are not known."""
    if isinstance(tier, MemoryTier):
        return _memory_wanted(known)
    return _peer_wanted(known) if isinstance(tier, PeerTier) else _slow_wanted(known, tier)


def _place(known: Known, tier: TierSpec, source: int, wanted: dict[str, Wanted | None]) -> Place:
    """Return what the interval of a tier must fit in with: `source` of the tier that it is filled from, and the rest.

    It must divide given ones of tiers that are filled from it, and steps to be kept for good from it on, except those
    that no multiple of what is given before it divides.
    """
    spec, peer = known.spec, known.spec.peer_tier
    tiers = [other for other in spec.used_tiers if other is tier or not isinstance(other, PeerTier)]
    position = tiers.index(tier)
    if tier is peer:  # nothing is filled from it
        del tiers[position + 1 :]
    after = list(takewhile(lambda other: other.every == "auto", tiers[position + 1 :]))
    if peer is not None and peer.every == "auto" and isinstance(tier, MemoryTier):
        after.append(peer)
    given = next((other.every for other in reversed(tiers[:position]) if other.every != "auto"), 1)
    fixed = [other.every for other in tiers[position + 1 :] if other.every != "auto"]
    fixed += [other.keep_every for other in tiers[position:] if isinstance(other, SlowTier) and other.keep_every]
    reached = [steps for steps in fixed if steps <= spec.max_steps and steps % given == 0]
    chosen = [found.steps if found else 1 for found in (wanted[other.type] for other in after)]
    return Place(
        spec.max_steps,
        source,
        math.gcd(*reached) if reached else None,
        follows_auto=position > 0 and tiers[position - 1].every == "auto",
        after=max(chosen, default=None),
    )


def _memory_wanted(known: Known) -> Wanted | None:
    """Return the memory tier's interval."""
    spec = known.spec
    if known.costs is None or known.step_s is None:
        return None
    mtbf_s = 1 / fault_rate(job_mtbf_s(spec.cluster, spec.world_size), SURVIVES["memory"])
    return intervals.memory_every(
        known.costs.snapshot_s, known.step_s, spec.checkpoint.max_overhead, mtbf_s, spec.max_steps
    )


def _peer_wanted(known: Known) -> Wanted | None:
    """Return the peer tier's interval: the shortest in which the copies are with all peers; untimed, each snapshot."""
    costs, step_s, spec = known.costs, known.step_s, known.spec
    if costs is None or step_s is None:
        return None
    sustained = math.ceil(min(costs.slow_s("peer") / step_s, intervals.NEVER))
    left_s = spec.checkpoint.max_overhead * step_s - snapshots_s(known, costs, step_s)
    allowed = math.ceil(min(costs.peer_cpu_s / max(left_s, MOST_SPARSE * step_s), intervals.NEVER))
    allowed = min(allowed, spec.max_steps // intervals.LEAST_PER_RUN)
    why = intervals.BUDGET if allowed > sustained else intervals.SUSTAINED
    return Wanted(max(sustained, allowed), why)


def snapshots_s(known: Known, costs: Costs, step_s: float) -> float:
    """Return what the memory tier takes of a step, of which slower tiers have the rest: every step where it is chosen.

    What is left with fewer snapshots would grow and fall with the rounding of their interval.
    """
    memory = [tier for tier in known.spec.used_tiers if isinstance(tier, MemoryTier)]
    every: dict[str, int] = {tier.type: 1 if tier.every == "auto" else tier.every for tier in memory}
    return cost_per_step_s(known, costs, every, step_s)[0]


def peer_pace(known: Known, every: int) -> float | None:
    """Return the rate at which a node sends copies to its peers, bytes per second; None: as fast as it can.

    Where gradients cross the same link the copies are spread over their interval, so that there is little of them at
    any time.
    """
    costs, step_s, peer = known.costs, known.step_s, known.spec.peer_tier
    if peer is None or costs is None or step_s is None or known.sizes is None or not _peers_share_link(known.spec):
        return None
    sent = known.sizes.shard_bytes * known.spec.cluster.workers_per_node * peer.replicas
    return sent / (PEER_PART * every * step_s)


def _peers_share_link(spec: Spec) -> bool:
    """Tell whether copies for peers take the way of the gradients: so unless the spec names an interface for each."""
    channels = spec.cluster.channels
    if channels.storage.shared != "auto":
        return channels.storage.shared
    return channels.storage.interface in ("auto", channels.compute.interface)


def _slow_wanted(known: Known, tier: DiskTier | ObjectTier) -> Wanted | None:
    """Return a slower tier's interval, within what snapshots leave of the budget.

    Without a memory tier the snapshots are made for the first slower one alone, and count as its cost; and it is
    the one that a lost worker reads from.
    """
    costs, step_s, spec = known.costs, known.step_s, known.spec
    if costs is None or step_s is None:
        return None
    write_s = costs.slow_s(tier.type)
    if tier is not spec.first_slow_tier:
        return intervals.far_every(
            write_s=write_s, lag_s=costs.commit_lag_s + costs.write_s, step_s=step_s, max_steps=spec.max_steps
        )
    before = any(isinstance(other, MemoryTier) for other in spec.used_tiers)
    served = [kind for kind in KINDS if not before or kind not in SURVIVES["memory"]]
    return intervals.slow_every(
        write_s=write_s,
        cost_s=costs.drain_cpu_s + (0.0 if before else costs.snapshot_s),
        step_s=step_s,
        budget=max(0.0, spec.checkpoint.max_overhead - snapshots_s(known, costs, step_s) / step_s),
        mtbf_s=1 / fault_rate(job_mtbf_s(spec.cluster, spec.world_size), served),
        max_steps=spec.max_steps,
    )


def cost_per_step_s(
    known: Known, costs: Costs, every: dict[str, int], step_s: float, *, waits: bool = True
) -> tuple[float, float]:
    """Return what checkpoints add to a step on average, and how much of it is waiting.

    With `waits` false the waits for a slower tier are left out.
    """
    if not every:
        return 0.0, 0.0
    slow = [tier for tier in known.spec.slow_tiers if tier.type in every]
    snapshots = next(iter(every.values()))
    peers_s = costs.peer_cpu_s / every["peer"] if "peer" in every else 0.0
    stall_s = _mean_stall_s(known, costs, snapshots)
    taken_s = costs.snapshot_cpu_s / snapshots + peers_s
    # only the first slower tier holds snapshots; what follows is filled from it, waited for by nobody
    if waits and slow and slow[0].waits:
        steps = every[slow[0].type]
        stall_s += backlog_s(costs.slow_s(slow[0].type), steps, step_s) / steps
    taken_s += sum(costs.drain_cpu_s / every[tier.type] for tier in slow)
    return stall_s + taken_s, stall_s


def _mean_stall_s(known: Known, costs: Costs, snapshots: int) -> float:
    """Return the wait for copies per step; the copy that has an evaluation before the next step has its time, too."""
    evaluation = known.evaluation
    if evaluation is None or evaluation.time_s is None:
        return costs.snapshot_stall_s / snapshots
    spared_s = min(costs.snapshot_stall_s, evaluation.time_s)
    return costs.snapshot_stall_s / snapshots - spared_s / math.lcm(snapshots, evaluation.every)


def source(known: Known, costs: Costs, every: dict[str, int], kind: str, step_s: float) -> Source | None:
    """Return the fastest tier that survives a fault of `kind`.

    Each rank, or node, reads its own part; then every rank is given the rest of what it holds.
    """
    tier = next((tier for tier in known.spec.used_tiers if kind in SURVIVES[tier.type]), None)
    if tier is None or known.sizes is None:
        return None
    missing = max(0, known.sizes.rank_state_bytes - known.sizes.shard_bytes)
    gather_s = missing / known.rates.exchange_bytes_per_s
    steps, waiting = every[tier.type], waiting_part(known, costs, every, step_s)
    if isinstance(tier, MemoryTier):
        return Source("memory", steps, costs.commit_lag_s, costs.copy_s + gather_s, waiting, steps)
    if isinstance(tier, PeerTier):
        read_s = known.sizes.shard_bytes / known.rates.network_bytes_per_s + gather_s
        # offered at the end of a step, all that was due since the one before is one
        lag_s, sent = max(costs.commit_lag_s, step_s) + costs.slow_s("peer"), math.ceil(costs.slow_s("peer") / step_s)
        return Source("peer", max(steps, sent), lag_s, read_s, waiting, steps)
    node_bytes = known.sizes.shard_bytes * known.spec.cluster.workers_per_node
    on_disk = isinstance(tier, DiskTier)
    read_s = node_bytes / (known.rates.disk_bytes_per_s if on_disk else known.rates.object_bytes_per_s) + gather_s
    write_s = costs.slow_s(tier.type)
    if waiting > 0:
        # While one checkpoint is written the next one is copied, and the snapshot after that takes the third slot: the
        # second after it waits. So the newest whole one is that far and one interval behind when its write ends, and
        # one interval more when the next one's does.
        ahead = 2 * next(iter(every.values()))
        return Source(tier.type, steps, (steps + ahead) * step_s, read_s, waiting, 2 * steps + ahead)
    if tier.waits:
        return Source(tier.type, steps, costs.commit_lag_s + write_s, read_s)
    update_s = known.times.optimizer_s if known.times is not None else 0.0
    made = rhythm(costs.commit_lag_s, write_s, steps, step_s, update_s)
    return Source(tier.type, made.steps, made.lag_s, read_s)


def waiting_part(known: Known, costs: Costs, every: dict[str, int], step_s: float) -> float:
    """Return the part of the time in which training waits for a slower tier that it is to wait for."""
    tier = known.spec.first_slow_tier
    if tier is None or not tier.waits:
        return 0.0
    waited_s = backlog_s(costs.slow_s(tier.type), every[tier.type], step_s)
    return waited_s / (every[tier.type] * step_s + waited_s)


def keeps_up(costs: Costs, kind: str, position: int, every: int, step_s: float) -> bool:
    """Tell whether a slower tier, the `position`-th of the job from 0, gets every checkpoint that is due in it.

    The first one has the time from one to the next. One that is filled from it is busy from there on, and takes up
    nothing meanwhile.
    """
    write_s = costs.slow_s(kind)
    if position == 0:
        return backlog_s(write_s, every, step_s) == 0
    return costs.commit_lag_s + costs.write_s + write_s <= every * step_s


def held_at_most(tier: TierSpec, max_steps: int) -> int:
    """Return how many checkpoints a tier can hold at once, the one being written included."""
    if isinstance(tier, PeerTier):
        return REPLICA_SLOTS
    if not isinstance(tier, SlowTier):
        return SNAPSHOTS_KEPT + 1
    return tier.keep + 1 + (max_steps // tier.keep_every if tier.keep_every is not None else 0)


def files_each(tier: SlowTier, world: int) -> int:
    """Return the files of one checkpoint: a shard per rank, the manifest, and where there are folders, one."""
    in_bucket = isinstance(tier, ObjectTier) and not tier.is_folder
    return world + (1 if in_bucket else 2)
