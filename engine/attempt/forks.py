"""The nursery seen from the launcher: started before the launcher imports torch itself, asked, ended. No torch here."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from ...planners.machine import threads_each
from ...specs.models import Spec
from ..process import LAUNCHER, streaming
from .standin import LENGTH
from .standin import __file__ as standin_file

READY_TIMEOUT_S = 60.0
"""Longest wait for the nursery to have imported what the workers need; a file system far away takes its time."""
ROOM_VARIABLE = "DTRAIN_ROOM"
ROOM = b" " * 1024
"""Blanks in the nursery's command line and environment, over which a worker writes its own."""


def worker_environment(spec: Spec) -> dict[str, str]:
    """What the workers, and the nursery before it imports torch, get to see beside our own environment."""
    threads = threads_each(len(os.sched_getaffinity(0)), spec.cluster.workers_per_node)
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        **streaming(os.environ),
    }


class NurseryProcess:
    """The process that forks the workers; without it they are started one by one. Use as a context manager."""

    def __init__(self, spec: Spec, program: tuple[str, ...] = ("-P", "-m", "dtrain.engine.attempt.nursery")) -> None:
        """Prepare; entering starts it."""
        self.program = program
        self.environment = worker_environment(spec)
        self.name = f"dtrain-{secrets.token_hex(16)}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> NurseryProcess:
        # A name without a file: nothing stays behind, whoever is killed. Who comes is asked for the user id.
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{self.name}")
            listener.listen(256)
            self._process = subprocess.Popen(
                [sys.executable, *self.program, str(listener.fileno()), ROOM],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(listener.fileno(),),
                env={
                    **os.environ,
                    **self.environment,
                    LAUNCHER: str(os.getpid()),
                    ROOM_VARIABLE: ROOM.decode(),
                },
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def pid(self) -> int | None:
        """Its process, while there is one."""
        return self._process.pid if self._process is not None else None

    def is_there(self) -> bool:
        """Ask it, and wait until it is ready; one that does not answer is ended, and never asked again."""
        if self._process is None:
            return False
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as link:
            link.settimeout(READY_TIMEOUT_S)
            link.connect(f"\0{self.name}")
            link.sendall(LENGTH.pack(0))
            if link.recv(1):
                return True
        self.__exit__()
        return False

    def give_up(self) -> None:
        """End it and those that stand in for its workers, whatever state they are in."""
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if self.name in process.cmdline():
                    process.kill()
        self.__exit__()

    def command(self, job: Path) -> list[str]:
        """What the elastic agent is to start for each rank."""
        return [sys.executable, "-I", "-S", standin_file, self.name, str(job)]


def plain_command(job: Path, module: str = "dtrain.engine.worker") -> list[str]:
    """A worker that imports everything itself."""
    return [sys.executable, "-P", "-m", module, str(job)]
