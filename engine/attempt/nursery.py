"""The nursery: a process that has imported torch once and forks the workers of every attempt.

Importing torch and what its optimizers pull in takes 2 s of a core for each worker and each attempt, nearly all of a
restart. Started by the launcher as `python -P -m dtrain.engine.attempt.nursery FD`, with a listening socket. Nothing
but imports happens here: no thread, no process group, no CUDA, so that a fork is as good as a fresh start. A worker
dies with the nursery, the nursery with the launcher; a worker whose stand-in is gone is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ...tiers import faults
from ..process import LAUNCHER, die_with_parent
from .forks import ROOM, ROOM_VARIABLE
from .standin import FORKED, FORWARDED, LENGTH, STATUS, as_text, receive

IMPORTED = ("dtrain.engine.worker", "torch._dynamo")  # the first optimizer imports the second, 0.8 s
REQUEST_TIMEOUT_S = 10.0
WORKER_COMMAND = ("-P", "-m", "dtrain.engine.worker")
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "DTRAIN_ATTEMPT")


@dataclass
class Child:
    """A worker, the end of the line to its stand-in, and the descriptor that tells of its end."""

    pid: int
    link: socket.socket
    ended: int


class Nursery:
    """Forks workers on request and tells their stand-ins how they ended."""

    def __init__(self, listener: socket.socket) -> None:
        """Serve those who come to this socket."""
        self.listener = listener
        self.children: dict[int, Child] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)

    def serve(self) -> NoReturn:
        """Work until killed."""
        gc.collect()
        gc.freeze()  # the children share these pages as long as nobody counts in them
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    self._take()
                elif key.data.pid in self.children:
                    self._ended(key.data) if key.fileobj == key.data.ended else self._told(key.data)

    def _take(self) -> None:
        """One connection: an empty request is a question whether we are there, another one a worker to be."""
        link, _ = self.listener.accept()
        if _uid_of(link) != os.getuid():
            link.close()
            return
        link.settimeout(REQUEST_TIMEOUT_S)
        try:
            head, descriptors, _, _ = socket.recv_fds(link, LENGTH.size, 1)
            size = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else 0
            request = receive(link, size)
            if not request or not descriptors:
                link.sendall(b"!")
                link.close()
                return
        except OSError:
            link.close()
            return
        link.setblocking(True)
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # else one that comes before a child has its own
        pid = os.fork()  # handlers is ignored as the nursery ignores it, and the worker goes on alone
        if pid == 0:
            self._become_worker(json.loads(request), descriptors[0], link)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        os.close(descriptors[0])
        with contextlib.suppress(OSError):  # a stand-in that is gone is noticed by its silence
            link.sendall(FORKED)
        child = Child(pid, link, os.pidfd_open(pid))
        self.children[pid] = child
        self.selector.register(child.ended, selectors.EVENT_READ, child)
        self.selector.register(link, selectors.EVENT_READ, child)

    def _told(self, child: Child) -> None:
        """A stand-in passes signals on; one that is gone takes its worker with it."""
        try:
            numbers = child.link.recv(64)
        except OSError:
            numbers = b""
        if not numbers:
            _signal_group(child.pid, signal.SIGKILL)
            self.selector.unregister(child.link)
        for number in numbers:
            os.kill(child.pid, number)

    def _ended(self, child: Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        del self.children[child.pid]
        self.selector.unregister(child.ended)
        os.close(child.ended)
        if child.link in self.selector.get_map():
            self.selector.unregister(child.link)
        with contextlib.suppress(OSError):
            child.link.sendall(STATUS.pack(status))
        child.link.close()

    def _become_worker(self, request: dict[str, Any], log: int, link: socket.socket) -> NoReturn:
        """In the child: all that a fresh process would have, then the worker's own entry."""
        try:
            launcher = os.getppid()
            os.setsid()
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            link.close()  # so that its other end sees when we and the nursery are gone
            self.selector.close()
            self.listener.close()
            for sibling in self.children.values():
                sibling.link.close()
                os.close(sibling.ended)
            for number in FORWARDED:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            gc.unfreeze()
            os.environ.clear()
            os.environ.update({as_text(key): as_text(value) for key, value in request["environment"].items()})
            os.environ[LAUNCHER] = str(launcher)
            os.chdir(as_text(request["folder"]))
            command = [as_text(word) for word in request["command"]]
            sys.argv = ["dtrain.engine.worker", *command]
            sys.orig_argv = [sys.executable, *WORKER_COMMAND, *command]
            show(sys.orig_argv)
            faults.begin_anew()
            from .. import worker  # it is there already

            worker.run()
        except Exception:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)


def show(words: list[str]) -> None:
    """Write a worker's command line and place over our own, for `ps`, `pkill -f` and `ps e` to see (proc(5), stat).

    The launcher has left room: a blank argument, and a variable that nobody reads.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, arguments_end, variables = (int(fields[at]) for at in (45, 46, 47))
    size = arguments_end - arguments
    ctypes.memmove(arguments, os.fsencode("\0".join(words))[: size - 1].ljust(size, b"\0"), size)
    room = ROOM_VARIABLE.encode() + b"=" + ROOM
    at = Path("/proc/self/environ").read_bytes().find(room)
    if at >= 0:
        place = [f"{key}={os.environ[key]}" for key in PLACE if key in os.environ]
        ctypes.memmove(variables + at, os.fsencode("\0".join([*place, "_="])).ljust(len(room)), len(room))


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        os.kill(pid, number)  # it has not come to lead its group yet; not reaped, so the number is still its own


def _uid_of(link: socket.socket) -> int:
    """Who is at the other end (unix(7), SO_PEERCRED)."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def main(arguments: list[str]) -> NoReturn:
    """Serve the launcher's socket."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # it ends with the launcher, after the workers
    for module in IMPORTED:
        importlib.import_module(module)
    Nursery(socket.socket(fileno=int(arguments[0]))).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
