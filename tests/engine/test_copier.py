"""The copier: its pace, its slices, its digests, and how it speaks of what went wrong."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.engine.build import GatedMover
from torch import Tensor

from dtrain.engine import timing
from dtrain.engine.process import streaming
from dtrain.engine.snapshot.copier import Copier, HostMover, Item, NonFinite
from dtrain.engine.snapshot.finite import FLOATS
from dtrain.engine.snapshot.state import tensor_bytes
from dtrain.tiers import faults
from dtrain.tiers.format.digest import digest


class Target:
    """Memory to copy into, with guards on both sides."""

    GUARD = b"\xa5" * 64

    def __init__(self, size: int) -> None:
        self.size = size
        self.buffer = ctypes.create_string_buffer(self.GUARD + b"\xff" * size + self.GUARD, size + 128)
        self.base = ctypes.addressof(self.buffer) + 64

    @property
    def data(self) -> bytes:
        raw = self.buffer.raw
        assert raw[:64] == raw[-64:] == self.GUARD, "written outside"
        return raw[64:-64]


class Bench:
    """A copy of some tensors under way."""

    def __init__(self, mover: HostMover, tensors: list[Tensor], slice_bytes: int) -> None:
        self.items, offset = [], 0
        for tensor in tensors:
            nbytes = tensor.numel() * tensor.element_size()
            self.items.append(Item(tensor, 0, nbytes, offset))
            offset += nbytes
        self.expected = b"".join(bytes(tensor_bytes(tensor)) for tensor in tensors)
        self.target = Target(offset)
        self.copier = Copier(mover, slice_bytes)
        self.digests: list[list[str]] = []

    def begin(self) -> None:
        self.copier.begin(1, self.items, self.target.base, self.digests.append)


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(tensors: list[Tensor], slice_bytes: int = 16, mover: HostMover | None = None) -> Bench:
        made.append(Bench(mover or HostMover(), tensors, slice_bytes))
        return made[-1]

    yield make
    for one in made:
        if isinstance(one.copier.mover, GatedMover):
            one.copier.mover.gate.set()
        one.copier.stop()


MakeBench = Callable[..., Bench]


def settled(mover: GatedMover, wanted: int) -> int:
    """Bytes moved, once they are `wanted` and have had time to become more."""
    deadline = time.monotonic() + 5
    while sum(mover.moved) < wanted and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.01)
    return sum(mover.moved)


@pytest.mark.parametrize("slice_bytes", [1, 7, 16, 10**6])
def test_all_bytes_and_their_digests_whatever_the_slice(bench: MakeBench, slice_bytes: int) -> None:
    one = bench([torch.randn(9), torch.randn(3, 5).t(), torch.tensor(4.0), torch.zeros(0), torch.randn(2).bfloat16()])
    one.copier.slice_bytes = slice_bytes
    one.begin()
    one.copier.finish()
    assert one.target.data == one.expected
    (digests,) = one.digests
    assert digests == [digest(tensor_bytes(item.tensor)) for item in one.items]


def test_pieces_in_the_middle_of_a_tensor(bench: MakeBench) -> None:
    for tensor in (torch.randn(8, 3), torch.randn(3, 8).t()):
        one = bench([torch.zeros(9)], slice_bytes=5)
        one.items = [Item(tensor, 24, 36, 0)]
        one.begin()
        one.copier.finish()
        assert one.target.data == bytes(tensor_bytes(tensor))[24:60]
        assert one.digests == [[digest(one.target.data)]]


def test_nothing_to_copy_is_done_at_once(bench: MakeBench) -> None:
    one = bench([])
    one.begin()
    one.copier.finish()
    assert one.digests == [[]]


def test_nothing_is_copied_before_a_window_opens(bench: MakeBench) -> None:
    mover = GatedMover()
    mover.gate.set()
    one = bench([torch.randn(40)], mover=mover)
    one.begin()
    assert settled(mover, 0) == 0
    one.copier.grant(0)
    assert settled(mover, 0) == 0
    assert one.copier.busy
    one.copier.finish()
    assert sum(mover.moved) == 160
    assert not one.copier.busy


def test_a_window_lets_pass_what_it_grants_and_no_more_than_a_slice_beyond(bench: MakeBench) -> None:
    mover = GatedMover()
    mover.gate.set()
    one = bench([torch.randn(100)], slice_bytes=16, mover=mover)
    one.begin()
    granted = 0
    for grant in (16, 1, 1, 14, 40, 100):
        one.copier.grant(grant)
        granted += grant
        slices = -(-granted // 16)
        assert settled(mover, 16 * slices) == 16 * slices, f"after {granted} bytes granted"
    assert one.digests == []
    assert set(mover.moved) == {16}
    one.copier.finish()
    assert one.target.data == one.expected


def test_grants_of_one_copy_do_not_serve_the_next(bench: MakeBench) -> None:
    mover = GatedMover()
    mover.gate.set()
    one = bench([torch.randn(10)], mover=mover)
    one.begin()
    one.copier.grant(10**9)
    one.copier.finish()
    one.begin()
    assert settled(mover, 40) == 40, "the second copy waits for a window of its own"
    one.copier.finish()
    assert sum(mover.moved) == 80
    assert len(one.digests) == 2


def test_finish_waits_for_the_last_slice(bench: MakeBench) -> None:
    class Slow(HostMover):
        def move(self, item: Item, position: int, nbytes: int, target: int) -> None:
            time.sleep(0.002)
            super().move(item, position, nbytes, target)

    one = bench([torch.randn(40)], mover=Slow())
    one.begin()
    one.copier.finish()
    assert one.target.data == one.expected
    one.copier.finish()
    assert len(one.digests) == 1, "finishing again does nothing"


class Displaced(HostMover):
    """At every slice the thread loses its core, for a time that no copy takes."""

    def __init__(self, told: Path) -> None:
        self.told, self.lost_s = told, 0
        self.lose(0)

    def lose(self, seconds: int) -> None:
        self.lost_s += seconds
        self.told.write_text(f"0 {self.lost_s * 10**9} 1")

    def move(self, item: Item, position: int, nbytes: int, target: int) -> None:
        self.lose(1000)
        super().move(item, position, nbytes, target)


def test_the_time_without_a_core_is_none_of_the_copy(
    bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "SCHEDSTAT", str(tmp_path / "schedstat"))
    mover = Displaced(tmp_path / "schedstat")
    one = bench([torch.randn(10)], slice_bytes=16, mover=mover)
    one.begin()
    one.copier.grant(16)
    settle = time.monotonic() + 5
    while mover.lost_s < 1000 and time.monotonic() < settle:
        time.sleep(0.001)
    mover.lose(10**6)  # while it waits for a window, which does not count either way
    one.copier.finish()
    assert -3000 <= one.copier.moving_s < -2900, "three slices, and nothing for the wait"


class Broken(HostMover):
    """Fails at its third slice."""

    moves = 0

    def move(self, item: Item, position: int, nbytes: int, target: int) -> None:
        self.moves += 1
        if self.moves == 3:
            raise OSError(28, "No space left on device")
        super().move(item, position, nbytes, target)


def test_finish_raises_what_the_thread_raised_and_once(bench: MakeBench) -> None:
    one = bench([torch.randn(40)], mover=Broken())
    one.begin()
    with pytest.raises(OSError, match="No space left"):
        one.copier.finish()
    assert one.digests == [], "a copy that failed is not reported as complete"
    one.copier.finish()
    one.begin()
    one.copier.finish()
    assert one.target.data == one.expected, "the thread goes on after a failure"
    assert len(one.digests) == 1


def test_finish_raises_what_the_commit_raised(bench: MakeBench) -> None:
    one = bench([torch.randn(4)])

    def fail(digests: list[str]) -> None:
        raise OSError(30, "Read-only file system")

    one.copier.begin(1, one.items, one.target.base, fail)
    with pytest.raises(OSError, match="Read-only"):
        one.copier.finish()


def test_stopped_in_the_middle_it_reports_nothing(bench: MakeBench) -> None:
    mover = GatedMover()
    mover.gate.set()
    one = bench([torch.randn(40)], mover=mover)
    one.begin()
    one.copier.grant(32)
    assert settled(mover, 32) == 32
    one.copier.stop()
    assert not one.copier._thread.is_alive()
    assert one.digests == []
    assert sum(mover.moved) == 32


def test_a_large_tensor_that_does_not_lie_row_by_row_is_brought_into_rows_once(bench: MakeBench) -> None:
    """Anew for every slice, the copy of a channels-last model would take time with the square of its size."""
    turned = torch.randn(64, 64).t()
    made = 0

    class Counting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal made
            made += func is torch.Tensor.contiguous
            return super().__torch_function__(func, types, args, kwargs or {})

    one = bench([turned], slice_bytes=1024)
    one.items = [Item(turned.as_subclass(Counting), 0, turned.numel() * 4, 0)]
    one.begin()
    one.copier.finish()
    assert one.target.data == one.expected
    assert made <= 1, f"made row-major {made} times for 16 slices"


@pytest.mark.parametrize("slice_bytes", [1, 3, 16, 36, 10**6])
@pytest.mark.parametrize("position", [0, 3, 8])
def test_a_copy_with_a_number_that_is_not_finite_is_given_up(bench: MakeBench, slice_bytes: int, position: int) -> None:
    """Slices may end inside a number."""
    tensors = [torch.randn(9), torch.randn(9), torch.randn(2)]
    tensors[1][position] = float("inf")
    one = bench(tensors, slice_bytes)
    one.items = [item._replace(floats=FLOATS["F32"]) for item in one.items]
    one.begin()
    with pytest.raises(NonFinite) as caught:
        one.copier.finish()
    assert caught.value.number == 1
    assert one.digests == []
    tensors[1][position] = 1.0
    one.begin()
    one.copier.finish()
    assert len(one.digests) == 1, "the next one is copied"


def test_what_need_not_be_finite_is_copied_as_it_is(bench: MakeBench) -> None:
    one = bench([torch.tensor([1.0, float("nan"), -float("inf")]), torch.ones(2)])
    one.items[1] = one.items[1]._replace(floats=FLOATS["F32"])
    one.begin()
    one.copier.finish()
    assert one.target.data == one.expected
    assert len(one.digests) == 1


def test_a_large_slice_is_moved_in_blocks_that_fit_a_cache(bench: MakeBench) -> None:
    mover = GatedMover()
    mover.gate.set()
    mover.block_bytes = 64
    one = bench([torch.randn(100)], slice_bytes=160, mover=mover)
    one.begin()
    one.copier.grant(1)
    assert settled(mover, 160) == 160, "a slice is granted whole"
    one.copier.finish()
    assert mover.moved == [64, 64, 32, 64, 64, 32, 64, 16]
    assert one.target.data == one.expected


def test_a_channel_that_is_slowed_takes_that_many_times_as_long(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(faults, "_faults", faults.parse("memory.copy:kind=slow:factor=10"))
    monkeypatch.setattr("dtrain.engine.snapshot.copier.time.sleep", slept.append)
    one = bench([torch.randn(64)], slice_bytes=64)
    one.begin()
    one.copier.finish()
    assert len(slept) == 4, "after each slice"
    assert sum(slept) > 0
    assert one.target.data == one.expected


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, "glibc.cpu.x86_non_temporal_threshold=0x40000"),
        ("glibc.malloc.check=1", "glibc.malloc.check=1:glibc.cpu.x86_non_temporal_threshold=0x40000"),
        ("glibc.cpu.x86_non_temporal_threshold=0x100000", None),
    ],
)
def test_workers_copy_past_the_caches_unless_somebody_has_tuned_that(given: str | None, wanted: str | None) -> None:
    environment = {} if given is None else {"GLIBC_TUNABLES": given}
    assert streaming(environment).get("GLIBC_TUNABLES") == wanted
