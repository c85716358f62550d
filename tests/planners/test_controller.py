"""The controller on simulated runs: what it measures, what it decides, and where it comes to rest."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest

from dtrain.planners.running.controller import (
    CALIBRATION_EVERY,
    GIVEN_COST_S,
    GIVEN_TIMES_BUDGET,
    Rule,
    decide,
    excess_of_given,
    first_setting,
)
from dtrain.planners.running.observed import (
    EARLY_SNAPSHOTS,
    PROBE_TIMES,
    WARM_UP_STEPS,
    WINDOW_STEPS,
    Figures,
    Sample,
    Setting,
    Window,
    excess,
)


@dataclass
class Machine:
    """Steps of a run: what each costs when a copy or a drain is beside it."""

    step_s: float = 0.1
    noise: float = 0.0
    wait_s: float = 0.0
    slowed_s: float = 0.0
    drain_s: float = 0.0
    drain_steps: int = 0
    bad_steps: int = 10**9
    """Waits last for these first steps of a run only."""

    def run(self, rule: Rule, steps: int, seed: int = 0) -> Run:
        return Run(self, rule, steps, seed)


class Run:
    """A whole attempt under control."""

    def __init__(self, machine: Machine, rule: Rule, steps: int, seed: int) -> None:
        self.rule, self.setting, self.window = rule, first_setting(rule), Window()
        self.settings: list[tuple[int, Setting]] = [(0, self.setting)]
        self.reasons: list[str] = []
        self.waited_s = self.total_s = 0.0
        self.stored = self.drained = 0
        drained_at, under_way, chance = -(10**9), False, random.Random(seed)
        for step in range(1, steps + 1):
            draining = step - drained_at <= machine.drain_steps
            extra = machine.slowed_s * under_way + machine.drain_s * draining
            waited_s = machine.wait_s * under_way * (step <= machine.bad_steps)
            step_s = machine.step_s * (1 + chance.gauss(0, machine.noise)) + extra + waited_s
            self.total_s, self.waited_s = self.total_s + step_s, self.waited_s + waited_s
            ended = step - drained_at == machine.drain_steps
            self.window.add(Sample(step_s, waited_s, under_way, step_s * draining, int(ended)))
            self.control(step)
            under_way = step % self.setting.snapshots == 0
            self.stored += under_way
            if self.setting.slow and step % self.setting.slow == 0 and not draining:
                drained_at, self.drained = step, self.drained + 1

    def control(self, step: int) -> None:
        early = self.window.early()
        probe = not early and self.window.probe()
        if not (early or probe or self.window.full):
            return
        full = self.window.full
        decision = decide(self.rule, self.setting, self.window.figures(), step=step, early=early, probe=probe)
        if decision is not None:
            self.setting = decision.setting
            self.settings.append((step, decision.setting))
            self.reasons.append(decision.reason)
        if decision is not None or full:
            self.window.restart()

    @property
    def overhead(self) -> float:
        return self.waited_s / (self.total_s - self.waited_s)


def rule(memory: int = 1, slow: int = 0, *, budget: float = 0.01, auto: str = "", **more: object) -> Rule:
    return Rule(budget, 10_000, memory, "memory" in auto, slow, "slow" in auto, **more)  # type: ignore[arg-type]


def test_what_costs_nothing_is_left_as_it_is() -> None:
    for given in (rule(1, 3), rule(1), rule(0, 5), rule(4, 8, auto="slow")):
        run = Machine(noise=0.002).run(given, 2000)
        assert run.setting == Setting(given.memory, given.slow)
        assert run.reasons == []


@pytest.mark.parametrize("wait_s", [0.002, 0.01, 0.09, 0.9])
@pytest.mark.parametrize("auto", ["memory", ""])
@pytest.mark.parametrize("budget", [0.005, 0.01, 0.05])
def test_a_tier_that_is_too_slow_is_written_less_often_and_the_whole_run_keeps_its_budget(
    wait_s: float, budget: float, auto: str
) -> None:
    if not auto and wait_s <= max(GIVEN_COST_S, 0.1 * GIVEN_TIMES_BUDGET * budget):
        return  # a given interval is kept: the next test
    run = Machine(noise=0.02, wait_s=wait_s).run(rule(budget=budget, auto=auto), 6000)
    first_s = (WARM_UP_STEPS + EARLY_SNAPSHOTS) * wait_s
    assert run.waited_s - first_s <= budget * (run.total_s - run.waited_s)
    assert run.stored >= 6000 * 0.35 * budget * 0.1 / wait_s or run.stored >= 5900, "and no less often than it must"
    if wait_s > 0.1 * budget:
        assert "max_overhead is" in run.reasons[0]
        assert run.setting.memory > 1


def test_very_high_costs_are_acted_on_after_a_few_snapshots() -> None:
    run = Machine(wait_s=0.05).run(rule(), 40)
    (_, _), (step, setting), *_ = run.settings
    assert step == WARM_UP_STEPS + EARLY_SNAPSHOTS
    assert setting.memory >= 50


@pytest.mark.parametrize("planned", [1, 22])
@pytest.mark.parametrize("wait_s", [0.3, 3.0])
def test_a_short_run_spends_no_more_than_its_budget_and_two_snapshots(planned: int, wait_s: float) -> None:
    given = Rule(0.005, 220, planned, True, planned, True)
    run = Machine(step_s=0.285, noise=0.02, wait_s=wait_s).run(given, 220)
    assert run.waited_s <= 0.005 * run.total_s + 2 * wait_s
    assert run.setting.memory >= 110


@pytest.mark.parametrize("steps", [220, 1000])
@pytest.mark.parametrize("wait_s", [3.0, 30.0])
def test_one_dear_snapshot_does_not_cost_the_rest_of_a_run_its_checkpoints(steps: int, wait_s: float) -> None:
    given = Rule(0.005, steps, 1, True, 10, True)
    run = Machine(step_s=0.1, noise=0.02, wait_s=wait_s, bad_steps=WARM_UP_STEPS + 1).run(given, steps)
    assert max(setting.memory for _, setting in run.settings) > steps // 3, "it was widened"
    assert run.stored > 3
    assert run.setting.memory <= steps // PROBE_TIMES
    dear = Machine(step_s=0.1, noise=0.02, wait_s=wait_s).run(given, steps)
    assert dear.stored <= 3, "and one that stays dear is made once more"


def test_one_dear_snapshot_does_not_widen_an_interval_that_is_given_nor_one_of_a_long_run() -> None:
    for given in (Rule(0.005, 220, 1, False, 10, True), Rule(0.005, 10**6, 1, True, 10, True)):
        dear = Figures(0.6, 0.3, 0.0, 0.0, 0.0, 0.5, 0.3, spent_s=0.3)
        assert decide(given, Setting(1, 10), dear, early=1) is None
        assert decide(given, Setting(1, 10), dear, early=EARLY_SNAPSHOTS) is not None


def test_a_little_too_much_is_no_alarm() -> None:
    run = Machine(wait_s=0.006).run(rule(auto="memory"), 40)
    assert run.settings[1][0] == WARM_UP_STEPS + WINDOW_STEPS


def test_an_interval_that_is_given_is_never_narrowed() -> None:
    assert Machine().run(rule(5, 10), 500).setting == Setting(5, 10)
    assert Machine().run(rule(5, 10, auto="memory slow"), 500).setting.memory == 1


def test_after_a_bad_time_it_comes_back_to_what_was_given() -> None:
    given = rule(2)
    slow = Figures(0.1, 0.02, 0.0, 0.0, 0.0, 0.002, 0.02)
    wide = decide(given, Setting(2, 0), slow)
    assert wide is not None
    assert wide.setting.memory > 10
    back = decide(given, wide.setting, Figures(0.1, 0.0001, 0.0, 0.0, 0.0, 0.002, 0.0001))
    assert back is not None
    assert back.setting == Setting(2, 0)
    assert "there is room" in back.reason


def test_auto_begins_with_every_second_step_to_compare_and_then_takes_every_step_it_can() -> None:
    given = rule(1, auto="memory")
    assert first_setting(given) == Setting(CALIBRATION_EVERY, 0)
    assert Machine(noise=0.01).run(given, 200).setting.memory == 1
    slowed = Machine(noise=0.01, slowed_s=0.02).run(given, 3000)
    assert 15 <= slowed.setting.memory <= 60, "0.02 s of 0.1 s steps within 1 %"


def test_noise_alone_changes_nothing_in_the_long_run() -> None:
    moved = [Machine(noise=0.1).run(rule(2), 1000, seed).reasons for seed in range(20)]
    assert sum(map(len, moved)) < 20 * 1000 / WINDOW_STEPS * 0.1, "three standard errors are exceeded now and then"


def test_the_slower_tier_gets_what_is_left_and_what_it_sustains() -> None:
    cheap = Machine(noise=0.005, drain_s=0.0, drain_steps=3).run(rule(1, 40, auto="slow"), 4000)
    assert cheap.setting == Setting(1, 4), "busy for three steps, at most 0.8 of the time"
    dear = Machine(noise=0.005, drain_s=0.02, drain_steps=5).run(rule(1, 10, auto="slow"), 8000)
    assert 80 <= dear.setting.slow <= 200, "about 0.1 s per drain of 0.1 s steps within 1 %"


@pytest.mark.parametrize("slow", [3, 7, 10, 12])
@pytest.mark.parametrize("further", [(), (30,), (12, 60)])
def test_wider_intervals_fit_into_each_other_and_into_what_others_rely_on(slow: int, further: tuple[int, ...]) -> None:
    for wait_ms in (11, 19, 25, 45, 90, 300):
        run = Machine(wait_s=wait_ms / 1000).run(rule(1, slow, reached=further), 400)
        setting = run.setting
        assert setting.memory > 1
        assert setting.slow % setting.memory == 0
        assert setting.slow >= slow
        assert all(step % setting.memory == 0 or setting.memory % step == 0 for step in (slow, *further))


def test_without_a_memory_tier_the_slower_one_is_widened() -> None:
    run = Machine(wait_s=0.05).run(rule(0, 4), 600)
    assert run.setting.memory == 0
    assert run.setting.slow >= 5
    assert run.overhead <= 0.02


def test_a_budget_of_nothing_leaves_the_widest_interval() -> None:
    run = Machine(wait_s=0.02).run(rule(budget=0.0), 200)
    assert run.setting.memory == 10_000


def test_the_worst_rank_counts_whichever_figure_is_its_own() -> None:
    given, before = rule(), Setting(1, 0)
    fine = Figures(0.1, 0.0001, 0.0, 0.0, 0.0, 0.001, 0.0001)
    bad = Figures(0.1, 0.03, 0.0, 0.0, 0.0, 0.03, 0.03)
    worst = Figures(*map(max, fine.values(), bad.values()))
    assert decide(given, before, fine) is None
    assert decide(given, before, worst) == decide(given, before, bad)


def test_a_difference_within_the_noise_is_none() -> None:
    chance = random.Random(1)
    plain = [1 + chance.gauss(0, 0.05) for _ in range(8)]
    assert excess(plain, plain) == 0.0
    assert excess([value + 0.5 for value in plain], plain) == pytest.approx(0.5)
    assert excess([value - 0.5 for value in plain], plain) == 0.0
    assert excess([value + 0.01 for value in plain], plain) == 0.0


def test_a_wide_interval_keeps_few_samples_and_tells_drains_apart() -> None:
    window = Window()
    for step in range(1, 50_001):
        draining = step % 10_000 in (5, 6, 7)
        window.add(Sample(0.1, 0.0, step % 10_000 == 0, 0.1 * draining, int(step % 10_000 == 7)))
    assert window.steps == 50_000 - WARM_UP_STEPS
    assert len(window.samples) < 600
    assert window.figures().drain_steps == pytest.approx(3)
    assert not window.full


@pytest.mark.parametrize("wait_s", [0.0005, 0.0021, 0.0099])
def test_a_little_over_the_budget_a_given_interval_is_kept_and_the_cost_is_told(wait_s: float) -> None:
    """Who writes `every: 1` wants to lose one step, not three."""
    given = rule(1, 3)
    run = Machine(step_s=0.02, noise=0.02, wait_s=wait_s).run(given, 2000)
    assert run.setting == Setting(1, 3)
    assert run.reasons == []
    plain_s = 0.02
    figures = Figures(plain_s + wait_s, wait_s, 0.0, 0.0, 0.0, wait_s / (plain_s + wait_s), wait_s)
    words = excess_of_given(given, run.setting, figures)
    assert words is not None
    assert "every: 1 is given and stays" in words
    assert words.endswith(f"would take {math.ceil(wait_s / (0.01 * plain_s))}")
    assert excess_of_given(rule(1, 3, budget=0.9), run.setting, figures) is None
    assert excess_of_given(rule(1, 3, auto="memory"), run.setting, figures) is None


def test_an_interval_is_called_kept_or_changed_but_never_both() -> None:
    given, before = rule(1, 10), Setting(1, 10)
    for wait_s in (0.0005, 0.002, 0.005, 0.011, 0.02, 0.05, 0.8):
        figures = Figures(0.1 + wait_s, wait_s, 0.0, 0.0, 0.0, wait_s / 0.1, wait_s)
        decision, told = decide(given, before, figures), excess_of_given(given, before, figures)
        assert (told is not None) == (decision is None and wait_s > 0.001), wait_s


@pytest.mark.parametrize("auto", ["memory", ""])
def test_an_interval_that_a_bad_time_has_made_very_wide_comes_back_soon_after_it(auto: str) -> None:
    """0.5 s of 0.1 s steps within 1 % are 500 steps, and 1,000 while the average is over: six of them are the run."""
    run = Machine(noise=0.01, wait_s=0.5, bad_steps=30).run(rule(auto=auto), 3000)
    assert max(setting.memory for _, setting in run.settings) >= 500
    assert run.setting.memory == 1
    assert run.settings[-1][0] < 2500


def test_a_probe_that_is_wrong_costs_one_snapshot() -> None:
    """It never widens, and narrows by so much that the next one still keeps near the budget."""
    given, wide = rule(auto="memory"), Setting(1000, 0)
    cheap = Figures(0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    dear = Figures(0.1, 50.0, 0.0, 0.0, 0.0, 0.5, 50.0)
    decision = decide(given, wide, cheap, probe=True)
    assert decision is not None
    assert decision.setting.memory == 1000 // PROBE_TIMES
    assert decide(given, wide, dear, probe=True) is None
