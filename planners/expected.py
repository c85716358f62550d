"""What the plan costs and what a fault costs: overhead, lost work, time to recover, goodput.

All times are means; faults are taken to be independent and rare (at most one at a time).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..specs.models import Cluster

NOTICE_EXIT_S = 1.0
"""Assumed time in which a node's agent notices that a worker has ended."""
KINDS = ("process", "node", "cluster")


@dataclass(frozen=True, slots=True)
class Faults:
    """One figure per kind of fault; None: not known, or not given."""

    process: float | None
    """A worker ends; its node and the snapshots in its memory live on."""
    node: float | None
    """A node is lost with its memory."""
    cluster: float | None
    """All nodes are lost at once."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tier to recover from: how often it has a new checkpoint, how late, how fast it is read."""

    every: int
    lag_s: float
    """Time from the update whose state it is to the commit."""
    read_s: float


def lost_steps(source: Source | None, step_s: float, max_steps: int) -> float:
    """Return the expected work lost, in steps, the broken one included.

    Commits follow each other at distance k, so a fault finds the newest k/2 steps old on average, plus the lag
    with which it is committed. Without a tier that survives, everything so far is lost: half of the run on
    average; that is the upper limit with a tier, too.
    """
    everything = max_steps / 2
    if source is None:
        return everything
    return min(everything, source.every / 2 + source.lag_s / step_s)


def notice_s(kind: str, cluster: Cluster) -> float:
    """Return the time until a fault is noticed; a lost cluster counts from when it is back."""
    return {"process": NOTICE_EXIT_S, "node": cluster.heartbeat_timeout, "cluster": 0.0}[kind]


def recovery_s(kind: str, cluster: Cluster, source: Source | None) -> float:
    """Return the time from a fault to the first repeated step: notice, restart, read. Lost work is not in it."""
    return notice_s(kind, cluster) + cluster.hardware.restart_time + (source.read_s if source else 0.0)


def job_mtbf_s(cluster: Cluster, world: int) -> Faults:
    """Return the mean time between faults of the whole job; failure rates of independent parts add up."""
    return Faults(cluster.mtbf.process / world, cluster.mtbf.node / cluster.nodes, None)


def fault_rate(mtbf_s: Faults, kinds: Iterable[str] = KINDS) -> float:
    """Return faults per second of the whole job, over those of `kinds` whose mean time is given."""
    means: list[float | None] = [getattr(mtbf_s, kind) for kind in kinds]
    return sum(1 / mean_s for mean_s in means if mean_s)


def goodput(overhead: float, step_s: float, mtbf_s: Faults, lost: Faults, recovery: Faults) -> float:
    """Return the part of the wall time that goes into steps that last.

    In a wall time W, faults of kind i take W/M_i times (lost work + recovery), the rest is steps stretched by
    the overhead h: U = W·(1 - Σ (lost_i·step·(1+h) + recovery_i)/M_i)/(1+h). First order in the failure rate
    (as Young 1974); 0 when faults take all the time.
    """
    taken = 0.0
    for kind in KINDS:
        mean_s, steps, wait_s = (getattr(figures, kind) for figures in (mtbf_s, lost, recovery))
        if mean_s and steps is not None and wait_s is not None:
            taken += (steps * step_s * (1 + overhead) + wait_s) / mean_s
    return max(0.0, 1 - taken) / (1 + overhead)
