"""Why the storage parameters are what they are, and what would have to change for more, in sentences with figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ..specs.models import Spec
from ..specs.places import SlowTier
from .costs import Costs
from .devices import DISK_COMMIT_S, OBJECT_COMMIT_S
from .intervals import BUDGET, DRAIN_SHARE, SUSTAINED, Interval
from .known import Known
from .schedule import cost_per_step_s, keeps_up, snapshots_s, tier_intervals
from .sharding.layers import stages_per_rank
from .windows import FINISH_AT, StorageParameters, Windows
from .words import UNITS, duration, plural, share, size, three_digits

MOST_MICRO_BATCHES = 2**20
MOST_BUDGETS = 8
HALVINGS = 16
"""Of the way, in powers, between a network that is too slow and one that is fast enough: to a part in a thousand."""
NO_LIMIT = 1e18
"""Bytes per second that no network has."""
LONG_S = 1e-3
MARGIN = 1e-6
"""What is asked for is rounded up by this much, so that it is enough."""


def reasons(known: Known, parameters: tuple[StorageParameters, StorageParameters]) -> list[str]:
    """Say why the windows get the bytes that they get."""
    if not known.spec.used_tiers or known.sizes is None or known.windows is None:
        return []
    windows, shard = known.windows, known.sizes.shard_bytes
    capacity, stall_s, pace = windows.capacity_bytes, windows.stall_s(shard), windows.pace(shard)
    if stall_s > 0:
        fits = f"only {share(capacity / shard)} of it fits, and the update waits {duration(stall_s)} for the rest"
    else:
        fits = f"it fits {three_digits(capacity / shard)} times" if shard else "there is nothing to copy"
    lines = [
        f"one step can take {size(capacity)} per rank at {size(windows.bytes_per_s)}/s, a snapshot is "
        f"{size(shard)}: {fits}",
        _pace(windows, shard, pace),
    ]
    if windows.bytes_per_s < known.bytes_per_s:
        lines.append(
            f"what the strategy sends in every pass leaves the node by the same link: {size(windows.bytes_per_s)}/s of "
            f"{size(known.bytes_per_s)}/s are left to the copy"
        )
    slice_bytes = parameters[0].slice_bytes
    slice_s = slice_bytes / windows.bytes_per_s
    waits = "so nothing ever waits long for one" if slice_s <= LONG_S else "as long as an update may wait for the last"
    lines.append(
        f"forward and backward windows run at the same pace, so their bytes are as their times; a slice of "
        f"{size(slice_bytes)} takes {duration(slice_s)}, {waits}"
    )
    return lines


def _pace(windows: Windows, shard: int, pace: float) -> str:
    if windows.stall_s(shard) > 0:
        return "the copy runs at the channel's full rate in all windows, and on until it is done"
    if pace >= 1:
        slack_s = windows.window_s + windows.exchange_s - windows.unpaced_end_s(shard)
        beside = " (what gradients leave of the link is counted)" if windows.gradients_s > 0 else ""
        left = f"{duration(slack_s)} of slack are left" if slack_s > 0 else "no slack is left"
        return f"the copy runs at the channel's full rate; {left}{beside}"
    if pace > shard / windows.bytes_per_s / (FINISH_AT * windows.window_s) * (1 + MARGIN):
        return (
            f"at {share(pace)} of the channel's rate it is done before the last backward pass, in which gradients "
            f"need the same link for {duration(windows.gradients_s)}"
        )
    return (
        f"at {share(pace)} of the channel's rate it is done in {share(FINISH_AT)} of the windows' time; the rest is "
        "slack for shorter windows or a slower channel"
    )


def changes(known: Known, every: Mapping[str, Interval]) -> list[str]:
    """Say what would have to change, each with its figure, where not every step can be stored as planned."""
    costs, step_s = known.costs, known.step_s
    if costs is None or step_s is None or known.windows is None or known.sizes is None or not every:
        return []
    first = next(iter(every))
    lines = list(_for_every_step(known)) if first == "memory" else []
    if "peer" in every:
        lines += _for_peers(known, costs, every["peer"], every[first].steps, step_s)
    before: Interval | None = None
    for tier in known.spec.slow_tiers:
        source = before.steps if before else every[first].steps
        lines += _for_a_slow_tier(known, costs, tier, every[tier.type], source, step_s)
        before = every[tier.type]
    return lines


def _for_every_step(known: Known) -> Iterator[str]:
    """What lets a snapshot of every step, and the drains beside it, keep within the budget; nothing if they do."""
    spec, windows = known.spec, known.windows
    assert windows is not None
    if _keeps_within(known):
        return
    drains = " with the drains" if known.machine.accelerator == "cpu" and spec.slow_tiers else ""
    lead = f"a snapshot of every step{drains} within max_overhead needs "
    longer = _longer_step(known, _keeps_within)
    if longer is not None:
        yield lead + longer
        lead = "or "
    apart = known.on(_with_own_link(spec))
    if apart.windows is not None and apart.windows != windows and _keeps_within(apart):
        now, then = (f"{size(rate)}/s" for rate in (windows.bytes_per_s, apart.windows.bytes_per_s))
        gain = f"{then} instead of {now}" if now != then else f"{duration(windows.gradients_s)} more of each step"
        yield f"{lead}a second link, for the copy alone: {gain} (cluster.channels.storage.shared: false)"
        lead = "or "
    alone = windows.bytes_per_s == known.bytes_per_s  # else a faster copy is no remedy: others hold the link
    if alone and windows.stall_s(known.sizes.shard_bytes if known.sizes else 0) > 0:
        rate = windows.bytes_per_s
        k = _least(lambda k: _keeps_within(replace(known, windows=replace(windows, bytes_per_s=rate * k / 1000))), 1000)
        if k is not None:
            yield (
                f"{lead}a copy at {_rate(rate * k / 1000)} per rank instead of {size(rate)}/s "
                "(cluster.channels.storage.bandwidth)"
            )
            lead = "or "
    budget = _budget(known)
    if budget is not None:
        yield f"{lead}checkpoint.max_overhead {budget}% instead of {share(spec.checkpoint.max_overhead)}"


def _longer_step(known: Known, holds: Callable[[Known], bool]) -> str | None:
    """Say with how many micro-batches per step it holds; None: with no number that a batch can have."""
    spec, windows = known.spec, known.windows
    assert windows is not None
    each = stages_per_rank(spec.strategy)
    n = _least(lambda n: holds(replace(known, windows=replace(windows, micro_batches=n * each))), spec.micro_batches)
    if n is None:
        return None
    n += -n % spec.strategy.pp if spec.strategy.pp_schedule == "interleaved-1f1b" else 0
    batch = n * spec.training.micro_batch_size * spec.data_parallel
    now = spec.micro_batches
    return f"{plural(n, 'micro-batch')} per step instead of {now} (training.global_batch_size {batch})"


def _with_own_link(spec: Spec) -> Spec:
    """The spec with a second link for checkpoints."""
    channels = spec.cluster.channels
    storage = channels.storage.model_copy(update={"shared": False})
    cluster = spec.cluster.model_copy(update={"channels": channels.model_copy(update={"storage": storage})})
    return spec.model_copy(update={"cluster": cluster})


def _with_network(spec: Spec, bytes_per_s: float) -> Spec:
    hardware = spec.cluster.hardware.model_copy(update={"network_bandwidth": bytes_per_s})
    return spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"hardware": hardware})})


def _for_peers(known: Known, costs: Costs, interval: Interval, source: int, step_s: float) -> Iterator[str]:
    """What lets copies go to other nodes with every snapshot, or as often as the spec says."""
    if costs.send_s > interval.steps * step_s:
        wanted, words = interval.steps, f"peer every {plural(interval.steps, 'step')}"
    elif interval.why in (SUSTAINED, BUDGET) and interval.steps > source:
        wanted, words = source, f"peer every {plural(source, 'step')}, with each snapshot,"
    else:
        return
    if interval.why == BUDGET:
        yield _with_each_snapshot(known, costs, "peer", costs.peer_cpu_s, source)
        return
    lead, rate = f"{words} needs ", _network(known, wanted)
    if rate is not None:
        yield f"{lead}{_rate(rate)} from each rank to another node (cluster.hardware.network_bandwidth)"
        lead = "or "
    longer = _longer_step(known, lambda other: costs.send_s <= wanted * (other.step_s or 0.0))
    if longer is not None:
        yield lead + longer


def _network(known: Known, wanted: int) -> float | None:
    """Return the least rate of a rank at which a copy takes no longer than so many steps; None: none is known.

    A faster network makes steps shorter, too, but not as much. What the shortest steps need is enough for all.
    """

    def part(rate: float) -> float:
        other = known.on(_with_network(known.spec, rate))
        return math.inf if other.costs is None or not other.step_s else other.costs.send_s / (wanted * other.step_s)

    low, high = known.rates.network_bytes_per_s, NO_LIMIT * part(NO_LIMIT)
    if not math.isfinite(high):
        return None
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if part(middle) <= 1 else (middle, high)
    return high


def _overhead(known: Known) -> float:
    """What a snapshot of every step, and the drains that are planned beside it, take of a step; waits not counted."""
    costs, step_s = known.costs, known.step_s
    assert costs is not None
    assert step_s is not None
    steps = {kind: interval.steps for kind, interval in tier_intervals(known).items()} | {"memory": 1}
    return cost_per_step_s(known, costs, steps, step_s, waits=False)[0] / step_s


def _keeps_within(known: Known) -> bool:
    return _overhead(known) <= known.spec.checkpoint.max_overhead


def _budget(known: Known) -> float | None:
    """Return the least `max_overhead`, in percent, that is enough; None: more than all of the time."""
    percent = 0.0
    for _ in range(MOST_BUDGETS):  # with more of it, an `auto` tier may be written more often
        checkpoint = known.spec.checkpoint.model_copy(update={"max_overhead": percent / 100})
        needed = 100 * _overhead(replace(known, spec=known.spec.model_copy(update={"checkpoint": checkpoint})))
        if needed <= percent:
            return percent
        percent = _up(needed)
        if percent > 100:
            return None
    return None


def _with_each_snapshot(known: Known, costs: Costs, kind: str, cost_s: float, source: int) -> str:
    """Say which `max_overhead` lets the tier `kind`, at `cost_s` per checkpoint, have every snapshot.

    More of it may mean more snapshots, so it is the budget that is enough for those that are then made.
    """
    spec, step_s = known.spec, known.step_s
    assert step_s is not None
    for _ in range(MOST_BUDGETS):
        needed = _up(100 * min(1.0, (cost_s / source + snapshots_s(known, costs, step_s)) / step_s))
        checkpoint = spec.checkpoint.model_copy(update={"max_overhead": min(1.0, needed / 100)})
        every = tier_intervals(replace(known, spec=spec.model_copy(update={"checkpoint": checkpoint})))
        made = next(iter(every.values())).steps
        if every[kind].steps <= made:
            break
        source = min(source, made)
    return f"{kind} every {plural(source, 'step')}, with each snapshot, needs checkpoint.max_overhead {needed}%"


def _least(holds: Callable[[int], bool], above: int) -> int | None:
    """Return the smallest number above `above` for which it holds, as it then does for all larger ones."""
    high = 2 * above
    while not holds(high):
        if high > above * MOST_MICRO_BATCHES:
            return None
        high *= 2
    low = above
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _for_a_slow_tier(
    known: Known, costs: Costs, tier: SlowTier, interval: Interval, source: int, step_s: float
) -> Iterator[str]:
    """What lets the tier be written with every checkpoint of the one before, or as often as the spec says."""
    kind = "disk" if tier in [known.spec.disk_tier] else "object"
    behind = kind == "object" and known.spec.disk_tier is not None
    lag_s = costs.commit_lag_s + costs.write_s if behind else 0.0
    late = not keeps_up(costs, kind, int(behind), interval.steps, step_s)
    if late:
        wanted, words = interval.steps, f"{kind} every {plural(interval.steps, 'step')}"
    elif interval.why in (SUSTAINED, BUDGET) and interval.steps > source and not behind:
        wanted, words = source, f"{kind} every {plural(source, 'step')}, with each snapshot,"
    else:
        return
    if interval.why == BUDGET:
        cost_s = costs.drain_cpu_s + (0.0 if known.spec.used_tiers[0] != tier else costs.snapshot_s)
        yield _with_each_snapshot(known, costs, kind, cost_s, source)
        return
    room_s = _room_s(late, lag_s, wanted * step_s)
    commit_s = OBJECT_COMMIT_S if kind == "object" else DISK_COMMIT_S
    if room_s > commit_s:
        node_bytes = known.sizes.shard_bytes * known.spec.cluster.workers_per_node if known.sizes else 0
        rate = (2 if kind == "object" else 1) * node_bytes / (room_s - commit_s)
        yield f"{words} needs {_rate(rate)} per node (cluster.hardware.{kind}_bandwidth)"
    else:
        left = f"{duration(room_s)} are left for a write" if room_s > 0 else "no time is left for a write"
        least_s = max(commit_s + lag_s, 0.0 if late else commit_s / DRAIN_SHARE) / wanted
        yield (
            f"{words} needs steps of more than {duration(least_s)}, at any rate: {left}, its files alone take "
            f"{duration(commit_s)}"
        )


def _room_s(late: bool, lag_s: float, interval_s: float) -> float:
    """Return how long a write may take: until the next one is due, and no more than its share of what is planned."""
    return interval_s - lag_s if late else min(interval_s - lag_s, DRAIN_SHARE * interval_s)


def _rate(bytes_per_s: float) -> str:
    """A rate that is enough, in the form that a spec takes."""
    unit = size(bytes_per_s).split()[1]
    amount = bytes_per_s * (1 + MARGIN) / 1024 ** UNITS.index(unit)
    return f"{_up(amount):.12g} {unit}/s"


def _up(value: float) -> float:
    """Round up to three significant digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(value / unit) * unit:.3g}")
