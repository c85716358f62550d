"""A connection on which both ends have shown that they know the run's key, and messages that only they can write.

The server sends a nonce, the client one of its own and a proof over both, the server its proof; the key of the
connection follows from the run's and the nonces. A message is its length, a code over direction, number and bytes
(HMAC-SHA256, RFC 2104), and JSON. Raw bytes follow a message that announces them and have no code of their own: what
they must be is said by the digests in that message. Those (xxh3) find every accident, but no forger on the wire itself.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import time
from typing import Any

from ..format.jsonfile import dumps

MAGIC = b"dtrain-peer-1\n\0\0"
MAX_MESSAGE = 64 * 2**20
"""Longest message: a commit record holds 35 bytes for each tensor of a shard."""
PATIENCE_S = 10.0
"""Longest time in which the other end neither sends nor takes a byte, unless the caller says another."""
CHUNK = 2**20
"""Most bytes handed to the kernel at once."""
_NONCE = _CODE = 32
_HEAD = 4 + _CODE


class WireError(Exception):
    """The other end is not who it should be, or does not keep to the protocol; the message says which."""


class Link:
    """One end of a connection."""

    def __init__(self, connection: socket.socket, key: bytes, mine: bytes, theirs: bytes) -> None:
        """Speak after the greeting; `mine` and `theirs` name the directions."""
        self.connection, self._key = connection, key
        self._mine, self._theirs = mine, theirs
        self._sent = self._read = 0

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. Raises OSError."""
        text = dumps(message)
        code = _code(self._key, self._mine, self._sent.to_bytes(8, "big"), text)
        self._sent += 1
        self.connection.sendall(len(text).to_bytes(4, "big") + code + text)

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the other end has closed. Raises WireError, OSError."""
        head = _read(self.connection, _HEAD, may_end=True)
        if head is None:
            return None
        length = int.from_bytes(head[:4], "big")
        if length > MAX_MESSAGE:
            raise WireError(f"a message of {length:,} bytes; the limit is {MAX_MESSAGE:,}")
        text = _read(self.connection, length) or b""
        code = _code(self._key, self._theirs, self._read.to_bytes(8, "big"), text)
        if not hmac.compare_digest(code, head[4:]):
            raise WireError("a message that the other end has not written")
        self._read += 1
        try:
            message = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise WireError(f"a message that is no JSON ({error})") from error
        if not isinstance(message, dict):
            raise WireError("a message that is no JSON object")
        return message

    def receive_into(self, target: memoryview) -> None:
        """Fill `target` with the raw bytes that follow. Raises WireError, OSError."""
        position = 0
        while position < len(target):
            count = self.connection.recv_into(target[position : position + CHUNK])
            if not count:
                raise WireError(f"the connection ended after {position:,} of {len(target):,} bytes")
            position += count

    def close(self) -> None:
        """End the connection, also under a thread that waits in it."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


class Pace:
    """Holds a sender back to a rate."""

    def __init__(self, bytes_per_s: float | None) -> None:
        """None: no limit."""
        self._rate = bytes_per_s
        self._free_at = time.monotonic()

    def spend(self, nbytes: int) -> float:
        """Count bytes that were just sent; returns how long to wait before the next ones."""
        if self._rate is None:
            return 0.0
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + nbytes / self._rate
        return self._free_at - now


def connect(address: tuple[str, int], secret: bytes, source: str | None = None, patience_s: float = PATIENCE_S) -> Link:
    """Reach a server that knows the key, from the address `source`. Raises WireError, OSError.

    OSError too when nothing is heard of it, or taken by it, for `patience_s`.
    """
    connection = socket.create_connection(address, patience_s, (source, 0) if source is not None else None)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = _read(connection, len(MAGIC) + _NONCE) or b""
        if not hello.startswith(MAGIC):
            raise WireError("somebody else answers at that port")
        nonces = hello[len(MAGIC) :] + secrets.token_bytes(_NONCE)
        connection.sendall(nonces[_NONCE:] + _code(secret, b"client", nonces))
        proof = _read(connection, _CODE, may_end=True)
        if proof is None:
            raise WireError("the other end does not accept this run's key")
        if not hmac.compare_digest(proof, _code(secret, b"server", nonces)):
            raise WireError("the other end does not know this run's key")
    except BaseException:
        connection.close()
        raise
    return Link(connection, _code(secret, b"key", nonces), b"client", b"server")


def accept(connection: socket.socket, secret: bytes) -> Link:
    """Let a client in that knows the key; closes the connection otherwise. Raises WireError, OSError."""
    try:
        connection.settimeout(PATIENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = secrets.token_bytes(_NONCE)
        connection.sendall(MAGIC + nonce)
        said = _read(connection, _NONCE + _CODE) or b""
        nonces = nonce + said[:_NONCE]
        if not hmac.compare_digest(said[_NONCE:], _code(secret, b"client", nonces)):
            raise WireError("it does not know this run's key")
        connection.sendall(_code(secret, b"server", nonces))
    except BaseException:
        connection.close()
        raise
    return Link(connection, _code(secret, b"key", nonces), b"server", b"client")


def _read(connection: socket.socket, nbytes: int, *, may_end: bool = False) -> bytes | None:
    """Exactly so many bytes; None where the connection `may_end` before the first."""
    data = bytearray()
    while len(data) < nbytes:
        found = connection.recv(min(CHUNK, nbytes - len(data)))
        if not found:
            if may_end and not data:
                return None
            raise WireError("the connection ended in the middle of a message")
        data += found
    return bytes(data)


def _code(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"\0".join(parts), "sha256")
