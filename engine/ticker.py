"""A thread of the launcher that does something small again and again while the main thread is with the agent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable


class Ticker:
    """Calls `work` every `period_s` seconds until the block is left. Use as a context manager."""

    def __init__(self, name: str, period_s: float, work: Callable[[], None]) -> None:
        """Prepare; entering starts the thread."""
        self._period_s, self._work = period_s, work
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            with contextlib.suppress(OSError):  # a disk that is full or gone: the next tick tries again
                self._work()
