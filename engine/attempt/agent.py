"""The workers of one attempt, run by torch's elastic agent.

Traps met with torch 2.13: only a worker given as a command ends in time on a signal; SIGUSR1 and SIGUSR2 must be
among the handled signals or they kill the agent and orphan the workers; the agent's own exit code says nothing; a
store reused between attempts can refuse connections. So: a command, our own signal list, our own reading of what
happened, and a new agent with a new store for every attempt.

Of several nodes each has an agent of its own that knows nothing of the others: an agent that waits for another one
waits in a library's call, up to 5 minutes for one that has died. The launchers agree instead (see `line`), and each
worker is told its place among the workers of all nodes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ...specs.models import Spec
from ...tiers.format.layout import RunDir
from ..network import meeting
from ..network.addresses import LOOPBACK_ADDRESS
from ..network.channels import STORAGE_INTERFACE
from ..process import LAUNCHER
from .forks import worker_environment

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
MONITOR_INTERVAL_S = 0.02  # a look costs a waitpid per worker; half of it passes before a death is seen


class Interrupted(BaseException):
    """A stop signal reached the launcher while no agent was running."""

    def __init__(self, number: int) -> None:
        """Remember the signal."""
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass(frozen=True)
class Ended:
    """How the workers ended: exit code of every rank that failed (negative: by signal), or the signal we got."""

    exit_codes: dict[int, int] = field(default_factory=dict)
    signal_number: int | None = None


@dataclass(frozen=True)
class Seat:
    """This node's place among all, and the store where the workers of one attempt meet; one node needs none."""

    node: int = 0
    nodes: int = 1
    host: str = ""
    port: int = 0
    compute: str = ""
    """Network interface of the compute channel."""
    storage: str = ""
    """Network interface of the storage channel."""

    def first_rank(self, workers: int) -> int:
        """The lowest rank of this node."""
        return self.node * workers

    def ranks(self, workers: int) -> range:
        """The ranks of this node."""
        return range(self.node * workers, (self.node + 1) * workers)

    def take(self, env: dict[str, str]) -> None:
        """Put a worker of this node's agent in its place among the workers of all nodes."""
        workers = int(env["LOCAL_WORLD_SIZE"])
        rank, world = self.first_rank(workers) + int(env["LOCAL_RANK"]), workers * self.nodes
        env |= dict.fromkeys(("RANK", "ROLE_RANK"), str(rank))
        env |= dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), str(world))
        env |= {"GROUP_RANK": str(self.node), "GROUP_WORLD_SIZE": str(self.nodes)}
        env |= {"MASTER_ADDR": self.host, "MASTER_PORT": str(self.port)}


ALONE = Seat()


class RankLogs(LogsSpecs):
    """Output of each rank in `logs/attempt-N/rank-R.log`."""

    def __init__(self, run: RunDir, attempt: int, seat: Seat = ALONE) -> None:
        """Log into this attempt's folder."""
        super().__init__(log_dir=str(run.attempt(attempt)))
        self.run, self.attempt, self.seat = run, attempt, seat

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """One file for both streams of a rank."""
        if self.seat.nodes > 1:
            for env in envs.values():
                self.seat.take(env)
        logs = {local: str(self.run.log(self.attempt, int(env["RANK"]))) for local, env in envs.items()}
        for env in envs.values():
            env["TORCHELASTIC_ERROR_FILE"] = ""
        nowhere = dict.fromkeys(envs, os.devnull)
        return LogsDest(stdouts=logs, stderrs=dict(logs), error_files=nowhere)

    @property
    def root_log_dir(self) -> str:
        """Folder of the logs."""
        return str(self.run.attempt(self.attempt))


class StopSignals:
    """Turns stop signals into Interrupted while no agent runs. Use as a context manager."""

    def __enter__(self) -> StopSignals:
        self.take_back()
        return self

    def __exit__(self, *_: object) -> None:
        self.ignore()  # the outcome is known: a late signal must not change the exit code

    def take_back(self) -> None:
        """Install the handlers (again): an agent leaves its own behind."""
        for number in _heeded():
            signal.signal(number, self._interrupt)

    def ignore(self) -> None:
        """The run is being brought to its end already."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)


def _heeded() -> list[signal.Signals]:
    """A hangup that was ignored when we were started (nohup) stays ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or not ignored]


def run_workers(run: RunDir, attempt: int, spec: Spec, command: list[str], seat: Seat = ALONE) -> Ended:
    """Start all workers of this node with this command and return when all have ended."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=spec.cluster.workers_per_node,
        run_id=f"{spec.name}-{attempt}",
        rdzv_backend=meeting.backend(),
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL_S,
        logs_specs=RankLogs(run, attempt, seat),
        local_addr=LOOPBACK_ADDRESS,
        signals_to_handle=",".join(number.name for number in _heeded()),
        shutdown_timeout=max(1, round(spec.cluster.shutdown_timeout)),
    )
    environment = {LAUNCHER: str(os.getpid()), "DTRAIN_ATTEMPT": str(attempt), **worker_environment(spec)}
    if seat.nodes > 1:
        environment |= {"GLOO_SOCKET_IFNAME": seat.compute, STORAGE_INTERFACE: seat.storage}
    with _quiet(run.agent_log(attempt)), _environment(environment):
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            first = seat.first_rank(spec.cluster.workers_per_node)
            return Ended({first + rank: failure.exitcode for rank, failure in error.failures.items()})
        except SignalException as error:
            return Ended(signal_number=int(error.sigval))
    return Ended()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """The agent hands its own environment to the workers."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


class _AgentLog(logging.FileHandler):
    """What it cannot write is lost, and nobody is told: it is of use only to who looks for a fault in the agent."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the name is logging's
        """Go on."""


@contextmanager
def _quiet(path: Path) -> Iterator[None]:
    """Keep what the agent logs out of the person's terminal; it goes to a file."""
    logger = logging.getLogger("torch.distributed")
    handler = _AgentLog(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers, propagate = logger.handlers[:], logger.propagate
    others = [
        logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.")
    ]
    kept = {other: (other.handlers[:], other.propagate) for other in others}
    for other in others:
        other.handlers, other.propagate = [], True
    logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        for other, (its_handlers, its_propagate) in kept.items():
            other.handlers, other.propagate = its_handlers, its_propagate
        with contextlib.suppress(OSError):
            handler.close()


def stop_signal(number: object) -> int:
    """The signal that reached another node's launcher; what is none counts as SIGTERM."""
    return number if isinstance(number, int) and number in set(signal.Signals) else int(signal.SIGTERM)
