"""The life of a run: attempts of workers, one after the other, until it is finished, stopped or past help."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..planners.plan import Plan
from ..specs.codes import Code
from ..specs.models import Spec
from ..tiers.drainer import DrainJob
from ..tiers.heartbeat import DONE_STEP, end_group, read_heartbeats
from ..tiers.journal import take_notes
from ..tiers.jsonfile import Unreadable, append_event, dumps, read, read_lines
from ..tiers.jsonfile import replace as write
from ..tiers.layout import RunDir, Version
from ..tiers.memory import MemoryDir, follow_folder
from ..tiers.places import place_of, slow_tiers
from ..tiers.recovery import Candidate, find
from ..tiers.writer import TierJob
from .agent import Interrupted, StopSignals
from .alone import Alone, NodeMissing, Verdict
from .carry import DRAIN_TIMEOUT_S, Carrier
from .drain import DrainerProcess
from .forks import NurseryProcess
from .job import Result, read_error, read_result
from .outcome import Outcome, lower
from .shift import Report, Shifts
from .stacks import last_stack
from .verdict import Fault, RestartBudget, judge
from .whereabouts import Whereabouts

INTERRUPT_DRAIN_S = 1.0
DRAINER_PATIENCE_S = 10.0


class Launcher:
    """Drives one run on this machine. The caller holds the run's lock."""

    def __init__(
        self, run: RunDir, spec: Spec, plan: Plan, memory: MemoryDir, run_id: str, import_paths: tuple[str, ...],
        attempts_used: int, nursery: NurseryProcess | None = None, team: Alone | None = None,
        replan: Callable[[Spec], Plan] | None = None,
    ) -> None:  # fmt: skip
        """Prepare; nothing is started yet. `attempts_used`: the highest attempt number that is taken.

        Without a nursery every worker imports everything itself. `team`: the other nodes, if there are any. `replan`
        makes the plan for another number of nodes, where that may change.
        """
        self.base, self.replan = spec, replan
        self.run, self.spec, self.plan, self.memory, self.run_id = run, spec, plan, memory, run_id
        self.team = team or Alone(memory)
        self.signals = StopSignals()
        self.shifts = Shifts(run, spec, memory, run_id, import_paths, nursery, self.signals, self._warn)
        self.folder = Whereabouts(run.root)
        self.tiers = slow_tiers(spec, run, run_id)
        job = drain_job(spec, plan, run, memory, run_id)
        patience_s = max(DRAINER_PATIENCE_S, spec.cluster.heartbeat_timeout)
        self.drainer = DrainerProcess(run, job, patience_s, self._stop_for_tier)
        self.beyond = Carrier(memory, self.tiers, self.drainer, self.team)
        self.tier_failed = self.folder_gone = False
        """Why the launcher itself has asked the workers to stop."""
        self.seats: tuple[int, ...] = () if self.team.elastic else self.team.roster
        self.stopped_to_grow: Result | None = None
        self.growing = False
        """Whether the workers were asked to stop for the sake of nodes that have come."""
        self.attempt, self.attempts_used = 0, attempts_used
        self.started = time.monotonic()
        self.step_reached = 0
        self.at_work: dict[int, int] = {}

    def drive(self, candidates: list[Candidate], skipped: list[dict[str, Any]]) -> Outcome:
        """Train from the first usable candidate (none: from step 0) to the end, which all nodes are told."""
        outcome = self._driven(candidates, skipped)
        self.team.end(outcome.to_json(), remove=not self.memory.path.is_dir())
        return outcome

    def _driven(self, candidates: list[Candidate], skipped: list[dict[str, Any]]) -> Outcome:
        with self.signals:
            try:
                self.step_reached = candidates[0].version.step if candidates else 0
                shutil.rmtree(self.run.spool, ignore_errors=True)
                self.memory.forget_taken_over()
                if self.seats:
                    self.drainer.start()
                return self._attempts(candidates, skipped)
            except Interrupted as stop:
                return self._stopped(stop.number)
            except NodeMissing as missing:
                return self._without_node(missing)
            except OSError as error:
                if self.folder.is_gone():
                    return self._without_folder()
                return self._outcome("failed", Code.MISSING_RESOURCE, f"the run's folder cannot be used: {error}")
            finally:
                self._clean_up()

    def _attempts(self, candidates: list[Candidate], skipped: list[dict[str, Any]]) -> Outcome:
        base, first = candidates, None
        budget = RestartBudget(self.spec.cluster.max_restarts)
        while True:
            had = len(candidates)
            candidates, skipped = self.team.muster(candidates, skipped)
            if first is None:  # what other nodes had in memory, where this one had lost it
                known = {(one.version, one.place.url) for one in candidates}
                base = [*candidates, *(one for one in base if (one.version, one.place.url) not in known)]
            if not candidates and ((had and base) or self.team.must_go_on):
                return self._nothing_in_common(skipped)
            if had and not candidates:
                self._warn(f"beginning again at step 0: {_nothing_for_all(skipped)}")
            self.attempt = self.run.next_attempt(max(self.attempts_used, self.team.highest))
            if self.seats != self.team.roster:
                self._take_seats()
            first = first or self.attempt
            verdict = self._one_attempt(candidates, skipped)
            ended = verdict.report.ended
            result = read_result(self.run, self.attempt)
            if self.folder.is_gone():
                return self._without_folder()
            if self.tier_failed or ended.signal_number is not None:
                return self._stopped(ended.signal_number or signal.SIGTERM)
            if result is not None and _is_done(verdict, stored=bool(self.spec.tiers)):
                if not (self.growing and result.preempted):
                    return self._ended(result)
                self._made_progress()
                self.stopped_to_grow = result
                candidates, skipped = self._candidates_again(base, first)
                continue
            fault = _fault(verdict, self.spec.world_size)
            budget.count(fault, self.attempt, progress=self._made_progress())
            given_up = budget.why_no_restart(fault)
            self._tell_fault(fault, budget, verdict.report, restarting=given_up is None)
            if given_up is not None:
                return self._failed(budget, given_up)
            candidates, skipped = self._candidates_again(base, first)

    def _take_seats(self) -> None:
        """Nodes have come or gone: what depends on their number and places is made anew."""
        assert self.replan is not None
        before, self.seats = self.seats, self.team.roster
        self.spec = self.base.at(self.team.nodes)
        self.plan = self.replan(self.spec)
        write(self.run.plan, dumps(self.plan.to_json()))
        workers = self.spec.cluster.workers_per_node
        self.memory = replace(self.memory, ranks=tuple(range(workers)), world=self.spec.world_size)
        self.memory.settle(())  # nobody carries shards of another world size on
        self.team.memory = self.shifts.memory = self.beyond.memory = self.memory
        self.shifts.spec = self.spec
        self.drainer.stop(timeout_s=0.0)
        self.drainer.job = drain_job(self.spec, self.plan, self.run, self.memory, self.run_id)
        self.drainer.start()
        if before:
            stopped, self.stopped_to_grow = self.stopped_to_grow, None
            self._event(
                "resized", step=self.step_reached, nodes=len(self.seats), before=len(before), names=list(self.seats),
                world=self.spec.world_size, state_digest=stopped.state_digest if stopped is not None else None,
            )  # fmt: skip

    def _is_training(self) -> bool:
        """Tell whether every rank of this node makes steps: before that a stop signal would end it at once."""
        beats = read_heartbeats(self.memory)
        at_work = [beat for beat in beats if 0 < beat.step < DONE_STEP]
        return len(at_work) == len(beats) == self.spec.cluster.workers_per_node

    def _tell_fault(self, fault: Fault, budget: RestartBudget, report: Report, *, restarting: bool) -> None:
        several = self.base.cluster.nodes > 1
        log = self._log_of(fault, self.attempt)
        self._event(
            "fault",
            step=self.at_work.get(fault.rank or 0, self.step_reached),
            rank=fault.rank,
            kind=fault.kind,
            detail=fault.detail,
            log=log,
            signal=fault.signal,
            stack=last_stack(Path(log)) if log is not None else [],
            memory_peak_bytes=report.peaks.get(fault.rank) if fault.rank is not None else None,
            restarting=restarting,
            restart=budget.failures,
            max_restarts=budget.allowed,
            **({"node": fault.node if fault.rank is None else self.team.node_of(fault.rank)} if several else {}),
        )

    def _one_attempt(self, candidates: list[Candidate], skipped: list[dict[str, Any]]) -> Verdict:
        """Run the workers once, on all nodes; what they leave behind is cleaned up before this returns."""
        self.growing = False
        self._event("attempt", world=self.spec.world_size, nodes=self.spec.cluster.nodes)
        seat = self.team.begin(self.attempt, candidates, skipped, self._plan_of_now())
        try:
            report = self.shifts.work(
                self.attempt, candidates, skipped, watch=self._watch, seat=seat, elsewhere=self.team
            )
        finally:
            self._pass_on_notes()
        verdict = self.team.over(report)
        self.at_work = verdict.report.at_work
        return verdict

    def _plan_of_now(self) -> dict[str, Any]:
        """The plan with what earlier attempts have measured, as all nodes are to use it."""
        try:
            return read(self.run.plan)
        except Unreadable:
            return self.plan.to_json()

    def _candidates_again(self, base: list[Candidate], first: int) -> tuple[list[Candidate], list[dict[str, Any]]]:
        """After a fault: what this process has made since, then what it began from."""
        if self.spec.memory_tier is None:
            self._wait_for_drain()
        memory = self.memory if self.spec.memory_tier is not None else None
        if memory is not None and self.team.elastic:  # the other shards may be on other nodes: `muster` will tell
            memory = replace(memory, ranks=(), world=None)
        found = find(memory, self.tiers)
        for words in found.unreachable:
            self._event("warning", detail=words)
        fresh = [candidate for candidate in found.candidates if candidate.version.attempt >= first]
        passed = [
            {"tier": r.tier, "step": r.version.step, "attempt": r.version.attempt, "reason": r.reason}
            for r in found.rejected
        ]
        return fresh + [candidate for candidate in base if candidate not in fresh], passed

    def _wait_for_drain(self) -> None:
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while self.memory.pending() and time.monotonic() < deadline:
            self.drainer.tend(self.attempt)
            time.sleep(0.05)

    def _made_progress(self) -> bool:
        """Tell whether the attempt went further than any before it; a step repeated is no progress.

        The counters of the ranks know it too, where metrics.jsonl could not be written.
        """
        before = self.step_reached
        steps = [int(line["step"]) for line in read_lines(self.run.metrics) if line.get("attempt") == self.attempt]
        begun = [step for step in self.at_work.values() if step > 0]
        self.step_reached = max([before, *steps, *(step - 1 for step in begun)])
        return self.step_reached > before

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
        self._event("finished", step=result.step, steps=result.step, state_digest=result.state_digest, seconds=seconds)
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
            if durable is not None:
                self.memory.remove()
            return self._outcome("interrupted", Code.INTERRUPTED, f"interrupted{where}")
        result = read_result(self.run, self.attempt) if self.attempt else None
        if result is not None and not result.preempted:
            return self._ended(result)
        durable = self.beyond.carry_on(DRAIN_TIMEOUT_S, self._far_timeout_s)
        if durable is None and self.beyond.newest() is None:
            return self._outcome("interrupted", Code.INTERRUPTED, f"stopped by {name}; nothing was stored yet")
        return self._preempted(durable, result.loss if result else None)

    def _preempted(self, durable: Version | None, loss: float | None) -> Outcome:
        kept = durable or self.beyond.newest()
        if kept is None:
            return self._outcome("interrupted", Code.INTERRUPTED, "stopped; nothing was stored yet", loss=loss)
        tier = self.beyond.tier_of(durable) if durable is not None else "memory"
        self._event("preempted", step=kept.step, tier=tier)
        lost = self.beyond.taken_over()
        if durable is not None:
            self.memory.remove()
        note = "" if durable is not None else f" (only in this node's memory: {self.beyond.why_only_memory()})"
        message = f"stopped after step {self.step_reached}; checkpoint of step {kept.step} in {tier}{note}{lost}"
        return self._outcome("preempted", lower(Code.PREEMPTED, lost), message, loss=loss)

    def _failed(self, budget: RestartBudget, why: str) -> Outcome:
        """What came again and again is told as it was the first time."""
        assert budget.first is not None
        fault, attempt = budget.first
        self.signals.ignore()
        if self.beyond.carry_on(DRAIN_TIMEOUT_S) is not None:
            self.memory.remove()
        error = read_error(self.run, attempt, fault.rank) if fault.rank is not None else None
        several = self.spec.cluster.nodes > 1 and fault.rank is not None
        where = f"node {fault.node_of(self.spec)}, " if several else ""
        outcome = self._outcome("failed", fault.code, f"{where}{fault.detail} ({why})")
        trace = error.trace if error is not None and error.kind not in _SPOKEN_FOR else None
        return Outcome(**{**vars(outcome), "trace": trace, "log": self._log_of(fault, attempt)})

    @property
    def _far_timeout_s(self) -> float:
        """After a stop signal the first slower tier gets all the time it needs, the others half of what is left."""
        return self.spec.cluster.shutdown_timeout / 2

    def _watch(self) -> None:
        """What the thread beside the agent looks after, a few times a second."""
        self._pass_on_notes()
        if self.team.tick():
            self.shifts.cut()
        if not self.growing and self.team.has_more() and self._is_training():
            self.growing = True
            for beat in read_heartbeats(self.memory):
                os.kill(beat.pid, signal.SIGTERM)
        if self.folder.is_gone():
            if not self.folder_gone:
                self.folder_gone = True
                os.kill(os.getpid(), signal.SIGTERM)
            return
        self.drainer.tend(self.attempt)

    def _pass_on_notes(self) -> None:
        for words in take_notes(self.memory.path):
            sys.stderr.write(f"{words}\n")

    def _without_node(self, missing: NodeMissing) -> Outcome:
        """A node stays away: what the others have is carried on as far as it goes, and all of them end."""
        self.signals.ignore()
        kept = self.beyond.carry_on(DRAIN_TIMEOUT_S)
        where = f"; newest checkpoint: step {kept.step} in {self.beyond.tier_of(kept)}" if kept is not None else ""
        return self._outcome("failed", Code.MISSING_RESOURCE, f"{missing}{where}")

    def _nothing_in_common(self, passed: list[dict[str, Any]]) -> Outcome:
        """What was resumed never begins anew: what one node could go on from is of no use to the others."""
        return self._outcome("failed", Code.DAMAGED, _nothing_for_all(passed))

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

    def _stop_for_tier(self) -> None:
        """Called by the thread that watches the drainer: the run ends as by a signal, with a code of its own."""
        self.tier_failed = True
        os.kill(os.getpid(), signal.SIGTERM)

    def _clean_up(self) -> None:
        for beat in read_heartbeats(self.memory):
            end_group(beat)
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


