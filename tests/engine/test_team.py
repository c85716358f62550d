"""Launchers that agree: node 0 and its mates in this process, over a real store."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.build import job_spec
from tests.job.nodes import free_port
from tests.tiers.build import put

from dtrain.engine.attempt.agent import Ended, Interrupted
from dtrain.engine.attempt.reports import Report
from dtrain.engine.attempt.supervise import Hang
from dtrain.engine.carry import Carrier
from dtrain.engine.network import line as lines
from dtrain.engine.network.addresses import NetworkError, parse_endpoint
from dtrain.engine.network.hello import hello, refusal
from dtrain.engine.network.lane import Message
from dtrain.engine.network.line import Host, Line
from dtrain.engine.network.reach import Doors, door_from_json, unreachable
from dtrain.engine.nodes import company as companies
from dtrain.engine.nodes import team as teams
from dtrain.engine.nodes import ways
from dtrain.engine.nodes.alone import NodeMissing
from dtrain.engine.nodes.team import Team
from dtrain.engine.storage.drain import DrainerProcess
from dtrain.engine.storage.peers import NoPeers
from dtrain.specs.models import Spec
from dtrain.tiers.format.layout import Version
from dtrain.tiers.memory.slots import MemoryDir
from dtrain.tiers.peers.seal import Seal
from dtrain.tiers.reading.agree import look
from dtrain.tiers.reading.recovery import Candidate
from dtrain.tiers.stores.store import Place

CANDIDATES = [Candidate(Version(attempt=1, step=step), Place("memory", "")) for step in (5, 4)]
TIMEOUT_S = 1.5
SEAL = Seal("a token that all nodes have")
Told = list[tuple[str, dict[str, Any]]]


def spec_for(port: int, **changes: Any) -> Spec:
    cluster = {
        "device": "cpu", "nodes": 2, "rendezvous": f"127.0.0.1:{port}", "heartbeat_timeout": TIMEOUT_S,
        "rejoin_timeout": 5.0, "shutdown_timeout": 5.0,
    }  # fmt: skip
    return job_spec(cluster=cluster, **changes)


class Mate:
    """Another node's launcher that does what a test says."""

    def __init__(self, spec: Spec, memory: MemoryDir, node: int = 1, **said: Any) -> None:
        endpoint = parse_endpoint(spec.cluster.rendezvous)
        self.line = Line(
            endpoint, node, lambda address: hello(spec, node, address).to_json() | said, time.monotonic() + 5, SEAL
        )
        self.memory = memory
        self.heard: list[Message] = []
        self.answers = True
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._stop = False

    def __enter__(self) -> Mate:
        self.line.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()
        self.line.__exit__()

    def _serve(self) -> None:
        while not self._stop:
            message = self.line.receive()
            if message is None:
                time.sleep(0.01)
                continue
            self.heard.append(message)
            if self.answers:
                self._answer(message)

    def _answer(self, message: Message) -> None:
        if message["kind"] == "welcome":
            self.line.post({"kind": "ready"})
        elif message["kind"] == "ask":
            self.doors = Doors("lo", "lo")
            doors = [door.to_json() for door in self.doors.doors]
            held = look(self.memory, []).to_json()
            self.line.post({"kind": "held", "question": message["question"], "doors": doors, **held})
        elif message["kind"] == "reach":
            doors = {int(node): [door_from_json(one) for one in found] for node, found in message["doors"].items()}
            self.line.post({"kind": "tried", "problems": unreachable(1, doors)})
            self.doors.close()

    def kinds(self) -> list[str]:
        return [str(message["kind"]) for message in self.heard]

    def wait_for(self, kind: str) -> Message:
        deadline = time.monotonic() + 5
        while kind not in self.kinds():
            assert time.monotonic() < deadline, f"{kind} did not come: {self.kinds()}"
            time.sleep(0.01)
        return next(message for message in self.heard if message["kind"] == kind)

    def fall_silent(self) -> None:
        self._stop = True
        self._thread.join()
        self.line.close()


