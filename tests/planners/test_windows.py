from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dtrain.planners.windows import (
    DEFAULT_SLICE_BYTES,
    FINISH_AT,
    MIN_SLICE_BYTES,
    PAGE_BYTES,
    StorageParameters,
    Windows,
    slice_size,
    storage_parameters,
)

MIB = 2**20
seconds = st.floats(1e-6, 1e4)
rates = st.floats(1e3, 1e12)
sizes = st.integers(0, 10**15)
own_link = st.builds(Windows, st.integers(1, 4096), seconds, seconds, rates)
shared_link = st.builds(
    lambda n, forward_s, backward_s, rate, part, left: Windows(
        n, forward_s, backward_s, rate, max(0.0, part - 1) * backward_s, part * backward_s, left * rate
    ),
    st.integers(1, 64), seconds, seconds, rates, st.floats(0.01, 3), st.floats(0, 1),
)  # fmt: skip
MEMORY = ("memory",)


def both(windows: Windows, shard: int) -> tuple[StorageParameters, StorageParameters, int, int]:
    forward, backward = storage_parameters(shard, windows.micro_batches, windows, MEMORY)
    assert forward.bytes_per_window is not None
    assert backward.bytes_per_window is not None
    return forward, backward, forward.bytes_per_window, backward.bytes_per_window


@given(sizes, st.one_of(own_link, shared_link))
def test_the_windows_of_a_step_hold_the_whole_shard(shard: int, windows: Windows) -> None:
    forward, backward, in_forward, in_backward = both(windows, shard)
    assert forward.windows == backward.windows == windows.micro_batches
    assert windows.micro_batches * (in_forward + in_backward) >= shard
    assert in_forward % PAGE_BYTES == in_backward % PAGE_BYTES == 0


@given(st.integers(1, 10**15), st.one_of(own_link, shared_link))
def test_a_copy_that_fits_never_overfills_a_window(shard: int, windows: Windows) -> None:
    assume(shard <= windows.bytes_per_s * windows.window_s)
    _, _, in_forward, in_backward = both(windows, shard)
    assert in_forward <= windows.forward_s * windows.bytes_per_s * 1.0001 + PAGE_BYTES
    assert in_backward <= windows.backward_s * windows.bytes_per_s * 1.0001 + PAGE_BYTES + 1


@given(st.integers(1, 10**15), st.one_of(own_link, shared_link))
def test_a_copy_ends_in_time_exactly_when_it_fits(shard: int, windows: Windows) -> None:
    _, _, in_forward, in_backward = both(windows, shard)
    copied_s = windows.copied_s(shard, in_forward, in_backward)
    constant_s = windows.window_s + windows.exchange_s
    assert windows.stall_s(shard) == pytest.approx(max(0.0, copied_s - constant_s), rel=1e-9, abs=1e-6 * constant_s)
    if shard > windows.capacity_bytes * (1 + 1e-9):
        assert windows.stall_s(shard) > 0
    if shard < windows.capacity_bytes * (1 - 1e-9):
        assert windows.stall_s(shard) <= 1e-9 * constant_s


@given(st.lists(st.integers(1, 10**12), min_size=2, max_size=9), st.one_of(own_link, shared_link))
def test_a_larger_shard_is_never_done_earlier(shards: list[int], windows: Windows) -> None:
    ends = [windows.unpaced_end_s(shard) for shard in sorted(shards)]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(ends))


@given(st.integers(1, 10**12), shared_link)
def test_what_fits_before_the_gradients_is_copied_before_them(shard: int, windows: Windows) -> None:
    assume(shard < windows.bytes_per_s * windows.free_s)
    _, _, in_forward, in_backward = both(windows, shard)
    a_page_s = PAGE_BYTES / windows.bytes_per_s
    assert windows.copied_s(shard, in_forward, in_backward) <= windows.free_s * (1 + 1e-9) + a_page_s


