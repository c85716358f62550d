from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.planners.intervals import (
    DRAIN_SHARE,
    FAR_LONGEST_S,
    FAR_PER_RUN,
    disk_every,
    divisors,
    far_every,
    memory_every,
    untimed_every,
    young_daly_s,
)

seconds = st.floats(1e-6, 1e5)


def disk(**changes: float) -> int:
    values: dict[str, float] = {
        "write_s": 1.0, "cost_s": 0.0, "step_s": 1.0, "budget": 0.01,
        "mtbf_s": 86400.0, "max_steps": 10**6, "snapshot_every": 1,
    }  # fmt: skip
    return disk_every(**(values | changes))  # type: ignore[arg-type]


def test_young_and_daly() -> None:
    young = math.sqrt(2 * 60 * 86400)
    assert young_daly_s(60, 86400) == pytest.approx(young * 1.0062 + young / 9 * 60 / 172800 - 60, rel=1e-3)
    assert young_daly_s(1e-9, 86400) == pytest.approx(math.sqrt(2e-9 * 86400), rel=1e-6)
    assert young_daly_s(1e6, 3600) == 3600


@given(seconds, seconds, st.floats(0, 1), st.integers(1, 10**6))
def test_memory_interval_is_the_smallest_within_the_budget(
    cost_s: float, step_s: float, budget: float, max_steps: int
) -> None:
    k = memory_every(cost_s, step_s, budget, max_steps, None)
    assert 1 <= k <= max_steps
    if k < max_steps:
        assert cost_s / (k * step_s) <= budget * (1 + 1e-9)
    if k > 1:
        assert cost_s / ((k - 1) * step_s) > budget * (1 - 1e-9)


@given(seconds, seconds, st.floats(1e-6, 1))
def test_dearer_snapshots_are_never_more_frequent(cost_s: float, more_s: float, budget: float) -> None:
    cheap = memory_every(cost_s, 1.0, budget, 10**9, None)
    assert memory_every(cost_s + more_s, 1.0, budget, 10**9, None) >= cheap
    assert memory_every(cost_s, 1.0, budget / 2, 10**9, None) >= cheap


def test_free_snapshots_are_made_every_step() -> None:
    assert memory_every(0.0, 1.0, 0.0, 100, None) == 1


@pytest.mark.parametrize(
    ("cost_s", "given_disk", "expected"), [(0.035, 12, 4), (0.05, 12, 6), (0.5, 12, 12), (0.05, 7, 7)]
)
def test_memory_interval_divides_a_given_disk_interval(cost_s: float, given_disk: int, expected: int) -> None:
    assert memory_every(cost_s, 1.0, 0.01, 1000, given_disk) == expected


def test_disk_interval_is_what_the_disk_sustains() -> None:
    assert disk(write_s=0.5) == 1
    assert disk(write_s=DRAIN_SHARE) == 1
    assert disk(write_s=8.1) == 11
    assert disk(write_s=8.1, snapshot_every=4) == 12


def test_the_budget_widens_the_disk_interval_up_to_young_and_daly() -> None:
    assert disk(write_s=1.0, cost_s=0.5) == 50
    guide = math.floor(young_daly_s(1.0, 86400.0))
    assert disk(write_s=1.0, cost_s=500.0) == guide


def test_a_short_run_still_gets_a_checkpoint() -> None:
    assert disk(write_s=100.0, max_steps=10) == 10
    assert disk(write_s=100.0, max_steps=10, snapshot_every=4) == 8
    assert disk(write_s=100.0, max_steps=3, snapshot_every=4) == 4


@given(seconds, seconds, seconds, st.floats(0, 1), seconds, st.integers(1, 10**6), st.integers(1, 50))
def test_disk_interval_is_a_multiple_of_the_snapshots(
    write_s: float, cost_s: float, step_s: float, budget: float, mtbf_s: float, max_steps: int, snapshot: int
) -> None:
    k = disk_every(
        write_s=write_s, cost_s=cost_s, step_s=step_s, budget=budget, mtbf_s=mtbf_s,
        max_steps=max_steps, snapshot_every=snapshot,
    )  # fmt: skip
    assert k >= 1
    assert k % snapshot == 0
    assert k <= max(max_steps, snapshot)


@given(seconds, seconds, st.integers(1, 20))
def test_a_slower_disk_is_never_written_more_often(write_s: float, more_s: float, snapshot: int) -> None:
    assert disk(write_s=write_s + more_s, snapshot_every=snapshot) >= disk(write_s=write_s, snapshot_every=snapshot)


def far(**changes: float) -> int:
    values: dict[str, float] = {
        "write_s": 1.0, "cost_s": 0.0, "step_s": 1.0, "budget": 0.01, "max_steps": 10**6, "source_every": 1,
    }  # fmt: skip
    return far_every(**(values | changes))  # type: ignore[arg-type]


def test_a_store_behind_a_disk_gets_a_tenth_of_a_short_run_and_one_an_hour_of_a_long_one() -> None:
    assert far(max_steps=1000) == 1000 / FAR_PER_RUN
    assert far() == FAR_LONGEST_S
    assert far(step_s=10.0) == FAR_LONGEST_S / 10
    assert far(max_steps=1000, source_every=30) == 120


def test_a_store_that_cannot_keep_up_with_that_gets_what_it_sustains() -> None:
    assert far(write_s=400.0, max_steps=1000) == 500
    assert far(cost_s=5.0, max_steps=1000) == 500


@given(st.integers(1, 60), st.integers(1, 60), st.floats(1e-3, 1e3), st.integers(1, 10**5))
def test_an_interval_divides_what_the_spec_gives_if_any_multiple_does(
    source: int, factor: int, write_s: float, max_steps: int
) -> None:
    given_later = source * factor
    for k in (
        disk(write_s=write_s, snapshot_every=source, divides=given_later, max_steps=max_steps),
        far(write_s=write_s, source_every=source, divides=given_later, max_steps=max_steps),
        untimed_every(max_steps, source, given_later),
    ):
        assert k % source == 0
        assert given_later % k == 0


def test_an_interval_is_the_next_divisor_and_if_there_is_none_the_largest() -> None:
    assert disk(write_s=8.1, divides=60) == 12
    assert disk(write_s=8.1, divides=11) == 11
    assert disk(write_s=80.0, divides=60) == 60
    assert disk(write_s=8.1, divides=1000, max_steps=30) == 20
    assert disk(write_s=8.1, divides=7, snapshot_every=2) == 12


def test_huge_intervals_are_planned_at_once() -> None:
    prime = 9223372036854775783
    assert memory_every(0.5, 1.0, 0.01, 2**63, prime) == prime
    assert disk(write_s=8.1, divides=prime, max_steps=2**63) == prime
    assert divisors(10**12)[-2:] == [5 * 10**11, 10**12]


@given(st.integers(1, 5000))
def test_divisors_are_all_of_them_in_order(number: int) -> None:
    assert divisors(number) == [part for part in range(1, number + 1) if number % part == 0]
