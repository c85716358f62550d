"""The command that the elastic agent starts for each rank: asks the nursery for a worker, and stands in for it.

`python -I -S standin.py NAME JOB.json`: signals go on to the worker, its end becomes ours. Loads nothing but a few
modules of the standard library, so that it is there in a few hundredths of a second.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import sys
from types import FrameType
from typing import NoReturn

LENGTH = struct.Struct("<I")
STATUS = struct.Struct("<i")
FORKED = b"+"
FORK_TIMEOUT_S = 60.0
"""Longest wait for the nursery to fork; without an answer we leave as if it had died, and it is asked no more."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def stand_in(name: str, command: list[str]) -> NoReturn:
    """Have the worker forked and end as it ends; when the nursery dies, its workers do, so we leave by SIGKILL."""
    link = socket.socket(socket.AF_UNIX)
    link.connect(f"\0{name}")

    def forward(number: int, frame: FrameType | None) -> None:
        try:  # noqa: SIM105  # contextlib is one more module to import
            link.send(bytes([number]))
        except OSError:  # the worker has ended; how, lies in the link and is yet to be read
            pass

    folder = os.getcwd()  # noqa: PTH109  # pathlib takes as long to import as all the rest here
    surroundings = {as_bytes(key): as_bytes(value) for key, value in os.environ.items()}
    request = {"command": [*map(as_bytes, command)], "environment": surroundings, "folder": as_bytes(folder)}
    data = json.dumps(request).encode()
    socket.send_fds(link, [LENGTH.pack(len(data))], [1])
    link.sendall(data)
    for number in FORWARDED:
        signal.signal(number, forward)
    link.settimeout(FORK_TIMEOUT_S)
    forked = receive(link, len(FORKED))
    link.settimeout(None)
    answer = receive(link, STATUS.size) if forked else b""
    code = os.waitstatus_to_exitcode(STATUS.unpack(answer)[0]) if answer else -signal.SIGKILL
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
        signal.pause()
    os._exit(code)


def as_bytes(text: str) -> str:
    """A name of the system, one character a byte: isolated, we may read names in another encoding than the nursery."""
    return os.fsencode(text).decode("latin-1")


def as_text(name: str) -> str:
    """What `as_bytes` was given, as this process reads it."""
    return os.fsdecode(name.encode("latin-1"))


def receive(link: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes, or none when the other end is gone or takes longer than the link's time limit."""
    data = b""
    while len(data) < size:
        try:
            piece = link.recv(size - len(data))
        except (ConnectionError, TimeoutError):
            return b""
        if not piece:
            return b""
        data += piece
    return data


if __name__ == "__main__":
    stand_in(sys.argv[1], sys.argv[2:])
