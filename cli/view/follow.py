"""Following a run while it goes on: a live panel on a terminal, plain lines elsewhere.

The process that drives a run starts the view in a thread of its own. It learns everything from the two files
of the run that the workers append to, so it can neither slow them nor break them, and a failure to draw never
reaches the run.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...tiers.format.jsonfile import Unreadable, read
from ...tiers.format.layout import RunDir
from .events import Level, Narrator, Note
from .figures import planned_step_s
from .format import for_terminal
from .panel import draw, step_line
from .state import RunState, integer, number
from .tail import JsonLines, last_lines

POLL_SECONDS = 0.25
PATIENCE_SECONDS = 2.0
"""How long `stop` waits for a thread that is stuck in writing to a terminal."""
LINES_PER_RUN = 20
"""Plain step lines of a whole run, at least; up to 2.5 times as many, since the interval is a round number."""
LINE_SECONDS = 60.0
"""A plain step line is due after this long in any case."""
MARKS: dict[Level, tuple[str, str]] = {
    "good": ("✓", "green"),
    "info": ("·", "cyan"),
    "warn": ("!", "yellow"),
    "bad": ("✗", "bold red"),
}
FAILURES = (Exception, SystemExit)
"""What may go wrong in drawing: rich asks the process to exit when nobody reads its output any more."""
QUIET_LEVELS: tuple[Level, ...] = ("warn", "bad")


class RunView:
    """Shows what happens in a run from now on, and keeps `state` for the summary.

    With `quiet` only faults and warnings are shown. What the files held before is not shown again; steps that
    were finished before count as repeated when they are run once more.
    """

    def __init__(
        self,
        console: Console,
        run_dir: Path,
        max_steps: int,
        plan: Mapping[str, Any],
        quiet: bool = False,
        *,
        max_restarts: int | None = None,
    ) -> None:
        self.state = RunState(run_dir, max_steps)
        self.errors: list[BaseException] = []
        """What went wrong in the view itself: the first few."""
        self._console = console
        self._planned_step_s = planned_step_s(plan)
        self._quiet = quiet
        self._max_restarts = max_restarts
        self._run = RunDir(run_dir)
        self._metrics = JsonLines(self._run.metrics, from_end=True)
        self._events = JsonLines(self._run.events, from_end=True)
        self._narrator = Narrator(self._restart_limit)
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None
        self._muted = False
        self._began = self._last_step = self._last_line = time.monotonic()
        self._line_of_attempt = 0
        self._every = line_interval(max_steps)
        self.state.take_history(last_lines(self._run.metrics))

    @property
    def skipped_lines(self) -> int:
        """Lines of the two files that could not be read."""
        return self._metrics.skipped + self._events.skipped

    def start(self) -> Self:
        """Begin to follow; a second call changes nothing."""
        if self._thread is not None:
            return self
        self._began = self._last_step = time.monotonic()
        self._guarded(self._open)
        self._thread = threading.Thread(target=self._follow, name="dtrain-view", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Take in what is left in the files, remove the panel and end; never raises, never hangs."""
        self._ending.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(PATIENCE_SECONDS)
        if not self._lock.acquire(timeout=PATIENCE_SECONDS):
            return  # the thread is stuck in a write; the terminal's lock would hold this one too
        try:
            self._guarded(self._take_news)
            live, self._live = self._live, None
            if live is not None:
                self._guarded(live.stop)
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def poll(self) -> None:
        """Take in what is new and draw it; the thread does this by itself."""
        with self._lock:
            self._guarded(self._take_news)
            self._guarded(self._redraw)

    def _follow(self) -> None:
        while not self._ending.wait(POLL_SECONDS):
            self.poll()

    def _guarded(self, action: Callable[[], None]) -> None:
        """Run one piece of the view; nothing that goes wrong in it may reach the run."""
        try:
            action()
        except FAILURES as error:
            self._note_error(error)

    def _note_error(self, error: BaseException) -> None:
        if len(self.errors) < 10:
            self.errors.append(error)
        if isinstance(error, OSError | UnicodeError | SystemExit):
            self._muted = True  # the terminal is gone or cannot write this; the files tell the rest

    def _take_news(self) -> None:
        for is_step, record in in_order(self._metrics.poll(), self._events.poll()):
            try:
                self._take_step(record) if is_step else self._take_event(record)
            except FAILURES as error:
                self._note_error(error)

    def _take_step(self, record: Mapping[str, Any]) -> None:
        if not self.state.take_step(record):
            return
        self._last_step = time.monotonic()
        if self._live is None and not self._quiet and self._line_is_due():
            self._last_line = self._last_step
            self._line_of_attempt = self.state.attempt
            self._print(Text(step_line(self.state)))

    def _take_event(self, record: Mapping[str, Any]) -> None:
        self.state.take_event(record)
        for note in self._narrator.notes(record, self.state):
            if not self._quiet or note.level in QUIET_LEVELS:
                self._say(note, number(record, "time"))

    def _line_is_due(self) -> bool:
        state = self.state
        return (
            state.step % self._every == 0
            or state.step == state.max_steps
            or state.attempt != self._line_of_attempt
            or time.monotonic() - self._last_line >= LINE_SECONDS
        )

    def _say(self, note: Note, at: float | None) -> None:
        clock = time.strftime("%H:%M:%S", time.localtime(at))
        ascii_only = self._ascii_only
        if self._live is None:
            below = f" ({note.below})" if note.below else ""
            self._print(Text(for_terminal(f"{clock} {note.text}{below}", ascii_only)))
            return
        mark, style = MARKS[note.level]
        line = Text(for_terminal(note.text, ascii_only), style="" if note.level == "info" else style)
        if note.below:
            line.append(f"\n{for_terminal(note.below, ascii_only)}", style="dim not bold")
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_row(Text(clock, style="dim"), Text(for_terminal(mark, ascii_only), style=style), line)
        self._print(grid)

    def _print(self, what: Text | Table) -> None:
        """Print above the panel, or one line that is never wrapped: logs are searched by line."""
        if self._muted:
            return
        if self._live is not None:
            self._console.print(what)
        else:
            self._console.print(what, soft_wrap=True, highlight=False)

    @property
    def _ascii_only(self) -> bool:
        return self._console.options.ascii_only

    def _open(self) -> None:
        console = self._console
        # Blocks and bars need a terminal that can move its cursor and has the characters.
        if self._quiet or not console.is_terminal or console.is_dumb_terminal or self._ascii_only:
            return
        live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=console.file is sys.stdout,
            redirect_stderr=console.file in (sys.stdout, sys.stderr),
        )
        live.start()
        self._live = live
        self._redraw()

    def _redraw(self) -> None:
        if self._live is None or self._muted:
            return
        try:
            self._draw(self._live)
        except Exception:
            # A panel that cannot be drawn would stand still and tell old news: plain lines from here on.
            live, self._live = self._live, None
            live.stop()
            raise

    def _draw(self, live: Live) -> None:
        now = time.monotonic()
        elapsed, silent = now - self._began, now - self._last_step
        live.update(draw(self._console, self.state, elapsed, silent, self._planned_step_s), refresh=True)

    def _restart_limit(self) -> int | None:
        """Restarts in a row that the spec allows, or None where it cannot be read."""
        if self._max_restarts is None:
            try:
                spec = read(self._run.spec)
            except Unreadable:
                return None
            cluster = spec.get("cluster")
            self._max_restarts = integer(cluster, "max_restarts") if isinstance(cluster, dict) else None
        return self._max_restarts


def line_interval(max_steps: int) -> int:
    """Steps between plain lines: 1, 2 or 5 times a power of ten, so that a run has some 20 to 50 lines."""
    most = max(1, max_steps // LINES_PER_RUN)
    power = int("1" + "0" * (len(str(most)) - 1))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= most)


def in_order(steps: Iterable[dict[str, Any]], events: Iterable[dict[str, Any]]) -> list[tuple[bool, dict[str, Any]]]:
    """Merge two files by time; the order within one file is kept whatever its times say. True: a step."""
    stamped: list[tuple[float, bool, dict[str, Any]]] = []
    for is_step, records in ((False, events), (True, steps)):
        latest = 0.0
        for record in records:
            latest = max(latest, number(record, "time") or 0.0)
            stamped.append((latest, is_step, record))
    stamped.sort(key=lambda item: item[0])
    return [(is_step, record) for _, is_step, record in stamped]
