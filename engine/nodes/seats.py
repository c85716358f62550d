"""Which nodes take part in an attempt of an elastic run, and how long enough of them wait for more."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from ...specs.models import Spec


class Seats:
    """The nodes of the attempt, in the order of their ranks; of a run that is not elastic they are always all."""

    def __init__(self, spec: Spec) -> None:
        """Take the counts and the patience of `spec.cluster`; nobody has a seat yet in an elastic run."""
        self.cluster, self.usable = spec.cluster, spec.usable_nodes
        self.most = int(spec.cluster.nodes)
        self.elastic = spec.cluster.nodes.elastic
        self.roster: tuple[int, ...] = () if self.elastic else tuple(range(self.most))
        self._enough_since: float | None = None
        self._more_since: float | None = None

    @property
    def enough(self) -> bool:
        """Whether the run may go on with the nodes that were there when `missing` was last asked."""
        return self._enough_since is not None

    def enough_after(self, others: Collection[int]) -> tuple[float, int] | None:
        """Until when (time.monotonic) more are waited for, and with how many nodes it goes on then; None: with none."""
        if self._enough_since is None:
            return None
        missing = [node for node in range(1, self.most) if node not in others]
        return self._enough_since + self._patience_s(missing), self._count(self.most - len(missing))

    def rise(self) -> None:
        """An attempt is over: all waits begin anew."""
        self._enough_since = self._more_since = None

    def take(self, others: Collection[int]) -> None:
        """Seat node 0 and as many of the `others` that are there as can be used, those that had a seat first."""
        if self.elastic:
            there = sorted({0, *others}, key=lambda node: (node != 0, node not in self.roster, node))
            self.roster = tuple(sorted(there[: self._count(len(there))]))

    def missing(self, others: Collection[int]) -> list[int]:
        """Nodes that are waited for: all that are not there; of an elastic run only while it may not go on without."""
        missing = [node for node in range(1, self.most) if node not in others]
        there = self.most - len(missing)
        if not self.elastic or not self._count(there):
            self._enough_since = None
            return missing
        now = time.monotonic()
        self._enough_since = now if self._enough_since is None else self._enough_since
        waits = self._count(there) < self.usable[-1] and now - self._enough_since < self._patience_s(missing)
        return missing if waits else []

    def has_more(self, others: Collection[int]) -> bool:
        """Tell whether more nodes could be used than have a seat, and enough time was left for still others to come."""
        there = self._count(1 + len(others))
        if not self.elastic or there <= len(self.roster):
            self._more_since = None
            return False
        now = time.monotonic()
        self._more_since = now if self._more_since is None else self._more_since
        return there == self.usable[-1] or now - self._more_since > self.cluster.last_call

    def _count(self, there: int) -> int:
        """The largest number of nodes that can be used of so many; 0 if none."""
        return max((nodes for nodes in self.usable if nodes <= there), default=0)

    def _patience_s(self, missing: Sequence[int]) -> float:
        """How long enough nodes wait for more: at the beginning for a last call, later by the spec's policy."""
        if not self.roster:
            return self.cluster.last_call
        lost = set(self.roster) & set(missing)
        return self.cluster.rejoin_timeout if lost and self.cluster.on_node_loss == "wait" else 0.0
