"""Supervision: a rank that makes no progress is named, its stack is written down, and it is ended.

In its steps a rank has a counter that it raises at every pass. Before the first one it says which part of its start it
has come to, and has as long as it likes while it is seen to move bytes. Processor time alone may be a compiler at work
or a loop that never ends, so it counts for so long only (`CPU_ALONE`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from ...tiers.memory.heartbeat import DONE_STEP, Beat, Phase, read_heartbeats, state_of
from ...tiers.memory.slots import MemoryDir
from .activity import Activity, Signs
from .stacks import end_with_stack
from .stragglers import Stragglers, Work
from .ticker import Ticker

POLL_S = 0.2
PATIENCE = 10  # a rank may take this many times its longest pass so far
CPU_ALONE = 5  # times the limit of a start that processor time counts for something, where nothing else is seen
GRACE = 3  # times the limit, for ranks that lost another one, and for those who are to notice that all have ended
HALTED = ("T", "t", "D")
"""States of a process that waits for no other rank: stopped, traced, in a call that nothing interrupts (proc(5))."""


@dataclass(frozen=True)
class Sight:
    """A rank's counter as it is seen now, of this node or told by another."""

    rank: int
    pid: int
    count: int
    step: int
    alive: bool
    phase: int = 0
    """Before its first step: a `Phase`."""
    signs: int = 0
    """How often it was seen to do something meanwhile."""
    moved: int = 0
    """How often that was more than processor time."""
    raising: bool = False
    """It is on the way out of an exception."""
    halted: bool = False
    """Its process was stopped, or waits for a disk: not for another rank."""
    busy_s: float = 0.0

    def to_json(self) -> list[float]:
        """Form for messages."""
        return [
            self.rank, self.pid, self.count, self.step, int(self.alive), self.phase, self.signs, self.moved,
            int(self.raising), int(self.halted), self.busy_s,
        ]  # fmt: skip

    @property
    def is_marked(self) -> bool:
        """Tell whether it stands still for a reason of its own, whatever the others do."""
        return self.raising or self.halted

    @property
    def starts(self) -> bool:
        """Tell whether it has not come to its first step."""
        return self.step == 0

    @property
    def at(self) -> tuple[int, ...]:
        """What changes when it makes progress, processor time left aside."""
        return (self.count, self.phase, self.moved) if self.starts else (self.count,)


def sight_from(numbers: Sequence[float]) -> Sight:
    """What another node says of one of its ranks; raises ValueError for what is none."""
    rank, pid, count, step, alive, phase, signs, moved, raising, halted = map(int, numbers[:-1])
    return Sight(
        rank, pid, count, step, bool(alive), phase, signs, moved, bool(raising), bool(halted), float(numbers[-1])
    )


@dataclass
class _Seen:
    """What is known of one rank's progress, in the watcher's own monotonic time."""

    beat: Sight
    counted: float
    """When the counter was last raised."""
    moved: float
    """When it last made progress; before its first step that is more than the counter."""
    changed: float
    """When there was last any sign of it."""
    longest: float = 0.0

    def take(self, beat: Sight, now: float) -> None:
        """See it again."""
        if self.beat.count != beat.count:
            # From warm-up to warm-up pass, or from step to step: loading lies between the two and teaches nothing.
            if self.beat.count > 0 and self.beat.starts == beat.starts:
                self.longest = max(self.longest, now - self.counted)
            self.counted = now
        if self.beat.at != beat.at:
            self.moved = self.changed = now
        if self.beat.signs != beat.signs:
            self.changed = now
        self.beat = beat

    def silent_s(self, now: float) -> float:
        """How long it has made no progress in its steps."""
        return now - self.counted

    def spins(self, now: float, startup_s: float) -> bool:
        """Tell whether it takes processor time in its start, and has long done nothing else."""
        return self.beat.starts and now - self.moved > CPU_ALONE * startup_s and now - self.changed <= startup_s

    def since(self, now: float, startup_s: float) -> float:
        """From when on nothing that it did in its start counts: of one that spins all the processor time does not."""
        return self.moved if self.spins(now, startup_s) else self.changed


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
    phase: Phase | None = None
    """What it was doing before its first step."""
    raising: bool = False
    """It was on the way out of an exception."""
    spins: bool = False
    """Before its first step it took processor time and came no further."""


class Eyes:
    """What is seen of the ranks of this node."""

    def __init__(self, memory: MemoryDir, ranks: Sequence[int] = ()) -> None:
        """Look at the counters in this `memory`; `ranks` are those that should be there, counter or not."""
        self.memory, self.ranks = memory, ranks
        self._activity = Activity()

    def look(self, now: float) -> list[Sight]:
        """All ranks, at a time (monotonic, s); one that has not even a counter is nobody's process yet."""
        beats = read_heartbeats(self.memory)
        signs = self._activity.signs([beat.pid for beat in beats if beat.step == 0], now)
        sights = [_sight(beat, signs.get(beat.pid, Signs())) for beat in beats]
        missing = set(self.ranks) - {sight.rank for sight in sights}
        return [*sights, *(Sight(rank, 0, 0, 0, alive=True) for rank in sorted(missing))]


