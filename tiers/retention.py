"""Which checkpoints a tier keeps. Pure: versions in, versions out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .format.layout import Version


@dataclass(frozen=True)
class Rule:
    """Keep the newest `keep` (at least one), and every checkpoint of a step that is a multiple of `keep_every`."""

    keep: int
    keep_every: int | None = None

    def kept(self, versions: Iterable[Version]) -> set[Version]:
        """The versions to keep."""
        ordered = sorted(versions)
        kept = set(ordered[-max(1, self.keep) :])
        if self.keep_every is not None:
            by_step = {version.step: version for version in ordered}  # of a step repeated, the last attempt's
            kept |= {version for step, version in by_step.items() if step % self.keep_every == 0}
        return kept

    def at_most(self, max_steps: int) -> int:
        """How many checkpoints can be there at once in a run of `max_steps`, the one being written included."""
        extra = max_steps // self.keep_every if self.keep_every is not None else 0
        return max(1, self.keep) + extra + 1
