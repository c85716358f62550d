"""What rank 0 writes down: a line per step, a line per event."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ..tiers.jsonfile import append_event, append_line
from ..tiers.layout import RunDir, Version
from .restore import Restored
from .snapshot import Refused


@dataclass
class Reporter:
    """Writes metrics and events of one attempt; silent on every rank but 0."""

    run: RunDir
    attempt: int
    active: bool
    slow_tier: str | None = None
    """Type of the first tier that the drainer fills."""
    not_finite: int = field(default=0, init=False)
    """Snapshots in a row that were refused."""
    too_slow: int = field(default=0, init=False)
    """Checkpoints in a row that were left out because the slow tier was busy."""
    _last_left_out: int = field(default=0, init=False)

    def step(self, metrics: dict[str, Any], tokens: int | None, samples: int) -> None:
        """One line of metrics.jsonl."""
        if not self.active:
            return
        rate = tokens / metrics["step_s"] if tokens is not None else None
        further = {"tokens": tokens, "tokens_per_s": rate, "samples": samples}
        line = {**metrics, **further, "attempt": self.attempt, "time": time.time()}
        lost = append_line(self.run.metrics, line)
        if lost is not None:
            self.event("warning", metrics["step"], detail=lost)

    def committed(self, version: Version | None, nbytes: int, seconds: float) -> None:
        """A snapshot is whole on every rank."""
        if version is None:
            return
        self.event("committed", version.step, tier="memory", bytes=nbytes, seconds=seconds)
        if self.not_finite:
            count, self.not_finite = self.not_finite, 0
            detail = f"the state is finite again; {count} snapshots were left out meanwhile"
            self.event("warning", version.step, detail=detail)

    def refused(self, refused: Refused | None) -> None:
        """A snapshot was not kept for its numbers; told once, however many follow, for training goes on."""
        if refused is None:
            return
        self.not_finite += 1
        if self.not_finite == 1:
            reason = f"{refused.tensor} holds NaN or infinity"
            self.event("skipped", refused.version.step, tier="memory", reason=reason, left_out=1)

    def drained(self, step: int, drained: bool | None) -> None:
        """Whether a checkpoint due in the slow tier was pinned for it, or left out (None: none was due).

        Those left out in a row are told in one event, when the tier has come round.
        """
        if drained is False:
            self.too_slow += 1
            self._last_left_out = step
        elif drained:
            self.end_outage()

    def end_outage(self) -> None:
        """Tell of the checkpoints that were left out for a busy tier, if there are any."""
        count, self.too_slow = self.too_slow, 0
        if count:
            reason = "the tier is slower than its interval"
            self.event("skipped", self._last_left_out, tier=self.slow_tier, reason=reason, left_out=count)

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
