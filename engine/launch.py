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

from ..planners.plan import Plan, plan_from_json
from ..planners.running.resized import taking_along
from ..specs.codes import Code
from ..specs.models import Spec
from ..tiers.format.journal import take_notes
from ..tiers.format.jsonfile import Unreadable, dumps, read
from ..tiers.format.jsonfile import replace as write
from ..tiers.format.layout import RunDir
from ..tiers.memory.heartbeat import DONE_STEP, read_heartbeats
from ..tiers.memory.slots import MemoryDir
from ..tiers.reading.recovery import Candidate, find
from .attempt.agent import Interrupted
from .attempt.forks import NurseryProcess
from .attempt.reports import Report
from .attempt.shift import Shifts
from .attempt.stacks import last_stack
from .attempt.verdict import Fault, RestartBudget, judge
from .carry import DRAIN_TIMEOUT_S
from .ending import Ending, drain_job, nothing_for_all
from .job import Result, read_result
from .nodes.alone import Alone, NodeMissing, Verdict
from .outcome import Outcome


class Launcher(Ending):
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
        super().__init__(run, spec, plan, memory, run_id, attempts_used, team or Alone(memory))
        self.base, self.replan = spec, replan
        self.shifts = Shifts(run, spec, memory, run_id, import_paths, nursery, self.signals, self._warn)
        self.seats: tuple[int, ...] = () if self.team.elastic else self.team.roster
        self.stopped_to_grow: Result | None = None
        self.growing = False
        """Whether the workers were asked to stop for the sake of nodes that have come."""

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
                self._warn(f"beginning again at step 0: {nothing_for_all(skipped)}")
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
            if result is not None and _is_done(verdict, stored=bool(self.spec.used_tiers)):
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
        self.plan = self._taking_along(self.replan(self.spec))
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

    def _taking_along(self, plan: Plan) -> Plan:
        """The plan with what was measured with another number of nodes: workers, else an earlier start, left it."""
        try:
            before = plan_from_json(read(self.run.plan))
            return taking_along(plan, self.spec, before, self.base.at(before.training.nodes))
        except (Unreadable, ValueError):
            return plan

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


def _fault(verdict: Verdict, world: int) -> Fault:
    """The first cause, on whichever node; a node that is gone explains what the ranks of the others say."""
    report = verdict.report
    final = any(error.final for error in report.errors)
    if verdict.lost is not None and not report.hangs and not final:
        return Fault(None, "node", verdict.lost.detail, final=False, code=Code.FAILED, node=verdict.lost.node)
    return judge(report.ended, report.errors, report.hangs, world)


def _is_done(verdict: Verdict, *, stored: bool) -> bool:
    """Tell whether the result that rank 0 has written is the end of the run.

    It is not where a rank did not leave as it should; nor where a node was lost meanwhile, as long as anything is
    `stored`: that node's part of the last state may be lost with it, and what is done need not be done again.
    """
    left_well = all(code in (Code.DONE, Code.PREEMPTED) for code in verdict.report.ended.exit_codes.values())
    return left_well and not verdict.report.hangs and (verdict.lost is None or not stored)