class Scene:
    """Node 0 with its snapshots, and what it has told."""

    def __init__(self, folder: Path) -> None:
        self.memories = [MemoryDir(folder / str(node), (node,)) for node in range(2)]
        for memory in self.memories:
            memory.path.mkdir()
        self.told: Told = []
        self.spec = spec_for(free_port())
        self.host = Host(parse_endpoint(self.spec.cluster.rendezvous), 2, SEAL)
        mine = hello(self.spec, 0, "")
        self.team = Team(
            self.host, self.spec, self.memories[0], [], mine, {"run_id": "r", "fresh": True}, self._tell, NoPeers()
        )

    def _tell(self, event: str, **details: Any) -> None:
        self.told.append((event, details))

    def mate(self, spec: Spec | None = None, **said: Any) -> Mate:
        return Mate(spec or self.spec, self.memories[1], **said)

    def warnings(self) -> str:
        return "\n".join(str(details["detail"]) for event, details in self.told if event == "warning")


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(lines, "POLL_S", 0.02)
    monkeypatch.setattr(companies, "LATE_S", 0.3)
    monkeypatch.setattr(teams, "AGAIN_S", 0.3)
    monkeypatch.setattr(teams, "GRACE_S", 0.2)
    made = Scene(tmp_path)
    with made.host:
        yield made


def test_a_node_joins_and_what_both_hold_is_gone_on_from(scene: Scene) -> None:
    for step, slot in ((4, 0), (5, 1)):
        put(scene.memories[0], 0, 2, slot, step)
    put(scene.memories[1], 1, 2, 0, 4, drain=True)
    with scene.mate() as mate:
        chosen, passed = scene.team.muster(CANDIDATES, [])
        assert mate.wait_for("welcome")["run_id"] == "r"
    assert [one.version.step for one in chosen] == [4]
    assert "node 1 does not have its part" in passed[0]["reason"]
    assert [slot.index for slot in scene.memories[0].pending()] == [0], "what one node wants carried all mark"
    assert ("joined", {"node": 1, "host": scene.team.company[1].host}) in scene.told
    assert scene.team.highest == 1


def test_what_a_missing_node_may_have_the_rest_of_is_not_forgotten(scene: Scene) -> None:
    """Both have step 5 in memory; the disk has step 4. Without one of them nobody can tell whether 5 is whole."""
    for node in (0, 1):
        put(scene.memories[node], node, 2, 0, 5)
    beyond = Carrier(scene.memories[0], [], DrainerProcess.__new__(DrainerProcess), scene.team)
    four, five = Version(attempt=1, step=4), Version(attempt=1, step=5)
    with scene.mate() as mate:
        scene.team.muster(CANDIDATES, [])
        assert scene.team.newest() == five
        assert beyond.left_in_memory(five) is None, "all of it is durable"
        mate.fall_silent()
        assert scene.team.newest(patience_s=2 * TIMEOUT_S) is None
        assert beyond.left_in_memory(four) == beyond.left_in_memory(None) == five
        assert beyond.left_in_memory(five) is None


def test_who_is_waited_for_how_long_and_what_comes_then_is_told_everywhere(scene: Scene) -> None:
    with scene.mate() as mate, mustering(scene) as found:
        assert found() == ([], [])
        mate.fall_silent()
        with mustering(scene) as again:
            deadline = time.monotonic() + 5
            while not any(event == "waiting" for event, _ in scene.told) and time.monotonic() < deadline:
                time.sleep(0.01)
            (words,) = [details["detail"] for event, details in scene.told if event == "waiting"]
            assert words.startswith("waiting for node 1 at 127.0.0.1")
            assert words.endswith("s at the most; then the run ends")
            with scene.mate():
                assert again() == ([], [])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 8}, "seed is 8 there and 7 on node 0"),
        (
            {"training": {"optimizer": {"name": "adamw", "lr": 0.1}}},
            "optimizer.lr is 0.1 there and 0.01 on node 0",
        ),
    ],
)
def test_another_spec_is_refused_by_name(scene: Scene, change: dict[str, Any], words: str) -> None:
    port = parse_endpoint(scene.spec.cluster.rendezvous).port
    with scene.mate(spec_for(port, **change)) as wrong, mustering(scene) as found:
        assert words in wrong.wait_for("refused")["detail"]
        assert words in scene.warnings()
        with scene.mate():
            assert found() == ([], [])


