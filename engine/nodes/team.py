"""The other nodes of a run, as node 0 sees them: they join, say what they hold, work, report, and end together."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ...planners.words import duration
from ...specs.models import Spec
from ...tiers.format.layout import Version
from ...tiers.memory.slots import MemoryDir
from ...tiers.reading.agree import (
    Held,
    agreed,
    between,
    between_nodes,
    held_from_json,
    look,
    newest,
    to_drain,
    with_memory_of_all,
)
from ...tiers.reading.recovery import Candidate
from ...tiers.tier import Tier
from ..attempt.agent import Interrupted, Seat, stop_signal
from ..attempt.reports import Report, report_from_json, together
from ..attempt.supervise import Sight, sight_from
from ..network.addresses import interface_towards, interfaces, is_loopback
from ..network.hello import Hello
from ..network.lane import Message
from ..network.line import Host, Mate, open_store
from ..storage.peers import NoPeers
from .alone import ASK_S, Alone, Lost, NodeMissing, Skipped, Verdict, node_words
from .company import Company
from .seats import Seats
from .ways import Ways

GRACE_S = 5.0
"""Time for the workers of other nodes to notice by themselves that an attempt is over, and to complete their copy."""
LOST_GRACE_S = 1.0
"""The same after the loss of a node: who waits for one whose link is cut notices nothing, however long it waits."""
TURN_S = 0.02
STALE_S = 0.3
"""What a node last said of its ranks is too old to judge by after this long: none of them is blamed then."""
AGAIN_S = 1.0
"""Between two looks at a way that is cut."""
FAREWELL_S = 3.0
TELL_S = 60.0
"""Between two words on what is waited for."""


@dataclass
class _Attempt:
    """What is known of the attempt under way."""

    number: int
    store: TCPStore
    reports: dict[int, Report] = field(default_factory=dict)
    """By node, in the order in which they came."""
    lost: Lost | None = None
    over_since: float | None = None
    grace_s: float = GRACE_S


class Team(Alone):
    """The other nodes, spoken to by node 0's launcher."""

    def __init__(
        self, host: Host, spec: Spec, memory: MemoryDir, tiers: Sequence[Tier], mine: Hello, welcome: dict[str, Any],
        tell: Callable[..., None], peers: NoPeers, must_go_on: bool = False,
    ) -> None:  # fmt: skip
        """Speak through `host`. `tell` writes an event; `welcome` is what a node that joins is told."""
        super().__init__(memory)
        self.host, self.spec, self.tiers, self.tell = host, spec, tiers, tell
        self.peers, self.must_go_on = peers, must_go_on
        self.seats = Seats(spec)
        self.elastic = self.seats.elastic
        self.company = Company(host, self.seats.most, mine, welcome, tell, self._give_up)
        self.held: dict[int, Held] = {}
        self._answers: dict[int, Held] = {}
        self.ways = Ways(self.company, self._wait_while)
        self._cut_ways: set[str] = set()
        """What was told of those that could not."""
        self._question = 0
        self._carried: set[int] = set()
        self._left: set[str] = set()
        self._stop: int | None = None
        """The signal that another launcher has got."""
        self._passed_on = self._begun = False
        self._attempt: _Attempt | None = None
        self._same_seats = not self.elastic
        self._lock = threading.Lock()

    @property
    def roster(self) -> tuple[int, ...]:  # type: ignore[override]
        """As `Alone.roster`."""
        return self.seats.roster

    # -- joining and deciding -------------------------------------------------------------------------------------

    def muster(self, candidates: list[Candidate], skipped: Skipped) -> tuple[list[Candidate], list[dict[str, Any]]]:
        """As `Alone.muster`."""
        self._attempt = None
        self.seats.rise()
        deadline, before = time.monotonic() + self.spec.cluster.rejoin_timeout, self.roster
        while True:
            self._wait_for_all(deadline)
            self.seats.take(self.company.ready)
            if self._ask(ASK_S) and self._can_work(deadline):
                break
        self._same_seats = self.roster == before
        self.memory.settle(self._to_drain())
        self.highest = max(self.highest, *(held.highest for held in self.held.values()))
        if self.must_go_on and not self._begun:  # this node may have lost what the others have
            candidates = with_memory_of_all(candidates, self.held, self.memory)
        chosen, passed = agreed(candidates, self.held)
        if before and not self._same_seats:  # ranks and shards are others', so all of it comes from other nodes
            chosen = [between(candidate) for candidate in chosen]
        return chosen, [*skipped, *passed]

    def _seated(self) -> dict[int, Held]:
        """What the nodes of the attempt hold, by their place in it."""
        return {seat: self.held[node] for seat, node in enumerate(self.roster) if node in self.held}

    def _to_drain(self) -> frozenset[Version]:
        """What all nodes carry to a slower tier; nothing after a change of nodes: it lies in the shards of others."""
        return to_drain(self._seated(), self.nodes) if self._same_seats else frozenset()

    def _wait_for_all(self, deadline: float) -> None:
        told = time.monotonic() + 1.0
        while missing := self.seats.missing(self.company.ready):
            if self.host.failure is not None:
                raise NodeMissing(f"the store at the rendezvous {self.host.endpoint} has failed: {self.host.failure}")
            if self._stop is not None:
                raise Interrupted(self._stop)
            now = time.monotonic()
            if now > deadline and self.seats.enough:
                return
            if now > deadline:
                raise NodeMissing(self._why_missing(missing))
            if now > told:
                told = now + TELL_S
                words = self._waiting_words(missing, deadline, now)
                self.tell("waiting", nodes=missing, detail=words)
                self.company.tell_all({"kind": "waiting", "detail": words})
            time.sleep(TURN_S)
            self._handle()

    def _waiting_words(self, missing: Sequence[int], deadline: float, now: float) -> str:
        """Who is waited for, how long at the most, and what comes then."""
        after = self.seats.enough_after(self.company.ready)
        then = "then the run ends"
        if after is not None:
            deadline, then = min(deadline, after[0]), f"then on with {after[1]} nodes"
        at_most = duration(round(deadline - now))
        return f"waiting for {node_words(missing)} at {self.host.endpoint}, {at_most} at the most; {then}"

    def has_more(self) -> bool:
        """As `Alone.has_more`."""
        settled = self._attempt is not None and not self._attempt.lost
        return settled and self.seats.has_more(self.company.ready)

    def _why_missing(self, missing: Sequence[int]) -> str:
        waited = self.spec.cluster.rejoin_timeout
        why = self.company.refused
        refused = "".join(f"; node {node} was refused: {why[node]}" for node in missing if node in why)
        return (
            f"{node_words(missing)} did not come to {self.host.endpoint} within {waited:.0f} s "
            f"(cluster.rejoin_timeout){refused}"
        )

    def _ask(self, patience_s: float) -> bool:
        """Have every node that is there say what it holds; False when not all nodes have answered."""
        self._question += 1
        self.held, self._answers = {0: look(self.memory, self.tiers)}, {}
        self.peers.heard(0, self.peers.door(lambda: self._interfaces()[1]))
        self.company.tell_all({"kind": "ask", "question": self._question, "doors": not self.ways.known})
        self._wait_while(lambda: self.company.ready - self._answers.keys(), patience_s)
        self.held |= {node: held for node, held in self._answers.items() if node in self.company.ready}
        self.held = {node: held for node, held in self.held.items() if node in self.roster}
        return self.held.keys() == set(self.roster)

    def _can_work(self, deadline: float) -> bool:
        """As `Ways.reach`; a way that is lost while the run goes on may come back, and is waited for."""
        try:
            return self.ways.known or self.ways.reach(self._interfaces(), self.roster[1:])
        except NodeMissing as missing:
            if not self._begun or time.monotonic() > deadline:
                raise
            if str(missing) not in self._cut_ways:
                self._cut_ways.add(str(missing))
                self.tell("warning", detail=f"{missing}; waiting for it")
            time.sleep(AGAIN_S)
            return False

    def _at_work(self) -> set[int]:
        """Nodes that are there and take part in the attempt."""
        return self.company.ready & set(self.roster)

    # -- an attempt -----------------------------------------------------------------------------------------------

    def begin(self, attempt: int, candidates: Sequence[Candidate], skipped: Skipped, plan: dict[str, Any]) -> Seat:
        """As `Alone.begin`. The workers meet at a store of this attempt alone."""
        store = open_store(self.host.endpoint, 0)
        with self._lock:
            self._attempt, self._begun = _Attempt(attempt, store), True
        word = {
            "kind": "attempt",
            "number": attempt,
            "candidates": [candidate.to_json() for candidate in candidates],
            "skipped": list(skipped),
            "plan": plan,
            "drain": Held(memory=self._to_drain()).to_json()["memory"],
            "port": store.port,
            "nodes": self.nodes,
            "peer": {**self.peers.directory(), "nodes": list(self.roster)},
        }
        self.peers.tell(attempt, word["peer"])
        for seat, node in enumerate(self.roster[1:], 1):
            self.host.post(self.company[node], {**word, "seat": seat})
        self._same_seats = True
        return Seat(0, self.nodes, self.host.endpoint.host, store.port, *self._interfaces())

    def _interfaces(self) -> tuple[str, str]:
        """Of both channels: the one by which the others are reached, never loopback where they are elsewhere."""
        addresses = [str(mate.hello.get("address")) for mate in self.company]
        if not addresses:
            return "", ""
        elsewhere = next((address for address in addresses if not is_loopback(address)), addresses[0])
        return interfaces(self.spec, interface_towards(elsewhere, self.host.port))

    def tick(self) -> bool:
        """As `Alone.tick`."""
        self._handle()
        attempt = self._attempt
        if attempt is None:
            return False
        self.peers.tend(attempt.number)
        if self._stop is not None and not self._passed_on and not attempt.reports:
            self._passed_on = True
            os.kill(os.getpid(), self._stop)
        if attempt.lost is not None or attempt.reports:
            self._declare_over(attempt, GRACE_S if attempt.lost is None else LOST_GRACE_S)
        return attempt.over_since is not None and time.monotonic() - attempt.over_since >= attempt.grace_s

    def _declare_over(self, attempt: _Attempt, grace_s: float = GRACE_S) -> None:
        if attempt.over_since is None:
            attempt.over_since, attempt.grace_s = time.monotonic(), grace_s
            self.company.tell_all({"kind": "over", "attempt": attempt.number, "grace_s": grace_s})

    def over(self, report: Report) -> Verdict:
        """As `Alone.over`. A node that does not report in time is given up."""
        attempt = self._attempt
        assert attempt is not None
        with self._lock:
            attempt.reports[0] = report
        if report.hangs:  # the way between two nodes may be cut: no rank stands still by itself then
            self.ways.forget()
        at_once = report.ended.signal_number == signal.SIGINT
        self._declare_over(attempt, 0.0 if at_once else GRACE_S)
        deadline = time.monotonic() + self.spec.cluster.shutdown_timeout + 2 * GRACE_S
        while self._at_work() - attempt.reports.keys():
            time.sleep(TURN_S)
            self._handle()
            if time.monotonic() > deadline:
                for node in self._at_work() - attempt.reports.keys():
                    self._give_up(self.company[node], "its workers ran on after the attempt was over")
        return Verdict(together(attempt.reports, self._stop), attempt.lost)

    def sights(self) -> list[Sight] | None:
        """As `Elsewhere.sights`."""
        attempt, found = self._attempt, []
        for mate in [self.company[node] for node in self.roster[1:]]:
            told = mate.life.sign
            if attempt is None or mate.life.silent_s > STALE_S or told.get("attempt") != attempt.number:
                return None
            found += [sight_from(numbers) for numbers in told.get("ranks", [])]
        return found

    def end_rank(self, rank: int) -> bool:
        """As `Elsewhere.end_rank`."""
        node = self.node_of(rank)
        if node == 0:
            return False
        self.host.post(self.company[node], {"kind": "stuck", "rank": rank})
        return True

    def node_of(self, rank: int) -> int:
        """As `Alone.node_of`."""
        return self.roster[rank // self.spec.cluster.workers_per_node]

    # -- the end --------------------------------------------------------------------------------------------------

    def newest(self, *, patience_s: float = ASK_S) -> Version | None:
        """As `Alone.newest`."""
        self.peers.stop()
        self._ask(patience_s)
        self.memory.settle(self._to_drain())
        return newest(self._seated(), self.nodes)

    def in_parts(self) -> Version | None:
        """As `Alone.in_parts`."""
        if self.held.keys() == set(self.roster):
            return max(between_nodes(self.held), default=None)
        return max((version for held in self.held.values() for version in held.shards), default=None)

    def carry(self, version: Version | None, timeout_s: float, far_timeout_s: float | None) -> None:
        """As `Alone.carry`."""
        self._carried = set()
        self.company.tell_all(
            {
                "kind": "carry",
                "version": [version.attempt, version.step] if version is not None else None,
                "drain": Held(memory=self._to_drain()).to_json()["memory"],
                "timeout_s": timeout_s,
            }
        )

    def carried(self) -> None:
        """As `Alone.carried`: what the others do takes no longer than what we have done ourselves."""
        self._wait_while(lambda: self._at_work() - self._carried, FAREWELL_S)

    def end(self, outcome: Mapping[str, Any], *, remove: bool) -> None:
        """As `Alone.end`."""
        self.peers.stop()
        self.company.tell_all({"kind": "end", "remove": remove, **outcome})
        words = self.company.words
        self._wait_while(lambda: words - self._left, FAREWELL_S)

    # -- what comes in --------------------------------------------------------------------------------------------

    def _wait_while(self, waits: Callable[[], object], longest_s: float) -> None:
        deadline = time.monotonic() + longest_s
        while waits() and time.monotonic() < deadline:
            time.sleep(TURN_S)
            self._handle()

    def _handle(self) -> None:
        with self._lock:
            for words in self.host.strangers():
                self.tell("warning", detail=words)
            for mate, message in self.host.receive():
                self._take(mate, message)
            self.company.decide_between_twins(begun=self._begun)
            for mate in self.company:
                if mate.life.silent_s > self.spec.cluster.heartbeat_timeout:
                    self._give_up(mate, f"has been silent for {mate.life.silent_s:.1f} s")

    def _give_up(self, mate: Mate, why: str) -> None:
        mate.dead = why
        self.host.post(mate, {"kind": "dead", "detail": f"node 0 has given this node up: it {why}"})
        if mate.node not in self.roster:
            self.tell("warning", detail=f"{mate} {why}")
        elif self._attempt is not None and self._attempt.lost is None and mate.node not in self._attempt.reports:
            self._attempt.lost = Lost(mate.node, f"{mate} {why}")
            self.tell("lost", node=mate.node, detail=f"{mate} {why}")
        elif self._attempt is None:
            self.tell("warning", detail=f"{mate} {why}")

    def _take(self, mate: Mate, message: Message) -> None:
        kind = message.get("kind")
        if kind == "hello":
            self.company.hear(mate)
        elif kind == "left":
            self._left.add(mate.word)
        elif not self.company.is_of(mate):
            return
        elif kind == "ready":
            mate.ready = True
            self.tell("joined", node=mate.node, host=mate.host)
        elif kind == "unable":
            mate.dead = str(message.get("detail"))
            self.tell("warning", detail=f"{mate} cannot take part: {mate.dead}")
        elif kind == "stop":
            self._stop = stop_signal(message.get("number"))
        elif kind == "carried":
            self._carried.add(mate.node)
        else:
            self._take_answer(mate, message)

    def _take_answer(self, mate: Mate, message: Message) -> None:
        try:
            if message.get("kind") == "held" and message.get("question") == self._question:
                self.ways.take_doors(mate.node, message.get("doors", []))
                self.peers.heard(mate.node, message.get("peer"))
                self._answers[mate.node] = held_from_json(message)
            elif message.get("kind") == "tried":
                self.ways.take_problems(mate.node, message.get("problems", []))
            elif message.get("kind") == "ended" and (attempt := self._attempt) is not None:
                report = report_from_json(message)
                attempt.reports |= {mate.node: report} if message.get("attempt") == attempt.number else {}
        except (ValueError, TypeError, AttributeError) as error:
            self._give_up(mate, f"sent a message that is none ({error})")
