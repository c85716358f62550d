"""What the planner is told about the hardware and, when somebody measured, about the model's own times."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """One node of the cluster; all nodes are taken to be alike."""

    cpu_cores: int
    """Cores that this process may use."""
    host_memory_bytes: int | None
    """Main memory of the node; None: not known."""
    shm_free_bytes: int | None
    """Free bytes of the tmpfs that holds the memory tier; None: not known."""
    accelerator: str
    """`cpu` or a name of `devices.ACCELERATORS`."""
    accelerator_count: int = 0
    """Accelerators found; 0 also when the accelerator is only assumed."""
    assumed: tuple[str, ...] = ()
    """What was assumed because it could not be found out, in sentences."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of one rank alone, without the exchange of gradients; they replace the tables'."""

    forward_s: float
    """One forward pass of a micro-batch."""
    backward_s: float
    """One backward pass of a micro-batch."""
    optimizer_s: float
    """One update, with clipping."""
    copy_bytes_per_s: float | None = None
    """Rate of a plain copy into the memory tier, without its digest; None: the table's."""
