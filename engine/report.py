"""What rank 0 writes down: a line per step, a line per event."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ..tiers.jsonfile import append_event, append_line
from ..tiers.layout import RunDir, Version
from .restore import Restored


@dataclass(frozen=True)
class Reporter:
    """Writes metrics and events of one attempt; silent on every rank but 0."""

    run: RunDir
    attempt: int
    active: bool

    def step(self, metrics: dict[str, Any], tokens: int | None, samples: int) -> None:
        """One line of metrics.jsonl."""
        if not self.active:
            return
        rate = tokens / metrics["step_s"] if tokens is not None else None
        further = {"tokens": tokens, "tokens_per_s": rate, "samples": samples}
        append_line(self.run.metrics, {**metrics, **further, "attempt": self.attempt, "time": time.time()})

    def committed(self, version: Version | None, nbytes: int, seconds: float) -> None:
        """A snapshot is whole on every rank."""
        if version is not None:
            self.event("committed", version.step, tier="memory", bytes=nbytes, seconds=seconds)

    def restored(self, restored: Restored, state_digest: str, passed_over: tuple[dict[str, Any], ...]) -> None:
        """The state was read back."""
        self.event(
            "restored",
            restored.candidate.version.step,
            tier=restored.candidate.tier,
            seconds=restored.seconds,
            skipped=[*passed_over, *restored.skipped],
            state_digest=state_digest,
        )

    def event(self, event: str, step: int | None, **details: object) -> None:
        """One line of events.jsonl."""
        if self.active:
            append_event(self.run.events, event, step, self.attempt, **details)
