"""Ctrl-C from the first line of a command to its last: one line and 130 until it works, nothing once it is done."""

from __future__ import annotations

import os
import signal
from types import FrameType

# Nothing that takes time is imported here: until `heed` was called, Ctrl-C prints a traceback.


def heed() -> None:
    """From now on Ctrl-C ends the command at once, unless a shell has it ignored in the background.

    An exception would not do: an import that is cut short leaves modules half made, and callbacks swallow it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


def leave(number: int, frame: FrameType | None) -> None:
    """Nothing has begun yet: out at once."""
    os.write(2, b"interrupted\n")
    os._exit(128 + number)


def rest() -> None:
    """The answer is there and the code is known: while the interpreter is taken apart Ctrl-C would change neither."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
