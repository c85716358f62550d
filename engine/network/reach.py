"""Can all nodes reach each other on both channels? Asked before any worker starts.

A pair that cannot is found by nobody later: the library that connects the workers waits for half an hour. Each node
opens a door on each channel's interface that says whose it is, for one address may stand for different machines, as
that of a bridge which every machine has.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
import socketserver
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .addresses import address_of

CONNECT_S = 3.0
TRIES = 2
AT_ONCE = 32
POLL_S = 0.02
_WORD_BYTES = 32


@dataclass(frozen=True)
class Door:
    """Where a node can be reached on one channel, and what it says there."""

    channel: str
    interface: str
    address: str
    port: int
    word: str

    def to_json(self) -> dict[str, Any]:
        """Form for messages."""
        return dict(vars(self))


def door_from_json(value: Mapping[str, Any]) -> Door:
    """Read the form of `to_json`; raises ValueError for what is none."""
    try:
        channel, interface, address, word = (str(value[key]) for key in ("channel", "interface", "address", "word"))
        return Door(channel, interface, address, int(value["port"]), word)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a door: {error}") from error


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    word = ""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Answer(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):
            assert isinstance(self.server, _Server)
            self.request.sendall(self.server.word.encode())


class Doors:
    """The doors of this node, open until closed."""

    def __init__(self, compute: str, storage: str) -> None:
        """Open one on each interface. Raises NetworkError, OSError."""
        self._servers: list[_Server] = []
        self.doors = [self._open("compute", compute), self._open("storage", storage)]

    def _open(self, channel: str, interface: str) -> Door:
        address = address_of(interface)
        kind = _Server6 if ipaddress.ip_address(address).version == 6 else _Server
        server = kind((address, 0), _Answer)
        server.word = secrets.token_hex(_WORD_BYTES // 2)
        threading.Thread(target=server.serve_forever, args=(POLL_S,), name="dtrain-door", daemon=True).start()
        self._servers.append(server)
        return Door(channel, interface, address, server.server_address[1], server.word)

    def close(self) -> None:
        """Close them."""
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._servers = []


def unreachable(node: int, doors: Mapping[int, list[Door]]) -> list[str]:
    """Try the doors of all other nodes from this one; a line for each that does not open."""
    tried = [(other, door) for other in sorted(doors) if other != node for door in doors[other]]
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        reasons = list(pool.map(lambda one: _try(one[1]), tried))
    return list(_lines(node, tried, reasons))


def _lines(node: int, tried: list[tuple[int, Door]], reasons: list[str | None]) -> Iterator[str]:
    for (other, door), reason in zip(tried, reasons, strict=True):
        if reason is not None:
            yield (
                f"node {node} cannot reach node {other} on the {door.channel} channel "
                f"({door.interface} there, {door.address}): {reason}"
            )


def _try(door: Door) -> str | None:
    reason: str | None = None
    for _ in range(TRIES):
        try:
            with socket.create_connection((door.address, door.port), timeout=CONNECT_S) as link:
                heard = link.recv(_WORD_BYTES, socket.MSG_WAITALL).decode(errors="replace")
        except OSError as error:
            reason = error.strerror or str(error)
            continue
        return None if heard == door.word else "another machine has that address"
    return reason
