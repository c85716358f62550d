"""Which of a rank's snapshots other nodes are to have, decided by all ranks alike at the end of a step.

One version at a time is under way to the peers. The one that all of them had before it stays in its slot until all
ranks know that all peers have the new one: whichever nodes are lost meanwhile, the rest has every shard of one of the
two. Marks on the slots tell the peer tier's process what to send, and the next attempt what to keep.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence

from ...tiers.format.jsonfile import dumps
from ...tiers.format.layout import Version
from ...tiers.memory.slots import Slot
from ...tiers.reading.agree import pairs_of, versions_from
from .decided import Copied, Late

WAIT_S = 0.002


class Offers:
    """This rank's part of the peer tier."""

    def __init__(
        self,
        slots: Sequence[Slot],
        every: int,
        restored: Version | None,
        gather: Callable[[bytes], list[bytes]],
        patience_s: float = 0.0,
    ) -> None:
        """Take up what earlier attempts have left in `slots`; all ranks must call it.

        `every`: steps between two versions, at least. `restored` is what this attempt goes on from; `gather` gives on
        every rank what each of them says. `patience_s`: for so long training may wait for one version to be with all
        peers; 0: never.
        """
        self.every, self.patience_s = every, patience_s
        self._given_up: Version | None = None
        """Which training waits for no longer: a peer takes nothing, and the job goes on without it."""
        self._told: Version | None = None
        """Of which was told that training goes on without it."""
        self.under_way: Version | None = None
        """The same on all ranks."""
        self.kept: Version | None = None
        """What all peers had before, as far as this rank still has it."""
        self._since = time.perf_counter()
        self._held: dict[Version, Slot] = {}
        for slot in slots:
            if (record := slot.record()) is not None:
                self._held[record.version] = slot
        marked = {version for version, slot in self._held.items() if slot.offered}
        self._take_up(restored, marked, gather(dumps([pairs_of(marked), restored in self._held])))
        self._last = self.under_way or restored

    def _take_up(self, restored: Version | None, marked: set[Version], said: Sequence[bytes]) -> None:
        """Agree on what is under way; a version that a rank has lost is of no more use than as what was restored."""
        answers = [json.loads(one) for one in said]
        if restored is not None and all(has_it for _, has_it in answers):
            common = frozenset.intersection(*(versions_from(pairs) for pairs, _ in answers))
            self.under_way = max((version for version in common if version <= restored), default=None)
            before = (version for version in marked if self.under_way is not None and version < self.under_way)
            self.kept = max(before, default=None)
        if self.under_way is None and restored in self._held:
            self.kept = restored
            self._held[restored].offer()  # once more: a peer that was lost has it no longer
        for version, slot in self._held.items():
            if not self.keeps(version):
                slot.withdraw()

    def keeps(self, version: Version | None) -> bool:
        """Tell whether a version must stay in its slot."""
        return version is not None and version in (self.under_way, self.kept)

    def busy(self) -> bool:
        """Tell whether a peer of this rank has not got yet what is under way."""
        return self.under_way is not None and not self._slot(self.under_way).is_sent(self.under_way)

    def wait(self, newest: Version | None, alive: Callable[[], None]) -> float:
        """Where the `newest` version is due, wait until the one before it is with this rank's peers; returns seconds.

        So the peers are never further behind than by what is sent in one step, and a lost node repeats two at most.
        `alive` is called again and again.
        """
        started = time.perf_counter()
        while newest is not None and self._is_due(newest) and self.under_way != self._given_up and self.busy():
            if time.perf_counter() - started > self.patience_s:
                self._given_up = self.under_way
                break
            alive()
            time.sleep(WAIT_S)
        return time.perf_counter() - started

    def decide(self, newest: Version | None, slots: Iterable[Slot], *, busy: bool) -> Copied | Late | None:
        """At the end of a step: note what all peers have, and offer the `newest` version if it is due.

        Of one that was waited for, in vain, is told once.

        `busy` is what all ranks agreed on. `slots` holds the slot of that version.
        """
        decided: Copied | Late | None = None
        if self.under_way is not None and not busy:
            if self.kept is not None:
                self._slot(self.kept).withdraw()
                del self._held[self.kept]
            decided = Copied(self.under_way, time.perf_counter() - self._since)
            self.kept, self.under_way = self.under_way, None
        elif self.under_way is not None and self.patience_s and newest is not None and self._is_due(newest):
            if self._told != self.under_way:
                decided = Late(self.under_way, time.perf_counter() - self._since)
            self._told = self.under_way
        if self.under_way is None and newest is not None and self._is_due(newest):
            slot = next(iter(slots))
            slot.offer()
            self._held[newest] = slot
            self.under_way = self._last = newest
            self._since = time.perf_counter()
        return decided

    def _is_due(self, newest: Version) -> bool:
        last = self._last.step if self._last is not None else 0
        return newest != self.kept and newest.step // self.every > last // self.every

    def _slot(self, version: Version) -> Slot:
        return self._held[version]
