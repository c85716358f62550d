"""How long the drainer needs for each snapshot, seen from the worker that pins them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ...tiers.memory.slots import Slot


class DrainWatch:
    """Looks at this rank's slots now and then; what it costs is a call to the system for each pinned one."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        """Nothing is pinned as far as is known."""
        self.slots = slots
        self.busy_s = 0.0
        """Time in which a slot was seen pinned."""
        self.ended = 0
        """Slots that were released."""
        self._pinned: list[Slot] = []
        self._looked = 0.0

    def add(self, slot: Slot) -> None:
        """A slot has just been pinned."""
        self._pass()
        if slot not in self._pinned:
            self._pinned.append(slot)

    def look(self) -> None:
        """See which of the slots that are known to be pinned still are."""
        if self._pinned:
            self._pass()
            self._take([slot for slot in self._pinned if slot.pinned])

    def draining(self) -> bool:
        """Look at all slots: tell whether the drainer still holds one."""
        self._pass()
        self._take([slot for slot in self.slots if slot.pinned])
        return bool(self._pinned)

    def _take(self, pinned: list[Slot]) -> None:
        self.ended += sum(slot not in pinned for slot in self._pinned)
        self._pinned = pinned

    def _pass(self) -> None:
        now = time.perf_counter()
        if self._pinned:
            self.busy_s += now - self._looked
        self._looked = now
