"""Entry point of the `dtrain` command: ready for Ctrl-C and for a closed terminal before anything large is imported."""

from __future__ import annotations

import os
import signal
from types import FrameType

# Nothing that takes time is imported here: until `main` runs, Ctrl-C prints a traceback.


def main() -> None:
    """One line for a person's mistake, an exit code for every end."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a shell may have it ignored in the background
        signal.signal(signal.SIGINT, _leave)
    from .outlet import told

    with told():
        from .commands import app

        signal.signal(signal.SIGINT, before)
        app()


def _leave(number: int, frame: FrameType | None) -> None:
    """Nothing has begun yet, and an import that is cut short leaves modules half made: out at once."""
    os.write(2, b"interrupted\n")
    os._exit(128 + number)
