"""Copies from a device: in the order of its work, within windows, never overtaken by an update.

Each case runs on a device that is turned by hand, in many orders, and on a real one where there is one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from tests.engine.device import Bench, Turned, needs_cuda
from torch import Tensor

from dtrain.engine.snapshot.copier import Item, NonFinite
from dtrain.engine.snapshot.device import CudaSide, Mark, PagesError, Side, side_of
from dtrain.engine.snapshot.device_copier import DeviceCopier
from dtrain.engine.snapshot.finite import FLOATS
from dtrain.engine.snapshot.packs import Pack
from dtrain.engine.snapshot.slot import OpenSlot, SlotError
from dtrain.engine.snapshot.state import tensor_bytes
from dtrain.tiers import faults
from dtrain.tiers.format.digest import digest
from dtrain.tiers.memory.slots import MemoryDir

DEVICES = [*(f"turned-{seed}" for seed in range(8)), pytest.param("cuda", marks=needs_cuda)]


def side_named(name: str) -> Side:
    return CudaSide(torch.device("cuda", 0)) if name == "cuda" else Turned(int(name.partition("-")[2]))


@pytest.fixture(params=DEVICES)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(side_named(request.param))
    yield made
    made.close()


class Copy:
    """Some tensors of a device and a copier for them."""

    def __init__(self, bench: Bench, values: list[Tensor], slice_bytes: int = 64) -> None:
        self.bench, self.tensors = bench, [bench.tensor(one) for one in values]
        self.items, offset = list[Item](), 0
        for tensor in self.tensors:
            self.items.append(Item(tensor, 0, tensor.numel() * tensor.element_size(), offset))
            offset += self.items[-1].nbytes
        self.nbytes = offset
        self.target, self.base = bench.memory(offset)
        self.copier = DeviceCopier(bench.side, slice_bytes)
        self.digests: list[list[str]] = []

    def begin(self) -> None:
        self.copier.begin(1, self.items, self.base, self.digests.append)

    def add(self, number: float) -> None:
        for tensor in self.tensors:
            self.bench.add(tensor, number)

    def hold(self) -> None:
        self.copier.hand_over_all()
        self.copier.hold()

    @property
    def data(self) -> bytes:
        return bytes(self.target[: self.nbytes])


MakeCopy = Callable[..., Copy]


@pytest.fixture
def copy() -> Iterator[MakeCopy]:
    made: list[Copy] = []

    def make(bench: Bench, values: list[Tensor], slice_bytes: int = 64) -> Copy:
        made.append(Copy(bench, values, slice_bytes))
        return made[-1]

    yield make
    for one in made:
        one.bench.run(one.copier.stop)
        assert not one.copier._thread.is_alive()


def values() -> list[Tensor]:
    """Whole numbers: what is added to them is exact."""
    return [torch.randint(99, shape).float() for shape in ((50,), (7, 6), (), (0,), (9,))]


def wanted(of: list[Tensor], added: float) -> bytes:
    return b"".join(bytes(tensor_bytes(one + added)) for one in of)


@pytest.mark.parametrize("windows", [0, 3, 30])
def test_updates_before_and_after_a_copy_leave_it_the_state_between_them(
    bench: Bench, copy: MakeCopy, windows: int
) -> None:
    """The thread that trains waits for nothing but the end of the last copy's look at its bytes."""
    given = values()
    given[1] = given[1].t()
    one = copy(bench, given)
    for step in range(1, 6):
        one.add(1)
        one.begin()
        for _ in range(windows):
            one.copier.grant(20)
        one.hold()
        one.add(100)
        bench.run(one.copier.finish)
        assert one.data == wanted(given, step)
        assert one.digests.pop() == [digest(wanted([single], step)) for single in given]
        assert one.digests == []
        one.add(-100)


def mixes(side: Side, copy: MakeCopy) -> bool:
    bench, given = Bench(side), [torch.randn(64)]
    one = copy(bench, given, 32)
    one.add(1)
    one.begin()
    one.copier.grant(100)
    one.hold()
    one.add(100)
    bench.run(one.copier.finish)
    return one.data != wanted(given, 1)


