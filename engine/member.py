"""The launcher of a node other than node 0: does what node 0 says, and tells it what happens here."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ..planners.plan import Plan, plan_from_json
from ..specs.codes import Code
from ..specs.models import Spec
from ..tiers.format.journal import take_notes
from ..tiers.format.jsonfile import dumps
from ..tiers.format.jsonfile import replace as write
from ..tiers.format.layout import RunDir, Version
from ..tiers.memory.heartbeat import end_workers
from ..tiers.memory.slots import MemoryDir
from ..tiers.reading.agree import look, versions_from
from ..tiers.reading.places import place_of, slow_tiers
from ..tiers.reading.recovery import MEMORY, PEER, Candidate, candidate_from_json
from ..tiers.stores.store import Place
from .attempt.agent import Interrupted, Seat, StopSignals
from .attempt.forks import NurseryProcess
from .attempt.shift import Shifts
from .attempt.supervise import Eyes, end_rank
from .ending import DRAINER_PATIENCE_S, drain_job
from .network.addresses import LOOPBACK, interface_of, interfaces
from .network.lane import Message
from .network.line import Line
from .network.reach import Doors, door_from_json, unreachable
from .nodes.team import GRACE_S
from .outcome import Outcome
from .storage.drain import DrainerProcess
from .storage.peers import peers_of

TURN_S = 0.02
INTERRUPT_S = 5.0
"""Longest wait for node 0 to end the run after Ctrl-C here."""


class GivenUp(Exception):
    """Node 0 has declared this node dead, while it was stopped or cut off; it may join again."""


class HostLost(Exception):
    """Node 0 is gone, and the run with it."""


class Member:
    """One node of several; node 0 decides."""

    def __init__(
        self, run: RunDir, spec: Spec, plan: Plan, memory: MemoryDir, run_id: str, import_paths: tuple[str, ...],
        nursery: NurseryProcess | None, line: Line, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Prepare; nothing is started yet. `say` tells a person what goes on."""
        self.run, self.spec, self.memory, self.line, self.say = run, spec, memory, line, say
        self.tiers = slow_tiers(spec, run, run_id)
        self.signals = StopSignals()
        self.shifts = Shifts(run, spec, memory, run_id, import_paths, nursery, self.signals, say)
        patience_s = max(DRAINER_PATIENCE_S, spec.cluster.heartbeat_timeout)
        job = drain_job(spec, plan, run, memory, run_id)
        self.drainer = DrainerProcess(run, job, patience_s, self._stop_for_tier)
        self.peers = peers_of(run, spec, plan, memory, run_id, line.seal)
        self.base, self.seat = spec, (run.node, int(spec.cluster.nodes))
        """Its place among so many nodes."""
        if spec.cluster.nodes.elastic:
            self.seat = (0, 0)
        self.attempt = 0
        self._over_since: float | None = None
        self._grace_s = GRACE_S
        self._deadline: float | None = None
        self._doors: Doors | None = None
        self._started = time.monotonic()
        self._eyes = self._eyes_of(self.seat[0])
        line.sign = self._sign

    def serve(self) -> Outcome:
        """Work until node 0 says that the run is over. Raises GivenUp."""
        with self.signals:
            try:
                if all(self.seat):
                    self.drainer.start()
                self.line.post({"kind": "ready"})
                return self._serve()
            except HostLost as lost:
                return self._without_host(str(lost))
            finally:
                self._close_doors()
                self.peers.stop()
                end_workers(self.memory)

    def _serve(self) -> Outcome:
        while True:
            message = self._next()
            kind = message.get("kind")
            if kind == "ask":
                self._answer(message)
            elif kind == "reach":
                self._reach(message)
            elif kind == "attempt":
                self._work(message)
            elif kind == "waiting":
                self.say(str(message.get("detail")))
            elif kind == "carry":
                self._carry(message)
                self.line.post({"kind": "carried"})
            elif kind == "end":
                return self._end(message)
            elif kind == "dead":
                self.drainer.stop(timeout_s=0.0)
                raise GivenUp(str(message.get("detail")))

    def _answer(self, message: Message) -> None:
        """Say what we have in memory and see on disk, and where we can be reached."""
        self._close_doors()
        if message["doors"]:
            self._doors = Doors(*self._interfaces())
        doors = [door.to_json() for door in self._doors.doors] if self._doors is not None else []
        held = look(self.memory, self.tiers).to_json()
        held["peer"] = self.peers.door(lambda: self._interfaces()[1])
        self.line.post({"kind": "held", "question": message["question"], "doors": doors, **held})

    def _reach(self, message: Message) -> None:
        """Try to reach all other nodes, and say which could not be reached."""
        doors = {int(node): [door_from_json(one) for one in found] for node, found in message["doors"].items()}
        self.line.post({"kind": "tried", "problems": unreachable(self.run.node, doors)})

    def _close_doors(self) -> None:
        if self._doors is not None:
            self._doors.close()
        self._doors = None

    def _sign(self) -> Message:
        """What goes with every sign of life: the counters of our ranks."""
        return {"attempt": self.attempt, "ranks": [sight.to_json() for sight in self._eyes.look(time.monotonic())]}

    def _eyes_of(self, seat: int) -> Eyes:
        return Eyes(self.memory, Seat(seat).ranks(self.spec.cluster.workers_per_node))

    def _next(self) -> Message:
        """The next word of node 0; a signal that reaches us is passed on to it. Raises HostLost."""
        while True:
            try:
                message = self.line.receive()
                if message is not None:
                    return message
                self._check_host()
                self._tend()
                time.sleep(TURN_S)
            except Interrupted as stop:
                self._pass_on(stop.number)

    def _pass_on(self, number: int) -> None:
        self.signals.ignore()
        if number == signal.SIGINT:
            self._deadline = time.monotonic() + INTERRUPT_S
        self.line.post({"kind": "stop", "number": number})

    def _check_host(self) -> None:
        for words in self.line.strangers():
            self.say(words)
        why = self.line.lost(2 * self.spec.cluster.heartbeat_timeout)
        if why is None and self._deadline is not None and time.monotonic() > self._deadline:
            why = "interrupted, and node 0 does not answer"
        if why is not None:
            raise HostLost(why)

    # -- an attempt -----------------------------------------------------------------------------------------------

    def _work(self, message: Message) -> None:
        self._close_doors()
        self.attempt = int(message["number"])
        seat = (int(message["seat"]), int(message["nodes"]))
        if seat != self.seat:
            self._take_seat(*seat, plan_from_json(message["plan"]))
        self.memory.settle(versions_from(message["drain"]))
        self.run.take_part(self.attempt)
        write(self.run.plan, dumps(message["plan"]))
        self._over_since, self._grace_s = None, GRACE_S
        endpoint = self.line.endpoint
        place = Seat(*self.seat, endpoint.host, int(message["port"]), *self._interfaces())
        candidates = [self._as_seen_here(candidate_from_json(one)) for one in message["candidates"]]
        self.peers.tell(self.attempt, message["peer"])
        self.say(f"attempt {self.attempt}: {_from(candidates)}")
        report = self.shifts.work(self.attempt, candidates, tuple(message["skipped"]), watch=self._watch, seat=place)
        self._pass_on_notes()
        self.line.post({"kind": "ended", "attempt": self.attempt, **report.to_json()})
        number = report.ended.signal_number
        if number is not None:
            self._pass_on(number)

    def _take_seat(self, seat: int, nodes: int, plan: Plan) -> None:
        """Nodes have come or gone: what depends on their number and on this one's place is made anew."""
        self.seat, self.spec = (seat, nodes), self.base.at(nodes)
        ranks = Seat(seat).ranks(self.spec.cluster.workers_per_node)
        self.memory = replace(self.memory, ranks=tuple(ranks), world=self.spec.world_size)
        self._eyes = self._eyes_of(seat)
        self.shifts.memory, self.shifts.spec = self.memory, self.spec
        self.drainer.stop(timeout_s=0.0)
        self.drainer.job = drain_job(self.spec, plan, self.run, self.memory, self.shifts.run_id, seat)
        self.drainer.start()

    def _interfaces(self) -> tuple[str, str]:
        return interfaces(self.spec, interface_of(self.line.address) or LOOPBACK)

    def _as_seen_here(self, candidate: Candidate) -> Candidate:
        """Memory is each node's own; a disk tier may have another path on this node."""
        if candidate.tier in (MEMORY, PEER):
            return Candidate(candidate.version, Place(candidate.tier, str(self.memory.path)))
        disk = self.spec.disk_tier
        if candidate.tier == "disk" and disk is not None and not Path(candidate.place.url).is_dir():
            return Candidate(candidate.version, place_of(disk, self.run))
        return candidate

    def _watch(self) -> None:
        """While the workers run, from a thread: what node 0 says, and whether it still says anything."""
        self._pass_on_notes()
        self._tend()
        while (message := self.line.receive()) is not None:
            if message.get("kind") == "over":
                if message.get("attempt") == self.attempt:
                    self._over(float(message["grace_s"]))
            elif message.get("kind") == "stuck":
                self._end_rank(message.get("rank"))
            else:
                self._over(0.0)
                self.line.put_back(message)
                break
        if self.line.lost(2 * self.spec.cluster.heartbeat_timeout) is not None:
            self._over(GRACE_S)
        if self._over_since is not None and time.monotonic() - self._over_since >= self._grace_s:
            self.shifts.cut()

    def _tend(self) -> None:
        self.drainer.tend(self.attempt)
        self.peers.tend(self.attempt)

    def _over(self, grace_s: float) -> None:
        if self._over_since is None:
            self._over_since = time.monotonic()
        self._grace_s = min(self._grace_s, grace_s)

    def _end_rank(self, rank: object) -> None:
        for sight in self._eyes.look(time.monotonic()):
            if sight.rank == rank and sight.alive:
                end_rank(sight)

    # -- the end --------------------------------------------------------------------------------------------------

    def _carry(self, message: Message) -> None:
        """Carry what all nodes have agreed on to the slower tier, and end the drainer."""
        self.peers.stop()
        self.memory.settle(versions_from(message["drain"]))
        pair = message.get("version")
        version = Version(attempt=pair[0], step=pair[1]) if pair is not None else None
        if version is not None and version in self.memory.whole():
            self.memory.mark_for_drain(version)
        self.drainer.stop(float(message["timeout_s"]))

    def _end(self, message: Message) -> Outcome:
        self.signals.ignore()
        self.drainer.stop(timeout_s=0.0)
        self.peers.stop()
        if message.get("remove") or not self.memory.is_needed:
            self.memory.remove()
        self.line.post({"kind": "left"})
        code = Code(int(message["code"]))
        outcome = self._outcome(str(message["status"]), code, str(message["message"]), int(message["step"]))
        return replace(outcome, log=str(message["log"])) if message.get("log") else outcome

    def _without_host(self, why: str) -> Outcome:
        """Node 0 is gone: end here too. What is in memory stays, for all nodes to go on from."""
        self.signals.ignore()
        self.memory.settle(())  # the drainer may wait for a node 0 that never comes
        kept = max(self._any_memory().whole(), default=None)
        where = f"; the snapshot of step {kept.step} is in this node's memory" if kept is not None else ""
        again = f"dtrain resume --from latest {self.run.root} on all nodes"
        if self._deadline is not None:
            return self._outcome("interrupted", Code.INTERRUPTED, f"{why}{where}", 0)
        code = Code.PREEMPTED if kept is not None else Code.FAILED
        step = kept.step if kept is not None else 0
        return self._outcome("failed", code, f"{why}: the run has ended here{where}; start it again: {again}", step)

    def _any_memory(self) -> MemoryDir:
        """Where the number of nodes changes, what is left of the former number counts, and any part of it."""
        return MemoryDir(self.memory.path, ()) if self.base.cluster.nodes.elastic else self.memory

    def _outcome(self, status: str, code: Code, message: str, step: int) -> Outcome:
        return Outcome(status, code, message, step, self.attempt, seconds=time.monotonic() - self._started)

    def _stop_for_tier(self) -> None:
        """Node 0 writes the manifests, so its own drainer has failed too, and it ends the run."""
        self.line.post({"kind": "stop", "number": int(signal.SIGTERM)})

    def _pass_on_notes(self) -> None:
        for words in take_notes(self.memory.path):
            sys.stderr.write(f"{words}\n")


def _from(candidates: Sequence[Candidate]) -> str:
    if not candidates:
        return "from step 0"
    return f"from step {candidates[0].version.step} in {candidates[0].tier}"
