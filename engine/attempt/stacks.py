"""The stack that a worker writes into its log at its end, as Python's faulthandler writes it, and how it is read."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

QUIET_S = 0.1
"""A dump is whole when nothing was seen of the signal for so long: between its waiting and its handler's mark there is
a moment without either."""
STARVED_S = 2.0
"""No longer is waited for the signal to be taken, or for the dump to be whole, on a machine that is busy."""

TAIL_BYTES = 256 * 1024
"""The dump of a worker with some hundred threads is not longer than this."""
MAX_FRAMES = 30
_CRASH, _CURRENT, _OTHER = "Fatal Python error", "Current thread ", "Thread "


def last_stack(log: Path) -> list[str]:
    """Frames of the thread that trains, of a crash those of the one that crashed, the innermost first.

    None where the log has no stack. `faulthandler` writes the newest thread first, so the main thread last; which one
    got the signal says nothing.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    crash = max((at for at, line in enumerate(lines) if line.startswith(_CRASH)), default=None)
    heads = (_OTHER, _CURRENT) if crash is None else (_CURRENT,)
    begins = [at for at, line in enumerate(lines) if line.startswith(heads) and at > (crash or -1)]
    frames: list[str] = []
    for line in lines[begins[-1] + 1 :] if begins else []:
        if not line.startswith("  ") or len(frames) == MAX_FRAMES:
            break
        frames.append(line.strip())
    return frames


def end_with_stack(pid: int) -> None:
    """Have a worker write the stacks of its threads into its log, and kill it."""
    with contextlib.suppress(ProcessLookupError):
        blocked = _in_handler(pid)
        os.kill(pid, signal.SIGUSR2)  # faulthandler does that
        begun = seen = time.monotonic()
        while (now := time.monotonic()) < begun + STARVED_S and now < seen + QUIET_S:
            os.kill(pid, signal.SIGCONT)  # one that was stopped, or is again, writes nothing until it goes on
            if _is_pending(pid) or _in_handler(pid) - blocked:
                seen = time.monotonic()
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)


def _is_pending(pid: int) -> bool:
    """Tell whether the signal waits for the process to be given a processor."""
    return any(_masks(Path(f"/proc/{pid}/status"), "SigPnd:", "ShdPnd:"))


def _in_handler(pid: int) -> set[str]:
    """Threads of a process that have the signal blocked, as one is while it writes the dump."""
    return {task.parent.name for task in Path(f"/proc/{pid}/task").glob("*/status") if any(_masks(task, "SigBlk:"))}


def _masks(status: Path, *names: str) -> Iterator[bool]:
    """Whether SIGUSR2 is in the named masks of a process or of a thread (proc(5), status)."""
    with contextlib.suppress(OSError):
        for line in status.read_text().splitlines():
            if line.startswith(names):
                yield bool(int(line.split()[1], 16) >> (signal.SIGUSR2 - 1) & 1)
