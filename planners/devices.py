"""What the hardware can do: published peaks, and the share of them that training is assumed to reach.

Every figure under "assumed" below is an assumption that `--profile` or the spec replaces, never a measurement
of the machine at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..specs.models import Cluster, Spec
from .machine import Machine
from .words import GIB, plural, size

MODEL_FLOP_UTILISATION = 0.4
"""Assumed share of the dense peak that training reaches; published: 0.46 for PaLM 540B (Chowdhery et al. 2022,
arXiv:2204.02311, table 3), 0.38 to 0.43 for Llama 3 405B (Grattafiori et al. 2024, arXiv:2407.21783, table 4)."""
MEMORY_EFFICIENCY = 0.5
"""Assumed share of the device memory's bandwidth that the update's element-wise kernels reach."""
HOST_LINK_EFFICIENCY = 0.8
"""Assumed share of the link's raw rate that large copies to page-locked memory reach."""

CPU_FLOP_PER_S = 40e9
"""Assumed fp32 FLOP/s that training reaches per core (tried: 59 to 77 on one core of an AVX-512 server)."""
CPU_UPDATE_BYTES_PER_S = 10 * GIB
"""Assumed memory traffic of the update on a CPU (tried: 7.5 to 18 GiB/s)."""
CPU_COPY_BYTES_PER_S = 8 * GIB
"""Assumed rate of one thread's copy into tmpfs pages that were touched before."""
CPU_NODE_LINK_BYTES_PER_S = 2 * GIB
"""Assumed rate between two processes of a node (gloo over loopback)."""
CPU_NETWORK_BYTES_PER_S = 10e9 / 8
"""Assumed rate of a CPU node's network: 10 Gbit/s, shared by its workers."""

DIGEST_BYTES_PER_S = 16 * GIB
"""Assumed rate of the digest (xxh3) that the copier computes of every slice after copying it."""

DISK_BYTES_PER_S = 1 * GIB
"""Assumed rate of durable writes, and of reads, of one node."""
DISK_COMMIT_S = 0.05
"""Assumed time for creating, flushing and renaming the files of one checkpoint, whatever its size."""
OBJECT_BYTES_PER_S = 200 * 10**6
"""Assumed rate of one node to or from an object store."""
OBJECT_COMMIT_S = 0.5
"""Assumed time of the requests beside the data of one checkpoint, whatever its size."""
DRAIN_CPU_S_PER_BYTE = 0.2 / GIB
"""Assumed processor time of the drainer per byte (direct writes from tmpfs)."""

LAYER_LAUNCH_S = {"cpu": 3e-4, "gpu": 2e-4}
"""Assumed least time of one layer's forward pass in eager mode: some thirty operators at 5 to 10 µs each."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Published figures of one device; rates per second and direction, memory in decimal units as sold."""

    bf16_flop_per_s: float
    """Dense matrix products in bf16 (half of the figures with sparsity)."""
    fp32_flop_per_s: float
    """Dense matrix products on fp32 data as TF32."""
    memory_bytes: int
    """Device memory."""
    memory_bytes_per_s: float
    """Bandwidth of the device memory."""
    host_link_bytes_per_s: float
    """Raw rate of the PCIe x16 link to the host (PCI-SIG: 4.0 31.5 GB/s, 5.0 63 GB/s)."""
    node_link_bytes_per_s: float
    """Rate to the other devices of the node."""
    network_bytes_per_s: float
    """Network rate per device in the vendor's reference node."""
    source: str
    """Where the figures are published."""


