"""The stack that a worker has written into its log at its end, as Python's faulthandler writes it."""

from __future__ import annotations

from pathlib import Path

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
