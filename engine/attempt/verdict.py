"""What ended an attempt, and whether a restart can help."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...specs.codes import Code
from ...specs.models import Spec
from ...tiers.format.layout import RunDir
from ..job import WorkerError, read_error
from .agent import Ended
from .supervise import Hang

CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")
"""Signals that a process brings upon itself."""
SAME_FAULTS = 3
"""The same fault as often as this in a row, without a new step between, comes again at every restart."""


@dataclass(frozen=True)
class Fault:
    """The first cause, in words a person can use."""

    rank: int | None
    kind: str
    detail: str
    final: bool
    code: Code
    node: int | None = None
    """The node, where no rank of it is to blame."""
    signal: str | None = None
    """What ended the rank, where it was a signal."""

    @property
    def same(self) -> tuple[object, ...]:
        """What two faults have in common that are one and the same, again; an exception strikes now this rank first,
        now that one."""
        if self.kind == "exception":
            return self.kind, self.detail.partition(": ")[2]
        return self.kind, self.rank, self.node, self.signal

    @property
    def is_own(self) -> bool:
        """Tell whether the program failed by itself; a kill, a lost node or a standstill may come from outside."""
        return self.kind in ("exception", "exited") or self.signal in CRASHES

    def node_of(self, spec: Spec) -> int | None:
        """The node that it happened on."""
        return self.node if self.rank is None else self.rank // spec.cluster.workers_per_node


@dataclass
class RestartBudget:
    """How many failures in a row are allowed; a step further than any before starts the count anew."""

    allowed: int
    failures: int = 0
    progressed: bool = False
    alike: int = 0
    """How many of the last failures were the same."""
    first: tuple[Fault, int] | None = None
    """The first of those, and its attempt."""

    def count(self, fault: Fault, attempt: int, *, progress: bool) -> None:
        """An attempt has failed, after it made progress or not."""
        again = not progress and self.first is not None and self.first[0].same == fault.same
        self.alike = self.alike + 1 if again else 1
        self.first = self.first if again else (fault, attempt)
        self.failures = 1 if progress else self.failures + 1
        self.progressed = self.progressed or progress

    def why_no_restart(self, fault: Fault) -> str | None:
        """The reason to give up, or None when a restart may help."""
        if fault.final:
            return "a restart would end the same way"
        if fault.is_own and not self.progressed:
            return "no step was finished before it, so a restart would end the same way"
        if self.failures > self.allowed:
            if self.allowed == 0:
                return "cluster.max_restarts is 0"
            return f"{self.failures} failures in a row without a new step between them, {self.allowed} are allowed"
        if self.alike >= SAME_FAULTS:
            return f"the same {self.alike} times in a row without a new step between them"
        return None


def find_fault(run: RunDir, attempt: int, ended: Ended, hangs: Sequence[Hang], world: int) -> Fault:
    """Name the rank that failed first, by the notes that the ranks have left."""
    return judge(ended, notes_of(run, attempt, range(world)), hangs, world)


def notes_of(run: RunDir, attempt: int, ranks: Iterable[int]) -> list[WorkerError]:
    """What these ranks of one node have left, the oldest first."""
    errors = [error for rank in ranks if (error := read_error(run, attempt, rank)) is not None]
    return sorted(errors, key=lambda error: error.time)


def judge(ended: Ended, errors: Sequence[WorkerError], hangs: Sequence[Hang], world: int) -> Fault:
    """Name the rank that failed first; what others say of a lost connection is only a consequence.

    `errors` come in the order in which they became known: the clocks of two nodes do not compare.
    """
    if hangs:
        return _stood_still(hangs[0], errors)
    causes = sorted((e for e in errors if not e.is_consequence), key=lambda e: not e.final)
    if causes and causes[0].final:
        return _from_error(causes[0])
    silent = {rank: code for rank, code in ended.exit_codes.items() if all(e.rank != rank for e in errors)}
    told_to_end = {rank: code for rank, code in silent.items() if code == -signal.SIGTERM}
    killed = {rank: code for rank, code in silent.items() if rank not in told_to_end}
    return _killed(killed) or _raised(causes) or _killed(told_to_end) or _left(ended, silent, errors, world)


def _stood_still(hang: Hang, errors: Sequence[WorkerError]) -> Fault:
    """A rank that had to be ended; it may have stood still on the way out of an exception."""
    own = next((error for error in errors if error.rank == hang.rank and not error.is_consequence), None)
    where = f"in step {hang.step}" if hang.phase is None else f"before its first step, {hang.phase}"
    met = f", on the way out of {own.kind}: {own.message}" if own is not None and hang.raising else ""
    did = "took processor time and came no further" if hang.spins else "stood still"
    detail = f"rank {hang.rank} {did} for {hang.silent_s:.1f} s {where}{met}; its stack is in its log"
    return Fault(hang.rank, "hang", detail, final=False, code=Code.FAILED)


def _killed(silent: dict[int, int]) -> Fault | None:
    """A rank that a signal ended before it could say anything; SIGTERM may be the agent's, after another's fault."""
    rank = next((rank for rank, code in sorted(silent.items()) if code < 0), None)
    if rank is None:
        return None
    name = _signal_name(-silent[rank])
    detail = f"rank {rank} was killed by {name}"
    return Fault(rank, "killed", detail, final=False, code=Code.FAILED, signal=name)


def _raised(causes: Sequence[WorkerError]) -> Fault | None:
    return _from_error(causes[0]) if causes else None


def _left(ended: Ended, silent: dict[int, int], errors: Sequence[WorkerError], world: int) -> Fault:
    """A rank that left without a word, or, failing that, the first that complained about it."""
    gone = [rank for rank in range(world) if rank not in ended.exit_codes]
    if gone and (errors or not ended.exit_codes):
        detail = f"rank {gone[0]} left with exit code 0 before the last step"
        return Fault(gone[0], "exited", detail, final=False, code=Code.FAILED)
    if silent:
        rank, code = sorted(silent.items())[0]
        return Fault(rank, "exited", f"rank {rank} left with exit code {code}", final=False, code=Code.FAILED)
    return _from_error(errors[0])


def _from_error(error: WorkerError) -> Fault:
    detail = f"rank {error.rank}: {error.kind}: {error.message}"
    return Fault(error.rank, "exception", detail, final=error.final, code=Code(error.exit_code))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
