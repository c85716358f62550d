"""A thread of the launcher that does something small again and again while the main thread is with the agent."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable


class Ticker:
    """Calls `work` every `period_s` seconds until the block is left. Use as a context manager."""

    def __init__(self, name: str, period_s: float, work: Callable[[], None]) -> None:
        """Prepare; entering starts the thread."""
        self._period_s, self._work = period_s, work
        self._stop, self._shown = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            try:
                self._work()
            except OSError:
                pass  # a disk that is full or gone: the next tick tries again
            except Exception:  # whoever watches goes on watching; a mistake of ours is shown, once
                if not self._shown:
                    traceback.print_exc()
                self._shown = True
