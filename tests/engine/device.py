"""Devices for tests: one that a test turns by hand, piece of work by piece, and a real one where there is one.

The one that is turned keeps what a device promises and nothing else: the work of a stream is done in its order, later
than it is handed over, and the streams among each other in any order that their marks allow.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dtrain.engine.snapshot.device import CudaSide, Mark, Side
from dtrain.engine.snapshot.packs import Pack

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SOON_S = 10


class TurnedMark(Mark):
    """Passed when the device has got there."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.at = 0

    def synchronize(self) -> None:
        assert self.passed.wait(SOON_S), "the device never got there"

    def query(self) -> bool:
        return self.passed.is_set()


Work = Callable[[], None] | TurnedMark
"""Something to do, or a mark to wait for."""


class Turned(Side):
    """Two streams over host memory. Tensors of the "device" are those that only `compute` writes into."""

    def __init__(self, seed: int = 0) -> None:
        self.draw = random.Random(seed)
        self.streams: dict[str, deque[Work]] = {"compute": deque(), "side": deque()}
        self.bytes_copied = 0
        self.locked: dict[int, int] = {}
        self.threads: set[int] = set()
        self._turns = 0
        self._lock = threading.RLock()

    def compute(self, work: Callable[[], None]) -> None:
        """Hand over work of the training."""
        self._put("compute", work)

    def enter(self) -> None:
        self.threads.add(threading.get_native_id())

    def computed(self) -> TurnedMark:
        return self._mark("compute")

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, TurnedMark)
        self._put("side", mark)

    def hold(self, mark: Mark) -> None:
        assert isinstance(mark, TurnedMark)
        self._put("compute", mark)

    def fill(self, pack: Pack) -> None:
        self._put("side", pack.fill)

    def rows(self, tensor: Tensor) -> Tensor:
        whole = tensor.detach()
        if not whole.is_contiguous():
            turned, whole = whole, torch.full(whole.shape, 77).to(whole.dtype)
            self._put("side", lambda: whole.numpy(force=True).__setitem__(..., turned.numpy(force=True)))
        return whole.reshape(-1).view(torch.uint8)

    def copy(self, source: Tensor, begin: int, nbytes: int, target: int) -> None:
        assert any(base <= target and target + nbytes <= base + size for base, size in self.locked.items())

        def move() -> None:
            ctypes.memmove(target, source.data_ptr() + begin, nbytes)
            self.bytes_copied += nbytes

        self._put("side", move)

    def copied(self) -> TurnedMark:
        return self._mark("side")

    def seconds(self, first: Mark, last: Mark) -> float:
        assert isinstance(first, TurnedMark)
        assert isinstance(last, TurnedMark)
        assert first.passed.is_set()
        assert last.passed.is_set()
        return float(last.at - first.at)

    def finish(self) -> None:
        self.copied().synchronize()

    def lock(self, address: int, nbytes: int) -> None:
        assert address % mmap.PAGESIZE == 0
        self.locked[address] = nbytes

    def unlock(self, address: int) -> None:
        del self.locked[address]

    def turn(self, stream: str | None = None) -> bool:
        """Do the next piece of work of a stream, of any of them without a name; False when none can be done."""
        with self._lock:
            able = [name for name in self.streams if self._can_go_on(name) and stream in (None, name)]
            if not able:
                return False
            name = self.draw.choice(able)
            work = self.streams[name].popleft()
            self._turns += 1
            if not isinstance(work, TurnedMark):
                work()
            return True

    def turn_all(self, stream: str | None = None) -> None:
        """Until there is nothing left that can be done."""
        while self.turn(stream):
            pass

    def turn_until(self, done: Callable[[], bool]) -> None:
        """Turn as long as it takes, for threads that hand over and look at work meanwhile."""
        deadline = time.monotonic() + SOON_S
        while not done():
            assert time.monotonic() < deadline
            if not self.turn():
                time.sleep(0.0002)

    def _can_go_on(self, name: str) -> bool:
        work = next(iter(self.streams[name]), None)
        return work is not None and not (isinstance(work, TurnedMark) and not work.passed.is_set())

    def _put(self, name: str, work: Work) -> None:
        with self._lock:
            self.streams[name].append(work)

    def _mark(self, name: str) -> TurnedMark:
        mark = TurnedMark()

        def passed() -> None:
            mark.at = self._turns
            mark.passed.set()

        self._put(name, passed)
        return mark


class Bench:
    """What a test does with either device: tensors, work on them, page-locked memory to copy into."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.made: list[tuple[mmap.mmap, int]] = []

    def tensor(self, values: Tensor) -> Tensor:
        """A tensor of the device."""
        return values.cuda() if isinstance(self.side, CudaSide) else values.clone(memory_format=torch.preserve_format)

    def add(self, tensor: Tensor, number: float) -> None:
        """Have it added, as an update would; on a real device behind much other work."""
        if isinstance(self.side, Turned):
            # by numpy: torch would count it as written to when it is done, not when it was handed over
            numbers = tensor.detach().numpy()
            self.side.compute(lambda: numbers.__setitem__(..., numbers + number))
            return
        busy = torch.randn(1024, 1024, device="cuda")
        for _ in range(20):
            busy = busy @ busy
        tensor.add_(number)

    def memory(self, nbytes: int) -> tuple[mmap.mmap, int]:
        """Page-locked memory and its address."""
        target = mmap.mmap(-1, max(1, nbytes))
        address = ctypes.addressof(ctypes.c_char.from_buffer(target))
        self.side.lock(address, len(target))
        self.made.append((target, address))
        return target, address

    def run(self, waiting: Callable[[], Any]) -> Any:
        """Call what waits for the device, while that goes on."""
        if not isinstance(self.side, Turned):
            return waiting()
        told: list[Any] = []
        errors: list[BaseException] = []

        def call() -> None:
            try:
                told.append(waiting())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        self.side.turn_until(lambda: not thread.is_alive())
        thread.join()
        if errors:
            raise errors[0]
        return told[0]

    def settle(self) -> None:
        """Let the device do all it has been handed."""
        if isinstance(self.side, Turned):
            self.side.turn_all()
        else:
            torch.cuda.synchronize()

    def close(self) -> None:
        for _, address in self.made:
            self.side.unlock(address)
