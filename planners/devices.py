"""What the hardware can do: published peaks, and the share of them that training is assumed to reach.

Every figure under "assumed" below is an assumption that `--profile`, a run's own measurement or the spec replaces,
never a measurement of the machine at hand. The table of accelerators holds data sheets; none was ever measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..specs.models import Cluster, Spec
from .machine import Machine, Measured
from .words import GIB, plural, size

MODEL_FLOP_UTILISATION = 0.4
"""Assumed share of the dense peak that training reaches; published: 0.46 for PaLM 540B (Chowdhery et al. 2022,
arXiv:2204.02311, table 3), 0.38 to 0.43 for Llama 3 405B (Grattafiori et al. 2024, arXiv:2407.21783, table 4)."""
FP32_UTILISATION = 0.6
"""Assumed share of the fp32 peak: without tensor cores the same kernels wait less for memory."""
MEMORY_EFFICIENCY = 0.5
"""Assumed share of the device memory's bandwidth that the update's element-wise kernels reach."""
HOST_LINK_EFFICIENCY = 0.8
"""Assumed share of the link's raw rate that large copies to page-locked memory reach."""

CPU_FLOP_PER_S = 40e9
"""Assumed fp32 FLOP/s that training reaches per core of a machine that nobody has looked at."""
CPU_MATMUL_SHARE = 0.5
"""Assumed share of a core's large matrix products that training reaches (tried: 0.4 for 1.9 M parameters, 0.55 to 0.7
for 15 M, on an AVX-512 server)."""
CPU_TRAFFIC_SHARE = 0.5
"""Assumed share of a core's element-wise traffic that the update reaches beside other workers (tried: 0.4 to 0.6)."""
CPU_UPDATE_BYTES_PER_S = 10 * GIB
"""Assumed memory traffic of the update on a CPU (tried: 7.5 to 18 GiB/s)."""
CPU_COPY_BYTES_PER_S = 11 * GIB
"""Assumed rate of one thread's copy past the caches into tmpfs pages that were touched before (0.09 s per GiB by
`python -m tests.benchmarks.copier`, see engine/snapshot/copier.py)."""
CPU_DIGEST_BYTES_PER_S = 26 * GIB
"""Assumed rate of the digest of what was just copied and is still in a core's cache (the same: 0.130 s per GiB with
the copy)."""
CPU_FINITE_BYTES_PER_S = 32 * GIB
"""Assumed rate of the look for NaN and infinity in it (the same: 0.161 s per GiB with copy and digest)."""
COPY_ITEM_S = 28e-6
"""Assumed time of a copier for each piece of a tensor beside its bytes: some twenty calls from Python, whose lock the
passes want, too, on memory that no cache holds (tried: 10 µs with nothing beside it, 25 to 30 µs beside passes)."""
CPU_NODE_LINK_BYTES_PER_S = 0.5 * GIB
"""Assumed rate between two processes of a node, gloo over loopback beside passes that use all cores (tried: an
all-reduce of 60 MB by two workers on two cores took 106 ms longer than the passes alone)."""
CPU_NETWORK_BYTES_PER_S = 10e9 / 8
"""Assumed rate of a CPU node's network: 10 Gbit/s, shared by its workers."""

DIGEST_BYTES_PER_S = 16 * GIB
"""Assumed rate of the digest (xxh3) of what an accelerator has put into memory (tried: 17.6 GiB/s)."""

FINITE_BYTES_PER_S = 28 * GIB
"""Assumed rate of the look for NaN and infinity in it."""

DISK_BYTES_PER_S = 1 * GIB
"""Assumed rate of durable writes, and of reads, of one node."""
DISK_COMMIT_S = 0.03
"""Assumed time for creating, flushing and renaming the files of one checkpoint, whatever its size (tried: 33 ms at the
least of 40 of 0.6 MB, from the snapshot on, beside workers and others on two cores)."""
OBJECT_BYTES_PER_S = 200 * 10**6
"""Assumed rate of one node to or from an object store."""
OBJECT_COMMIT_S = 0.5
"""Assumed time of the requests beside the data of one checkpoint, whatever its size."""
PEER_CPU_S_PER_BYTE = 1.2 / GIB
"""Processor time of a node per byte of a copy that it sends (0.4 s per GiB were measured, by loopback) and of one that
it takes in (0.8, digests included), together."""
DRAIN_CPU_S_PER_BYTE = 0.4 / GIB
"""Processor time of the drainer per byte: written past the page cache, then read back with its digest and that of each
tensor (measured on two busy cores of a virtual machine, for 256 MiB to 1 GiB: 0.35 to 0.46 s per GiB by
`python -m tests.benchmarks.storage --mib 512 --blocks 5 --no-dcp`)."""

