"""The tiers of a spec: places for checkpoints, fastest first."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .block import Block
from .units import PositiveInt

URL_PATTERN = r"^((s3|gs|az)://[^/\s@?#]+(/[^\s@?#]*)?|file:///[^\s@?#]+)$"
ENDPOINT_PATTERN = r"^https?://[^/\s@?#]+(/[^\s@?#]*)?$"


class MemoryTier(Block):
    """Snapshots in this node's memory (tmpfs); survives the workers, not the node."""

    type: Literal["memory"]
    every: Literal["auto"] | PositiveInt = 1
    """Steps between snapshots, kept unless they cost several times `checkpoint.max_overhead`; auto: planned, then by
    what is measured."""


class Following(Block):
    """What the tiers have in common that are filled behind the training."""

    every: Literal["auto"] | PositiveInt = "auto"
    """Steps between checkpoints; auto: planned."""
    when_slow: Literal["auto", "skip", "wait"] = "auto"
    """A checkpoint is due while the one before is still on its way: leave it out, or let training wait (for a peer at
    most half of `heartbeat_timeout`); auto: wait if `every` is a number."""

    @property
    def waits(self) -> bool:
        """Tell whether training waits for this tier when a checkpoint is due and the one before is not done."""
        return self.when_slow == "wait" or (self.when_slow == "auto" and self.every != "auto")


class PeerTier(Following):
    """Snapshots copied into the memory of other nodes; survives the loss of up to `replicas` nodes."""

    type: Literal["peer"]
    replicas: PositiveInt = 1
    """Other nodes that get a copy of each node's snapshots."""


class SlowTier(Following):
    """What the tiers that the drainer fills have in common."""

    keep: PositiveInt = 3
    """Newest checkpoints to keep."""
    keep_every: PositiveInt | None = None
    """Also keep, for good, the checkpoints of steps that are a multiple of this, itself a multiple of `every`."""
    on_failure: Literal["continue", "stop"] = "continue"
    """The tier cannot be written: train on, trying again at longer and longer intervals, or stop the run."""


class DiskTier(SlowTier):
    """Checkpoints on a disk, committed by a manifest; survives a power cut."""

    type: Literal["disk"]
    path: Annotated[str, Field(min_length=1)] = "checkpoints"
    """Folder; relative paths lie in `output_dir`."""
    commit: Literal["auto", "rename", "manifest"] = "auto"
    """How a checkpoint appears: its folder is renamed, or its manifest is written last (for mounted buckets, where a
    rename is no single change); auto: by the kind of file system."""


class ObjectTier(SlowTier):
    """Checkpoints in an object store; survives the loss of the cluster. Needs `pip install 'dtrain[object]'`."""

    type: Literal["object"]
    url: Annotated[str, Field(pattern=URL_PATTERN)]
    """`s3://bucket/folder`, `gs://bucket/folder`, `az://container/folder` or `file:///folder`; credentials come from
    the environment, never from here."""
    endpoint: Annotated[str, Field(pattern=ENDPOINT_PATTERN)] | None = None
    """Address of a store that is not the cloud's own (MinIO, Ceph): `http://minio:9000`; for s3:// and az://."""
    region: Annotated[str, Field(min_length=1)] | None = None
    """Region of the bucket, for s3://; default: from the environment."""

    @property
    def is_folder(self) -> bool:
        """Tell whether it is a folder, and no store that is asked over a network."""
        return self.url.startswith("file://")


Tier = Annotated[MemoryTier | PeerTier | DiskTier | ObjectTier, Field(discriminator="type")]