ACCELERATORS: dict[str, Accelerator] = {
    "a100": Accelerator(
        312e12, 156e12, 80 * 10**9, 2.039e12, 31.5e9, 300e9, 25e9,
        "NVIDIA A100 80GB SXM data sheet; DGX A100 data sheet (8 x 200 Gbit/s)",
    ),
    "h100": Accelerator(
        989.4e12, 494.7e12, 80 * 10**9, 3.35e12, 63e9, 450e9, 50e9,
        "NVIDIA H100 SXM data sheet; DGX H100 data sheet (8 x 400 Gbit/s)",
    ),
    "h200": Accelerator(
        989.4e12, 494.7e12, 141 * 10**9, 4.8e12, 63e9, 450e9, 50e9,
        "NVIDIA H200 SXM data sheet; DGX H200 data sheet (8 x 400 Gbit/s)",
    ),
    "b200": Accelerator(
        2.25e15, 1.1e15, 180 * 10**9, 8e12, 63e9, 900e9, 50e9,
        "NVIDIA Blackwell architecture brief (HGX B200); DGX B200 data sheet (8 x 400 Gbit/s)",
    ),
    "mi300x": Accelerator(
        1307.4e12, 653.7e12, 192 * 10**9, 5.3e12, 63e9, 448e9, 50e9,
        "AMD Instinct MI300X data sheet (7 x 64 GB/s links)",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rates:
    """What one rank is assumed to reach, per second."""

    flop_per_s: float
    update_bytes_per_s: float
    copy_bytes_per_s: float
    """Into the memory tier, digest included."""
    exchange_bytes_per_s: float
    """Between ranks, over the slowest link of the ring."""
    launch_s: float
    """Least time of one layer's forward pass."""
    device_memory_bytes: int | None
    """None on a CPU, whose device memory is the host's."""


def rates(machine: Machine, cluster: Cluster, precision: str) -> Rates:
    """Return the rates of one of `cluster.workers_per_node` ranks on a node like `machine`."""
    if machine.accelerator == "cpu":
        return _cpu_rates(machine, cluster)
    device = ACCELERATORS[machine.accelerator]
    peak = device.bf16_flop_per_s if precision == "bf16-mixed" else device.fp32_flop_per_s
    return Rates(
        flop_per_s=MODEL_FLOP_UTILISATION * peak,
        update_bytes_per_s=MEMORY_EFFICIENCY * device.memory_bytes_per_s,
        copy_bytes_per_s=with_digest(HOST_LINK_EFFICIENCY * device.host_link_bytes_per_s),
        exchange_bytes_per_s=device.network_bytes_per_s if cluster.nodes > 1 else device.node_link_bytes_per_s,
        launch_s=LAYER_LAUNCH_S["gpu"],
        device_memory_bytes=device.memory_bytes,
    )


def with_digest(copy_bytes_per_s: float) -> float:
    """Return the rate of copying and then digesting, one after the other on one thread."""
    return 1 / (1 / copy_bytes_per_s + 1 / DIGEST_BYTES_PER_S)


def _cpu_rates(machine: Machine, cluster: Cluster) -> Rates:
    """Return the rates of a CPU rank: the node's cores and its network are shared evenly."""
    workers = cluster.workers_per_node
    across = CPU_NETWORK_BYTES_PER_S / workers
    return Rates(
        flop_per_s=CPU_FLOP_PER_S * machine.cpu_cores / workers,
        update_bytes_per_s=CPU_UPDATE_BYTES_PER_S * min(1.0, machine.cpu_cores / workers),
        copy_bytes_per_s=with_digest(CPU_COPY_BYTES_PER_S) * min(1.0, machine.cpu_cores / workers),
        exchange_bytes_per_s=across if cluster.nodes > 1 else CPU_NODE_LINK_BYTES_PER_S,
        launch_s=LAYER_LAUNCH_S["cpu"],
        device_memory_bytes=None,
    )


def assumptions(spec: Spec, machine: Machine, by_table: bool, measured_copy: bool) -> list[str]:
    """Say in sentences which of this file's figures a plan rests on; `by_table`: its times do."""
    lines = []
    cluster, precision, name = spec.cluster, spec.training.precision, machine.accelerator
    if by_table and name == "cpu":
        lines.append(
            f"CPU: {CPU_FLOP_PER_S / 1e9:.0f} GFLOP/s per core, {plural(machine.cpu_cores, 'core')} for "
            f"{plural(cluster.workers_per_node, 'worker')}"
        )
    elif by_table:
        device = ACCELERATORS[name]
        kind = "bf16" if precision == "bf16-mixed" else "TF32"
        peak = device.bf16_flop_per_s if precision == "bf16-mixed" else device.fp32_flop_per_s
        lines.append(
            f"{name}: {MODEL_FLOP_UTILISATION:.0%} of the dense {kind} peak of {peak / 1e12:.0f} TFLOP/s "
            f"({device.source})"
        )
    if spec.tiers and cluster.channels.storage.bandwidth == "auto" and not measured_copy:
        rate = rates(machine, cluster, precision).copy_bytes_per_s
        where = "into tmpfs" if name == "cpu" else "over PCIe into page-locked memory"
        lines.append(f"storage channel: {size(rate)}/s per rank {where}, digest included")
    if spec.disk_tier is not None:
        lines.append(f"disk: {size(DISK_BYTES_PER_S)}/s per node, durable")
    if spec.object_tier is not None:
        lines.append(f"object store: {size(OBJECT_BYTES_PER_S)}/s per node, each object read back")
    return lines
