"""Named fault points: where a test (or a curious operator) may make a process die, raise, leave, hang or fail.

`DTRAIN_FAULT="window.forward:rank=1:step=7"` makes rank 1 kill itself in the forward pass of step 7 of the
first attempt. Several faults are separated by `;`. Keys: `rank`, `step`, `attempt` (default 1, `*` for any), `nth`
(the n-th time the point is passed, counted from 1; default every time), `kind` (`kill`, `raise`, `exit`, `stop`,
`slow`, `enospc`, `eio`; default kill). `POINTS` are moments of a run; `OPERATIONS` are the single changes that
tiers make to a disk or an object store, and `disk.*` or `object.*` means any of them. `CHANNELS` are ways that bytes
take: `memory.copy:kind=slow:factor=10` makes this one ten times as slow. Without the variable a point costs one test
of a tuple.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..specs.codes import Code

VARIABLE = "DTRAIN_FAULT"
SLOW_SECONDS = 0.5

POINTS: dict[str, str] = {
    "worker.start": "a worker, before it joins the others",
    "restore.before": "a worker, before it loads a checkpoint",
    "restore.after": "a worker, after it has loaded one",
    "step.start": "before the first pass of a step",
    "copy.begin": "after an update, before the first slice of its snapshot",
    "copy.slice": "the copier thread, in the middle of a snapshot",
    "copy.record": "the copier thread, all slices copied, commit record not written",
    "copy.committed": "the copier thread, commit record written",
    "window.forward": "in a forward pass",
    "window.backward": "in a backward pass",
    "update.before": "after the wait for the copy, before the optimizer update",
    "update.after": "after the optimizer update",
    "peer.send": "the peer tier's process, before it sends a copy",
    "peer.sent": "the peer tier's process, a copy is with a peer",
    "evaluate.batch": "in an evaluation, before a forward pass",
    "drain.begin": "the drainer, before the first file",
    "drain.file": "the drainer, after each file",
    "drain.manifest": "the drainer, all data written, no manifest",
    "drain.rename": "the drainer, manifest written, folder not yet renamed",
    "drain.committed": "the drainer, checkpoint committed",
    "prune.renamed": "the drainer, an old checkpoint moved aside, not yet deleted",
}
OPERATIONS: dict[str, str] = {
    "disk.mkdir": "a folder is made",
    "disk.create": "a file is created",
    "disk.write": "bytes are written into a file",
    "disk.sync": "a file is made durable",
    "disk.sync_dir": "the names in a folder are made durable",
    "disk.link": "a small file gets its final name",
    "disk.rename": "a folder gets its final name; a small file, where there are no hard links",
    "disk.unlink": "a file is deleted",
    "disk.rmdir": "a folder is deleted",
    "disk.read": "a file is read back or read for a restore",
    "object.put": "an object is uploaded",
    "object.get": "an object is read",
    "object.list": "objects are listed",
    "object.delete": "an object is deleted",
}
CHANNELS: dict[str, str] = {
    "memory.copy": "the copier's way into a slot",
}
KINDS = ("kill", "raise", "exit", "stop", "slow", "enospc", "eio")
_ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO}


class InjectedFault(RuntimeError):
    """Raised by a fault of kind `raise`."""


@dataclass(frozen=True)
class Fault:
    """One fault: where, for whom, when, and what happens."""

    point: str
    rank: int | None = None
    step: int | None = None
    attempt: int | None = 1
    kind: str = "kill"
    nth: int | None = None
    factor: float | None = None
    """Of a channel: how many times as long it takes."""

    def text(self) -> str:
        """The form that the environment variable takes."""
        keys = {
            "rank": self.rank,
            "step": self.step,
            "attempt": "*" if self.attempt is None else self.attempt,
            "nth": self.nth,
            "factor": self.factor,
        }
        parts = [f"{key}={value}" for key, value in keys.items() if value is not None]
        return ":".join([self.point, *parts, f"kind={self.kind}"])

    def matches(self, point: str, step: int | None, rank: int | None, attempt: int) -> bool:
        """Tell whether this fault strikes here."""
        return (
            fnmatch.fnmatchcase(point, self.point)
            and (self.rank is None or self.rank == rank)
            and (self.step is None or self.step == step)
            and (self.attempt is None or self.attempt == attempt)
        )


def fail_at(
    rank: int | None,
    step: int | None,
    point: str,
    kind: str = "kill",
    attempt: int | None = 1,
    nth: int | None = None,
    factor: float | None = None,
) -> str:
    """Describe one fault for the environment variable; unknown points and kinds are refused."""
    if not _is_known(point):
        raise ValueError(f"no fault point {point!r}; there are {', '.join(_KNOWN)}")
    if not _fits(point, kind, factor):
        raise ValueError(f"{point} takes {'kind=slow with a factor' if point in CHANNELS else 'no factor'}")
    if kind not in KINDS:
        raise ValueError(f"no kind of fault {kind!r}; there are {', '.join(KINDS)}")
    return Fault(point, rank, step, attempt, kind, nth, factor).text()


_KNOWN = (*POINTS, *OPERATIONS, *CHANNELS)


def _is_known(point: str) -> bool:
    return any(fnmatch.fnmatchcase(name, point) for name in _KNOWN)


def _fits(point: str, kind: str, factor: float | None) -> bool:
    """Tell whether a channel is slowed by a factor, and nothing else is."""
    if point in CHANNELS:
        return kind == "slow" and factor is not None and factor >= 1
    return factor is None


def parse(text: str) -> tuple[Fault, ...]:
    """Read the environment variable's form; unknown points, keys and kinds are refused with a ValueError."""
    faults = []
    for item in filter(None, (part.strip() for part in text.split(";"))):
        point, *pairs = item.split(":")
        keys = dict(pair.partition("=")[::2] for pair in pairs)
        unknown = keys.keys() - {"rank", "step", "attempt", "kind", "nth", "factor"}
        kind = keys.get("kind", "kill")
        try:
            factor = float(keys["factor"]) if "factor" in keys else None
            if not _is_known(point) or unknown or kind not in KINDS or not _fits(point, kind, factor):
                raise ValueError(item)
            attempt = None if keys.get("attempt") == "*" else int(keys.get("attempt", "1"))
            numbers = {key: int(keys[key]) for key in ("rank", "step", "nth") if key in keys}
        except ValueError:
            raise ValueError(
                f"{VARIABLE}: cannot read {item!r}; points: {', '.join(_KNOWN)}; kinds: {', '.join(KINDS)}"
            ) from None
        faults.append(Fault(point, numbers.get("rank"), numbers.get("step"), attempt, kind, numbers.get("nth"), factor))
    return tuple(faults)


