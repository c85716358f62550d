from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.planners.intervals import (
    BUDGET,
    DRAIN_SHARE,
    FAR_LONGEST_S,
    FITS,
    HOURLY,
    LEAST_LOSS,
    LEAST_PER_RUN,
    PER_RUN,
    SUSTAINED,
    WITH_EACH,
    Interval,
    Place,
    divisors,
    far_every,
    memory_every,
    slow_every,
    untimed_every,
    young_daly_s,
)

seconds = st.floats(1e-6, 1e5)
DAY_S = 86400.0


def place(max_steps: int = 10**6, source_every: int = 1, divides: int | None = None) -> Place:
    return Place(max_steps, source_every, divides)


def memory(cost_s: float, step_s: float, budget: float, mtbf_s: float, where: Place) -> Interval:
    return where.fitted(memory_every(cost_s, step_s, budget, mtbf_s, where.max_steps))


def slow(where: Place | None = None, **changes: float) -> Interval:
    values: dict[str, float] = {
        "write_s": 1.0, "cost_s": 0.0, "step_s": 1.0, "budget": 0.01, "mtbf_s": DAY_S,
    }  # fmt: skip
    where = where or place()
    return where.fitted(slow_every(**(values | changes), max_steps=where.max_steps))


def far(where: Place | None = None, *, write_s: float = 1.0, step_s: float = 1.0) -> int:
    return upload(where or place(), write_s=write_s, step_s=step_s).steps


def upload(where: Place, *, write_s: float = 1.0, lag_s: float = 0.0, step_s: float = 1.0) -> Interval:
    return where.fitted(far_every(write_s=write_s, lag_s=lag_s, step_s=step_s, max_steps=where.max_steps))


def test_young_and_daly() -> None:
    young = math.sqrt(2 * 60 * 86400)
    assert young_daly_s(60, 86400) == pytest.approx(young * 1.0062 + young / 9 * 60 / 172800 - 60, rel=1e-3)
    assert young_daly_s(1e-9, 86400) == pytest.approx(math.sqrt(2e-9 * 86400), rel=1e-6)
    assert young_daly_s(1e6, 3600) == 3600


@given(st.floats(0.01, 100), st.floats(1e3, 1e7))
def test_no_interval_loses_less_than_young_s_and_daly_s(cost_s: float, mtbf_s: float) -> None:
    best_s = young_daly_s(cost_s, mtbf_s)

    def loss(work_s: float) -> float:
        """Daly's whole time per useful time, restarts left out: M·(e^((w+δ)/M) - 1)/w."""
        return mtbf_s * math.expm1((work_s + cost_s) / mtbf_s) / work_s

    assert loss(best_s) <= min(loss(best_s * 0.8), loss(best_s * 1.25)) * (1 + 1e-12)


@given(seconds, seconds, st.floats(0, 1), seconds, st.integers(1, 10**6))
def test_snapshots_keep_within_the_budget_and_are_made_every_step_if_that_does(
    cost_s: float, step_s: float, budget: float, mtbf_s: float, max_steps: int
) -> None:
    answer = memory(cost_s, step_s, budget, mtbf_s, place(max_steps))
    assert 1 <= answer.steps <= max_steps
    if answer.steps < max_steps:
        assert cost_s / (answer.steps * step_s) <= budget * (1 + 1e-9)
    assert (answer.why == FITS) == (cost_s <= budget * step_s)
    if answer.why == FITS:
        assert answer.steps == 1


@given(seconds, seconds, st.floats(1e-6, 1))
def test_dearer_snapshots_are_never_more_frequent(cost_s: float, more_s: float, budget: float) -> None:
    cheap = memory(cost_s, 1.0, budget, 1e9, place(10**9)).steps
    assert memory(cost_s + more_s, 1.0, budget, 1e9, place(10**9)).steps >= cheap
    assert memory(cost_s, 1.0, budget / 2, 1e9, place(10**9)).steps >= cheap


