"""The copier: a thread that moves slices of the state into a slot while the training thread computes.

It copies only as many bytes as the open windows have granted, so the pace is the plan's. Each slice is read from memory
once and written once: it is hashed, and looked through for numbers that are not finite, while what was read is still in
the processor's cache. All of that works without Python's lock.

Measured for this (one core of two, 768 MiB of AdamW state, per GiB): 0.15 s for the plain copy, 0.03 s for the digest,
0.03 s for the look at the numbers. With `process.STREAMING`, which writes past the caches, the copy takes 0.09 s.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import xxhash
from torch import Tensor

from ...tiers import faults
from ..process import BLOCK_BYTES
from ..timing import WorkClock
from .finite import Floats
from .packs import Pack

NICENESS = 10
"""Of the copier's thread: where no core is spare it works in the gaps that the passes leave."""


class NonFinite(Exception):
    """The copy was given up: item `number` holds NaN or infinity."""

    def __init__(self, number: int) -> None:
        """Name the item by its position in the copy."""
        super().__init__(f"item {number} is not finite")
        self.number = number


class Item(NamedTuple):
    """One piece of a tensor: `nbytes` from byte `begin` of its row-major bytes go to `offset` in the slot's data.

    With `floats` its numbers must be finite.
    """

    tensor: Tensor
    begin: int
    nbytes: int
    offset: int
    floats: Floats | None = None
    pack: Pack | None = None
    """What is put together in `tensor` before that is copied."""


class HostMover:
    """How bytes get from a tensor in host memory into the slot."""

    block_bytes = BLOCK_BYTES
    """Most bytes to be moved by one call."""

    def in_rows(self, tensor: Tensor) -> Tensor:
        """The tensor with its elements row by row: itself, or a copy made once for all its slices."""
        return tensor if tensor.is_contiguous() else tensor.contiguous()

    def fill(self, pack: Pack) -> None:
        """Put small tensors together, as they are after the update."""
        pack.fill()

    def move(self, item: Item, position: int, nbytes: int, target: int) -> None:
        """Copy `nbytes` of the item from `position` on to address `target`; return when they are there."""
        ctypes.memmove(target, item.tensor.data_ptr() + item.begin + position, nbytes)


