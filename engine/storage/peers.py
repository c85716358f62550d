"""The peer tier's process, seen from the launcher of its node: started, told who is where, started again, ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ...planners.plan import Plan
from ...planners.sharding.placement import place
from ...specs.models import Spec
from ...tiers.format.jsonfile import append_event
from ...tiers.format.layout import RunDir
from ...tiers.memory.slots import MemoryDir
from ...tiers.peers.process import PeerJob
from ...tiers.peers.seal import Seal
from ..network.addresses import NetworkError, address_of
from .helper import Helper

START_S = 20.0
"""Longest wait for it to say where it listens."""
STOP_S = 2.0
MAX_DEATHS = 5
"""After as many in a row this node takes no part in the tier any more."""

Address = list[Any]
"""Host and port, as messages have them."""


class NoPeers:
    """A run without a peer tier."""

    def door(self, interface: Callable[[], str]) -> Address | None:
        """Where copies for this node are to be sent; starts what takes them in, on that interface.

        None: nowhere, and where that should not be so, it is told.
        """
        return None

    def heard(self, node: int, door: Address | None) -> None:
        """A node, this one too, has said where copies for it are to be sent."""

    def directory(self) -> dict[str, Any]:
        """What all nodes are told of each other."""
        return {}

    def tell(self, attempt: int, directory: Mapping[str, Any]) -> None:
        """Who is where now."""

    def tend(self, attempt: int) -> None:
        """Look after the process; to be called a few times a second."""

    def stop(self) -> None:
        """Nothing is copied, and nothing of others kept, from now on."""


class Peers(NoPeers):
    """This node's part of the peer tier."""

    def __init__(self, run: RunDir, spec: Spec, plan: Plan, memory: MemoryDir, run_id: str, seal: Seal) -> None:
        """Prepare; the process is started when it is first asked where it listens."""
        self.run, self.memory, self.run_id = run, memory, run_id
        planned = plan.tier("peer")
        assert spec.peer_tier is not None
        assert planned is not None
        self.replicas, self.nodes_per_zone = spec.peer_tier.replicas, spec.cluster.nodes_per_zone
        self.nodes: tuple[int, ...] = ()
        """Those that take part; of an elastic run known with the first attempt."""
        self._targets: tuple[int, ...] = ()
        self._owners: tuple[int, ...] = ()
        if not spec.cluster.nodes.elastic:
            self._place(tuple(range(spec.cluster.nodes)))
        self.pace_bytes_per_s, self.patience_s = planned.pace_bytes_per_s, spec.cluster.heartbeat_timeout
        self._process: Helper | None = None
        self._address: Address | None = None
        self._told: dict[str, Any] | None = None
        self._starts = self._deaths = 0
        self._stopped = False
        self._doors: dict[int, Address | None] = {}
        self._key = seal.key(f"peer tier of run {run_id}").hex()

    def door(self, interface: Callable[[], str]) -> Address | None:
        """As `NoPeers.door`."""
        if self._stopped:
            return None
        try:
            host = address_of(interface())
            if self._process is None or self._address is None or self._address[0] != host:
                self._end()
                self._start(host, 0)
        except (NetworkError, OSError) as error:
            self._warn(0, f"node {self.run.node} takes no part in the peer tier: {error}")
        return self._address

    def _place(self, nodes: tuple[int, ...]) -> None:
        """Who gets our copies, and whose we keep, among these nodes."""
        placement, here = place(len(nodes), self.replicas, self.nodes_per_zone, nodes), nodes.index(self.run.node)
        self.nodes = nodes
        self._targets = tuple(nodes[place] for place in placement.holders[here])
        self._owners = tuple(nodes[place] for place in placement.kept_by(here))

    def _place_anew(self, attempt: int, nodes: tuple[int, ...]) -> None:
        """Nodes have come or gone: the process begins again at the same door, with other peers."""
        if nodes == self.nodes or self.run.node not in nodes:
            return
        self._place(nodes)
        if self._process is not None and self._address is not None:
            host, port = self._address
            self._end()
            try:
                self._start(host, port)
            except OSError as error:
                self._warn(attempt, f"node {self.run.node} takes no part in the peer tier: {error}")

    def _warn(self, attempt: int, detail: str) -> None:
        append_event(self.run.events, "warning", None, attempt, detail=detail)

    def heard(self, node: int, door: Address | None) -> None:
        """As `NoPeers.heard`."""
        is_one = isinstance(door, list) and [type(part) for part in door] == [str, int]
        self._doors[node] = door if is_one else None

    def directory(self) -> dict[str, Any]:
        """As `NoPeers.directory`."""
        doors = {str(node): door for node, door in self._doors.items() if door is not None}
        return {"addresses": doors}

    def tell(self, attempt: int, directory: Mapping[str, Any]) -> None:
        """As `NoPeers.tell`."""
        self._told = {"attempt": attempt, "key": self._key, **directory}
        self._place_anew(attempt, tuple(directory.get("nodes", self.nodes)))
        self._deaths = 0
        self._pass_on()

    def tend(self, attempt: int) -> None:
        """As `NoPeers.tend`."""
        process = self._process
        if process is None or process.ended is None:
            return
        self._process, self._deaths = None, self._deaths + 1
        again = self._deaths < MAX_DEATHS and self._address is not None
        ending = "started again" if again else "not started again before the next attempt"
        detail = f"the process of the peer tier ended with {process.ended}: {ending}"
        self._warn(attempt, detail)
        if again and self._address is not None:
            try:
                self._start(*self._address)
            except OSError as error:
                self._warn(attempt, f"it cannot be started: {error}")
            self._pass_on()

    def stop(self) -> None:
        """As `NoPeers.stop`."""
        self._stopped = True
        self._end()

    def _end(self) -> None:
        process, self._process, self._address = self._process, None, None
        if process is not None:
            process.end(STOP_S)

    def _start(self, host: str, port: int) -> None:
        """Raises OSError when it does not come up."""
        job = PeerJob(
            str(self.run.root), str(self.memory.path), self.run_id, self.run.node, host, port,
            self._targets, self._owners, self.pace_bytes_per_s, self.patience_s,
        )  # fmt: skip
        self._starts += 1
        path = self.memory.path / "peer.json"
        process = Helper(self.run, "dtrain.tiers.peers.process", path, job.to_bytes(), self._starts, says=True)
        try:
            self._address = [host, int(json.loads(process.hear(START_S))["port"])]
        except (ValueError, KeyError, TypeError) as error:
            process.kill(STOP_S)
            process.end(STOP_S)
            raise OSError(f"the process of the peer tier does not start; see {self.run.drainer_log}") from error
        self._process = process

    def _pass_on(self) -> None:
        if self._process is not None and self._told is not None:
            self._process.say(json.dumps(self._told).encode() + b"\n")


def peers_of(run: RunDir, spec: Spec, plan: Plan, memory: MemoryDir, run_id: str, seal: Seal) -> NoPeers:
    """This node's part of the peer tier, if the spec has one."""
    return Peers(run, spec, plan, memory, run_id, seal) if spec.peer_tier is not None else NoPeers()
