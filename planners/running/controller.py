"""Keeps what checkpoints cost within `checkpoint.max_overhead` while a run goes on: figures in, intervals out.

The steps of a run are looked at in windows. What a snapshot costs the training, c, is the time the training waited for
it, plus what the passes beside its copy took longer than others, as far as that stands out from the noise. With steps
of t seconds it is affordable every k steps when c/(k·t) is at most the budget, so

    k = ceil(c / (budget · t))

One that is `auto` goes both ways. One that the spec gives is kept while the budget is exceeded by little, for somebody
wants to lose no more steps than that; the run says what it costs. It is widened only when checkpoints take several
times the budget (`GIVEN_TIMES_BUDGET`), comes back when they no longer do, and is never narrowed below what is given.
While the whole attempt is over its budget, an interval is set for half of it, until the average is back within. Only
the wait for a slow tier whose spec says that training waits for it (`when_slow`) is no cost here: that was asked for.

The first slower tier, if it is `auto`, gets what is left of the budget, by the same rule with the cost of a drain.

Every rank decides by itself, from figures of which each is the worst of all ranks, so all decide the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...specs.models import Spec
from ..document import Plan
from ..intervals import DRAIN_SHARE, NEVER
from ..words import duration, share, shares
from .observed import PROBE_STEPS, PROBE_TIMES, SPENT_SHARE, SPENT_SNAPSHOTS, Figures, Setting

EARLY_TIMES_BUDGET, EARLY_WAIT_S = 4.0, 0.01
"""What is very much: so many times the budget, and a wait that is no accident of a machine that is busy."""
GIVEN_TIMES_BUDGET, GIVEN_COST_S = 4.0, 0.01
"""An interval that the spec gives is widened when a typical snapshot costs more than both."""
NARROW_SHARE = 0.7
"""An interval is narrowed only to one that takes at most this part of the budget, so that it does not go to and fro."""
CALIBRATION_EVERY = 2
"""Interval of snapshots in the first window of `every: auto`: without steps that have none there is no comparing."""
LEAST_BUDGET_SHARE = 0.25
"""Part of the budget that a slower tier may use even if the snapshots have used up the rest."""
SEARCHED = 1000


@dataclass(frozen=True, slots=True)
class Rule:
    """What the spec and its plan say about the intervals; 0: the job has no such tier."""

    budget: float
    max_steps: int
    memory: int
    memory_auto: bool
    slow: int
    slow_auto: bool
    reached: tuple[int, ...] = ()
    """Steps whose multiples further tiers are to get, or a tier is to keep for good."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What changes, and why."""

    setting: Setting
    reason: str


def rule_of(spec: Spec, plan: Plan) -> Rule:
    """What the controller has to keep to."""
    planned = {tier.type: tier for tier in plan.tiers}
    memory, first = planned.get("memory"), spec.first_slow_tier
    slow = planned[first.type] if first is not None else None
    reached = [planned[tier.type].every for tier in spec.slow_tiers[1:]]
    reached += [tier.keep_every for tier in spec.slow_tiers if tier.keep_every is not None]
    return Rule(
        budget=spec.checkpoint.max_overhead,
        max_steps=spec.max_steps,
        memory=memory.every if memory is not None else 0,
        memory_auto=memory is not None and memory.auto,
        slow=slow.every if slow is not None else 0,
        slow_auto=slow is not None and slow.auto,
        reached=tuple(reached),
    )


def first_setting(rule: Rule) -> Setting:
    """Return the intervals to begin with: the plan's, but for the first window of an `auto` one."""
    memory = CALIBRATION_EVERY if rule.memory == 1 and rule.memory_auto else rule.memory
    return Setting(memory, _multiple(rule.slow, memory) if rule.slow_auto else rule.slow)


