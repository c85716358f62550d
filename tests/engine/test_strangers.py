"""Whoever reaches the port of the rendezvous without the run's token can make nobody believe anything."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from tests.job.nodes import free_port
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dtrain.engine.network import lane as lanes
from dtrain.engine.network import line as lines
from dtrain.engine.network.addresses import NetworkError, parse_endpoint
from dtrain.engine.network.lane import MAX_MESSAGE, Desk, Message
from dtrain.engine.network.line import ANYWAY, START_KEY, STORE_TIMEOUT, Host, Line
from dtrain.tiers.peers.seal import Seal

TOKEN = "a token that all nodes have"
FORGED: Message = {"kind": "ended", "attempt": 1, "number": 9, "count": 10**9, "word": "x"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "POLL_S", 0.02)
    monkeypatch.setattr(lines, "FIRST_CONTACT_S", 1.0)
    monkeypatch.setattr(lanes, "AGAIN_S", 0.2)


class Talk:
    """Node 0, node 1, and a stranger who knows everything that is in the store but not the token."""

    def __init__(self) -> None:
        self.endpoint = parse_endpoint(f"127.0.0.1:{free_port()}")
        self.host = Host(self.endpoint, 2, Seal(TOKEN))
        self.host.__enter__()
        self.root = self.connect()
        self.start = self.root.get(START_KEY).decode()[-32:]
        self.line = self.call(TOKEN)
        self.line.__enter__()
        self.heard: list[Message] = []
        self.until(lambda: self.from_below("hello"), "the hello")
        self.mate = self.host._mates[0]

    def connect(self) -> TCPStore:
        return TCPStore("127.0.0.1", self.endpoint.port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)

    def call(self, token: str) -> Line:
        return Line(self.endpoint, 1, lambda address: {"host": address}, time.monotonic() + 5, Seal(token))

    def close(self) -> None:
        self.line.__exit__()
        self.host.close()

    def forge(self, key: str, message: Message, token: str | None = "a token that is another") -> None:
        """Write a message of one's own, with another token's seal or none."""
        path, text = f"dtrain/{self.start}/{key}", json.dumps(message)
        self.root.set(path, Seal(token).sealed(path, text) if token is not None else text)

    def from_below(self, kind: str) -> bool:
        self.heard += [message for _, message in self.host.receive()]
        return any(message["kind"] == kind for message in self.heard)

    @staticmethod
    def until(done: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 10
        while not done():
            assert time.monotonic() < deadline, what
            time.sleep(0.01)


@pytest.fixture
def talk() -> Iterator[Talk]:
    made = Talk()
    yield made
    made.close()


@pytest.mark.parametrize("token", ["a token that is another", None])
def test_a_message_of_a_stranger_is_refused_and_named_and_the_true_one_comes(talk: Talk, token: str | None) -> None:
    word = talk.line.word
    for key in (f"up/{word}/0", f"up/{word}/1", f"down/{word}/0"):
        talk.forge(key, FORGED, token)
    talk.until(lambda: talk.host.desk.strangers and talk.line.desk.strangers, "both to see it")
    talk.line.post({"kind": "first"})
    talk.line.post({"kind": "second"})
    talk.host.post(talk.mate, {"kind": "welcome"})
    talk.until(lambda: talk.from_below("second"), "what node 1 says")
    downwards: list[Message] = []
    talk.until(lambda: downwards.append(m) if (m := talk.line.receive()) else downwards, "what node 0 says")
    assert [message["kind"] for message in talk.heard] == ["hello", "first", "second"]
    assert [message["kind"] for message in downwards] == ["welcome"]
    told = [*talk.host.strangers(), *talk.line.strangers()]
    assert told and all("without this run's token" in words for words in told)
    assert not [*talk.host.strangers(), *talk.line.strangers()], "each is told once"


@pytest.mark.parametrize("harm", ["overwritten", "deleted"])
def test_a_message_that_a_stranger_takes_away_is_written_again(talk: Talk, harm: str) -> None:
    writer, reader = (lanes.Lane(Desk(talk.root, f"dtrain/{talk.start}", Seal(TOKEN)), "lane") for _ in range(2))
    writer.post({"kind": "true"})
    writer.flush()
    if harm == "overwritten":
        talk.forge("lane/0", FORGED)
    else:
        talk.root.delete_key(f"dtrain/{talk.start}/lane/0")
    assert reader.take() == []

    heard: list[Message] = []

    def is_done() -> bool:
        writer.flush()
        heard.extend(reader.take())
        return not writer._unconfirmed

    talk.until(is_done, "the message to come again and be confirmed")
    assert heard == [{"kind": "true"}]
    assert not reader.take()


def test_a_message_counts_in_its_own_place_only(talk: Talk) -> None:
    desk = talk.host.desk
    desk.write("up/one/0", "{}")
    true = talk.root.get(f"dtrain/{talk.start}/up/one/0")
    talk.root.set(f"dtrain/{talk.start}/up/one/1", true)
    talk.root.set(f"dtrain/{'0' * 32}/up/one/0", true)
    assert desk.read("up/one/0") == "{}"
    assert desk.read("up/one/1") is None
    assert Desk(talk.root, f"dtrain/{'0' * 32}", Seal(TOKEN)).read("up/one/0") is None


def test_no_stranger_joins_or_speaks_for_a_node(talk: Talk) -> None:
    def seen() -> bool:
        talk.forge("hello/1", FORGED)
        return "hello/1" in talk.host.desk.strangers

    talk.until(seen, "node 0 to see it")
    assert len(talk.host._mates) == 1 and talk.host._mates[0].host == "127.0.0.1"
    talk.line.close()
    talk.until(lambda: talk.mate.life.silent_s > 0.3, "node 1 to be silent")
    before, old = talk.mate.life.count, talk.root.get(f"dtrain/{talk.start}/beat/{talk.line.word}")
    for sign in (FORGED, json.loads(old[64:])):
        talk.forge(f"beat/{talk.line.word}", sign)
        time.sleep(0.1)
    talk.root.set(f"dtrain/{talk.start}/beat/{talk.line.word}", old)  # its own words, again
    time.sleep(0.1)
    assert talk.mate.life.count == before and talk.mate.life.silent_s > 0.4, "a dead node stays silent"


def test_without_the_token_a_node_is_told_what_is_missing(talk: Talk) -> None:
    with pytest.raises(NetworkError, match=r"does not have this node's token.*--token-file or DTRAIN_TOKEN"):
        talk.call("a token that is another")
    with pytest.raises(ValueError, match="at least 16 characters, this one has 5"):
        Seal("short")


def test_node_0_puts_its_first_word_back(talk: Talk) -> None:
    talk.root.set(START_KEY, Seal("a token that is another").sealed(START_KEY, "f" * 32))
    with talk.call(TOKEN):
        talk.until(lambda: len(talk.host._mates) == 2, "another launcher to be heard")


def test_a_message_that_is_too_long_for_the_store_is_not_sent(talk: Talk) -> None:
    talk.line.desk.write("long", "x" * MAX_MESSAGE)
    assert talk.line.desk.read("long") == "x" * MAX_MESSAGE
    with pytest.raises(ValueError, match="a message of 8384513 bytes is longer"):
        talk.line.desk.write("longer", "x" * (MAX_MESSAGE + 1))


class Counted:
    """A store that counts what is asked of it."""

    def __init__(self, store: TCPStore) -> None:
        self.store, self.calls = store, 0

    def __getattr__(self, name: str) -> object:
        self.calls += 1
        return getattr(self.store, name)


def host_of(nodes: int, silent: Sequence[int] = (), absent: Sequence[int] = ()) -> Host:
    """Node 0 after all others have come, but for the absent ones; the silent ones have not shown a sign of life yet."""
    host = Host(parse_endpoint("127.0.0.1:0"), nodes, Seal(TOKEN))
    for node in {*range(1, nodes)} - {*absent}:
        host.desk.write(f"hello/{node}", json.dumps({"word": f"w{node}"}))
        if node not in silent:
            host.desk.write(f"beat/w{node}", json.dumps({"count": 1, "sent": 0}))
    host._turn()
    return host


@pytest.mark.parametrize("silent", [[], [7]])
def test_what_node_0_asks_the_store_in_a_turn_hardly_grows_with_the_nodes(silent: list[int]) -> None:
    """Each call waits for a core of its own: with some for each node a turn took seconds beside busy cores."""
    asked = {}
    for nodes in (100, 400):
        host = host_of(nodes, silent)
        counted = Counted(host._root)
        host.desk._store = counted  # type: ignore[assignment]
        for _ in range(ANYWAY):
            host._turn()
        assert [mate.node for mate in host._mates if mate.life.count != 1] == silent
        asked[nodes] = counted.calls / ANYWAY
    assert asked[100] < 20 + 20 * len(silent)
    assert asked[400] - asked[100] <= 300 / ANYWAY + 10 * len(silent)


def test_a_sign_of_life_that_is_missing_hides_no_other() -> None:
    host = host_of(6, silent=[2], absent=[3])
    assert [(mate.node, mate.life.count) for mate in host._mates] == [(1, 1), (2, 0), (4, 1), (5, 1)]
