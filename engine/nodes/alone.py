"""What a launcher asks of the other nodes of its run; a run on one node has none, so the answers are its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...tiers.format.layout import Version
from ...tiers.memory.slots import MemoryDir
from ...tiers.reading.recovery import Candidate
from ..attempt.agent import ALONE, Seat
from ..attempt.reports import Report
from ..attempt.supervise import Elsewhere

ASK_S = 30.0
"""Longest wait for what a node that is there has to say."""
Skipped = Sequence[dict[str, Any]]


class NodeMissing(Exception):
    """A node has not come, or not come back, in time; the message names it."""


@dataclass(frozen=True)
class Lost:
    """A node that was given up while an attempt was running."""

    node: int
    detail: str


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended on all nodes together."""

    report: Report
    lost: Lost | None = None


class Alone(Elsewhere):
    """A run on one node has nobody to agree with."""

    must_go_on = False
    """Where nothing is to go on from that is a failure: the run must not begin again at step 0."""
    elastic = False
    roster: tuple[int, ...] = (0,)
    """The nodes of the attempt, in the order of their ranks."""
    highest = 0
    """Highest attempt number that other nodes know of."""

    def __init__(self, memory: MemoryDir) -> None:
        """Speak for the snapshots of this node."""
        self.memory = memory

    @property
    def nodes(self) -> int:
        """How many nodes take part."""
        return len(self.roster)

    def muster(self, candidates: list[Candidate], skipped: Skipped) -> tuple[list[Candidate], list[dict[str, Any]]]:
        """Wait for all nodes; what all of them can go on from. Raises NodeMissing, Interrupted."""
        return candidates, list(skipped)

    def begin(self, attempt: int, candidates: Sequence[Candidate], skipped: Skipped, plan: dict[str, Any]) -> Seat:
        """Have the other nodes start their workers."""
        return ALONE

    def node_of(self, rank: int) -> int:
        """The node that has a rank in this attempt."""
        return 0

    def has_more(self) -> bool:
        """Tell whether an elastic run could go on with more nodes than it has."""
        return False

    def tick(self) -> bool:
        """Look after the others while the workers run; True: end those of this node, the attempt is over elsewhere."""
        return False

    def over(self, report: Report) -> Verdict:
        """The workers of this node have ended: wait for the others and put all reports together."""
        return Verdict(report)

    def newest(self, *, patience_s: float = ASK_S) -> Version | None:
        """Agree on what is carried to slower tiers; returns the newest version that is whole in memory everywhere."""
        self.memory.settle()
        return max(self.memory.whole(), default=None)

    def in_parts(self) -> Version | None:
        """The newest version that the nodes may have between them in memory, as of the last time they were asked.

        None: what is whole on all of them is all there is. A node that is missing may have the rest of any version.
        """
        return None

    def carry(self, version: Version | None, timeout_s: float, far_timeout_s: float | None) -> None:
        """Have the other nodes carry a version on and end their drainers."""

    def carried(self) -> None:
        """Wait until they have."""

    def end(self, outcome: Mapping[str, Any], *, remove: bool) -> None:
        """The run is over: tell the others how; `remove`: nothing in their memory is needed any more."""


def node_words(numbers: Sequence[int]) -> str:
    """Some nodes by their numbers."""
    return f"node {numbers[0]}" if len(numbers) == 1 else f"nodes {', '.join(map(str, numbers))}"
