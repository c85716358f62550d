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
    core_flop_per_s: float | None = None
    """Matrix products in fp32 that one core was seen to make, in FLOP/s; None: the table's figure for training."""
    core_traffic_bytes_per_s: float | None = None
    """Memory traffic of element-wise work on one core; None: the table's."""
    accelerator_count: int = 0
    """Accelerators found; 0 also when the accelerator is only assumed."""
    assumed: tuple[str, ...] = ()
    """What was assumed because it could not be found out, in sentences."""
    omp_threads: int | None = None
    """What OMP_NUM_THREADS asks for; None: nothing."""

    def threads(self, workers: int) -> int:
        """Threads with which each of so many workers of the node computes on a CPU."""
        return self.omp_threads or threads_each(self.cpu_cores, workers)

    def spare_cores(self, workers: int) -> int:
        """Cores that the passes of so many workers leave to whoever stores."""
        return max(0, self.cpu_cores - workers * self.threads(workers))


def threads_each(cores: int, workers: int) -> int:
    """Threads that a worker is given where nobody asks for others: its share of the cores."""
    return max(1, cores // workers)


@dataclass(frozen=True, slots=True)
class Measured:
    """Times and rates that somebody measured; they replace the tables', and what is None is planned as before.

    A figure that the spec gives (a bandwidth, a restart time) wins over a measured one. Passes and update are those of
    one rank with the whole model, or, `spread`, those that each rank has as the strategy spreads it, with what it sends
    in them.
    """

    forward_s: float
    """One forward pass of a micro-batch."""
    backward_s: float
    """One backward pass of a micro-batch, without the exchange of gradients."""
    optimizer_s: float
    """One update, with clipping."""
    channel_bytes_per_s: float | None = None
    """Rate of a rank's snapshots into the memory tier, all that the copier does with them included."""
    exchange_s: float | None = None
    """Part of the gradients' exchange that no backward pass hides, per step."""
    disk_bytes_per_s: float | None = None
    """Rate of one node's durable writes to the disk tier."""
    object_bytes_per_s: float | None = None
    """Rate of one node to the object store, one way."""
    spread: bool = False
