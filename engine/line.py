"""The line between the launchers of a run: messages and signs of life through torch's store at the rendezvous.

Node 0 hosts the store. A call to a store whose host is stopped or cut off never returns, so a thread of its own makes
all calls, and everybody else looks at what it has brought. Each sign of life is a counter that the reader compares
with its own monotonic clock; no clock of another node counts. Keys are below a random token of this start of node 0,
so a launcher of an earlier start speaks to nobody.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from .network import Endpoint, NetworkError, address_towards, listen, resolve

POLL_S = 0.1
STORE_TIMEOUT = timedelta(seconds=30)
CONNECT_S = 1.0
TOKEN_KEY = "dtrain/token"
MAX_MESSAGE = 256 * 2**20
FORGET_S = 600.0
"""A launcher that was given up may wake up and ask for this long."""
STARVED_S = 2.0
"""A pause of our own thread after which nobody's silence counts."""

Message = dict[str, Any]
Sign = Callable[[], Message]
"""What a launcher tells of itself with every sign of life."""


class Lane:
    """Numbered messages from one launcher to another; each is deleted as it is read."""

    def __init__(self, store: Store, name: str) -> None:
        """Write or read below `name`."""
        self._store, self._name = store, name
        self._sent = self._read = 0
        self._waiting: deque[Message] = deque()

    def post(self, message: Message) -> None:
        """Send it with the next turn of the thread."""
        self._waiting.append(message)

    @property
    def is_empty(self) -> bool:
        """Tell whether everything posted is in the store."""
        return not self._waiting

    def flush(self) -> None:
        """Put what waits into the store."""
        while self._waiting:
            self._store.set(f"{self._name}/{self._sent}", json.dumps(self._waiting[0]))
            self._sent += 1
            self._waiting.popleft()

    def take(self) -> list[Message]:
        """What has come since."""
        found = []
        while self._store.check([key := f"{self._name}/{self._read}"]):
            found.append(_parse(self._store.get(key)))
            self._store.delete_key(key)
            self._read += 1
        return found


def _parse(data: bytes) -> Message:
    """A message; what is none reads as an empty one, which nobody acts on."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(data) if len(data) <= MAX_MESSAGE else None
        if isinstance(value, dict):
            return value
    return {}


class Life:
    """How long a counter has stood still, by our own clock."""

    def __init__(self) -> None:
        """It lives until it is seen not to."""
        self.count: object = None
        self.changed = time.monotonic()
        self.sign: Message = {}

    def see(self, sign: Message) -> None:
        """Take what the other one says of itself now."""
        if sign.get("count") != self.count:
            self.count, self.sign, self.changed = sign.get("count"), sign, time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the last change."""
        return time.monotonic() - self.changed


class _Turning(ABC):
    """A thread that goes to the store again and again until it is closed or the store fails."""

    def __init__(self, name: str) -> None:
        self.failure: str | None = None
        self._wake, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._last = time.monotonic()

    def close(self) -> None:
        """End the thread; one that hangs in a call is left alone."""
        self._closed = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1)

    def _run(self) -> None:
        while not self._closed:
            try:
                self._turn()
            except Exception as error:
                self.failure = str(error).splitlines()[0] if str(error) else type(error).__name__
                return
            now = time.monotonic()
            if now - self._last > STARVED_S:
                self._forgive()
            self._last = now
            self._wake.wait(POLL_S)
            self._wake.clear()

    @abstractmethod
    def _turn(self) -> None:
        """Go to the store once."""

    @abstractmethod
    def _forgive(self) -> None:
        """Our own thread has stood still: let nobody's silence count."""


class Mate:
    """Another node's launcher, as node 0 knows it."""

    def __init__(self, store: Store, node: int, hello: Message) -> None:
        """It has said hello with these words."""
        self.node, self.hello, self.word = node, hello, str(hello.get("word"))
        self.life = Life()
        self.down = Lane(store, f"down/{self.word}")
        self.up = Lane(store, f"up/{self.word}")
        self.ready = False
        """It has made room for its snapshots and waits for work."""
        self.dead: str | None = None
        """Why it was given up, or never taken in."""

    @property
    def host(self) -> str:
        """Name of the machine."""
        return str(self.hello.get("host"))

    def __str__(self) -> str:
        return f"node {self.node} ({self.host})"


