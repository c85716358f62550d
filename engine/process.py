"""What holds for every process that is started here: it ends with its launcher; how its C library copies. No torch."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping

PR_SET_PDEATHSIG = 1
LAUNCHER = "DTRAIN_LAUNCHER"  # process id, told to the children

BLOCK_BYTES = 256 * 1024
"""What is copied at once: its source stays in a core's own cache for what is done with it next."""
STREAMING = {"GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={BLOCK_BYTES:#x}"}
"""Environment of a process that copies: memmove of a whole block writes to memory without reading the target first.

The C library does so by itself only for copies about as large as the last cache, and reads this when it starts. Where
it does not know the name (other processors, other libraries) it passes it over, and copies as ever.
"""


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the launcher dies; leave at once if it is dead already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.get(LAUNCHER, os.getppid())):
        os._exit(1)


def streaming(environment: Mapping[str, str]) -> dict[str, str]:
    """`STREAMING`, unless the person has tuned the same themselves; what else they have tuned stays."""
    given = environment.get("GLIBC_TUNABLES", "")
    ((name, value),) = STREAMING.items()
    if value.partition("=")[0] in given:
        return {}
    return {name: f"{given}:{value}" if given else value}