def test_a_stall_that_the_budget_allows_is_still_not_taken_more_often_than_pays() -> None:
    answer = memory(2.0, 1.0, 0.5, DAY_S, place())
    assert answer == Interval(math.ceil(young_daly_s(2.0, DAY_S)), LEAST_LOSS)
    assert memory(2.0, 1.0, 1e-3, DAY_S, place()) == Interval(2000, BUDGET)
    assert memory(2.0, 1.0, 0.5, DAY_S, place(1000)) == Interval(1000 // LEAST_PER_RUN, PER_RUN)


def test_free_snapshots_are_made_every_step() -> None:
    assert memory(0.0, 1.0, 0.0, DAY_S, place(100)) == Interval(1, FITS)


@pytest.mark.parametrize(
    ("cost_s", "given_disk", "expected"), [(0.035, 12, 4), (0.05, 12, 6), (0.5, 12, 12), (0.05, 7, 7)]
)
def test_memory_interval_divides_a_given_disk_interval(cost_s: float, given_disk: int, expected: int) -> None:
    assert memory(cost_s, 1.0, 0.01, 1.0, place(1000, 1, given_disk)).steps == expected


def test_a_slower_tier_gets_what_it_sustains() -> None:
    assert slow(write_s=0.5) == Interval(1, SUSTAINED)
    assert slow(write_s=DRAIN_SHARE).steps == 1
    assert slow(write_s=8.1).steps == 11
    assert slow(place(source_every=4), write_s=8.1).steps == 12


def test_a_far_write_is_done_when_the_next_one_is_due_the_nearer_one_before_it_included() -> None:
    short = place(max_steps=10)
    assert upload(short, write_s=0.5, lag_s=0.5).steps == 1
    assert upload(short, write_s=0.5, lag_s=0.75).steps == 2


def test_a_tier_that_could_follow_faster_gets_each_checkpoint_of_the_one_before() -> None:
    assert slow(place(source_every=50), write_s=8.1) == Interval(50, WITH_EACH)


def test_the_budget_widens_it_up_to_what_a_stopping_write_would_take() -> None:
    assert slow(cost_s=0.5, mtbf_s=1e7) == Interval(math.ceil(young_daly_s(0.5, 1e7)), LEAST_LOSS)
    assert slow(cost_s=0.5, mtbf_s=1e4) == Interval(100, LEAST_LOSS)
    assert slow(write_s=30.0, cost_s=0.5, budget=1e-3, mtbf_s=1e4) == Interval(500, BUDGET)
    stopping = math.floor(young_daly_s(1.0, DAY_S))
    assert slow(cost_s=500.0).steps == stopping
    assert slow(place(1000), cost_s=500.0) == Interval(1000 // LEAST_PER_RUN, PER_RUN)


def test_a_short_run_still_gets_a_checkpoint() -> None:
    assert slow(place(10), write_s=100.0).steps == 10
    assert slow(place(10, 4), write_s=100.0).steps == 8
    assert slow(place(3, 4), write_s=100.0).steps == 4


@given(seconds, seconds, seconds, st.floats(0, 1), seconds, st.integers(1, 10**6), st.integers(1, 50))
def test_slower_intervals_are_multiples_of_the_snapshots(
    write_s: float, cost_s: float, step_s: float, budget: float, mtbf_s: float, max_steps: int, snapshot: int
) -> None:
    k = slow(
        place(max_steps, snapshot), write_s=write_s, cost_s=cost_s, step_s=step_s, budget=budget, mtbf_s=mtbf_s
    ).steps
    assert k >= 1
    assert k % snapshot == 0
    assert k <= max(max_steps, snapshot)


@given(seconds, seconds, st.integers(1, 20))
def test_a_slower_disk_is_never_written_more_often(write_s: float, more_s: float, snapshot: int) -> None:
    where = place(source_every=snapshot)
    assert slow(where, write_s=write_s + more_s).steps >= slow(where, write_s=write_s).steps


def test_a_store_behind_a_disk_gets_a_tenth_of_a_short_run_and_one_an_hour_of_a_long_one() -> None:
    assert far(place(1000)) == 1000 / LEAST_PER_RUN
    assert far() == FAR_LONGEST_S
    assert far(step_s=10.0) == FAR_LONGEST_S / 10
    assert far(place(1000, 30)) == 120
    assert upload(place()).why == HOURLY


def test_a_store_that_cannot_keep_up_with_that_gets_what_it_sustains() -> None:
    assert far(place(1000), write_s=400.0) == 500


@given(st.integers(1, 60), st.integers(1, 60), st.floats(1e-3, 1e3), st.integers(1, 10**5))
def test_an_interval_divides_what_the_spec_gives_if_any_multiple_does(
    source: int, factor: int, write_s: float, max_steps: int
) -> None:
    given_later = source * factor
    where = place(max_steps, source, given_later)
    for k in (slow(where, write_s=write_s).steps, far(where, write_s=write_s), untimed_every(where).steps):
        assert k % source == 0
        assert given_later % k == 0


def test_an_interval_is_the_next_divisor_and_if_there_is_none_the_largest() -> None:
    assert slow(place(divides=60), write_s=8.1).steps == 12
    assert slow(place(divides=11), write_s=8.1).steps == 11
    assert slow(place(divides=60), write_s=80.0).steps == 60
    assert slow(place(30, divides=1000), write_s=8.1).steps == 20
    assert slow(place(source_every=2, divides=7), write_s=8.1).steps == 12


def test_huge_intervals_are_planned_at_once() -> None:
    prime = 9223372036854775783
    assert memory(0.5, 1.0, 0.01, 1.0, place(2**63, 1, prime)).steps == prime
    assert slow(place(2**63, 1, prime), write_s=8.1).steps == prime
    assert divisors(10**12)[-2:] == (5 * 10**11, 10**12)


@given(st.integers(1, 5000))
def test_divisors_are_all_of_them_in_order(number: int) -> None:
    assert list(divisors(number)) == [part for part in range(1, number + 1) if number % part == 0]