@given(st.integers(0, 2**40), rates)
def test_slices_are_powers_of_two_of_at_least_a_page(bytes_per_window: int, rate: float) -> None:
    size = slice_size(bytes_per_window, rate)
    assert size >= PAGE_BYTES
    assert size & (size - 1) == 0
    assert size <= max(MIN_SLICE_BYTES, rate * 1e-3)
    assert size >= min(MIN_SLICE_BYTES, bytes_per_window / 2), "a channel that is slow is not slowed further"


def test_windows_share_by_time_and_finish_early() -> None:
    forward, backward, in_forward, in_backward = both(Windows(3, 0.1, 0.2, 2**30), 90 * MIB)
    assert in_forward == pytest.approx(90 * MIB / 3 / FINISH_AT / 3, abs=PAGE_BYTES)
    assert in_backward == pytest.approx(2 * 90 * MIB / 3 / FINISH_AT / 3, abs=PAGE_BYTES)
    assert forward.tiers == backward.tiers == MEMORY


@pytest.mark.parametrize(
    ("shard", "pace"), [(50, 0.5 / FINISH_AT), (75, 1.0), (80, 1.0), (100, 1.0), (250, 1.0), (0, 0.0)]
)
def test_slack_shrinks_as_the_channel_fills(shard: int, pace: float) -> None:
    assert Windows(1, 0.4, 0.6, bytes_per_s=100.0).pace(shard) == pytest.approx(pace)


def test_what_does_not_fit_is_the_stall() -> None:
    windows = Windows(1, 0.4, 0.6, bytes_per_s=100.0)
    assert windows.stall_s(250) == pytest.approx(1.5)
    assert windows.stall_s(100) == 0


def test_an_exposed_exchange_is_time_to_copy_too() -> None:
    windows = Windows(1, 0.4, 0.6, bytes_per_s=100.0, exchange_s=0.5)
    assert windows.capacity_bytes == pytest.approx(150)
    assert windows.stall_s(160) == pytest.approx(0.1)


def test_gradients_go_first_on_a_shared_link() -> None:
    windows = Windows(2, 0.4, 0.6, bytes_per_s=100.0, gradients_s=0.5, beside_bytes_per_s=20.0)
    assert windows.capacity_bytes == pytest.approx(100 * 1.5 + 20 * 0.5)
    assert windows.unpaced_end_s(100) == pytest.approx(1.0)
    assert windows.unpaced_end_s(145) == pytest.approx(1.4 + 5 / 20)
    assert windows.unpaced_end_s(155) == pytest.approx(1.4 + 0.5 + 5 / 100)
    assert windows.stall_s(170) == pytest.approx(0.1)
    assert windows.pace(100) == pytest.approx(1.0 / 1.4)  # not 0.67: done before the last backward pass


def test_unknown_times_are_split_one_to_two() -> None:
    forward, backward = storage_parameters(30 * MIB, 10, None, MEMORY)
    assert backward.bytes_per_window == pytest.approx(2 * (forward.bytes_per_window or 0), abs=2 * PAGE_BYTES)
    assert forward.slice_bytes <= DEFAULT_SLICE_BYTES


def test_unknown_size_and_no_tiers() -> None:
    unknown, _ = storage_parameters(None, 2, Windows(2, 1.0, 2.0, 1e9), MEMORY)
    assert (unknown.bytes_per_window, unknown.slice_bytes) == (None, DEFAULT_SLICE_BYTES)
    without, _ = storage_parameters(100, 2, Windows(2, 1.0, 2.0, 1e9), ())
    assert (without.windows, without.bytes_per_window, without.tiers) == (2, 0, ())


def test_a_usual_slice_is_copied_in_a_fraction_of_a_millisecond() -> None:
    assert slice_size(100 * MIB, 8 * 2**30) == MIB
    assert slice_size(400 * 1024, 8 * 2**30) == 64 * 1024
    assert slice_size(10_000, 8 * 2**30) == 8192
