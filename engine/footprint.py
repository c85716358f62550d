"""What the model, its gradients and its optimizer take of a rank's memory, as it is measured while a run goes on.

On a GPU that is the peak of what torch has allocated there (not run on one so far). On a CPU it is the peak of the
resident set without pages of files and of shared memory, so without slots, less what the interpreter, torch and the
process groups had before the model was built. The plan's `memory.device_bytes_per_rank` speaks of the same, on the rank
that takes the most.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Sets VmHWM back to what is resident now (Linux, proc_pid_clear_refs(5))."""


class Footprint:
    """Memory of this rank, counted from where it is made: before the model."""

    def __init__(self, device: torch.device) -> None:
        """Look what there is already."""
        self.cuda = device.type == "cuda"
        self._before = 0 if self.cuda else _resident("VmRSS")

    def begin(self) -> None:
        """Let the peak begin anew: what a restore took for itself is no part of it."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        with contextlib.suppress(OSError):  # without that right the peak of the start counts, too
            CLEAR_REFS.write_text(RESET_PEAK)

    def peak_bytes(self) -> int:
        """The most that there was since then; 0: the kernel does not tell."""
        return torch.cuda.max_memory_allocated() if self.cuda else max(0, _resident("VmHWM") - self._before)


def _resident(key: str) -> int:
    """A figure of /proc/self/status in bytes, without the pages of files and of shared memory that are there now.

    0 where the kernel does not tell (RssFile and RssShmem are of Linux 4.5, and other kernels leave them out).
    """
    lines = (line.split() for line in STATUS.read_text().splitlines())
    found = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1:] == ["kB"]}
    if not found.keys() >= {key, "RssFile", "RssShmem"}:
        return 0
    return found[key] - found["RssFile"] - found["RssShmem"]
