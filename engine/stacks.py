"""The stack that a worker has written into its log at its end, as Python's faulthandler writes it."""

from __future__ import annotations

from pathlib import Path

TAIL_BYTES = 256 * 1024
"""The dump of a worker with some hundred threads is not longer than this."""
MAX_FRAMES = 30
_HEAD = "Current thread "


def last_stack(log: Path) -> list[str]:
    """Frames of the thread that got the signal, the innermost first; none where the log has no stack.

    `faulthandler` calls it the current thread and, of several dumps, writes the newest last. A signal to a process goes
    to its main thread, which trains.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    begins = [at for at, line in enumerate(lines) if line.startswith(_HEAD)]
    frames: list[str] = []
    for line in lines[begins[-1] + 1 :] if begins else []:
        if not line.startswith("  ") or len(frames) == MAX_FRAMES:
            break
        frames.append(line.strip())
    return frames