def decide(
    rule: Rule, setting: Setting, figures: Figures, *, step: int = 0, early: int = 0, probe: bool = False
) -> Decision | None:
    """Return other intervals when the figures call for them; after only `early` snapshots when they cry for them.

    `step` is the one that has just ended. What is widened past the end of the run would never be looked at again, and
    a bad moment would cost all checkpoints of the rest: then one more snapshot is made in the middle of that.

    A `probe` is one of the few snapshots that a wide interval has. It may narrow that by `PROBE_TIMES` at most and
    never widen it, and the next one is looked at again: if it was wrong, it has cost one more snapshot.
    """
    if early and not _cries(rule, setting, figures):
        return None
    if early in SPENT_SNAPSHOTS and not _spends_all(rule, setting, figures):
        return None
    snapshots = _within_the_rest(_snapshots(rule, setting, figures), rule, setting, step)
    if probe:
        if snapshots >= setting.snapshots:
            return None
        snapshots = min(_reaching(max(snapshots, setting.snapshots // PROBE_TIMES), rule), setting.snapshots)
    slow = setting.slow
    if not setting.memory:
        slow = snapshots
    elif slow and rule.slow_auto:
        measured = figures.drain_steps > 0 and not early and not probe
        slow = _multiple(_slow(rule, setting, figures, snapshots) if measured else slow, snapshots)
    elif slow:
        slow = rule.slow if snapshots == rule.memory else _multiple(rule.slow, snapshots)
    wanted = Setting(snapshots if setting.memory else 0, slow)
    if wanted == setting:
        return None
    return Decision(wanted, _reason(rule, setting, figures))


def _cries(rule: Rule, setting: Setting, figures: Figures) -> bool:
    costly = figures.wait_s / setting.snapshots > EARLY_TIMES_BUDGET * rule.budget * figures.plain_s(setting)
    return costly and figures.typical_s > EARLY_WAIT_S


def _spends_all(rule: Rule, setting: Setting, figures: Figures) -> bool:
    auto = rule.memory_auto if rule.memory else rule.slow_auto
    return auto and figures.spent_s > SPENT_SHARE * rule.budget * rule.max_steps * figures.plain_s(setting)


def _snapshots(rule: Rule, setting: Setting, figures: Figures) -> int:
    """Return the interval of snapshots."""
    current, plain_s = setting.snapshots, figures.plain_s(setting)
    auto = rule.memory_auto if rule.memory else rule.slow_auto
    least = 1 if auto else rule.memory or rule.slow
    budget = rule.budget / 2 if figures.total > rule.budget else rule.budget
    wanted = _affordable(figures.snapshot_s, budget * plain_s)
    if wanted > current:
        if not auto and current == least and not _breaks(rule, setting, figures):
            return current
        return min(_reaching(max(wanted, least), rule), max(current, rule.max_steps))
    narrow = _reaching(max(least, _affordable(figures.snapshot_s, NARROW_SHARE * budget * plain_s)), rule)
    return min(current, narrow)


def _within_the_rest(wanted: int, rule: Rule, setting: Setting, step: int) -> int:
    """Return `wanted`, or less if no multiple of it is left in a rest of the run that is worth another look."""
    left = rule.max_steps - step
    falls_in = (step // wanted + 1) * wanted < rule.max_steps
    if wanted <= setting.snapshots or left <= PROBE_STEPS or falls_in or rule.budget == 0:
        return wanted
    return max(setting.snapshots, step + left // 2)


def _breaks(rule: Rule, setting: Setting, figures: Figures) -> bool:
    """Tell whether a given interval takes so much that the budget must come first."""
    typical_s = figures.typical_s + figures.slowed_s
    allowed_s = GIVEN_TIMES_BUDGET * rule.budget * figures.plain_s(setting) * setting.snapshots
    return typical_s > max(allowed_s, GIVEN_COST_S)


def excess_of_given(rule: Rule, setting: Setting, figures: Figures) -> str | None:
    """Say what a given interval costs when that is more than the budget and the interval stays; else None."""
    auto = rule.memory_auto if rule.memory else rule.slow_auto
    given = rule.memory or rule.slow
    over = (figures.typical_s + figures.slowed_s) / setting.snapshots > rule.budget * figures.plain_s(setting)
    if auto or setting.snapshots != given or not over or _breaks(rule, setting, figures):
        return None
    fits = _affordable(figures.snapshot_s, rule.budget * figures.plain_s(setting))
    return f"{_reason(rule, setting, figures)}; every: {given} is given and stays, every: auto would take {fits}"


def _slow(rule: Rule, setting: Setting, figures: Figures, snapshots: int) -> int:
    """Return the interval of the first slower tier: what it sustains, and what the rest of the budget allows."""
    plain_s = figures.plain_s(setting)
    left = rule.budget - figures.snapshot_s / snapshots / plain_s
    left_s = max(left, LEAST_BUDGET_SHARE * rule.budget) * plain_s
    sustained = math.ceil(figures.drain_steps / DRAIN_SHARE)
    wanted = max(sustained, _affordable(figures.drain_s, left_s))
    if wanted > setting.slow:
        return min(wanted, max(setting.slow, rule.max_steps))
    if figures.drain_unseen:
        return setting.slow
    return min(setting.slow, max(sustained, _affordable(figures.drain_s, NARROW_SHARE * left_s)))


def _affordable(cost_s: float, allowed_s: float) -> int:
    """Return the smallest k with cost/k at most what is allowed per step."""
    if cost_s <= allowed_s:
        return 1
    return math.ceil(min(cost_s / allowed_s, NEVER)) if allowed_s > 0 else NEVER


def _reaching(wanted: int, rule: Rule) -> int:
    """Return the next interval from `wanted` up that divides, or is a multiple of, all that others rely on."""
    others = [steps for steps in (*rule.reached, 0 if rule.slow_auto else rule.slow) if steps]
    for steps in range(wanted, wanted + SEARCHED):
        if all(other % steps == 0 or steps % other == 0 for other in others):
            return steps
    return wanted


def _multiple(steps: int, of: int) -> int:
    """Round up to a multiple; of 0 there is only the number itself."""
    return -(-steps // of) * of if of else steps


def _reason(rule: Rule, setting: Setting, figures: Figures) -> str:
    plain_s, overhead = figures.plain_s(setting), figures.overhead(setting)
    costs = [f"a snapshot costs {duration(figures.snapshot_s)}"]
    if figures.drain_s:
        costs.append(f"a drain {duration(figures.drain_s)} over {figures.drain_steps:.3g} steps")
    cost, allowed = shares(overhead, rule.budget)
    words = f"{' and '.join(costs)}, a step takes {duration(plain_s)}: {cost}"
    total = f"; {share(figures.total)} so far" if figures.total > rule.budget else ""
    return f"{words}{total}, max_overhead is {allowed}{'' if overhead > rule.budget else ', there is room'}"