def _sight(beat: Beat, signs: Signs) -> Sight:
    state = state_of(beat)
    return Sight(
        beat.rank, beat.pid, beat.count, beat.step, state not in (None, "Z"), beat.phase, signs.any, signs.moved,
        beat.raising, state in HALTED, beat.busy_s,
    )  # fmt: skip


class Supervisor:
    """Watches the counters of this node's ranks from a thread of the launcher. Use as a context manager."""

    def __init__(
        self, eyes: Eyes, timeout_s: float, startup_s: float, on_unnoticed: Callable[[], None] = lambda: None,
        elsewhere: Elsewhere | None = None, *, judges: bool = True, stragglers: Stragglers | None = None,
    ) -> None:  # fmt: skip
        """Watch with these time-outs: between passes, and without any sign before the first step.

        `on_unnoticed` is called when all ranks have ended and we still watch: whoever was to tell of it stands still.
        One supervisor of all nodes judges which rank the others wait for; it is told of the ranks `elsewhere`.
        `stragglers` looks for ranks that are slow, though they do not stand still.
        """
        self.eyes, self.timeout_s, self.startup_s, self.on_unnoticed = eyes, timeout_s, startup_s, on_unnoticed
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
        mine = self.eyes.look(now)
        self._look_for_end([sight for sight in mine if sight.pid], now)
        others = self.elsewhere.sights() if self.judges else None
        if others is None:
            return
        sights = [*mine, *others]
        if self.stragglers is not None:
            self.stragglers.see({sight.rank: Work(sight.step, sight.busy_s) for sight in sights}, now)
        for beat in sights:
            seen = self._seen.get(beat.rank)
            if seen is None or seen.beat.pid != beat.pid:
                self._seen[beat.rank] = _Seen(beat, now, now, now)
            else:
                seen.take(beat, now)
        stuck = self._stuck_at_start(now) or self._stuck_at_work(now)
        if stuck is not None:
            self._end(stuck, now)

    def _look_for_end(self, sights: Sequence[Sight], now: float) -> None:
        if not sights or any(sight.alive for sight in sights):
            self._all_ended = None
        elif self._all_ended is None:
            self._all_ended = now
        elif now - self._all_ended > GRACE * self.timeout_s:
            self._all_ended = None
            self.on_unnoticed()

    def _stuck_at_work(self, now: float) -> _Seen | None:
        """The rank that the others wait for, once it has been silent for too long.

        That is one on the way out of an exception or one whose process is halted, for those that wait in a collective
        may have the same counter; else the one with the lowest.
        Nobody is looked for while one still starts. After a death the rest has time to notice it, but not for ever.
        """
        at_work = [seen for seen in self._seen.values() if 0 < seen.beat.step < DONE_STEP]
        if len(at_work) < len(self._seen):
            return None
        alive = [seen for seen in at_work if seen.beat.alive]
        grace = GRACE if len(alive) < len(at_work) else 1

        def is_silent(seen: _Seen) -> bool:
            return seen.silent_s(now) > max(self.timeout_s, PATIENCE * seen.longest) * grace

        marked = [seen for seen in alive if seen.beat.is_marked and is_silent(seen)]
        found = min(marked or alive, key=lambda seen: (seen.beat.count, seen.counted), default=None)
        return found if found is not None and is_silent(found) else None

    def _stuck_at_start(self, now: float) -> _Seen | None:
        """Of the ranks that are furthest behind in their start the one that fell silent first, once all of them have.

        One of those may wait for another (for a download, a lock), so nobody is blamed while any does something. Those
        further on wait for them.
        """
        starting = [seen for seen in self._seen.values() if seen.beat.starts and seen.beat.alive]
        if not starting:
            return None
        first = min((seen.beat.phase, seen.beat.count) for seen in starting)
        behind = [seen for seen in starting if (seen.beat.phase, seen.beat.count) == first]
        since = {seen.beat.rank: seen.since(now, self.startup_s) for seen in behind}
        if any(now - moment <= self.startup_s for moment in since.values()):
            return None
        return min(behind, key=lambda seen: (not seen.beat.is_marked, since[seen.beat.rank]))

    def _end(self, seen: _Seen, now: float) -> None:
        beat = seen.beat
        phase = Phase(beat.phase) if beat.starts else None
        silent_s = now - seen.since(now, self.startup_s) if beat.starts else seen.silent_s(now)
        spins = seen.spins(now, self.startup_s)
        self.hangs.append(Hang(beat.rank, beat.step, silent_s, phase, beat.raising, spins))
        if not self.elsewhere.end_rank(beat.rank):
            end_rank(beat)
        self._seen.clear()


def end_rank(sight: Sight) -> None:
    """End a rank of this node, its stack written down if it has come so far."""
    if sight.pid:
        end_with_stack(sight.pid)
        return
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RANK") == str(sight.rank):
                process.kill()