@pytest.mark.parametrize("name", ["torch", "dtrain"])
def test_another_version_is_refused_by_name(scene: Scene, name: str) -> None:
    mine = hello(scene.spec, 0, "")
    theirs = hello(scene.spec, 1, "").to_json()
    assert refusal(mine, theirs, 2) is None
    theirs["versions"][name] = "0.0"
    assert f"{name} is 0.0 there and {mine.versions[name]} on node 0" in str(refusal(mine, theirs, 2))


@pytest.mark.parametrize("said", [{"spec": None}, {"versions": 3}, {"node": "1"}, {"node": 2}, {"node": 0}])
def test_who_does_not_say_who_it_is_is_refused(scene: Scene, said: dict[str, Any]) -> None:
    theirs = hello(scene.spec, 1, "").to_json()
    assert refusal(hello(scene.spec, 0, ""), theirs | said, 2) is not None


def test_a_node_that_does_not_come_is_named(scene: Scene) -> None:
    scene.team.spec = scene.spec.model_copy(
        update={"cluster": scene.spec.cluster.model_copy(update={"rejoin_timeout": 0.2})}
    )
    with pytest.raises(NodeMissing, match=r"node 1 did not come to 127\.0\.0\.1:\d+ within 0 s"):
        scene.team.muster([], [])


def test_a_second_launcher_of_the_same_node_is_refused(scene: Scene) -> None:
    with scene.mate(), mustering(scene) as found:
        assert found() == ([], [])
        with scene.mate() as twin:
            deadline = time.monotonic() + 5
            while "refused" not in twin.kinds() and time.monotonic() < deadline:
                scene.team._handle()
                time.sleep(0.02)
            assert "is there already" in twin.wait_for("refused")["detail"]
            assert not scene.warnings()


def test_a_silent_node_is_named_and_a_new_launcher_takes_its_place(scene: Scene) -> None:
    with scene.mate() as mate, mustering(scene) as found:
        found()
        scene.team.begin(3, [], [], {})
        assert mate.wait_for("attempt")["number"] == 3
        mate.fall_silent()
        verdict = scene.team.over(Report(Ended({0: 70})))
        assert verdict.lost is not None and verdict.lost.node == 1
        assert "has been silent for" in verdict.lost.detail
    with scene.mate() as again, mustering(scene) as found:
        found()
        assert again.wait_for("welcome")["resumes"] is True


def test_reports_of_all_nodes_are_put_together(scene: Scene) -> None:
    with scene.mate() as mate, mustering(scene) as found:
        found()
        scene.team.begin(1, [], [], {})
        mate.line.post({"kind": "ended", "attempt": 0, **Report(Ended({1: 1})).to_json()})
        mate.line.post({"kind": "ended", "attempt": 1, **Report(Ended({1: -9}), at_work={1: 7}).to_json()})
        verdict = scene.team.over(Report(Ended({0: 70}), at_work={0: 6}))
        assert mate.wait_for("over")["attempt"] == 1
    assert verdict.lost is None
    assert verdict.report.ended == Ended({0: 70, 1: -9}, None)
    assert verdict.report.at_work == {0: 6, 1: 7}


