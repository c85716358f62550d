"""The drainer's process, seen from the launcher: started, watched, started again, ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from ...specs.codes import Code
from ...tiers.drain.drainer import DrainJob
from ...tiers.format.jsonfile import append_event
from ...tiers.format.layout import RunDir
from ...tiers.memory.slots import MemoryDir
from .helper import Helper

DEATHS_IN_A_ROW = 5
FAR_PATIENCE_S = 180.0  # a request to an object store may wait and be sent again meanwhile
END_S = 1.0
"""Longest wait for one that was killed: it may be stuck in the kernel."""
PAUSE_S = 60.0  # after that many, before the next try
POLL_S = 0.05


class Pulse:
    """How long a process with work to do has neither used the processor nor moved a byte."""

    def __init__(self, pid: int) -> None:
        """Watch from now on."""
        self.pid = pid
        self._last: tuple[str, ...] = ()
        self._changed = time.monotonic()

    def still_s(self, *, busy: bool) -> float:
        """Seconds without a change of its counters (proc(5): stat, io); 0 while it has nothing to do."""
        now = time.monotonic()
        try:
            ticks = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            moved = Path(f"/proc/{self.pid}/io").read_text()
        except OSError:
            return 0.0
        if not busy or (*ticks, moved) != self._last:
            self._last, self._changed = (*ticks, moved), now
        return now - self._changed


class DrainerProcess:
    """The drainer of this node; dead or stuck, it is started again, and training never waits for a dead one."""

    def __init__(self, run: RunDir, job: DrainJob, patience_s: float, on_failed_tier: Callable[[], None]) -> None:
        """Prepare; `start` starts it. Without progress for `patience_s` while it has work it counts as stuck.

        `on_failed_tier` is called when it leaves because of a tier whose failure is to stop the run.
        """
        self.run, self.job, self.on_failed_tier = run, job, on_failed_tier
        far = any(tier.place.type == "object" for tier in job.tiers)
        self.patience_s = max(patience_s, FAR_PATIENCE_S) if far else patience_s
        self.memory = MemoryDir(Path(job.memory_dir))
        self.starts = 0
        self.deaths = 0
        self._paused_until: float | None = None
        self._process: Helper | None = None
        self._pulse: Pulse | None = None

    def start(self) -> None:
        """Start the process; it leaves by itself if we die."""
        self.starts += 1
        self._paused_until = None
        path = self.memory.path / "drainer.json"
        self._process = Helper(self.run, "dtrain.tiers.drain.drainer", path, self.job.to_bytes(), self.starts)
        self._pulse = Pulse(self._process.pid)

    @property
    def running(self) -> bool:
        """Tell whether the process is there."""
        return self._process is not None and self._process.ended is None

    def tend(self, attempt: int) -> None:
        """Look after it; to be called a few times a second."""
        if self.running:
            self._end_if_stuck(attempt)
            if not self.memory.pending():
                self.deaths = 0
        elif self._process is not None:
            self._bury(attempt)
        elif self._paused_until is not None:
            self._release()
            if time.monotonic() > self._paused_until:
                self._start_again(attempt)

    def _end_if_stuck(self, attempt: int) -> None:
        assert self._process is not None
        assert self._pulse is not None
        still_s = self._pulse.still_s(busy=bool(self.memory.pending()))
        if still_s > self.patience_s:
            self._tell(attempt, f"the drainer stood still for {still_s:.1f} s with a checkpoint under way; ended")
            self._process.kill(END_S)

    def _bury(self, attempt: int) -> None:
        assert self._process is not None
        code, process, self._process = self._process.ended, self._process, None
        process.end(END_S)
        if code == Code.MISSING_RESOURCE:
            self.on_failed_tier()
            return
        self.deaths += 1
        if self.deaths < DEATHS_IN_A_ROW:
            self._tell(attempt, f"the drainer ended with {_words(code)}; started again")
            self._start_again(attempt)
            return
        self._pause(attempt, f"the drainer ended with {_words(code)}, {self.deaths} times in a row")

    def _start_again(self, attempt: int) -> None:
        try:
            self.start()
        except OSError as error:
            self._pause(attempt, f"the drainer cannot be started again: {error}")

    def _pause(self, attempt: int, why: str) -> None:
        self._tell(
            attempt,
            f"{why}: no checkpoints beyond memory for {PAUSE_S:.0f} s, then another try; its log is "
            f"{self.run.drainer_log}",
        )
        self._paused_until = time.monotonic() + PAUSE_S
        self._release()

    def _release(self) -> None:
        """Nobody carries the pinned slots away now, so the workers may have them back."""
        for slot in self.memory.pending():
            slot.drain_mark.unlink(missing_ok=True)

    def _tell(self, attempt: int, detail: str) -> None:
        append_event(self.run.events, "fault", None, attempt, rank=None, kind="drainer", detail=detail)

    def stop(self, timeout_s: float, far_timeout_s: float | None = None) -> bool:
        """Let it finish what is pinned; False when it died, stood still or took too long, and was killed.

        Once nothing is pinned in memory any more it may fill the tiers beyond the first for `far_timeout_s` at most,
        counted from now, and is then ended all the same.
        """
        if self._process is None:
            return True
        process, self._process = self._process, None
        assert self._pulse is not None
        process.say(b"stop\n")
        deadline = time.monotonic() + timeout_s
        far_deadline = time.monotonic() + (timeout_s if far_timeout_s is None else far_timeout_s)
        while process.ended is None:
            if time.monotonic() > far_deadline and not self.memory.pending():
                process.kill(END_S)
                process.end(END_S)
                return True
            if time.monotonic() > deadline or self._pulse.still_s(busy=True) > self.patience_s:
                process.kill(END_S)
                break
            time.sleep(POLL_S)
        process.end(END_S)
        return process.ended == 0


def _words(code: int | None) -> str:
    assert code is not None
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
