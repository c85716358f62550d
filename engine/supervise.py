"""Supervision: a rank whose counter stands still is named, its stack is written down, and it is ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..tiers.heartbeat import DONE_STEP, Beat, is_alive, read_heartbeats
from ..tiers.memory import MemoryDir
from .stragglers import Stragglers, Work
from .ticker import Ticker

POLL_S = 0.2
PATIENCE = 10  # a rank may take this many times its longest pass so far
GRACE = 3  # times the limit, for ranks that lost another one, and for those who are to notice that all have ended
STACK_S = 0.3  # time for the stack to reach the log
STARVED_S = 2.0  # and before that for the signal to reach a process on a machine that is busy


@dataclass(frozen=True)
class Sight:
    """A rank's counter as it is seen now, of this node or told by another."""

    rank: int
    pid: int
    count: int
    step: int
    alive: bool
    busy_s: float = 0.0


@dataclass
class _Seen:
    """What is known of one rank's counter, in the watcher's own monotonic time."""

    beat: Sight
    changed: float
    longest: float = 0.0


class Elsewhere:
    """The ranks of other nodes; of a run on one node there are none."""

    def sights(self) -> list[Sight] | None:
        """Their counters; None while a node that should tell of its own does not."""
        return []

    def end_rank(self, rank: int) -> bool:
        """Have a rank ended that stands still, its stack written down; False when it is one of this node."""
        return False


@dataclass(frozen=True)
class Hang:
    """A rank that was ended because it stood still."""

    rank: int
    step: int
    silent_s: float


class Supervisor:
    """Watches the counters of this node's ranks from a thread of the launcher. Use as a context manager."""

    def __init__(
        self, memory: MemoryDir, timeout_s: float, on_unnoticed: Callable[[], None] = lambda: None,
        elsewhere: Elsewhere | None = None, *, judges: bool = True, stragglers: Stragglers | None = None,
    ) -> None:  # fmt: skip
        """Watch with this time-out.

        `on_unnoticed` is called when all ranks have ended and we still watch: whoever was to tell of it stands still.
        One supervisor of all nodes judges which rank the others wait for; it is told of the ranks `elsewhere`.
        `stragglers` looks for ranks that are slow, though they do not stand still.
        """
        self.memory, self.timeout_s, self.on_unnoticed = memory, timeout_s, on_unnoticed
        self.elsewhere, self.judges = elsewhere or Elsewhere(), judges
        self.stragglers = stragglers
        self.hangs: list[Hang] = []
        self._seen: dict[int, _Seen] = {}
        self._all_ended: float | None = None
        self._before = time.monotonic()
        self._ticker = Ticker("dtrain-supervisor", POLL_S, self._tick)

    def __enter__(self) -> Supervisor:
        self._before = time.monotonic()
        self._ticker.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._ticker.__exit__()

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._before > 5 * POLL_S:  # we were stopped ourselves, or starved: nobody's silence counts
            self._seen.clear()
            self._all_ended = None
        self._before = now
        self._look(now)

    def _look(self, now: float) -> None:
        beats = read_heartbeats(self.memory)
        self._look_for_end(beats, now)
        others = self.elsewhere.sights() if self.judges else None
        if others is None:
            return
        sights = [*map(_sight, beats), *others]
        if self.stragglers is not None:
            self.stragglers.see({sight.rank: Work(sight.step, sight.busy_s) for sight in sights}, now)
        for beat in sights:
            seen = self._seen.get(beat.rank)
            if seen is None or seen.beat.pid != beat.pid:
                self._seen[beat.rank] = _Seen(beat, now)
            elif seen.beat.count != beat.count:
                # From warm-up to warm-up pass, or from step to step: loading lies between the two and teaches nothing.
                if seen.beat.count > 0 and (seen.beat.step > 0) == (beat.step > 0):
                    seen.longest = max(seen.longest, now - seen.changed)
                seen.beat, seen.changed = beat, now
            else:
                seen.beat = beat
        behind, bereft = self._behind()
        if behind is None:
            return
        limit = max(self.timeout_s, PATIENCE * behind.longest) * (GRACE if bereft else 1)
        if now - behind.changed > limit:
            self._end(behind, now)

    def _look_for_end(self, beats: Sequence[Beat], now: float) -> None:
        if not beats or any(is_alive(beat) for beat in beats):
            self._all_ended = None
        elif self._all_ended is None:
            self._all_ended = now
        elif now - self._all_ended > GRACE * self.timeout_s:
            self._all_ended = None
            self.on_unnoticed()

    def _behind(self) -> tuple[_Seen | None, bool]:
        """The rank that the others wait for, the one with the lowest counter, and whether another rank has died.

        Nobody is looked for while one still starts. After a death the rest has time to notice it, but not for ever.
        """
        at_work = [seen for seen in self._seen.values() if 0 < seen.beat.step < DONE_STEP]
        if len(at_work) < len(self._seen):
            return None, False
        alive = [seen for seen in at_work if seen.beat.alive]
        slowest = min(alive, key=lambda seen: (seen.beat.count, seen.changed), default=None)
        return slowest, len(alive) < len(at_work)

    def _end(self, seen: _Seen, now: float) -> None:
        self.hangs.append(Hang(seen.beat.rank, seen.beat.step, now - seen.changed))
        if not self.elsewhere.end_rank(seen.beat.rank):
            end_with_stack(seen.beat.pid)
        self._seen.clear()


def _sight(beat: Beat) -> Sight:
    return Sight(beat.rank, beat.pid, beat.count, beat.step, is_alive(beat), beat.busy_s)


def sights_of(memory: MemoryDir) -> list[Sight]:
    """The counters of this node's ranks."""
    return [_sight(beat) for beat in read_heartbeats(memory)]


def end_with_stack(pid: int) -> None:
    """Have a worker write the stacks of its threads into its log, and kill it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)  # faulthandler does that
        os.kill(pid, signal.SIGCONT)  # one that was stopped writes nothing until it goes on
        deadline = time.monotonic() + STARVED_S
        while _is_pending(pid, signal.SIGUSR2) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(STACK_S)
        os.kill(pid, signal.SIGKILL)


def _is_pending(pid: int, number: int) -> bool:
    """Tell whether a signal waits for the process to be given a processor (proc(5), SigPnd and ShdPnd of status)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def sight_from(numbers: Sequence[float]) -> Sight:
    """What another node says of one of its ranks; raises ValueError for what is none."""
    rank, pid, count, step, alive = map(int, numbers[:-1])
    return Sight(rank, pid, count, step, bool(alive), float(numbers[-1]))