def lower_priority() -> None:
    """Of the calling thread: it works in the gaps that others leave, where no core is spare."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class CopyThread(ABC):
    """Copies one snapshot at a time in a thread of its own: begun, awaited, ended."""

    def __init__(self) -> None:
        """Start the thread, so this comes last; it waits until there is something to copy."""
        self.moving_s = 0.0
        """Time that the last copy took without its waits for windows, and for a core.

        Of one from a device: on its way, or looked at, whichever is longer.
        """
        self._changed = threading.Condition()
        self._items: Sequence[Item] | None = None
        self._base = 0
        self._step = 0
        self._done: Callable[[list[str]], None] = lambda digests: None
        self._stopping = False
        self._error: BaseException | None = None
        self._hasher = xxhash.xxh3_128()
        self._thread = threading.Thread(target=self._run, name="dtrain-copier", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Tell whether a copy is not yet finished."""
        with self._changed:
            return self._items is not None

    def stop(self) -> None:
        """End the thread; what is not under way is given up."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout=5)

    @abstractmethod
    def _serve(self) -> None:
        """One copy after the other, until the thread is to end."""

    def _run(self) -> None:
        lower_priority()
        self._clock = WorkClock()
        try:
            self._serve()
        finally:
            self._clock.close()

    def _await(self) -> None:
        """Wait until the copy is complete, with the lock held; raises what went wrong with it."""
        while self._items is not None:
            self._changed.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _over(self) -> None:
        with self._changed:
            self._items = None
            self._changed.notify_all()


class Copier(CopyThread):
    """Copies one snapshot at a time from host memory, in slices, within granted bytes."""

    def __init__(self, mover: HostMover, slice_bytes: int) -> None:
        """Start the thread; it waits until there is something to copy."""
        self.mover = mover
        self.slice_bytes = slice_bytes
        self._granted = 0
        self._unlimited = False
        self._budget = 0
        """Bytes that the thread has taken of what was granted and not yet copied; its own, so without the lock."""
        self._waited_s = 0.0
        super().__init__()

    def begin(self, step: int, items: Sequence[Item], base: int, done: Callable[[list[str]], None]) -> None:
        """Take on the copy of `items` to address `base`; `done` gets the digest of each item when all are there.

        The thread is woken by the first window, not before.
        """
        with self._changed:
            self._items, self._base, self._step, self._done = items, base, step, done
            self._granted, self._unlimited = 0, False

    def grant(self, nbytes: int) -> None:
        """A window is open: up to `nbytes` more may be copied."""
        with self._changed:
            self._granted += nbytes
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until the copy is complete; raises what went wrong in the thread: NonFinite, or an error."""
        with self._changed:
            self._unlimited = True
            if self._items is not None:
                self._changed.notify_all()
            self._await()

    def _take(self, wanted: int) -> bool:
        """Wait until bytes are granted, unless some are left; False when the thread is to end."""
        if self._budget <= 0 and not self._unlimited:
            started = self._clock.now()
            with self._changed:
                while not (self._stopping or self._unlimited or self._budget + self._granted > 0):
                    self._changed.wait()
                self._budget, self._granted = self._budget + self._granted, 0
            self._waited_s += self._clock.now() - started
        self._budget -= wanted
        return not self._stopping

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._stopping and (self._items is None or not (self._unlimited or self._granted > 0)):
                    self._changed.wait()
                if self._stopping:
                    return
                items = self._items or ()
            try:
                self._copy(items)
            except BaseException as error:  # handed to the training thread by finish()
                self._error = error
            self._over()

    def _copy(self, items: Sequence[Item]) -> None:
        digests = []
        half = len(items) // 2
        self._budget, self._waited_s = 0, 0.0
        started = self._clock.now()
        for number, given in enumerate(items):
            if given.pack is not None:
                self.mover.fill(given.pack)
            digests.append(self._copy_item(number, given._replace(tensor=self.mover.in_rows(given.tensor))))
            if self._stopping:
                return
            if number == half:
                faults.point("copy.slice", self._step)
        self.moving_s = self._clock.now() - started - self._waited_s
        self._done(digests)

    def _copy_item(self, number: int, item: Item) -> str:
        """Copy one item and return its digest; raises NonFinite."""
        checked, slowness = 0, faults.slowness("memory.copy", self._step)
        self._hasher.reset()
        for begin, end in self._blocks(item.nbytes):
            started = time.perf_counter()
            target = self._base + item.offset + begin
            self.mover.move(item, begin, end - begin, target)
            source = item.tensor.data_ptr() + item.begin + begin  # a copy past the caches leaves the target out of them
            self._hasher.update((ctypes.c_char * (end - begin)).from_address(source))
            if item.floats is not None:
                checked = self._check(number, item.floats, source - begin, checked, end)
            if slowness > 1:
                time.sleep((slowness - 1) * (time.perf_counter() - started))
        return self._hasher.hexdigest()

    def _blocks(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Begin and end of every block of an item, slice by slice as they are granted; stops early when told to end."""
        for position in range(0, nbytes, self.slice_bytes):
            end = min(position + self.slice_bytes, nbytes)
            if not self._take(end - position):
                return
            for begin in range(position, end, self.mover.block_bytes):
                yield begin, min(begin + self.mover.block_bytes, end)

    def _check(self, number: int, floats: Floats, address: int, begin: int, end: int) -> int:
        """Raise NonFinite for a number that is not finite; returns how far whole numbers have been looked at.

        `address` is that of the item's first byte. A slice may end inside a number, which is then looked at with the
        next one.
        """
        checked = floats.finite_until(address, begin, end)
        if checked is None:
            raise NonFinite(number)
        return checked
