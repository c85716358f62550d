"""What each snapshot and each slower checkpoint takes from the training, and how long their writes last."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..specs.models import Cluster
from .devices import (
    DISK_COMMIT_S,
    DRAIN_CPU_S_PER_BYTE,
    PEER_CPU_S_PER_BYTE,
    Rates,
)
from .windows import Windows, storage_parameters


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores of a node whose passes run on its CPU."""

    count: int
    spare: int
    """Those that the passes leave to whoever stores."""

    def taken_s(self, work_s: float, beside_s: float = math.inf) -> float:
        """Return what work of so much processor time takes from the passes if it has `beside_s` to be done in.

        What the spare cores do meanwhile takes nothing. The rest stretches the passes by its time divided by the cores:
        an upper estimate, for they wait now and then.
        """
        return max(0.0, work_s - (self.spare * beside_s if self.spare else 0.0)) / self.count


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds per checkpoint."""

    copy_s: float
    """Copy of a rank's shard at the channel's full rate."""
    commit_lag_s: float
    """From an update until the snapshot of its state is whole."""
    write_s: float
    """Drain of one node's shards to disk, behind the training."""
    upload_s: float
    """Upload of one node's shards to an object store, read back."""
    snapshot_stall_s: float
    """Wait of the update for the copy."""
    snapshot_cpu_s: float
    """Time that the copy takes from passes on a CPU."""
    drain_cpu_s: float
    """Time that the drain takes from passes on a CPU."""

    send_s: float
    """Sending one node's shards to all its peers; 0 without a peer tier."""
    peer_cpu_s: float
    """Time that sending, and taking in what peers send, takes from passes on a CPU."""

    def slow_s(self, kind: str) -> float:
        """Time of one write into the tier `kind` (peer, disk, object)."""
        return {"peer": self.send_s, "object": self.upload_s}.get(kind, self.write_s)

    @property
    def snapshot_s(self) -> float:
        """What a snapshot costs the training."""
        return self.snapshot_stall_s + self.snapshot_cpu_s


def checkpoint_costs(
    shard_bytes: int,
    cluster: Cluster,
    windows: Windows,
    reached: Rates,
    copier_bytes_per_s: float,
    cores: Cores | None,
    replicas: int = 0,
) -> Costs:
    """Return the costs of one checkpoint.

    `copier_bytes_per_s` is the rate of a copier on a CPU, `cores` is None when the passes run on an accelerator,
    `replicas` are the copies that other nodes get.

    On an accelerator the copy is made by its copy engines and takes less than 2 % of the device memory's
    bandwidth: taken to cost nothing but a stall. On a CPU copies have the time of a step's windows on cores that are
    spare, drains and what goes to peers as long as they take.
    """
    node_bytes = shard_bytes * cluster.workers_per_node
    node_copy_s = node_bytes / copier_bytes_per_s
    forward, backward = storage_parameters(shard_bytes, windows.micro_batches, windows, ("memory",))
    return Costs(
        copy_s=shard_bytes / windows.bytes_per_s,
        commit_lag_s=windows.copied_s(shard_bytes, forward.bytes_per_window or 0, backward.bytes_per_window or 0),
        write_s=node_bytes / reached.disk_bytes_per_s + DISK_COMMIT_S,
        upload_s=2 * node_bytes / reached.object_bytes_per_s + reached.object_commit_s,
        snapshot_stall_s=windows.stall_s(shard_bytes),
        snapshot_cpu_s=cores.taken_s(node_copy_s, windows.window_s + windows.exchange_s) if cores else 0.0,
        drain_cpu_s=cores.taken_s(node_bytes * DRAIN_CPU_S_PER_BYTE) if cores else 0.0,
        send_s=replicas * shard_bytes / reached.network_bytes_per_s,
        peer_cpu_s=cores.taken_s(replicas * node_bytes * PEER_CPU_S_PER_BYTE) if cores else 0.0,
    )


def backlog_s(write_s: float, every: int, step_s: float) -> float:
    """Return how long the training waits per checkpoint when a tier cannot keep up with `every`."""
    return max(0.0, write_s - every * step_s)