def _from_environment() -> tuple[Fault, ...]:
    """The faults that are set; a variable that cannot be read ends the process with one line and exit code 2."""
    try:
        return parse(os.environ.get(VARIABLE, ""))
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(Code.USAGE) from None


_faults = _from_environment()
_passed = [0] * len(_faults)


@dataclass
class _Place:
    """Who this process is."""

    rank: int | None = None
    attempt: int = 1

    def look(self) -> None:
        self.rank = int(os.environ["RANK"]) if "RANK" in os.environ else None
        self.attempt = int(os.environ.get("DTRAIN_ATTEMPT", "1"))


_here = _Place()
_here.look()


def begin_anew() -> None:
    """After a fork: another rank, another attempt, nothing passed yet."""
    _here.look()
    _passed[:] = [0] * len(_faults)


Watcher = Callable[[str, str, Any], None]
_watcher: Watcher | None = None


def watch(watcher: Watcher | None) -> Watcher | None:
    """Let `watcher(name, where, detail)` see every operation before it happens; it may raise an OSError.

    Returns the watcher of before. For tests within one process: recorders and scripted failures.
    """
    global _watcher
    before, _watcher = _watcher, watcher
    return before


def operation(name: str, where: object, detail: Any = None) -> None:
    """Mark one change of a disk or an object store, just before it is made."""
    if _watcher is not None:
        _watcher(name, str(where), detail)
    if _faults:
        point(name)


def point(name: str, step: int | None = None, rank: int | None = None) -> None:
    """Mark a place where a fault may strike; does nothing unless one is set for it."""
    if not _faults:
        return
    for index, fault in enumerate(_faults):
        if fault.matches(name, step, _here.rank if rank is None else rank, _here.attempt):
            _passed[index] += 1
            if fault.nth in (None, _passed[index]):
                _strike(fault)


def slowness(channel: str, step: int | None = None) -> float:
    """How many times as long a channel takes; 1 unless a fault is set for it."""
    for fault in _faults:
        if fault.factor is not None and fault.matches(channel, step, _here.rank, _here.attempt):
            return fault.factor
    return 1.0


def _strike(fault: Fault) -> None:
    if fault.kind == "raise":
        raise InjectedFault(f"fault {fault.text()}")
    if fault.kind in _ERRORS:
        number = _ERRORS[fault.kind]
        raise OSError(number, f"{os.strerror(number)} (fault {fault.text()})")
    if fault.kind == "exit":
        os._exit(0)
    if fault.kind == "slow":
        time.sleep(SLOW_SECONDS)
        return
    os.kill(os.getpid(), signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)
    time.sleep(5)  # the signal may reach another thread first
