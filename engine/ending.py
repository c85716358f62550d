"""How a run ends: what is worth keeping is carried on to where it lasts, and one outcome says what became of it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from ..planners.plan import Plan
from ..specs.codes import Code
from ..specs.models import Spec
from ..tiers.drain.drainer import DrainJob
from ..tiers.drain.writer import TierJob
from ..tiers.format.jsonfile import append_event, newest_lines
from ..tiers.format.layout import RunDir, Version
from ..tiers.memory.heartbeat import end_workers
from ..tiers.memory.slots import MemoryDir, follow_folder
from ..tiers.reading.places import place_of, slow_tiers
from .attempt.agent import StopSignals
from .attempt.verdict import Fault, RestartBudget
from .carry import DRAIN_TIMEOUT_S, Carrier
from .job import Result, read_error, read_result
from .nodes.alone import Alone, NodeMissing
from .outcome import Outcome, lower
from .storage.drain import DrainerProcess
from .whereabouts import Whereabouts

INTERRUPT_DRAIN_S = 1.0
DRAINER_PATIENCE_S = 10.0

# Errors of ours whose message says it all.
_SPOKEN_FOR = {
    "NothingUsable", "StateError", "DataError", "UserCodeError", "UserCodeFailed", "TrainingDiverged", "SlotError",
}  # fmt: skip


class Ending:
    """A run that ends, or has no more to do than that. The caller holds the run's lock."""

    def __init__(
        self, run: RunDir, spec: Spec, plan: Plan, memory: MemoryDir, run_id: str, attempts_used: int, team: Alone
    ) -> None:
        """Prepare; nothing is started yet. `attempts_used`: the highest attempt number that is taken."""
        self.run, self.spec, self.plan, self.memory, self.run_id = run, spec, plan, memory, run_id
        self.team = team
        self.signals = StopSignals()
        self.folder = Whereabouts(run.root)
        self.tiers = slow_tiers(spec, run, run_id)
        job = drain_job(spec, plan, run, memory, run_id)
        patience_s = max(DRAINER_PATIENCE_S, spec.cluster.heartbeat_timeout)
        self.drainer = DrainerProcess(run, job, patience_s, self._stop_for_tier)
        self.beyond = Carrier(memory, self.tiers, self.drainer, self.team)
        self.tier_failed = self.folder_gone = False
        """Why the launcher itself has asked the workers to stop."""
        self.attempt, self.attempts_used = 0, attempts_used
        self.started = time.monotonic()
        self.step_reached = 0
        self.at_work: dict[int, int] = {}

    def conclude(self, step: int, state_digest: str) -> Outcome:
        """The last step is done, but the run never came to its end: see that the state is durable, and say so."""
        with self.signals:
            try:
                self.attempt = max(self.run.last_attempt(), self.attempts_used)
                self.memory.forget_taken_over()
                self.drainer.start()
                return self._ended(Result(step, state_digest, None, preempted=False))
            finally:
                self._clean_up()

    def _ended(self, result: Result) -> Outcome:
        """The workers left in good order: at the last step, or because they were told to stop."""
        self.signals.ignore()
        self.step_reached = result.step
        durable = self.beyond.carry_on(DRAIN_TIMEOUT_S, self._far_timeout_s if result.preempted else None)
        if result.preempted:
            return self._preempted(durable, result.loss)
        seconds = time.monotonic() - self.started
        if self.tiers and durable is None:
            message = (
                f"finished, but the last checkpoint could not be written to {self.beyond.names}; it is still in memory"
                f"{self.beyond.taken_over()}"
            )
            return self._outcome("failed", Code.MISSING_RESOURCE, message, result.state_digest, result.loss)
        memory = {} if result.device_bytes is None else {"device_bytes_per_rank": result.device_bytes}
        said = {"steps": result.step, "state_digest": result.state_digest, "seconds": seconds, **memory}
        self._event("finished", result.step, **said)
        lost = self.beyond.taken_over()
        self.memory.remove()
        message = f"finished {result.step} steps{lost}"
        return self._outcome("finished", lower(Code.DONE, lost), message, result.state_digest, result.loss)

    def _stopped(self, number: int) -> Outcome:
        """A signal reached the launcher: SIGINT ends at once, the others after a last durable checkpoint."""
        self.signals.ignore()
        name = signal.Signals(number).name
        if self.folder.is_gone():
            return self._without_folder()
        self._made_progress()
        if self.tier_failed:
            kept = self.beyond.newest()
            where = f"; the state of step {kept.step} is in memory, for dtrain resume" if kept is not None else ""
            message = f"a tier failed, and its on_failure is stop{where}"
            return self._outcome("failed", Code.MISSING_RESOURCE, message)
        if number == signal.SIGINT:
            durable = self.beyond.carry_on(INTERRUPT_DRAIN_S)
            kept = durable or self.beyond.newest()
            where = f"; newest checkpoint: step {kept.step}" if kept is not None else "; nothing was stored"
            where += self._forget(durable)
            return self._outcome("interrupted", Code.INTERRUPTED, f"interrupted{where}")
        result = read_result(self.run, self.attempt) if self.attempt else None
        if result is not None and not result.preempted:
            return self._ended(result)
        durable = self.beyond.carry_on(DRAIN_TIMEOUT_S, self._far_timeout_s)
        if durable is None and self.beyond.newest() is None and self.beyond.left_in_memory(None) is None:
            return self._outcome("interrupted", Code.INTERRUPTED, f"stopped by {name}; nothing was stored yet")
        return self._preempted(durable, result.loss if result else None)

    def _forget(self, durable: Version | None) -> str:
        """Give the memory back once nothing newer than what is `durable` is in it; else say what is."""
        left = self._left_words(durable)
        if durable is not None and not left:
            self.memory.remove()
        return left

    def _left_words(self, durable: Version | None) -> str:
        left = self.beyond.left_in_memory(durable)
        if left is None:
            return ""
        again = f"dtrain resume --from latest {self.run.root} on all of them"
        return f"; step {left.step} is in the memory of the nodes, as far as none of them has lost it: {again}"

    def _preempted(self, durable: Version | None, loss: float | None) -> Outcome:
        kept = durable or self.beyond.newest() or self.beyond.left_in_memory(None)
        if kept is None:
            return self._outcome("interrupted", Code.INTERRUPTED, "stopped; nothing was stored yet", loss=loss)
        tier = self.beyond.tier_of(durable) if durable is not None else "memory"
        self._event("preempted", step=kept.step, tier=tier)
        lost = self.beyond.taken_over()
        note = self._forget(durable)
        if durable is None and not note:
            note = f" (only in this node's memory: {self.beyond.why_only_memory()})"
        message = f"stopped after step {self.step_reached}; checkpoint of step {kept.step} in {tier}{note}{lost}"
        return self._outcome("preempted", lower(Code.PREEMPTED, lost), message, loss=loss)

    def _failed(self, budget: RestartBudget, why: str) -> Outcome:
        """What came again and again is told as it was the first time."""
        assert budget.first is not None
        fault, attempt = budget.first
        self.signals.ignore()
        left = self._forget(self.beyond.carry_on(DRAIN_TIMEOUT_S))
        error = read_error(self.run, attempt, fault.rank) if fault.rank is not None else None
        several = self.spec.cluster.nodes > 1 and fault.rank is not None
        where = f"node {fault.node_of(self.spec)}, " if several else ""
        outcome = self._outcome("failed", fault.code, f"{where}{fault.detail} ({why}){left}")
        trace = error.trace if error is not None and error.kind not in _SPOKEN_FOR else None
        return Outcome(**{**vars(outcome), "trace": trace, "log": self._log_of(fault, attempt)})

    @property
    def _far_timeout_s(self) -> float:
        """After a stop signal the first slower tier gets all the time it needs, the others half of what is left."""
        return self.spec.cluster.shutdown_timeout / 2

    def _without_node(self, missing: NodeMissing) -> Outcome:
        """A node stays away: what the others have is carried on as far as it goes, and all of them end."""
        self.signals.ignore()
        kept = self.beyond.carry_on(DRAIN_TIMEOUT_S)
        where = f"; newest checkpoint: step {kept.step} in {self.beyond.tier_of(kept)}" if kept is not None else ""
        return self._outcome("failed", Code.MISSING_RESOURCE, f"{missing}{where}{self._left_words(kept)}")

    def _nothing_in_common(self, passed: list[dict[str, Any]]) -> Outcome:
        """What was resumed never begins anew: what one node could go on from is of no use to the others."""
        return self._outcome("failed", Code.DAMAGED, nothing_for_all(passed))

    def _without_folder(self) -> Outcome:
        """The snapshots follow a folder that was moved; nobody could find those of one that was removed: they go."""
        self.signals.ignore()
        self.drainer.stop(timeout_s=0.0)
        self.memory.settle()
        moved, newest = self.folder.moved_to(), max(self.memory.whole(), default=None)
        fate = "removed" if moved is None else f"moved to {moved}"
        what = f"the run's folder {self.run.root} was {fate} while the run went on"
        if moved is None or newest is None:
            self.memory.remove()
            return self._outcome("failed", Code.MISSING_RESOURCE, f"{what}: it has ended")
        self.memory = follow_folder(self.memory, moved)
        message = f"{what}: it has ended, with step {newest.step} in memory; dtrain resume {moved}"
        return self._outcome("failed", Code.MISSING_RESOURCE, message)

    def _made_progress(self) -> bool:
        """Tell whether the attempt went further than any before it; a step repeated is no progress.

        The counters of the ranks know it too, where metrics.jsonl could not be written.
        """
        before = self.step_reached
        newest = next((line for line in newest_lines(self.run.metrics) if "step" in line and "attempt" in line), {})
        steps = [int(newest["step"])] if newest.get("attempt") == self.attempt else []
        begun = [step for step in self.at_work.values() if step > 0]
        self.step_reached = max([before, *steps, *(step - 1 for step in begun)])
        return self.step_reached > before

    def _stop_for_tier(self) -> None:
        """Called by the thread that watches the drainer: the run ends as by a signal, with a code of its own."""
        self.tier_failed = True
        os.kill(os.getpid(), signal.SIGTERM)

    def _clean_up(self) -> None:
        end_workers(self.memory)
        self.drainer.stop(timeout_s=INTERRUPT_DRAIN_S)
        self.folder.close()
        self.memory.remove_unneeded()

    def _outcome(
        self, status: str, code: Code, message: str, state_digest: str | None = None, loss: float | None = None
    ) -> Outcome:
        seconds = time.monotonic() - self.started
        return Outcome(status, code, message, self.step_reached, self.attempt, state_digest, loss, seconds)

    def _log_of(self, fault: Fault, attempt: int) -> str | None:
        return str(self.run.log(attempt, fault.rank)) if fault.rank is not None else None

    def _warn(self, detail: str) -> None:
        self._event("warning", detail=detail)

    def _event(self, event: str, step: int | None = None, **details: object) -> None:
        append_event(self.run.events, event, step, self.attempt, **details)


def drain_job(spec: Spec, plan: Plan, run: RunDir, memory: MemoryDir, run_id: str, seat: int | None = None) -> DrainJob:
    """What this node's drainer is told; `seat`: its place among the nodes, where that is not its number."""
    every = {tier.type: tier.every for tier in plan.tiers}
    tiers = tuple(
        TierJob(place_of(tier, run), tier.keep, tier.keep_every, every[tier.type], tier.on_failure)
        for tier in spec.slow_tiers
    )
    return DrainJob(
        str(run.root), str(memory.path), run_id, tiers, memory.ranks, run.node, int(spec.cluster.nodes), seat=seat,
        world=memory.world,
    )  # fmt: skip


def nothing_for_all(passed: list[dict[str, Any]]) -> str:
    """Why no checkpoint will do, one by one."""
    reasons = "".join(f"\n  step {item['step']} ({item['tier']}): {item['reason']}" for item in passed)
    return f"no checkpoint can be read by all nodes:{reasons}"