def test_without_its_waits_the_copy_would_be_a_mix(copy: MakeCopy) -> None:
    """The counter-test: this device shows what is missing."""

    class NoHold(Turned):
        def hold(self, mark: Mark) -> None:
            pass

    class NoFollow(Turned):
        def follow(self, mark: Mark) -> None:
            pass

    for side in (NoHold, NoFollow):
        assert any(mixes(side(seed), copy) for seed in range(10))
    assert not any(mixes(Turned(seed), copy) for seed in range(10))


def test_a_part_of_an_update_waits_for_its_own_items_alone(copy: MakeCopy) -> None:
    side = Turned()
    one = copy(Bench(side), [torch.randn(4), torch.randn(12), torch.randn(4)], 16)
    one.begin()
    one.copier.grant(1000)
    assert not one.copier.hand_over_all()
    done: list[int] = []
    for item in (0, 1, 2):
        one.copier.hold(item)
        side.compute(partial(done.append, item))
    seen: dict[int, list[int]] = {}
    while side.turn("compute") or side.turn("side"):
        seen.setdefault(side.bytes_copied, []).extend(done)
    updated = {copied: max(items, default=-1) for copied, items in seen.items()}
    assert updated == {0: -1, 16: 0, 32: 0, 48: 0, 64: 1, 80: 2}
    assert one.copier.hand_over_all(), "all have arrived"


