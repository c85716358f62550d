"""What a plan needs of the device's and the node's memory, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass, fields

from .words import GIB, size

SLOTS = 3
"""Snapshots that a rank has room for: one being written, one whole, one being drained."""
SNAPSHOTS_KEPT = SLOTS - 1
"""Whole snapshots that remain while the next one is written."""
PEER_SLOTS = 2
"""More of them with a peer tier: the one that all peers have, kept until they have the next, and that one."""
REPLICA_SLOTS = 2
"""Copies of another rank's snapshots that a peer has room for: the newest whole one, and the one that arrives."""
RESERVED_BYTES = 1 * GIB
"""Assumed device memory that the runtime and the communication library take for themselves."""


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """Device memory of one rank by use, in bytes."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    casts_bytes: int
    """bf16 copies of the weights that autocast keeps during a pass."""
    gathered_bytes: int
    """Whole weights and gradients of the layers at work, where data parallel ranks divide them."""
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        """All parts."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes a plan needs, bytes there are, and whether the one fits into the other (None: not known)."""

    device_bytes_per_rank: int | None
    host_bytes_per_node: int | None
    """Slots, and on a CPU the model itself."""
    slot_bytes_per_node: int | None
    """Snapshots in tmpfs; part of the host bytes."""
    replica_bytes_per_node: int | None
    """Copies of other nodes' snapshots; part of the slot bytes."""
    parts: DeviceParts | None
    device_limit_bytes: int | None
    host_limit_bytes: int | None
    shm_free_bytes: int | None
    device_fits: bool | None
    host_fits: bool | None
    slots_fit: bool | None


def memory_need(
    *,
    parts: DeviceParts | None,
    shard_bytes: int | None,
    workers_per_node: int,
    device_limit_bytes: int | None,
    host_limit_bytes: int | None,
    shm_free_bytes: int | None,
    replicas: int = 0,
) -> MemoryNeed:
    """Return the need of one node of `workers_per_node` ranks.

    `shard_bytes` is 0 when no tier is kept, `device_limit_bytes` None when the device is the host's CPU, `replicas`
    the number of other nodes whose copies it keeps.
    """
    copies = None if shard_bytes is None else REPLICA_SLOTS * replicas * shard_bytes * workers_per_node
    own = SLOTS + (PEER_SLOTS if replicas else 0)
    slots = None if shard_bytes is None or copies is None else own * shard_bytes * workers_per_node + copies
    device = None if parts is None else parts.total_bytes
    on_host = 0 if device_limit_bytes is not None else None if device is None else device * workers_per_node
    host = None if slots is None or on_host is None else slots + on_host
    return MemoryNeed(
        device_bytes_per_rank=device,
        host_bytes_per_node=host,
        slot_bytes_per_node=slots,
        replica_bytes_per_node=copies,
        parts=parts,
        device_limit_bytes=device_limit_bytes,
        host_limit_bytes=host_limit_bytes,
        shm_free_bytes=shm_free_bytes,
        device_fits=None
        if device is None or device_limit_bytes is None
        else device + RESERVED_BYTES <= device_limit_bytes,
        host_fits=None if host is None or host_limit_bytes is None else host <= host_limit_bytes,
        slots_fit=None if slots is None or shm_free_bytes is None else slots <= shm_free_bytes,
    )


def _remedy(parts: DeviceParts | None) -> str:
    """What takes most of a device, and what makes that smaller."""
    if parts is None or parts.activations_bytes * 2 > parts.total_bytes:
        return "lower training.micro_batch_size, or use strategy.activation_checkpointing: full"
    if parts.gathered_bytes * 2 > parts.total_bytes:
        return "a pipeline keeps the weights of its layers whole: use more of strategy.pp or tp, and less dp_shard"
    return "divide the model over more ranks with strategy.dp_shard, tp or pp, or use a smaller one"


def memory_warnings(need: MemoryNeed) -> list[str]:
    """Say what does not fit and what to change."""
    lines = []
    if need.device_fits is False and need.device_bytes_per_rank and need.device_limit_bytes is not None:
        lines.append(
            f"device memory: a rank needs {size(need.device_bytes_per_rank)} and {size(RESERVED_BYTES)} for the "
            f"runtime, the device has {size(need.device_limit_bytes)}; {_remedy(need.parts)}"
        )
    if need.host_fits is False and need.host_bytes_per_node and need.host_limit_bytes is not None:
        lines.append(
            f"host memory: a node needs {size(need.host_bytes_per_node)}, it has {size(need.host_limit_bytes)}; "
            "use more nodes, fewer workers per node or a smaller model"
        )
    if need.slots_fit is False and need.slot_bytes_per_node and need.shm_free_bytes is not None:
        lines.append(
            f"tmpfs: snapshots need {size(need.slot_bytes_per_node)} per node, /dev/shm has "
            f"{size(need.shm_free_bytes)} free; give it more (in a container --shm-size) or use more nodes"
        )
    return lines
