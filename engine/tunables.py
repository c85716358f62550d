"""How the C library of a process that copies is to work. No torch here: it reads this when a process starts."""

from __future__ import annotations

from collections.abc import Mapping

BLOCK_BYTES = 256 * 1024
"""What is copied at once: its source stays in a core's own cache for what is done with it next."""
STREAMING = {"GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={BLOCK_BYTES:#x}"}
"""Environment of a process that copies: memmove of a whole block writes to memory without reading the target first.

The C library does so by itself only for copies about as large as the last cache, and reads this when it starts. Where
it does not know the name (other processors, other libraries) it passes it over, and copies as ever.
"""


def streaming(environment: Mapping[str, str]) -> dict[str, str]:
    """`STREAMING`, unless the person has tuned the same themselves; what else they have tuned stays."""
    given = environment.get("GLIBC_TUNABLES", "")
    ((name, value),) = STREAMING.items()
    if value.partition("=")[0] in given:
        return {}
    return {name: f"{given}:{value}" if given else value}