def test_after_a_rank_stood_still_the_ways_between_the_nodes_are_tried_again_and_waited_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A way that is cut makes ranks stand still of which none is to blame."""
    with scene.mate() as mate, mustering(scene) as found:
        found()
        scene.team.begin(1, [], [], {})
        mate.line.post({"kind": "ended", "attempt": 1, **Report(Ended({1: 70})).to_json()})
        scene.team.over(Report(Ended({0: -9}), hangs=(Hang(0, 3, 2.0),)))
        tries = iter([["node 0 cannot reach node 1 on the compute channel"], []])
        monkeypatch.setattr(ways, "unreachable", lambda node, doors: next(tries))
        with mustering(scene) as again:
            assert again() is not None
        assert list(tries) == []
    assert "cannot reach node 1 on the compute channel; waiting for it" in scene.warnings()


def test_workers_are_cut_off_once_an_attempt_is_over_elsewhere(scene: Scene) -> None:
    with scene.mate() as mate, mustering(scene) as found:
        found()
        scene.team.begin(1, [], [], {})
        assert scene.team.tick() is False
        mate.line.post({"kind": "ended", "attempt": 1, **Report(Ended({1: -9})).to_json()})
        deadline = time.monotonic() + 5
        while not scene.team.tick():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert scene.team.tick(), "again and again: a worker may only be beginning"


def test_a_signal_to_another_node_stops_the_wait(scene: Scene) -> None:
    with scene.mate() as mate, mustering(scene) as found:
        found()
        mate.line.post({"kind": "stop", "number": int(signal.SIGTERM)})
        mate.fall_silent()
        with pytest.raises(Interrupted, match="SIGTERM"):
            scene.team.muster([], [])


@pytest.mark.parametrize(
    "message",
    [
        {}, {"kind": 3}, {"kind": "held"}, {"kind": "ended", "attempt": 1}, {"kind": "stop", "number": "x"},
        {"kind": "ended", "attempt": 1, "exit_codes": [[1, "x"]], "signal": None, "errors": [], "at_work": []},
        {"kind": "ended", "attempt": 1, "exit_codes": [], "signal": None, "errors": [{"rank": 1}], "at_work": []},
        {"kind": "tried", "problems": 7}, {"kind": "held", "question": 1, "doors": 7},
    ],
)  # fmt: skip
def test_what_is_no_message_ends_nothing_but_its_sender(scene: Scene, message: Message) -> None:
    with scene.mate() as mate, mustering(scene) as found:
        found()
        scene.team.begin(1, [], [], {})
        mate.line.post(message)
        mate.line.post({"kind": "ended", "attempt": 1, **Report(Ended({1: 0})).to_json()})
        verdict = scene.team.over(Report(Ended({})))
        assert verdict.lost is None or "a message that is none" in verdict.lost.detail


def test_without_a_host_a_line_says_so_at_its_deadline() -> None:
    port = free_port()
    with pytest.raises(NetworkError, match=rf"nobody listens at the rendezvous 127\.0\.0\.1:{port} .* --node-rank 0"):
        Line(parse_endpoint(f"127.0.0.1:{port}"), 1, lambda address: {}, time.monotonic() + 0.2, SEAL)


def test_a_line_notices_that_the_host_is_gone(scene: Scene) -> None:
    with scene.mate() as mate, mustering(scene) as found:
        found()
        assert mate.line.lost(TIMEOUT_S) is None
        scene.host.close()
        deadline = time.monotonic() + 5
        while (why := mate.line.lost(TIMEOUT_S)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert "node 0" in why and "silent" in why


def test_row_94_a_rendezvous_that_is_taken_or_elsewhere_is_refused(scene: Scene) -> None:
    endpoint = parse_endpoint(scene.spec.cluster.rendezvous)
    with pytest.raises(NetworkError, match=rf"port {endpoint.port} of the rendezvous .* is in use by process \d+"):
        Host(endpoint, 2, SEAL)
    with pytest.raises(NetworkError, match="is no address of this node"):
        Host(parse_endpoint(f"192.0.2.1:{endpoint.port}"), 2, SEAL)


@contextlib.contextmanager
def mustering(scene: Scene) -> Iterator[Callable[[], Any]]:
    """Node 0 waits for the others in a thread; what it found is to be asked for."""
    answer: list[Any] = []
    thread = threading.Thread(target=lambda: answer.append(scene.team.muster([], [])), daemon=True)
    thread.start()

    def found() -> Any:
        thread.join(timeout=10)
        return answer[0]

    yield found
    thread.join(timeout=10)
