"""Named fault points: where a test (or a curious operator) may make a process die, raise, leave or hang.

`DTRAIN_FAULT="window.forward:rank=1:step=7"` makes rank 1 kill itself in the forward pass of step 7 of the
first attempt. Several faults are separated by `;`. Keys: `rank`, `step`, `attempt` (default 1, `*` for any),
`kind` (`kill`, `raise`, `exit`, `stop`, `slow`; default kill). Without the variable a point costs one test of a tuple.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

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
    "drain.begin": "the drainer, before the first file",
    "drain.file": "the drainer, after each file",
    "drain.manifest": "the drainer, all data written, no manifest",
    "drain.rename": "the drainer, manifest written, folder not yet renamed",
    "drain.committed": "the drainer, checkpoint committed",
    "prune.renamed": "the drainer, an old checkpoint moved aside, not yet deleted",
}
KINDS = ("kill", "raise", "exit", "stop", "slow")


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

    def text(self) -> str:
        """The form that the environment variable takes."""
        keys = {
            "rank": self.rank,
            "step": self.step,
            "attempt": "*" if self.attempt is None else self.attempt,
        }
        parts = [f"{key}={value}" for key, value in keys.items() if value is not None]
        return ":".join([self.point, *parts, f"kind={self.kind}"])

    def matches(self, point: str, step: int | None, rank: int | None, attempt: int) -> bool:
        """Tell whether this fault strikes here."""
        return (
            self.point == point
            and (self.rank is None or self.rank == rank)
            and (self.step is None or self.step == step)
            and (self.attempt is None or self.attempt == attempt)
        )


def fail_at(rank: int | None, step: int | None, point: str, kind: str = "kill", attempt: int | None = 1) -> str:
    """Describe one fault for the environment variable; unknown points and kinds are refused."""
    if point not in POINTS:
        raise ValueError(f"no fault point {point!r}; there are {', '.join(POINTS)}")
    if kind not in KINDS:
        raise ValueError(f"no kind of fault {kind!r}; there are {', '.join(KINDS)}")
    return Fault(point, rank, step, attempt, kind).text()


def parse(text: str) -> tuple[Fault, ...]:
    """Read the environment variable's form; unknown points, keys and kinds are refused."""
    faults = []
    for item in filter(None, (part.strip() for part in text.split(";"))):
        point, *pairs = item.split(":")
        keys = dict(pair.split("=", 1) for pair in pairs)
        unknown = keys.keys() - {"rank", "step", "attempt", "kind"}
        kind = keys.get("kind", "kill")
        if point not in POINTS or unknown or kind not in KINDS:
            raise ValueError(
                f"{VARIABLE}: cannot read {item!r}; points: {', '.join(POINTS)}; kinds: {', '.join(KINDS)}"
            )
        attempt = None if keys.get("attempt") == "*" else int(keys.get("attempt", "1"))
        faults.append(Fault(point, _number(keys.get("rank")), _number(keys.get("step")), attempt, kind))
    return tuple(faults)


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


_faults = parse(os.environ.get(VARIABLE, ""))
_rank: int | None = int(os.environ["RANK"]) if "RANK" in os.environ else None
_attempt = int(os.environ.get("DTRAIN_ATTEMPT", "1"))


def point(name: str, step: int | None = None, rank: int | None = None) -> None:
    """Mark a place where a fault may strike; does nothing unless one is set for it."""
    if not _faults:
        return
    for fault in _faults:
        if fault.matches(name, step, _rank if rank is None else rank, _attempt):
            _strike(fault)


def _strike(fault: Fault) -> None:
    if fault.kind == "raise":
        raise InjectedFault(f"fault {fault.text()}")
    if fault.kind == "exit":
        os._exit(0)
    if fault.kind == "slow":
        time.sleep(SLOW_SECONDS)
        return
    os.kill(os.getpid(), signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)
    time.sleep(5)  # the signal may reach another thread first
