"""Sealed values in a store that asks nobody who he is, and lanes of messages made of them."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from ...tiers.peers.seal import Seal

MAX_MESSAGE = 8 * 2**20 - 2**12
"""torch's store ends the connection of whoever sends a value of more than 8 MiB."""
AGAIN_S = 1.0
"""A message that was not confirmed for this long is written again: its reader has not seen it, or a stranger has
written over it."""
MANY = 1000
"""Keys that are asked for in one call."""
MAX_STRANGERS = 10
"""Keys with a value of a stranger that are told of."""

Message = dict[str, Any]


class Desk:
    """The store below a prefix, with the seal of the run on everything that is written or read."""

    def __init__(self, store: Store, prefix: str, seal: Seal) -> None:
        """Write and read below `prefix`."""
        self._store, self._prefix, self._seal = store, prefix, seal
        self.strangers: dict[str, None] = {}
        """Keys whose value was no message of this run, in the order in which they were seen."""

    def write(self, key: str, text: str) -> None:
        """Set a key; raises ValueError for more than a message can have."""
        if len(text) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(text)} bytes is longer than {MAX_MESSAGE}")
        self._store.set(f"{self._prefix}/{key}", self._seal.sealed(f"{self._prefix}/{key}", text))

    def has(self, key: str) -> bool:
        """Tell whether the key is there, whoever has set it."""
        return self._store.check([f"{self._prefix}/{key}"])

    def read(self, key: str) -> str | None:
        """What was written there by one of this run; None where nothing is, or a stranger's."""
        return self.read_all([key])[0]

    def read_all(self, keys: Sequence[str]) -> list[str | None]:
        """As `read` of each; two calls for up to `MANY` keys that are all there, else halves are asked for."""
        if not keys:
            return []
        full = [f"{self._prefix}/{key}" for key in keys]
        if len(keys) <= MANY and self._store.check(full):
            return [self._opened(*pair) for pair in zip(keys, self._store.multi_get(full), strict=True)]
        if len(keys) == 1:
            return [None]
        half = len(keys) // 2
        return self.read_all(keys[:half]) + self.read_all(keys[half:])

    def _opened(self, key: str, value: bytes) -> str | None:
        text = self._seal.opened(f"{self._prefix}/{key}", value)
        if text is None and len(self.strangers) < MAX_STRANGERS:
            self.strangers.setdefault(key)
        return text

    def erase(self, key: str) -> None:
        """Delete a key."""
        self._store.delete_key(f"{self._prefix}/{key}")


class Lane:
    """Numbered messages from one launcher to another; each is deleted as it is read."""

    def __init__(self, desk: Desk, name: str) -> None:
        """Write or read below `name`."""
        self._desk, self._name = desk, name
        self._sent = self._read = 0
        self._waiting: deque[Message] = deque()
        self._unconfirmed: dict[int, tuple[str, float]] = {}
        """Texts that were sent, and when for the last time, by number."""

    def post(self, message: Message) -> None:
        """Send it with the next turn of the thread."""
        self._waiting.append(message)

    @property
    def is_empty(self) -> bool:
        """Tell whether everything posted is in the store."""
        return not self._waiting

    @property
    def sent(self) -> int:
        """Number of messages that have been put into the store."""
        return self._sent

    def lacks(self, sent: object) -> bool:
        """Tell whether there may be something to take: the writer says it has `sent` more, or does not say."""
        return not isinstance(sent, int) or sent > self._read

    @property
    def is_heard(self) -> bool:
        """Tell whether anything has been read from it."""
        return self._read > 0

    def flush(self) -> None:
        """Put what waits into the store, and again what nobody has confirmed."""
        while self._waiting:
            text = json.dumps(self._waiting[0])
            self._desk.write(f"{self._name}/{self._sent}", text)
            self._unconfirmed[self._sent] = (text, time.monotonic())
            self._sent += 1
            self._waiting.popleft()
        now = time.monotonic()
        if any(now - since > AGAIN_S for _, since in self._unconfirmed.values()):
            self._look_after(now)

    def _look_after(self, now: float) -> None:
        confirmed = self._desk.read(f"{self._name}/read") or ""
        read = int(confirmed) if confirmed.isdecimal() else 0
        for number, (text, _) in list(self._unconfirmed.items()):
            key = f"{self._name}/{number}"
            if number < read:
                del self._unconfirmed[number]
                if self._desk.has(key):  # written again just after it was read
                    self._desk.erase(key)
                continue
            self._desk.write(key, text)
            self._unconfirmed[number] = (text, now)

    def take(self) -> list[Message]:
        """What has come since. What a stranger has put there is deleted, and the message itself comes again."""
        found = []
        while self._desk.has(key := f"{self._name}/{self._read}"):
            text = self._desk.read(key)
            self._desk.erase(key)
            if text is None:
                break
            found.append(parse(text))
            self._read += 1
        if found:
            self._desk.write(f"{self._name}/read", str(self._read))
        return found


def parse(text: str | None) -> Message:
    """A message; what is none reads as an empty one, which nobody acts on."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text) if text is not None else None
        if isinstance(value, dict):
            return value
    return {}
