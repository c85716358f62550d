"""Who does not know the run's key gets nowhere, and what is cut, too long or forged is refused."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from dtrain.tiers.peers import wire
from dtrain.tiers.peers.wire import Link, Pace, WireError, accept, connect

TOKEN = b"t" * 32


class Server:
    """Accepts one connection in a thread."""

    def __init__(self, token: bytes = TOKEN) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self.listener.getsockname()
        self.link: Link | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(token,))
        self._thread.start()

    def _run(self, token: bytes) -> None:
        with suppress(OSError):
            connection, _ = self.listener.accept()
            try:
                self.link = accept(connection, token)
            except (WireError, OSError) as error:
                self.error = error

    def accepted(self) -> Link:
        self._thread.join()
        assert self.link is not None
        return self.link

    def refused(self) -> Exception:
        self._thread.join()
        assert self.error is not None
        return self.error

    def close(self) -> None:
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self._thread.join()
        if self.link is not None:
            self.link.close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def pair(server: Server) -> Iterator[tuple[Link, Link]]:
    client = connect(server.address, TOKEN)
    yield client, server.accepted()
    client.close()


def test_messages_and_bytes_arrive_in_both_directions(pair: tuple[Link, Link]) -> None:
    client, server = pair
    for sender, receiver in (pair, (server, client), pair):
        sender.send({"kind": "copy", "bytes": 5})
        sender.connection.sendall(b"hello")
        assert receiver.receive() == {"kind": "copy", "bytes": 5}
        target = bytearray(5)
        receiver.receive_into(memoryview(target))
        assert bytes(target) == b"hello"
    client.close()
    assert server.receive() is None


def test_a_client_with_another_token_is_turned_away(server: Server) -> None:
    with pytest.raises(WireError, match="does not accept this run's key"):
        connect(server.address, b"x" * 32)
    assert "does not know this run's key" in str(server.refused())


def test_a_server_with_another_token_gets_nothing() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(wire.MAGIC + b"n" * 32)
            connection.recv(64, socket.MSG_WAITALL)
            connection.sendall(b"p" * 32)

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(WireError, match="does not know this run's key"):
        connect(listener.getsockname(), TOKEN)
    thread.join()
    listener.close()


def test_a_stranger_who_says_anything_is_turned_away(server: Server) -> None:
    with socket.create_connection(server.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n" * 8)
        server.refused()


def test_a_proof_that_was_heard_before_is_worth_nothing() -> None:
    first, second = Server(), Server()
    with socket.create_connection(first.address) as heard:
        nonces = heard.recv(48, socket.MSG_WAITALL)[16:] + b"c" * 32
        proof = nonces[32:] + wire._code(TOKEN, b"client", nonces)
        heard.sendall(proof)
        first.accepted()
    with socket.create_connection(second.address) as replayed:
        replayed.sendall(proof)
        second.refused()
    first.close()
    second.close()


def spoil(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (spoil, "has not written"),
        (lambda data: data[:-1], "middle of a message"),
        (lambda data: (wire.MAX_MESSAGE + 1).to_bytes(4, "big") + data[4:], "the limit is"),
        (lambda data: data + data, "has not written"),  # the same message again
    ],
    ids=["spoiled", "cut", "too long", "repeated"],
)
def test_a_message_that_the_other_end_has_not_written_is_refused(
    pair: tuple[Link, Link], change: Callable[[bytes], bytes], words: str
) -> None:
    client, server = pair
    sent = bytearray()
    real, client.connection = client.connection, Recorder(sent)  # type: ignore[assignment]
    client.send({"kind": "copy"})
    real.sendall(change(bytes(sent)))
    real.shutdown(socket.SHUT_WR)
    client.connection = real
    with pytest.raises(WireError, match=words):
        while server.receive() is not None:
            pass


class Recorder:
    def __init__(self, sent: bytearray) -> None:
        self.sent = sent

    def sendall(self, data: bytes) -> None:
        self.sent += data


def test_bytes_that_end_early_are_an_error(pair: tuple[Link, Link]) -> None:
    client, server = pair
    client.connection.sendall(b"123")
    client.close()
    with pytest.raises(WireError, match="after 3 of 10 bytes"):
        server.receive_into(memoryview(bytearray(10)))


def test_a_pace_spreads_bytes_over_time_and_no_pace_does_not() -> None:
    pace = Pace(1000.0)
    waits = [pace.spend(100) for _ in range(5)]
    assert waits == sorted(waits)
    assert 0.3 < waits[-1] <= 0.5
    assert Pace(None).spend(10**12) == 0
