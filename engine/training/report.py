"""What rank 0 writes down: a line per step, a line per event."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ...tiers.format.jsonfile import append_event, append_line, newest_lines
from ...tiers.format.layout import RunDir, Version
from ..restore.restore import Restored
from ..snapshot.decided import Copied, Late, Offered, Refused
from .evaluation import Evaluated


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
    _line: dict[str, Any] = field(default_factory=dict, init=False)
    """The last one of metrics.jsonl."""

    def step(self, metrics: dict[str, Any], tokens: int | None, samples: int, tokens_seen: int | None) -> None:
        """One line of metrics.jsonl; `tokens` are of this step, `samples` and `tokens_seen` of all so far."""
        if not self.active:
            return
        rate = tokens / metrics["step_s"] if tokens is not None else None
        further = {"tokens": tokens, "tokens_per_s": rate, "samples": samples, "tokens_seen": tokens_seen}
        self._line = {**metrics, **further}
        self._append_line()

    def _append_line(self) -> None:
        self._line |= {"attempt": self.attempt, "time": time.time()}
        lost = append_line(self.run.metrics, self._line)
        if lost is not None:
            self.event("warning", self._line["step"], detail=lost)

    def evaluated(self, result: Evaluated) -> None:
        """The line of the step once more, with what its evaluation gave, and an event.

        The line was written before, for the state may be kept and the attempt end before the evaluation does.
        """
        if not self.active:
            return
        if self._line.get("step") != result.step:  # an attempt before this one wrote it
            lines = (line for line in newest_lines(self.run.metrics) if line.get("step") == result.step)
            self._line = next(lines, {})
        if self._line:
            self._line |= {"eval_loss": result.loss, "eval_s": result.seconds}
            self._line |= {"eval_perplexity": result.perplexity} if result.perplexity is not None else {}
            self._append_line()
        self.event(
            "evaluated", result.step, loss=result.loss, perplexity=result.perplexity, batches=result.batches,
            samples=result.samples, seconds=result.seconds,
        )  # fmt: skip

    def has_evaluated(self, step: int) -> bool:
        """Tell whether the evaluation of a step was told, in whichever attempt; True on every rank but 0."""
        if not self.active:
            return True
        return any(
            line.get("event") == "evaluated" and line.get("step") == step for line in newest_lines(self.run.events)
        )

    def committed(self, version: Version | None, nbytes: int, seconds: float) -> None:
        """A snapshot is whole on every rank."""
        if version is None:
            return
        self.event("committed", version.step, tier="memory", bytes=nbytes, seconds=seconds)
        if self.not_finite:
            count, self.not_finite = self.not_finite, 0
            detail = f"the state is finite again; {count} snapshots were left out meanwhile"
            self.event("warning", version.step, detail=detail)

    def copied(self, copied: Copied | Late | None, nbytes: int) -> None:
        """A version is with all peers, or late; `nbytes` were sent for it, over all ranks."""
        if isinstance(copied, Late):
            self.event(
                "warning", copied.version.step, tier="peer",
                detail=f"the copy of step {copied.version.step} is not with all peers after {copied.seconds:.1f} s: "
                "training goes on without it, and a node that is lost meanwhile repeats all steps since",
            )  # fmt: skip
        elif copied is not None:
            self.event(
                "committed", copied.version.step, tier="peer", bytes=nbytes, seconds=copied.seconds, channel="storage"
            )

    def refused(self, refused: Refused | None) -> None:
        """A snapshot was not kept for its numbers; told once, however many follow, for training goes on."""
        if refused is None:
            return
        self.not_finite += 1
        if self.not_finite == 1:
            reason = f"{refused.tensor} holds NaN or infinity"
            self.event("skipped", refused.version.step, tier="memory", reason=reason, left_out=1)

    def offered(self, offered: Offered | None) -> None:
        """A checkpoint due in the slow tier was pinned for it, or left out (None: nothing was decided).

        Those left out in a row are told in one event, when the tier has come round.
        """
        if offered is None:
            return
        if offered.pinned:
            self.end_outage()
        else:
            self.too_slow += 1
            self._last_left_out = offered.step

    def end_outage(self) -> None:
        """Tell of the checkpoints that were left out for a busy tier, if there are any."""
        count, self.too_slow = self.too_slow, 0
        if count:
            reason = "the tier is slower than its interval"
            self.event("skipped", self._last_left_out, tier=self.slow_tier, reason=reason, left_out=count)

    def restored(self, restored: Restored, state_digest: str, passed_over: tuple[dict[str, Any], ...]) -> None:
        """The state was read back."""
        step = restored.candidate.version.step
        for words in restored.mended:
            self.event("warning", step, detail=f"damaged: {words}")
        self.event(
            "restored",
            step,
            tier=restored.candidate.tier,
            seconds=restored.seconds,
            skipped=[*passed_over, *restored.skipped],
            state_digest=state_digest,
        )

    def event(self, event: str, step: int | None, **details: object) -> None:
        """One line of events.jsonl."""
        if self.active:
            append_event(self.run.events, event, step, self.attempt, **details)
