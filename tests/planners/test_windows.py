from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.planners.windows import (
    DEFAULT_SLICE_BYTES,
    FINISH_AT,
    PAGE_BYTES,
    copy_lead,
    slice_size,
    stall_s,
    storage_parameters,
)

MIB = 2**20
seconds = st.floats(1e-6, 1e4)
rates = st.floats(1e3, 1e12)
sizes = st.integers(0, 10**15)


@given(sizes, st.integers(1, 4096), seconds, seconds, rates)
def test_the_windows_of_a_step_hold_the_whole_shard(
    shard: int, n: int, forward_s: float, backward_s: float, rate: float
) -> None:
    forward, backward = storage_parameters(shard, n, (forward_s, backward_s), rate, ("memory",))
    assert forward.windows == backward.windows == n
    assert forward.bytes_per_window is not None
    assert backward.bytes_per_window is not None
    together = n * (forward.bytes_per_window + backward.bytes_per_window)
    assert together >= shard
    assert together <= shard / FINISH_AT * 1.001 + 2 * n * PAGE_BYTES + n
    assert forward.bytes_per_window % PAGE_BYTES == backward.bytes_per_window % PAGE_BYTES == 0


@given(st.integers(1, 10**15), st.integers(1, 64), seconds, seconds, rates)
def test_a_copy_that_fits_never_overfills_a_window(
    shard: int, n: int, forward_s: float, backward_s: float, rate: float
) -> None:
    if stall_s(shard, n * (forward_s + backward_s), rate) > 0:
        return
    forward, backward = storage_parameters(shard, n, (forward_s, backward_s), rate, ("memory",))
    assert (forward.bytes_per_window or 0) <= forward_s * rate * 1.0001 + PAGE_BYTES
    assert (backward.bytes_per_window or 0) <= backward_s * rate * 1.0001 + PAGE_BYTES + 1


@given(st.integers(0, 2**40), rates)
def test_slices_are_powers_of_two_of_at_least_a_page(bytes_per_window: int, rate: float) -> None:
    size = slice_size(bytes_per_window, rate)
    assert size >= PAGE_BYTES
    assert size & (size - 1) == 0
    assert size <= max(PAGE_BYTES, rate * 1e-3)


def test_windows_share_by_time_and_finish_early() -> None:
    forward, backward = storage_parameters(90 * MIB, 3, (0.1, 0.2), 2**30, ("memory",))
    assert forward.bytes_per_window == pytest.approx(90 * MIB / 3 / FINISH_AT / 3, abs=PAGE_BYTES)
    assert backward.bytes_per_window == pytest.approx(2 * 90 * MIB / 3 / FINISH_AT / 3, abs=PAGE_BYTES)
    assert forward.tiers == ("memory",)


@pytest.mark.parametrize(
    ("shard", "lead"), [(50, 1 / FINISH_AT), (75, 1 / FINISH_AT), (80, 100 / 80), (100, 1.0), (250, 1.0), (0, 1.0)]
)
def test_slack_shrinks_as_the_channel_fills(shard: int, lead: float) -> None:
    assert copy_lead(shard, window_s=1.0, bytes_per_s=100.0) == pytest.approx(lead)


def test_what_does_not_fit_is_the_stall() -> None:
    assert stall_s(250, 1.0, 100.0) == pytest.approx(1.5)
    assert stall_s(100, 1.0, 100.0) == 0


def test_unknown_times_are_split_one_to_two() -> None:
    forward, backward = storage_parameters(30 * MIB, 10, None, 1.0, ("memory",))
    assert backward.bytes_per_window == pytest.approx(2 * (forward.bytes_per_window or 0), abs=2 * PAGE_BYTES)
    assert forward.slice_bytes <= DEFAULT_SLICE_BYTES


def test_unknown_size_and_no_tiers() -> None:
    unknown, _ = storage_parameters(None, 2, (1.0, 2.0), 1e9, ("memory",))
    assert (unknown.bytes_per_window, unknown.slice_bytes) == (None, DEFAULT_SLICE_BYTES)
    without, _ = storage_parameters(100, 2, (1.0, 2.0), 1e9, ())
    assert (without.windows, without.bytes_per_window, without.tiers) == (2, 0, ())


def test_a_usual_slice_is_copied_in_a_fraction_of_a_millisecond() -> None:
    assert slice_size(100 * MIB, 8 * 2**30) == MIB
    assert slice_size(400 * 1024, 8 * 2**30) == 64 * 1024
    assert slice_size(10_000, 8 * 2**30) == 8192