def soon(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    time.sleep(0.005)  # for more to come than should


def test_a_window_gets_its_bytes_where_it_lies_in_the_devices_work(copy: MakeCopy) -> None:
    """The thread that trains is six windows ahead; the device copies what was granted up to where it is itself."""
    side = Turned()
    one = copy(Bench(side), [torch.randn(1000)], 16)
    one.begin()
    begun: list[int] = []
    for number in range(6):
        side.compute(partial(begun.append, number))
        one.copier.grant(40)
        side.compute(lambda: None)
    side.turn_all("side")
    for number in range(6):
        soon(lambda: len(one.copier._windows) == 0)
        side.turn_all("side")
        assert side.bytes_copied == (0 if number == 0 else 16 * -(-40 * number // 16))
        while number not in begun:
            assert side.turn("compute")
        side.turn("compute")  # its mark
        side.turn("compute")
    side.turn_all()
    assert side.bytes_copied == 240
    assert one.digests == []


def test_the_first_that_the_side_stream_gets_is_to_wait_for_the_update(copy: MakeCopy) -> None:
    """Windows may be opened where something else is computed at the time."""
    side = Turned()
    one = copy(Bench(side), [torch.randn(4)])
    one.add(1)
    one.begin()
    assert not side.turn("side")
    side.turn_all("compute")
    assert side.turn("side")


def test_nothing_is_handed_over_before_a_window_opens(copy: MakeCopy) -> None:
    side = Turned()
    one = copy(Bench(side), [torch.randn(40)], 16)
    one.begin()
    one.copier.grant(0)
    time.sleep(0.01)
    side.turn_all()
    assert side.bytes_copied == 0
    assert one.copier.busy
    one.bench.run(one.copier.finish)
    assert side.bytes_copied == 160
    assert not one.copier.busy


def test_what_had_no_window_comes_after_all_passes_and_before_the_update(copy: MakeCopy) -> None:
    side = Turned()
    one = copy(Bench(side), [torch.randn(40)], 16)
    one.begin()
    side.turn_all()
    done: list[str] = []
    side.compute(lambda: done.append("passes"))
    one.hold()
    side.compute(lambda: done.append("update"))
    side.turn_all("side")
    assert side.bytes_copied == 0
    side.turn_all("compute")
    assert done == ["passes"]
    side.turn_all()
    assert done == ["passes", "update"]
    assert side.bytes_copied == 160


def test_to_hold_an_update_takes_no_turn_of_the_device(copy: MakeCopy) -> None:
    """Nobody turns it here, so a wait of the training thread would never end."""
    side = Turned()
    one = copy(Bench(side), [torch.randn(400)], 16)
    one.add(1)
    one.begin()
    for _ in range(5):
        one.copier.grant(100)
    one.hold()
    one.add(1)
    assert side._turns == 0
    assert one.copier.busy
    side.turn_until(lambda: not one.copier.busy)


def test_it_is_complete_when_the_last_slice_has_arrived_and_not_before(copy: MakeCopy) -> None:
    side = Turned()
    one = copy(Bench(side), [torch.randn(40), torch.randn(3)], 16)
    one.begin()
    one.hold()
    while side.bytes_copied < one.nbytes:
        side.turn()
        assert one.digests == []
    soon(lambda: len(one.copier._flights) == 0)
    assert one.digests == [], "the bytes are there, their mark is not passed yet"
    side.turn_all()
    one.copier.finish()
    assert len(one.digests) == 1


def test_a_copy_that_fits_its_windows_is_complete_before_the_update(copy: MakeCopy) -> None:
    side = Turned()
    one = copy(Bench(side), [torch.randn(40), torch.randn(8)], 16)
    one.begin()
    one.copier.grant(192)
    side.turn_until(lambda: not one.copier.busy)
    assert len(one.digests) == 1
    left = [list(stream) for stream in side.streams.values()]
    one.hold()
    side.turn_all()
    assert left == [[], []]


def test_small_tensors_are_put_together_after_the_update(bench: Bench, copy: MakeCopy) -> None:
    given = [torch.randn(5), torch.randn(7)]
    one = copy(bench, given)
    pack = Pack(one.tensors)
    one.items = [Item(pack.together, 0, 48, 0, None, pack)]
    for added in (1, 2):
        one.add(1)
        one.begin()
        one.copier.grant(1)
        one.hold()
        bench.run(one.copier.finish)
        assert one.data == wanted([given[0] + 1, given[1] + 1] if added == 2 else given, 1)


def test_a_piece_in_the_middle_of_a_tensor(bench: Bench, copy: MakeCopy) -> None:
    for given in (torch.randn(8, 3), torch.randn(3, 8).t()):
        one = copy(bench, [given], 5)
        one.items = [Item(one.tensors[0], 24, 36, 0)]
        one.begin()
        bench.run(one.copier.finish)
        assert one.data[:36] == bytes(tensor_bytes(given))[24:60]
        assert one.digests == [[digest(one.data[:36])]]


@pytest.mark.parametrize("items", [0, 1])
def test_nothing_to_copy_is_done_at_once(bench: Bench, copy: MakeCopy, items: int) -> None:
    one = copy(bench, [torch.zeros(0)] * items)
    for _ in range(2):
        one.begin()
        bench.run(one.copier.finish)
    assert one.digests == [[digest(b"")] * items] * 2


def test_a_copy_with_a_number_that_is_not_finite_is_given_up(bench: Bench, copy: MakeCopy) -> None:
    one = copy(bench, [torch.randn(9), torch.randn(9), torch.randn(40)], 7)
    one.items = [item._replace(floats=FLOATS["F32"]) for item in one.items]
    bench.add(one.tensors[1], float("inf"))
    one.begin()
    one.copier.grant(50)
    one.hold()
    with pytest.raises(NonFinite) as caught:
        bench.run(one.copier.finish)
    assert caught.value.number == 1
    assert one.digests == []
    one.items = [one.items[0], one.items[2]]
    one.begin()
    bench.run(one.copier.finish)
    assert len(one.digests) == 1, "the next one is copied"


def test_what_the_commit_raises_is_raised_by_finish_and_once(bench: Bench, copy: MakeCopy) -> None:
    one = copy(bench, [torch.randn(4)])

    def fail(digests: list[str]) -> None:
        raise OSError(30, "Read-only file system")

    one.copier.begin(1, one.items, one.base, fail)
    one.hold()
    with pytest.raises(OSError, match="Read-only"):
        bench.run(one.copier.finish)
    one.copier.finish()


@pytest.mark.parametrize("ahead", [False, True], ids=["in the thread that copies", "in the thread that trains"])
def test_a_device_that_refuses_work_is_told_of_by_finish(copy: MakeCopy, ahead: bool) -> None:
    class Broken(Turned):
        def copy(self, source: Tensor, begin: int, nbytes: int, target: int) -> None:
            if begin >= 32:
                raise RuntimeError("CUDA error: out of memory")
            super().copy(source, begin, nbytes, target)

    one = copy(Bench(Broken()), [torch.randn(40)], 16)
    one.begin()
    if ahead:
        one.hold()
    else:
        one.copier.grant(1000)
    with pytest.raises(RuntimeError, match="out of memory"):
        one.bench.run(one.copier.finish)
    assert one.digests == []


def test_stopped_in_the_middle_it_reports_nothing(copy: MakeCopy) -> None:
    side = Turned()
    one = copy(Bench(side), [torch.randn(40)], 16)
    one.begin()
    one.copier.grant(32)
    soon(lambda: len(side.streams["side"]) > 4)
    one.bench.run(one.copier.stop)
    assert one.digests == []
    assert side.bytes_copied == 32


def test_the_time_of_a_copy_is_that_of_its_slices(copy: MakeCopy) -> None:
    """Without the wait for a window; two turns lie between the marks of one slice and the next."""
    side = Turned()
    one = copy(Bench(side), [torch.randn(40)], 16)
    one.begin()
    for _ in range(2):
        for _ in range(1000):
            side.compute(lambda: None)
        one.copier.grant(80)
    soon(lambda: len(one.copier._windows) == 0)
    side.turn_all("compute")
    side.turn_all("side")
    one.copier.finish()
    assert one.copier.moving_s == 20


def test_a_slowed_channel_takes_that_many_times_as_long(copy: MakeCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(faults, "_faults", faults.parse("memory.copy:kind=slow:factor=10"))
    monkeypatch.setattr("dtrain.engine.snapshot.device_copier.time.sleep", slept.append)
    side = Turned()
    one = copy(Bench(side), [torch.randn(16)], 16)
    one.begin()
    one.hold()
    soon(lambda: len(side.streams["side"]) > 8)
    side.turn_all("compute")
    side.turn_all("side")
    one.copier.finish()
    assert [seconds for seconds in slept if seconds > 1] == [18.0] * 4


def test_the_thread_says_for_which_device_it_works(copy: MakeCopy) -> None:
    side = Turned()
    one = copy(Bench(side), [torch.randn(4)])
    one.bench.run(one.copier.finish)
    soon(lambda: side.threads == {one.copier._thread.native_id})


@pytest.mark.parametrize("name", ["turned-0", pytest.param("cuda", marks=needs_cuda)])
def test_slots_are_page_locked_and_let_go(memory: MemoryDir, name: str) -> None:
    side = side_named(name)
    slot = OpenSlot(memory.slots(0, 1)[0], b"h" * 4096, 3 * 4096)
    for _ in range(2):  # the second time would be an error if the first was not undone
        slot.lock_pages(side)
        slot.unlock_pages(side)


@needs_cuda
def test_what_cannot_be_locked_is_named(memory: MemoryDir) -> None:
    side = side_named("cuda")
    slot = OpenSlot(memory.slots(0, 1)[0], b"h" * 4096, 3 * 4096)
    slot.lock_pages(side)
    with pytest.raises(SlotError, match=r"slot0: 12,288 bytes cannot be page-locked .* already"):
        slot.lock_pages(side)
    slot.unlock_pages(side)
    with pytest.raises(PagesError):
        side.unlock(slot.data - slot.begin)
    with contextlib.suppress(RuntimeError):  # the driver's last error is told once more, to who launches next
        torch.zeros(1, device="cuda")


@needs_cuda
def test_the_side_stream_has_the_lowest_priority() -> None:
    side = side_of(torch.device("cuda", 0))
    assert side is not None
    lowest, highest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
    assert side.stream.priority == lowest >= highest
    assert side.stream != torch.cuda.current_stream()


def test_a_state_in_host_memory_has_no_side_stream() -> None:
    assert side_of(torch.device("cpu")) is None


def test_a_refusal_to_lock_says_which_slot_how_much_and_why(memory: MemoryDir) -> None:
    class Refusing(Turned):
        def lock(self, address: int, nbytes: int) -> None:
            raise PagesError("out of memory (2)")

    slot = OpenSlot(memory.slots(0, 1)[0], b"h" * 4096, 3 * 4096)
    with pytest.raises(SlotError, match=r"slot0: 12,288 bytes cannot be page-locked .*: out of memory \(2\)"):
        slot.lock_pages(Refusing())
