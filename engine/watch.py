"""Keeps the drainer alive while the launcher's main thread is with the agent."""

from __future__ import annotations

import threading

from .drain import DrainerProcess

POLL_S = 0.25


class DrainerWatch:
    """A thread that starts the drainer again when it dies. Use as a context manager."""

    def __init__(self, drainer: DrainerProcess, attempt: int) -> None:
        """Watch `drainer` during one attempt."""
        self.drainer, self.attempt = drainer, attempt
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dtrain-drainer-watch", daemon=True)

    def __enter__(self) -> DrainerWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            self.drainer.check(self.attempt)
