"""The line between the launchers of a run: messages and signs of life through torch's store at the rendezvous.

Node 0 hosts the store. A call to a store whose host is stopped or cut off never returns, so a thread of its own makes
all calls, and everybody else looks at what it has brought. Each sign of life is a counter that the reader compares
with its own monotonic clock; no clock of another node counts. Keys are below a random word of this start of node 0,
so a launcher of an earlier start speaks to nobody.

The store asks nobody who he is. So every value has the seal of the run's token over its own key: what has not is no
message, and what a stranger has put in a message's place is written again until its reader has confirmed it. The words
in the keys are new at each start, so nothing that was recorded before counts again.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ...tiers.peers.seal import Seal
from .addresses import Endpoint, NetworkError, address_towards, listen, resolve
from .lane import Desk, Lane, Message, parse

POLL_S = 0.1
STORE_TIMEOUT = timedelta(seconds=30)
CONNECT_S = 1.0
TELL_S = 5.0
"""A node 0 that is started within this time is nothing to speak of."""
START_KEY = "dtrain/start"
FIRST_CONTACT_S = 3.0
"""Longest wait for a first word of node 0 that has the seal, where somebody writes over it."""
ANYWAY = 10
"""Every so many turns a lane is looked into though its node says that nothing new is there: a stranger's message is to
be named."""
FORGET_S = 600.0
"""A launcher that was given up may wake up and ask for this long."""
STARVED_S = 2.0
"""A pause of our own thread after which nobody's silence counts."""

Sign = Callable[[], Message]
"""What a launcher tells of itself with every sign of life."""


class Life:
    """How long a counter has stood still, by our own clock."""

    def __init__(self) -> None:
        """It lives until it is seen not to."""
        self.count = 0
        self.changed = time.monotonic()
        self.sign: Message = {}

    def see(self, sign: Message) -> None:
        """Take what the other one says of itself now; an older sign that is shown again is none."""
        count = sign.get("count")
        if isinstance(count, int) and count > self.count:
            self.count, self.sign, self.changed = count, sign, time.monotonic()

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
        self.desk: Desk
        self._told: set[str] = set()

    def strangers(self) -> list[str]:
        """What is to be told of values in the store that nobody of this run has written; each key once."""
        new = [key for key in list(self.desk.strangers) if key not in self._told]
        self._told.update(new)
        return [
            f"somebody without this run's token has written into the store at the rendezvous ({key}); it was not heeded"
            for key in new
        ]

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

    def __init__(self, desk: Desk, node: int, hello: Message) -> None:
        """It has said hello with these words."""
        self.node, self.hello, self.word = node, hello, str(hello.get("word"))
        self.life = Life()
        self.down = Lane(desk, f"down/{self.word}")
        self.up = Lane(desk, f"up/{self.word}")
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

    def __init__(self, endpoint: Endpoint, nodes: int, seal: Seal) -> None:
        """Listen at the rendezvous; raises NetworkError."""
        super().__init__("dtrain-line")
        self.endpoint, self.nodes = endpoint, nodes
        start = secrets.token_hex(16)
        self._root = open_store(endpoint)
        self.port = self._root.port
        self.seal = seal
        self._start = seal.sealed(START_KEY, start)
        self._root.set(START_KEY, self._start)
        self.desk = Desk(self._root, f"dtrain/{start}", seal)
        self._count = 0
        self._words: set[str] = set()
        """Of all launchers that have ever said hello."""
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
        self._root.set(START_KEY, self._start)
        self.desk.write("beat/0", json.dumps({"count": self._count}))
        hellos = self.desk.read_all([f"hello/{node}" for node in range(1, self.nodes)])
        for node, text in enumerate(hellos, 1):
            said = parse(text)
            if said and (word := str(said.get("word"))) not in self._words:
                self._words.add(word)
                self._mates.append(Mate(self.desk, node, said))
                self._inbox.append((self._mates[-1], {"kind": "hello"}))
        self._mates = [mate for mate in self._mates if mate.dead is None or mate.life.silent_s < FORGET_S]
        for mate in self._mates:
            mate.down.flush()
        beats = self.desk.read_all([f"beat/{mate.word}" for mate in self._mates])
        for mate, text in zip(self._mates, beats, strict=True):
            mate.life.see(parse(text))
            in_turn = (mate.node + self._count) % ANYWAY == 0
            if in_turn or mate.up.lacks(mate.life.sign.get("sent")):
                self._inbox.extend((mate, message) for message in mate.up.take())

    def _forgive(self) -> None:
        for mate in self._mates:
            mate.life.changed = time.monotonic()


