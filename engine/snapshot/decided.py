"""What is decided on snapshots at the end of a step, by all ranks alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...tiers.format.layout import Version


class Offered(NamedTuple):
    """A checkpoint that was due in the slow tier: pinned for the drainer, or left out because that was busy."""

    step: int
    pinned: bool


@dataclass(frozen=True)
class Refused:
    """A snapshot that no rank keeps: the tensor of its state that holds NaN or infinity."""

    version: Version
    tensor: str


class Late(NamedTuple):
    """A version that not all peers have although it was waited for: training goes on, and what it does is at risk."""

    version: Version
    seconds: float
    """Since it was offered."""


class Copied(NamedTuple):
    """A version that all peers have by now, and the time since it was offered."""

    version: Version
    seconds: float
