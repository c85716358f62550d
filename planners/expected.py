"""What the plan costs and what a fault costs: overhead, lost work, time to recover, goodput.

All times are means; faults are taken to be independent and rare (at most one at a time).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..specs.models import Cluster

NOTICE_EXIT_S = 1.0
"""Assumed time in which a node's agent notices that a worker has ended."""
KINDS = ("process", "node", "cluster")
RARE = 1e6
"""Faults this much rarer may as well be infinitely rare: the exact forms would lose digits."""

LEAST_MEAN = 1e-300
"""Steps between faults, where training does nothing but wait."""


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

    tier: str
    every: float
    lag_s: float
    """Time from the update whose state it is to the commit."""
    read_s: float
    waiting: float = 0.0
    """Part of the time in which training waits for a slower tier."""
    waiting_steps: float = 0.0
    """Work that is lost by a fault in that time, in steps."""


@dataclass(frozen=True, slots=True)
class Before:
    """Faults that a faster tier answers: they throw training back within an interval of the slower one."""

    mtbf_s: float
    every: float
    """Steps between two checkpoints of that tier."""
    lag_s: float


def lost_steps(
    source: Source | None, step_s: float, max_steps: int, mtbf_s: float = math.inf, faster: Before | None = None
) -> float:
    """Return the expected work lost, in steps, the broken one included.

    Commits follow each other at distance I, the first one after a recovery at I too, each with a lag a. The time X
    from a recovery to the next fault that reads from here or from a slower tier has mean M and is taken to be
    exponential (as Daly 2006, doi:10.1016/j.future.2004.11.016). Lost is X if X < a, else a + (X - a) mod I:

        M·(1 - exp(-a/M)) + exp(-a/M)·(M - I/(exp(I/M) - 1)), which is a + I/2 for rare faults.

    With faults that a `faster` tier answers in between, see `_lost_behind`.
    While training waits for a slower tier, its work stands still at what is lost then, or at X if that is less.
    Without a tier that survives, everything so far is lost: half of the run on average; that is the upper limit with
    a tier, too.
    """
    everything = max_steps / 2
    if source is None:
        return everything
    mean = max(mtbf_s / step_s * (1 - source.waiting), LEAST_MEAN)
    lag = source.lag_s / step_s
    if faster is not None:
        between = max(faster.mtbf_s / step_s * (1 - source.waiting), LEAST_MEAN)
        running = _lost_behind(source.every, lag, mean, faster.every, faster.lag_s / step_s, between)
    else:
        running = _at_most(lag, mean)
        running += math.exp(-lag / mean) * _mean_rest(source.every, mean)
    standing = _at_most(source.waiting_steps, mean)
    return min(everything, (1 - source.waiting) * running + source.waiting * standing)


def _lost_behind(every: float, lag: float, mean: float, near: float, near_lag: float, between: float) -> float:
    """Return the work lost by a fault that reads from a tier behind a faster one; all in steps.

    A renewal argument: between two such faults lie M steps on average, in which training is thrown back M/M' times to
    the faster tier, and what lasts are the slower tier's commits. So with i and l the interval and the lag of the
    faster tier, I and a those of the slower one, Λ = 1/M + 1/M' and q = (1/M')/Λ:

    - after a recovery the faster tier commits before the next fault with probability f = exp(-Λ(i + l)), after a commit
      with e = exp(-Λi), so a fault of either kind finds i·f/(1 - e) steps in it that last;
    - it commits before the next fault of the slower kind, however often it is thrown back, with probability
      F = f/(1 - (1 - f)·q), after a commit with R = e + (1 - e)·q·F;
    - the slower tier's first commit takes m = I/i of those, each further one m more, and its own lag comes on top: a
      fault finds I·K steps in it, K = F·R^(m-1)·exp(-(a - l)/M)/(1 - R^m).

    Lost are M - (M/M')·(1/Λ - i·f/(1 - e)) - I·K, where M - (M/M')/Λ = 1/Λ.
    """
    mean, between = (min(value, RARE * (every + lag)) for value in (mean, between))
    rate = 1 / mean + 1 / between
    part = 1 / between / rate
    first, failing = math.exp(-rate * (near + near_lag)), -math.expm1(-rate * near)
    reached = first / (1 - (1 - first) * part)
    # 1 - R, in which no digits are lost for rare faults
    left = failing * (1 - part * reached)
    steps = max(1.0, every / near)
    whole = steps * math.log1p(-left) if left < 1 else -math.inf
    kept = near * first / failing
    commits = reached * math.exp(whole * (steps - 1) / steps - max(0.0, lag - near_lag) / mean) / -math.expm1(whole)
    return max(0.0, 1 / rate + mean / between * kept - every * commits)


def _at_most(limit: float, mean: float) -> float:
    """Return the mean of min(X, `limit`) for an exponential X."""
    return limit if mean > RARE * limit else mean * -math.expm1(-limit / mean)


def _mean_rest(interval: float, mean: float) -> float:
    """Return the mean of X mod `interval` for an exponential X."""
    if mean > RARE * interval:
        return interval / 2
    ratio = interval / mean
    return mean - (interval / math.expm1(ratio) if ratio < 700 else 0.0)  # above, e^ratio is no float


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

    In a time W of running, faults of kind i come W/M_i times; each takes its lost work out of W and adds its recovery,
    in which nothing else fails. The rest are steps stretched by the overhead h:

        U = (1 - Σ lost_i·step·(1+h)/M_i) / ((1 + h)·(1 + Σ recovery_i/M_i))

    which is exact if the lost work is: the renewal reward theorem. 0 when lost work takes all the time.
    """
    repeated = away = 0.0
    for kind in KINDS:
        mean_s, steps, wait_s = (getattr(figures, kind) for figures in (mtbf_s, lost, recovery))
        if mean_s and steps is not None and wait_s is not None:
            repeated += steps * step_s * (1 + overhead) / mean_s
            away += wait_s / mean_s
    return max(0.0, 1 - repeated) / ((1 + overhead) * (1 + away))