class Line(_Turning):
    """Another node's end. Use as a context manager."""

    def __init__(
        self, endpoint: Endpoint, node: int, hello: Callable[[str], Message], deadline: float, seal: Seal
    ) -> None:
        """Find node 0 before `deadline` (time.monotonic); raises NetworkError.

        `hello` makes, of this node's address, what it says of itself when the line is entered.
        """
        super().__init__("dtrain-line")
        self.endpoint, self.node = endpoint, node
        self.sign: Sign = dict
        wait_for_host(endpoint, deadline)
        self.address = address_towards(endpoint.host, endpoint.port)
        try:
            root = TCPStore(
                endpoint.host, endpoint.port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT
            )
            start = _start_of(root, endpoint, seal)
        except RuntimeError as error:
            raise NetworkError(f"at {endpoint} is no node 0 of dtrain: {str(error).splitlines()[0]}") from error
        self.seal = seal
        self.desk = Desk(root, f"dtrain/{start}", seal)
        self.word = secrets.token_hex(8)
        self.host = Life()
        self._asked = time.monotonic()
        self._hello = json.dumps({**hello(self.address), "word": self.word})
        self._up, self._down = Lane(self.desk, f"up/{self.word}"), Lane(self.desk, f"down/{self.word}")
        self._count = 0
        self._inbox: deque[Message] = deque()

    def __enter__(self) -> Line:
        self._say_hello()
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
        if not self._down.is_heard:
            self._say_hello()
        self._up.flush()
        self.desk.write(f"beat/{self.word}", json.dumps({**self.sign(), "count": self._count, "sent": self._up.sent}))
        self.host.see(parse(self.desk.read("beat/0")))
        self._inbox.extend(self._down.take())

    def _say_hello(self) -> None:
        self.desk.write(f"hello/{self.node}", self._hello)

    def _forgive(self) -> None:
        self.host.changed = time.monotonic()


def _start_of(root: TCPStore, endpoint: Endpoint, seal: Seal) -> str:
    """The word of this start of node 0, once it has shown that it has the run's token. Raises NetworkError."""
    deadline = time.monotonic() + FIRST_CONTACT_S
    while True:
        start = seal.opened(START_KEY, root.get(START_KEY))
        if start is not None:
            return start
        if time.monotonic() > deadline:
            raise NetworkError(
                f"node 0 at {endpoint} does not have this node's token, or it is the node 0 of another run: all nodes "
                "need the same one (--token-file or DTRAIN_TOKEN; else it is in the output_dir, which they share)"
            )
        time.sleep(POLL_S)


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


def wait_for_host(endpoint: Endpoint, deadline: float, say: Callable[[str], None] = lambda words: None) -> None:
    """Wait until somebody listens at the rendezvous: torch's own attempts write into the terminal.

    Why nobody is reached is said while there is still time to mend it: a mistyped name looks like a late node 0.
    """
    started, told = time.monotonic(), ""
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
            if str(error) != told and time.monotonic() - started >= TELL_S:
                told, left = str(error), deadline - time.monotonic()
                say(f"not reached yet: {told}; tried for {left:.0f} s more (cluster.rejoin_timeout)")
        time.sleep(POLL_S)