LAYER_LAUNCH_S = {"cpu": (9e-4, 9e-4), "gpu": (2e-4, 4e-4)}
"""Assumed least time of one layer's forward and backward pass in eager mode: some thirty operators at 5 to 10 µs each
on their way to a GPU; on a CPU, where they are made as well, 0.9 ms either way (tried: 1 to 8 layers of 32 wide)."""
CPU_UPDATE_TENSOR_S = 2e-5
"""Assumed time that clipping and update of one tensor on a CPU take beside its bytes (tried: 0.17 ms for the nine
tensors of such a layer)."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Published figures of one device; rates per second and direction, memory in decimal units as sold."""

    bf16_flop_per_s: float
    """Dense matrix products in bf16 (half of the figures with sparsity)."""
    fp32_flop_per_s: float
    """Matrix products in true fp32: PyTorch rounds none to TF32 unless it is told to, and dtrain does not tell it."""
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
        312e12, 19.5e12, 80 * 10**9, 2.039e12, 31.5e9, 300e9, 25e9,
        "NVIDIA A100 80GB SXM data sheet; DGX A100 data sheet (8 x 200 Gbit/s)",
    ),
    "h100": Accelerator(
        989.4e12, 67e12, 80 * 10**9, 3.35e12, 63e9, 450e9, 50e9,
        "NVIDIA H100 SXM data sheet; DGX H100 data sheet (8 x 400 Gbit/s)",
    ),
    "h200": Accelerator(
        989.4e12, 67e12, 141 * 10**9, 4.8e12, 63e9, 450e9, 50e9,
        "NVIDIA H200 SXM data sheet; DGX H200 data sheet (8 x 400 Gbit/s)",
    ),
    "b200": Accelerator(
        2.25e15, 75e12, 180 * 10**9, 8e12, 63e9, 900e9, 50e9,
        "NVIDIA Blackwell architecture brief (HGX B200); DGX B200 data sheet (8 x 400 Gbit/s)",
    ),
    "mi300x": Accelerator(
        1307.4e12, 163.4e12, 192 * 10**9, 5.3e12, 63e9, 448e9, 50e9,
        "AMD Instinct MI300X data sheet (7 x 64 GB/s links)",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rates:
    """What one rank, or for slower tiers one node, is taken to reach, per second."""

    flop_per_s: float
    update_bytes_per_s: float
    copy_bytes_per_s: float
    """Into the memory tier, digest and look for NaN included."""
    link_bytes_per_s: float | None
    """The link by which state leaves the device; None on a CPU, where a copy crosses none."""
    node_bytes_per_s: float
    """To another rank of the node."""
    network_bytes_per_s: float
    """To another node."""
    exchange_bytes_per_s: float
    """Of a ring over all ranks: between nodes each worker of a node carries a part of it."""
    sum_bytes_per_s: float | None
    """At which processors send and add gradients, so that no pass hides it; None: accelerators do that."""
    launch_s: tuple[float, float]
    """Least times of one layer's forward and backward pass."""
    update_tensor_s: float
    """Time that the update takes for each tensor beside its bytes."""
    device_memory_bytes: int | None
    """None on a CPU, whose device memory is the host's."""
    disk_bytes_per_s: float
    """One node's durable writes, and its reads."""
    object_bytes_per_s: float
    """One node to or from the object store."""
    object_commit_s: float = OBJECT_COMMIT_S
    """Time of one checkpoint in it beside its data."""


def rates(machine: Machine, cluster: Cluster, precision: str, measured: Measured | None = None) -> Rates:
    """Return the rates of one of `cluster.workers_per_node` ranks on a node like `machine`.

    What `cluster.hardware` gives comes first, then what was measured, then the tables.
    """
    table = _cpu_rates(machine, cluster) if machine.accelerator == "cpu" else _gpu_rates(machine, cluster, precision)
    given = cluster.hardware
    inside = _first(given.node_bandwidth, None, table.node_bytes_per_s)
    across = _first(given.network_bandwidth, None, table.network_bytes_per_s)
    memory = table.device_memory_bytes
    return replace(
        table,
        flop_per_s=_first(given.flops, None, table.flop_per_s),
        update_bytes_per_s=_first(given.memory_bandwidth, None, table.update_bytes_per_s),
        node_bytes_per_s=inside,
        network_bytes_per_s=across,
        exchange_bytes_per_s=inside if cluster.nodes == 1 else min(inside, across * cluster.workers_per_node),
        sum_bytes_per_s=table.sum_bytes_per_s and _first(given.node_bandwidth, None, table.sum_bytes_per_s),
        device_memory_bytes=memory if memory is None or given.device_memory == "auto" else given.device_memory,
        disk_bytes_per_s=_first(given.disk_bandwidth, _seen(measured).disk_bytes_per_s, table.disk_bytes_per_s),
        object_bytes_per_s=_first(given.object_bandwidth, _seen(measured).object_bytes_per_s, table.object_bytes_per_s),
    )


def with_folder(reached: Rates, cluster: Cluster, measured: Measured | None) -> Rates:
    """Return the rates where the object store is a folder (`file://`): it is as fast as a disk, and no request away."""
    rate = _first(cluster.hardware.object_bandwidth, _seen(measured).object_bytes_per_s, reached.disk_bytes_per_s)
    return replace(reached, object_bytes_per_s=rate, object_commit_s=DISK_COMMIT_S)


def _seen(measured: Measured | None) -> Measured:
    return measured or Measured(0.0, 0.0, 0.0)


def _first(given: Literal["auto"] | float, measured: float | None, table: float) -> float:
    return given if given != "auto" else measured or table


def with_digest(copy_bytes_per_s: float) -> float:
    """Return the rate of copying on a CPU, digesting and looking for NaN, one after the other on one thread."""
    return 1 / (1 / copy_bytes_per_s + 1 / CPU_DIGEST_BYTES_PER_S + 1 / CPU_FINITE_BYTES_PER_S)


def with_items(bytes_per_s: float, shard_bytes: int, items: int) -> float:
    """Return the rate at which a shard of so many pieces is copied over a channel that moves `bytes_per_s`."""
    return shard_bytes / (shard_bytes / bytes_per_s + items * COPY_ITEM_S) if shard_bytes else bytes_per_s


def _gpu_rates(machine: Machine, cluster: Cluster, precision: str) -> Rates:
    """Return the rates of a rank that has an accelerator of its own."""
    device = ACCELERATORS[machine.accelerator]
    link = HOST_LINK_EFFICIENCY * device.host_link_bytes_per_s
    share, peak = _compute(device, precision)
    return Rates(
        flop_per_s=share * peak,
        update_bytes_per_s=MEMORY_EFFICIENCY * device.memory_bytes_per_s,
        copy_bytes_per_s=1 / (1 / link + 1 / DIGEST_BYTES_PER_S + 1 / FINITE_BYTES_PER_S),
        link_bytes_per_s=link,
        node_bytes_per_s=device.node_link_bytes_per_s,
        network_bytes_per_s=device.network_bytes_per_s,
        exchange_bytes_per_s=device.node_link_bytes_per_s,
        sum_bytes_per_s=None,
        launch_s=LAYER_LAUNCH_S["gpu"],
        update_tensor_s=0.0,
        device_memory_bytes=device.memory_bytes,
        disk_bytes_per_s=DISK_BYTES_PER_S,
        object_bytes_per_s=OBJECT_BYTES_PER_S,
    )


def _compute(device: Accelerator, precision: str) -> tuple[float, float]:
    """Return the share of the peak that training reaches, and the peak."""
    if precision != "fp32":  # fp16 has the peak of bf16
        return MODEL_FLOP_UTILISATION, device.bf16_flop_per_s
    return FP32_UTILISATION, device.fp32_flop_per_s


def _cpu_rates(machine: Machine, cluster: Cluster) -> Rates:
    """Return the rates of a CPU rank: the node's network, and as many cores as it has threads, are shared evenly."""
    workers = cluster.workers_per_node
    share = machine.cpu_cores / workers
    own = min(1.0, share)
    return Rates(
        flop_per_s=_core_flop_per_s(machine) * min(share, machine.threads(workers)),
        update_bytes_per_s=own * _core_traffic_bytes_per_s(machine),
        copy_bytes_per_s=own * with_digest(CPU_COPY_BYTES_PER_S),
        link_bytes_per_s=None,
        node_bytes_per_s=CPU_NODE_LINK_BYTES_PER_S,
        network_bytes_per_s=CPU_NETWORK_BYTES_PER_S / workers,
        exchange_bytes_per_s=CPU_NODE_LINK_BYTES_PER_S,
        sum_bytes_per_s=CPU_NODE_LINK_BYTES_PER_S,
        launch_s=LAYER_LAUNCH_S["cpu"],
        update_tensor_s=CPU_UPDATE_TENSOR_S,
        device_memory_bytes=None,
        disk_bytes_per_s=DISK_BYTES_PER_S,
        object_bytes_per_s=OBJECT_BYTES_PER_S,
    )


def _core_flop_per_s(machine: Machine) -> float:
    return CPU_FLOP_PER_S if machine.core_flop_per_s is None else CPU_MATMUL_SHARE * machine.core_flop_per_s


def _core_traffic_bytes_per_s(machine: Machine) -> float:
    seen = machine.core_traffic_bytes_per_s
    return CPU_UPDATE_BYTES_PER_S if seen is None else CPU_TRAFFIC_SHARE * seen


def assumptions(
    spec: Spec,
    machine: Machine,
    by_table: bool,
    measured: Measured | None,
    reached: Rates,
    channel_bytes_per_s: float,
) -> list[str]:
    """Say in sentences which figures a plan rests on, and where each comes from; `by_table`: its times do.

    `channel_bytes_per_s` is the rate of a rank's storage channel.
    """
    given = spec.cluster.hardware
    lines = [] if measured is None else ["passes and update: measured"]
    if by_table:
        traffic = f"{size(reached.update_bytes_per_s)}/s of memory traffic per rank"
        lines = [_compute_basis(spec, machine, reached), f"update: {traffic}{_source(given.memory_bandwidth, None)}"]
    if spec.used_tiers:
        lines.append(_channel_basis(spec, machine, measured, channel_bytes_per_s))
    if spec.disk_tier is not None:
        source = _source(given.disk_bandwidth, _seen(measured).disk_bytes_per_s)
        lines.append(f"disk: {size(reached.disk_bytes_per_s)}/s per node, durable{source}")
    if spec.object_tier is not None:
        source = _source(given.object_bandwidth, _seen(measured).object_bytes_per_s)
        lines.append(f"object store: {size(reached.object_bytes_per_s)}/s per node, each object read back{source}")
    if spec.world_size > 1 and (by_table or (measured is not None and measured.exchange_s is None)):
        across = f", {size(reached.network_bytes_per_s)}/s per rank between nodes" if spec.cluster.nodes > 1 else ""
        lines.append(
            f"gradients: {size(reached.sum_bytes_per_s or reached.node_bytes_per_s)}/s per rank inside a node{across}"
        )
    return lines


def _channel_basis(spec: Spec, machine: Machine, measured: Measured | None, bytes_per_s: float) -> str:
    """Say at which rate a rank copies its snapshots, and who says so."""
    if spec.cluster.channels.storage.bandwidth != "auto":
        return f"storage channel: {size(bytes_per_s)}/s per rank (given)"
    where = "into tmpfs" if machine.accelerator == "cpu" else "over PCIe into page-locked memory"
    source = " (measured)" if _seen(measured).channel_bytes_per_s else ""
    return f"storage channel: {size(bytes_per_s)}/s per rank {where}, digest included{source}"


def _source(given: Literal["auto"] | float, measured: float | None) -> str:
    return " (given)" if given != "auto" else " (measured)" if measured else ""


def _compute_basis(spec: Spec, machine: Machine, reached: Rates) -> str:
    """Say where the passes' times come from."""
    if spec.cluster.hardware.flops != "auto":
        return f"passes: {reached.flop_per_s / 1e12:,.3g} TFLOP/s per rank (given)"
    if machine.accelerator == "cpu":
        seen = "" if machine.core_flop_per_s is None else ", half of what its matrix products reached just now"
        workers = spec.cluster.workers_per_node
        asked = "" if machine.omp_threads is None else f" with OMP_NUM_THREADS={machine.omp_threads} each"
        return (
            f"CPU: {_core_flop_per_s(machine) / 1e9:.0f} GFLOP/s per core{seen}, {plural(machine.cpu_cores, 'core')} "
            f"for {plural(workers, 'worker')}{asked}"
        )
    device = ACCELERATORS[machine.accelerator]
    share, peak = _compute(device, spec.training.precision)
    kind = spec.training.precision.removesuffix("-mixed")
    part = f"{100 * share:.0f} % of the dense {kind} peak of {peak / 1e12:,.3g} TFLOP/s"
    return f"{machine.accelerator}: {part} ({device.source})"
