"""What the launcher tells the workers of one attempt, and what they tell it back, as JSON files."""

from __future__ import annotations

import contextlib
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..tiers.format.jsonfile import Unreadable, dumps, read, replace
from ..tiers.format.layout import RunDir
from ..tiers.memory.slots import memory_dir
from ..tiers.reading.recovery import Candidate, candidate_from_json


@dataclass(frozen=True)
class Job:
    """One attempt: where, and what to continue from. No candidates: begin at step 0."""

    run_dir: str
    memory_dir: str
    run_id: str
    attempt: int
    import_paths: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    skipped: tuple[dict[str, Any], ...] = ()
    node: int = 0
    nodes: int = 1
    """Of this attempt."""

    @property
    def run(self) -> RunDir:
        """The run's files, as this node sees them."""
        return RunDir(Path(self.run_dir), self.node)

    def write(self) -> Path:
        """Write the job file of this attempt."""
        path = self.run.job(self.attempt)
        replace(path, dumps({**asdict(self), "candidates": [c.to_json() for c in self.candidates]}))
        return path


def read_job(path: Path) -> Job:
    """Read a job file."""
    value = read(path)
    value["candidates"] = tuple(candidate_from_json(item) for item in value["candidates"])
    return Job(**{**value, "import_paths": tuple(value["import_paths"]), "skipped": tuple(value["skipped"])})


CONSEQUENCES = (
    "gloo",
    "nccl",
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "tcpstore",
)


@dataclass(frozen=True)
class WorkerError:
    """What ended a worker, in its own words."""

    rank: int
    kind: str
    message: str
    trace: str
    exit_code: int
    final: bool
    time: float

    @property
    def is_consequence(self) -> bool:
        """Tell whether it says no more than that another rank was lost."""
        text = self.message.lower()
        return self.kind in ("DistBackendError", "DistNetworkError") or (
            self.kind == "RuntimeError" and any(word in text for word in CONSEQUENCES)
        )


def write_error(run: RunDir, attempt: int, rank: int, error: BaseException, exit_code: int, *, final: bool) -> None:
    """Leave a note for the launcher; `final` says that a restart would end the same way."""
    trace = "".join(traceback.format_exception(error))
    note = WorkerError(rank, type(error).__name__, str(error), trace, exit_code, final, time.time())
    with contextlib.suppress(OSError):  # the exit code tells the launcher, if not in so many words
        _leave(run, run.error(attempt, rank), dumps(asdict(note)))


def take_error_back(run: RunDir, attempt: int, rank: int) -> None:
    """Remove the note of a rank that goes on after all."""
    for path in (run.error(attempt, rank), _in_memory(run, run.error(attempt, rank))):
        with contextlib.suppress(OSError):
            path.unlink()


def read_error(run: RunDir, attempt: int, rank: int) -> WorkerError | None:
    """The note a worker left, if it did."""
    try:
        return WorkerError(**_left(run, run.error(attempt, rank)))
    except (Unreadable, TypeError):
        return None


@dataclass(frozen=True)
class Result:
    """How an attempt ended for rank 0: after which step, with what state."""

    step: int
    state_digest: str | None
    loss: float | None
    preempted: bool
    device_bytes: int | None = None
    """Peak of memory on the rank that took the most, as `footprint` counts it; None: not known."""


def write_result(run: RunDir, attempt: int, result: Result) -> None:
    """Rank 0 says that the attempt ended as it should."""
    _leave(run, _result(run, attempt), dumps(asdict(result)))


def read_result(run: RunDir, attempt: int) -> Result | None:
    """The result of an attempt, if it ended as it should."""
    try:
        return Result(**_left(run, _result(run, attempt)))
    except (Unreadable, TypeError):
        return None


def _result(run: RunDir, attempt: int) -> Path:
    return run.attempt(attempt) / "result.json"


def _in_memory(run: RunDir, path: Path) -> Path:
    return memory_dir(run).path / f"{path.parent.name}.{path.name}"


def _leave(run: RunDir, path: Path, data: bytes) -> None:
    """Write a message for the launcher; beside the snapshots in memory where the run's folder takes no more."""
    try:
        replace(path, data)
    except OSError:
        replace(_in_memory(run, path), data)


def _left(run: RunDir, path: Path) -> dict[str, Any]:
    try:
        return read(path)
    except Unreadable:
        return read(_in_memory(run, path))
