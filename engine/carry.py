"""What is beyond memory when a run ends: the newest snapshot carried there, and where it is."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from ..tiers.format.layout import Version
from ..tiers.memory.slots import MemoryDir
from ..tiers.tier import Tier
from .nodes.alone import ASK_S, Alone
from .storage.drain import DrainerProcess

DRAIN_TIMEOUT_S = 3600.0


class Carrier:
    """The slower tiers of a run, seen from the launcher."""

    def __init__(self, memory: MemoryDir, tiers: Sequence[Tier], drainer: DrainerProcess, team: Alone) -> None:
        """Work with a drainer that may be running; `tiers` are those beside memory, fastest first."""
        self.memory, self.tiers, self.drainer, self.team = memory, tiers, drainer, team
        self._newest: Version | None = None

    def newest(self) -> Version | None:
        """The newest version that is whole in memory on every node, as of the last time they were asked."""
        return max(self.memory.whole(), default=None) if self.team.nodes == 1 else self._newest

    def left_in_memory(self, durable: Version | None) -> Version | None:
        """What the nodes may have between them that is newer than all that is `durable`; None: nothing is.

        It needs a node that is missing, or a number of ranks that the run has no more, so no drainer can carry it.
        """
        parts = self.team.in_parts()
        return parts if parts is not None and (durable is None or parts > durable) else None

    @property
    def names(self) -> str:
        """The tiers in words."""
        return " or ".join(tier.name for tier in self.tiers)

    def why_only_memory(self) -> str:
        """Why the newest state is in memory alone."""
        return f"{self.names} could not be written" if self.tiers else "the spec has no slower tier"

    def carry_on(self, timeout_s: float, far_timeout_s: float | None = None) -> Version | None:
        """Let the newest whole snapshot reach a slower tier and end the drainer.

        Once it is in one of them, the others get `far_timeout_s` at most. Returns the newest version there; None when
        the newest in memory did not get that far.
        """
        newest = self._newest = self.team.newest(patience_s=min(timeout_s, ASK_S))
        if not self.tiers:
            return None
        wanted = newest is not None and newest not in self._stored(newest)
        if wanted and newest is not None:
            self.memory.mark_for_drain(newest)
        self.team.carry(newest if wanted else None, timeout_s, far_timeout_s)
        for _ in range(3):  # a drainer that dies on the way is started again
            if self.drainer.stop(timeout_s, far_timeout_s) and not self.memory.pending():
                break
            if timeout_s < DRAIN_TIMEOUT_S:
                break
            self.drainer.start()
        self.team.carried()
        stored = self._stored(newest)
        return max(stored, default=None) if newest is None or newest in stored else None

    def _stored(self, wanted: Version | None) -> set[Version]:
        """Versions in the slower tiers; only `wanted`, if it is one of them."""
        stored: set[Version] = set()
        for tier in self._own():
            with contextlib.suppress(OSError):
                if wanted is None:
                    stored |= {checkpoint.version for checkpoint in tier.scan()[0]}
                elif tier.holds(wanted):
                    return {wanted}
        return stored

    def tier_of(self, version: Version) -> str:
        """The fastest of the slower tiers that has a version."""
        for tier in self._own():
            with contextlib.suppress(OSError):
                if tier.holds(version):
                    return tier.name
        return self.tiers[0].name

    def _own(self) -> list[Tier]:
        """The slower tiers without those that somebody took over, who may delete there whatever is ours."""
        taken = self.memory.taken_over()
        return [tier for tier in self.tiers if tier.name not in taken]

    def taken_over(self) -> str:
        """Which tiers somebody took over since the start, and who, as the rest of a message."""
        return "".join(
            f"; the {tier} tier no longer holds this run: {by}" for tier, by in self.memory.taken_over().items()
        )
