"""The copier for a state on a device: slices go over a side stream, a thread looks at them when they have arrived.

What the training thread hands over for it are marks and waits, nothing that it waits for itself: the end of the update,
which every copy follows; the begin of each window, which the slices of that window follow; before the next update, that
each part of it follows the last copy of what it changes. So the windows lie where the device's own passes lie, however
far ahead the thread is.

No tensor that is copied is lost to torch's allocator meanwhile: slices on their way hold their source, and what the
next update frees is given away on its own stream alone, where the copies are over by then.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...tiers import faults
from ..process import BLOCK_BYTES
from .copier import CopyThread, Item, NonFinite
from .device import Mark, Side

NOTHING = torch.empty(0, dtype=torch.uint8)


class Slice(NamedTuple):
    """The bytes from `begin` to `end` of an item; `source` are all of them on the device."""

    number: int
    item: Item
    source: Tensor
    begin: int
    end: int


class Flight(NamedTuple):
    """A slice under way, between two marks of the side stream."""

    slice: Slice
    since: Mark
    arrived: Mark


class DeviceCopier(CopyThread):
    """Copies one snapshot at a time, in slices, within granted bytes; a `Copier` that may be held, not awaited."""

    def __init__(self, side: Side, slice_bytes: int) -> None:
        """Start the thread; it waits until there is something to copy."""
        self.side = side
        self.slice_bytes = slice_bytes
        self._handing = threading.Lock()
        """Held by the thread that hands slices over: the copier's, or before an update the one that trains."""
        self._windows: deque[tuple[Mark, int]] = deque()
        """Begin of each that is open and has not got its slices yet, and its bytes."""
        self._slices: Iterator[Slice] | None = None
        """What is to be handed over still."""
        self._flights: deque[Flight] = deque()
        self._ends: list[Mark] = []
        """Of the items: the last slice of each that was handed over."""
        self._budget = 0.0
        self._on_way_s = 0.0
        self._checked = 0
        super().__init__()

    def begin(self, step: int, items: Sequence[Item], base: int, done: Callable[[list[str]], None]) -> None:
        """Take on the copy of `items`, as they are after what was computed so far, to the page-locked address `base`.

        `done` gets the digest of each item when all are there. The thread is woken by the first window, not before.
        """
        self.side.follow(self.side.computed())
        with self._handing:
            self._slices, self._ends = self._cut(items), []
            self._budget = 0.0
            self._windows.clear()
        with self._changed:
            self._items, self._base, self._step, self._done = items, base, step, done

    def grant(self, nbytes: int) -> None:
        """A window is open: from here on in what is computed, up to `nbytes` more may be copied."""
        if self._slices is None:
            return
        self._windows.append((self.side.computed(), nbytes))
        self._wake()

    def hand_over_all(self) -> bool:
        """An update is next: slices without a window are due now. Returns whether all have arrived already.

        What went wrong with a copy is raised by `finish`.
        """
        self._hand_over_all()
        return not self._ends or self._ends[-1].query()

    def hold(self, item: int | None = None) -> None:
        """Let what is computed from now on follow the copies of an item and all before it, None: of all.

        All have been handed over; one that was given up is not waited for.
        """
        if self._ends:
            self.side.hold(self._ends[-1 if item is None else min(item, len(self._ends) - 1)])

    def finish(self) -> None:
        """Wait until the copy is complete; raises what went wrong: NonFinite, or an error."""
        self._hand_over_all()
        with self._changed:
            self._await()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _cut(self, items: Sequence[Item]) -> Iterator[Slice]:
        """Slices in their order; an item without bytes is one of none."""
        for number, item in enumerate(items):
            if item.pack is not None:
                self.side.fill(item.pack)
            source = self.side.rows(item.tensor) if item.nbytes else NOTHING
            for begin in range(0, max(1, item.nbytes), self.slice_bytes):
                yield Slice(number, item, source, begin, min(begin + self.slice_bytes, item.nbytes))

    def _hand_over_all(self) -> None:
        with self._handing:
            self._hand_over_granted()
            if self._slices is not None:
                self._hand_over(self.side.computed(), math.inf)
        self._wake()

    def _hand_over_granted(self) -> None:
        while self._windows:
            self._hand_over(*self._windows.popleft())

    def _hand_over(self, after: Mark, nbytes: float) -> None:
        """Hand over slices of `nbytes` that begin after a mark; one that is begun goes as a whole, and counts so."""
        self._budget += nbytes
        if self._slices is None or self._budget <= 0:
            return
        try:
            self.side.follow(after)
            since = self.side.copied()
            while self._budget > 0 and (one := next(self._slices, None)) is not None:
                if one.end > one.begin:
                    target = self._base + one.item.offset + one.begin
                    self.side.copy(one.source, one.item.begin + one.begin, one.end - one.begin, target)
                arrived = self.side.copied()
                self._flights.append(Flight(one, since, arrived))
                self._ends[one.number :] = [arrived]
                since, self._budget = arrived, self._budget - (one.end - one.begin)
                if one.end == one.item.nbytes and one.number == len(self._items or ()) - 1:
                    self._slices = None
                    return
            if self._budget > 0:  # there was nothing at all to copy
                self._slices = None
        except BaseException as error:  # told by finish(), whichever thread this is
            self._error, self._slices = error, None

    def _serve(self) -> None:
        self.side.enter()
        while self._wait_for_copy():
            try:
                self._copy()
            except BaseException as error:  # handed to the training thread by finish()
                self._give_up(error)
            self._over()

    def _wait_for_copy(self) -> bool:
        with self._changed:
            while not self._stopping and (self._items is None or not (self._windows or self._slices is None)):
                self._changed.wait()
            return not self._stopping

    def _copy(self) -> None:
        """Look at each slice when it has arrived, and hand over more as windows open; raises NonFinite."""
        items, digests, looked_s = self._items or (), list[str](), 0.0
        half, slowness = len(items) // 2, faults.slowness("memory.copy", self._step)
        self._on_way_s = 0.0
        while (flight := self._next_flight()) is not None:
            self._arrive(flight, slowness)
            started = self._clock.now()
            digest = self._look_at(flight.slice)
            looked_s += self._clock.now() - started
            if digest is not None:
                digests.append(digest)
                if flight.slice.number == half:
                    faults.point("copy.slice", self._step)
        if not self._stopping and self._error is None:
            self.moving_s = max(self._on_way_s, looked_s)
            self._done(digests)

    def _next_flight(self) -> Flight | None:
        """The oldest slice under way; waits for one; None when all have arrived, or the thread is to end."""
        while True:
            with self._handing:
                if not self._stopping:
                    self._hand_over_granted()
                all_handed_over = self._slices is None
            if self._flights:
                return self._flights.popleft()
            if all_handed_over or self._stopping:
                return None
            with self._changed:
                while not (self._stopping or self._windows or self._flights or self._slices is None):
                    self._changed.wait()

    def _arrive(self, flight: Flight, slowness: float) -> None:
        flight.arrived.synchronize()
        seconds = self.side.seconds(flight.since, flight.arrived)
        self._on_way_s += seconds
        if slowness > 1:
            time.sleep((slowness - 1) * seconds)

    def _look_at(self, one: Slice) -> str | None:
        """Hash what has arrived and look for numbers that are not finite; returns the digest at the end of an item."""
        item, address = one.item, self._base + one.item.offset
        if one.begin == 0:
            self._hasher.reset()
            self._checked = 0
        for begin in range(one.begin, one.end, BLOCK_BYTES):
            end = min(begin + BLOCK_BYTES, one.end)
            self._hasher.update((ctypes.c_char * (end - begin)).from_address(address + begin))
            if item.floats is not None:
                checked = item.floats.finite_until(address, self._checked, end)
                if checked is None:
                    raise NonFinite(one.number)
                self._checked = checked
        return self._hasher.hexdigest() if one.end == item.nbytes else None

    def _give_up(self, error: BaseException) -> None:
        """Hand over no more; what is under way goes into the slot still, so it is waited for."""
        with self._handing:
            self._slices = None
            self._error = self._error or error
            self._windows.clear()
        try:
            self.side.finish()
        except BaseException as worse:  # the device itself has failed
            self._error = worse
        self._flights.clear()