class Host(_Turning):
    """Node 0's end: hosts the store and hears all others. Use as a context manager."""

    def __init__(self, endpoint: Endpoint, nodes: int) -> None:
        """Listen at the rendezvous; raises NetworkError."""
        super().__init__("dtrain-line")
        self.endpoint, self.nodes = endpoint, nodes
        self.token = secrets.token_hex(16)
        self._root = open_store(endpoint)
        self.port = self._root.port
        self._root.set(TOKEN_KEY, self.token)
        self._store = PrefixStore(f"dtrain/{self.token}", self._root)
        self._count = 0
        self._hellos: dict[int, bytes] = {}
        self._mates: list[Mate] = []
        self._inbox: deque[tuple[Mate, Message]] = deque()

    def __enter__(self) -> Host:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def receive(self) -> list[tuple[Mate, Message]]:
        """What has come since the last call, in order; a hello comes as a message with the mate that sent it."""
        found = []
        while self._inbox:
            found.append(self._inbox.popleft())
        return found

    def post(self, mate: Mate, message: Message) -> None:
        """Send a message to one node."""
        mate.down.post(message)
        self._wake.set()

    def _turn(self) -> None:
        self._count += 1
        self._store.set("beat/0", json.dumps({"count": self._count}))
        for node in range(1, self.nodes):
            if self._store.check([key := f"hello/{node}"]) and (said := self._store.get(key)) != self._hellos.get(node):
                self._hellos[node] = said
                self._mates.append(Mate(self._store, node, _parse(said)))
                self._inbox.append((self._mates[-1], {"kind": "hello"}))
        self._mates = [mate for mate in self._mates if mate.dead is None or mate.life.silent_s < FORGET_S]
        for mate in self._mates:
            self._hear(mate)

    def _hear(self, mate: Mate) -> None:
        mate.down.flush()
        if self._store.check([beat := f"beat/{mate.word}"]):
            mate.life.see(_parse(self._store.get(beat)))
        for message in mate.up.take():
            self._inbox.append((mate, message))

    def _forgive(self) -> None:
        for mate in self._mates:
            mate.life.changed = time.monotonic()


class Line(_Turning):
    """Another node's end. Use as a context manager."""

    def __init__(self, endpoint: Endpoint, node: int, hello: Callable[[str], Message], deadline: float) -> None:
        """Find node 0 before `deadline` (time.monotonic); raises NetworkError.

        `hello` makes, of this node's address, what it says of itself when the line is entered.
        """
        super().__init__("dtrain-line")
        self.endpoint, self.node = endpoint, node
        self.sign: Sign = dict
        _wait_for_host(endpoint, deadline)
        self.address = address_towards(endpoint.host, endpoint.port)
        try:
            root = TCPStore(
                endpoint.host, endpoint.port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT
            )
            token = root.get(TOKEN_KEY).decode()
        except RuntimeError as error:
            raise NetworkError(f"at {endpoint} is no node 0 of dtrain: {str(error).splitlines()[0]}") from error
        self._store = PrefixStore(f"dtrain/{token}", root)
        self.word = secrets.token_hex(8)
        self.host = Life()
        self._asked = time.monotonic()
        self._hello = json.dumps({**hello(self.address), "word": self.word})
        self._up, self._down = Lane(self._store, f"up/{self.word}"), Lane(self._store, f"down/{self.word}")
        self._count = 0
        self._inbox: deque[Message] = deque()

    def __enter__(self) -> Line:
        self._store.set(f"hello/{self.node}", self._hello)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + 1
        while not self._up.is_empty and self.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        self.close()

    def post(self, message: Message) -> None:
        """Send a message to node 0."""
        self._up.post(message)
        self._wake.set()

    def receive(self) -> Message | None:
        """The next message of node 0, if there is one."""
        return self._inbox.popleft() if self._inbox else None

    def put_back(self, message: Message) -> None:
        """Leave a message for the next who asks."""
        self._inbox.appendleft(message)

    def lost(self, timeout_s: float) -> str | None:
        """Why node 0 counts as gone; None while it does not. To be asked all the time: a pause means that we slept."""
        now, before = time.monotonic(), self._asked
        self._asked = now
        if now - before > STARVED_S:
            self._forgive()
        if self.failure is not None:
            return f"the connection to node 0 at {self.endpoint} was lost ({self.failure})"
        if self.host.silent_s > timeout_s:
            return f"node 0 at {self.endpoint} has been silent for {self.host.silent_s:.1f} s"
        return None

    def _turn(self) -> None:
        self._count += 1
        self._store.set(f"beat/{self.word}", json.dumps({**self.sign(), "count": self._count}))
        self._up.flush()
        if self._store.check(["beat/0"]):
            self.host.see(_parse(self._store.get("beat/0")))
        self._inbox.extend(self._down.take())

    def _forgive(self) -> None:
        self.host.changed = time.monotonic()


def open_store(endpoint: Endpoint, port: int | None = None) -> TCPStore:
    """A store at the rendezvous (port 0: at any port of that address), on that address alone. Raises NetworkError.

    Given only a name torch would listen on every address.
    """
    listener = listen(endpoint, port)
    address, bound = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return TCPStore(
        host, bound, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT, master_listen_fd=listener.detach()
    )


def _wait_for_host(endpoint: Endpoint, deadline: float) -> None:
    """Wait until somebody listens at the rendezvous: torch's own attempts write into the terminal."""
    started = time.monotonic()
    while True:
        try:
            _, where = resolve(endpoint.host, endpoint.port)
            with socket.create_connection(where, timeout=CONNECT_S):
                return
        except (OSError, NetworkError) as error:
            if time.monotonic() > deadline:
                waited = time.monotonic() - started
                words = f"nobody listens at the rendezvous {endpoint} ({error}; waited {waited:.0f} s)"
                raise NetworkError(f"{words}: start node 0 there, with --node-rank 0") from error
        time.sleep(POLL_S)