def _nothing_for_all(passed: list[dict[str, Any]]) -> str:
    reasons = "".join(f"\n  step {item['step']} ({item['tier']}): {item['reason']}" for item in passed)
    return f"no checkpoint can be read by all nodes:{reasons}"


def _fault(verdict: Verdict, world: int) -> Fault:
    """The first cause, on whichever node; a node that is gone explains what the ranks of the others say."""
    report = verdict.report
    final = any(error.final for error in report.errors)
    if verdict.lost is not None and not report.hangs and not final:
        return Fault(None, "node", verdict.lost.detail, final=False, code=Code.FAILED, node=verdict.lost.node)
    return judge(report.ended, report.errors, report.hangs, world)


# Errors of ours whose message says it all.
_SPOKEN_FOR = {
    "NothingUsable", "StateError", "DataError", "UserCodeError", "UserCodeFailed", "TrainingDiverged", "SlotError",
}  # fmt: skip


def _is_done(verdict: Verdict, *, stored: bool) -> bool:
    """Tell whether the result that rank 0 has written is the end of the run.

    It is not where a rank did not leave as it should; nor where a node was lost meanwhile, as long as anything is
    `stored`: that node's part of the last state may be lost with it, and what is done need not be done again.
    """
    left_well = all(code in (Code.DONE, Code.PREEMPTED) for code in verdict.report.ended.exit_codes.values())
    return left_well and not verdict.report.hangs and (verdict.lost is None or not stored)
