"""Exit codes: the sysexits meanings, as schedulers read them."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """How a command ended."""

    DONE = 0
    BUG = 1
    USAGE = 2
    DAMAGED = 65
    MISSING_RESOURCE = 69
    FAILED = 70
    PREEMPTED = 75
    BAD_SPEC = 78
    INTERRUPTED = 130
