"""A rank that is on its way out and gets no further: its exception is known before it has arrived.

Whoever fails in a pass and, on the way out, waits for the others (a barrier in a `finally`, a shutdown that is
collective) stands still like those that wait for him, and its counter says nothing. So a thread looks now and then
whether the threads that do the passes are in the middle of an exception; one that is there at two looks in a row is
left as a note, and taken back when the program has dealt with it after all.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from ..tiers.memory.heartbeat import Heartbeat

LOOK_S = 0.5


class WayOut:
    """Looks for an exception that does not come to its end. Use as a context manager around what may raise."""

    def __init__(
        self, heartbeat: Heartbeat, leave: Callable[[BaseException], None], take_back: Callable[[], None]
    ) -> None:
        """Watch the thread that makes this. `leave` writes the note of an exception, `take_back` removes it."""
        self._heartbeat, self._leave, self._take_back = heartbeat, leave, take_back
        self._thread = threading.Thread(target=self._run, name="dtrain-way-out", daemon=True)
        self._watched = threading.get_ident()
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._seen: BaseException | None = None
        self._left = False

    def __enter__(self) -> WayOut:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """What is raised from here on has arrived; the note is for whoever gets it to write."""
        self._stop.set()
        with self._lock:
            self._seen = None

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            with self._lock:
                if not self._stop.is_set():
                    self.look()

    def look(self) -> None:
        """Look once."""
        found = self._active()
        same, self._seen = found is not None and found is self._seen, found
        if same and not self._left:
            assert found is not None
            self._leave(found)
            self._heartbeat.raising(True)
            self._left = True
        elif self._left and not same:
            self._heartbeat.raising(False)
            self._take_back()
            self._left = False

    def _active(self) -> BaseException | None:
        """The exception of the thread that trains, or of one that autograd has made for a backward pass on a device.

        Threads of Python's own that do other things may handle exceptions for as long as they like.
        """
        others = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
        for ident, found in sys._current_exceptions().items():
            error = found[1] if isinstance(found, tuple) else found  # a triple before Python 3.12
            if isinstance(error, Exception) and (ident == self._watched or ident not in others):
                return error
        return None
